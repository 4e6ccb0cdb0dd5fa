"""`flashrl serve-rollout` with stand-ins in vLLM's place: what it does with processes, signals and ports."""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_flashrl.config import PluginConfig, RunConfig
from nemo_flashrl.rollout_server import serve

serve.importlib.util.find_spec = lambda name: name
serve.check_model = lambda folder, accelerated: None
serve.HEALTH_SECONDS = 0.1
serve._has_accelerator = lambda: False  # which spares the import of torch
serve.command = lambda config, options, port, accelerated: [
    sys.executable,
    *(
        [str(Path(__file__).with_name("stand_in_server.py"))]
        if options.flags != "broken"
        else ["-c", "raise SystemExit(3)"]
    ),
    str(port),
]
port, servers, follow, flags = sys.argv[1:]
options = serve.ServeOptions(port=int(port), servers=int(servers), follow=int(follow) or None, flags=flags)
sys.exit(serve.serve(RunConfig(environment=PluginConfig("none")), options))
