"""This module writes the reading of `error_floor`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedjax_sim.study.error_floor.quadratics import Quadratics, Setting
from fedjax_sim.study.findings import Comparison

# Causes in the budget of `theory.budget`, with their names in plain words.
NAMES = {
    "drift": "client drift",
    "client_sampling": "client sampling",
    "minibatch": "minibatches",
    "quantization": "quantisation",
    "privacy_noise": "privacy noise",
}


def error_floor_reading(problem: Quadratics, base: Setting, found: Sequence[Comparison]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      problem: the quadratic clients.
      base: the base setting.
      found: the comparisons of the study.
    """
    budget = problem.budget(base)
    parts = ", ".join(f"{NAMES[name]} {budget.losses[name] / budget.total:.0%}" for name in NAMES)
    yield (
        f"With a constant step a run does not reach the optimum: the expected loss falls to {budget.total:.3g} above "
        f"the least, after about {budget.rounds_to_floor(problem.start)} rounds. The floor is a sum: {parts}. Drift is "
        "a bias, which averaging over cohorts does not remove; the others are variances. Client sampling falls as "
        "(1/m) (N - m) / (N - 1) and vanishes at m = N; minibatches and quantisation fall as 1/m, privacy noise as "
        "1/m^2."
    )
    slow, fast = (problem.budget(base._replace(step_size=eta)) for eta in (base.step_size / 2, base.step_size))
    yield (
        f"A faster run has a higher floor: half of the step size takes the floor from {fast.total:.3g} to "
        f"{slow.total:.3g}, and the rounds to it from {fast.rounds_to_floor(problem.start)} to "
        f"{slow.rounds_to_floor(problem.start)}. Errors of the gradients shrink with the step; privacy noise is added "
        "to what is sent, whatever the step, and a slower run accumulates more of it "
        f"({fast.losses['privacy_noise']:.2g} to {slow.losses['privacy_noise']:.2g}), so that one step is best. An "
        "error floor is not a worse final accuracy: with steps that decay as 1/t it vanishes; compare at equal "
        "cohorts, and say which schedule."
    )
    yield (
        "Each bit more divides the quantiser's part by ((2^(b+1) - 2) / (2^b - 2))^2, about four for many bits and "
        "more for few, since its variance is Delta^2 / 6 a number with Delta = 2 s / (2^b - 2) as long as updates "
        "spread over a level or more; with fewer bits it depends on where they lie, which the prediction includes. An "
        "unbiased quantiser whose error grows with the update (QSGD) also lowers the largest stable step: keep eta L "
        "(1 + omega / m) < 2."
    )
    if any(comparison.conditions["part"] == "logistic regression" for comparison in found):
        yield (
            "For logistic regression the budget uses three matrices at the optimum: the Hessian, the covariance of the "
            "clients' gradients and that of one minibatch. It is the leading order of a local quadratic model: right "
            "to a few per cent while the run stays near the optimum, and no more than that."
        )
    network_floors = [comparison for comparison in found if comparison.conditions["part"] == "digits MLP"]
    if network_floors:
        ratios = ", ".join(f"{comparison.measured / comparison.predicted:.2f}" for comparison in network_floors)
        yield (
            "A network has no closed form. The same three matrices at a minimum give an estimate of how far rounds "
            f"with a constant step drive it away; measured over estimated is {ratios}. It is shown and not judged: "
            "curvature changes along the way."
        )
