"""This module writes the reading of `privacy_utility`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim import privacy, theory
from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.privacy_utility.spending import NUM_ROUNDS, STEP_SIZE
from fedjax_sim.text.bounds import shown_up


def privacy_utility_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    factor = theory.noise_floor(1.0, 1 - STEP_SIZE)
    exact_multiplier = privacy.calibrate(
        1.0, 1e-5, 1, population_size=100, cohort_size=100, scheme="full"
    ).noise_multiplier
    textbook_multiplier = math.sqrt(2 * math.log(1.25 / 1e-5))
    yield (
        "The mean squared error of the released mean is d (z C / m)^2: four times as much for twice the multiplier or "
        "half of the clients. In runs with a constant step that adds up to 1 / (1 - r^2) times as much, here "
        f"{factor:.3g} times with r = {1 - STEP_SIZE:g}. What more rounds gain, the privacy budget costs: at one "
        "epsilon z grows with the square root of their number. With steps that decay as 1/t the floor vanishes; the "
        "noise of one release does not."
    )
    yield (
        f"Epsilons are those of {NUM_ROUNDS} rounds in which all clients take part, "
        f"at delta {shown_up(options['delta'], 6)}: "
        "Gaussian mechanisms without sampling, accounted for exactly. The textbook's sqrt(2 ln(1.25 / delta)) / "
        f"epsilon holds for epsilon < 1 only, and is loose: {shown_up(textbook_multiplier, 3)} against "
        f"{shown_up(exact_multiplier, 3)} "
        "at epsilon 1, delta 1e-5, one round. Cohorts that are sampled in secret need less noise for the same epsilon; "
        "the digits' are."
    )
    digits = rows_of(found, part="digits MLP", quantity="test accuracy")
    if digits:
        values = ", ".join(f"{row['measured']:.3f} at epsilon {shown_up(row['epsilon'], 6)}" for row in digits[1:])
        rounds = options["digits_rounds"]
        size = options["digits_clients"]
        yield (
            f"The digits' MLP reaches a test accuracy of {digits[0]['measured']:.3f} with clipping and no noise, and "
            f"{values}, after {rounds} rounds of {size // 10:,} of {size:,} clients. That is measured, for this model, "
            "clip norm and step, which were not tuned for each epsilon: tuning them spends privacy too."
        )
