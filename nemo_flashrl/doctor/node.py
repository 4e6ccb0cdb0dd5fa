"""`flashrl doctor env [CONFIG]`: is this node fit for a run, and what does a missing part cost.

Under `srun --ntasks-per-node=1` every host looks at itself, and at its clock and the shared folder beside the first's.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from nemo_flashrl import platform
from nemo_flashrl.config import RunConfig, load
from nemo_flashrl.doctor.hosts import compare_hosts
from nemo_flashrl.plan.devices import DEVICES

OK, WARN, FAIL = "OK", "WARN", "FAIL"
# Package -> the lines of releases that this package is written for, which the tests and NVIDIA's images 25.11 and 26.02
# hold; docs/cluster.md shows them.
ACCEPTED = {
    "nemo_toolkit": ("2.6", "2.7"),
    "megatron-core": platform.SUPPORTED_MEGATRON,
    "transformers": ("4",),
    "lightning": ("2.4", "2.5"),
    "hydra-core": ("1.3",),
}
# Package -> (releases of those images, what a run on GPUs costs without it).
ON_GPUS = {
    "transformer-engine": (("2.9", "2.12"), "Megatron's unfused layers: slower, more memory, no context parallelism"),
    "flash-attn": ((), "attention by Transformer Engine's own kernels"),
    "apex": ((), "gradient accumulation in fp32 is not fused: extra kernels"),
}
FILES, SHARED_MEMORY_GIB = 4096, 1.0
LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "overlay", "tmpfs", "zfs"}


@dataclass(frozen=True)
class Look:
    """One thing looked at: `state` is OK, WARN (a run works, at a cost) or FAIL (it does not)."""

    state: str
    name: str
    found: str


def check_node(name: str | None, overrides: Sequence[str]) -> tuple[str, bool]:
    """(text, whether a run would fail here), for a configuration or, without one, for the defaults."""
    config = load(name, overrides, unneeded=("output", "model.path")) if name else RunConfig(output="")
    looks = [*_devices(config), *_packages(config), *_variables(config, os.environ), *_limits(config)]
    looks += [*_output(config), *_ports(config)]
    looks += [Look(OK if fine else FAIL, what, found) for what, fine, found in compare_hosts(config.output)]
    lines = [f"  {look.state:<4} {look.name:<20} {look.found}" for look in looks]
    bad = [look.name for look in looks if look.state == FAIL]
    verdict = f"a run would fail on this node: {', '.join(bad)}" if bad else "this node is ready for a run"
    return "\n".join([f"{socket.gethostname()}: {name or 'no configuration given'}", *lines, "", verdict]), bool(bad)


def _devices(config: RunConfig) -> Iterator[Look]:
    wanted, there = config.cluster.gpus_per_node, platform.describe()
    count = int(there["devices"])
    yield Look(
        OK if count >= wanted else FAIL,
        "GPUs",
        f"{count} x {there['name']}" if count else f"none; cluster.gpus_per_node={wanted}",
    )
    for part in ("CUDA", "NCCL"):
        if wanted or count:
            yield Look(OK if there[part] else FAIL, part, there[part] or f"torch {there['torch']} is built without it")
    known = DEVICES.get(config.cluster.device.upper())
    if count and known and float(there["memory_gib"]) < known.memory_gib - 1:
        memory = f"{there['memory_gib']} GiB; `flashrl plan` assumes {known.memory_gib} ({config.cluster.device})"
        yield Look(FAIL, "GPU memory", memory)


def _packages(config: RunConfig) -> Iterator[Look]:
    yield Look(OK, "torch", platform.describe()["torch"])
    for name, lines in ACCEPTED.items():
        version = installed(name)
        accepted = version is not None and in_line(version, lines)
        # Another line may well run; a package that is not there does not.
        state = OK if accepted else WARN if version else FAIL
        yield Look(state, name, version if accepted else f"{version or 'not installed'}; {_written_for(lines)}")
    for name, (lines, cost) in ON_GPUS.items():
        version = installed(name)
        if version:
            other = lines and not in_line(version, lines)
            yield Look(WARN if other else OK, name, f"{version}; {_written_for(lines)}" if other else version)
        elif config.cluster.gpus_per_node:
            needed = name == "transformer-engine" and config.parallel.context > 1
            yield Look(FAIL if needed else WARN, name, f"not installed: {cost}")
        else:
            yield Look(OK, name, "not installed; used on GPUs only")


def _written_for(lines: Sequence[str]) -> str:
    return f"this package is written for {' and '.join(lines)}"


def installed(name: str) -> str | None:
    """The version of a package, None where it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_line(version: str, lines: Sequence[str]) -> bool:
    """Whether a version belongs to one of some lines of releases.

    >>> in_line("0.15.3", ["0.15"]), in_line("0.151.0", ["0.15"])
    (True, False)
    """
    return any(re.match(rf"{re.escape(line)}(\D|$)", version) for line in lines)


