"""This module writes the reading of `availability`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of


def availability_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    low = min(options["correlations"])
    high = max(options["correlations"])

    def value(quantity: str, way: str, correlation: float) -> float:
        return comparisons_of(found, "by client", quantity, aggregate=way, correlation=correlation)[0].measured

    yield (
        "Averaging those who are there converges to the optimum of another population, where each client counts by its "
        f"chance to be there. At a correlation of {high:g} between a client's data and its response rate the model "
        f"ends {value('bias', 'mean', high):.3f} from the optimum (optima spread by 1), and more rounds do not help."
    )
    mean_at_low, corrected_at_low = (value("excess loss", way, low) for way in ("mean", "corrected"))
    mean_at_high, corrected_at_high = [value("excess loss", way, high) for way in ("mean", "corrected")]
    yield (
        "Weighting each update by 1 / (N x response rate) (Horvitz-Thompson) removes the bias at any correlation: "
        f"{value('bias', 'corrected', high):+.3f}. Its price is variance: rare clients count much when they come, and "
        f"the weights of a round do not sum to one. Excess loss at correlation {low:g}: {mean_at_low:.3f} with the "
        f"mean, {corrected_at_low:.3f} corrected; at {high:g}: {mean_at_high:.3f} and {corrected_at_high:.3f}. Correct "
        "where rates go with the data; where they do not, the mean is as right, and quieter."
    )
    persistent = comparisons_of(found, "for a while", "excess loss")
    yield (
        "Clients who are there half of the time whatever their data cause no bias, however long they stay. But who "
        "stays for long is in many rounds in a row: what the server sees changes slowly, and the model follows it. "
        "Excess loss: "
        + ", ".join(
            f"{comparison.measured:.3f} where stays last {comparison.conditions['stay']:g} rounds"
            for comparison in persistent
        )
        + "."
    )
    distance_of_one_hour = comparisons_of(found, "by hour", training="at one hour")[0].measured
    ranges = []
    for step_size in sorted(
        {comparison.conditions["step_size"] for comparison in comparisons_of(found, "by hour")}, reverse=True
    ):
        distances = [
            comparison.measured
            for comparison in comparisons_of(found, "by hour", training="around the clock", step_size=step_size)
        ]
        ranges.append(f"{min(distances):.2f} to {max(distances):.2f} with step size {step_size:g}")
    yield (
        "Where clients come at night and data go with time zones, the model follows the sun: its distance to the "
        f"optimum over a day is {' and '.join(ranges)}. Small steps average over the zones. A server that trains at "
        f"one hour only ends {distance_of_one_hour:.2f} away: zones that are never there then are not learnt, and no "
        "weight corrects that, for their chance is zero."
    )
