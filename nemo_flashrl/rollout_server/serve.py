"""vLLM servers as this trainer needs them: started, waited for, started again when they die, ended together.

Each server is a process group of its own. When this process is ended, by whatever signal, none of them stays.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from nemo_flashrl.config import RunConfig
from nemo_flashrl.launch.parent import end_with_parent
from nemo_flashrl.rollout_server.model_check import are_tokens, check_model

GRACE_SECONDS = 20.0
POLL_SECONDS = 0.5
HEALTH_SECONDS, MOST_REFUSALS = 5.0, 3
# A server that dies this soon after it answers, so often in a row, would die for ever.
EARLY_SECONDS, MOST_EARLY_DEATHS = 120.0, 3
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# No telemetry, no hub: weights come from the trainer. The routes for new weights are in vLLM's development mode.
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Seconds. A busy server looks at its timers before its sockets: it would close a connection over a waiting request.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
}
_ADAPTER_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_CPU_ENVIRONMENT = {"VLLM_CPU_CI_ENV": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB of KV cache
# A prompt in chunks kills vLLM 0.32 on a CPU where the request has a seed ("CPU Generator does not use offset").
_CPU_FLAGS = ("--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill")
# On one device vLLM's scheduler and worker would be two processes that wait for each other in loops around sched_yield:
# on two cores others then wait for a second and more. By its class, since vLLM's CPU platform replaces the name "uni".
_CPU_ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
_CPU_BATCHED_TOKENS = 4096  # of one step, and at least a whole context where prompts are not chunked


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the command line says beside the configuration."""

    host: str = "127.0.0.1"  # the routes for new weights ask for no password
    port: int | None = None  # of the first server; None takes the ports of rollout.servers
    servers: int = 1  # on consecutive ports from `port`
    tensor_parallel: int = 1  # GPUs of one server
    follow: int | None = None  # a process with whose end the servers end
    timeout: float = 300.0  # seconds until all answer
    flags: str = ""  # for vLLM, as on its command line


@dataclass(slots=True)
class _Server:
    port: int
    command: list[str]
    environment: Mapping[str, str]
    process: subprocess.Popen | None = None
    ready: bool = False
    ready_at: float = 0.0
    early_deaths: int = 0  # in a row
    refusals: int = 0  # of health checks, in a row
    look_at: float = 0.0  # when the next one is due

    def is_lost(self, host: str) -> bool:
        """Whether one that has answered refuses: when its engine dies, vLLM waits for open requests without an end."""
        if time.monotonic() < self.look_at:
            return False
        self.look_at = time.monotonic() + HEALTH_SECONDS
        self.refusals = self.refusals + 1 if _health(host, self.port) >= 500 else 0
        return self.refusals == MOST_REFUSALS

    def start(self) -> None:
        self.ready, self.refusals = False, 0
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


@dataclass(slots=True)
class _Signals:
    """Notes SIGTERM and SIGINT while it is entered."""

    received: int | None = None
    before: dict[int, object] = field(default_factory=dict)

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.received = number


def serve(config: RunConfig, options: ServeOptions) -> int:
    """Run servers until a signal comes or the process to follow ends; returns the exit code.

    Raises:
        ValueError: vLLM is not here, a port is taken, or the configuration names no port.
        RuntimeError: a server ended before it answered or soon after it again and again, or did not answer in time.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(f"vLLM is not installed for {sys.executable}: run this from the environment that holds it")
    accelerated = _has_accelerator()
    ports = _ports(config, options)
    check_model(Path(config.model.path), accelerated)
    more = _ADAPTER_ENVIRONMENT if config.rollout.weight_transfer == "adapter" else {}
    servers = [
        _Server(port, command(config, options, port, accelerated), environment(options, index, accelerated) | more)
        for index, port in enumerate(ports)
    ]
    with _Signals() as signals:
        try:
            for server in servers:
                server.start()
            _supervise(servers, options, signals)
        finally:
            _end(servers)
    return 0 if signals.received is None else 128 + signals.received


def command(config: RunConfig, options: ServeOptions, port: int, accelerated: bool) -> list[str]:
    """vLLM's command line. The `vllm` script is not used: builds for the CPU have another distribution name."""
    context = config.model.context_length
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(Path(config.model.path).resolve())),
        *(("--skip-tokenizer-init",) if are_tokens(Path(config.model.path), config.rollout.stop) else ()),
        *("--host", options.host, "--port", str(port)),
        *("--dtype", _DTYPES[config.model.precision], "--max-model-len", str(context)),
        *("--max-num-seqs", str(min(256, config.rollout.slots))),
        *("--tensor-parallel-size", str(options.tensor_parallel)),
        "--enable-scale-out",
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--worker-extension-cls", "nemo_flashrl.rollout_server.worker.WorkerExtension"),
        *("--weight-transfer-config", json.dumps({"backend": "flashrl"})),
        *(_adapter_flags(config.lora.rank) if config.rollout.weight_transfer == "adapter" else ()),
        *(() if accelerated else _cpu_flags(context, options.tensor_parallel)),
        *shlex.split(options.flags),
    ]


