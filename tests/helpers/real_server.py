"""One vLLM server for a whole test session: `flashrl serve-rollout` in vLLM's own environment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from paths import ROOT
from server_processes import free_port
from tiny import write_model

from nemo_flashrl.rehearsal.warm_start import make_tokenizer

VOCAB = 515
CONTEXT = 1024
# vLLM's attention on a CPU needs heads of at least 32.
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
CONFIG = """
output: {folder}/runs
model: {{path: {model}, context_length: {context}, precision: fp32}}
environment: {{name: letters.Letters}}
rollout: {{engine: vllm, batch_size: 32}}
"""


def rollout_python() -> Path | None:
    """The interpreter of vLLM's environment (`make rollout-venv`); None where it is not installed."""
    python = ROOT / os.environ.get("ROLLOUT_VENV", ".venv-rollout") / "bin" / "python"
    return python if python.is_file() else None


class RealServer:
    """Begun at once, waited for when it is needed, ended with the process that began it; of a model of its own or one.

    `overrides` are of the server's configuration.
    """

    def __init__(self, model: Path | None = None, *overrides: str) -> None:
        folder = self._folder = Path(tempfile.mkdtemp(prefix="flashrl-test-server-"))
        self.model = model or write_model(folder / "model", vocab_size=VOCAB, **SIZES)
        make_tokenizer().save_pretrained(self.model)
        config = folder / "serve.yaml"
        config.write_text(CONFIG.format(folder=folder, model=self.model, context=CONTEXT))
        self.log, self.port = folder / "server.log", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [rollout_python(), "-m", "nemo_flashrl.cli", "serve-rollout", config, *overrides]
        # Nothing of the tests' own environment may lend the server a module.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--follow", str(os.getpid())],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
            )

    def wait(self) -> None:
        """Until it says that it is ready; a busy machine takes minutes."""
        while "is ready" not in self.log.read_text():
            assert self.process.poll() is None, f"the server ended\n{self.log.read_text()[-6000:]}"
            time.sleep(0.2)

    def vllm_process(self) -> int:
        """vLLM's first process, the leader of its group."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def end(self) -> int:
        """SIGTERM, and its exit code; its folder goes, the log with it."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        shutil.rmtree(self._folder)
        return code
