"""What vLLM computes of exported folders, with the flags of `flashrl serve-rollout`, in vLLM's own environment.

    python vllm_logprobs.py CONFIG MODEL...

MODEL.json holds token ids in a list; MODEL.vllm.json gets the log-probs of all but the first. vLLM takes half a minute
to import and to start as a server: here it is imported once, and each model has a fork of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from nemo_flashrl.config import load
from nemo_flashrl.rollout_server.serve import ServeOptions, command, environment

OPTIONS = ServeOptions()
os.environ.update(environment(OPTIONS, 0, accelerated=False), VLLM_ENABLE_V1_MULTIPROCESSING="0")

from vllm import LLM, EngineArgs, SamplingParams
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def write_logprobs(config: str, model: Path) -> None:
    _, _, _, *flags = command(load(config, [f"model.path={model}"]), OPTIONS, 0, accelerated=False)
    arguments = EngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(flags))
    token_ids = json.loads(model.with_suffix(".json").read_text())[0]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = LLM(**vars(arguments)).generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False)
    rows = zip(answer.prompt_logprobs[1:], token_ids[1:], strict=True)
    model.with_suffix(".vllm.json").write_text(json.dumps([row[token].logprob for row, token in rows]))


def main() -> None:
    config, *models = sys.argv[1:]
    for model in models:
        if (child := os.fork()) == 0:
            write_logprobs(config, Path(model))
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{model}: vLLM failed")


main()
