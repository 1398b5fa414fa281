"""This module draws the conclusions of `stragglers` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.claims import Claim, Row, every, is_below, rising, selected, shown
from fedjax_sim.study.stragglers.proximal_map import MAP, best_weights
from fedjax_sim.study.stragglers.training import FEDAVG, FEDPROX, PARTIAL, data_set

LOSS = "training loss, difference"
VARIANCE = "log10 of the variance, difference"
ACCURACY = "test accuracy, difference"


def stragglers_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about partial work, FedProx's term, and the choice of proximal weight and step.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    yield from _training(rows, options)
    yield from _map(rows, options)


def _training(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about softmax regressions on the most heterogeneous data set.

    Args:
      rows: the rows of the study. Differences are paired: of runs with the same first model, cohorts, minibatches and
        stragglers.
      options: the study's options.
    """
    part, most = data_set(options["heterogeneities"][-1]), options["shares"][-1]
    differences = selected(rows, part=part)
    of_partial = selected(differences, algorithm=PARTIAL, minus=FEDAVG, stragglers=most)
    yield Claim(
        f"On {part} with {100 * most:g} % stragglers, keeping their partial work makes the training loss lower and the "
        "test accuracy higher than dropping it.",
        _is_better(of_partial),
        _shown(of_partial),
    )
    of_term = selected(differences, algorithm=FEDPROX, minus=PARTIAL)
    yield Claim(
        f"On {part} the proximal term makes the training loss lower and the test accuracy higher than partial work "
        "alone does, with every share of stragglers.",
        _is_better(of_term),
        _shown(of_term),
    )
    of_variance = selected(differences, algorithm=FEDPROX, minus=FEDAVG, stragglers=most, quantity=VARIANCE)
    yield Claim(
        f"On {part} with {100 * most:g} % stragglers the loss varies less over rounds with FedProx than with FedAvg.",
        every(is_below(row, 0) for row in of_variance),
        shown(of_variance, "quantity"),
    )


def _is_better(differences: Sequence[Row]) -> bool | None:
    """Returns whether all losses fall and all accuracies rise, beyond the spread of the runs."""
    return every(
        [is_below(row, 0) for row in selected(differences, quantity=LOSS)]
        + [is_below(0, row) for row in selected(differences, quantity=ACCURACY)]
    )


def _shown(differences: Sequence[Row]) -> str:
    """Returns differences of losses and accuracies as text."""
    return shown([row for row in differences if row["quantity"] != VARIANCE], "quantity", "stragglers")


def _map(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields claims about which proximal weight suits a local step, on quadratics.

    Args:
      rows: the rows of the study.
      options: the study's options; `proximal_weights` and `step_sizes` are rising.
    """
    gaps = selected(rows, part=MAP)
    after = f"after {options['map_rounds']} rounds"
    at_smallest = selected(gaps, step_size=options["step_sizes"][0])
    weightless = selected(gaps, proximal_weight=0.0)
    yield Claim(
        f"At the smallest local step every proximal weight leaves a larger gap to the optimum {after} than none.",
        every(
            is_below(without, row)
            for without in selected(weightless, step_size=options["step_sizes"][0])
            for row in at_smallest
            if row["proximal_weight"] > 0
        ),
        shown(at_smallest, "proximal_weight"),
    )
    best = best_weights(rows)
    pairs = [(best[row["step_size"]], row) for row in weightless if row["step_size"] in options["step_sizes"][1:]]
    yield Claim(
        f"At every larger step the best proximal weight leaves a smaller gap {after} than none.",
        every(is_below(weighted, without) for weighted, without in pairs),
        shown([row for pair in pairs for row in pair], "step_size", "proximal_weight"),
    )
    largest_weight = options["proximal_weights"][-1]
    # Large steps allow small weights alone: with others local work diverges.
    with_largest = [row for row in rising(gaps, "step_size", proximal_weight=largest_weight) if row["contraction"] < 1]
    others = [row for row in gaps if with_largest and row["step_size"] == with_largest[-1]["step_size"]]
    yield Claim(
        f"The largest proximal weight has the smallest gap {after} at the largest step at which its rounds contract.",
        every(is_below(with_largest[-1], row) for row in others if row["proximal_weight"] < largest_weight),
        shown(others, "step_size", "proximal_weight"),
    )
