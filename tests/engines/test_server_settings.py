"""`rollout.engine` and what belongs to it: refused in one line before a model is built, and made into an engine."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny import write_model

from nemo_flashrl import config
from nemo_flashrl.config.schema import RolloutConfig
from nemo_flashrl.engines import AdapterEngine, BroadcastEngine, SGLangEngine, TransformersEngine, VLLMEngine
from nemo_flashrl.engines.factory import make_engine, server_versions
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.rehearsal.warm_start import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "m")
    make_tokenizer().save_pretrained(folder)
    return folder


def settings(model: Path, tmp_path: Path, *overrides: str) -> config.RunConfig:
    return config.load("rehearsal", [f"output={tmp_path}/run", f"model.path={model}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=vllm"], r"rollout.servers=\[\].*engine=vllm needs the URL of at least one server"),
        (["rollout.engine=sglang"], r"rollout.servers=\[\].*engine=sglang"),
        (["rollout.servers=[http://a:1]"], "engine=transformers uses none"),
        (["rollout.engine=vllm", "rollout.servers=['a:1']"], "'a:1' is not a URL"),
        (["rollout.engine=vllm", "rollout.servers=[http://a:1,http://a:1/]"], "a server is named twice"),
        (["rollout.engine=vllm", "rollout.servers=[http://a:1]", "rollout.temperature=3"], "vLLM allows at most 2"),
        (["rollout.engine=vllm", "rollout.servers=[http://a:1]", "rollout.weights_folder=/no/such"], "weights_folder"),
        (
            ["rollout.weight_transfer=broadcast", "rollout.engine=sglang", "rollout.servers=[http://a:1]"],
            "weight_transfer=broadcast: rollout.engine=sglang supports only file; set it to file, .*engine to vllm",
        ),
        (
            ["rollout.weight_transfer=broadcast"],
            "weight_transfer=broadcast: rollout.engine=transformers supports only file; set it to file",
        ),
        (
            ["rollout.weight_transfer=adapter", "rollout.engine=vllm", "rollout.servers=[http://a:1]"],
            "weight_transfer=adapter: lora.rank=0 trains no adapter; set a rank, or transfer by file",
        ),
    ],
)
def test_refused(model: Path, tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(settings(model, tmp_path, *overrides), 1)


def test_unknown_transfer(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout.weight_transfer='nccl': must be one of file, broadcast, adapter"):
        settings(model, tmp_path, "rollout.weight_transfer=nccl")


def test_unknown_engine(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout.engine='tgi': must be one of transformers, vllm, sglang"):
        settings(model, tmp_path, "rollout.engine=tgi")


@pytest.mark.parametrize(
    ("name", "transfer", "kind"),
    [
        ("transformers", "file", TransformersEngine),
        ("vllm", "file", VLLMEngine),
        ("vllm", "broadcast", BroadcastEngine),
        ("vllm", "adapter", AdapterEngine),
        ("sglang", "file", SGLangEngine),
    ],
)
def test_engine_of_a_configuration(model: Path, tmp_path: Path, name: str, transfer: str, kind: type) -> None:
    servers = [] if name == "transformers" else ["rollout.servers=[http://a:1]", f"rollout.weights_folder={tmp_path}"]
    run = settings(model, tmp_path, f"rollout.engine={name}", f"rollout.weight_transfer={transfer}", *servers)
    assert type(make_engine(run.rollout, str(model), 515, 128)) is kind


class Answers(BaseHTTPRequestHandler):
    """Two servers that tell their version, each at its own route."""

    def do_GET(self) -> None:
        known = {"/version": {"version": "0.11.0"}, "/get_server_info": {"version": "0.5.4", "model": "m"}}
        body = json.dumps(known.get(self.path, {})).encode()
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_servers_are_asked_for_their_version() -> None:
    """What does not answer, or answers something else, is left out."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        servers = [f"{url}/", f"{url}/elsewhere", "http://127.0.0.1:9"]
        vllm = server_versions(RolloutConfig(engine="vllm", servers=servers))
        sglang = server_versions(RolloutConfig(engine="sglang", servers=servers))
        server.shutdown()
    assert (vllm, sglang) == ({f"vllm of {url}/": "0.11.0"}, {f"sglang of {url}/": "0.5.4"})
    assert server_versions(RolloutConfig()) == {}
