import torch

from ..kernels import one_kernel

cast_to_fp8 = None


@one_kernel
def general_gemm(A, B, workspace, out_dtype=None, layout="TN", out=None, bias=None, **_):
    """cuBLAS's, column-major: TN is B A', NN is B A, NT is B' A."""
    dtype = out_dtype or B.dtype
    left, right = B.to(dtype), A.to(dtype)
    product = torch.mm(left.t() if layout[1] == "T" else left, right.t() if layout[0] == "T" else right)
    return (product if bias is None else product + bias.to(dtype),)
