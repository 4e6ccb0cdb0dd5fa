"""A second set of weights that costs no second model on the device: fp32, on the host, this rank's shard alone.

To be used it changes places with the policy, a piece at a time, and changes back: each set's bits go where the other's
were. Beside the two there is one piece in flight.

    fp32 policy    the two are exchanged as they are
    bf16 policy    the device takes the fp32 value rounded to 16 bits; the host keeps the policy's 16 bits beside the 16
                   low bits of the fp32 value, from which and from the rounded value it is put together again

Buffers and `_extra_state` (the statistics of FP8) belong to the place, not to a set of weights: they stay as they are.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from nemo_flashrl import platform

KEY = "reference"  # prefix of the tensors in a checkpoint
_LOW, _HALF = 0xFFFF, 0x8000  # the 16 bits that bf16 has not, and half of what they count


class ShadowWeights:
    """fp32 copy of a model's parameters, made now.

    Args:
        model: this rank's Megatron model, fp32 or bf16; its parameters are read and written in place.

    Raises:
        ValueError: a parameter of another dtype.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        for name, parameter in self.parameters.items():
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"reference: {name} is {parameter.dtype}; it can follow float32 or bfloat16 alone")
        self.values = {n: platform.host_tensor(p.shape, torch.float32) for n, p in self.parameters.items()}
        self.distance = math.nan  # ||policy - shadow|| / ||policy|| over the whole model, when last swapped in
        self.follow(beta=0.0)

    def _pieces(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """(policy, shadow) of one parameter, in flat pieces."""
        policy, shadow = self.parameters[name].data.view(-1), self.values[name].view(-1)
        piece = platform.copied_numbers()
        return zip(policy.split(piece), shadow.split(piece), strict=True)

    @torch.no_grad()
    def follow(self, beta: float) -> None:
        """shadow = beta * shadow + (1 - beta) * policy, in fp32; beta = 0 copies."""
        for policy, shadow in itertools.chain.from_iterable(map(self._pieces, self.parameters)):
            if beta == 0:
                shadow.copy_(policy, non_blocking=True)
            else:
                average = shadow.to(policy.device, non_blocking=True)
                shadow.copy_(average.lerp_(policy.float(), 1 - beta), non_blocking=True)
        platform.synchronize()

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within, the model holds these weights, in its own dtype; after it, bit for bit the policy's again.

        A collective over the model-parallel ranks. Parameters must be whole (no gather of the distributed optimizer
        outstanding), and nothing may train within.
        """
        exchanged = []
        squares = torch.zeros(2, dtype=torch.float64, device=platform.device())
        try:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    counted = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
                    for policy, shadow in self._pieces(name):
                        apart = _put_in(policy, shadow)
                        exchanged.append((policy, shadow))
                        if counted:  # by no other rank
                            squares += apart
            torch.distributed.all_reduce(squares, group=parallel_state.get_model_parallel_group())
            difference, norm = squares.sqrt().tolist()
            self.distance = difference / max(norm, torch.finfo(torch.float32).tiny)
            yield
        finally:
            with torch.no_grad():
                for policy, shadow in exchanged:
                    _take_out(policy, shadow)
            platform.synchronize()

    def sharded_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """The shadow as tensors of a Megatron distributed checkpoint, by parameter name, under keys `reference.*`.

        The places are the model's own, so that a load at other parallel sizes is a reshard. A vocabulary that is padded
        to another size loads too: what pads has probability 0. Loading fills the tensors or returns new ones; either
        way `load` takes the result.

        Args:
            model: the Megatron model under all wrappers that the shadow was made of.
        """
        parameters = list(self.parameters.values())
        places = get_param_id_to_sharded_param_map(model.sharded_state_dict(), parameters)
        assert len(places) == len(parameters), "a parameter that a checkpoint of the model does not hold"
        tensors = {}
        for index, (name, value) in enumerate(self.values.items()):
            tensor = make_sharded_optimizer_tensor(places[index], value, prefix=KEY)
            if isinstance(tensor, ShardedTensor) and name.endswith(("word_embeddings.weight", "output_layer.weight")):
                tensor = replace(tensor, allow_shape_mismatch=True)
            tensors[name] = tensor
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what was saved: this rank's tensors by parameter name, as a load of `sharded_state_dict` gives them."""
        missing = sorted(self.values.keys() - tensors.keys())
        if missing:
            raise ValueError(f"the checkpoint's reference policy lacks {missing[0]} and {len(missing) - 1} more")
        for name, value in self.values.items():
            value.copy_(tensors[name])


def _squares(policy: Tensor, shadow: Tensor) -> Tensor:
    """(squared distance, squared norm), float64 [2]."""
    norms = [torch.linalg.vector_norm(values, dtype=torch.float32) for values in (policy - shadow, policy)]
    return torch.stack(norms).double().square()


def _put_in(policy: Tensor, shadow: Tensor) -> Tensor:
    """Exchange [n] and [n]; returns their squared distance and the policy's squared norm."""
    incoming = shadow.to(policy.device, copy=True, non_blocking=True)
    squares = _squares(policy, incoming)
    if policy.dtype == torch.float32:
        shadow.copy_(policy, non_blocking=True)
        policy.copy_(incoming)
        return squares
    bits, policy_bits = incoming.view(torch.int32), policy.view(torch.int16)
    kept = policy_bits.to(torch.int32).bitwise_left_shift_(16).bitwise_or_(bits & _LOW)
    policy_bits.copy_(bits.add_(_HALF).bitwise_right_shift_(16))
    shadow.view(torch.int32).copy_(kept, non_blocking=True)
    return squares


def _take_out(policy: Tensor, shadow: Tensor) -> None:
    """Undo `_put_in`."""
    incoming = shadow.to(policy.device, copy=True, non_blocking=True)
    if policy.dtype == torch.float32:
        shadow.copy_(policy, non_blocking=True)
        policy.copy_(incoming)
        return
    kept, rounded = incoming.view(torch.int32), policy.view(torch.int16)
    bits = rounded.to(torch.int32)
    bits.sub_((kept >> 15).bitwise_and_(1))  # where it was rounded away from zero
    bits.bitwise_left_shift_(16).bitwise_or_(kept & _LOW)
    rounded.copy_(kept.bitwise_right_shift_(16))
    shadow.view(torch.int32).copy_(bits, non_blocking=True)
