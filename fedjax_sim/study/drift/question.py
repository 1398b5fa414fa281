"""This study measures what several local steps do: fixed points of FedAvg and of its corrections, and client drift."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fedjax_sim import validate
from fedjax_sim.study.drift.base import base_setting
from fedjax_sim.study.drift.claims import drift_claims
from fedjax_sim.study.drift.figure import drift_figure
from fedjax_sim.study.drift.fixed_points import fixed_point_rows
from fedjax_sim.study.drift.parts import bias_rows, model_drift_rows, proximal_rows
from fedjax_sim.study.findings import Findings, rows_of
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, quadratic_clients

QUESTION = "What do several local steps do to the point that training converges to?"


def drift(
    *,
    num_clients: int = 20,
    dimension: int = 4,
    heterogeneities: Sequence[float] = (0.0, 0.5, 1.0, 2.0),
    step_sizes: Sequence[float] = (0.05, 0.1, 0.2),
    num_steps: Sequence[int] = (1, 2, 4, 10, 30),
    proximal_weights: Sequence[float] = (0.0, 0.1, 1.0, 10.0, 100.0),
    model_clients: int = 50,
    alpha: float = 0.3,
    seed: int = 0,
) -> Findings:
    """What do several local steps do? Compares fixed points and drift of FedAvg and its corrections with closed forms.

    Clients have quadratic risks with different Hessians. All take part with full batches, so nothing is random. A
    client that takes K local steps holds K copies of its quadratic and visits each once in an epoch. At the end the
    drift of logistic regression on digits is measured at one model.

    Args:
      num_clients: N, even.
      dimension: d.
      heterogeneities: spreads of the clients' optima; the last but one is the base setting.
      step_sizes: eta of local steps, at most 0.5; the middle one is the base setting.
      num_steps: K; the middle one is the base setting.
      proximal_weights: lambda of FedProx, whose penalty is (lambda / 2) |w - w_t|^2.
      model_clients: N of the digits; 0 leaves them out.
      alpha: the parameter of the digits' Dirichlet label shares; small values give unlike clients.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_drift.py::test_predictions_hold). A prediction
    that is 5 % off does not (::test_it_can_tell_a_wrong_formula).

    References: Karimireddy et al. 2020 (SCAFFOLD), section 3; Li et al. 2020 (FedProx); Wang et al. 2020 (FedNova);
    Acar et al. 2021 (FedDyn); Karimireddy et al. 2021 (Mime).
    """
    options = dict(locals())
    _check(options)
    problems = {h: quadratic_clients(num_clients, dimension, h, seed) for h in sorted({*heterogeneities})}
    steps = sorted({*num_steps})
    etas = sorted({*step_sizes})
    base = base_setting(options)
    comparisons = [*fixed_point_rows(base, problems, steps, etas), *proximal_rows(base, sorted({*proximal_weights}))]
    comparisons += bias_rows(base, steps)
    if model_clients:
        comparisons += model_drift_rows(model_clients, alpha, steps, seed)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    rows = rows_of(comparisons)
    return Findings(
        name="drift",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(drift_claims(rows, options)),
        figure=partial(drift_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `drift`, by name.
    """
    for name in ("heterogeneities", "step_sizes", "num_steps", "proximal_weights"):
        validate.sequence(name, options[name])
    validate.integer("num_clients", options["num_clients"], 2)
    if options["num_clients"] % 2:
        validate.fail("num_clients", "an even number", options["num_clients"], "Two kinds of clients are compared.")
    validate.integer("dimension", options["dimension"], 1, 40)
    for name in ("heterogeneities", "proximal_weights"):
        for value in options[name]:
            validate.in_range(name, value, 0, 1e4)
    # Gradient descent is stable for steps below 2 / L; up to 1 / L it does not oscillate either.
    for value in options["step_sizes"]:
        validate.in_range(
            "step_sizes", value, 0.005, 1 / LARGEST_CURVATURE, hint=f"Curvatures go up to {LARGEST_CURVATURE:g}."
        )
    for value in options["num_steps"]:
        validate.integer("num_steps", value, 1, 200)
    validate.integer("model_clients", options["model_clients"], 0)
    validate.positive("alpha", options["alpha"])
    validate.integer("seed", options["seed"], 0)
