"""`flashrl serve-rollout`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from nemo_flashrl import config
from nemo_flashrl.commands import at_least
from nemo_flashrl.rollout_server.serve import ServeOptions, serve


def add_serve_rollout(commands: Any) -> None:
    """Add the command to argparse's sub-commands."""
    default = ServeOptions()
    parser = commands.add_parser(
        "serve-rollout",
        help="start vLLM servers for `rollout.engine: vllm`; run it from vLLM's environment",
        description="Start vLLM servers with the flags that training needs, report when they are ready, restart a dead "
        "one, and stop all on SIGTERM or SIGINT. Without --port, the ports of rollout.servers are served.",
        epilog='example: flashrl serve-rollout my_run.yaml --port 8000 --vllm-flags "--gpu-memory-utilization 0.8"',
    )
    parser.add_argument("config", metavar="CONFIG", help="the configuration of the run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="overrides of the file's settings"
    )
    parser.add_argument("--host", default=default.host, help="address to listen on (default %(default)s)")
    count, port = at_least(1), at_least(1, 65535)
    parser.add_argument("--port", type=port, metavar="N", help="port of the first server; the others follow")
    parser.add_argument(
        "--servers", type=count, default=default.servers, metavar="N", help="number of servers, with --port (default 1)"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=count,
        default=default.tensor_parallel,
        metavar="N",
        help="tensor-parallel GPUs per server (default 1)",
    )
    parser.add_argument("--follow", type=count, metavar="PID", help="stop when this process ends, such as the trainer")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="seconds until all are ready (default: rollout.server_timeout)"
    )
    parser.add_argument("--vllm-flags", dest="flags", default="", metavar="TEXT", help="more flags for vLLM")
    parser.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    run = config.load(options.config, options.overrides, unneeded=("output",))  # servers leave nothing
    try:
        return serve(
            run,
            ServeOptions(
                host=options.host,
                port=options.port,
                servers=options.servers,
                tensor_parallel=options.tensor_parallel,
                follow=options.follow,
                timeout=run.rollout.server_timeout if options.timeout is None else options.timeout,
                flags=options.flags,
            ),
        )
    except RuntimeError as error:
        print(f"flashrl serve-rollout: {error}", file=sys.stderr)
        return 1
