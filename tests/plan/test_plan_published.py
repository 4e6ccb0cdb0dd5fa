"""The plan's formulas against figures that others have published.

Sources: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", tables 2 and 3;
NVIDIA Megatron Bridge, docs/performance-summary.md (container 25.11, DGX-H100); Megatron-LM, examples/llama/README.md;
NVIDIA NeMo Customizer, table of Llama models; Hugging Face, "Llama 3.1" (huggingface.co/blog/llama31), KV caches.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_models import LLAMA_8B, LLAMA_70B, MIXTRAL_8X7B, QWEN2_7B, QWEN3_8B, QWEN3_30B_A3B

from nemo_flashrl.plan.devices import DEVICES
from nemo_flashrl.plan.fitting import fits, stages
from nemo_flashrl.plan.memory import Layout
from nemo_flashrl.plan.step_time import key_value_cache, step_time
from nemo_flashrl.weights.model_shape import model_shape


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_8B, 8_030_261_248),
        (LLAMA_70B, 70_553_706_496),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_8B, 8_190_735_360),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
    ],
    ids=["llama 3 8B", "llama 3 70B", "qwen2.5 7B", "qwen3 8B", "mixtral 8x7B", "qwen3 30B-A3B"],
)
def test_parameters_as_published(config: dict, published: int) -> None:
    assert model_shape(config).parameters == published


def test_bytes_of_an_8b_and_a_70b_model() -> None:
    """18 bytes a parameter of mixed-precision Adam: 2 weights, 4 gradient, 12 optimizer (Rajbhandari et al. 2020, with
    Megatron's fp32 gradients); the distributed optimizer leaves 6 + 12 / d."""
    for config in (LLAMA_8B, LLAMA_70B):
        shape = model_shape(config)
        alone = stages(shape, Layout(distributed_optimizer=False), 1024)[0]
        assert alone.weights + alone.gradients + alone.optimizer == 18 * shape.parameters
        spread = stages(shape, Layout(data=8), 1024)[0]
        assert spread.weights + spread.gradients + spread.optimizer == pytest.approx(7.5 * shape.parameters)


GPT = {  # billions of parameters: heads, hidden size, layers, pipeline stages, sequences of 2048 in a microbatch
    22: (64, 6144, 48, 1, 4),
    175: (96, 12288, 96, 8, 1),
    530: (128, 20480, 105, 35, 1),
    1008: (160, 25600, 128, 64, 1),
}
MASKS = {"tensor": 2.0, "sequence": 2 / 8, "full": 0.0}  # bytes of dropout's masks in the paper's numbers, per s b h
PUBLISHED = {"tensor": 10 + 24 / 8, "sequence": 34 / 8, "full": 2 / 8}  # of a layer, without 5as/h, at t = 8


@pytest.mark.parametrize("size", GPT)
@pytest.mark.parametrize("row", PUBLISHED)
def test_activations_of_the_megatron_papers_models(size: int, row: str) -> None:
    """Of the first stage, which holds as many layers' activations as the whole model has.

    The paper's MLP, of width 4h and with GELU, keeps 16 s b h as a gated one of width 8h/3 does, with as many weights.
    Its term 5as/h is the attention's scores, which flash attention does not keep; its dropout we do not have.
    """
    heads, hidden, layers, pipeline, sequences = GPT[size]
    sizes = {"hidden_size": hidden, "intermediate_size": round(8 * hidden / 3), "num_hidden_layers": layers}
    shape = model_shape(
        {"model_type": "llama", "num_attention_heads": heads, "vocab_size": 51200, "tie_word_embeddings": True} | sizes
    )
    assert shape.parameters == pytest.approx(size * 1e9, rel=0.01)
    layout = Layout(tensor=8, pipeline=pipeline, sequence=row != "tensor", microbatches=64)
    layout = replace(layout, recompute="full" if row == "full" else "none")
    tokens = 2048 * sequences
    held = stages(shape, layout, tokens)[0].activations
    if row == "full":  # and the one layer that is being computed again
        held -= stages(shape, Layout(tensor=8), tokens)[0].activations / layers
    else:
        held += MASKS[row] * tokens * hidden * layers
    assert held == pytest.approx(PUBLISHED[row] * tokens * hidden * layers, rel=0.03)


@pytest.mark.parametrize(
    ("config", "sequence", "tflops", "tokens_per_second"),
    [(LLAMA_8B, 8192, 744, 14451), (LLAMA_70B, 8192, 719, 1602), (QWEN3_30B_A3B, 4096, 121, 5275)],
    ids=["llama 3 8B", "llama 3 70B", "qwen3 30B-A3B"],
)
def test_flops_as_published(config: dict, sequence: int, tflops: float, tokens_per_second: float) -> None:
    """Of one token of pre-training: model TFLOP/s over tokens/s, each of a GPU. Its head has 3 products, ours 4."""
    time = step_time(model_shape(config), Layout(), DEVICES["H100"], tokens=1, trajectory_tokens=sequence)
    assert time.trunk + time.attention + 3 / 4 * time.head == pytest.approx(tflops * 1e12 / tokens_per_second, rel=0.01)


@pytest.mark.parametrize(
    ("config", "layout", "tokens"),
    [
        (LLAMA_8B, Layout(context=2, data=4), 8192),  # Megatron-LM, 8 H100
        (LLAMA_70B, Layout(tensor=4, pipeline=8, data=2), 8192),  # Megatron Bridge, 64 H100
        (LLAMA_8B, Layout(lora_rank=32), 4096),  # NeMo Customizer, LoRA on one GPU of 80 GB
        (LLAMA_8B, Layout(tensor=2, data=2), 4096),  # NeMo Customizer, all weights on four
        (QWEN3_30B_A3B, Layout(pipeline=2, expert=8, data=8), 2 * 4096),  # Megatron Bridge, 16 H100
    ],
    ids=["8B", "70B", "8B LoRA", "8B on four", "30B-A3B"],
)
def test_what_is_known_to_run_is_within_the_device(config: dict, layout: Layout, tokens: int) -> None:
    """All of it, not the share that the plan calls usable: the pre-training runs are in FP8, which keeps less."""
    fullest = max(stage.device for stage in stages(model_shape(config), layout, tokens))
    assert 0.3 < fullest / 2**30 / DEVICES["H100"].memory_gib < 1


def test_what_cannot_run_does_not_fit() -> None:
    """18 bytes x 8e9 are 135 GiB, 18 x 70.6e9 / 8 are 148; 29e9 weights of experts on two stages, 6 bytes each."""
    assert not fits(model_shape(LLAMA_8B), Layout(), DEVICES["H100"], 1024)
    assert not fits(model_shape(LLAMA_70B), Layout(tensor=8), DEVICES["H100"], 1024)
    assert not fits(model_shape(QWEN3_30B_A3B), Layout(pipeline=2, data=8), DEVICES["H100"], 4096)


@pytest.mark.parametrize(
    ("config", "tokens", "gib"),
    [(LLAMA_8B, 16_000, 1.95), (LLAMA_8B, 128_000, 15.62), (LLAMA_70B, 16_000, 4.88), (LLAMA_70B, 128_000, 39.06)],
)
def test_key_value_caches_as_published(config: dict, tokens: int, gib: float) -> None:
    assert key_value_cache(model_shape(config), tokens) / 2**30 == pytest.approx(gib, abs=0.006)
