"""This module writes the reading of `time_to_target`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison


def time_reading(found: Sequence[Comparison], options: Mapping[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    rounds = _of(found, "seconds a round")
    if "waits for all" in rounds:
        waits = rounds["waits for all"].measured
        others = ", ".join(
            f"{comparison.measured:.3g} s ({name})" for name, comparison in rounds.items() if name != "waits for all"
        )
        yield (
            f"A round that waits for all lasts as long as the slowest of its {options['cohort_size']} clients: "
            f"{waits:.3g} s on average, where the median client trains for 1 s. Rounds that end sooner take {others}. "
            "All of these are order statistics of the clients' times: for a cohort drawn from a population whose times "
            "are known they are exact, and the law of the speeds alone comes close."
        )
    seconds = _of(found, "seconds to target")
    if seconds:
        yield _to_target(found, seconds, options)
    missing = _of(found, "accuracy after the last step")
    if missing:
        accuracies = ", ".join(f"{name} ({comparison.measured:.3f})" for name, comparison in missing.items())
        yield f"Not all runs reached the target with: {accuracies}, their mean test accuracy at the end."
    update_seconds = _of(found, "seconds an update")
    staleness = _of(found, "staleness")
    if update_seconds and "waits for all" in rounds:
        # Seconds for each update of the server that waits for all.
        synchronous_seconds = rounds["waits for all"].measured / options["cohort_size"]
        comparison_texts = ", ".join(
            f"{name} makes {synchronous_seconds / seconds.measured:.3g} times as many updates in a second, "
            f"{staleness[name].measured:.3g} versions old on average" for name, seconds in update_seconds.items()
        )  # fmt: skip
        yield (
            f"Asynchronous servers never wait for all. With as many clients at work {comparison_texts}: staleness is "
            "(C - 1) / K for C clients in flight and K updates a version, whatever their speeds; FedAT's tiers each "
            "wait for their own clients, and with Q of them it is Q - 1. What a slow client sends is old when it "
            "arrives, and counts less; but it arrives. In FedAT it is the other way round: the slowest tier, which has "
            "made the fewest rounds, counts most."
        )
    yield (
        "What this does not show: here a client's speed has nothing to do with its data. Where slow clients have other "
        "data, deadlines and over-selection leave these out, and the model is worse for them, however fast it is "
        "there; partial work leaves out fewer, and waiting none. All servers have the same learning rates; tuned ones "
        "would differ."
    )


def _of(comparisons: Sequence[Comparison], quantity: str) -> dict[str, Comparison]:
    """Selects the comparisons of a quantity, by server."""
    return {
        comparison.conditions["server"]: comparison for comparison in comparisons if comparison.quantity == quantity
    }


def _to_target(comparisons: Sequence[Comparison], seconds: dict[str, Comparison], options: Mapping[str, Any]) -> str:
    """Writes what each server needed to reach the target, the best server first for every unit."""
    ordered = sorted(seconds, key=lambda name: seconds[name].measured)
    numbers = ", ".join(f"{name} {seconds[name].measured:.3g}" for name in ordered)
    text = f"To a test accuracy of {options['target']:g}, simulated seconds: {numbers}."
    for unit in ("updates", "megabytes", "joules"):
        amounts = _of(comparisons, f"{unit} to target")
        ordered = sorted(amounts, key=lambda name: amounts[name].measured)
        numbers = ", ".join(f"{name} {amounts[name].measured:,.4g}" for name in ordered)
        text += f" In {unit}: {numbers}."
    return text + (
        " What is fastest is not what is cheapest: clients who were invited and not needed, or too late, have received "
        "the model and spent energy for nothing."
    )
