"""The runs to the floor of `privacy_utility`: their step, their rounds, and the epsilon that these spend."""

from __future__ import annotations

from typing import Any

from fedjax_sim import privacy

__all__ = ["NUM_ROUNDS", "STEP_SIZE", "epsilon_of"]

STEP_SIZE = 0.5
NUM_ROUNDS = 16  # of the runs to the floor: (1 - STEP_SIZE)^32 is nothing


def epsilon_of(multiplier: float, delta: float, desk: dict[str, Any]) -> float:
    """Of a run to the floor."""
    mechanism = privacy.written_down(noise_multiplier=multiplier, **desk)
    return privacy.account(mechanism, NUM_ROUNDS, delta).epsilon
