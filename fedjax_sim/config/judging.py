"""Makes the evaluation of an experiment: on which rows, on whose models, and what is measured beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.algorithms import fine_tuned
from fedjax_sim.config import registry
from fedjax_sim.config.factories import Maker
from fedjax_sim.config.signatures import SCORE_METRIC
from fedjax_sim.config.task_model import TaskModel
from fedjax_sim.config.value_kinds import problem
from fedjax_sim.metrics import Evaluation, ScoreMetric, evaluation
from fedjax_sim.models import default_loss, supervised
from fedjax_sim.population import FederatedData
from fedjax_sim.types import Algorithm, PyTree


def judged_algorithm(maker: Maker, algorithm: Algorithm, loss_fn: Callable, data: FederatedData) -> Algorithm:
    """Returns the algorithm, with `run.personal_steps` before each client's model is judged if the config asks.

    Args:
      maker: makes the parts of the config; its `problems` take what is refused.
      algorithm: as the config makes it.
      loss_fn: of the clients' steps.
      data: whose `local_test` holds the rows by which clients are judged.

    Raises: ConfigError where the config asks for steps that the algorithm's clients cannot take.
    """
    num_steps = maker.tables["run"]["personal_steps"]
    if num_steps is None:
        return algorithm
    hint = ""
    if algorithm.evaluated.adapt is not None:
        hint = f"{maker.parts['algorithm'].name} has its own step before a model is judged."
    elif "model" not in maker.parts:
        hint = "Its clients train no model."
    elif algorithm.evaluated.model is not None or "client_optimizer" not in maker.parts:
        hint = "Its parties train together."
    elif data.local_test is None:
        hint = "Clients need rows to be judged by: [data.with_local_test]."
    if hint:
        maker.problems.append(problem("run.personal_steps", "none here", num_steps, hint))
        maker.stop()
    options = {"num_steps": num_steps, "batch_size": maker.tables["algorithm"].get("batch_size")}
    make = partial(fine_tuned, algorithm, loss_fn, maker.make("client_optimizer"), **options)
    fine_tuned_algorithm = maker.attempt("run.personal_steps", {}, make)
    maker.stop()
    return fine_tuned_algorithm


def evaluation_of(
    maker: Maker, loss_fn: Callable, data: FederatedData, algorithm: Algorithm, task: TaskModel
) -> Evaluation:
    """Makes the evaluation: on test and held-out data, on clients' own test rows and, by option, on training data.

    The options are `run.evaluate_train`, a number of training clients, "all", or None for no training data, and
    `run.metrics`.

    Args:
      maker: of the config.
      loss_fn: (params, examples, key) -> per-example values. The loss of `algorithm.evaluated.model` replaces it.
      data: the data set. A part of it that is None is not evaluated.
      algorithm: as `judged_algorithm` returns it.
      task: the model of the config.

    Returns: as `metrics.evaluation`. If the result is clients' own models and no client keeps rows to judge its model
    by, the record has `personal_clients` 0.

    Guarantees: a model whose parties query each other over links is evaluated with these links
    (tests/config/test_split_runs.py::test_evaluations_go_through_the_links). Own models that nobody judges are counted
    as 0 (tests/config/test_params_kind.py::test_what_is_no_model_has_no_test_metrics).
    """
    evaluated = algorithm.evaluated
    metrics = score_metrics(maker, data, task)
    if evaluated.model is not None:
        task = TaskModel(evaluated.model, loss_fn)
    if evaluated.model is not None or metrics:
        assert task.model is not None, "`score_metrics` stops where there is no model"
        loss = default_loss(data.task, special_tokens=data.special_tokens)
        frozen_state = task.frozen if jax.tree.leaves(task.frozen) else None
        options = {"measure": data.measure, "frozen_state": frozen_state, "keeps_scores": bool(metrics)}
        loss_fn = supervised(task.model, loss, **options)
    num_train_clients = maker.tables["run"]["evaluate_train"]
    train_options: dict[str, Any] = {}
    if num_train_clients is not None:
        is_sample = num_train_clients != "all" and num_train_clients < data.train.size
        train_options = {
            "train": data.train,
            "train_clients": num_train_clients if is_sample else None,
            "seed": maker.tables["seed"],
        }
    local_options: dict[str, Any] = {}
    if data.local_test is not None:
        local_options = {
            "local_test": data.local_test,
            "personal": evaluated.personal,
            "has_trained": evaluated.has_trained,
            "adapt": evaluated.adapt,
            "owners": None if evaluated.adapt is None else data.train,
        }
    judge = evaluation(
        loss_fn,
        test=data.test,
        held_out=data.held_out,
        triggered=data.triggered,
        perplexity=data.task == "next_token",
        params_kind=algorithm.params_kind,
        metrics=metrics,
        **local_options,
        **train_options,
    )
    if data.local_test is None and algorithm.is_judged_by_owners:
        # Sweeps and pages tell by `personal_clients` that there are own models, and by 0 that nobody judged them.
        return _with_numbers(judge, lambda params: {"personal_clients": 0})
    return judge


def score_metrics(maker: Maker, data: FederatedData, task: TaskModel) -> list[ScoreMetric]:
    """Makes the metrics of `run.metrics`; [] without any.

    Args:
      maker: of the config; its `problems` take what is refused.
      data: the data set, whose task decides which metrics are defined.
      task: the model of the config.

    Raises: ConfigError for metrics that are not defined on the outputs of the task's models, and where no model is
    trained.

    Guarantees: each is refused by name, with those that the task has
    (tests/config/test_metrics.py::test_metrics_that_the_task_has_not).
    """
    names = maker.tables["run"]["metrics"] or []
    found = [maker.named(SCORE_METRIC, name, "run.metrics") for name in names]
    for name, metric in zip(names, found, strict=True):
        if metric is None:
            continue
        if task.model is None or data.task not in metric.tasks:
            known = {} if task.model is None else registry.named(SCORE_METRIC)
            fitting = [other for other in known if data.task in maker.named(SCORE_METRIC, other, "run.metrics").tasks]
            rule = f"metrics of the task {data.task!r}: {', '.join(fitting)}" if fitting else "none here"
            hint = "" if fitting else "No metric is defined on what its clients train."
            maker.problems.append(problem("run.metrics", rule, name, hint))
        elif data.task != "regression":
            # What depends on the number of classes is refused before rows are computed.
            outputs = jax.ShapeDtypeStruct((1, data.num_outputs), jnp.float32)
            targets = jax.ShapeDtypeStruct((1,), jnp.int32)
            maker.attempt("run.metrics", {}, partial(jax.eval_shape, metric.compute, outputs, targets))
    maker.stop()
    return found


def with_variance_budget(
    maker: Maker, judge: Evaluation, algorithm: Algorithm, params: PyTree, population: Any
) -> Evaluation:
    """Returns an evaluation with the variance budget added if the config has a `run.variance_probe`.

    Args:
      maker: of the config.
      judge: the evaluation.
      algorithm, params, population: of the experiment; some of its clients train twice.
    """
    count = maker.tables["run"]["variance_probe"]
    if count is None:
        return judge
    # Imported here, since few configs ask for a variance budget.
    from fedjax_sim.instruments.variance_budget import variance_budget

    options = {"num_clients": min(count, population.size), "seed": maker.tables["seed"]}
    measure_budget = partial(variance_budget, algorithm, params, population, **options)
    budget = maker.attempt("run.variance_probe", {}, measure_budget)
    return _with_numbers(judge, lambda params: budget(params))


def _with_numbers(judge: Evaluation, numbers_of: Callable[[PyTree], dict[str, Any]]) -> Evaluation:
    """Returns an evaluation whose record has more numbers, as `numbers_of` returns them for params."""

    def with_clients(params: PyTree) -> tuple[dict, dict]:
        record, by_client = judge.with_clients(params)
        return record | numbers_of(params), by_client

    return replace(judge, with_clients=with_clients)
