import torch

from ..kernels import one_kernel


def _turned(tensor):
    first, second = tensor.chunk(2, -1)
    return torch.cat((-second, first), -1)


@one_kernel
def _rotated(tensor, freqs):
    """[.., heads, D] by the angles [.., 1, D], in fp32."""
    wide = tensor.float()
    return (wide * freqs.cos() + _turned(wide) * freqs.sin()).to(tensor.dtype)


@one_kernel
def _unrotated(grad, freqs):
    wide = grad.float()
    scaled = wide * freqs.sin()
    first, second = scaled.chunk(2, -1)
    return (wide * freqs.cos() + torch.cat((second, -first), -1)).to(grad.dtype)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, freqs, cu_seqlens, cp_size, cp_rank):
        ctx.known = cu_seqlens, cp_size, cp_rank
        ctx.save_for_backward(freqs)
        return _rotated(tensor, _angles(tensor, freqs, *ctx.known))

    @staticmethod
    def backward(ctx, grad):
        (freqs,) = ctx.saved_tensors
        return _unrotated(grad, _angles(grad, freqs, *ctx.known)), None, None, None, None


def _angles(tensor, freqs, cu_seqlens, cp_size, cp_rank):
    """Of each position of `tensor`; on a GPU the kernel looks them up itself."""
    if tensor.device.type == "cuda":
        return freqs[:1] if cu_seqlens is None else freqs[:1, 0]
    if cu_seqlens is None:
        return freqs[: tensor.shape[0]]
    lengths = ((cu_seqlens[1:] - cu_seqlens[:-1]) // cp_size).tolist()
    return torch.cat([_of_rank(freqs, length, cp_size, cp_rank) for length in lengths])[:, 0]


def _of_rank(freqs, length, cp_size, cp_rank):
    if cp_size == 1:
        return freqs[:length]
    half, whole = length // 2, length * cp_size
    return torch.cat(
        [freqs[cp_rank * half : (cp_rank + 1) * half], freqs[whole - (cp_rank + 1) * half : whole - cp_rank * half]]
    )


def apply_rotary_pos_emb(
    t,
    freqs,
    tensor_format="sbhd",
    start_positions=None,
    interleaved=False,
    fused=False,
    cu_seqlens=None,
    cp_size=1,
    cp_rank=0,
):
    assert fused and not interleaved and start_positions is None
    assert tensor_format != "thd" or cu_seqlens is not None, "cu_seqlens must not be None when tensor_format is 'thd'."
    assert freqs.device == t.device and (cu_seqlens is None or cu_seqlens.device == t.device)
    assert freqs.shape[-1] == t.shape[-1], "partial rotation is not stood in for"
    return _Rope.apply(t, freqs.float(), cu_seqlens, cp_size, cp_rank)
