"""This study measures models of clients' own on their owners' unseen rows, beside a fine-tuned shared model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np

from fedjax_sim import metrics, models, population, validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.study.findings import Comparison, Findings, few, measured, rows_of
from fedjax_sim.study.kept_sweep import kept_sweep
from fedjax_sim.study.personal_models.claims import personal_models_claims
from fedjax_sim.study.personal_models.figure import personal_models_figure
from fedjax_sim.study.personal_models.methods import BASELINE, METHODS, Problem
from fedjax_sim.types import Algorithm, FolderPath
from fedjax_sim.validate import Integer, NonNegativeInt, Positive, PositiveInt

QUESTION = "Which models of clients' own serve their owners better than a shared one that each client fine-tunes?"
LOCAL_TEST = 0.25  # share of a client's rows that judge its model
TUNING_RUNS = 2  # further runs, which choose a method's learning rate


@validate.named_arguments
def personal_models(
    *,
    methods: Sequence[str] | None = None,
    heart_disease: FolderPath | None = None,
    num_clients: Annotated[int, Integer(2, 200)] = 20,
    alpha: Positive = 0.1,
    hidden: PositiveInt = 32,
    learning_rates: Sequence[float] = (0.03, 0.1, 0.3),
    num_rounds: PositiveInt = 50,
    num_steps: PositiveInt = 10,
    personal_steps: PositiveInt = 20,
    num_runs: Annotated[int, Integer(2)] = 10,
    seed: NonNegativeInt = 0,
) -> Findings:
    """Which own models serve their owners best? Measures accuracy on owners' unseen rows, and the worst tenth of them.

    Clients hold digits with skewed labels, no row twice, or are the four hospitals of the Heart Disease data. All take
    part in every round and train an MLP. Each keeps a quarter of its rows for the judgement. A method's learning rate
    is chosen by two runs that are not reported. They are judged on the same rows, so all accuracies are a little too
    high.

    Args:
      methods: names; None takes all of `study.personal_models.methods.METHODS`. The baseline always runs.
      heart_disease: a folder as of `population.heart_disease`; None leaves the hospitals out.
      num_clients: N, of the digits.
      alpha: the parameter of their Dirichlet label shares; small values give unlike clients.
      hidden: units of the MLP's hidden layer.
      learning_rates: of local steps, to choose from.
      num_rounds: T.
      num_steps: local steps in a round, with minibatches of 10.
      personal_steps: steps that a fine-tuned model takes before it is judged.
      num_runs: runs on the same clients. Each has its own first model and minibatches, the same for all methods.
      seed: decides everything.

    Raises: FloatingPointError if a method diverged with every learning rate.

    Returns: `Findings`: for each method the accuracy over all owners' rows, the mean over the tenth of the clients with
    the lowest accuracy, and the accuracy's paired difference from FedAvg that is fine-tuned.

    Guarantees: a number is that of a run by itself, up to rounding
    (tests/study/test_personal_models.py::test_a_number_is_a_run).

    References: Cheng, Chadha and Duchi 2021, and Matsuda et al. 2022, on fine-tuning as the baseline; PFLlib (Zhang et
    al. 2025) for the setting of the digits, 20 clients at alpha 0.1.
    """
    methods = tuple(METHODS) if methods is None else tuple(methods)
    _check(methods, learning_rates)
    names = [name for name in METHODS if name in methods or name == BASELINE]
    work = {"num_steps": num_steps, "batch_size": 10}
    data_by_part = {
        "digits": population.digits_partition(
            num_clients=num_clients, alpha=alpha, test_fraction=0.05, held_out_clients=0, seed=seed
        )
    }
    if heart_disease is not None:
        data_by_part["heart disease"] = population.heart_disease(directory=heart_disease, seed=seed)
    comparisons = []
    for part, data in data_by_part.items():
        data = population.with_local_test(data, fraction=LOCAL_TEST, seed=seed)
        accuracies = _accuracies(
            data, names, learning_rates, hidden=hidden, num_rounds=num_rounds, num_runs=num_runs, work=work,
            personal_steps=personal_steps, seed=seed,
        )  # fmt: skip
        comparisons += _comparisons(part, accuracies)
    options = {
        "methods": names, "heart_disease": heart_disease is not None, "num_clients": num_clients, "alpha": alpha,
        "hidden": hidden, "learning_rates": list(learning_rates), "num_rounds": num_rounds, "num_steps": num_steps,
        "personal_steps": personal_steps, "num_runs": num_runs, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="personal_models",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(personal_models_claims(rows, options)),
        figure=partial(personal_models_figure, rows, options),
        options=options,
    )


def _check(methods: Sequence[str], learning_rates: Sequence[float]) -> None:
    """Raises an error that names the first option that is out of range."""
    validate.sequence("methods", methods)
    for name in methods:
        validate.one_of("methods", name, METHODS)
    validate.sequence("learning_rates", learning_rates)
    for rate in learning_rates:
        validate.in_range("learning_rates", rate, 0, 10, open_low=True)
    if list(learning_rates) != sorted(set(learning_rates)):
        validate.fail("learning_rates", "rising numbers", list(learning_rates))


def _accuracies(
    data: FederatedData,
    names: Sequence[str],
    rates: Sequence[float],
    *,
    hidden: int,
    num_rounds: int,
    num_runs: int,
    work: dict[str, Any],
    personal_steps: int,
    seed: int,
) -> dict[str, tuple[float, np.ndarray]]:
    """Trains each method with each learning rate, and returns the accuracies with the best rate.

    Args:
      data: N clients, with rows that they keep from training as `local_test`.
      names: keys of `METHODS`.
      rates: learning rates of local steps, rising.
      hidden: units of the MLP's hidden layer.
      num_rounds: T.
      num_runs: R runs that are reported. `TUNING_RUNS` further runs choose the rate.
      work: `num_steps` and `batch_size` of local work.
      personal_steps: local steps that a fine-tuned model takes before it is judged.
      seed: run r has the seed seed + r.

    Returns: by method, (the rate, accuracies [R, 2] in [0, 1]: over all owners' unseen rows, and the mean over the
      tenth of the clients with the lowest accuracy).

    Raises: FloatingPointError if a method diverged with every rate.
    """
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(hidden,))

    def make(method: str, rate: float) -> Algorithm:
        return METHODS[method](Problem(model, data, rate, work, personal_steps))

    def evaluation_of(algorithm: Algorithm) -> Callable:
        evaluated = algorithm.evaluated
        return metrics.evaluation(
            models.supervised(evaluated.model or model, models.default_loss(data.task)),
            local_test=data.local_test, owners=data.train, personal=evaluated.personal,
            has_trained=evaluated.has_trained, adapt=evaluated.adapt,
        )  # fmt: skip

    seeds = [seed + run for run in range(num_runs + TUNING_RUNS)]
    # Runs of one point are vmapped: a model this small leaves a processor idle otherwise.
    rows = kept_sweep(
        make, lambda key: model.init(key)[0], data.train, num_rounds, evaluation_of=evaluation_of, seeds=seeds,
        grid={"method": names, "rate": rates}, batch=len(seeds),
    ).rows  # fmt: skip
    by_method = {}
    for name in names:
        # [runs, 2] for each rate.
        by_rate = {
            rate: np.array([_judged(row) for row in rows if (row["method"], row["rate"]) == (name, rate)])
            for rate in rates
        }
        # One run that diverges rules a rate out, whichever run it is.
        best = _best_rate({rate: judged[num_runs:, 0].mean() + 0 * judged.sum() for rate, judged in by_rate.items()})
        if not np.isfinite(by_rate[best]).all():
            raise FloatingPointError(f"{name} diverged with every learning rate: give lower ones.")
        by_method[name] = best, by_rate[best][:num_runs]
    return by_method


def _best_rate(accuracies: Mapping[float, float]) -> float:
    """Returns the rate with the highest accuracy; one with which a run diverged comes last.

    >>> _best_rate({0.1: 0.8, 0.3: 0.9, 1.0: float("nan")})
    0.3
    """
    return max(accuracies, key=lambda rate: accuracies[rate] if np.isfinite(accuracies[rate]) else -1.0)


def _judged(row: dict[str, Any]) -> tuple[float, float]:
    """Returns the accuracy of the models that clients use, own or shared, and that of the lowest tenth.

    Both are NaN for a run in which an update was not finite.
    """
    if row.get("dropped_clients_so_far"):  # an accuracy hides that clients diverged
        return math.nan, math.nan
    return float(row["owner_accuracy"]), float(row["owner_accuracy_lowest_decile"])


def _comparisons(part: str, accuracies: dict[str, tuple[float, np.ndarray]]) -> Iterator[Comparison]:
    """Yields both accuracies of each method, and its paired difference from the baseline."""
    _, baseline = accuracies[BASELINE]
    for name, (rate, accuracy) in accuracies.items():
        conditions = {"part": part, "method": name, "rate": rate}
        yield few(conditions, "accuracy", accuracy[:, 0])
        yield few(conditions, "lowest tenth", accuracy[:, 1])
        if name != BASELINE:
            yield measured(conditions, "gain", accuracy[:, 0] - baseline[:, 0])
