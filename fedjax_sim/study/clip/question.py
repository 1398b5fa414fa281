"""This study measures the bias of clipping against the noise that a smaller clip norm saves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from fedjax_sim import theory, validate
from fedjax_sim.study.clip.claims import clip_claims
from fedjax_sim.study.clip.clients import UnequalClients
from fedjax_sim.study.clip.figure import PERSONAL, clip_figure, fixed_multiplier
from fedjax_sim.study.findings import FEW, Findings, least_runs, rows_of

QUESTION = "At which norm should updates be clipped?"
AROUND = (1 / 3, 1.0, 3.0)  # of the best clip norm


def clip(
    *,
    num_clients: int = 200,
    dimension: int = 10,
    spread: float = 1.0,
    cohort_size: int = 20,
    clip_norms: Sequence[float] = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    noise_multipliers: Sequence[float] = (0.3, 1.0, 3.0),
    factors: Sequence[float] = (0.02, 0.05, 0.1, 0.2, 0.5),
    step_size: float = 0.5,
    num_rounds: int = 4000,
    seed: int = 0,
) -> Findings:
    """At which norm should updates be clipped? Splits the error of the released mean into bias, sampling and noise.

    Clients hold updates u_i of unequal norms, with median 1. The updates of a uniform cohort are clipped and summed,
    and Gaussian noise is added once to the sum (`gaussian_mechanism`).

    Args:
      num_clients: N.
      dimension: d.
      spread: standard deviation of the logarithms of the norms.
      cohort_size: m.
      clip_norms: C, rising.
      noise_multipliers: z. The middle one is used for all C, and the best C is computed for each.
      factors: factors of personal thresholds C_i = factor |u_i|, for which no epsilon can be stated.
      step_size: eta of the runs to the floor.
      num_rounds: independent rounds behind each error. A sixteenth of this number, or `least_runs`, are runs to the
        floor.
      seed: decides everything.

    Returns: `Findings`: E |release - mean u_i|^2 by part, and E |w - w*|^2 at the error floor.

    Guarantees: every prediction lies in its interval and the optimum is interior
    (tests/study/test_clip.py::test_predictions_hold, ::test_interior_optimum). A total without one of its parts does
    not (::test_it_notices_what_is_left_out).

    References: `theory.clipped_mean_error`; McMahan et al. 2018 (DP-FedAvg), section 2; Andrew et al. 2021, section 1.
    """
    _check(locals())
    problem = UnequalClients(num_clients, dimension, spread, cohort_size, seed)
    key = jax.random.key(seed)
    multiplier = fixed_multiplier(noise_multipliers)
    best = {z: theory.best_clip_norm(problem.values, noise_multiplier=z, cohort_size=cohort_size)
            for z in noise_multipliers}  # fmt: skip
    # (part, C, z, factor); a factor of 1 leaves the updates as they are.
    settings = [("clip norm", C, multiplier, 1.0) for C in clip_norms]
    settings += [("around the best", share * best[z], z, 1.0) for z in best for share in AROUND]
    # After personal clipping the longest update has norm factor |u_i|, so this C clips nobody and scales the noise.
    settings += [(PERSONAL, factor * problem.longest, multiplier, factor) for factor in factors]
    comparisons = list(problem.releases(key, settings, num_rounds))
    comparisons += problem.biases(key, clip_norms)
    num_runs = max(100, least_runs(dimension), num_rounds // 16)
    comparisons += problem.floors(key, clip_norms, multiplier, step_size, num_runs)
    options = {
        "num_clients": num_clients, "dimension": dimension, "spread": spread, "cohort_size": cohort_size,
        "clip_norms": list(clip_norms), "noise_multipliers": list(noise_multipliers), "factors": list(factors),
        "step_size": step_size, "num_rounds": num_rounds, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="clip",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(clip_claims(rows, options)),
        figure=partial(clip_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `clip`, by name.
    """
    for name in ("clip_norms", "noise_multipliers", "factors"):
        validate.sequence(name, options[name])
        for value in options[name]:
            validate.in_range(name, value, 1e-3, 1 if name == "factors" else 1e3)
    validate.integer("num_clients", options["num_clients"], 2, 100_000)
    validate.integer("dimension", options["dimension"], 1, 1000)
    validate.in_range("spread", options["spread"], 0, 3)
    validate.integer("cohort_size", options["cohort_size"], 2, options["num_clients"])
    validate.in_range("step_size", options["step_size"], 0.2, 1, hint="Runs have 100 rounds to their floor.")
    validate.integer("num_rounds", options["num_rounds"], max(100, least_runs(options["dimension"])), hint=FEW)
    validate.integer("seed", options["seed"], 0)
