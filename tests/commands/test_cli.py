"""What a user sees: help, one clear line for a bad request, exit codes, nothing left behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nemo_flashrl.cli import main
from nemo_flashrl.config import load
from nemo_flashrl.config.schema import ClusterConfig
from nemo_flashrl.engines.server_pool import NoServer
from nemo_flashrl.plan.devices import DEVICES
from nemo_flashrl.preflight.prepare import prepare
from nemo_flashrl.rehearsal.warm_start import make_warm_start
from nemo_flashrl.run.folder import NotSaved

FLASHRL = [sys.executable, "-m", "nemo_flashrl.cli"]


@pytest.fixture
def flashrl(capsys):
    """The command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_warm_start(tmp_path_factory.mktemp("cli") / "model", steps=0)


@pytest.mark.parametrize("command", [[], ["train"], ["rehearse"]])
def test_help(flashrl, command: list[str]) -> None:
    code, out, _ = flashrl(*command, "--help")
    assert code == 0
    assert out.startswith("usage: flashrl")


@pytest.mark.parametrize("command", ["train", "plan", "ablate", "serve-rollout"])
def test_what_is_missing_is_what_is_needed(flashrl, command: str) -> None:
    code, _, err = flashrl(command)
    assert code == 2
    last = err.splitlines()[-1]
    assert "arguments are required: " in last and "key=value" not in last


