"""Says in a run's summary what its log does not: what was found, what guessing would give, how clients count."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedjax_sim.config.build import Experiment
from fedjax_sim.metrics.baseline import constant_baseline
from fedjax_sim.population.datasets.column_uses import columns_in_words
from fedjax_sim.running.history import History
from fedjax_sim.running.log import plain
from fedjax_sim.types import Algorithm, PyTree

MOST_NUMBERS = 64  # of an array that a statistic's summary lists


def results_of(experiment: Experiment, history: History, estimate: dict[str, Any]) -> dict[str, Any]:
    """Returns what a run's summary holds beside its rounds.

    `History` is about the rounds alone: a run's summary also compares with a constant prediction, and says what the
    data set says of itself.

    Args:
      experiment: the experiment that was trained.
      history: what the run returned beside its state.
      estimate: as `estimate_of` returns it.
    """
    data, algorithm = experiment.data, experiment.algorithm
    results = {**estimate, "params_kind": algorithm.params_kind.name.lower()}
    # The loss of a statistic is no loss of the task, and params that are no model have no test loss.
    if algorithm.evaluated.loss_fn is None and algorithm.params_kind.is_judged:
        results |= constant_baseline(data.test, data.task, data.special_tokens)
    results |= how_clients_count(algorithm.parts)
    if not history.summary["finished"] and (rule := experiment.config.tables["run"]["stop_when"]) is not None:
        results["stopped_when"] = rule
    notes = list(data.notes)
    # What these algorithms are for would not be judged.
    if algorithm.is_judged_by_owners and data.local_test is None:
        notes.append("no client keeps rows apart to judge its own model by: [data.with_local_test]")
    if notes:
        results["data_notes"] = notes
    if data.table_columns:
        results["data_columns"] = columns_in_words(data.table_columns)
    if data.warnings:
        results["data_warnings"] = list(data.warnings)
    return results


def estimate_of(algorithm: Algorithm, state: PyTree) -> dict[str, Any]:
    """Returns {"estimate": what a statistic found, as lists by name}; {} for an algorithm that trains a model.

    Instead of an array of more than `MOST_NUMBERS` numbers there is a text that says where it is.

    Args:
      algorithm: the run's algorithm.
      state: its state after the last round.
    """
    if algorithm.evaluated.answer is None:
        return {}
    params = jax.device_get(algorithm.params(state))
    arrays = algorithm.evaluated.answer(params)

    def shown(name, x):
        if np.size(x) <= MOST_NUMBERS:
            return plain(x)
        return f"{np.size(x):,} numbers" + (", by fedjax-sim export" if name in params else "")

    return {"estimate": {name: shown(name, x) for name, x in arrays.items()}}


def how_clients_count(star: Any) -> dict[str, str]:
    """Returns {"clients_count": how an aggregate weighs clients, in words}; {} for an algorithm without parts.

    For a hierarchy the words go level by level from the top.

    Args:
      star: the algorithm's parts; None if it states none.
    """
    if star is None:
        return {}
    words = _how_messages_count(star)
    while star.client.federation is not None:
        words += f"; inside of each {star.client.facts.level}: {_how_messages_count(star.client.federation)}"
        star = star.client.federation
    return {"clients_count": words}


def _how_messages_count(star: Any) -> str:
    """Returns, in words, how an aggregate of this level's messages weighs them."""
    if star.aggregator is None:
        # SplitGNN has none: its parties take one step on one graph.
        return "as parts of one step that they take together"
    rule = star.aggregator.facts
    is_sum = rule.sensitivity is not None or rule.modulus is not None
    if not rule.weighted and not is_sum:
        # Such a rule may choose messages, or weigh them by itself.
        return "not by their examples"
    if star.client.facts.uniform_weights or not rule.weighted:
        return "alike"
    by_weights = "by the weights that they report, such as their examples"
    return f"{by_weights}, but for some parts of an update" if rule.partly_weighted else by_weights
