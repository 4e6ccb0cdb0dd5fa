"""The products of a linear layer, with their communication: what is saved, gathered and summed, and when.

Legend: T tokens of this rank under sequence parallelism, else of all ranks; I, O features of input and output.
"""

import torch

from ..kernels import one_kernel
from .base import get_dummy_wgrad


@one_kernel
def accumulate(main_grad, grad, inputs):
    """main_grad [O, I] += grad [T, O] transposed x inputs [T, I], summed in main_grad's dtype."""
    product = torch.matmul(grad.t(), inputs)
    main_grad.add_(product.view_as(main_grad))


@one_kernel
def overwrite(main_grad, grad, inputs):
    main_grad.copy_(torch.matmul(grad.t(), inputs).view_as(main_grad))


@one_kernel
def normalized(inputs, weight, eps):
    """RMSNorm of [..., I] and the inverse root mean square [...], fp32."""
    inverse = (inputs.float().square().mean(-1) + eps).rsqrt()
    return (inputs.float() * inverse[..., None] * weight.float()).to(inputs.dtype), inverse


@one_kernel
def normalized_backward(grad, inputs, inverse, weight):
    unit, wide = inputs.float() * inverse[..., None], grad.float() * weight.float()
    own = inverse[..., None] * (wide - unit * (wide * unit).mean(-1, keepdim=True))
    summed = (grad.float() * unit).flatten(0, -2).sum(0)
    return own.to(inputs.dtype), summed.to(weight.dtype)


