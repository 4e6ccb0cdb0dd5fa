"""bf16 moments and gradients, an optimizer on the host: what Megatron's own optimizers hold and compute."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from processes import run_ranks
from published_models import LLAMA_8B, MIXTRAL_8X7B
from safetensors.torch import load_file
from tiny import random_trajectories, write_model

from nemo_flashrl.cli import main
from nemo_flashrl.config import load
from nemo_flashrl.plan.devices import DEVICES
from nemo_flashrl.plan.fitting import changes_that_fit, check_layout, fits, peak
from nemo_flashrl.plan.memory import Layout, stage_memory
from nemo_flashrl.preflight import model as preflight
from nemo_flashrl.weights.model_shape import ModelShape, model_shape

VOCAB_SIZE, LEARNING_RATE = 131, 1e-3
OVERRIDES = [  # two steps of the whole learning rate, no clipping, three microbatches
    *("model.precision=bf16", "trainer.steps=2", f"optimizer.learning_rate={LEARNING_RATE}"),
    *("optimizer.warmup_steps=0", "optimizer.max_grad_norm=1e6", "batching.max_tokens_per_microbatch=100"),
]
CASES = {  # processes, settings of the optimizer, the plan's layout
    "as it is": (1, {}, {}),
    "bf16 moments": (2, {"moments_dtype": "bf16"}, {"moments": "bf16"}),
    "bf16 gradients": (1, {"gradients_dtype": "bf16"}, {"gradients": "bf16"}),
    "offloaded": (1, {"offload_fraction": 1.0}, {"offload": 1.0}),
    "half offloaded, bf16 gradients": (
        2,
        {"offload_fraction": 0.5, "gradients_dtype": "bf16"},
        {"offload": 0.5, "gradients": "bf16"},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("optimizer")
    write_model(folder / "model", "qwen2", vocab_size=VOCAB_SIZE)
    (folder / "batch.pkl").write_bytes(pickle.dumps(random_trajectories(6, VOCAB_SIZE)))
    return folder


def steps(folder: Path, out: Path, processes: int, overrides: list[str], device: bool = True, **places) -> list[dict]:
    """What each rank found: bytes, and the weights and gradients of each step under Hugging Face's names."""
    arguments = (folder / "model", folder / "batch.pkl", out, VOCAB_SIZE, *OVERRIDES, *overrides)
    run_ranks(processes, "optimizer_on_host", *arguments, device=device, **places)
    return [torch.load(out.with_suffix(f".{rank}")) for rank in range(processes)]


