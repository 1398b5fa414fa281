"""This module writes the reading of `rounds_to_target`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of


def target_reading(
    options: dict[str, Any], found: Sequence[Comparison], floor: Callable[[Comparison], float]
) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      options: the study's options.
      found: the comparisons of the study.
      floor: comparison -> the error floor of its setting, divided by the target.
    """
    one_curvature = comparisons_of(found, "one curvature", "rounds to target")
    if len(one_curvature) > 1:
        # Settings are in the order of K.
        fewest_steps = one_curvature[0]
        most_steps = one_curvature[-1]
        yield (
            f"Where all clients agree, local work replaces rounds: {fewest_steps.measured:g} rounds with K = "
            f"{fewest_steps.conditions['local_steps']} and {most_steps.measured:g} with K = "
            f"{most_steps.conditions['local_steps']}. With one curvature the loss falls by (1 - eta h)^(2K) a round, "
            "so rounds times K stays the same, up to whole rounds: the same gradients, fewer messages."
        )
    not_reached = comparisons_of(found, "heterogeneous", "loss after the last round / target")
    reached = comparisons_of(found, "heterogeneous", "rounds to target")
    # A floor above the target can never be passed; the others only had too few rounds.
    never_reached = [comparison for comparison in not_reached if floor(comparison) > 1]
    sentences = ["With optima and Hessians that differ"]
    if never_reached:
        sentences.append(
            f", more local work is faster only until its drift is above the target: at step {options['step_size']:g} K "
            f"= {never_reached[0].conditions['local_steps']} converges to {floor(never_reached[0]):.3g} times the "
            "target and never gets there. That is a property of the constant step: with steps that decay over the "
            "rounds the floor falls with them."
        )
    else:
        sentences.append(" drift stays below this target for every K that was tried.")
    too_slow = [
        str(comparison.conditions["local_steps"]) for comparison in not_reached if comparison not in never_reached
    ]
    if too_slow:
        sentences.append(f" K = {', '.join(too_slow)} had too few rounds: not there after {options['max_rounds']}.")
    if reached:
        best = min(reached, key=lambda comparison: comparison.measured)
        sentences.append(f" The fewest rounds are {best.measured:g}, at K = {best.conditions['local_steps']}.")
    yield "".join(sentences)
    batches = [comparison for comparison in found if comparison.conditions["part"] == "batches"]
    if batches:
        late_batches = [comparison for comparison in batches if comparison.quantity.startswith("loss after")]
        slow_batches = [comparison for comparison in late_batches if floor(comparison) <= 1]
        floored_batches = [comparison for comparison in late_batches if comparison not in slow_batches]
        timely_batches = [comparison for comparison in batches if comparison not in late_batches]
        yield (
            "Noisy gradients add a floor of their own, in proportion to eta / B and divided by how many take part. "
            + _batches(floored_batches, "never have a mean loss below the target")
            + _batches(slow_batches, f"do not have one after {options['max_rounds']} rounds")
            + _batches(timely_batches, "do, in the round that the budget predicts")
            + "What is compared is the mean loss of many runs in the predicted round, or in the last one."
        )
    digits = comparisons_of(found, "digits MLP", "rounds to target")
    if digits:
        alphas = list(dict.fromkeys(comparison.conditions["alpha"] for comparison in digits))
        texts = []
        for alpha in alphas:
            comparisons = sorted(
                (comparison for comparison in digits if comparison.conditions["alpha"] == alpha),
                key=lambda comparison: comparison.conditions["local_steps"],
            )
            numbers = ", ".join(
                f"{comparison.measured:.3g} at {comparison.conditions['local_steps']}" for comparison in comparisons
            )
            texts.append(f"with alpha = {alpha:g}, {numbers}")
        yield (
            f"On the digits' MLP, rounds to a test loss of {options['model_target']:g} against local steps a round: "
            f"{'; '.join(texts)}. All at the same learning rate of {options['learning_rate']:g}; McMahan et al. tuned "
            "it for each setting, and have E epochs of batches of B: E n / B steps. There is no closed form here, and "
            f"a setting that is missing did not reach the target in {options['model_rounds']} rounds. Bytes are rounds "
            "times what a round sends, so they fall as the rounds do; gradients need not."
        )


def _batches(comparisons: Sequence[Comparison], predicate: str) -> str:
    """Returns the sentence that batches of these sizes do what the predicate says; empty without any size."""
    sizes = ", ".join(str(comparison.conditions["batch_size"]) for comparison in comparisons)
    return f"Batches of {sizes} {predicate}. " if sizes else ""
