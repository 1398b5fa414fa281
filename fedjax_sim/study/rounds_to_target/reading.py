"""What the findings of `rounds_to_target` say, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of

__all__ = ["target_reading"]


def target_reading(
    options: dict[str, Any], found: Sequence[Comparison], floor: Callable[[Comparison], float]
) -> Iterator[str]:
    """Paragraphs, from the numbers that were found; `floor` gives a setting's error floor, over the target."""
    same = comparisons_of(found, "one curvature", "rounds to target")
    if len(same) > 1:
        few, many = same[0], same[-1]
        yield (
            f"Where all clients agree, local work replaces rounds: {few.measured:g} rounds with K = "
            f"{few.conditions['local_steps']} and {many.measured:g} with K = {many.conditions['local_steps']}. With "
            "one curvature the loss falls by (1 - eta h)^(2K) a round, so rounds times K stays the same, up to whole "
            "rounds: the same gradients, fewer messages."
        )
    late = comparisons_of(found, "heterogeneous", "loss after the last round / target")
    there = comparisons_of(found, "heterogeneous", "rounds to target")
    never = [one for one in late if floor(one) > 1]
    words = ["With optima and Hessians that differ"]
    if never:
        words.append(
            f", more local work is faster only until its drift is above the target: at step {options['step_size']:g} K "
            f"= {never[0].conditions['local_steps']} converges to {floor(never[0]):.3g} times the target and never "
            "gets there. That is a property of the constant step: with steps that decay over the rounds the floor "
            "falls with them."
        )
    else:
        words.append(" drift stays below this target for every K that was tried.")
    slow = [str(one.conditions["local_steps"]) for one in late if one not in never]
    if slow:
        words.append(f" K = {', '.join(slow)} had too few rounds: not there after {options['max_rounds']}.")
    if there:
        best = min(there, key=lambda one: one.measured)
        words.append(f" The fewest rounds are {best.measured:g}, at K = {best.conditions['local_steps']}.")
    yield "".join(words)
    batches = [one for one in found if one.conditions["part"] == "batches"]
    if batches:
        lost = [one for one in batches if one.quantity.startswith("loss after")]
        slow = [one for one in lost if floor(one) <= 1]
        yield (
            "Noisy gradients add a floor of their own, in proportion to eta / B and divided by how many take part. "
            + _batches([one for one in lost if one not in slow], "never have a mean loss below the target")
            + _batches(slow, f"do not have one after {options['max_rounds']} rounds")
            + _batches([one for one in batches if one not in lost], "do, in the round that the budget predicts")
            + "What is compared is the mean loss of many runs in the predicted round, or in the last one."
        )
    model = comparisons_of(found, "digits MLP", "rounds to target")
    if model:
        alphas = list(dict.fromkeys(one.conditions["alpha"] for one in model))
        words = []
        for alpha in alphas:
            ones = sorted((one for one in model if one.conditions["alpha"] == alpha),
                          key=lambda one: one.conditions["local_steps"])  # fmt: skip
            shown = ", ".join(f"{one.measured:.3g} at {one.conditions['local_steps']}" for one in ones)
            words.append(f"with alpha = {alpha:g}, {shown}")
        yield (
            f"On the digits' MLP, rounds to a test loss of {options['model_target']:g} against local steps a round: "
            f"{'; '.join(words)}. All at the same learning rate of {options['learning_rate']:g}; McMahan et al. tuned "
            "it for each setting, and have E epochs of batches of B: E n / B steps. There is no closed form here, and "
            f"a setting that is missing did not reach the target in {options['model_rounds']} rounds. Bytes are rounds "
            "times what a round sends, so they fall as the rounds do; gradients need not."
        )


def _batches(found: Sequence[Comparison], words: str) -> str:
    sizes = ", ".join(str(one.conditions["batch_size"]) for one in found)
    return f"Batches of {sizes} {words}. " if sizes else ""
