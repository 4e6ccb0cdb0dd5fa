"""Log-probs and policy gradients of an output layer without its logits: torch and process groups,
and Triton and apex where they are there.

`memory` is what a pass takes on paper.
"""

from .fused_linear_gated_policy_loss import fused_linear_gated_policy_loss
from .fused_linear_logprob import fused_linear_logprob
from .fused_linear_policy_loss import fused_linear_policy_loss

__all__ = ["fused_linear_gated_policy_loss", "fused_linear_logprob", "fused_linear_policy_loss"]
