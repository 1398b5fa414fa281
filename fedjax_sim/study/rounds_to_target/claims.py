"""This module draws the conclusions of `rounds_to_target` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, is_within, rising, selected, shown
from fedjax_sim.study.rounds_to_target.setting import floor_over_target, gradient_variances

ROUNDS, LATE = "rounds to target", "loss after the last round / target"


def rounds_to_target_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about local work where clients agree and where not, noisy batches, and digits.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _one_curvature(rows)
    yield from _floors(rows, options)
    yield from _digits(rows, options)


def _one_curvature(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about clients with one curvature and one optimum, for whom local work replaces rounds.

    Args:
      rows: the rows of the study.
    """
    rounds = rising(rows, "local_steps", part="one curvature", quantity=ROUNDS)
    yield Claim(
        "Clients with one curvature and one optimum need fewer rounds with more local steps.",
        every(is_below(many, few) for few, many in pairwise(rounds)),
        shown(rounds, "local_steps"),
    )
    steps = rising(rows, "local_steps", part="one curvature", quantity="local steps to target, counted")
    # ceil(x / K) rounds are x to x + K local steps, where x is the same for every K.
    yield Claim(
        "Clients with one curvature and one optimum need the same number of local steps, rounds times K, up to whole "
        "rounds.",
        every(
            is_within(row, steps[0]["measured"] - steps[0]["local_steps"], steps[0]["measured"] + row["local_steps"])
            for row in steps[1:]
        ),
        shown(steps, "local_steps"),
    )


def _floors(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about clients with different optima: local work has drift, and batches have noise.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    reached = rising(rows, "local_steps", part="heterogeneous", quantity=ROUNDS)
    yield Claim(
        "Where optima and Hessians differ, more local steps need fewer rounds as long as they reach the target.",
        every(is_below(many, few) for few, many in pairwise(reached)),
        shown(reached, "local_steps"),
    )
    # A floor above the target can never be passed; the others only had too few rounds.
    drifting = [row for row in selected(rows, part="heterogeneous", quantity=LATE)
                if floor_over_target(options, row["local_steps"]) > 1]  # fmt: skip
    yield Claim(
        f"Where drift's floor is above the target, the loss is still above it after {options['max_rounds']} rounds.",
        every(is_below(1, row) for row in drifting),
        shown(drifting, "local_steps"),
    )
    noise = gradient_variances(options)
    noisy = [row for row in selected(rows, part="batches", quantity=LATE)
             if floor_over_target(options, row["local_steps"], noise[row["batch_size"]]) > 1]  # fmt: skip
    yield Claim(
        "Where the floor of noisy batches is above the target, so is the mean loss of many runs after "
        f"{options['max_rounds']} rounds.",
        every(is_below(1, row) for row in noisy),
        shown(noisy, "batch_size"),
    )


def _digits(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields the claim about an MLP on digits.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    of_alphas = [
        rising(rows, "local_steps", part="digits MLP", quantity=ROUNDS, alpha=alpha) for alpha in options["alphas"]
    ]
    # Epochs of one batch and epochs of several may have the same number of local steps.
    pairs = [
        [(row, other) for row in found for other in found
         if row["local_steps"] == found[0]["local_steps"] < other["local_steps"] == found[-1]["local_steps"]]
        for found in of_alphas
    ]  # fmt: skip
    yield Claim(
        "On the digits' MLP the most local steps that reach the target need fewer rounds than the fewest, for like and "
        "for unlike clients.",
        every(*([is_below(most, fewest) for fewest, most in of_alpha] for of_alpha in pairs)),
        shown([row for found in of_alphas for row in found], "alpha", "local_steps", "batch_size"),
    )
