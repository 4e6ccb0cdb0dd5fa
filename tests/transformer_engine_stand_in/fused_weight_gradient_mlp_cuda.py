"""Stands in for apex's extension, which NeMo and Megatron look for by name."""

from transformer_engine.pytorch.module.products import accumulate


def wgrad_gemm_accum_fp32(input, grad_output, main_grad):
    """main_grad += grad_output transposed x input, summed in fp32."""
    accumulate(main_grad, grad_output.flatten(0, -2), input.flatten(0, -2))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
