"""A name that the NeMo Framework Launcher knows; see nemo_flashrl/launch/nemo_launcher.py."""

import sys

from nemo_flashrl.launch.nemo_launcher import serve

sys.exit(serve())
