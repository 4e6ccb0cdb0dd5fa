"""The counters of fake CUDA, by operations whose costs are known."""

from __future__ import annotations

from gpu_recorder import Event, Site, two_clocks
from stand_in_process import StandInProcess

MIB = 2**20


def test_counters(fake_gpu: StandInProcess) -> None:
    found = fake_gpu.run("gpu_counters")
    # The weight's 2 MiB, read once, its square's 2, and 4 in fp32.
    assert found["peak"] == 8 * MIB
    assert found["events"] == [["mm", 2 * 1024**3, 4 * MIB], ["_to_copy", 0, 6 * MIB]]
    assert found["gradient"] == "cuda:0"
    assert found["fused"] == [[["activated", 8 * MIB]], 4 * MIB]  # what it forms on the way takes nothing
    assert found["chosen"] == [7]
    waits = [line.split(" workers/")[0] for line in found["waits"]]
    assert waits == ["1 to host", "1 item", "1 mask"]
    assert found["waits"][1].endswith("if wide.sum():")
    assert found["late"] == 1
    assert "two devices, cuda:0 and cpu" in found["mismatch"]
    assert "no answer for a host sync (item, (), torch.float32)" in found["unanswered"]


def test_two_clocks() -> None:
    """The host launches in 6 us each and a wait costs it 8; a product of 7e9 FLOP takes the device 10 us."""
    kernel, wait = Event("mm", Site("?", 0, "?"), 7_000_000_000, 0), Event("sync", Site("?", 0, "?"), 0, 0)
    ahead = two_clocks([kernel] * 3)
    assert ahead == {"wall": 0.039, "busy": 0.03, "floor": 0.03}  # 6 + 3, then the device is never idle
    # After the wait the host is at 27, launches by 33, and the device starts at 36.
    assert two_clocks([kernel, wait, kernel])["wall"] == 0.046
