"""This study measures the error floor of FedAvg with constant steps and splits it into its causes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.study.error_floor.base import NAMES, base_setting, error_floor_clients
from fedjax_sim.study.error_floor.claims import error_floor_claims
from fedjax_sim.study.error_floor.figure import error_floor_figure
from fedjax_sim.study.error_floor.logistic import logistic_floor
from fedjax_sim.study.error_floor.model import model_floor
from fedjax_sim.study.findings import FEW, Findings, least_runs, rows_of

QUESTION = "How far from the optimum does training with constant steps stay, and why?"


def error_floor(
    *,
    num_clients: int = 40,
    dimension: int = 4,
    heterogeneity: float = 1.0,
    step_sizes: Sequence[float] = (0.05, 0.1, 0.2),
    cohort_sizes: Sequence[int] = (4, 10, 40),
    num_steps: Sequence[int] = (1, 4, 12),
    bits: Sequence[int] = (3, 4, 8),
    noise_multipliers: Sequence[float] = (0.003, 0.01),
    num_runs: int = 2000,
    logistic_clients: int = 60,
    model_clients: int = 100,
    seed: int = 0,
) -> Findings:
    """How far from the optimum does training stay? Compares the error floor of FedAvg with the budget of its causes.

    Clients have quadratic risks f_i = (w - a_i)^T H_i (w - a_i) / 2 and noise on every local gradient. Cohorts are
    uniform, updates are quantised stochastically, and Gaussian noise is added to their mean.

    The base setting has the middle value of each list; every other value is tried alone. Each cause is then measured
    alone, and all together. Logistic regression follows, through its local quadratic model, and a small network.

    Args:
      num_clients: N.
      dimension: d.
      heterogeneity: spread of the clients' optima.
      step_sizes: eta.
      cohort_sizes: m.
      num_steps: K.
      bits: bits for each number of an update.
      noise_multipliers: z, with a clip norm that no update reaches.
      num_runs: independent runs behind each floor.
      logistic_clients: clients of the logistic regression; 0 leaves it out.
      model_clients: clients of the digits, for a small network and the estimate of its floor; 0 leaves it out.
      seed: decides everything.

    Returns: `Findings`: expected excess losses F(w_T) - F* at the floor, and on the way to it.

    Guarantees: every prediction lies in its interval (tests/study/test_error_floor.py::test_predictions_hold). A
    prediction that leaves out a component does not (::test_it_notices_what_is_left_out).

    References: `theory.budget`; Suresh et al. 2017 for the quantiser; Mandt, Hoffman and Blei 2017 for floors of SGD.
    """
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in locals().items()}
    _check(options)
    base, problem = base_setting(options), error_floor_clients(options)
    key = jax.random.key(seed)
    # Without any source of noise, client drift is the only cause left: it comes from local steps alone.
    drift_only = base._replace(cohort_size=num_clients, gradient_noise=0.0, bits=0, noise_multiplier=0.0)
    single_causes = {
        "drift": drift_only,
        "client_sampling": drift_only._replace(cohort_size=base.cohort_size),
        "minibatch": drift_only._replace(gradient_noise=base.gradient_noise),
        "quantization": drift_only._replace(bits=base.bits),
        "privacy_noise": drift_only._replace(noise_multiplier=base.noise_multiplier),
    }
    points = [("each alone", NAMES[name], setting) for name, setting in single_causes.items()]
    for name, values in (("step_size", step_sizes), ("cohort_size", cohort_sizes), ("num_steps", num_steps),
                         ("bits", bits), ("noise_multiplier", noise_multipliers)):  # fmt: skip
        points += [(name, value, base._replace(**{name: value})) for value in values]
    # Settings that would need too many rounds are refused here, before anything has run.
    for *_, setting in points:
        problem.rounds_to_floor(setting, problem.budget(setting))
    comparisons = [*problem.path(key, base, num_runs), *(problem.floor(key, *point, num_runs) for point in points)]
    if logistic_clients:
        num_logistic_runs = min(max(num_runs, 500), 1000)
        comparisons += logistic_floor(stream(key, "logistic"), logistic_clients, num_logistic_runs, seed)
    if model_clients:
        comparisons += model_floor(stream(key, "model"), model_clients, min(num_runs, 60), seed)
    rows = rows_of(comparisons)
    return Findings(
        name="error_floor",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(error_floor_claims(rows, options)),
        figure=partial(error_floor_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `error_floor`, by name.
    """
    for name in ("step_sizes", "cohort_sizes", "num_steps", "bits", "noise_multipliers"):
        validate.sequence(name, options[name])
    validate.integer("num_clients", options["num_clients"], 2)
    validate.integer("dimension", options["dimension"], 1, 20)
    validate.in_range("heterogeneity", options["heterogeneity"], 0, 100)
    for value in options["step_sizes"]:
        validate.in_range("step_sizes", value, 0, 1, open_low=True, hint="Curvatures go up to 1.5.")
    for value in options["cohort_sizes"]:
        validate.integer("cohort_sizes", value, 1, options["num_clients"])
    for value in options["num_steps"]:
        validate.integer("num_steps", value)
    for value in options["bits"]:
        validate.integer("bits", value, 2, 16)
    for value in options["noise_multipliers"]:
        validate.in_range("noise_multipliers", value, 0, 10)
    validate.integer("num_runs", options["num_runs"], max(100, least_runs(options["dimension"])), hint=FEW)
    for name, fewest in (("logistic_clients", 4), ("model_clients", 20)):
        validate.integer(name, options[name], fewest if options[name] else 0, hint="Or 0, to leave it out.")
    validate.integer("seed", options["seed"], 0)