def adam(start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """float64, betas of the rehearsal, no weight decay."""
    config = load("rehearsal", ["output=x", "model.path=x"]).optimizer
    value, m, v = start.double(), 0.0, 0.0
    for step, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m, v = config.beta1 * m + (1 - config.beta1) * g, config.beta2 * v + (1 - config.beta2) * g * g
        root = (v / (1 - config.beta2**step)).sqrt() + 1e-8
        value = value - LEARNING_RATE * (m / (1 - config.beta1**step) / root + config.weight_decay * value)
    return value


@pytest.mark.parametrize("case", CASES)
def test_what_megatron_holds_and_computes(case: str, folder: Path, tmp_path: Path) -> None:
    """Bytes: over all ranks the plan's to the byte; of a share that is offloaded, to the parameter that makes it whole.

    Weights: those of Adam in float64 on the same gradients, rounded once; bf16 moments are 2^-9 off each.
    """
    processes, settings, layout = CASES[case]
    found = steps(
        folder, tmp_path / "out", processes, [f"optimizer.{name}={value}" for name, value in settings.items()]
    )
    shape = model_shape(json.loads((folder / "model/config.json").read_text()))
    plan = stage_memory(shape, Layout(data=processes, fused_kernels=False, **layout), 0, 100)
    for name in ("weights", "gradients"):
        assert [rank["bytes"][name] for rank in found] == [getattr(plan, name)] * processes, name
    largest = 16 * max(shape.padded_vocab(128, 1), 2 * shape.ffn) * shape.hidden
    whole = layout.get("offload", 0) in (0, 1)
    for name, sign in (("optimizer", -1), ("host_optimizer", 1)):
        more = sign * (sum(rank["bytes"][name] for rank in found) - processes * getattr(plan, name))
        assert more == 0 if whole else 0 <= more <= processes * largest, name
    if processes == 1:
        start = load_file(folder / "model/model.safetensors")
        for name, weight in found[0]["weights"][-1].items():
            gradients = [step[name] for step in found[0]["gradients"]]
            assert {g.dtype for g in gradients} == {torch.bfloat16 if "gradients" in layout else torch.float32}
            error = (weight.double() - adam(start[name].bfloat16(), gradients)).abs()
            assert (error <= weight.double().abs() * 2**-8 + 1e-6).all(), name


@pytest.mark.parametrize("setting", ["offload_fraction=1", "moments_dtype=bf16"])
def test_a_resumed_step_is_the_one_that_would_have_followed(setting: str, folder: Path, tmp_path: Path) -> None:
    """fp32 weights and moments come back to where they were, and at once: the second step moves as far as the first."""
    own = [f"optimizer.{setting}"]
    (whole,) = steps(folder, tmp_path / "whole", 1, own)
    steps(folder, tmp_path / "first", 1, [*own, "trainer.steps=1"], save=tmp_path / "checkpoint")
    (second,) = steps(folder, tmp_path / "second", 1, own, resume=tmp_path / "checkpoint")
    assert len(second["weights"]) == 1
    for name, weight in second["weights"][0].items():
        assert torch.equal(weight, whole["weights"][1][name]), name
        assert not torch.equal(weight, whole["weights"][0][name]), name


def test_a_run_that_ran_out_of_memory_goes_on_with_its_optimizer_on_the_host(folder: Path, tmp_path: Path) -> None:
    steps(folder, tmp_path / "first", 1, ["trainer.steps=1"], save=tmp_path / "checkpoint")
    (whole,) = steps(folder, tmp_path / "whole", 1, [])
    offload = ["optimizer.offload_fraction=1", "optimizer.gradients_dtype=bf16"]
    (second,) = steps(folder, tmp_path / "second", 1, offload, resume=tmp_path / "checkpoint")
    assert second["bytes"]["optimizer"] == 0
    for name, weight in second["weights"][0].items():
        error = (weight.double() - whole["weights"][1][name].double()).abs()
        assert (error <= weight.double().abs() * 2**-7 + 0.05 * LEARNING_RATE).all(), name


def test_bf16_moments_and_gradients_train_like_fp32_ones(folder: Path, tmp_path: Path) -> None:
    (plain,) = steps(folder, tmp_path / "plain", 1, [], device=False)
    smaller = ["optimizer.moments_dtype=bf16", "optimizer.gradients_dtype=bf16"]
    (small,) = steps(folder, tmp_path / "small", 1, smaller)
    for name, expected in plain["gradients"][0].items():
        found = small["gradients"][0][name]
        assert found.dtype == torch.bfloat16 and expected.dtype == torch.float32
        # Three microbatches, each rounded and added in bf16; the head's own sum over chunks is rounded once for each.
        assert (found.float() - expected).norm() < 2**-7 * expected.norm(), name
    start = load_file(folder / "model/model.safetensors")
    gradients = [{name: g.float() for name, g in step.items()} for step in small["gradients"]]
    for name, weight in small["weights"][-1].items():
        expected = adam(start[name].bfloat16(), [step[name] for step in gradients])
        error = (weight.double() - expected).abs()
        assert (error <= weight.double().abs() * 2**-8 + 0.02 * LEARNING_RATE).all(), name


def test_fp8_weights_begin_as_the_checkpoints_and_leave_in_16_bits(folder: Path, tmp_path: Path) -> None:
    """Transformer Engine keeps what a layer was made with, and the optimizer's fp32 weights start from that."""
    run_ranks(1, "fp8_weights", folder / "model", folder / "batch.pkl", tmp_path / "out", VOCAB_SIZE)
    found = torch.load(tmp_path / "out")
    assert found["told"] == {
        **{"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True, "fp8_param_gather": True},
        **{
            "grad_reduce_in_fp32": False,
            "recipe of the optimizer": "tensorwise",
            "FusedAdam has masters": False,
        },
    }
    weights = load_file(folder / "model/model.safetensors")
    assert found["begun"].keys() == found["sent"].keys() == weights.keys()
    assert all(torch.equal(begun, weights[name]) for name, begun in found["begun"].items())
    assert all((sent == 2).all() for sent in found["sent"].values())  # what `dequantize` gave


SHAPE: ModelShape = model_shape(LLAMA_8B)
EIGHT_B = 8_030_261_248


def test_bytes_of_a_parameter() -> None:
    """By hand, for each of 8.03e9 parameters; Transformer Engine widens bf16 moments for a step."""
    plain = stage_memory(SHAPE, Layout(), 0, 1)
    assert (plain.gradients, plain.optimizer, plain.step) == (4 * EIGHT_B, 12 * EIGHT_B, 0)
    small = stage_memory(SHAPE, Layout(moments="bf16", gradients="bf16", data=4), 0, 1)
    assert (small.gradients, small.optimizer, small.step) == (2 * EIGHT_B, 2 * EIGHT_B, 2 * EIGHT_B)
    assert small.device == small.weights + small.gradients + small.optimizer + small.step  # nothing else is as large
    host = stage_memory(SHAPE, Layout(offload=1, reference="ema"), 0, 1)
    assert (host.optimizer, host.host_optimizer, host.host) == (0, 16 * EIGHT_B, 20 * EIGHT_B)
    quarter = stage_memory(SHAPE, Layout(offload=0.25, gradients="bf16"), 0, 1)
    assert (quarter.optimizer, quarter.host_optimizer) == (16 * EIGHT_B * 3 // 4, 16 * EIGHT_B // 4)
    # The head cannot sum into bf16: 4 V H beside it in fp32; handing it over, 2 V H take the place of a chunk's logits.
    more = stage_memory(SHAPE, Layout(gradients="bf16"), 0, 32768).head - stage_memory(SHAPE, Layout(), 0, 32768).head
    logits = 4 * 1024 * 128256 + 6 * 1024 * 4096  # a GPU's chunk at this vocabulary
    assert more == 6 * 128256 * 4096 - logits
    adapters = stage_memory(SHAPE, Layout(gradients="bf16", lora_rank=8), 0, 32768).head
    assert adapters == stage_memory(SHAPE, Layout(lora_rank=8), 0, 32768).head


def test_host_memory_of_a_checkpoint() -> None:
    """Bytes of a parameter, written and read; what Megatron holds is counted in tests/gpu_shapes."""
    gate_and_up = 2 * 32 * 14336 * 4096
    cases = {  # layout -> written, read
        Layout(): (32 * EIGHT_B, 12 * (EIGHT_B + gate_and_up)),
        Layout(data=2): (26 * EIGHT_B, 24 * EIGHT_B),
        Layout(data=2, context=4): (24 * EIGHT_B, 24 * EIGHT_B),  # 21.5 while it is gathered
        Layout(data=2, reference="ema"): (26 * EIGHT_B, 28 * EIGHT_B),
    }
    for layout, expected in cases.items():
        held = stage_memory(SHAPE, layout, 0, 1)
        assert (held.host_save, held.host_load) == expected, layout
    adapters = stage_memory(SHAPE, Layout(lora_rank=8), 0, 1)  # 12 bytes a factor twice, and 2 of all weights
    factors = adapters.host_load // 12
    assert adapters.host_save == 24 * factors + 2 * (EIGHT_B + factors)
    shape = model_shape(MIXTRAL_8X7B)  # of two ranks each holds half of the experts, and exchanges the rest alone
    spread, whole = (stage_memory(shape, Layout(data=2, expert=n), 0, 1) for n in (2, 1))
    half = shape.expert_parameters(1, 1, 2)
    assert whole.host_load == 24 * shape.parameters
    assert spread.host_load == 24 * (shape.parameters - 2 * half) + 12 * half + 8 * half


def test_8b_at_32k_fits_one_card_of_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3_8b_32k_one_gpu"]) == 0
    page = capsys.readouterr().out
    assert "8.03B parameters on 1 x H800: TP 1, PP 1, CP 1, DP 1; microbatches of 32768 tokens, recompute full" in page
    assert "100% of the optimizer on the host" in page
    # 2 + 4 bytes of 8.03e9; each layer's input and one whole layer; a layer's backward pass, 2 GiB for the gradients
    # of its output and of both halves of its MLP, .41 for its weights', less .25 of the last norm; the head is done.
    (stage,) = (line.split() for line in page.splitlines() if line.startswith("  stage 0"))
    assert stage[2:] == ["14.96", "29.92", "0.00", "12.50", "2.16", "0.76", "59.53", "119.66"]
    assert main(["plan", "llama3_8b_32k_one_gpu", "optimizer.offload_fraction=0"]) == 1
    bf16 = ["optimizer.moments_dtype=bf16", "optimizer.gradients_dtype=bf16", "optimizer.offload_fraction=0"]
    assert main(["plan", "llama3_8b_32k_one_gpu", *bf16]) == 1  # 12 bytes of 8.03e9 are 89.7 GiB
    assert "moments bf16; gradients bf16" in capsys.readouterr().out
    assert fits(SHAPE, Layout(offload=1, recompute="full"), DEVICES["A100"], 32768)


def test_the_plan_refuses_what_a_run_would() -> None:
    refused = {
        "offload_fraction=1.5: must be at least 0, at most 1": Layout(offload=1.5),
        "moments_dtype=bf16: needs precision bf16, not fp32": Layout(moments="bf16", precision="fp32"),
        "gradients_dtype=bf16: needs the distributed optimizer; leave --plain-optimizer out": Layout(
            gradients="bf16", distributed_optimizer=False
        ),
        "fp8_param_gather=True: needs precision bf16, not fp32": Layout(fp8=True, precision="fp32"),
        "fp8_param_gather=True: goes with no offload_fraction, no LoRA": Layout(fp8=True, offload=1),
        "moments_dtype=bf16: an offloaded optimizer keeps fp32": Layout(moments="bf16", offload=0.5),
    }
    for message, layout in refused.items():
        with pytest.raises(ValueError, match=message):
            check_layout(SHAPE, layout)
    assert peak(SHAPE, Layout(offload=0.5), 1024) < peak(SHAPE, Layout(), 1024)


@pytest.mark.parametrize(
    ("given", "gpu", "engine", "message"),
    [
        (["moments_dtype=bf16"], False, (), "optimizer.moments_dtype=bf16: needs a GPU.* set fp32 on a CPU"),
        (["offload_fraction=1"], False, (), "optimizer.offload_fraction=1.0: needs a GPU.* set 0.0 on a CPU"),
        (["moments_dtype=bf16"], True, (2, 2), r"FusedAdam of Transformer Engine 2.3 or newer, and 2.2 is installed"),
        (["gradients_dtype=bf16"], True, (), "and none is installed; set fp32"),
        (["offload_fraction=.5"], True, (), "optimizer.offload_fraction=0.5: needs .* none is installed; set 0.0"),
        (["gradients_dtype=bf16", "offload_fraction=.5"], True, (2, 3), None),
        (["moments_dtype=bf16", "gradients_dtype=bf16"], True, (2, 9), None),
        (["moments_dtype=bf16", "offload_fraction=.5"], True, (2, 9), "keeps fp32 moments; set fp32, or .* not 0.5"),
        (["fp8_param_gather=true"], False, (), "optimizer.fp8_param_gather=True: needs a GPU.* set False on a CPU"),
        (
            ["fp8_param_gather=true", "offload_fraction=1"],
            True,
            (2, 9),
            "takes no FP8 weights; .*offload_fraction=0",
        ),
        (["moments_dtype=fp16"], True, (2, 9), "optimizer.moments_dtype='fp16': must be one of fp32, bf16"),
        (["offload_fraction=2"], True, (2, 9), "optimizer.offload_fraction=2.0: must be at least 0, at most 1"),
    ],
)
def test_refused_before_a_model_is_built(given, gpu, engine, message, monkeypatch) -> None:
    monkeypatch.setattr(preflight.platform, "has_gpu", lambda: gpu)
    monkeypatch.setattr(preflight.platform, "transformer_engine", lambda: engine)
    base = ["output=x", "model.path=x", "model.precision=bf16"]

    def check(precision: str = "bf16") -> None:
        overrides = [*base, f"model.precision={precision}", *(f"optimizer.{text}" for text in given)]
        preflight.check_optimizer(load("rehearsal", overrides), here=True)

    if message is None:
        check()
        with pytest.raises(ValueError, match="needs model.precision=bf16, not fp32"):
            check("fp32")
    else:
        with pytest.raises(ValueError, match=message):
            check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["lora.rank=4"], "adapters keep the weights as they are"),
        (["reference.mode=ema"], "cannot change places .* set false, or reference.mode=none, not ema"),
        ([], "older than Ada and Hopper"),
    ],
)
def test_fp8_is_refused_where_it_cannot_be(given, message, monkeypatch) -> None:
    monkeypatch.setattr(preflight.platform, "has_gpu", lambda: True)
    monkeypatch.setattr(preflight.platform, "transformer_engine", lambda: (2, 9))
    monkeypatch.setattr(preflight.platform, "multiplies_fp8", lambda: False)
    base = ["output=x", "model.path=x", "model.precision=bf16", "optimizer.fp8_param_gather=true"]
    with pytest.raises(ValueError, match=f"optimizer.fp8_param_gather=True: .*{message}"):
        preflight.check_optimizer(load("rehearsal", [*base, *given]), here=True)
    config = load("rehearsal", base)
    if not given:
        preflight.check_optimizer(config, here=False)  # a launcher's machine is not the one that trains
        with pytest.raises(ValueError, match="experts get no multiple of 16 tokens"):
            preflight.check_experts(config, {"num_experts": 4}, 1)


