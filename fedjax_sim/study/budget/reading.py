"""This module writes the reading of `budget`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.theory import Allocation, Choice


def budget_reading(
    found: Sequence[Comparison], allocations: Mapping[str, Allocation], options: Mapping[str, Any]
) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      allocations: the predictions, by unit.
      options: the study's options.
    """
    for unit, allocation in allocations.items():
        (regret,) = comparisons_of(found, unit, "regret")
        errors = [comparison.measured for comparison in comparisons_of(found, unit, "squared distance")]
        yield (
            f"Within {options[unit]:,.5g} {unit} the predicted choice is {_words(allocation.best)}. The measured error "
            f"of the choices goes from {min(errors):.3g} to {max(errors):.3g}; that of the predicted one is "
            f"{100 * regret.measured:.2g} % above the least, which is itself measured and may be lucky."
        )
    yield (
        "Few clients a round buy many rounds, which end at a high floor; many clients buy few rounds, which may not "
        "reach a low one. Each unit has its own best cohort: bytes count messages, and seconds count the slowest "
        "client. Fewer bits buy rounds and pay with the quantiser's noise; the broadcast stays as long as it is. A "
        "deadline buys rounds of less time and energy, and pays with a bias, since the same clients are late in every "
        "round: it helps where rounds are few, and hurts where the floor is reached. There, fewer rounds than the "
        "budget affords can be best: further rounds take less of the start away than they add of the bias."
    )
    yield (
        "What this does not show: predictions need the constants of the problem and one Hessian for all clients; here "
        "both are known. Speed has nothing to do with the data; where slow clients have other data, a deadline costs "
        "more. Step sizes are constant, and equal for all choices."
    )


def _words(choice: Choice) -> str:
    """Says what a choice is."""
    deadline = "no deadline" if choice.deadline is None else f"a deadline of {choice.deadline:.3g} s"
    bits = "floats" if choice.bits is None else f"{choice.bits} bits a number"
    return f"{choice.cohort_size} clients, {deadline} and {bits}, for {choice.num_rounds} rounds"
