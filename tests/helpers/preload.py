"""What the fork server imports once for all ranks of all tests."""

import gc
import importlib
import os
import pkgutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)
gc.disable()  # until all is imported

from nemo_flashrl import platform

platform.install()

from nemo_flashrl import callbacks, commands, config, data, models

PACKAGES = (callbacks, commands, data, models)
MODULES = [module.name for p in PACKAGES for module in pkgutil.iter_modules(p.__path__, f"{p.__name__}.")]
MODULES += ["nemo_flashrl.engines.transformers", "nemo_flashrl.environments.key_value_store", "nemo_flashrl.train"]
for name in [*MODULES, "transformers.models.qwen2.modeling_qwen2"]:
    importlib.import_module(name)
config.load("rehearsal", ["output=x", "model.path=x"])  # the grammars of Hydra and OmegaConf, once
# A collection in a rank would look through all of this, and by that copy it.
gc.enable()
gc.collect()
gc.freeze()
