"""`flashrl serve-rollout`: flags, and that no process and no port outlives it, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paths import HELPERS
from server_processes import free_port

from nemo_flashrl import config
from nemo_flashrl.cli import main
from nemo_flashrl.engines import server_pool
from nemo_flashrl.rollout_server.model_check import check_model
from nemo_flashrl.rollout_server.serve import ServeOptions, command, environment

LONG = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


class Serving:
    """Two stand-ins under one supervisor."""

    def __init__(self, log: Path, follow: int = 0, flags: str = "") -> None:
        self.log, self.ports = log, [free_port()]
        self.ports.append(self.ports[0] + 1)
        arguments = [str(self.ports[0]), "2", str(follow), flags]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, HELPERS / "serve_stand_ins.py", *arguments], stdout=file, stderr=subprocess.STDOUT
            )

    def says(self, text: str, times: int = 1) -> None:
        until(lambda: self.log.read_text().count(text) >= times or self.process.poll() is not None)
        assert self.log.read_text().count(text) >= times, self.log.read_text()

    def servers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    started = Serving(tmp_path / "log")
    started.says("is ready", 2)
    yield started
    started.process.kill()
    started.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_it(serving: Serving, number: int) -> None:
    assert not any(is_free(port) for port in serving.ports)
    serving.process.send_signal(number)
    code = serving.process.wait(LONG)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)
    until(lambda: all(is_free(port) for port in serving.ports))


def test_dead_server_is_started_again(serving: Serving) -> None:
    first = serving.servers()
    os.kill(first[1], signal.SIGKILL)
    serving.says("exited with code -9 and is restarted")
    serving.says("is ready", 3)
    now = serving.servers()
    assert first[0] in now and first[1] not in now and len(now) == 2
    with urllib.request.urlopen(f"http://127.0.0.1:{serving.ports[1]}/health", timeout=10) as answer:
        assert answer.status == 200


def test_server_whose_engine_died_is_started_again(serving: Serving) -> None:
    """vLLM's process then lives on and refuses."""
    first = serving.servers()
    request = urllib.request.Request(
        f"http://127.0.0.1:{serving.ports[1]}/behave", json.dumps({"fail_always": "/health"}).encode()
    )
    urllib.request.urlopen(request, timeout=10).close()
    serving.says(f"the server on port {serving.ports[1]} fails its health checks and is stopped")
    serving.says("is ready", 3)
    assert first[0] in serving.servers() and first[1] not in serving.servers()


def test_a_proxy_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    serving = Serving(tmp_path / "log")
    serving.says("is ready", 2)
    serving.process.terminate()
    assert serving.process.wait(LONG) == 128 + signal.SIGTERM


def test_server_that_dies_again_and_again_is_an_error(serving: Serving) -> None:
    for death in (1, 2, 3):
        os.kill(serving.servers()[-1], signal.SIGKILL)
        if death < 3:
            serving.says("is ready", 2 + death)
    assert serving.process.wait(LONG) == 1
    assert "exited with code -9 soon after it answered, 3 times in a row" in serving.log.read_text()
    assert all(is_free(port) for port in serving.ports)


def test_ends_with_the_process_it_follows(tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    serving = Serving(tmp_path / "log", follow=trainer.pid)
    serving.says("is ready", 2)
    trainer.kill()  # it stays a zombie, which counts as gone
    assert serving.process.wait(LONG) == 0
    assert all(is_free(port) for port in serving.ports)
    trainer.wait()


def test_server_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    serving = Serving(tmp_path / "log", flags="broken")
    assert serving.process.wait(LONG) == 1
    assert "exited with code 3 before it answered" in serving.log.read_text()


CONFIG = """
output: {folder}/run
model: {{path: /models/it, context_length: 512, precision: bf16}}
environment: {{name: key_value_store}}
rollout: {{batch_size: 24, engine: vllm, servers: ["http://127.0.0.1:{port}"]}}
"""


@pytest.fixture
def settings(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, port=free_port()))
    return str(path)


def test_flags(settings: str) -> None:
    """What the engine refuses a server for, and what would make it sample from another distribution."""
    line = " ".join(command(config.load(settings), ServeOptions(flags="--seed 3"), 8000, accelerated=False))
    for flags in (
        "--model /models/it",
        "--max-model-len 512",
        "--dtype bfloat16",
        "--max-num-seqs 24",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--enable-scale-out",
        '--weight-transfer-config {"backend": "flashrl"}',
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens 4096",
    ):
        assert flags in line
    assert line.endswith("--seed 3")
    assert "--enforce-eager" not in command(config.load(settings), ServeOptions(), 8000, accelerated=True)


