"""What the NeMo Framework Launcher makes of our job files; run as a program, it renews the golden files.

    FLASHRL_NEMO_LAUNCHER=CHECKOUT FLASHRL_NEMO_LAUNCHER_PYTHON=PYTHON python tests/helpers/launcher_rendering.py

CHECKOUT is one of the public launcher; PYTHON has hydra-core and what the launcher imports (its requirements.txt).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "nemo_launcher"
RESULTS = "/results"  # stands for the folder of results, whatever it was
FILES = {
    "submission.sh": "submission.sh",
    "gpt_ppo_critic.yaml": "critic.yaml",
    "gpt_ppo_actor.yaml": "actor.yaml",
    "hydra.yaml": "block.yaml",
}


def jobs() -> list[tuple[str, str]]:
    """(stage, job file) of every job of ours, as the launcher's command line names them."""
    folder = ROOT / "conf" / "nemo_launcher"
    two_groups = [("rlhf_ppo", f"flashrl/{p.stem}") for p in (folder / "rlhf_ppo" / "flashrl").glob("*.yaml")]
    one_group = [("training", f"nemotron/{p.stem}") for p in (folder / "training" / "nemotron").glob("*.yaml")]
    return sorted(job for job in two_groups + one_group if not job[1].endswith("base"))


def overrides(stage: str) -> list[str]:
    """What a user has to give beside the job file."""
    block = "rlhf_ppo.actor" if stage == "rlhf_ppo" else "training"
    return [f"{block}.flashrl.settings.model.path=/models/policy"]


def render(stage: str, job: str) -> dict[str, str]:
    """Golden name -> text, by the checkout that FLASHRL_NEMO_LAUNCHER points to."""
    scripts = Path(os.environ["FLASHRL_NEMO_LAUNCHER"]) / "launcher_scripts"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{scripts}",
        "NEMO_LAUNCHER_DEBUG": "1",  # written, not submitted
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with tempfile.TemporaryDirectory() as results:
        command = [
            os.environ.get("FLASHRL_NEMO_LAUNCHER_PYTHON", sys.executable),
            str(scripts / "main.py"),
            f"stages=[{stage}]",
            f"{stage}={job}",
            "launcher_scripts_path=/launcher",
            f"base_results_dir={results}",
            "container=nemo-flashrl",
            *overrides(stage),
        ]
        subprocess.run(command, cwd=results, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=300)
        texts = {}
        for file in sorted(Path(results).rglob("*")):
            for ending, name in FILES.items():
                if file.name.endswith(ending):
                    texts[name] = file.read_text().replace(results, RESULTS)
        return texts


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for stage, job in jobs():
        folder = GOLDEN / stage / job.split("/")[1]
        folder.mkdir(parents=True)
        for name, text in render(stage, job).items():
            (folder / name).write_text(text)


if __name__ == "__main__":
    main()
