"""Rules about time and memory."""

from __future__ import annotations

import re

import numpy as np

from nemo_flashrl.config import load_saved
from nemo_flashrl.doctor.rule import Rule, last_steps, long_enough, recent, setting, steps_where
from nemo_flashrl.metrics.progress import END
from nemo_flashrl.plan.page import what_would_have_fitted
from nemo_flashrl.run.lock import in_use
from nemo_flashrl.run.record import RunRecord, last_starts

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _near_full(run: RunRecord) -> str:
    share = run.column("memory_peak_gib") / run.column("memory_total_gib")
    full = share > 0.94
    if not full.any():
        return ""
    return f"memory_peak_gib is {np.nanmax(share):.0%} of memory_total_gib at {steps_where(run, full)}"


def _fragmented(run: RunRecord) -> str:
    total = run.column("memory_total_gib")
    loose = (run.column("memory_reserved_gib") - run.column("memory_peak_gib")) / total
    retries = run.column("memory_retries")
    grown = len(retries) > 1 and retries[-1] > retries[0]
    if not (grown or recent(loose) > 0.2):
        return ""
    return (
        f"memory_retries went from {retries[0]:.0f} to {retries[-1]:.0f}; {recent(loose):.0%} of the device is "
        f"reserved but not allocated (memory_reserved_gib - memory_peak_gib, {last_steps(run)})"
    )


def _share_of_step(run: RunRecord, name: str) -> float:
    return recent(run.column(name) / np.maximum(run.column("step_seconds"), 1e-9))


def _trainer_waits(run: RunRecord) -> str:
    share = _share_of_step(run, "rollout_seconds")
    if not (long_enough(run) and share > 0.8):
        return ""
    return f"rollout_seconds is {share:.0%} of step_seconds at {last_steps(run)}: the trainer waits for rollouts"


def _rollouts_wait(run: RunRecord) -> str:
    name = "rollout_idle_seconds_during_training"
    share = _share_of_step(run, name)
    if not (long_enough(run) and setting(run, "rollout.mode") in ("async", "in_flight") and share > 0.5):
        return ""
    return f"{name} is {share:.0%} of step_seconds at {last_steps(run)}: rollouts wait for the trainer"


def _padding(run: RunRecord) -> str:
    share = recent(run.column("padding_share"))
    return f"padding_share is {share:.0%} at {last_steps(run)}, over 10%" if share > 0.1 else ""


def _slow_refit(run: RunRecord) -> str:
    share = _share_of_step(run, "refit_seconds")
    if not (long_enough(run) and share > 0.25):
        return ""
    return f"refit_seconds is {share:.0%} of step_seconds at {last_steps(run)}"


def _imbalance(run: RunRecord) -> str:
    share = recent(run.column("cost_imbalance"))
    if not (long_enough(run) and share > 0.15):
        return ""
    return f"cost_imbalance is {share:.2f} at {last_steps(run)}: ranks idle for that share of the mean rank's work"


def _no_recompute(run: RunRecord) -> str:
    asked = setting(run, "model.recompute", "none")
    missing = run.column("recompute_active") == 0
    if asked == "none" or not missing.any():
        return ""
    return f"model.recompute is {asked}, yet recompute_active is 0 at {steps_where(run, missing)}"


def _no_flash_attention(run: RunRecord) -> str:
    missing = run.column("flash_attention_active") == 0
    return f"flash_attention_active is 0 at {steps_where(run, missing)}" if missing.any() else ""


MACHINE_RULES = (
    Rule(
        "memory_full",
        "GPU memory nearly full: out of memory (OOM) is close",
        _near_full,
        ("microbatches too large", "activations stored that could be recomputed", "model parallelism too small"),
        "batching.max_tokens_per_microbatch lower, model.recompute=full, parallel.tensor up; see `flashrl plan`",
    ),
    Rule(
        "fragmentation",
        "GPU memory is fragmented",
        _fragmented,
        ("microbatches of varying shapes", "a device close to full"),
        f"set {ALLOCATOR}; batching.max_tokens_per_microbatch lower",
    ),
    Rule(
        "recompute_missing",
        "Activation recomputation is configured but not active",
        _no_recompute,
        ("a model class that ignores the setting", "the model is in evaluation mode"),
        "model.recompute=full with a model of the supported families",
    ),
    Rule(
        "flash_attention_missing",
        "Flash attention is not active",
        _no_flash_attention,
        (
            "Transformer Engine or flash-attn not installed",
            "NVTE_FLASH_ATTN=0, or an attention mask that it does not support",
        ),
        "use the NGC image; unset NVTE_FLASH_ATTN and NVTE_FUSED_ATTN; batching.layout=packed",
    ),
    Rule(
        "trainer_waits",
        "Rollout-bound: the trainer waits for rollouts",
        _trainer_waits,
        (
            "no episode runs while the trainer trains (rollout.mode=sync), and a batch waits for its slowest one",
            "too few rollout GPUs or servers",
            "slow tool calls in the environment",
        ),
        "more rollout servers; rollout.max_in_flight above rollout.batch_size; rollout.step_timeout lower",
        (
            (
                "rollout.mode=sync",
                "rollout=streaming (rollout.mode=in_flight, rollout.max_staleness=4), where a batch is the first "
                "episodes to end; then more rollout servers. rollout.max_in_flight above the batch changes nothing "
                "in mode sync",
            ),
        ),
    ),
    Rule(
        "rollouts_wait",
        "Trainer-bound: rollouts wait for the trainer",
        _rollouts_wait,
        ("more rollout GPUs than the trainer can keep busy", "a training step slowed by padding or small microbatches"),
        "move GPUs from rollouts to training; batching.max_tokens_per_microbatch up",
    ),
    Rule(
        "padding",
        "Too much padding",
        _padding,
        (
            "padded layout with very different lengths",
            "a token budget so large that short and long trajectories share a microbatch",
        ),
        "batching.layout=packed; or batching.max_tokens_per_microbatch lower",
        (
            (
                "batching.layout=packed",
                "parallel.context lower: each trajectory is padded to a multiple of it; longer trajectories lose less",
            ),
        ),
    ),
    Rule(
        "imbalance",
        "Load imbalance: data-parallel ranks wait for stragglers",
        _imbalance,
        ("too few microbatches to balance the lengths", "single trajectories longer than the token budget"),
        "rollout.batch_size up, batching.max_tokens_per_microbatch lower",
    ),
    Rule(
        "slow_refit",
        "Weight sync (refit) is slow",
        _slow_refit,
        ("weights sent over a slow network", "a very short training step"),
        "rollout servers on the trainer's network fabric; rollout.batch_size up, for fewer weight syncs",
    ),
)

