from . import (
    attention,
    cpp_extensions,
    cpu_offload,
    cross_entropy,
    distributed,
    float8_tensor,
    fp8,
    module,
    ops,
    optimizers,
    permutation,
    router,
    tensor,
)
from .attention import DotProductAttention
from .distributed import CudaRNGStatesTracker, checkpoint
from .fp8 import fp8_autocast, fp8_model_init
from .module import (
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
)
