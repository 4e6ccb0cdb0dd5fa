"""What a pass over the output layer takes, on paper: pure arithmetic, used to plan a job before it starts."""

from __future__ import annotations

from dataclasses import dataclass

# Of one chunk's fp32 logits on a GPU, where no size is given.
LOGITS_BYTES = 2**28
# Below it, on Hopper, the sum of the weight's gradient takes longer to read and write than its product to form.
FEWEST_GPU_TOKENS = 1024
CPU_TOKENS = 512


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """Bytes a tensor-parallel rank needs beyond hidden, weight and its `main_grad`, by what holds them."""

    logits: int
    hidden_gradient: int
    weight_gradient: int
    handed_gradient: int  # when the others but two are gone
    chunk_states: int
    token_numbers: int
    naive: int  # autograd over full logits, for comparison

    @property
    def peak(self) -> int:
        formed = max(self.logits + self.chunk_states, self.handed_gradient)
        return formed + self.hidden_gradient + self.weight_gradient + self.token_numbers


def picked_chunk_tokens(shard_rows: int, *, on_gpu: bool = True) -> int:
    """Tokens C of a chunk where none are given, for `shard_rows` = V / TP vocabulary rows on a rank.

    A chunk reads and writes the fp32 sum of the weight's gradient once, 8 V H / TP bytes, under a product of
    2 C V H / TP FLOP. At F FLOP/s and B bytes/s the product takes longer from C = 4 F / B tokens on, whatever the
    shape: from 980 at 700 TFLOP/s and 85% of 3.35 TB/s. A hundred small kernels a chunk want more of it where a rank's
    vocabulary is small. So on a GPU: as many tokens as `LOGITS_BYTES` of logits hold, 4 C V / TP, a power of two, and
    no fewer than `FEWEST_GPU_TOKENS`. On a CPU logits that stay in its caches count more.
    """
    if not on_gpu:
        return CPU_TOKENS
    return max(FEWEST_GPU_TOKENS, 1 << (LOGITS_BYTES // (4 * shard_rows)).bit_length() - 1)


def policy_head_memory(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    tensor_parallel: int = 1,
    chunk_tokens: int = 1024,
    element_bytes: int = 2,
    sequence_parallel: bool = True,
    direct_weight_gradient: bool = True,
    logits_budget_bytes: int = 0,
) -> HeadMemory:
    """Peak of a policy loss, T = tokens of a microbatch, C = chunk_tokens, e = element_bytes, R = TP or 1:

        logits            4 C V / TP               one chunk, fp32, whatever the weights are; behind a gate as many
                                                   whole chunks as logits_budget_bytes holds, if that is more than one
        hidden gradient   e T H / R                R = TP under sequence parallelism, else 1
        weight gradient   0, or 4 V H / TP         0 where it is summed into main_grad
        handed gradient   0, or e V H / TP         that sum rounded for autograd, where weights are not fp32
        chunk states      C H (4 + e)              a chunk's hidden gradient in fp32, its scaled hidden states
                        + C H (2 e + 4 / TP)       sequence parallel, TP > 1: this chunk's and the next one's hidden
                                                   states gathered, the reduced gradient
        token numbers     8 T                      log-probs, and the loss's own vector

    naive is 2 x 4 T V / TP: fp32 logits and their gradient, at the least. Temporaries are left out: a 128th of the
    logits on a GPU; there, without Triton, up to four blocks of logits of 32 MiB; without apex, one of the gradient.
    """
    ranks = tensor_parallel
    shards = ranks if sequence_parallel else 1
    chunk = min(chunk_tokens, tokens)
    states = chunk * hidden_size * (4 + element_bytes)
    if shards > 1:
        states += chunk * hidden_size * (2 * element_bytes) + chunk * hidden_size * 4 // ranks
    matrix = vocab_size * hidden_size // ranks
    chunk_bytes = 4 * chunk * vocab_size // ranks
    num_held = min(-(-tokens // chunk), max(1, logits_budget_bytes // chunk_bytes))
    return HeadMemory(
        logits=min(num_held * chunk_bytes, 4 * tokens * vocab_size // ranks),
        hidden_gradient=element_bytes * tokens * hidden_size // shards,
        weight_gradient=0 if direct_weight_gradient else 4 * matrix,
        handed_gradient=0 if direct_weight_gradient or element_bytes == 4 else element_bytes * matrix,
        chunk_states=states,
        token_numbers=8 * tokens,
        naive=2 * 4 * tokens * vocab_size // ranks,
    )
