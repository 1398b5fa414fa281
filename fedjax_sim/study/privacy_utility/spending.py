"""This module computes the epsilon that the runs to the floor of `privacy_utility` spend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedjax_sim import privacy

STEP_SIZE = 0.5
NUM_ROUNDS = 16  # of a run to the floor: (1 - STEP_SIZE)^32 is negligible


def release_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a round in which all clients take part, without its noise multiplier, as `epsilon_of` takes it.

    Args:
      options: the study's options.
    """
    size = options["num_clients"]
    return {"population_size": size, "cohort_size": size, "scheme": "full", "clip_norm": options["clip_norm"]}


def epsilon_of(multiplier: float, delta: float, release: dict[str, Any]) -> float:
    """Returns the epsilon of a run to the floor.

    Args:
      multiplier: z.
      delta: the delta of the epsilon.
      release: a round without its noise multiplier, as `privacy.written_down` takes it.
    """
    mechanism = privacy.written_down(noise_multiplier=multiplier, **release)
    return privacy.account(mechanism, NUM_ROUNDS, delta).epsilon
