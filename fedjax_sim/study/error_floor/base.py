"""This module takes the base setting of `error_floor` from the study's options, and names the causes of a floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedjax_sim.study.error_floor.quadratics import Quadratics, Setting

# Causes in the budget of `theory.budget`, with their names in plain words.
NAMES = {
    "drift": "client drift",
    "client_sampling": "client sampling",
    "minibatch": "minibatches",
    "quantization": "quantisation",
    "privacy_noise": "privacy noise",
}


def base_setting(options: Mapping[str, Any]) -> Setting:
    """Returns the setting with the middle value of each list; each part of the study varies one of its fields.

    Args:
      options: the study's options.
    """
    step_sizes, cohort_sizes, num_steps, bits, noise_multipliers = (
        options[name] for name in ("step_sizes", "cohort_sizes", "num_steps", "bits", "noise_multipliers")
    )
    return Setting(
        step_size=step_sizes[len(step_sizes) // 2],
        cohort_size=cohort_sizes[len(cohort_sizes) // 2],
        num_steps=num_steps[len(num_steps) // 2],
        gradient_noise=0.3,  # not varied
        bits=bits[len(bits) // 2],
        noise_multiplier=noise_multipliers[(len(noise_multipliers) - 1) // 2],
    )


def error_floor_clients(options: Mapping[str, Any]) -> Quadratics:
    """Returns the study's quadratic clients.

    Args:
      options: the study's options.
    """
    return Quadratics(options["num_clients"], options["dimension"], options["heterogeneity"], options["seed"])
