"""Checks the arguments of a run, and what its evaluation returns."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from fedjax_sim import validate
from fedjax_sim.engine.jaxpr import Program
from fedjax_sim.metrics.evaluation import Evaluation
from fedjax_sim.population.protocol import check_population
from fedjax_sim.running.fingerprint import is_private
from fedjax_sim.running.log import plain
from fedjax_sim.running.processes import current
from fedjax_sim.running.stopping import NONE_BESIDE_NOISE, StopWhen
from fedjax_sim.types import Algorithm, PyTree, Star
from fedjax_sim.validate import NonNegativeInt, PositiveInt


def check_kinds(key: Any, algorithm: Any, population: Any, evaluation: Any, callbacks: Any) -> None:
    """Raises TypeError for arguments of `run` of a wrong type.

    Args:
      key, algorithm, population, evaluation, callbacks: as the caller of `run` gave them, of any type.
    """
    # An old-style key is an array of integers with one axis; a new-style key is a scalar of a key type.
    if not isinstance(key, jax.Array) or key.ndim != (not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        validate.fail("key", "one random key", key, "Make one: jax.random.key(0).", TypeError)
    if not isinstance(algorithm, Algorithm):
        validate.fail("algorithm", "an Algorithm", type(algorithm).__name__, "Call a recipe or federated().", TypeError)
    if algorithm.parts is not None and not isinstance(algorithm.parts, Star):
        hint = "`federated(...).parts` is one. Without parts leave it None; no epsilon is then stated."
        validate.fail("algorithm.parts", "a Star or None", type(algorithm.parts).__name__, hint, TypeError)
    check_population(population)
    if evaluation is not None:
        arguments = "params, state" if callable(evaluation) and num_arguments(evaluation) == 2 else "params"
        validate.function("evaluation", evaluation, arguments, hint="See metrics.evaluation.")
    if not isinstance(callbacks, Sequence):
        validate.fail("callbacks", "a list of functions", callbacks, error=TypeError)
    for i, callback in enumerate(callbacks):
        validate.function(f"callbacks[{i}]", callback, "round, state, record")


def check_initial_model(params: PyTree) -> None:
    """Raises ValueError for an initial model with NaN or inf: no client would send a finite update.

    Args:
      params: leaves of any dtype; only floats are looked at.

    Guarantees: `run` and `sweep` name the leaf
      (tests/running/test_loop.py::test_an_initial_model_that_is_not_finite_is_refused).
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            continue
        values = np.asarray(leaf)
        if not np.isfinite(values).all():
            finding = f"{(~np.isfinite(values)).sum()} of {values.size} that are not"
            name = f"params{jax.tree_util.keystr(path)}"
            validate.fail(name, "finite numbers", finding, "Look at how the model is initialised.")


def check_stopping(algorithm: Algorithm, callbacks: Sequence[Callable]) -> None:
    """Raises ValueError for a `StopWhen` among the callbacks of a run with noise.

    Guarantees: `run` refuses it (tests/running/test_stopping.py::test_no_rule_beside_noise_in_python).
    """
    if is_private(algorithm) and any(isinstance(callback, StopWhen) for callback in callbacks):
        validate.fail("callbacks", "no StopWhen in a run with noise", "one", NONE_BESIDE_NOISE)


def check_directory(directory: Any) -> None:
    """Raises TypeError for a run's folder that is no path."""
    if not isinstance(directory, (str, os.PathLike)):
        validate.fail("directory", "the path of a folder", directory, error=TypeError)


@validate.named_arguments
def check_run_numbers(
    *,
    num_rounds: NonNegativeInt,
    evaluate_every: PositiveInt,
    checkpoint_every: PositiveInt | None,
    keep_checkpoints: PositiveInt,
    directory: str | Path | None,
    resume: bool,
) -> None:
    """Raises ValueError or TypeError for numbers of `run` out of their range, and for no folder where one is needed."""
    if resume and directory is None:
        validate.fail("directory", "the run directory to resume", None)
    if directory is not None:
        check_directory(directory)


