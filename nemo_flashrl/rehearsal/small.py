"""An experiment made small enough for a CPU: what shrinks, what stays, and a random checkpoint of the same family."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from nemo_flashrl import environments
from nemo_flashrl.config import RunConfig

HEAD_SIZE = 32  # the smallest that vLLM's attention for CPUs knows
MOST_PROCESSES = 8  # of a layout that is kept as it is; each takes half a gigabyte
STEPS, EPISODES_OF_A_RANK = 3, 4
VOCABULARY = 1024
TURN_TOKENS, TURNS, OBSERVATION_TOKENS, PROMPT_TOKENS = 24, 3, 48, 1600
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small_overrides(config: RunConfig, group_size: int) -> list[str]:
    """The overrides that shrink `config`: widths, lengths, batch and steps. Everything else stays as it is.

    Layouts of more than 8 processes keep each kind of parallelism at size 2.
    """
    parallel, rollout = config.parallel, config.rollout
    sizes = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "context", "expert")}
    if math.prod((sizes["tensor"], sizes["pipeline"], sizes["context"])) > MOST_PROCESSES:
        sizes = {name: min(size, 2) for name, size in sizes.items()}
    turns = min(rollout.max_turns, TURNS)
    observation = min(rollout.max_observation_tokens, OBSERVATION_TOKENS)
    answer = min(rollout.max_tokens_per_turn, TURN_TOKENS)
    context = PROMPT_TOKENS + turns * (answer + observation)
    batch = max(group_size, EPISODES_OF_A_RANK * small_data_parallel(config))
    batch = -(-batch // group_size) * group_size
    ratio = config.batching.max_tokens_per_microbatch / config.model.context_length
    in_flight = round(batch * max(rollout.max_in_flight, rollout.batch_size) / rollout.batch_size)
    changes = {
        **{f"parallel.{name}": size for name, size in sizes.items()},
        "cluster.nodes": 1,
        "cluster.gpus_per_node": 0,
        "model.context_length": context,
        "model.precision": "fp32",
        "optimizer.moments_dtype": "fp32",
        "optimizer.gradients_dtype": "fp32",
        "optimizer.offload_fraction": 0.0,
        "optimizer.fp8_param_gather": False,
        "model.head_chunk_tokens": min(config.model.head_chunk_tokens or 256, 256),
        "batching.context_margin": 0.0,
        "batching.max_tokens_per_microbatch": max(context, round(context * ratio)),
        "rollout.engine": "transformers",
        "rollout.batch_size": batch,
        "rollout.max_in_flight": in_flight if rollout.max_in_flight else 0,
        "rollout.max_turns": turns,
        "rollout.max_tokens_per_turn": answer,
        "rollout.max_observation_tokens": observation,
        "trainer.steps": STEPS,
        "checkpoint.every_steps": STEPS if config.checkpoint.every_steps else 0,
    }
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


def small_data_parallel(config: RunConfig) -> int:
    """Two replicas where the experiment has several and the processes allow it."""
    parallel = config.parallel
    ranks = parallel.tensor * parallel.pipeline * parallel.context
    several = config.cluster.nodes * config.cluster.gpus_per_node > ranks
    return 2 if several and 2 * ranks <= MOST_PROCESSES else 1


def write_small_model(folder: Path, hf_config: dict[str, Any], config: RunConfig, seed: int) -> None:
    """A random checkpoint of `hf_config`'s family with a small tokenizer; `config` is the shrunken one.

    Raises:
        ValueError: the family is none that transformers knows.
    """
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    heads = 2 * max(2, tensor)
    grouped = hf_config["num_key_value_heads"] < hf_config["num_attention_heads"]
    tokenizer = small_tokenizer(config.model.context_length)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": heads * HEAD_SIZE,
        "intermediate_size": 32 * max(4, tensor),
        "num_hidden_layers": max(2, pipeline),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if grouped else heads,
        "max_position_embeddings": config.model.context_length,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    if "head_dim" in hf_config:
        sizes["head_dim"] = HEAD_SIZE
    for name, small in (("num_local_experts", 4), ("num_experts", 4), ("num_experts_per_tok", 2)):
        if name in hf_config:
            sizes[name] = small
    if "moe_intermediate_size" in hf_config:
        sizes["moe_intermediate_size"] = sizes["intermediate_size"]
    kept = {key: value for key, value in hf_config.items() if key != "model_type"}
    try:
        small = AutoConfig.for_model(hf_config["model_type"], **{**kept, **sizes})
    except ValueError as error:
        raise ValueError(f"model_type {hf_config['model_type']!r}: {error}") from error
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def small_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Byte pairs of the environments' own words, any text can be written with them, and a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    words = sorted(Path(environments.__file__).parent.glob("*.py"))
    backend.train([str(file) for file in words], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT
    return tokenizer
