"""Python code in a process of its own: bounded in time, memory and output, without network, killed with its children.

Where the kernel permits it to a user, the process lives in new network and process namespaces (`unshare`): no network
exists there, and all that it started dies with it. Elsewhere an audit hook refuses sockets and child processes, which
stops an honest mistake and no attacker. Either way it may read what the user may read: run untrusted policies under a
user, or in a container, that has nothing to hide.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("python_child.py")
_NAMESPACES = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child=SIGKILL", "--")
_READ = 2**16


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What one run may use."""

    seconds: float = 10.0  # wall time
    bytes: int = 512 * 2**20  # address space
    output_bytes: int = 2**16  # of standard output and error together; the rest is thrown away and the process ends


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    output: str  # standard output and error, in the order in which they were written
    how: str  # "ended" | "timeout" | "output_limit" | "died", by a signal or an exit code that is not 0


@functools.cache
def isolation() -> str:
    """What keeps the network away on this machine: "namespace" or "audit_hook"."""
    try:
        probe = subprocess.run([*_NAMESPACES, "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "audit_hook"
    return "audit_hook" if probe.returncode else "namespace"


async def run_python(code: str, limits: ProcessLimits) -> Outcome:
    """Run `code` to its end or its limits, in an empty folder that is removed afterwards."""
    how_isolated = await asyncio.to_thread(isolation)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(_NAMESPACES if how_isolated == "namespace" else ()),
            sys.executable,
            "-Iu",
            str(_CHILD),
            str(limits.bytes),
            str(int(limits.seconds) + 1),
            str(int(how_isolated == "audit_hook")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        output = bytearray()
        try:
            async with asyncio.timeout(limits.seconds):
                how = await _talk(process, code, output, limits.output_bytes)
        except TimeoutError:
            how = "timeout"
        finally:
            # Also after it has ended: what it started may live on.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Outcome(output[: limits.output_bytes].decode("utf-8", "replace"), how)


async def _talk(process: asyncio.subprocess.Process, code: str, output: bytearray, limit: int) -> str:
    with contextlib.suppress(ConnectionError):
        process.stdin.write(code.encode("utf-8", "replace"))
        await process.stdin.drain()
    process.stdin.close()
    while piece := await process.stdout.read(_READ):
        output += piece
        if len(output) > limit:
            return "output_limit"
    return "died" if await process.wait() else "ended"
