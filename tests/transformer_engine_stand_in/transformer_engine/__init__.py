"""Stands in for Transformer Engine 2.9, whose kernels need a GPU: names, signatures, checks and states as there.

On a CPU it computes in plain torch, so that Megatron's layers of Transformer Engine have numbers there. On fake CUDA
(tests/helpers/fake_cuda.py) a kernel is one launch, and takes the memory that Transformer Engine's takes: results, and
what is saved for the backward pass. Nothing of FP8 is here. Put this folder first on the path to have it.
"""

from . import common, pytorch

__version__ = "2.9.0"