def evaluation_program(evaluation: Callable | None, algorithm: Algorithm, state: PyTree) -> Program | None:
    """Returns what an evaluation that `metrics.evaluation` built computes, traced; None of others, which is not known.

    Args:
      evaluation, algorithm: as for `run`.
      state: the algorithm's state, whose shapes count.
    """
    if not isinstance(evaluation, Evaluation) or evaluation.program is None:
        return None
    return evaluation.program(jax.eval_shape(algorithm.params, state), state)


def compile_evaluation(evaluation: Callable | None, algorithm: Algorithm, state: PyTree) -> None:
    """Compiles an evaluation of params that `metrics.evaluation` built, so that its first call need not.

    Args:
      evaluation, algorithm: as for `run`.
      state: the algorithm's state, whose shapes count.
    """
    if not isinstance(evaluation, Evaluation) or evaluation.lower is None:
        return
    here = SingleDeviceSharding(jax.local_devices()[0])

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here, weak_type=x.weak_type)

    params = jax.tree.map(placed, jax.eval_shape(algorithm.params, state))
    evaluation.lower(params).compile()


def num_arguments(evaluation: Callable) -> int:
    """Returns the number of an evaluation's arguments: 1 for `params`, 2 for `params, state`."""
    if isinstance(evaluation, Evaluation):
        evaluation = evaluation.with_clients
    try:
        parameters = inspect.signature(evaluation).parameters.values()
    except (TypeError, ValueError):
        # Some built-in functions have no signature.
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    num_required = sum(
        parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters
    )
    return 2 if num_required == 2 else 1


def evaluated(
    evaluation: Callable | None, algorithm: Algorithm, state: PyTree, record: Mapping
) -> tuple[dict, dict[str, dict[str, np.ma.MaskedArray]]]:
    """Evaluates a state; refuses names that the round's record already has.

    Args:
      evaluation: a function of params, or of (params, state); None for no values.
      algorithm: gives the params of a state.
      state: the algorithm's state after the round.
      record: the round's record so far.

    Returns: the values as JSON, and the results of each client as `metrics.evaluation` returns them; {} of any other
      function. Where a part adds noise, or parts are not stated, the results of clients that have trained and those of
      newcomers are left out: they would tell who took part, which noise is to hide.

    Guarantees: results by client do not tell who took part in a private run
    (tests/report/test_by_client.py::test_who_took_part_in_a_private_run_is_not_told).

    Raises: ValueError for a name that the record has; ValueError for an evaluation of the state in a run of several
      processes, since each process holds only a part of the clients' memories.
    """
    values: dict[str, Any] = {}
    by_client: dict[str, dict[str, np.ma.MaskedArray]] = {}
    if evaluation is not None:
        sees_state = num_arguments(evaluation) == 2
        if sees_state and current().several:
            hint = "The clients' memories are split over the processes: evaluate params alone, or use one process."
            validate.fail("evaluation", "one of params, with several processes", "one of (params, state)", hint)
        params = algorithm.params(state)
        # Beside the state, params stay on the devices that hold it, because the evaluation computes with both.
        arguments = (params, state) if sees_state else (_local(params),)
        if isinstance(evaluation, Evaluation):
            values, by_client = evaluation.with_clients(*arguments)
        else:
            values = evaluation(*arguments)
    for name in values:
        if name in record or name == "epsilon":
            validate.fail("evaluation", "names that the round does not use", name, "Put a prefix before it.")
    may_be_private = algorithm.parts is None or is_private(algorithm)
    if "newcomer" in by_client and may_be_private:
        telling = ("personal", "newcomer", "owner")  # a newcomer's result as an owner is that of the first model
        by_client = {group: results for group, results in by_client.items() if group not in telling}
    return {name: plain(value) for name, value in values.items()}, by_client


def _local(tree: PyTree) -> PyTree:
    """Returns one device's copy of replicated arrays, so that an evaluation needs no collective.

    The copy is committed to its device: JAX compiles anew for arrays that are not, and `compile_evaluation` cannot know
    whether a round leaves them so.
    """

    def copy(x):
        here = x.addressable_data(0)
        return jax.device_put(here, here.sharding)

    return jax.tree.map(copy, tree)
