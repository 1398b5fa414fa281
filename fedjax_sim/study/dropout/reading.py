"""This module writes the reading of `dropout`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of


def dropout_reading(
    found: Sequence[Comparison], options: dict[str, Any], costs: Sequence[tuple[str, float, int]]
) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
      costs: (graph, bytes that a client moves beside its message, mask words for one number).
    """
    texts = []
    for graph, *_ in costs:
        comparisons = comparisons_of(found, graph, "aborted share")
        shares = ", ".join(
            f"{comparison.measured:.3g} at {comparison.conditions['dropout']:g}" for comparison in comparisons
        )
        texts.append(f"{graph}: {shares}")
    yield (
        f"Share of {options['num_rounds']:,} rounds of {options['num_clients']} clients that are aborted, by the "
        f"probability of leaving before each of the four steps: {'; '.join(texts)}."
    )
    last_messages = comparisons_of(found, costs[0][0], "messages in a sum")[-1]  # at the largest probability
    yield (
        f"Fewer messages reach the server than clients were asked: {last_messages.measured:.1f} of "
        f"{options['num_clients']} on average at {last_messages.conditions['dropout']:g}, aborted rounds included. A "
        "mean must be divided by their number, and noise that clients share must be enough with the fewest that a sum "
        "may hold."
    )
    prices = "; ".join(
        f"{name} {extra:,.0f} bytes, {mask_words} mask words a number" for name, extra, mask_words in costs
    )
    yield (
        f"What a client pays beside its message: {prices}. A circle is cheaper and aborts earlier at the same share of "
        f"holders, for each secret hangs on {options['neighbours']} clients; its line is an upper bound."
    )