def _cpu_flags(context: int, tensor_parallel: int) -> tuple[str, ...]:
    executor = _CPU_ONE_PROCESS if tensor_parallel == 1 else ()
    return *_CPU_FLAGS, *executor, "--max-num-batched-tokens", str(max(_CPU_BATCHED_TOKENS, context))


def _adapter_flags(rank: int) -> tuple[str, ...]:
    """vLLM makes room for one of a few ranks."""
    if rank > _ADAPTER_RANKS[-1]:
        raise ValueError(f"lora.rank={rank}: vLLM takes adapters of rank {_ADAPTER_RANKS[-1]} at most")
    room = next(size for size in _ADAPTER_RANKS if size >= rank)
    return "--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)


def environment(options: ServeOptions, index: int, accelerated: bool) -> dict[str, str]:
    """What the server's process needs beside ours; what the user has set stays on a CPU."""
    if not accelerated:
        return _ENVIRONMENT | {name: os.environ.get(name, value) for name, value in _CPU_ENVIRONMENT.items()}
    first = index * options.tensor_parallel
    end = first + options.tensor_parallel
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = own.split(",") if own else [str(n) for n in range(end)]
    if len(devices) < end:
        each = f"{index + 1} server(s) of {options.tensor_parallel} each need {end}"
        raise ValueError(f"CUDA_VISIBLE_DEVICES={own!r} names {len(devices)} GPU(s), and {each}")
    return _ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(devices[first:end])}


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _ports(config: RunConfig, options: ServeOptions) -> list[int]:
    if options.port is not None:
        ports = list(range(options.port, options.port + options.servers))
    else:
        ports = [urlsplit(url).port or 80 for url in config.rollout.servers]
    if not ports:
        raise ValueError("rollout.servers=[] and no --port: set the port on which the servers listen")
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((options.host, port))
            except (OSError, OverflowError) as error:
                reason = getattr(error, "strerror", error)
                raise ValueError(f"port {port} of {options.host} cannot be used: {reason}") from error
    return ports


def _supervise(servers: Sequence[_Server], options: ServeOptions, signals: _Signals) -> None:
    """Until it is time to end. A server that has answered and died is started again, with its first weights."""
    deadline = time.monotonic() + options.timeout
    while signals.received is None and (options.follow is None or _is_alive(options.follow)):
        for server in servers:
            if server.ready and server.is_lost(options.host):
                _say(f"the server on port {server.port} fails its health checks and is stopped")
                _end([server])
            code = server.process.poll()
            if code is not None:
                if not server.ready:
                    raise RuntimeError(f"the server on port {server.port} exited with code {code} before it answered")
                early = time.monotonic() - server.ready_at < EARLY_SECONDS
                server.early_deaths = server.early_deaths + 1 if early else 0
                if server.early_deaths == MOST_EARLY_DEATHS:
                    raise RuntimeError(
                        f"the server on port {server.port} exited with code {code} soon after it answered, "
                        f"{MOST_EARLY_DEATHS} times in a row: see its own log"
                    )
                _say(f"the server on port {server.port} exited with code {code} and is restarted")
                _end([server])  # its workers may live on
                server.start()
                deadline = time.monotonic() + options.timeout
            elif not server.ready and _health(options.host, server.port) == 200:
                server.ready, server.ready_at = True, time.monotonic()
                _say(f"http://{options.host}:{server.port} is ready")
            elif not server.ready and time.monotonic() > deadline:
                raise RuntimeError(f"the server on port {server.port} did not answer in {options.timeout:g} s")
        time.sleep(POLL_SECONDS)
    _say("stopping the servers")


def _health(host: str, port: int) -> int:
    """The status of a server's health check: 503 also for a closed port, 0 for silence. Asked without a proxy."""
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{here}:{port}/health", timeout=2) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError as error:
        return 503 if isinstance(getattr(error, "reason", error), ConnectionRefusedError) else 0


def _is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to notice does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _end(servers: Sequence[_Server]) -> None:
    """SIGTERM to every group, then SIGKILL to what is left of it."""
    started = [server.process for server in servers if server.process is not None]
    for process in started:
        _kill(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        _kill(process, signal.SIGKILL)
        process.wait()


def _kill(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _say(text: str) -> None:
    print(f"flashrl serve-rollout: {text}", flush=True)
