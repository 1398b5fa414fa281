"""The runs to the floor of `privacy_utility`: their step, their rounds, and the epsilon that they spend."""

from __future__ import annotations

from typing import Any

from fedjax_sim import privacy

__all__ = ["NUM_ROUNDS", "STEP_SIZE", "epsilon_of"]

STEP_SIZE = 0.5
NUM_ROUNDS = 16  # (1 - STEP_SIZE)^32 is negligible


def epsilon_of(multiplier: float, delta: float, release: dict[str, Any]) -> float:
    """The epsilon of a run to the floor, at this noise multiplier.

    Args:
      release: of a round, without its multiplier, as `privacy.written_down` takes it.
    """
    mechanism = privacy.written_down(noise_multiplier=multiplier, **release)
    return privacy.account(mechanism, NUM_ROUNDS, delta).epsilon