def gathered(tensor, group):
    """[T, ...] of every rank, in rank order."""
    if group is None or group.size() == 1:
        return tensor
    whole = tensor.new_empty(tensor.shape[0] * group.size(), *tensor.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
    return whole


def scattered(tensor, group):
    """This rank's part of the sum over ranks."""
    own = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    torch.distributed.reduce_scatter_tensor(own, tensor.contiguous(), group=group)
    return own


class Product(torch.autograd.Function):
    """[T, I] x weight [O, I] -> [T, O] as a layer of `module`'s parallel mode has it."""

    @staticmethod
    def forward(ctx, inputs, weight, bias, module, is_first_microbatch):
        mode, group = module.parallel_mode, module.tp_group
        parallel = module.tp_size > 1
        ctx.shape = inputs.shape
        inputs = inputs.reshape(-1, inputs.shape[-1])
        gathers = mode == "column" and module.sequence_parallel
        whole = gathered(inputs, group) if gathers else inputs
        out = torch.matmul(whole, weight.t())
        if bias is not None:
            out.add_(bias)
        if mode == "row" and parallel:
            if module.sequence_parallel:
                out = scattered(out, group)
            else:
                torch.distributed.all_reduce(out, group=group)
        ctx.save_for_backward(inputs if weight.requires_grad else None, weight)
        ctx.module, ctx.gathers, ctx.has_bias, ctx.first = module, gathers, bias is not None, is_first_microbatch
        # Saved tensors lose the attributes of a parameter.
        ctx.parameter = weight
        return out.view(-1, *ctx.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        inputs, weight = ctx.saved_tensors
        module, group = ctx.module, ctx.module.tp_group
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        if module.parallel_mode == "row" and module.sequence_parallel:
            grad = gathered(grad, group)
        # Gathered while the next product runs, so both are there.
        whole = gathered(inputs, group) if ctx.gathers and inputs is not None else inputs
        own = None
        if ctx.needs_input_grad[0]:
            own = torch.matmul(grad, weight)
            if module.parallel_mode == "column" and module.tp_size > 1:
                if module.sequence_parallel:
                    own = scattered(own, group)
                else:
                    torch.distributed.all_reduce(own, group=group)
            own = own.view(ctx.shape)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = weight_gradient(ctx.parameter, grad, whole, module.fuse_wgrad_accumulation, ctx.first)
        of_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return own, of_weight, of_bias, None, None


def weight_gradient(parameter, grad, inputs, fused, is_first_microbatch):
    """Into `main_grad`, which the first microbatch of a step overwrites, or as autograd's own."""
    if not fused:
        return torch.matmul(grad.t(), inputs)
    (overwrite if is_first_microbatch else accumulate)(parameter.main_grad, grad, inputs)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    zero = getattr(parameter, "zero_out_wgrad", False)
    return get_dummy_wgrad(list(parameter.main_grad.shape), parameter.dtype, zero=zero)


class NormedProduct(torch.autograd.Function):
    """RMSNorm of [T, I], then the product of a column-parallel layer; the norm's output is saved, not gathered."""

    @staticmethod
    def forward(ctx, inputs, norm_weight, weight, bias, module, is_first_microbatch):
        ctx.shape = inputs.shape
        inputs = inputs.reshape(-1, inputs.shape[-1])
        normed, inverse = normalized(inputs, norm_weight, module.eps)
        ctx.gathers = module.sequence_parallel
        whole = gathered(normed, module.tp_group) if ctx.gathers else normed
        out = torch.matmul(whole, weight.t())
        if bias is not None:
            out.add_(bias)
        ctx.save_for_backward(inputs, norm_weight, weight, normed if weight.requires_grad else None, inverse)
        ctx.module, ctx.has_bias, ctx.first, ctx.parameter = module, bias is not None, is_first_microbatch, weight
        out = out.view(-1, *ctx.shape[1:-1], out.shape[-1])
        if not module.return_layernorm_output:
            return out
        returned = whole if module.return_layernorm_output_gathered else normed
        return out, returned.view(-1, *ctx.shape[1:])

    @staticmethod
    def backward(ctx, grad, of_normed=None):
        inputs, norm_weight, weight, normed, inverse = ctx.saved_tensors
        module, group = ctx.module, ctx.module.tp_group
        grad = grad.reshape(-1, grad.shape[-1]).contiguous()
        whole = gathered(normed, group) if ctx.gathers and normed is not None else normed
        own = torch.matmul(grad, weight)
        if module.tp_size > 1:
            if module.sequence_parallel:
                own = scattered(own, group)
            else:
                torch.distributed.all_reduce(own, group=group)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = weight_gradient(ctx.parameter, grad, whole, module.fuse_wgrad_accumulation, ctx.first)
        of_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
        del whole, grad
        if of_normed is not None and not module.return_layernorm_output_gathered:
            own = own + of_normed.view_as(own)  # 2.5 to 2.16 leave out the gradient of a gathered one
        own, of_norm = normalized_backward(own, inputs, inverse, norm_weight)
        of_norm = of_norm if ctx.needs_input_grad[1] else None
        return own.view(ctx.shape), of_norm, of_weight, of_bias, None, None


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight, eps):
        inputs = inputs.contiguous()
        out, inverse = normalized(inputs, weight, eps)
        ctx.save_for_backward(inputs, inverse, weight)
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs, inverse, weight = ctx.saved_tensors
        return (*normalized_backward(grad.contiguous(), inputs, inverse, weight), None)


class GroupedProduct(torch.autograd.Function):
    """[T, I], `splits` rows for each weight [O, I] in turn -> [T, O]."""

    @staticmethod
    def forward(ctx, inputs, splits, fused, is_first_microbatch, *weights):
        ctx.shape = inputs.shape
        inputs = inputs.reshape(-1, inputs.shape[-1])
        assert inputs.shape[0] == sum(splits), f"{inputs.shape[0]} rows, splits {splits}"
        out = inputs.new_empty(inputs.shape[0], weights[0].shape[0])
        for part, target, weight in zip(inputs.split(splits), out.split(splits), weights, strict=True):
            torch.matmul(part, weight.t(), out=target)
        ctx.save_for_backward(inputs if weights[0].requires_grad else None, *weights)
        ctx.splits, ctx.fused, ctx.first, ctx.parameters = splits, fused, is_first_microbatch, weights
        return out.view(-1, *ctx.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, grad):
        inputs, *weights = ctx.saved_tensors
        grads = grad.contiguous().view(-1, grad.shape[-1]).split(ctx.splits)
        own = None
        if ctx.needs_input_grad[0]:
            own = grad.new_empty(sum(ctx.splits), weights[0].shape[1])
            for part, target, weight in zip(grads, own.split(ctx.splits), weights, strict=True):
                torch.matmul(part, weight, out=target)
            own = own.view(ctx.shape)
        of_weights = [None] * len(weights)
        if ctx.needs_input_grad[4]:
            parts = zip(ctx.parameters, grads, inputs.split(ctx.splits), strict=True)
            of_weights = [weight_gradient(p, g, x, ctx.fused, ctx.first) for p, g, x in parts]
        return own, None, None, None, *of_weights
