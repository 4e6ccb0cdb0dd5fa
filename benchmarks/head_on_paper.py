"""The policy head of a GPU on paper: no GPU is needed, and none is measured.

    python benchmarks/head_on_paper.py              # the table; a C++ compiler and some minutes of one core

The head runs on fake CUDA tensors of true sizes (tests/helpers/fake_cuda.py), which have no values: every launch, host
sync and byte is counted, and the peak of what is alive. Two clocks make a time of them. The device forms products at
700 TFLOP/s, moves bytes at 85% of 3.35 TB/s and takes at least 2.5 us a kernel; the host takes 6 us a launch and 8 us a
sync, and a sync waits for the device. Collectives cost their launches alone. Operands and results of a product are
moved while it computes; a kernel of Triton or apex reads and writes each of its tensors once.

"floors": the time over that of the products it needs, the tokens outside the mask left out.
"bytes": moved by all but products, over the logits of a walk's tokens; a gated loss walks twice.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from fake_cuda import compiler  # noqa: E402
from gpu_sizes import LLAMA3_8B_HEAD  # noqa: E402
from stand_in_process import StandInProcess  # noqa: E402

WAYS = {
    "gated, all live": {"way": "gated"},
    "one pass": {"way": "one pass"},
    "one pass, half live, 45% to 55% of a shard": {"way": "one pass", "live": 0.5, "spread": 0.1},
}
OTHERS = {  # at TP=8
    "gated, chunk 512": {"way": "gated", "chunk": 512},
    "one pass, chunk 512": {"way": "one pass", "chunk": 512},
    "one pass, no apex": {"way": "one pass", "apex": False},
    "one pass, no Triton": {"way": "one pass", "triton": False},
    "one pass, neither": {"way": "one pass", "triton": False, "apex": False},
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if compiler() is None:
        sys.exit("no C++ compiler (c++, or what CXX names), which fake CUDA's device guard needs")
    print("on paper: T=32768 H=4096 V=128256 bf16, sequence parallel, gradient of the weight summed into main_grad")
    print("| TP | loss | chunk | launches | syncs | ms | floors | bytes | peak MiB | planned MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    gpu = StandInProcess("cuda")
    for tensor, ways in ((1, WAYS), (4, WAYS), (8, WAYS | OTHERS)):
        for name, options in ways.items():
            if tensor == 1 and "spread" in options:
                name, options = "one pass, half live", options | {"spread": 0.0}
            found = gpu.run("gpu_head", **LLAMA3_8B_HEAD, **options, tensor=tensor)
            cells = [tensor, name, found["chunk"], found["launches"], found["num_syncs"], f"{found['ms']:.1f}"]
            cells += [f"{found['ms'] / found['floor_ms']:.2f}", f"{found['bytes_of_walk']:.1f}"]
            cells += [f"{found[key] / 2**20:.0f}" for key in ("peak", "planned")]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    gpu.close()


if __name__ == "__main__":
    main()
