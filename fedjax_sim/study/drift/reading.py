"""This module writes the reading of `drift`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedjax_sim import theory
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.quadratic_settings import Base


def drift_reading(base: Base, found: Sequence[Comparison]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      base: the base setting of the study.
      found: the comparisons of the study.
    """
    yield _fixed_points(base, found)
    yield _parts_of_the_bias(base, found)
    yield _two_gradients(base, found)
    yield (
        "To first order the bias is -eta K sum p_i H_i g_i, with one Hessian-vector product a client: exact for one "
        f"step on quadratics, and otherwise wrong by O(eta^2).{_halving(base, found)}{_halving_of_the_model(found)}"
    )
    yield _unequal_steps(found)
    yield (
        "FedProx pays for its smaller bias with speed: with exact local solutions and a large proximal weight its "
        "fixed point is near the optimum, and a round hardly contracts. Its drift is at most G / (mu + lambda), "
        "measured from the minimum of F + (lambda / 2) |w - w_t|^2 with G taken there, and not from the minimum of F."
    )


def _fixed_points(base: Base, comparisons: Sequence[Comparison]) -> str:
    """Writes where FedAvg and its corrections converge to.

    Args:
      base: the base setting; FedAvg's distances are quoted at its step size.
      comparisons: the comparisons of the study; those of the part "fixed point" are quoted.

    Returns: a paragraph.
    """
    fedavg = [
        comparison
        for comparison in comparisons_of(comparisons, "fixed point", "distance to the optimum", algorithm="FedAvg")
        if comparison.conditions["step_size"] == base.step_size
    ]
    others = [
        comparison
        for comparison in comparisons_of(comparisons, "fixed point")
        if comparison.predicted == 0.0 and comparison.conditions["algorithm"] != "FedAvg"
    ]
    names = ", ".join(dict.fromkeys(comparison.conditions["algorithm"] for comparison in others))
    # With the fewest and the most local steps.
    ends = {comparison.conditions["local_steps"]: comparison.measured for comparison in (fedavg[0], fedavg[-1])}
    distances = " and ".join(f"{distance:.3g} at K = {k}" for k, distance in ends.items())
    return (
        "FedAvg of all clients, without any noise, converges to a point away from the optimum if clients that differ "
        f"take several steps, {distances}: to the solution of sum p_i M_i (w - a_i) = 0 with M_i = I - (I - eta "
        "H_i)^K, and more rounds do not help. One full-batch step of plain SGD is centralised gradient descent and has "
        f"no bias (with Adam or weight decay in the clients that is not so). {names} converge to the optimum for every "
        f"K and step: they end at most {max(comparison.measured for comparison in others):.1g} from it, which is "
        "rounding."
    )


def _parts_of_the_bias(base: Base, comparisons: Sequence[Comparison]) -> str:
    """Writes which part of the bias comes from curvature and which from heterogeneity."""
    identical = comparisons_of(comparisons, "identical clients", "drift bias")[0]
    equal_hessians = comparisons_of(comparisons, "equal Hessians", "distance to the optimum")[0]
    return (
        "That drift exists because data are not IID is half of the truth. The bias of the gradients at the end of "
        "local work has a curvature part, -sum p_i M_i grad F, which identical clients have too "
        f"({identical.measured:.3g} at {_work(base)}, heterogeneity part 0), and which vanishes with grad F; and a "
        "heterogeneity part, minus the covariance over clients of local work and gradient. The curvature part changes "
        "the speed only; the fixed point moves only if Hessians differ: with equal Hessians and different optima "
        f"FedAvg ends {equal_hessians.measured:.1g} from the optimum."
    )


def _two_gradients(base: Base, comparisons: Sequence[Comparison]) -> str:
    """Writes how the pseudo-gradient differs from the mean gradient at the end points."""
    pseudo_gradient = comparisons_of(comparisons, "one round", "pseudo-gradient")[0]
    end_point_gradient = theory.quadratic_drift(
        *base.problem, point=base.problem.start, num_steps=base.num_steps, step_size=base.step_size
    ).end_point_gradient
    return (
        "Two things are called the gradient of a round. What the server receives, (w - w_next) / eta, is the sum of "
        f"all gradients on the way: {pseudo_gradient.measured:.3g} long at {_work(base)}. The mean gradient at the "
        f"end points is {np.linalg.norm(end_point_gradient):.3g} long. The bias in this study is that of the latter."
    )


def _halving(base: Base, comparisons: Sequence[Comparison]) -> str:
    """Writes what half the step does to the bias less its leading term; empty for one step, where they are equal."""
    if base.num_steps == 1:
        return ""
    whole, half = (
        comparisons_of(comparisons, part, "bias less leading term", local_steps=base.num_steps)[0]
        for part in ("drift bias", "drift bias, half the step")
    )
    return (
        f" Half the step divides the rest by {whole.measured / max(half.measured, 1e-12):.3g} at K = {base.num_steps}; "
        "four is its limit for small eta K L, and where eta K L is near 1 the leading term says nothing."
    )


def _halving_of_the_model(comparisons: Sequence[Comparison]) -> str:
    """Writes what half the step does on logistic regression, with the fewest and the most local steps."""
    model = comparisons_of(comparisons, "logistic regression", "bias less leading term")
    if not model:
        return ""
    fewest_steps = model[0].conditions["local_steps"]
    most_steps = model[-1].conditions["local_steps"]
    fine = [comparison for comparison in model if comparison.conditions["local_steps"] == fewest_steps]
    coarse = [comparison for comparison in model if comparison.conditions["local_steps"] == most_steps]
    return (
        " On logistic regression, which has no closed form, half the step divides the rest by "
        f"{fine[-2].measured / fine[-1].measured:.3g} with {fine[-1].conditions['local_steps']} local step and by "
        f"{coarse[-2].measured / coarse[-1].measured:.3g} with {coarse[-1].conditions['local_steps']}."
    )


def _unequal_steps(all_comparisons: Sequence[Comparison]) -> str:
    """Writes what unequal numbers of local steps do to FedAvg and FedNova.

    Args:
      all_comparisons: the comparisons of the study. The part "unequal steps" has the distance |w_inf - w*| for each
        algorithm, at step sizes 0.1 and 0.01.

    Returns: a paragraph.
    """
    comparisons = comparisons_of(all_comparisons, "unequal steps", "distance to the optimum")
    distances = {
        (comparison.conditions["algorithm"], comparison.conditions["step_size"]): comparison.measured
        for comparison in comparisons
    }
    return (
        "Unequal numbers of steps, 1 and 10, move FedAvg even where all Hessians are equal: towards the optimum with "
        f"shares p_i K_i, {distances['FedAvg', 0.01]:.3g} away at step 0.01. FedNova removes that shift, and what "
        f"remains is drift, which falls with eta K ({distances['FedNova', 0.1]:.3g} at step 0.1, "
        f"{distances['FedNova', 0.01]:.3g} at 0.01). Training for epochs and also weighting by examples counts large "
        f"clients twice, with shares in proportion to n_i^2: {distances['FedAvg by examples', 0.01]:.3g} from the "
        "optimum by examples. E is epochs in some papers and steps in others: a client takes E n_i / B steps."
    )


def _work(base: Base) -> str:
    """Returns the base setting's local work as it is written in a sentence."""
    return f"K = {base.num_steps}, step {base.step_size:g}"
