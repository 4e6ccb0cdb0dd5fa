"""What can be refused of a model's files and of its layout over processes before the model is built.

Reads small files only, imports no NeMo. Each refusal is a ValueError of one line: field, value, remedy.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nemo_flashrl.config import RunConfig
from nemo_flashrl.config.schema import LoraConfig
from nemo_flashrl.data.context_parallel import length_multiple
from nemo_flashrl.weights.model_shape import read_hf_json

NEEDED = (  # of every family's config.json
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def check_parallel(config: RunConfig, world_size: int) -> int:
    """The number of data-parallel ranks that `world_size` processes make with the configured sizes."""
    tensor, pipeline, context = config.parallel.tensor, config.parallel.pipeline, config.parallel.context
    nodes, gpus = config.cluster.nodes, config.cluster.gpus_per_node
    if gpus and nodes * gpus != world_size:
        raise ValueError(
            f"cluster.nodes={nodes} x cluster.gpus_per_node={gpus}: that is {nodes * gpus} processes and this job has "
            f"{world_size}; start one process per GPU, or set what the job has (cluster=cpu without GPUs)"
        )
    model_ranks = tensor * pipeline * context
    if world_size % model_ranks:
        raise ValueError(
            f"parallel.tensor={tensor} x parallel.pipeline={pipeline} x parallel.context={context} does not divide the "
            f"{world_size} processes of this job: start a multiple of {model_ranks}"
        )
    if config.parallel.sequence and tensor == 1:
        raise ValueError("parallel.sequence=True needs parallel.tensor of 2 or more")
    multiple = length_multiple(tensor, config.parallel.sequence, context)
    budget, length = config.batching.max_tokens_per_microbatch, config.model.context_length
    if multiple > min(budget, length):
        raise ValueError(
            f"parallel.context={context} and parallel.tensor={tensor} pad every trajectory to a multiple of {multiple} "
            f"tokens, and batching.max_tokens_per_microbatch={budget}, model.context_length={length}: set fewer ranks "
            "or more tokens"
        )
    return world_size // model_ranks


def read_model(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The Hugging Face config of `model.path`, which is whole and which the layout can hold."""
    folder = Path(config.model.path)
    if (folder / "context").is_dir() and (folder / "weights").is_dir():
        command = shlex.join(["flashrl", "convert", "nemo-to-hf", str(folder), f"{folder}-hf"])
        raise ValueError(
            f"model.path={config.model.path!r} is a NeMo checkpoint, and the sampler reads Hugging Face folders alone: "
            f"run `{command}` once, then model.path={folder}-hf"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model.path={config.model.path!r} holds no config.json: give a Hugging Face checkpoint folder, or a NeMo "
            "checkpoint for the command that makes one of it"
        )
    hf_config = read_hf_json(path)
    if (generation := folder / "generation_config.json").is_file():
        read_hf_json(generation)
    missing = [name for name in NEEDED if not hf_config.get(name)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: copy it again")
    heads, groups = hf_config["num_attention_heads"], hf_config.get("num_key_value_heads")
    for name, value in (("num_attention_heads", heads), ("num_key_value_heads", groups or heads)):
        if value % config.parallel.tensor:
            raise ValueError(f"parallel.tensor={config.parallel.tensor}: does not divide the model's {name} ({value})")
    if hf_config["num_hidden_layers"] % config.parallel.pipeline:
        raise ValueError(
            f"parallel.pipeline={config.parallel.pipeline}: does not divide the model's num_hidden_layers "
            f"({hf_config['num_hidden_layers']})"
        )
    check_experts(config, hf_config, world_size)
    check_lora(config, hf_config)
    if config.parallel.context > 1 and "yarn" in (hf_config.get("rope_scaling") or {}).values():
        raise ValueError(
            f"parallel.context={config.parallel.context}: Megatron slices YaRN's positions wrongly above 1; set 1"
        )
    limit = hf_config.get("max_position_embeddings", config.model.context_length)
    if config.model.context_length > limit:
        raise ValueError(
            f"model.context_length={config.model.context_length}: the model's max_position_embeddings is {limit}"
        )
    return hf_config


def check_experts(config: RunConfig, hf_config: dict[str, Any], world_size: int) -> None:
    """Refuse experts that the layout cannot spread."""
    expert = config.parallel.expert
    experts = hf_config.get("num_local_experts") or hf_config.get("num_experts") or 0
    if expert > 1 and (not experts or experts % expert):
        raise ValueError(f"parallel.expert={expert}: does not divide the model's experts ({experts} a layer)")
    if experts and config.parallel.tensor > 1 and not config.parallel.sequence:
        raise ValueError("parallel.sequence=False: Megatron trains experts with parallel.tensor above 1 only with it")
    stage = world_size // config.parallel.pipeline
    if stage % expert:
        raise ValueError(f"parallel.expert={expert}: does not divide the {stage} processes of a pipeline stage")


def check_lora(config: RunConfig, hf_config: dict[str, Any]) -> None:
    """Refuse adapters beside layers that no model has, and such as hold more than the layer itself."""
    lora, known = config.lora, LoraConfig().targets
    if not lora.rank:
        return
    unknown = [target for target in lora.targets if target not in known]
    if unknown or not lora.targets:
        raise ValueError(f"lora.targets={lora.targets}: name some of {', '.join(known)}")
    if lora.rank > hf_config["hidden_size"]:
        raise ValueError(
            f"lora.rank={lora.rank}: the model's hidden_size is {hf_config['hidden_size']}, and a product of more than "
            "its rank is not low-rank; 8 to 64 is usual"
        )


def load_tokenizer(config: RunConfig, vocab_size: int) -> Any:
    """The tokenizer of `model.path`, which has every token that `rollout.stop` names."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
    except Exception as error:  # the class of what the tokenizers package raises for a broken file
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"model.path={config.model.path!r} holds no loadable tokenizer ({first})") from error
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"model.path={config.model.path!r}: the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is "
            f"{vocab_size}: they do not belong together"
        )
    for token in config.rollout.stop:
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise ValueError(f"rollout.stop: {token!r} is not a token of the tokenizer in {config.model.path!r}")
    return tokenizer
