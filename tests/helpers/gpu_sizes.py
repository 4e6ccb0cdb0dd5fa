"""Sizes and budgets of what runs on a GPU, real (tests/gpu) or fake (tests/gpu_shapes): one place for both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

PLAN_TOLERANCE = 0.05  # of a peak, against `flashrl plan`
LLAMA3_8B_HEAD = {"tokens": 32768, "hidden": 4096, "vocab": 128256}
HEAD_SYNCS = {"gated": 3, "one pass": 2, "logprob": 2}  # of a microbatch
HEAD_FLOORS = 1.25  # time of the head, in that of the products that it needs

# Host syncs that a step may have, and each of its microbatches, by file and line. What else waits is named with its
# line; the head's are counted together.
HOST_SYNCS = {
    ("megatron/core/optimizer/clip_grads.py", "total_norm.item()"): (1, 0),
    ("megatron/core/models/common/embeddings/rotary_pos_embedding.py", "self.inv_freq.to("): (1, 0),  # once in a run
    ("megatron/core/rerun_state_machine.py", "if result_rejected"): (4, 0),  # one for each kind of gradient buffer
    ("megatron/core/pipeline_parallel/p2p_communication.py", "shape_tensor.tolist()"): (0, 2),
    ("megatron/core/pipeline_parallel/p2p_communication.py", "shape_tensor = torch.tensor("): (0, 2),
    ("nemo/lightning/megatron_parallel.py", "reduced = torch.tensor(0.0"): (1, 0),  # where there is no loss
    ("nemo_flashrl/data/datamodule.py", "value.to(device)"): (0, 12),  # before the first of them runs
    ("nemo_flashrl/algorithms/tokens.py", "if torch.stack(list(bad.values())).any()"): (0, 1),
    ("nemo_flashrl/algorithms/tokens.py", "if bad.any()"): (0, 2),  # ratios, and entropies where there are some
}
HEAD = "nemo_flashrl/ops/"


def over_budget(syncs: Iterable[Sequence], microbatches: int) -> list[str]:
    """Host syncs of a step beyond the budget, a line each; `syncs` are (file, text of the line, kind, count)."""
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for file, text, kind, count in syncs:
        place = (HEAD, "") if file.startswith(HEAD) else (file, text)
        key = next((key for key in BUDGET if key[0] == place[0] and key[1] in place[1]), None)
        if key is None:
            found.append(f"{count} x {kind} at {file}: {text}")
        else:
            counts[key] += count
    for key, count in counts.items():
        of_step, of_microbatch = BUDGET[key]
        allowed = of_step + of_microbatch * microbatches
        if count > allowed:
            found.append(f"{count} at {key[0]}: {key[1]}, {allowed} allowed")
    return found


BUDGET = {**HOST_SYNCS, (HEAD, ""): (0, HEAD_SYNCS["gated"])}

# The checks of `make gpu-check`: the sizes of each and of QUICK=1.
ONE_GPU = ["cluster.nodes=1", "cluster.gpus_per_node=1", "parallel.tensor=1", "parallel.sequence=false"]
STEPS = {  # experiment, overrides, layers of which as many are taken as the device holds
    "1b": ("math_qwen2_5_1_5b", [*ONE_GPU, "batching.max_tokens_per_microbatch=8192"], (28,)),
    "8b": (
        "llama3_8b_32k",
        [*ONE_GPU, "model.context_length=16384", "batching.max_tokens_per_microbatch=16384"],
        (32, 24, 16, 12, 8, 4, 2),
    ),
}
QUICK_LAYERS, FAKE_LAYERS = 8, 2  # at most
HEAD_EXACT = {"tokens": 4096, "hidden": 1024, "vocab": 32_000, "chunk": 512}
HEAD_SPEED, QUICK_HEAD_SPEED = LLAMA3_8B_HEAD | {"tokens": 16384}, LLAMA3_8B_HEAD | {"tokens": 8192}
SWAPPED = {"layers": 32, "width": 2048}
LAYERS = {"layers": 4, "hidden": 2048, "lengths": (2048, 4096, 1500, 548)}  # a packed row, or padded ones
QUICK_LAYERS_LENGTHS = (700, 1024, 324)
# Two chunks say all that fake CUDA can.
FAKE_HEAD_EXACT, FAKE_HEAD_SPEED = HEAD_EXACT | {"tokens": 1024}, LLAMA3_8B_HEAD | {"tokens": 2048}
REFIT = {"tensors": 16, "width": 4096}
SAVED_LAYERS = 4  # of the 1b

# Seconds: of the whole, and of each check, after which it is ended and reported so. What is left of the whole bounds
# each.
WHOLE, QUICK_WHOLE = 480.0, 180.0
LIMITS = {
    "exactness": 60.0,
    "kernels": 60.0,
    "speed": 90.0,
    "peak": 45.0,
    "waits": 45.0,
    "attention": 75.0,
    "experts": 75.0,
    "swap": 60.0,
    "step": 120.0,
    "refit": 60.0,
    "checkpoint": 120.0,
}