BAD = {  # overrides -> what the line says
    "misspelt key": (["trainer.stps=3"], ["trainer.stps", "steps"]),
    "misspelt setting of a plug-in": (["algorithm.settings.dleta=1"], ["algorithm.settings.dleta", "delta"]),
    "value of the wrong type": (["trainer.steps=abc"], ["trainer.steps", "abc"]),
    "value out of range": (["algorithm.settings.delta=-1"], ["delta", "-1"]),
    "no such algorithm": (["algorithm.name=ppo"], ["algorithm.name", "ppo", "grpo"]),
    "parallel sizes that do not fit the processes": (["parallel.tensor=2"], ["parallel.tensor=2", "1 processes"]),
    "context ranks that do not fit": (["parallel.context=2"], ["parallel.context=2", "1 processes", "multiple of 2"]),
    "a cluster that is not this job": (["cluster.gpus_per_node=8"], ["gpus_per_node=8", "8 processes", "has 1"]),
    "evaluation on the tasks of training": (["evaluation.every_steps=5"], ["evaluation.settings={}", "seed"]),
    "missing checkpoint": (["model.path=/nowhere"], ["model.path", "/nowhere"]),
    "environment that does not import": (["environment.name=no_such.module.Env"], ["environment.name", "no_such"]),
    "empty prompt set": (["environment.settings.num_tasks=0"], ["environment.name", "no tasks"]),
    "context beyond the model's": (["model.context_length=4096"], ["model.context_length=4096", "128"]),
    "prompt longer than the context": (["model.context_length=5"], ["model.context_length=5", "prompt"]),
    "stop token that is none": (["rollout.stop=[banana]"], ["rollout.stop", "banana"]),
    "batch that groups do not divide": (["algorithm=grpo", "rollout.batch_size=12"], ["rollout.batch_size=12", "8"]),
    "group of one": (["algorithm=grpo", "algorithm.settings.group_size=1"], ["group_size", "1"]),
    "reference that is not there": (["kl.coefficient=0.1"], ["kl.coefficient=0.1", "reference.mode=none"]),
    "reference that serves nothing": (["reference.mode=ema"], ["reference.mode=ema", "kl.coefficient=0"]),
    "layout that is none": (["batching.layout=pakced"], ["batching.layout", "pakced", "packed, padded"]),
    "chunk of nothing": (["model.head_chunk_tokens=0"], ["model.head_chunk_tokens=0", "at least 1"]),
    "more in flight than sync mode holds": (["rollout.max_in_flight=999"], ["max_in_flight=999", "rollout.mode"]),
    "a fixed lag beside streaming": (["rollout.mode=async", "rollout.lag=1"], ["rollout.lag=1", "rollout.mode=sync"]),
    "staleness below the lag": (["rollout.lag=2", "rollout.max_staleness=1"], ["max_staleness=1", "rollout.lag=2"]),
    "mode that is none": (["rollout.mode=asink"], ["rollout.mode", "sync, async, in_flight"]),
    "accelerator that is none": (["cluster.device=FOO"], ["cluster.device='FOO'", "H100"]),
    "a decay of everything": (["optimizer.weight_decay=inf"], ["optimizer.weight_decay=inf", "finite number"]),
    "a weight that is none": (["advantage.shaping.polite=nan"], ["advantage.shaping.polite=nan", "finite number"]),
    "moments that never move": (["optimizer.beta2=1.0"], ["optimizer.beta2=1.0", "at most 0.999999"]),
    "adapters beside no layer": (["lora.rank=4", "lora.targets=[foo]"], ["lora.targets=['foo']", "linear_qkv"]),
    "adapters larger than a layer": (["lora.rank=100000"], ["lora.rank=100000", "hidden_size is "]),
    "negative seed": (["trainer.seed=-1"], ["trainer.seed=-1"]),
    "class that is no environment": (["environment.name=json.JSONDecoder"], ["json.JSONDecoder", "Settings"]),
    "no form of key=value": (["trainer.steps"], ["trainer.steps", "key=value"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_one_line(flashrl, case: str, model: Path, tmp_path: Path) -> None:
    overrides, words = BAD[case]
    output = tmp_path / "run"
    code, _, err = flashrl("train", "rehearsal", f"output={output}", f"model.path={model}", *overrides)
    assert code == 2, err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("flashrl train: ")
    for word in words:
        assert word in lines[0]
    assert not output.exists()


ARGUMENTS = {  # a command line -> what its last line says
    "plan model --tp 0": "argument --tp: '0': must be a whole number of at least 1",
    "plan model --microbatch -5": "argument --microbatch: '-5': must be a whole number of at least 1",
    "plan model --lora-rank -1": "argument --lora-rank: '-1': must be a whole number of at least 0",
    "plan model --action-share 1.5": "--action-share 1.5: must be above 0, at most 1",
    "rehearse --tp two": "argument --tp: 'two': must be a whole number of at least 1",
    "ablate rehearsal --vary a=b --seeds 0": "argument --seeds: '0': must be a whole number of at least 1",
    "report model --output model": "argument --output: 'model': must name a file, and is a folder",
    "report model --output=": "argument --output: '': must name a file",
}


@pytest.mark.parametrize("line", ARGUMENTS)
def test_a_bad_argument_is_named(flashrl, line: str, model: Path, monkeypatch) -> None:
    monkeypatch.chdir(model.parent)
    code, _, err = flashrl(*line.split())
    assert code == 2
    assert err.strip().splitlines()[-1].endswith(ARGUMENTS[line])


def test_devices_are_those_that_the_plan_knows() -> None:
    device = next(field for field in dataclasses.fields(ClusterConfig) if field.name == "device")
    assert device.metadata["choices"] == ("", *DEVICES)


def test_servers_that_do_not_come_up_are_one_line(flashrl, monkeypatch) -> None:
    def train(config) -> None:
        raise NoServer("no rollout server came up in 3 s: http://a:1")

    monkeypatch.setattr("nemo_flashrl.train.train", train)
    code, out, err = flashrl("train", "rehearsal", "output=x", "model.path=.")
    assert (code, out, err) == (1, "", "flashrl train: no rollout server came up in 3 s: http://a:1\n")


OOM = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 0 is free."


def test_out_of_memory_names_what_would_have_fitted(flashrl, monkeypatch, tmp_path: Path) -> None:
    """One GPU: 18 bytes of 8.03e9 parameters, 6 of them with the optimizer on the host, and recomputed activations."""

    def train(config) -> None:
        raise torch.OutOfMemoryError(OOM)

    monkeypatch.setattr("nemo_flashrl.train.train", train)
    job = ["llama3_8b_32k_one_gpu", "model.recompute=none", "optimizer.offload_fraction=0"]
    code, out, err = flashrl("train", *job, f"output={tmp_path}", "model.path=.")
    assert (code, out) == (1, "")
    assert err == (
        f"flashrl train: out of memory on a GPU (OutOfMemoryError: {OOM}); the traceback is in {tmp_path}/logs; "
        "`flashrl plan` counts 273.2 GiB for this run, of 72.8 usable on a GPU; what would have fitted: "
        "model.recompute=full (149.3 GiB), optimizer.offload_fraction=1 (59.5 GiB, 119.7 of the host)\n"
    )


def test_another_error_of_torch_keeps_its_traceback(flashrl, monkeypatch) -> None:
    monkeypatch.setattr("nemo_flashrl.train.train", Mock(side_effect=RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        flashrl("train", "rehearsal", "output=x", "model.path=.")


def test_more_context_ranks_than_tokens_are_refused(flashrl, model: Path, tmp_path: Path, monkeypatch) -> None:
    """Two chunks on each of two ranks: trajectories are padded to 4 tokens, and a microbatch may hold 3."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    overrides = ("parallel.context=2", "batching.max_tokens_per_microbatch=3")
    code, _, err = flashrl("train", "rehearsal", f"output={tmp_path / 'run'}", f"model.path={model}", *overrides)
    assert code == 2
    for word in ("parallel.context=2", "multiple of 4", "max_tokens_per_microbatch=3", "more tokens"):
        assert word in err


def test_a_tokenizer_of_another_model_is_refused(flashrl, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "model"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    code, _, err = flashrl("train", "rehearsal", f"output={tmp_path / 'run'}", f"model.path={other}")
    assert code == 2
    assert "23 tokens" in err
    assert "vocab_size is 20" in err


YAML = {  # the file's bytes -> the line that is named, and words of the message
    "tab": (b"algorithm:\n\tname: grpo\n", 2, "indent with spaces"),
    "open brace": (b"output: x\nalgorithm: {name: grpo\nmodel: {path: y}\n", 3, "in what begins at line 2"),
    "duplicate key": (b"trainer:\n  steps: 3\noutput: a\noutput: b\n", 4, "found duplicate key output"),
    "escape": (b'output: "\\q"\n', 1, "unknown escape character 'q'"),
    "alias": (b"output: *other\n", 1, "undefined alias 'other'"),
    "encoding": (b"output: a\nmodel: {path: \xff}\n", 2, "not UTF-8 text"),
}


@pytest.mark.parametrize("case", YAML)
def test_a_file_that_is_no_yaml_is_one_line_with_its_line(flashrl, case: str, tmp_path: Path) -> None:
    content, line, said = YAML[case]
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    for command in (["train", file], ["plan", file], ["doctor", "rewards", file]):
        code, _, err = flashrl(*command)
        assert code == 2
        (only,) = err.strip().splitlines()
        assert only.startswith(f"flashrl {command[0]}: {file}:{line}: ")
        assert said in only


def test_a_group_file_beside_the_own_is_named(flashrl, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: a\npath: b\n")
    (tmp_path / "run.yaml").write_text("defaults: [{model: mine}, _self_]\n")
    code, _, err = flashrl("train", tmp_path / "run.yaml")
    (only,) = err.strip().splitlines()
    assert (code, only.split(": ")[1]) == (2, f"{tmp_path}/model/mine.yaml:2")


OWN_ENVIRONMENT = """
from dataclasses import dataclass

@dataclass
class Settings:
    pass

class Mine:
    Settings = Settings

    @classmethod
    def tasks(cls, settings):
        return [1 / 0]

    async def reset(self, task):
        pass

    step = close = reset
"""


def test_the_environments_module_may_lie_beside_the_file(
    flashrl, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, imported and asked for its tasks, from whatever folder the command is given."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_own_task.py").write_text(OWN_ENVIRONMENT)
    (tmp_path / "my_own_broken_task.py").write_text("import json\n\njson.loads('{')\n")
    config = "model: {context_length: 128}\nalgorithm: {name: grpo}\nrollout: {batch_size: 8}\n"
    for name, said in (
        ("my_own_task.Mine", f"tasks: ZeroDivisionError: division by zero ({tmp_path}/my_own_task.py:13)"),
        ("my_own_broken_task.Mine", f"({tmp_path}/my_own_broken_task.py:3)"),
        ("my_own_missing_task.Mine", "no module 'my_own_missing_task' can be imported from the configuration's folder"),
    ):
        (tmp_path / "run.yaml").write_text(f"{config}environment: {{name: {name}}}\n")
        code, _, err = flashrl("train", tmp_path / "run.yaml", f"output={tmp_path / 'run'}", f"model.path={model}")
        (line,) = err.strip().splitlines()
        assert code == 2 and said in line


def copied(model: Path, folder: Path, name: str, text: str) -> Path:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", '{\n"model_type": "qwen2",\n"vocab_size": "23"}', ":3: vocab_size='23' must be a whole number"),
        ("config.json", '{\n"vocab_size": 23,\n"hidden_size": 64.5}', ":3: hidden_size=64.5 must be a whole number"),
        ("config.json", '{\n"vocab_size": 23', " is not JSON (Expecting ',' delimiter: line 2 column 17 (char 18))"),
        ("config.json", "[1]", " is not a JSON object"),
        ("generation_config.json", '{\n"eos_token_id": }', " is not JSON (Expecting value: line 2 column 17"),
        ("tokenizer.json", "{\n", "holds no loadable tokenizer (EOF while parsing an object at line 2"),
        ("tokenizer_config.json", "{\n", "/tokenizer_config.json is not JSON (Expecting property name"),
        ("model.safetensors.index.json", "{}", "is no index of tensors"),
        ("model.safetensors.index.json", "[]", ".index.json is not a JSON object: copy it again"),
    ],
)
def test_a_broken_file_of_a_model_is_one_line(
    flashrl, model: Path, tmp_path: Path, name: str, text: str, said: str
) -> None:
    broken = copied(model, tmp_path / "model", name, text)
    code, _, err = flashrl("train", "rehearsal", f"output={tmp_path / 'run'}", f"model.path={broken}")
    assert code == 2
    (line,) = err.strip().splitlines()
    assert said in line


def test_a_torn_checkpoint_is_refused(flashrl, model: Path, tmp_path: Path) -> None:
    torn = tmp_path / "model"
    torn.mkdir()
    for file in model.iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    (torn / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:100_000])
    code, _, err = flashrl("train", "rehearsal", f"output={tmp_path / 'run'}", f"model.path={torn}")
    assert code == 2
    assert "not a complete safetensors file" in err


def test_dropout_of_a_model_folder_is_said_not_to_be_applied(model: Path, tmp_path: Path) -> None:
    noisy = tmp_path / "model"
    shutil.copytree(model, noisy)
    config = json.loads((noisy / "config.json").read_text())
    (noisy / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1, "resid_pdrop": 0.0}))
    run = load("rehearsal", [f"output={tmp_path / 'run'}", f"model.path={noisy}"])
    with pytest.warns(UserWarning, match="config.json: attention_dropout=0.1 is not applied: the policy is trained"):
        prepare(run, 1)


def test_existing_output_is_kept(flashrl, model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = flashrl("train", "rehearsal", f"output={tmp_path}", f"model.path={model}")
    assert code == 2
    assert "never overwrites" in err
    code, _, err = flashrl("rehearse", "--output", tmp_path)
    assert code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_rehearsal_refused_after_the_warm_start_leaves_nothing(flashrl, tmp_path: Path) -> None:
    code, _, err = flashrl("rehearse", "--tp", 3, "--output", tmp_path / "r")
    assert code == 2
    assert "parallel.tensor=3" in err
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_has_no_traceback(tmp_path: Path) -> None:
    """In a process of its own, as a shell sees it."""
    command = [*FLASHRL, "train", "rehearsal", f"output={tmp_path / 'run'}", "model.path=/nowhere", "trainer.stps=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("flashrl train: ")
    assert "Traceback" not in done.stderr


def test_under_torchrun_the_reason_is_the_last_line(tmp_path: Path) -> None:
    """torchrun ends with a traceback and a report of its own, whose last line but the border is ours."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "nemo_flashrl.cli", "train", "rehearsal", f"output={tmp_path / 'run'}"]
    done = subprocess.run([*command, "model.path=/nowhere"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1  # torchrun's own
    *_, reason, border = done.stderr.strip().splitlines()
    assert set(border) == {"="}
    assert reason.startswith("flashrl train: model.path='/nowhere': no such folder")


def test_a_reader_that_has_seen_enough() -> None:
    """`flashrl plan ... | head`: no traceback, and no exit code of success."""
    plan = shlex.join([*FLASHRL, "plan", "llama3_8b_32k"])
    done = subprocess.run(["bash", "-c", f"{plan} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_model_that_is_not_there_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from nemo_flashrl.cli import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'nemo', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "train", "rehearsal", f"output={tmp_path / 'run'}", "model.path=/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert done.stderr.startswith("flashrl train: model.path='/nowhere': no such folder")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotSaved("the checkpoint of step 8 could not be written"), "the checkpoint of step 8 could not be written"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "no space left on device ([Errno 28] No space left on device",
        ),
    ],
)
def test_a_full_disk_is_one_line(flashrl, error, said: str, model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("nemo_flashrl.train.prepare", Mock(side_effect=error))
    code, _, err = flashrl("train", "rehearsal", f"output={tmp_path / 'run'}", f"model.path={model}")
    assert code == 1
    (line,) = err.strip().splitlines()
    assert line.startswith(f"flashrl train: {said}")


def test_an_output_that_cannot_be_written_is_refused(flashrl, model: Path, tmp_path: Path) -> None:
    """Before NeMo is imported; a read-only file system answers with another word than a file in a folder's place."""
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "run"
    code, _, err = flashrl("train", "rehearsal", f"output={output}", f"model.path={model}")
    assert code == 2
    *warned, line = err.strip().splitlines()
    assert all(said.startswith("warning: ") for said in warned), warned
    assert f"output='{output}': cannot be written ([Errno 20] Not a directory: '{output}')" in line


def descendants(marker: str) -> list[str]:
    listing = subprocess.run(["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True).stdout
    return [line for line in listing.splitlines() if marker in line and "ps -eww" not in line]


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    """Nor torchrun's folder for logs."""
    output, temporary = tmp_path / "interrupted", tmp_path / "temporary"
    temporary.mkdir()
    command = [*FLASHRL, "rehearse", "--pp", "2", "--output", str(output)]
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "TMPDIR": str(temporary)})
    deadline = time.monotonic() + 300
    while len(descendants(str(output))) < 4:  # the command, torchrun and two ranks
        assert time.monotonic() < deadline, descendants(str(output))
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    deadline = time.monotonic() + 10  # a rank that torchrun has killed takes a moment to be gone
    while left := descendants(str(output)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert not [*temporary.glob("torchelastic_*"), *temporary.glob("flashrl-*")]
