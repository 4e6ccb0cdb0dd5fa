"""What can be refused of a model's files and of its layout over processes before the model is built.

Reads small files only, imports no NeMo. Each refusal is a ValueError of one line: field, value, remedy.
"""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import Any

from nemo_flashrl import platform
from nemo_flashrl.config import RunConfig
from nemo_flashrl.config.schema import LoraConfig, OptimizerConfig
from nemo_flashrl.data.context_parallel import length_multiple
from nemo_flashrl.rollout.from_config import end_tokens, stop_tokens
from nemo_flashrl.weight_sync.hf_config import (
    context_limit,
    read_config,
    read_hf_json,
    refuse_lfs_pointer,
    with_tokenizer_fields,
)

FUSED_ADAM = (2, 3)  # the Transformer Engine from which its FusedAdam takes bf16 moments
PACKED_FP32 = (2, 11)  # the Transformer Engine whose unfused attention, the one that takes fp32, takes packed rows
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them is enough
NEEDED = (  # of every family's config.json
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
NOISE = (  # fields of config.json that would make two passes over the same tokens differ
    *("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "hidden_dropout", "hidden_dropout_prob"),
    *("resid_pdrop", "resid_dropout", "embd_pdrop", "embedding_dropout", "dropout", "router_jitter_noise"),
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
    multiple = length_multiple(tensor, config.parallel.sequence, context, fp8=config.optimizer.fp8_param_gather)
    budget, length = config.batching.max_tokens_per_microbatch, config.model.context_length
    if multiple > min(budget, length):
        raise ValueError(
            f"parallel.context={context} and parallel.tensor={tensor} pad every trajectory to a multiple of {multiple} "
            f"tokens, and batching.max_tokens_per_microbatch={budget}, model.context_length={length}: set fewer ranks "
            "or more tokens"
        )
    return world_size // model_ranks


def check_attention(config: RunConfig) -> None:
    """Refuse what Transformer Engine has no attention kernel for on this machine's GPU: some of fp32."""
    if config.model.precision != "fp32" or not platform.has_gpu():
        return
    layout, context = config.batching.layout, config.parallel.context
    if context > 1:
        raise ValueError(f"parallel.context={context}: needs model.precision=bf16 on a GPU, not fp32; or set 1")
    if layout == "packed" and platform.transformer_engine() < PACKED_FP32:
        found = ".".join(map(str, platform.transformer_engine())) or "none"
        raise ValueError(
            f"batching.layout={layout}: in fp32 it needs Transformer Engine {'.'.join(map(str, PACKED_FP32))} or newer "
            f"on a GPU, and {found} is installed; set model.precision=bf16, or padded"
        )


def check_optimizer(config: RunConfig, *, here: bool) -> None:
    """Refuse what Megatron's precision-aware and hybrid optimizers cannot do, `here`: on this machine."""
    optimizer, usual = config.optimizer, OptimizerConfig()
    names = ("moments_dtype", "gradients_dtype", "offload_fraction", "fp8_param_gather")
    given = {name: getattr(optimizer, name) for name in names if getattr(optimizer, name) != getattr(usual, name)}
    for name, value in given.items():
        said, default = f"optimizer.{name}={value}", getattr(usual, name)
        if config.model.precision != "bf16":
            raise ValueError(f"{said}: needs model.precision=bf16, not {config.model.precision}; or set {default}")
        if here and not platform.has_gpu():
            raise ValueError(f"{said}: needs a GPU, for Megatron's distributed optimizer; set {default} on a CPU")
        if here and platform.transformer_engine() < FUSED_ADAM:
            found = ".".join(map(str, platform.transformer_engine())) or "none"
            raise ValueError(
                f"{said}: needs the FusedAdam of Transformer Engine {'.'.join(map(str, FUSED_ADAM))} or newer, and "
                f"{found} is installed; set {default}"
            )
    if optimizer.fp8_param_gather:
        _check_fp8(config, here=here)
    if {"moments_dtype", "offload_fraction"} <= given.keys():
        raise ValueError(
            f"optimizer.moments_dtype={optimizer.moments_dtype}: Megatron's hybrid optimizer keeps fp32 moments; set "
            f"fp32, or optimizer.offload_fraction=0, not {optimizer.offload_fraction:g}"
        )


def _check_fp8(config: RunConfig, *, here: bool) -> None:
    """What needs whole weights of 16 bits, and a GPU that multiplies in FP8."""
    said, offload = "optimizer.fp8_param_gather=True", config.optimizer.offload_fraction
    if config.lora.rank:
        raise ValueError(f"{said}: adapters keep the weights as they are, and nothing is gathered; set false")
    if config.reference.mode != "none":
        raise ValueError(
            f"{said}: FP8 weights cannot change places with the reference's; set false, or reference.mode=none, not "
            f"{config.reference.mode}"
        )
    if offload:
        raise ValueError(f"{said}: Megatron's hybrid optimizer takes no FP8 weights; set optimizer.offload_fraction=0")
    if here and not platform.multiplies_fp8():
        raise ValueError(f"{said}: the GPU is older than Ada and Hopper and has no FP8; set false")


def read_model(config: RunConfig, world_size: int) -> dict[str, Any]:
    """The Hugging Face config of `model.path`, which is whole and which the layout can hold."""
    folder = Path(config.model.path)
    if (folder / "context").is_dir() and (folder / "weights").is_dir():
        command = shlex.join(["flashrl", "convert", "nemo-to-hf", str(folder), f"{folder}-hf"])
        raise ValueError(
            f"model.path={config.model.path!r} is a NeMo checkpoint, and the sampler reads Hugging Face folders alone: "
            f"run `{command}` once, then model.path={folder}-hf"
        )
    path, hf_config = folder / "config.json", read_config(folder)
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
    limit = context_limit(hf_config)
    if limit is not None and config.model.context_length > limit:
        positions = hf_config["max_position_embeddings"]
        raise ValueError(
            f"model.context_length={config.model.context_length}: the model's max_position_embeddings is {positions}"
            + (f" and its RoPE scaling makes {limit} of them" if limit > positions else "")
        )
    return hf_config


def check_experts(config: RunConfig, hf_config: dict[str, Any], world_size: int) -> None:
    """Refuse experts that the layout cannot spread."""
    expert = config.parallel.expert
    experts = hf_config.get("num_local_experts") or hf_config.get("num_experts") or 0
    if experts and config.optimizer.fp8_param_gather:
        raise ValueError("optimizer.fp8_param_gather=True: experts get no multiple of 16 tokens; set false")
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


def read_tokenizer(folder: str | Path) -> Any:
    """The Hugging Face tokenizer of `model.path`, by transformers 4 also where 5 has saved it.

    Raises:
        ValueError: one line: it is not there, is a Git LFS pointer, or cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import logging

    where = f"model.path={str(folder)!r}"
    there = [Path(folder) / name for name in _TOKENIZER_FILES if (Path(folder) / name).is_file()]
    if not there:
        raise ValueError(f"{where} holds no tokenizer, none of {', '.join(_TOKENIZER_FILES)}: copy it from the model")
    for path in (*there, *Path(folder).glob("tokenizer_config.json")):
        refuse_lfs_pointer(path)
    settings = Path(folder) / "tokenizer_config.json"
    written = read_hf_json(settings) if settings.is_file() else {}
    try:
        read = with_tokenizer_fields(written)
        changed = {name: value for name, value in read.items() if written.get(name) != value}
        new_class = changed.pop("tokenizer_class", None)
        if changed:
            changed["extra_special_tokens"] = {}
        if not new_class:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, **changed)
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # it would say in three lines that the class has another name here
        try:
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **changed)
        finally:
            logging.set_verbosity(level)
    except Exception as error:  # of tokenizers, sentencepiece or transformers, each of another type
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{where} holds no loadable tokenizer ({said}): copy it again") from error


def load_tokenizer(config: RunConfig, vocab_size: int) -> Any:
    """The tokenizer of `model.path`, which can write all that `rollout.stop` names."""
    tokenizer = read_tokenizer(config.model.path)
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"model.path={config.model.path!r}: the tokenizer has {len(tokenizer)} tokens, the model's vocab_size is "
            f"{vocab_size}: they do not belong together"
        )
    for string in config.rollout.stop:
        written = tokenizer.encode(string, add_special_tokens=False)
        if not written or tokenizer.unk_token_id in written:
            raise ValueError(f"rollout.stop: {string!r} cannot be written with the tokenizer in {config.model.path!r}")
    return tokenizer


def warn_of_noise(config: RunConfig, hf_config: dict[str, Any]) -> None:
    """Say that dropout and jitter of config.json are not applied: ratios compare the policy with a sampler without."""
    on = [f"{name}={hf_config[name]}" for name in NOISE if hf_config.get(name)]
    if on:
        warnings.warn(
            f"{Path(config.model.path) / 'config.json'}: {', '.join(on)} is not applied: the policy is trained without "
            "dropout and jitter, as it is sampled",
            stacklevel=3,
        )


def warn_of_text(config: RunConfig, tokenizer: Any) -> None:
    """Say in one line each what of the model's text format is likely not meant."""
    where = f"model.path={config.model.path!r}"
    if not tokenizer.chat_template:
        warnings.warn(
            f"{where} has no chat template: messages are joined and trained as plain text, without roles", stacklevel=2
        )
    ends, stops = end_tokens(tokenizer, config.model.path), stop_tokens(config, tokenizer)
    own, said = ends["the tokenizer"], ends.get("config.json", set()) - {*stops.values()}
    if own and said and not own <= said:
        first, second = (
            " and ".join(f"{tokenizer.convert_ids_to_tokens(index)!r} ({index})" for index in sorted(ids))
            for ids in (own, said)
        )
        warnings.warn(
            f"{where}: the end-of-sequence token of the tokenizer is {first}, that of config.json {second}: each ends "
            "an answer; correct eos_token in tokenizer_config.json or eos_token_id in config.json",
            stacklevel=2,
        )
