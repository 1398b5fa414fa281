"""This study compares FedProx with FedAvg where some clients finish only part of their local work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fedjax_sim import validate
from fedjax_sim.study.findings import Findings, rows_of
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, quadratic_clients
from fedjax_sim.study.stragglers.claims import stragglers_claims
from fedjax_sim.study.stragglers.figure import stragglers_figure
from fedjax_sim.study.stragglers.proximal_map import ProximalMap, map_rows
from fedjax_sim.study.stragglers.training import paths_of, training_rows
from fedjax_sim.validate import Integer, NonNegativeInt, Positive, PositiveInt

QUESTION = "What does FedProx gain where some clients finish only part of their local work?"
MAP_CLIENTS = (10, 4, 2.0)  # number, dimension and heterogeneity of the quadratic clients
LARGEST_GROWTH = 1e15  # of a round in float32, whose squares must stay below 1e38


@validate.named_arguments
def stragglers(
    *,
    heterogeneities: Sequence[float] = (0.0, 0.5, 1.0),
    shares: Sequence[float] = (0.0, 0.5, 0.9),
    coefficients: Sequence[float] = (0.001, 0.01, 0.1, 1.0),
    num_clients: Annotated[int, Integer(2)] = 30,
    cohort_size: PositiveInt = 10,
    num_epochs: PositiveInt = 20,
    batch_size: PositiveInt = 10,
    learning_rate: Positive = 0.01,
    max_examples: Annotated[int, Integer(2)] | None = None,
    num_rounds: Annotated[int, Integer(2)] = 50,
    num_runs: Annotated[int, Integer(2)] = 10,
    proximal_weights: Sequence[float] = (0.0, 0.3, 1.0, 3.0, 10.0),
    step_sizes: Sequence[float] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    map_steps: Annotated[int, Integer(1, 100)] = 10,
    map_rounds: PositiveInt = 30,
    seed: NonNegativeInt = 0,
) -> Findings:
    """What does FedProx gain with stragglers? Measures loss, its variance over rounds, and accuracy, beside FedAvg.

    First, softmax regressions on Synthetic(alpha, beta), in the setting of the FedProx paper. In each round a share of
    the cohort are stragglers, who complete 1 to E epochs, equally likely. FedAvg drops them. FedProx keeps what they
    have done, without (mu = 0) and with its proximal term. Numbers of a run are over the second half of its rounds.
    mu is chosen for each data set by the training loss of a further run, which is not reported.

    Then a map of FedProx over proximal weight and local step, on quadratic clients who all take part: the distance to
    the optimum after some rounds has a closed form.

    Args:
      heterogeneities: alpha = beta of the data sets, rising. Each is drawn once, with the same sizes of clients.
      shares: probabilities in [0, 1) of a client to be a straggler in a round, rising.
      coefficients: mu of FedProx, to choose from.
      num_clients: N of the data sets.
      cohort_size: clients in a round.
      num_epochs: E.
      batch_size: examples of a local step.
      learning_rate: of local steps.
      max_examples: the most examples of a client; None sets no bound, as the authors do.
      num_rounds: T.
      num_runs: runs on the same clients. Each has its own first model, cohorts, minibatches and stragglers, the same
        for all algorithms.
      proximal_weights: lambda of the map, rising.
      step_sizes: eta of the map, rising, at most 0.5.
      map_steps: local steps of the map's clients.
      map_rounds: rounds of the map.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: a number is that of a run by itself (tests/study/test_stragglers.py::test_a_number_is_a_run). Every gap
    of the map lies in its interval, and shrinks where theory says so (::test_the_map_holds). A gap that is 1 % off does
    not (::test_it_can_tell_a_wrong_map).

    References: Li et al. 2020 (FedProx), sections 5.2 and 5.3, figure 1, and appendix C.
    """
    options = dict(locals())
    _check(options)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    setting = ProximalMap(quadratic_clients(*MAP_CLIENTS, seed), map_steps, map_rounds)
    comparisons = [*training_rows(paths_of(options)), *map_rows(setting, proximal_weights, step_sizes)]
    rows = rows_of(comparisons)
    return Findings(
        name="stragglers",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(stragglers_claims(rows, options)),
        figure=partial(stragglers_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `stragglers`, by name.
    """
    for name in ("heterogeneities", "shares", "coefficients", "proximal_weights", "step_sizes"):
        validate.sequence(name, options[name])
        for value in options[name]:
            validate.in_range(name, value, 0, 1e4)
        if list(options[name]) != sorted(set(options[name])):
            validate.fail(name, "rising numbers", list(options[name]))
    for share in options["shares"]:
        validate.in_range("shares", share, 0, 1, open_high=True, hint="FedAvg drops stragglers.")
    validate.integer("cohort_size", options["cohort_size"], 1, options["num_clients"])
    hint = f"Curvatures go up to {LARGEST_CURVATURE:g}."
    for step in options["step_sizes"]:
        validate.in_range("step_sizes", step, 0, 1 / LARGEST_CURVATURE, open_low=True, hint=hint)
    growth = options["step_sizes"][-1] * (LARGEST_CURVATURE + options["proximal_weights"][-1]) - 1
    if growth > LARGEST_GROWTH ** (1 / options["map_steps"]):
        hint = "A round with the largest weight and step would overflow: lower a weight, a step or map_steps."
        validate.fail("proximal_weights", "weights whose rounds fit float32", options["proximal_weights"], hint)
