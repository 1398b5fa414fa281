"""This module writes the reading of `staleness`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedjax_sim import theory
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.staleness.delays import MIXING, STEP
from fedjax_sim.study.staleness.speeds import SLOWER, SPEED_STEP


def staleness_reading(found: Sequence[Comparison], step: float) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      step: the step size at which floors were measured.
    """
    yield from _limit(found)
    yield from _floor(found, step)
    yield from _weights(found)
    buffers = comparisons_of(found, "buffers", "staleness, versions")
    if buffers:
        waits = comparisons_of(found, "buffers", "delay, seconds")
        numbers = ", ".join(
            f"{staleness.measured:.3g} versions and {wait.measured:.3g} s at K = {staleness.conditions['buffer_size']}"
            for staleness, wait in zip(buffers, waits, strict=True)
        )
        yield (
            f"Staleness is not delay. With {buffers[0].conditions['concurrency']} clients in flight whose times are "
            f"exponential with a mean of 1 s, an update is stale by, and waits in the buffer for, {numbers}. A larger "
            "buffer makes fewer versions, so updates are less stale, (C - 1) / K, though they wait longer before they "
            "are used, (K - 1) / 2C. What harms convergence is the first number; the second is only time."
        )


def _limit(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Writes which steps converge, with FedBuff and with FedAsync.

    Args:
      comparisons: the comparisons of the study; the parts "limit" and "same step" are quoted.

    Yields: a paragraph for each of the two parts that was measured.
    """
    limit = comparisons_of(comparisons, "limit")
    if limit:
        longest = max(comparison.conditions["delay"] for comparison in limit)
        below, above = (
            comparisons_of(comparisons, "limit", step_over_limit=share, delay=longest)[0] for share in (0.99, 1.01)
        )
        limits = ", ".join(
            f"{theory.delayed_step_limit(delay):.3g} at {delay}"
            for delay in sorted({comparison.conditions["delay"] for comparison in limit})
        )
        yield (
            "Old gradients narrow the steps that converge. Where all clients are equally fast every gradient is as "
            "many versions old as others are in flight, and with curvature 1 the largest stable step is 2 sin(pi / "
            f"(2 (2 tau + 1))): {limits}. At 0.99 of it the error shrinks and at 1.01 it grows, at every delay: at "
            f"{longest} by {below.measured:.5f} and {above.measured:.5f} a step. So a rate that was tuned with few "
            "clients in flight may diverge with many."
        )
    same_step = comparisons_of(comparisons, "same step", "factor per step", algorithm="fedasync")
    if same_step:
        fedasync = same_step[-1]  # at the longest delay
        delay = fedasync.conditions["delay"]
        fedbuff = comparisons_of(comparisons, "same step", "factor per step", algorithm="fedbuff", delay=delay)[0]
        yield (
            f"FedAsync does not have this limit, for it averages models instead of adding updates. With a mixing rate "
            f"of {MIXING:g} and local steps of {STEP / MIXING:g}, {STEP:g} together, its error changes by the factor "
            f"{fedasync.measured:.4f} a step at a delay of {delay}, where FedBuff with a step of {STEP:g} has "
            f"{fedbuff.measured:.4f}{': it diverges' if fedbuff.measured > 1 else ''}. The price is that old models "
            "pull the new one back, so progress slows down with the delay."
        )


def _floor(comparisons: Sequence[Comparison], step: float) -> Iterator[str]:
    """Writes how delay raises the floor, and how wrong a stale gradient is.

    Args:
      comparisons: the comparisons of the study; the parts "floor" and "error" are quoted.
      step: eta at which floors are quoted.

    Yields: a paragraph for each of the two parts that was measured.
    """
    # Floors at `step`; the others are at 3/4 of the limit.
    floor = [
        comparison
        for comparison in comparisons_of(comparisons, "floor")
        if comparison.conditions["step_over_limit"] < 0.7
    ]
    if floor:
        first = floor[0]
        last = floor[-1]
        yield (
            f"Below the limit, delay makes noise larger: at a step of {step:.3g} models stay at a squared distance of "
            f"{first.measured:.3g} from the optimum with a delay of {first.conditions['delay']} and "
            f"{last.measured:.3g} with {last.conditions['delay']}. For small steps this is the factor "
            "1 + (tau + 1/2) eta h, so a small step hides the delay; near the limit the floor is infinite."
        )
    # Without delay the bound is zero.
    bounded_errors = [
        comparison
        for comparison in comparisons_of(comparisons, "error")
        if comparison.kind == "upper bound" and comparison.predicted
    ]
    if bounded_errors:
        ratios = [comparison.measured / comparison.predicted for comparison in bounded_errors]
        yield (
            "How wrong a stale gradient is can be read off the models alone: at most L times the distance that the "
            f"model has gone since. Here it is between {min(ratios):.0%} and {max(ratios):.0%} of that bound, which is "
            "met only along the steepest direction."
        )


def _weights(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Writes what weights by staleness do where speeds are equal, and where they differ.

    Args:
      comparisons: the comparisons of the study; the parts "weights" and "speeds" are quoted.

    Yields: a paragraph for each of the two parts that was measured.
    """
    equal = comparisons_of(comparisons, "weights", "factor per step")
    if equal:
        delay = equal[0].conditions["delay"]
        numbers = ", ".join(f"{comparison.conditions['weights']} {comparison.measured:.4f}" for comparison in equal)
        yield (
            "Weights by staleness are a smaller step where all updates are equally stale: at a delay of "
            f"{delay} and 1.01 of the limit, where constant weights diverge, the factors per step are {numbers}. The "
            "same rate, divided by hand, does the same: noise falls and so does speed."
        )
    speeds = comparisons_of(comparisons, "speeds")
    if speeds:
        numbers = ", ".join(
            f"{comparison.measured:.3f} with {comparison.conditions['weights']} weights" for comparison in speeds
        )
        yield (
            f"Where speeds differ weights decide whose optimum is reached. Half of the clients take {SLOWER:g} times "
            f"as long, all are sent work again at once, and the slow half counts {numbers}, at a step of "
            f"{SPEED_STEP:g}; fair would be 0.5. Fast clients arrive more often, which alone gives "
            f"{1 / (1 + SLOWER):.3f}; discounts take away more, since slow clients are also the stale ones. Discount "
            'to be stable, not to be fair; with other clients drawn after each arrival (`refill = "other"`) how '
            "often one takes part depends less on its speed."
        )
