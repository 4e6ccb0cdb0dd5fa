"""A Hugging Face checkpoint folder -> this rank's shard, and live shards -> such a folder."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo_flashrl import platform
from nemo_flashrl.weight_sync.hf_config import with_rope_fields, with_tokenizer_fields
from nemo_flashrl.weight_sync.hf_reader import HfTensors
from nemo_flashrl.weight_sync.hf_writer import new_folder, write_tensors
from nemo_flashrl.weights.mapping import Place, RuleSizes, find_rule
from nemo_flashrl.weights.shards import Model, chunks_of, local_parameters

logger = logging.getLogger(__name__)

CHAT_TEMPLATES = "additional_chat_templates"  # where transformers keeps the named ones
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


@torch.no_grad()
def load_hf_folder(model: Model, folder: str | Path, vocab_size: int) -> None:
    """Fill this rank's shard from a folder, in place. A collective of all ranks.

    Raises:
        ValueError: names a tensor that is missing or misshapen or holds NaN or inf, or one that no parameter of the
            model takes.
    """
    source = HfTensors(folder)
    if torch.distributed.get_rank() == 0 and (conflict := source.conflict()):
        logger.warning(conflict)
    layout = RuleSizes.of(chunks_of(model)[0].config, vocab_size)
    used: set[str] = set()
    for name, layer, parameter in local_parameters(model):
        rule = find_rule(name)
        place, first_expert = _place(parameter, rule.of_expert, layout)
        names = rule.hf_names(name, layer, layout, first_expert)
        if name == "output_layer.weight" and layout.tied:
            names = ["model.embed_tokens.weight"]
        shard = rule.from_hf([source[n] for n in names], layout, place)
        if shard.shape != parameter.shape:
            given, own = tuple(shard.shape), tuple(parameter.shape)
            raise ValueError(f"{', '.join(names)} of {folder} give {given} for {name}, which is {own}")
        if not shard.isfinite().all():
            raise ValueError(f"{', '.join(names)} of {folder}: NaN or inf among the weights; name another checkpoint")
        parameter.copy_(shard)
        if (begun_with := getattr(parameter, "get_high_precision_init_val", lambda: None)()) is not None:
            begun_with.copy_(shard)  # of an FP8 weight: what the optimizer's fp32 weight starts from
        used.update(names)
    _check_all_used(source, used, layout)


def _place(parameter: Tensor, of_expert: bool, layout: RuleSizes) -> tuple[Place, int]:
    """Where this rank's shard lies, and the global number of its first expert."""
    if not of_expert:
        rank = parallel_state.get_tensor_model_parallel_rank()
        return Place(rank, parallel_state.get_tensor_model_parallel_world_size(), parameter.shape), 0
    rank = parallel_state.get_expert_tensor_parallel_rank()
    place = Place(rank, parallel_state.get_expert_tensor_parallel_world_size(), parameter.shape)
    ranks = parallel_state.get_expert_model_parallel_world_size()
    return place, parallel_state.get_expert_model_parallel_rank() * layout.num_experts // ranks


def _check_all_used(source: HfTensors, used: set[str], layout: RuleSizes) -> None:
    everyone: list[set[str]] = [used] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, used, group=platform.object_group())
    used = set().union(*everyone)
    if layout.tied:
        used.add("lm_head.weight")  # some write the tied head too
    left = sorted(name for name in source.names() - used if not name.endswith("rotary_emb.inv_freq"))
    if left:
        raise ValueError(
            f"{source.folder} holds {left[0]!r}{f' and {len(left) - 1} more' if left[1:] else ''}, "
            "which no parameter of the model takes: its config.json is of another model"
        )


def write_hf_folder(
    stream: Iterable[tuple[str, Tensor]], source: str | Path, target: str | Path, card: Mapping[str, Any] | None = None
) -> None:
    """Write tensors as a Hugging Face checkpoint beside the configuration and tokenizer files of `source`.

    The folder appears whole or not at all, and an existing one is refused. `card`: what README.md says of the model
    in place of the source's; without one the source's goes along.

    Raises:
        ValueError: the target exists or cannot be written, or a tensor holds NaN or inf.
    """
    with new_folder(target) as staging:
        dtypes = write_tensors(stream, staging)
        copy_beside_weights(source, staging)
        _correct_config(staging / "config.json", dtypes)
        if card is not None:
            (staging / "README.md").write_text(_card_text(card))


def copy_beside_weights(source: str | Path, target: Path) -> None:
    """Copy the files of a Hugging Face folder that are no weights: configuration, tokenizer, chat templates, texts."""
    for file in Path(source).iterdir():
        if file.name == CHAT_TEMPLATES and file.is_dir():
            shutil.copytree(file, target / file.name, dirs_exist_ok=True)
        if file.is_file() and file.suffix not in WEIGHT_FILES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    _rewrite(target / "tokenizer_config.json", with_tokenizer_fields)


def run_card(configuration: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What an export's README.md says of the run that made it; `configuration` as nested mappings."""
    return {
        "name": Path(configuration["output"]).name,
        "trained from": Path(configuration["model"]["path"]).name,
        "optimizer steps": steps,
        "algorithm": configuration["algorithm"]["name"],
        "environment": configuration["environment"]["name"],
        "trajectories a step": configuration["rollout"]["batch_size"],
        "learning rate": configuration["optimizer"]["learning_rate"],
        "seed": configuration["trainer"]["seed"],
    }


def _card_text(card: Mapping[str, Any]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in card.items())
    return f"---\nlibrary_name: transformers\n---\n\n# {card['name']}\n\n| | |\n|---|---|\n{rows}\n"


def _correct_config(path: Path, dtypes: set[torch.dtype]) -> None:
    """Write the tensors' dtype, and RoPE's fields as transformers 4 reads them; where both are right it stays as is."""
    _rewrite(path, with_rope_fields)
    config = json.loads(path.read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    name = str(next(iter(dtypes))).removeprefix("torch.")
    if len(dtypes) == 1 and config.get(key, "float32") != name:
        _rewrite(path, lambda config: {**config, key: name})


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A file that `change` leaves as it is keeps its bytes."""
    if not path.is_file():
        return
    written = json.loads(path.read_text())
    if (changed := change(written)) != written:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n")