def _variables(config: RunConfig, environment: Mapping[str, str]) -> Iterator[Look]:
    """`flashrl train` sets what is not set; a value that is there already stays."""
    for name, value in config.cluster.environment.items():
        given = environment.get(name, value)
        if given != value:
            yield Look(WARN, name, f"{given} is set on this node and is kept; cluster.environment asks for {value}")


def _limits(config: RunConfig) -> Iterator[Look]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = f"{soft} files (ulimit -n)"
    yield Look(
        OK if soft >= FILES else FAIL,
        "open files",
        enough if soft >= FILES else f"{enough}: at least {FILES} needed, hard limit {hard}",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if config.cluster.nodes > 1 and locked != resource.RLIM_INFINITY:
        yield Look(
            WARN,
            "locked memory",
            f"{locked >> 20} MiB (ulimit -l): InfiniBand needs unlimited, otherwise NCCL falls back to TCP",
        )
    free = shutil.disk_usage("/dev/shm").free / 2**30
    text = f"{free:.1f} GiB free in /dev/shm"
    fits = free >= SHARED_MEMORY_GIB or not config.cluster.gpus_per_node
    yield Look(OK if fits else FAIL, "shared memory", text if fits else f"{text}: NCCL needs {SHARED_MEMORY_GIB} GiB")


def _output(config: RunConfig) -> Iterator[Look]:
    if not config.output:
        yield Look(OK, "output", "not set; give a configuration and output=... to check it")
        return
    folder = existing_parent(Path(config.output))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield Look(FAIL, "output", f"{folder} cannot be written: {error.strerror}")
        return
    kind = file_system(folder, Path("/proc/self/mounts").read_text())
    free = f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB free on {folder} ({kind})"
    local = config.cluster.nodes > 1 and kind in LOCAL_FILE_SYSTEMS
    yield Look(
        FAIL if local else OK, "output", f"{free}: must be shared by {config.cluster.nodes} nodes" if local else free
    )


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path`, or itself, that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def file_system(folder: Path, mounts: str) -> str:
    """The type of the file system that holds `folder`, from the text of /proc/self/mounts."""
    held = [line.split()[1:3] for line in mounts.splitlines()]
    above = [(len(Path(point).parts), kind) for point, kind in held if folder.resolve().is_relative_to(point)]
    return max(enumerate(above), key=lambda pair: (pair[1][0], pair[0]))[1][1]  # of equal ones the last is on top


def _ports(config: RunConfig) -> Iterator[Look]:
    """Ports of rollout servers that are to run here."""
    own = {"localhost", "127.0.0.1", "0.0.0.0", socket.gethostname()}
    urls = [urlsplit(url) for url in config.rollout.servers]
    for port in sorted({url.port for url in urls if url.hostname in own and url.port}):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                taken = f"{error.strerror}: in use; fine if a rollout server already runs there"
                yield Look(WARN, f"port {port}", taken)
            else:
                yield Look(OK, f"port {port}", "free")
