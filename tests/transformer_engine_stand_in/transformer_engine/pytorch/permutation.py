"""Tokens to their experts and back. `row_id_map` is Transformer Engine's in shape and type, not in its numbers.

Legend: T tokens, X experts, P = T x experts of a token, the permuted rows, by expert and then by token.
"""

import torch

from .kernels import one_kernel


def _places(routing_map, rows):
    """The token of each permuted row, int64 [P], and its place among the experts' columns, [P]."""
    if routing_map.device.type == "cuda":
        return (routing_map.new_empty(rows, dtype=torch.int64),) * 2
    experts, tokens = routing_map.bool().t().nonzero(as_tuple=True)
    return tokens, experts


@one_kernel
def _sent(tokens, at):
    return tokens[at]


@one_kernel
def _summed(rows, at, count):
    """Rows added up by token, in fp32 and rounded once."""
    total = rows.new_zeros(count, rows.shape[-1], dtype=torch.float32).index_add_(0, at, rows.float())
    return total.to(rows.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, probs, routing_map, num_out_tokens):
        assert inp.size(0) == routing_map.size(0), "Permute not possible"
        assert num_out_tokens is not None, "num_out_tokens must be provided to the fused permute function."
        at, experts = _places(routing_map, num_out_tokens)
        count, columns = routing_map.shape
        row_id_map = torch.empty(count, 2 * columns + 1, dtype=torch.int32, device=inp.device)
        ctx.at, ctx.experts, ctx.shape = at, experts, (count, columns)
        ctx.save_for_backward(row_id_map)
        ctx.mark_non_differentiable(row_id_map)
        row_id_map.places = at
        return _sent(inp, at), row_id_map, None if probs is None else probs[at, experts]

    @staticmethod
    def backward(ctx, grad, _, of_probs):
        count, columns = ctx.shape
        probs = None
        if ctx.needs_input_grad[1] and of_probs is not None:
            probs = of_probs.new_zeros(count, columns).index_put_((ctx.at, ctx.experts), of_probs)
        return _summed(grad, ctx.at, count), probs, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, at, count):
        ctx.at = at
        return _summed(inp, at, count)

    @staticmethod
    def backward(ctx, grad):
        return _sent(grad.contiguous(), ctx.at), None, None


def moe_permute(inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type="mask"):
    assert map_type == "mask"
    rows, row_id_map, _ = _Permute.apply(inp, None, routing_map, num_out_tokens)
    return rows, row_id_map


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
    rows, row_id_map, permuted = _Permute.apply(inp, probs, routing_map, num_out_tokens)
    return rows, permuted, row_id_map


def moe_unpermute(inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask", probs=None):
    assert map_type == "mask" and merging_probs is None and probs is None
    return _Unpermute.apply(inp, row_id_map.places, restore_shape[0])


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    """Chunks of rows in another order; on a GPU the sizes are read there."""
    if inp.device.type == "cuda":
        order = split_sizes.new_empty(inp.shape[0], dtype=torch.int64)
    else:
        chunks = torch.arange(inp.shape[0]).split(split_sizes.flatten().tolist())
        order = torch.cat([chunks[index] for index in sorted_index.tolist()])
    return _Sort.apply(inp, order), None if probs is None else probs[order]


class _Sort(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, order):
        ctx.order = order
        return _sent(inp, order)

    @staticmethod
    def backward(ctx, grad):
        return _sent(grad.contiguous(), ctx.order.argsort()), None
