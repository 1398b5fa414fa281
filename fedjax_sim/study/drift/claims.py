"""This module draws the conclusions of `drift` from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fedjax_sim import theory
from fedjax_sim.study.claims import Claim, Row, every, is_below, rising, selected, shown
from fedjax_sim.study.drift.base import base_setting
from fedjax_sim.study.drift.fixed_points import UNEQUAL_ETAS
from fedjax_sim.study.quadratic_settings import Base


def drift_claims(rows: Sequence[Row], options: Mapping[str, Any]) -> Iterator[Claim]:
    """Yields what the study concludes about fixed points, the parts of the drift bias, and its leading term.

    Args:
      rows: the rows of the study.
      options: the study's options.
    """
    base = base_setting(options)
    yield from _fixed_points(rows)
    yield from _parts_of_the_bias(rows, base)
    yield from _leading_term(rows, base)
    yield from _unequal_steps(rows)
    yield from _proximal(rows)


def _fixed_points(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about where FedAvg and its corrections converge to.

    Args:
      rows: the rows of the study.
    """
    fixed_points = selected(rows, part="fixed point")
    fedavg = {(row["step_size"], row["local_steps"]): row for row in selected(fixed_points, algorithm="FedAvg")}
    settings = sorted(fedavg)  # of one step size follow each other, with rising numbers of steps
    num_steps = [local_steps for _, local_steps in settings]
    ends = min(num_steps), max(num_steps)
    pairs = [(fedavg[one], fedavg[next_one]) for one, next_one in pairwise(settings) if one[0] == next_one[0]]
    yield Claim(
        "FedAvg of all clients, without noise, converges to a point that lies further from the optimum for more local "
        "steps.",
        every(is_below(few, many) for few, many in pairs),
        shown([fedavg[setting] for setting in settings if setting[1] in ends], "step_size", "local_steps"),
    )
    corrected = [row for row in fixed_points if row["algorithm"] != "FedAvg" and row["local_steps"] > 1]
    farthest = sorted(corrected, key=lambda row: row["measured"])[-1:]
    yield Claim(
        "SCAFFOLD, FedDyn and Mime end less than a hundredth of FedAvg's distance from the optimum, for every number "
        "and size of several local steps.",
        every(is_below(row, fedavg[row["step_size"], row["local_steps"]], 0.01) for row in corrected),
        "farthest: " * bool(farthest) + shown(farthest, "algorithm", "step_size", "local_steps"),
    )


def _parts_of_the_bias(rows: Sequence[Row], base: Base) -> Iterator[Claim]:
    """Yields claims about curvature and heterogeneity, and about two vectors that are called a round's gradient.

    Args:
      rows: the rows of the study.
      base: the base setting.
    """
    alike = {row["quantity"]: row for row in selected(rows, part="identical clients")}
    yield Claim(
        "Identical clients have a drift bias too, and its heterogeneity part is less than a hundredth of it.",
        every([is_below(alike["heterogeneity part"], alike["drift bias"], 0.01)]),
        shown([alike["drift bias"], alike["heterogeneity part"]], "quantity"),
    )
    equal = selected(rows, part="equal Hessians")
    different = selected(rows, part="heterogeneity", heterogeneity=base.heterogeneity)
    yield Claim(
        "With equal Hessians and different optima, FedAvg ends less than a hundredth as far from the optimum as with "
        "different Hessians.",
        every(is_below(*pair, 0.01) for pair in zip(equal, different, strict=True)),
        shown([*equal, *different], "part"),
    )
    pseudo_gradient = selected(rows, part="one round", quantity="pseudo-gradient")
    end_point_gradient = theory.quadratic_drift(
        *base.problem, point=base.problem.start, num_steps=base.num_steps, step_size=base.step_size
    ).end_point_gradient
    length = float(np.linalg.norm(end_point_gradient))
    yield Claim(
        f"The pseudo-gradient of {base.num_steps} local steps is more than {base.num_steps} times as long as the mean "
        "gradient at the end points of local work.",
        every(is_below(base.num_steps * length, row) for row in pseudo_gradient),
        f"{shown(pseudo_gradient, 'quantity')}; mean gradient at the end points: {length:.3g}",
    )


