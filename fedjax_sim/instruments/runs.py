"""Runs many short runs from the same model: independent samples of what rounds do, to compare with theory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_sim import engine, tree, validate
from fedjax_sim.prng import init_key
from fedjax_sim.running import kept_results
from fedjax_sim.types import Algorithm, Array, PyTree


def squared_distance(target: PyTree, name: str = "squared_error") -> Callable:
    """Makes an evaluation, params -> {name: |params - target|^2}, in float32."""

    def evaluation(params):
        squares = (jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree.subtract(params, target)))
        return {name: sum(squares)}

    return evaluation


def independent_runs(
    key: Array,
    algorithm: Algorithm,
    params: PyTree,
    population: PyTree,
    num_runs: int,
    *,
    evaluation: Callable,
    rounds: int | Sequence[int] = 1,
    batch: int = 1,
) -> dict[str, np.ndarray]:
    """Runs R runs from the same model as one compiled program; run r has the key fold_in(key, r).

    The runs differ by their key alone, so their results are independent samples.

    Args:
      key: the key of all runs.
      algorithm: made with `mesh=None`, because the runs, and not the cohort, are divided among the devices.
      params: the initial model of every run.
      population: the clients, as the algorithm takes them.
      num_runs: R.
      evaluation: params -> dict of numbers, traced.
      rounds: the rounds after which the evaluation is called, rising; a single number for the last round alone.
      batch: runs under one vmap on each device. More is faster for small models, and takes as much more memory.

    Returns: [R] (or [R, rounds]) float64 of each number of the evaluation, and of the rounds' info.

    Raises: FloatingPointError if a client's update was not finite. (A round without messages is a step of zero.)

    Guarantees: each run is a run of `run` (tests/instruments/test_runs.py::test_runs_are_those_of_run). Batch and
    devices change rounding only (tests/instruments/test_runs.py::test_batches_and_devices).
    """
    is_single_look = np.ndim(rounds) == 0
    looks = np.atleast_1d(np.asarray(rounds, object)).tolist()
    for name, values in (("num_runs", [num_runs]), ("batch", [batch]), ("rounds", looks)):
        for value in values:
            validate.integer(name, value)
    if looks != sorted(set(looks)) or not looks:
        validate.fail("rounds", "rising numbers", looks)
    mesh = engine.device_mesh()
    devices = mesh.size if mesh is not None else 1
    # The number of runs is rounded up to whole batches on all devices; the results of further runs are left out.
    batch = min(batch, -(-num_runs // devices))
    count = -(-num_runs // (devices * batch)) * devices * batch
    segments = jnp.array(list(zip([0, *looks[:-1]], looks, strict=True)), jnp.int32)

    def one_run(key, state, population, number):
        key = jax.random.fold_in(key, number)
        # The step occurs twice: under `jit` it is traced once.
        step = jax.jit(algorithm.step, inline=True)
        info = jax.eval_shape(step, key, state, population)[1]
        no_info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info)

        def segment(carry, bounds):
            """Runs the rounds from one look to the next, then evaluates."""

            def advance(t, carry):
                state, num_dropped, _ = carry
                state, info = step(jax.random.fold_in(key, t), state, population)
                return state, num_dropped + info.get("dropped_clients", 0), info

            start = (*carry, tree.varying(no_info, number))
            first, last = bounds
            state, num_dropped, info = jax.lax.fori_loop(first, last, advance, start)
            numbers = {name: x for name, x in info.items() if isinstance(x, jax.Array) and x.ndim == 0}
            return (state, num_dropped), numbers | evaluation(algorithm.params(state))

        (_, num_dropped), results = jax.lax.scan(segment, tree.varying((state, jnp.int32(0)), number), segments)
        return results, num_dropped

    def some_runs(key, state, population, numbers):
        run = partial(one_run, key, state, population)
        return jax.lax.map(run, numbers) if batch == 1 else jax.lax.map(run, numbers, batch_size=batch)

    state = algorithm.init(init_key(key), params, population)
    if mesh is not None:
        replicated = PartitionSpec()
        split = PartitionSpec(mesh.axis_names[0])
        specs = {"in_specs": (replicated, replicated, replicated, split), "out_specs": split, "check_vma": False}
        some_runs = jax.shard_map(some_runs, mesh=mesh, **specs)
    numbers = jnp.arange(count, dtype=jnp.int32)
    results, num_dropped = jax.device_get(kept_results.call(jax.jit(some_runs), key, state, population, numbers))
    num_dropped = int(num_dropped[:num_runs].sum())
    if num_dropped:
        raise FloatingPointError(f"{num_dropped} updates were not finite: lower the learning rate.")
    values = {name: x[:num_runs].astype(np.float64) for name, x in results.items()}
    return {name: x[:, 0] for name, x in values.items()} if is_single_look else values