# What ended the last start of a run, from the logs of its ranks.
DEVICE_MEMORY = re.compile(r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation")
HOST_MEMORY = re.compile(r"\bMemoryError|Cannot allocate memory|can't allocate memory|std::bad_alloc")
# Of a rank that ended because another one had, or because it was asked to.
FOLLOWED = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|NCCL|DistBackendError|SystemExit|Preempted")
STOPPED = re.compile(r"(Preempted|StoppedByMonitor|KeyboardInterrupt)\b")
FRAME = re.compile(r'  File "(.*)", line (\d+), in ')


def _ends(run: RunRecord) -> dict[int, str]:
    """Rank -> what its log says at its end, "" where that is nothing; no ranks where the run is still at work."""
    if in_use(run.folder):
        return {}
    ends = {}
    for rank, lines in last_starts(run.folder).items():
        said = [line.removeprefix(END) for line in lines if line.startswith(END)]
        if said != ["done"]:
            places = [FRAME.match(line) for line in lines]
            place = next((f" ({found[1]}:{found[2]})" for found in reversed(places) if found), "")
            ends[rank] = f"{said[0]}{place}" if said else ""
    return ends


def _matching(run: RunRecord, words: re.Pattern[str]) -> str:
    found = ((rank, end) for rank, end in _ends(run).items() if words.search(end))
    return next((f"rank {rank}: {end}" for rank, end in found), "")


def _killed(run: RunRecord) -> str:
    ends = _ends(run)
    silent = [str(rank) for rank, end in ends.items() if not end]
    if not silent or any(end and not FOLLOWED.search(end) for end in ends.values()):
        return ""
    return f"the log of rank {', '.join(silent)} breaks off: the process was killed, without a word of its own"


def _failed(run: RunRecord) -> str:
    ends = {rank: end for rank, end in _ends(run).items() if end and not STOPPED.match(end)}
    if any(words.search(end) for words in (DEVICE_MEMORY, HOST_MEMORY) for end in ends.values()) or _killed(run):
        return ""
    rank, end = min(ends.items(), key=lambda item: bool(FOLLOWED.search(item[1])), default=(0, ""))
    return f"rank {rank}: {end}" if end else ""


def _would_have_fitted(run: RunRecord) -> str:
    file = run.folder / "config.yaml"
    if not file.is_file():
        return ""
    config = load_saved(file)
    gpus = config.cluster.nodes * config.cluster.gpus_per_node or len(_ends(run))
    return what_would_have_fitted(config, gpus, _matching(run, DEVICE_MEMORY))


END_RULES = (
    Rule(
        "device_out_of_memory",
        "The run ended: out of memory on the GPU",
        lambda run: _matching(run, DEVICE_MEMORY),
        ("a microbatch of more tokens than fit", "weights, gradients and optimizer state leave no room"),
        "batching.max_tokens_per_microbatch lower, model.recompute=full; parallel.tensor or parallel.pipeline up; "
        "`flashrl plan CONFIG` tells what fits",
        change_first=_would_have_fitted,
    ),
    Rule(
        "host_out_of_memory",
        "The run ended: out of memory on the host",
        lambda run: _matching(run, HOST_MEMORY),
        ("more processes on a node than its memory holds", "a reference policy, which lives in host memory"),
        "more memory for the job; reference.mode=none; rollout.max_in_flight and rollout.batch_size lower",
    ),
    Rule(
        "killed",
        "The run ended: killed (SIGKILL: exit code 137, or -9 under torchrun)",
        _killed,
        ("the kernel's out-of-memory killer (`dmesg | grep -i 'killed process'`)", "a job's memory or time limit"),
        "out of memory: more memory for the job, reference.mode=none, rollout.max_in_flight lower; a time limit: rerun "
        "the same command, with checkpoint.every_steps above 0",
    ),
    Rule(
        "failed",
        "The run ended with an error",
        _failed,
        ("what the error says; the traceback is in logs/ of the run's folder",),
        "what the error names; then rerun the same command to resume",
    ),
)
