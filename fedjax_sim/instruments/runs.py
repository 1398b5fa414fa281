"""Many short runs from the same model: independent samples of what rounds do, to compare with theory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fedjax_sim import engine, tree, validate
from fedjax_sim.prng import init_key
from fedjax_sim.types import Algorithm, Array, Population, PyTree

__all__ = ["independent_runs", "squared_distance"]


def squared_distance(target: PyTree, name: str = "squared_error") -> Callable:
    """params -> {name: |params - target|^2}, in float32."""

    def evaluation(params):
        squares = (jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree.subtract(params, target)))
        return {name: sum(squares)}

    return evaluation


def independent_runs(
    key: Array,
    algorithm: Algorithm,
    params: PyTree,
    population: Population,
    num_runs: int,
    *,
    evaluation: Callable,
    rounds: int | Sequence[int] = 1,
    batch: int = 1,
) -> dict[str, np.ndarray]:
    """R runs from the same model that differ by their key alone, as one compiled program: run r has fold_in(key, r).

    Args:
      algorithm: made with `mesh=None`, because the runs, and not the cohort, are divided among the devices.
      num_runs: R.
      evaluation: params -> dict of numbers, traced.
      rounds: the rounds after which it is called, rising; one number for the last round alone.
      batch: runs under one vmap on each device; more is faster for small models, and takes as much more memory.

    Returns: [R] (or [R, rounds]) float64 of each number of the evaluation, and of the rounds' info.

    Raises: FloatingPointError if a client's update was not finite. (A round without messages is a step of zero.)

    Guarantees: each is a run of `run` (tests/instruments/test_runs.py::test_runs_are_those_of_run); batch and devices
    change rounding only (::test_batches_and_devices).
    """
    alone = np.ndim(rounds) == 0
    looks = [rounds] if alone else list(rounds)
    for name, values in (("num_runs", [num_runs]), ("batch", [batch]), ("rounds", looks)):
        for value in values:
            validate.integer(name, value)
    if looks != sorted(set(looks)) or not looks:
        validate.fail("rounds", "rising numbers", looks)
    mesh = engine.device_mesh()
    devices = mesh.size if mesh is not None else 1
    batch = min(batch, -(-num_runs // devices))
    count = -(-num_runs // (devices * batch)) * devices * batch
    segments = jnp.array(list(zip([0, *looks[:-1]], looks, strict=True)), jnp.int32)

    def one(key, state, population, number):
        key = jax.random.fold_in(key, number)
        step = jax.jit(algorithm.step, inline=True)  # traced once
        info = jax.eval_shape(step, key, state, population)[1]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info)

        def segment(carry, bounds):
            def advance(t, carry):
                state, lost, _ = carry
                state, info = step(jax.random.fold_in(key, t), state, population)
                return state, lost + info.get("dropped_clients", 0), info

            state, lost, info = jax.lax.fori_loop(*bounds, advance, (*carry, tree.varying(nothing, number)))
            numbers = {name: x for name, x in info.items() if isinstance(x, jax.Array) and x.ndim == 0}
            return (state, lost), numbers | evaluation(algorithm.params(state))

        (_, lost), seen = jax.lax.scan(segment, tree.varying((state, jnp.int32(0)), number), segments)
        return seen, lost

    def some(key, state, population, numbers):
        runs = partial(one, key, state, population)
        return jax.lax.map(runs, numbers) if batch == 1 else jax.lax.map(runs, numbers, batch_size=batch)

    state = algorithm.init(init_key(key), params, population)
    if mesh is not None:
        here = PartitionSpec()
        split = PartitionSpec(mesh.axis_names[0])
        specs = {"in_specs": (here, here, here, split), "out_specs": split, "check_vma": False}
        some = jax.shard_map(some, mesh=mesh, **specs)
    seen, lost = jax.device_get(jax.jit(some)(key, state, population, jnp.arange(count, dtype=jnp.int32)))
    lost = int(lost[:num_runs].sum())
    if lost:
        raise FloatingPointError(f"{lost} updates were not finite: lower the learning rate.")
    values = {name: x[:num_runs].astype(np.float64) for name, x in seen.items()}
    return {name: x[:, 0] for name, x in values.items()} if alone else values
