"""What the fork server imports once for all ranks of all tests."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)

from nemo_flashrl import platform

platform.install()

import nemo_flashrl.models.families
import nemo_flashrl.models.policy_model
import nemo_flashrl.train  # noqa: F401
