"""Memory of a job before it starts: bytes of one rank of each pipeline stage, by what holds them.

Legend: T = tokens of a microbatch on one context-parallel rank, e = bytes of an element, t = tensor-parallel size,
H hidden, Q and K widths of query and key, A and G heads of query and key, D head size, F width of the MLP, X experts,
of which a token goes to k, r rank of LoRA; t' = t under sequence parallelism, else 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nemo_flashrl.ops.memory import picked_chunk_tokens, policy_head_memory
from nemo_flashrl.weights.model_shape import ModelShape

FLOAT = 4
LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job runs; defaults are those of a GPU job of this package."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1  # ranks of a stage over which the experts of a layer are spread
    lora_rank: int = 0  # 0: all weights are trained
    lora_targets: tuple[str, ...] = LAYERS
    sequence: bool = True  # sequence parallelism; counts where tensor > 1
    precision: str = "bf16"  # | "fp32"
    recompute: str = "none"  # | "selective" | "full"
    distributed_optimizer: bool = True  # optimizer state spread over data and context ranks
    reference: str = "none"  # | "frozen" | "hard" | "ema": an fp32 copy in host memory
    head_chunk: int | None = None  # None: picked
    head_logits_budget: int = 64 * 2**20
    vocab_divisible_by: int = 128
    microbatches: int = 8  # of one optimizer step, per data-parallel rank
    moments: str = "fp32"  # | "bf16": Adam's two
    gradients: str = "fp32"  # | "bf16"
    offload: float = 0.0  # share of the optimizer that the host holds
    fp8: bool = False  # weights gathered in FP8: one byte each, and their transposes
    fused_kernels: bool = True  # Transformer Engine and flash attention; False: torch's own, as on a CPU

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def optimizer_shares(self) -> tuple[int, int]:
        """Ranks that share the optimizer's state of a dense weight, and of an expert's."""
        copies = self.data * self.context
        return copies, copies if self.expert == 1 else self.tensor * copies // self.expert

    @property
    def element(self) -> int:
        return 2 if self.precision == "bf16" else 4


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank; `device` is their peak: in the head, in a layer's backward pass or in the optimizer's step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int  # of them: a layer that is whole in its own backward pass alone
    layer: int  # temporaries of a layer's backward pass
    head: int
    step: int  # temporaries of the optimizer's step
    host_reference: int
    host_optimizer: int
    host_save: int  # while a checkpoint is written, on the first of the ranks that share an optimizer's state
    host_load: int  # while one is read, on each rank

    @property
    def device(self) -> int:
        working = self.activations + max(self.layer, self.head - self.recomputed)
        return self.weights + self.gradients + self.optimizer + max(working, self.step)

    @property
    def host(self) -> int:
        return self.host_reference + self.host_optimizer


def stage_memory(shape: ModelShape, layout: Layout, stage: int, tokens: int) -> StageMemory:
    """One rank of pipeline stage `stage`, for microbatches of `tokens` tokens (all context ranks together).

    weights    e bytes a parameter
    gradients  4 a trained one: Megatron's DDP sums them in fp32 (grad_reduce_in_fp32); 2 in bf16
    optimizer  8 a trained one: Adam's two moments in fp32 (4 in bf16), and 4 for the fp32 weights where the model is
               bf16 (Rajbhandari 2020); the distributed optimizer divides them by data x context ranks, an expert's by
               the ranks that hold it, of tensor x data x context
      offload  of the host's share nothing; of what stays 4 more beside bf16 gradients, which are widened
    step       8 a trained one with bf16 moments: FusedAdam of Transformer Engine before 2.13 widens all of them
    host       4 a parameter of a reference; 16 an offloaded one: fp32 weight, gradient and moments
      save     12 a trained one more, the ranks' state in fp32, on the first of them; and while it is gathered 20, of
               which 12 for the rank's own share alone, or while it is written 12, copies, and its part of the weights
      load     12 a trained one, into which a rank reads, and where others hold the same as much for what they exchange;
               where they do not, for an MLP's gate and up projections, which are put together again

    LoRA trains its factors alone. Experts are counted as if each got as many tokens as the others.
    """
    pipeline, tensor = layout.pipeline, layout.tensor
    dense = shape.stage_parameters(stage, pipeline, tensor, layout.vocab_divisible_by)
    experts = shape.expert_parameters(pipeline, tensor, layout.expert)
    adapters = shape.adapter_parameters(layout.lora_targets, layout.lora_rank, pipeline, tensor)
    count = dense + experts + adapters
    trained, trained_experts = (adapters, 0) if layout.lora_rank else (dense, experts)
    dense_shares, expert_shares = layout.optimizer_shares if layout.distributed_optimizer else (1, 1)
    mlp = 0 if layout.lora_rank or shape.experts else shape.layers // pipeline * 3 * shape.ffn * shape.hidden // tensor
    shared = ((trained, mlp, dense_shares), (trained_experts, trained_experts, expert_shares))
    kinds = [_optimizer(n, shares, layout) for n, _, shares in shared]
    optimizer, step, host_optimizer = map(sum, zip(*kinds, strict=True))
    host_save, host_load = _checkpoint(shared, count, layout) if layout.distributed_optimizer else (0, 0)
    own = -(-tokens // layout.context)
    return StageMemory(
        weights=count * layout.element,
        gradients=(trained + trained_experts) * (2 if layout.gradients == "bf16" else FLOAT),
        optimizer=optimizer,
        activations=stage_activations(shape, layout, stage, own),
        recomputed=_recomputed(shape, layout, own),
        layer=_layer_at_work(shape, layout, stage, own),
        head=_head(shape, layout, own) if stage == pipeline - 1 else 0,
        step=step,
        host_reference=0 if layout.reference == "none" else count * FLOAT,
        host_optimizer=host_optimizer,
        host_save=host_save,
        host_load=host_load,
    )


def _checkpoint(shared: tuple[tuple[int, int, int], ...], count: int, layout: Layout) -> tuple[int, int]:
    """Host memory while `count` parameters are written and read; `shared`: those trained, of MLPs, ranks of a state."""
    copies = layout.data * layout.context
    state = sum(12 * n for n, *_ in shared)
    gathered = sum(20 * n + 12 * -(-n // shares) for n, _, shares in shared)
    written = max(state, (state + count * layout.element) // copies)  # weights are written where least else is
    again = sum(12 * n if min(copies, shares) > 1 else 8 * mlp for n, mlp, shares in shared)
    reference = 0 if layout.reference == "none" or copies == 1 else count * FLOAT
    return max(gathered, state + written), state + again + reference


def _optimizer(trained: int, shares: int, layout: Layout) -> tuple[int, int, int]:
    """Bytes that one of `shares` ranks holds for `trained` parameters: state, temporaries of a step, on the host."""
    per_parameter = 2 * (2 if layout.moments == "bf16" else FLOAT) + (FLOAT if layout.precision == "bf16" else 0)
    widened = 2 * FLOAT if layout.moments == "bf16" else 0
    if not layout.offload:
        return -(-trained * per_parameter // shares), -(-trained * widened // shares), 0
    own = -(-trained // shares)
    moved = int(own * layout.offload)  # whole parameters, so that the host has at least its share
    per_parameter += FLOAT if layout.gradients == "bf16" else 0
    return (own - moved) * per_parameter, 0, moved * 4 * FLOAT


def head_chunk_tokens(shape: ModelShape, layout: Layout) -> int:
    """Tokens whose logits the head holds at a time."""
    rows = shape.padded_vocab(layout.vocab_divisible_by, layout.tensor) // layout.tensor
    return layout.head_chunk or picked_chunk_tokens(rows, on_gpu=layout.fused_kernels)


def _head(shape: ModelShape, layout: Layout, tokens: int) -> int:
    return policy_head_memory(
        tokens,
        shape.hidden,
        shape.padded_vocab(layout.vocab_divisible_by, layout.tensor),
        tensor_parallel=layout.tensor,
        chunk_tokens=head_chunk_tokens(shape, layout),
        element_bytes=layout.element,
        sequence_parallel=layout.sequence and layout.tensor > 1,
        direct_weight_gradient=layout.gradients == "fp32" or layout.lora_rank > 0,
        logits_budget_bytes=layout.head_logits_budget,
    ).peak


def stage_activations(shape: ModelShape, layout: Layout, stage: int, tokens: int) -> int:
    """What autograd keeps, of all microbatches in flight: min(M, P - stage) of them under 1F1B (Narayanan et al. 2021).

    With full recomputation a layer keeps its input alone, and one layer at a time is whole (Korthikanti et al. 2022).
    """
    layers = shape.layers // layout.pipeline
    in_flight = min(layout.microbatches, layout.pipeline - stage)
    width = shape.hidden // (layout.tensor if layout.sequence else 1)
    stored = layers * _layer_bytes_per_token(shape, layout)
    if layout.recompute == "full":
        stored = layers * layout.element * width
    if stage == 0 and not layout.lora_rank:
        stored += 8  # token ids, for the embedding's gradient
    if stage == layout.pipeline - 1:  # the last norm: its input, its root mean square, and unfused the normalised input
        shards = layout.tensor if layout.sequence else 1
        stored += layout.element * width * (1 if layout.fused_kernels or layout.lora_rank else 2) + FLOAT // shards
    return in_flight * tokens * stored + _recomputed(shape, layout, tokens)


def _recomputed(shape: ModelShape, layout: Layout, tokens: int) -> int:
    whole = replace(layout, recompute="none")
    return tokens * _layer_bytes_per_token(shape, whole) if layout.recompute == "full" else 0


def _layer_at_work(shape: ModelShape, layout: Layout, stage: int, tokens: int) -> int:
    """The backward pass of the last layer, where its MLP needs most.

        gradient      e H / t'              of the layer's output; with a pipeline also that of the microbatch before
        MLP, second   e (H + F / t)         gradients of its output, gathered (else no H), and of its input
          activation  e 2 F / t             of its gate and of its other half, F / t of what was kept being gone
          first       e (2 H + H / t' - F / t)   gathered input, its gradient, and that summed; all 3 F / t are gone
        dummies       e of the weights      what autograd is handed for fused weight gradients, one for each shape

    Of experts F is k times as wide, and H the rows that they get, k H / t'; spread ones hold these four times in the
    forward pass: sent, received, and both again in the order of the experts. The last norm is gone by then.

    An adapter beside the second layer has a gradient of its input as wide as the layer's own. Beside the first it needs
    most in the forward pass, which full recomputation repeats there: 6 F / t of outputs, the layer's, the adapter's and
    that scaled, and the norm's, H / t', when nothing of what the activation keeps, 3 F / t, is there.
    """
    e, t = layout.element, layout.tensor
    shards = t if layout.sequence else 1
    adapted = layout.lora_targets if layout.lora_rank else ()
    outer, wide, gathered = shape.hidden // shards, shape.ffn // t, shape.hidden * (shards > 1)
    second, first = gathered + wide, gathered + shape.hidden + outer * (shards > 1) - wide
    if shape.experts:
        wide, rows = wide * shape.experts_per_token, _expert_rows(shape, layout)
        second, first = max(rows + wide, 4 * rows * (layout.expert > 1)), 2 * rows - wide
    if "linear_fc2" in adapted:
        second += wide
    width = (2 if layout.pipeline > 1 else 1) * outer + max(second, 2 * wide, first)
    if "linear_fc1" in adapted:
        width = max(width, (layout.recompute == "full") * outer + 3 * wide + outer * (shards > 1))
    work = tokens * e * width
    if stage == layout.pipeline - 1:
        work -= tokens * (e * outer * (1 if layout.fused_kernels or layout.lora_rank else 2) + FLOAT // shards)
    if layout.lora_rank or not layout.fused_kernels:
        return work
    one_expert = 3 * shape.ffn * shape.hidden // (t if layout.expert == 1 else 1) if shape.experts else 0
    return work + e * (shape.layer_parameters(t) + one_expert)


def _layer_bytes_per_token(shape: ModelShape, layout: Layout) -> int:
    """Korthikanti et al. 2022, section 4, recounted for a gated MLP, grouped queries, RMSNorm and no dropout.

        norms      2 (input, output)        e (4 H / t') + 8 / t'
        attention  q, k, v, output          e (2 Q + 2 K) / t + 4 A / t     the last for flash attention's log-sum-exp
          norm of q and k: their input      e (Q + K) / t + 4 (A + G) / t
        MLP        up and gate, product     e (3 F) / t                     for every expert that a token goes to
          experts: their input, the router  e k H / t' + (9 X + 20 k) / t'    H whole where they are cut

    Kernels of torch keep more: the normalised input of each norm, cosine and sine of each rotation, the attention's
    output a second time, k apart from the fused qkv, and silu and its product twice, an expert's thrice. Selective
    recomputation drops what attention keeps beside its inputs and its output.
    """
    e, t = layout.element, layout.tensor
    shards = t if layout.sequence else 1
    norms = e * 4 * shape.hidden // shards + 2 * FLOAT // shards
    attention = e * (2 * shape.query + 2 * shape.key) // t + FLOAT * shape.heads // t
    if shape.qk_norm:
        attention += e * (shape.query + shape.key) // t + FLOAT * (shape.heads + shape.groups) // t
    if not layout.fused_kernels:
        norms += e * 2 * shape.hidden // shards
        attention += e * (2 * shape.query + shape.key) // t + 4 * FLOAT * shape.head_size
        if shape.qk_norm and shape.groups > t:  # queries are copied out from between several groups' keys and values
            attention += e * shape.query // t
    if layout.recompute == "selective":
        # Fused, the values are kept where they are, inside the whole projection, and not copied out.
        attention += e * (shape.query + shape.key) // t if layout.fused_kernels else -e * shape.query // t
        attention -= FLOAT * shape.heads // t
    stored = norms + attention + _mlp_bytes_per_token(shape, layout, shards)
    return stored + (_lora_bytes_per_token(shape, layout, shards) if layout.lora_rank else 0)


def _mlp_bytes_per_token(shape: ModelShape, layout: Layout, shards: int) -> int:
    if not shape.experts:
        return layout.element * (3 if layout.fused_kernels else 5) * shape.ffn // layout.tensor
    chosen = shape.experts_per_token
    inner = layout.element * chosen * (3 if layout.fused_kernels else 6) * shape.ffn // layout.tensor
    return inner + layout.element * _expert_rows(shape, layout) + (9 * shape.experts + 20 * chosen) // shards


def _expert_rows(shape: ModelShape, layout: Layout) -> int:
    """Width of what goes to the experts; cut over tensor ranks, each gets the rows of all of these."""
    shards = layout.tensor if layout.sequence and layout.expert > 1 else 1
    return shape.experts_per_token * shape.hidden // shards


def _lora_bytes_per_token(shape: ModelShape, layout: Layout, shards: int) -> int:
    """More than without: what goes between the factors of a target, e r, and its input gathered over t'. Less: the
    input of each layer that is no target; unfused, the normalised inputs, which a norm's own gradient takes."""
    e, t, targets = layout.element, layout.tensor, layout.lora_targets
    more = e * layout.lora_rank * len(targets)
    for name in ("linear_qkv", "linear_fc1"):
        is_expert = shape.experts and name == "linear_fc1"  # its input goes to the router too, which keeps it
        if name in targets:
            more += e * shape.hidden - e * shape.hidden // shards
        elif not is_expert:
            more -= e * shape.hidden // shards
    if "linear_fc2" not in targets:
        more -= e * shape.ffn * (shape.experts_per_token if shape.experts else 1) // t
    if not layout.fused_kernels:
        more -= 2 * e * shape.hidden // shards + (0 if "linear_proj" in targets else e * shape.query // t)
    return more
