"""Seconds and memory of converting a model of 1.1 billion random bf16 parameters, beside a plain copy of its bytes.

    OMP_NUM_THREADS=1 python benchmarks/convert.py             # about three minutes, 9 GB of disk
    OMP_NUM_THREADS=1 python benchmarks/convert.py --layers 2

Each conversion runs in a process of its own, as on the command line; its seconds are those of the call, after the
imports. Memory is the process's peak resident set beyond what it held before the call.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, FEED_FORWARD, HEADS, GROUPS, VOCAB = 2048, 5632, 32, 4, 32000
GIB = 2**30


def write_llama(folder: Path, layers: int) -> int:
    """The sizes of TinyLlama 1.1B, a file for every layer; returns the bytes of its tensors."""
    from transformers import LlamaConfig

    folder.mkdir()
    LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        vocab_size=VOCAB,
        torch_dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    kv = HIDDEN // HEADS * GROUPS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    parts = [
        {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()} for layer in range(layers)
    ]
    parts.append({"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)})
    parts.append({"model.norm.weight": (HIDDEN,)})
    weight_map, total = {}, 0
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: torch.randn(shape).bfloat16() for name, shape in part.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
        total += sum(tensor.numel() * 2 for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def convert(name: str, *folders: str) -> None:
    """In a process of its own: print seconds and bytes of one call."""
    from nemo_flashrl import platform

    platform.install()
    from nemo_flashrl.convert import convert as conversions

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    getattr(conversions, name)(*folders)
    os.sync()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "bytes": (peak - before) * 1024}))


def measure(name: str, *folders: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--convert", name, *map(str, folders)], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def copy(source: Path, target: Path) -> dict[str, float]:
    started = time.perf_counter()
    shutil.copytree(source, target)
    os.sync()
    return {"seconds": time.perf_counter() - started, "bytes": 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--convert", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        convert(*options.convert)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        root = Path(temporary)
        size = write_llama(root / "hf", options.layers)
        os.sync()
        print(f"{size / 2 / 1e9:.2f} billion bf16 parameters, {size / GIB:.2f} GiB\n")
        rows = {"plain copy": copy(root / "hf", root / "copy")}
        shutil.rmtree(root / "copy")
        rows["hf-to-nemo"] = measure("hf_to_nemo", root / "hf", root / "nemo")
        rows["nemo-to-hf"] = measure("nemo_to_hf", root / "nemo", root / "back")
        base = rows["plain copy"]["seconds"]
        print("| | seconds | to a plain copy | peak memory, GiB | to the model's bytes |\n|---|---|---|---|---|")
        for name, row in rows.items():
            memory = row["bytes"]
            print(
                f"| {name} | {row['seconds']:.1f} | {row['seconds'] / base:.1f} | {memory / GIB:.2f} | "
                f"{memory / size:.2f} |"
            )


if __name__ == "__main__":
    main()