def test_changes_that_fit_in_their_order() -> None:
    """Llama 3 8B: (layout, tokens, GiB to fit) -> what is changed, cheapest first; each is needed, and they suffice."""
    cases = [
        ((Layout(recompute="full", data=8), 65536, 72), ["batching.max_tokens_per_microbatch=32768"]),
        ((Layout(), 32768, 73), ["model.recompute=full", "optimizer.offload_fraction=1"]),
        ((Layout(data=2, recompute="full"), 32768, 80), ["parallel.tensor=2 parallel.sequence=true"]),
        ((Layout(tensor=8, recompute="full"), 32768, 18), ["optimizer.gradients_dtype=bf16"]),
        ((Layout(moments="bf16", recompute="full"), 32768, 70), ["optimizer.moments_dtype=fp32", "optimizer.offload"]),
        ((Layout(), 32768, 20), []),
    ]
    for (layout, tokens, gib), expected in cases:
        found = changes_that_fit(SHAPE, layout, tokens, gib * 2**30, longest=32768)
        assert [change.settings.startswith(start) for change, start in zip(found, expected, strict=True)] == [
            True for _ in expected
        ], found
        assert all(change.peak > gib * 2**30 for change in found[:-1])
        assert all(change.peak <= gib * 2**30 for change in found[-1:])
    offload = changes_that_fit(SHAPE, Layout(recompute="full"), 32768, 73 * 2**30, longest=32768)
    assert [change.host for change in offload] == [16 * EIGHT_B]
    assert changes_that_fit(SHAPE, Layout(), 32768, 73 * 2**30, longest=32768, fixed=["offload"]) == []