def _leading_term(rows: Sequence[Row], base: Base) -> Iterator[Claim]:
    """Yields claims about where the first order in the step explains the bias, on quadratics and for a model.

    Args:
      rows: the rows of the study.
      base: the base setting.
    """
    # One step on quadratics has no error of the leading term.
    work = {"quantity": "bias less leading term", "local_steps": base.num_steps}
    whole, half = (
        selected(rows, part=part, **work) if base.num_steps > 1 else []
        for part in ("drift bias", "drift bias, half the step")
    )
    yield Claim(
        f"Half the step divides what the leading term leaves of the bias by more than three, with {base.num_steps} "
        "local steps on quadratics.",
        every(is_below(fine, coarse, 1 / 3) for fine, coarse in zip(half, whole, strict=True)),
        shown([*whole, *half], "step_size"),
    )
    most_steps = max(row["local_steps"] for row in selected(rows, part="drift bias"))
    longest = {row["quantity"]: row for row in selected(rows, part="drift bias", local_steps=most_steps)}
    yield Claim(
        f"With {most_steps} local steps the leading term is more than twice as long as the bias.",
        every([is_below(longest["drift bias"], longest["leading term"], 0.5)]),
        shown([longest["drift bias"], longest["leading term"]], "quantity"),
    )
    model = selected(rows, part="logistic regression", quantity="bias less leading term")
    fewest_steps = min((row["local_steps"] for row in model), default=0)
    fewest = rising(model, "step_size", local_steps=fewest_steps)
    yield Claim(
        "On logistic regression with the fewest local steps, half the step divides what the leading term leaves by "
        "3.5 to 4.5.",
        every(is_below(fine, coarse, 1 / 3.5) and is_below(coarse, fine, 4.5) for fine, coarse in pairwise(fewest)),
        shown(fewest, "local_steps", "step_size"),
    )


def _unequal_steps(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields claims about clients with unequal numbers of local steps and equal Hessians.

    Args:
      rows: the rows of the study.
    """
    distances = selected(rows, part="unequal steps", quantity="distance to the optimum")
    large, small = (
        {row["algorithm"]: row for row in selected(distances, step_size=step_size)} for step_size in UNEQUAL_ETAS
    )
    fedavg = [(large[name], small[name]) for name in ("FedAvg", "FedAvg by examples")]
    yield Claim(
        "Unequal numbers of local steps move FedAvg although all Hessians are equal, and a smaller step removes less "
        "than half of it, with equal weights and with weights by examples.",
        every(is_below(of_large, of_small, 2) for of_large, of_small in fedavg),
        shown([row for pair in fedavg for row in pair], "algorithm", "step_size"),
    )
    yield Claim(
        "With FedNova a tenth of the step leaves less than a fifth of the distance, and less than a tenth of FedAvg's.",
        every([is_below(small["FedNova"], large["FedNova"], 0.2), is_below(small["FedNova"], small["FedAvg"], 0.1)]),
        shown([large["FedNova"], small["FedNova"], small["FedAvg"]], "algorithm", "step_size"),
    )


def _proximal(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yields the claim that FedProx pays for its smaller bias with speed.

    Args:
      rows: the rows of the study.
    """
    distances, contractions = (
        rising(rows, "proximal_weight", part="FedProx", quantity=quantity)
        for quantity in ("distance to the optimum", "contraction of a round")
    )
    yield Claim(
        "A larger proximal weight of FedProx moves the fixed point nearer to the optimum, and slows a round down.",
        every(
            [is_below(heavy, light) for light, heavy in pairwise(distances)]
            + [is_below(light, heavy) for light, heavy in pairwise(contractions)]
        ),
        shown([*distances, *contractions], "quantity", "proximal_weight"),
    )
