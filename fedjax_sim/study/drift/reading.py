"""What the findings of `drift` say, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fedjax_sim import theory
from fedjax_sim.study.findings import Comparison, comparisons_of
from fedjax_sim.study.quadratic_settings import Base

__all__ = ["drift_reading"]


def drift_reading(base: Base, found: Sequence[Comparison]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
    work = f"K = {base.num_steps}, step {base.step_size:g}"
    avg = [one for one in comparisons_of(found, "fixed point", "distance to the optimum", algorithm="FedAvg")
           if one.conditions["step_size"] == base.step_size]  # fmt: skip
    others = [one for one in found if one.conditions["part"] == "fixed point" and one.predicted == 0.0
              and one.conditions["algorithm"] != "FedAvg"]  # fmt: skip
    names = ", ".join(dict.fromkeys(one.conditions["algorithm"] for one in others))
    ends = {one.conditions["local_steps"]: one.measured for one in (avg[0], avg[-1])}
    shown = " and ".join(f"{distance:.3g} at K = {k}" for k, distance in ends.items())
    yield (
        "FedAvg of everybody, without any noise, comes to rest away from the optimum if clients that differ take "
        f"several steps, {shown}: at the point where sum p_i M_i (w - a_i) = 0, "
        "M_i = I - (I - eta H_i)^K, and no number of rounds helps. One "
        "full-batch step of plain SGD is centralised descent and has no bias (with Adam or weight decay in the clients "
        f"that is not so). {names} rest at the optimum for every K and step, at most "
        f"{max(one.measured for one in others):.1g} from it, which is rounding."
    )
    same = comparisons_of(found, "identical clients", "drift bias")[0]
    equal = comparisons_of(found, "equal Hessians", "distance to the optimum")[0]
    yield (
        "That drift is there because data are not IID is half of the truth. The bias of the gradients that clients "
        "meet at the end of their work has a curvature part, -sum p_i M_i grad F, which identical clients have too "
        f"({same.measured:.3g} at {work}, heterogeneity part 0), and which vanishes with grad F; and a heterogeneity "
        "part, minus the covariance over clients of local work and gradient. The first one only changes the speed; a "
        f"fixed point that moves needs Hessians that differ: with equal Hessians and different optima FedAvg rests "
        f"{equal.measured:.1g} from the optimum."
    )
    sent = comparisons_of(found, "one round", "pseudo-gradient")[0]
    end = theory.quadratic_drift(
        *base.problem, point=base.problem.start, num_steps=base.num_steps, step_size=base.step_size
    ).end_point_gradient
    yield (
        "Two things are called the gradient of a round. What the server receives, (w - w_next) / eta, is the sum of "
        f"all gradients on the way: {sent.measured:.3g} long at {work}. The mean gradient at the end points is "
        f"{np.linalg.norm(end):.3g} long. The bias in this study is that of the latter."
    )
    rest = [comparisons_of(found, part, "bias less leading term", local_steps=base.num_steps)
            for part in ("drift bias", "drift bias, half the step")]  # fmt: skip
    halving = words = ""
    if base.num_steps > 1:
        halving = (
            f" Half the step divides the rest by {rest[0][0].measured / max(rest[1][0].measured, 1e-12):.3g} at "
            f"K = {base.num_steps}; four is its limit for small eta K L, and where eta K L is near 1 the leading term "
            "says nothing."
        )
    model = comparisons_of(found, "logistic regression", "bias less leading term")
    if model:
        fine = [one for one in model if one.conditions["local_steps"] == model[0].conditions["local_steps"]]
        coarse = [one for one in model if one.conditions["local_steps"] == model[-1].conditions["local_steps"]]
        words = (
            f" On logistic regression, which has no closed form, half the step divides the rest by "
            f"{fine[-2].measured / fine[-1].measured:.3g} with {fine[-1].conditions['local_steps']} local step and by "
            f"{coarse[-2].measured / coarse[-1].measured:.3g} with {coarse[-1].conditions['local_steps']}."
        )
    yield (
        "To first order the bias is -eta K sum p_i H_i g_i, with one Hessian-vector product a client: exact for one "
        f"step on quadratics, and otherwise wrong by O(eta^2).{halving}{words}"
    )
    rows = comparisons_of(found, "unequal steps", "distance to the optimum")
    shown = {(one.conditions["algorithm"], one.conditions["step_size"]): one.measured for one in rows}
    yield (
        "Unequal numbers of steps, 1 and 10, move FedAvg even where all Hessians are equal: towards the optimum with "
        f"shares p_i K_i, {shown['FedAvg', 0.01]:.3g} away at step 0.01. FedNova takes that away, and what drift "
        f"leaves of it falls with eta K ({shown['FedNova', 0.1]:.3g} at step 0.1, {shown['FedNova', 0.01]:.3g} at "
        "0.01). Who trains for epochs and also weighs by examples counts large clients twice, with shares in "
        "proportion to n_i^2: "
        f"{shown['FedAvg by examples', 0.01]:.3g} from the optimum by examples. E is epochs in some papers and steps "
        "in others: a client takes E n_i / B steps."
    )
    yield (
        "FedProx buys its smaller bias with speed: with exact local solutions a large proximal weight rests near the "
        "optimum and contracts hardly at all. Its drift is at most G / (mu + lambda), measured from the minimum of "
        "F + (lambda / 2) |w - w_t|^2 with G taken there, and not from the minimum of F."
    )
