"""A run whose tokens are nearly all observations pays for tokens that teach nothing: said once, with what helps."""

from __future__ import annotations

import logging

LOWEST_SHARE = 0.05

logger = logging.getLogger(__name__)


class ActionShareWarning:
    """Looks at each step's share of action tokens and warns at the first that is too low."""

    def __init__(self) -> None:
        self._said = False

    def see(self, step: int, share: float) -> None:
        """`share`: action tokens / all tokens of the step's trajectories."""
        if self._said or share >= LOWEST_SHARE:
            return
        self._said = True
        logger.warning(
            "step %d: %.1f%% of the tokens are actions (under %.0f%%), the rest is context without gradient: shorten "
            "observations in the environment, truncate them (rollout.max_observation_tokens), or summarise them "
            "(rollout.summarizer)",
            step,
            100 * share,
            100 * LOWEST_SHARE,
        )
