import torch
from fused_adam import FusedAdam as FusedAdam

from ..kernels import one_kernel


class FusedSGD(torch.optim.SGD): ...


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


@one_kernel
def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().view(1), norms if per_tensor else None


@one_kernel
def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