@pytest.mark.parametrize(("devices", "accelerated", "one"), [(1, False, True), (2, False, False), (1, True, False)])
def test_scheduler_and_worker_share_a_process(settings: str, devices: int, accelerated: bool, one: bool) -> None:
    """On one device of a CPU; as two they spin, and every other process of a small machine waits for them."""
    options = ServeOptions(tensor_parallel=devices)
    assert (" ".join(command(config.load(settings), options, 8000, accelerated)).count("UniProcExecutor") == 1) == one


def test_an_idle_connection_outlives_what_our_client_keeps() -> None:
    """uvicorn closes one when its time has come, also with a request in its buffer."""
    for accelerated in (False, True):
        kept = float(environment(ServeOptions(), 0, accelerated)["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"])
        assert kept >= 10 * server_pool._KEEP_ALIVE


def test_room_for_an_adapter(settings: str) -> None:
    """vLLM has sizes for ranks: 12 takes the room of 16."""

    def line(rank: int) -> str:
        run = config.load(settings, ["rollout.weight_transfer=adapter", f"lora.rank={rank}"])
        return " ".join(command(run, ServeOptions(), 8000, accelerated=False))

    assert "--enable-lora --max-loras 1 --max-lora-rank 16 " in line(12)
    assert "--enable-lora" not in " ".join(command(config.load(settings), ServeOptions(), 8000, accelerated=False))
    with pytest.raises(ValueError, match="lora.rank=600: vLLM takes adapters of rank 512 at most"):
        line(600)


def test_devices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(tensor_parallel=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(options, 1, accelerated=True)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert environment(options, 1, accelerated=True)["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert "CUDA_VISIBLE_DEVICES" not in environment(options, 1, accelerated=False)
    with pytest.raises(ValueError, match=r"'4,5,6,7' names 4 GPU\(s\), and 3 server\(s\) of 2 each need 6"):
        environment(ServeOptions(servers=3, tensor_parallel=2), 2, accelerated=True)


def test_refusals(settings: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert main(["serve-rollout", settings]) == 2
    assert "vLLM is not installed for" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert main(["serve-rollout", settings, "rollout.servers=[]"]) == 2
    assert "set the port on which the servers listen" in capsys.readouterr().err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve-rollout", settings, "--port", str(port)]) == 2
        assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in capsys.readouterr().err
    assert main(["serve-rollout", settings, "--port", "65535", "--servers", "2"]) == 2
    assert "port 65536 of 127.0.0.1 cannot be used" in capsys.readouterr().err
    for flag, value, right in (
        ("--port", "0", "from 1 to 65535"),
        ("--port", "70000", "from 1 to 65535"),
        ("--servers", "0", "of at least 1"),
        ("--tensor-parallel", "-1", "of at least 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["serve-rollout", settings, f"{flag}={value}"])
        assert f"argument {flag}: {value!r}: must be a whole number {right}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.json names no model (FileNotFoundError"),
        ({"model_type": "qwen2"}, "config.json names no model (KeyError('hidden_size'))"),
        ({"hidden_size": 64, "num_attention_heads": 4}, "heads of 16; vLLM on a CPU needs 32 or more"),
        ({"head_dim": 32, "hidden_size": 64, "num_attention_heads": 4}, ""),
    ],
)
def test_a_model_that_cannot_be_served(config: dict | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        check_model(tmp_path / "none", accelerated=False)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(said)) if said else contextlib.nullcontext():
        check_model(tmp_path, accelerated=False)


def test_no_output_is_needed(settings: str, capsys: pytest.CaptureFixture) -> None:
    file = Path(settings)
    file.write_text("".join(line for line in file.open() if not line.startswith("output")))
    assert main(["serve-rollout", settings]) == 2
    assert "vLLM is not installed for" in capsys.readouterr().err


def test_servers_get_the_time_that_the_trainer_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(
        "nemo_flashrl.commands.serve_rollout.serve", lambda run, options: waited.append(options.timeout) or 0
    )
    job = ["serve-rollout", "rehearsal", "output=x", "model.path=x"]
    for more in ([], ["rollout.server_timeout=900"], ["rollout.server_timeout=900", "--timeout", "5"]):
        assert main([*job, *more]) == 0
    assert waited == [300, 900, 5]
