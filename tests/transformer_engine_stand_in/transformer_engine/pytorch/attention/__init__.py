import torch
from torch.nn.functional import scaled_dot_product_attention

from ..kernels import one_kernel
from ..module.base import TransformerEngineBaseModule
from . import rope as rope
from .rope import apply_rotary_pos_emb as apply_rotary_pos_emb


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
    ):
        super().__init__()
        assert attention_type == "self" and softmax_type == "vanilla" and window_size is None
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.num_gqa_groups_per_partition = (num_gqa_groups or num_attention_heads) // self.tp_size
        self.hidden_size_per_attention_head = kv_channels
        self.cp_group, self.softmax_scale, self.attention_dropout = cp_group, softmax_scale, attention_dropout
        self.register_load_state_dict_post_hook(_without_extra_state)

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group = cp_group

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
    ):
        qkv = query_layer, key_layer, value_layer
        assert len({tensor.dtype for tensor in qkv}) == 1, "Queries, keys and values must have the same data type!"
        assert key_layer.shape[-2] == self.num_gqa_groups_per_partition
        assert query_layer.shape[-1] == self.hidden_size_per_attention_head
        context = self.cp_group.size() if self.cp_group is not None else 1
        packed = qkv_format == "thd"
        if packed:
            bounds = cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded
            pad_between_seqs = _check_packed(qkv, attn_mask_type, bounds, context, pad_between_seqs)
            lengths = max_seqlen_q, max_seqlen_kv
            assert all(isinstance(length, int) for length in lengths), f"a kernel's argument is a number: {lengths}"
        else:
            assert all(tensor.dim() == 4 for tensor in qkv), "Queries, keys and values must be 4D tensors"
            assert attn_mask_type == "causal" and attention_mask is None
        if query_layer.device.type == "cuda":
            _check_backend(query_layer.dtype, packed, context, self.attention_dropout)
            # Kernels take layouts that rotated queries and keys beside a slice of the fused projection are not.
            return _Flash.apply(*(tensor.contiguous() for tensor in qkv)).flatten(-2)
        if packed:
            parts = [part // context for part in (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).tolist()]
            return _segments(qkv, parts, self.cp_group, self.softmax_scale).flatten(1)
        rows = [tensor.unbind(1) for tensor in qkv]
        out = [_segments(row, [len(row[0])], self.cp_group, self.softmax_scale) for row in zip(*rows, strict=True)]
        return torch.stack(out, 1).flatten(2)


def _without_extra_state(module, incompatible_keys):
    """Megatron's distributed checkpoints leave it out, and Transformer Engine does not miss it."""
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if "core_attention._extra_state" not in key]


def _check_packed(qkv, attn_mask_type, bounds, context, pad_between_seqs):
    """What Transformer Engine asserts of a packed row; returns whether there is padding between its sequences."""
    cu_seqlens_q, cu_seqlens_kv, q_padded, kv_padded = bounds
    assert all(tensor.dim() == 3 for tensor in qkv), (
        "Queries, keys and values must be 3D tensors when qkv_format = thd!"
    )
    assert "padding" in attn_mask_type, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
    assert cu_seqlens_q is not None and cu_seqlens_kv is not None, "cu_seqlens_q and cu_seqlens_kv can not be None"
    assert cu_seqlens_q.shape == cu_seqlens_kv.shape and cu_seqlens_q.dim() == 1
    assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32, "cu_seqlens must be in dtype torch.int32!"
    assert cu_seqlens_q.device == qkv[0].device, f"cu_seqlens on {cu_seqlens_q.device}, queries on {qkv[0].device}"
    assert context == 1 or None not in (q_padded, kv_padded), (
        "cu_seqlens_padded can not be None for context parallelism and qkv_format = 'thd'!"
    )
    if pad_between_seqs is None:
        pairs = ((q_padded, cu_seqlens_q), (kv_padded, cu_seqlens_kv))
        pad_between_seqs = any(p is not None and not torch.equal(p[:-1], own[:-1]) for p, own in pairs)
    return pad_between_seqs


def _check_backend(dtype, packed, context, dropout):
    """dot_product_attention/utils.py, get_attention_backend of 2.9, of what is asked for here."""
    fused = dtype in (torch.bfloat16, torch.float16)
    unfused = not packed and context == 1
    if not (fused or unfused):
        raise ValueError("No dot product attention backend is available for the provided inputs.")


class _Flash(torch.autograd.Function):
    """A flash kernel's shapes and memory: queries, keys, values, the result, and the log-sum-exp of each query."""

    @staticmethod
    def forward(ctx, query, key, value):
        out, lse = _launch_forward(query, key, value)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _launch_backward(grad.contiguous(), *ctx.saved_tensors)


@one_kernel
def _launch_forward(query, key, value):
    out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype, device=query.device)
    return out, torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)


@one_kernel
def _launch_backward(grad, query, key, value, out, lse):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _segments(qkv, lengths, group, scale):
    """[T, heads, D] each, `lengths` tokens of each sequence here -> [T, heads, D], causal within a sequence."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    size = group.size() if group is not None else 1
    if size == 1:
        parts = zip(*(tensor.split(lengths) for tensor in qkv), strict=True)
        return torch.cat([_attended(*part, None, scale) for part in parts])
    query, *pair = qkv
    by_rank = [gather_from_sequence_parallel_region(t, group=group).unflatten(0, (size, -1)) for t in pair]
    out = []
    for part, keys, values in zip(query.split(lengths), *(t.split(lengths, 1) for t in by_rank), strict=True):
        held = _positions(len(part) * size, size)
        order = held.flatten().argsort()
        mask = held[group.rank()][:, None] >= torch.arange(held.numel())
        out.append(_attended(part, keys.flatten(0, 1)[order], values.flatten(0, 1)[order], mask, scale))
    return torch.cat(out)


def _positions(length, size):
    """int64 [ranks, length / ranks]: rank i holds chunks i and 2 ranks - 1 - i of 2 ranks."""
    chunks = torch.arange(length).view(2 * size, -1)
    return torch.stack([torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for rank in range(size)])


def _attended(query, key, value, mask, scale):
    heads_first = [tensor.transpose(0, 1)[None] for tensor in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        *heads_first, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out[0].transpose(0, 1)


class _SplitAlongDim:
    @staticmethod
    def apply(mixed_x_layer, split_dim, split_size_or_sections, squeeze=False):
        return torch.split(mixed_x_layer, split_size_or_sections, split_dim)
