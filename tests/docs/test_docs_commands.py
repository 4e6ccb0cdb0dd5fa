"""Every command that a page shows is run here, made small by what is added to it, or stands in a table with the reason
and the test that covers it; then it is parsed, its configuration composed, and its files looked for."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from processes import run_ranks
from published_models import LLAMA_8B

from nemo_flashrl import config
from nemo_flashrl.cli import _parser
from nemo_flashrl.rehearsal.warm_start import make_warm_start

PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:flashrl|make|torchrun|python|sbatch|srun|docker|nemo|pip) "

RUN = {  # command -> what is added so that it ends in seconds, and the exit codes that are right here
    r"flashrl train (my_run.yaml|rehearsal)": ("trainer.steps=1 rollout.batch_size=8 rollout.max_turns=2", (0,)),
    r"flashrl plan": ("", (0,)),
    r"flashrl report": ("", (0,)),
    r"flashrl doctor runs/": ("", (0, 1)),  # a run of one step may show anything
    r"flashrl doctor env llama3_70b output=/shared/run": ("output=.", (1,)),  # there is no GPU
    r"flashrl doctor rewards": ("--samples 4", (0, 1)),
    r"flashrl doctor groups": ("--prompts 1 --samples 2", (0, 1)),
    r"flashrl ablate": ("--plan", (0,)),
    r"flashrl convert": ("", (0,)),
    r"python benchmarks/policy_head.py --paper": ("", (0,)),
}
STANDS_FOR = {  # in a command -> in the folder in which it is run
    "/models/my-model": "llama-8b",
    "HF_DIR": "runs/first/checkpoint",
    "NEMO_DIR": "nemo",
    "convert run-to-hf RUN runs/first/checkpoint": "convert run-to-hf runs/first exported --policy",
    "convert nemo-to-hf nemo runs/first/checkpoint": "convert nemo-to-hf nemo back",
    "check A B": "check runs/first/checkpoint back",
    "benchmarks/": f"{ROOT}/benchmarks/",
}
ELSEWHERE = {  # command -> why it is not run here, and the file of the test that runs it or what it starts
    r"make (rehearsal|demo|test|setup|models|rollout-venv)$": ("sets up an environment, takes minutes", ".ci/run"),
    r"make gpu-check|python3? (tests/gpu/check.py|-m pytest .*tests/gpu)|(docker run|srun) .*gpu-check": (
        "a GPU",
        "tests/gpu_shapes/test_gpu_check.py",
    ),
    r"make gpu-env": ("compiles Transformer Engine", "tests/gpu_env/test_gpu_env.py"),
    r"make rehearsal ARGS=": ("minutes", "tests/rehearsal/test_rehearsal.py"),
    r"flashrl rehearse": ("minutes", "tests/rehearsal/test_rehearsal.py"),
    r"torchrun": ("eight processes", "tests/rehearsal/test_rehearsal.py"),
    r"flashrl train textworld": ("a checkpoint of 4B", "tests/environments/test_textworld.py"),
    r"flashrl serve-rollout": ("vLLM's environment", "tests/vllm_server/test_vllm_server.py"),
    r"(?:[A-Z_]+=\S+ )*sbatch": ("Slurm", "tests/slurm/test_slurm_jobs.py"),
    r"srun .*flashrl train": ("Slurm", "tests/slurm/test_slurm_jobs.py"),
    r"srun .*flashrl doctor env": ("Slurm", "tests/doctor/test_node_check.py"),
    r"docker build": ("NVIDIA's registry", "tests/package/test_packaging.py"),
    r"python main.py stages": ("NeMo Framework Launcher", "tests/launch/test_nemo_launcher.py"),
    r"python -m nemo_flashrl.launch.nemo_launcher": (
        "a finished job of two groups",
        "tests/launch/test_nemo_launcher.py",
    ),
    r"OMP_NUM_THREADS=\d python benchmarks/": ("measures for minutes what its page holds", "docs/benchmarks.md"),
    r"python benchmarks/head_on_paper.py": ("a minute of counting", "tests/gpu_shapes/test_head.py"),
    r"python benchmarks/language_model.py": ("hours, and a model", "tests/benchmarks/test_language_model.py"),
    r"python examples/": ("NeMo's import, and a comparison in float64", "tests/docs/test_examples.py"),
    r"nemo flashrl": ("NeMo-Run's own experiment", "tests/package/test_recipes.py"),
}


def commands(page: Path) -> list[str]:
    """What stands on lines of their own, in one line each; of a synopsis, what is not optional."""
    text = re.sub(r" *\\\n +", " ", page.read_text())
    lines = re.findall(rf"^    ({PROGRAMS}.*)$", text, re.M)
    return [re.sub(r" +", " ", re.sub(r" \[[^\]]*\]", "", re.sub(r"\s+# .*", "", line))).strip() for line in lines]


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def entry(command: str, table: dict) -> tuple | None:
    return next((value for pattern, value in table.items() if re.match(pattern, command)), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_has_its_place(page: Path) -> None:
    for command in commands(page):
        places = [name for name, table in (("RUN", RUN), ("ELSEWHERE", ELSEWHERE)) if entry(command, table)]
        assert len(places) == 1, f"{page.name}: {command!r} has to be in RUN or in ELSEWHERE"


@pytest.mark.parametrize("pattern", [*RUN, *ELSEWHERE])
def test_the_tables_hold_nothing_else(pattern: str) -> None:
    assert any(re.match(pattern, command) for command in ALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the pages take for granted: a configuration, a warm start, an 8B model's config.json."""
    folder = tmp_path_factory.mktemp("pages")
    make_warm_start(folder / "warm_start", steps=0)
    shutil.copy(ROOT / "examples/my_run.yaml", folder)
    (folder / "llama-8b").mkdir()
    (folder / "llama-8b/config.json").write_text(json.dumps(LLAMA_8B))
    return folder


@pytest.mark.parametrize("command", [c for c in ALL if entry(c, RUN)])
def test_it_runs(command: str, folder: Path) -> None:
    added, codes = entry(command, RUN)
    for shown, here in STANDS_FOR.items():
        command = command.replace(shown, here)
    program, *arguments = shlex.split(f"{command} {added}")
    if program == "python":
        ended = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
        assert ended.returncode in codes, ended.stderr
    else:
        run_ranks(1, "command", folder, *arguments, exit_codes=codes)


@pytest.mark.parametrize("command", [c for c in ALL if entry(c, ELSEWHERE)])
def test_what_runs_elsewhere_is_a_command(command: str) -> None:
    _, test = entry(command, ELSEWHERE)
    assert (ROOT / test).is_file()
    words = shlex.split(command)
    for word in words:
        if re.match(r"(examples|docker|benchmarks)/", word):
            assert (ROOT / word).is_file(), word
    starts = [n for n, word in enumerate(words) if word in ("flashrl", "nemo_flashrl.cli")]
    if "make" in words:
        target, *given = words[words.index("make") + 1 :]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
        is_rehearsal = target == "rehearsal" and given
        words = ["rehearse", *shlex.split(given[0].removeprefix("ARGS="))] if is_rehearsal else []
    elif starts and words[0] != "nemo":
        words = words[starts[0] + 1 :]
    elif "sbatch" in words and "/shared/run" in words:
        output = words.index("/shared/run")
        words = ["train", words[output - 1], f"output={words[output]}", *words[output + 1 :]]
    else:
        words = []
    if words:
        asked = _parser().parse_args(words[: words.index("||")] if "||" in words else words)
        if asked.command in ("train", "serve-rollout") and asked.config != "my_run.yaml":
            config.load(asked.config, asked.overrides)
