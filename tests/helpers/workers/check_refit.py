"""Weights from a trainer to a second process by the group that a refit uses, both on one device, bit for bit.

NCCL refuses two ranks of one host on one GPU, and takes two hosts' for different ones: each process is given a host
of its own (NCCL_HOSTID), and they talk over the loopback interface. Their kernels take turns on the GPU, so the time is
an upper bound and no bandwidth. Where there is no GPU the same goes over gloo between two processes of the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import fake_cuda
import torch
from torch.distributed import TCPStore

from nemo_flashrl import platform
from nemo_flashrl.weight_sync.process_group import CONNECT, GO, TRAINER, WeightGroup

STEP, SECONDS = "weights 1", 50.0
ONE_CARD = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
REFUSALS = ("invalid usage", "Duplicate GPU")


def main(tensors: int, width: int) -> dict:
    if fake_cuda.is_installed():
        platform.has_gpu = lambda: False
    os.environ.update(ONE_CARD, NCCL_HOSTID="trainer")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, __file__, str(store.port), str(tensors), str(width)]
    receiver = subprocess.Popen(command, env=os.environ | {"NCCL_HOSTID": "server"})
    try:
        return send(store, tensors, width, receiver)
    finally:
        receiver.kill()
        receiver.wait()


def send(store: TCPStore, tensors: int, width: int, receiver: subprocess.Popen) -> dict:
    group = WeightGroup(store, "refit", TRAINER, 2, SECONDS)
    await_report(group, CONNECT, receiver)
    group.decide(CONNECT, GO)
    try:
        group.connect()
        values = list(weights(tensors, width, seed=1))
        await_report(group, STEP, receiver)
        group.decide(STEP, GO)
        group.broadcast(values[0], STEP)  # connections are made at the first
        start = time.monotonic()
        for value in values[1:]:
            group.broadcast(value, STEP)
        seconds = time.monotonic() - start
    except RuntimeError as error:
        if any(text in str(error) for text in REFUSALS):
            return {"skipped": f"NCCL {platform.describe()['NCCL']} lets no two processes share this GPU"}
        raise
    store.wait(["sums"])
    own = sums(values)
    return {
        "library": store_library(store),
        "same_bits": store.get("sums").decode() == own,
        "bytes": sum(value.nbytes for value in values[1:]),
        "seconds": seconds,
    }


def await_report(group: WeightGroup, step: str, receiver: subprocess.Popen) -> None:
    deadline = time.monotonic() + SECONDS
    while not group.reports(step):
        assert receiver.poll() is None, f"the receiving process ended with {receiver.returncode}"
        assert time.monotonic() < deadline, f"the receiving process is not ready for {step}"
        time.sleep(0.01)


def store_library(store: TCPStore) -> str:
    return store.get("refit/library").decode()


def receive(port: int, tensors: int, width: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    group = WeightGroup(store, "refit", TRAINER + 1, 2, SECONDS)
    for step in (CONNECT, STEP):
        group.report(step)
        group.await_decision(step)
        if step == CONNECT:
            group.connect()
    values = list(weights(tensors, width, seed=2))
    for value in values:
        group.broadcast(value, STEP)
    store.set("sums", sums(values))
    time.sleep(SECONDS)  # the other end closes first, and ends this process


def weights(tensors: int, width: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    device = platform.device()
    return [torch.randn(width, width, generator=generator).to(device, torch.bfloat16) for _ in range(tensors)]


def sums(values: list[torch.Tensor]) -> str:
    """Of all bits, weighted by their place."""
    places = torch.arange(1, values[0].numel() + 1, device=values[0].device)
    return " ".join(str(int((value.view(torch.int16).flatten() * places).sum())) for value in values)


if __name__ == "__main__":
    receive(*map(int, sys.argv[1:]))
