"""The folder in which new weights travel: its bytes, its readers, and how much of a model is in memory meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import write_model
from transformers import AutoModelForCausalLM

from nemo_flashrl.weight_sync.folder import HEADER_BYTES, INDEX, WeightsHome, write_folder


def write(stream, folder: Path) -> int:
    return asyncio.run(write_folder(stream, folder))


def test_bytes_of_a_folder(tmp_path: Path) -> None:
    """Two fp32 tensors, 8 and 4 bytes, then a bf16 one in a file of its own: 1.0 is 0x3f800000 and 0x3f80."""
    stream = [
        ("a", torch.tensor([1.0, -2.0])),
        ("b", torch.tensor([[1.0]])),
        ("c", torch.tensor([1.0], dtype=torch.bfloat16)),
    ]
    assert write(stream, tmp_path / "w") == 14
    index = json.loads((tmp_path / "w" / INDEX).read_text())
    first, second = "model-00001.safetensors", "model-00002.safetensors"
    assert index == {"metadata": {"total_size": 14}, "weight_map": {"a": first, "b": first, "c": second}}
    content = (tmp_path / "w" / first).read_bytes()
    assert content[:8] == HEADER_BYTES.to_bytes(8, "little")
    assert json.loads(content[8 : 8 + HEADER_BYTES]) == {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [1, 1], "data_offsets": [8, 12]},
    }
    assert content[8 + HEADER_BYTES :] == bytes.fromhex("0000803f 000000c0 0000803f")
    assert (tmp_path / "w" / second).read_bytes()[-2:] == bytes.fromhex("803f")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    """Strided and empty-headed tensors too: what comes back is bit for bit what went in."""
    source = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "a", dtype=dtype), dtype=dtype)
    named = [(n, t.t().contiguous().t() if t.dim() == 2 else t) for n, t in source.state_dict().items()]
    write(named, tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=dtype).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in named)


def test_a_full_table_begins_the_next_file(tmp_path: Path) -> None:
    names = ["x" * 3000 + str(n) for n in range(40)]  # 22 such rows fit
    write(((name, torch.tensor([float(n)])) for n, name in enumerate(names)), tmp_path / "w")
    weight_map = json.loads((tmp_path / "w" / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) == 2
    for n, name in enumerate(names):
        with safe_open(tmp_path / "w" / weight_map[name], framework="pt") as file:
            assert file.get_tensor(name).tolist() == [n]


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Of 12 tensors never more than the one that is written and the one that is made are alive."""
    alive: list[weakref.ref] = []
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for n in range(12):
            tensor = torch.full((1000,), float(n))
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            yield f"w{n}", tensor

    write(stream(), tmp_path / "w")
    assert most <= 2


def test_homes_of_killed_trainers_are_removed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from nemo_flashrl.weight_sync.folder import WeightsHome\n"
        f"home = WeightsHome(Path({str(tmp_path)!r})); print(home.folder, flush=True); time.sleep(600)"
    )
    trainers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, alive = (Path(trainer.stdout.readline().strip()) for trainer in trainers)
    trainers[0].kill()
    trainers[0].wait()
    (killed / "sync-1").mkdir()
    home = WeightsHome(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, home.folder])
    trainers[1].kill()
    trainers[1].wait()
    home.remove()
    assert not home.folder.exists()


def test_what_is_refused(tmp_path: Path) -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="duplicate tensor a"):
        write([("a", one), ("a", one)], tmp_path / "1")
    with pytest.raises(ValueError, match="a is torch.int64"):
        write([("a", one.long())], tmp_path / "2")
    assert not list(tmp_path.glob(f"*/{INDEX}"))  # so nobody takes them for whole
