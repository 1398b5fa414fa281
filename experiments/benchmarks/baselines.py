"""What a careful user would write by hand, and what the machine can do at most.

The hand-written loops get the library's loss and layers (their fastest form on this backend), float sums, client data
as dense arrays [N, rows, ...], cohorts drawn beforehand, and nothing else to do: no masks, no exact sums, no checks, no
metrics but the loss, no log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from experiments.benchmarks.workloads import Workload


def mesh_of(devices: int) -> Any:
    """A mesh over the first devices."""
    return jax.make_mesh((devices,), ("d",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))


def dense_clients(work: Workload) -> tuple[jax.Array, jax.Array]:
    """x and y as [N, rows, ...]: a hand-written loop knows that its clients are equal."""
    return tuple(a.reshape(work.data.size, -1, *a.shape[1:]) for a in work.arrays)


def cohorts(work: Workload, num_rounds: int, seed: int = 0) -> jax.Array:
    """[R, m] int32 distinct clients a round, drawn on the host before the clock starts."""
    rng = np.random.default_rng(seed)
    draws = [rng.choice(work.data.size, work.cohort_size, replace=False) for _ in range(num_rounds)]
    return jnp.asarray(np.stack(draws), jnp.int32)


def hashed(a: jax.Array, b: jax.Array) -> jax.Array:
    """32 bits from two numbers (murmur's finaliser): a threefry key for each client would cost more than its order."""
    x = a.astype(jnp.uint32) + b.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def client_seed(key: jax.Array, id: jax.Array) -> jax.Array:
    """A client's seed in a round, from the round's key."""
    words = jax.random.key_data(key)
    return hashed(words[0] ^ words[1], id)


def shuffled(seed: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
    """The rows at `positions` of a random order of the `valid` ones: ranks by comparing all pairs.

    For a few dozen rows this is several times faster on a CPU than `jax.random.permutation`, which sorts.
    """
    row = jnp.arange(valid.shape[0])
    bits = jnp.where(valid, hashed(seed, row) >> 1, jnp.uint32(1) << 31)
    before = (bits[None, :] < bits[:, None]) | ((bits[None, :] == bits[:, None]) & (row[None, :] < row[:, None]))
    return jnp.where(before.sum(1)[None, :] == positions[:, None], row[None, :], 0).sum(1)


def _mean_loss(work: Workload, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return work.loss_fn(params, {"x": x, "y": y}, None)["loss"].mean()


def _client(work: Workload, params: Any, x: jax.Array, y: jax.Array, seed: jax.Array) -> tuple[Any, jax.Array]:
    """One client's local SGD in a random order of its rows: (params' change, mean loss)."""
    rows = x.shape[0]
    order = shuffled(seed, jnp.arange(rows), jnp.ones(rows, bool))
    local, total = params, 0.0
    for step in range(work.num_steps):
        chosen = order[step * work.batch_size : (step + 1) * work.batch_size]
        loss, gradient = jax.value_and_grad(lambda p, c=chosen: _mean_loss(work, p, x[c], y[c]))(local)
        local = jax.tree.map(lambda p, g: p - work.learning_rate * g, local, gradient)
        total += loss
    return jax.tree.map(jnp.subtract, local, params), total / work.num_steps


def equal_client(work: Workload) -> Callable:
    """(params, (x, y), key, id) -> (change, loss, weight 1) of one client, for `hand_written`."""

    def client(params, data, key, id):
        return *_client(work, params, data[0][id], data[1][id], client_seed(key, id)), jnp.float32(1)

    return client


def hand_written(
    client: Callable, *, lanes: int, devices: int, num_rounds: int = 1, one_vmap: bool = False
) -> Callable:
    """Jitted (key, params, data, ids [R, m]) -> (params, losses [R]): FedAvg, its rounds in one program.

    Args:
      client: (params, data, key, id) -> (change, loss, weight).
      lanes: clients under one vmap, looped over with a float carry; 1 is a loop over single clients.
      devices: that share each cohort through shard_map.
      one_vmap: the whole cohort at once instead.
    """

    def weighted(params, data, key, id):
        change, loss, weight = client(params, data, key, id)
        return jax.tree.map(lambda x: x * weight, (change, loss)), weight

    def summed(params, data, key, ids):
        many = jax.vmap(weighted, in_axes=(None, None, None, 0))
        if one_vmap:
            return jax.tree.map(lambda a: a.sum(0), many(params, data, key, ids))

        def add(carry, ids):
            if lanes == 1:
                return jax.tree.map(jnp.add, carry, weighted(params, data, key, ids[0])), None
            return jax.tree.map(lambda c, a: c + a.sum(0), carry, many(params, data, key, ids)), None

        zero = jax.tree.map(jnp.zeros_like, ((params, jnp.float32(0)), jnp.float32(0)))
        whole = ids.shape[0] - ids.shape[0] % lanes
        carry, _ = jax.lax.scan(add, zero, ids[:whole].reshape(-1, lanes))
        if whole < ids.shape[0]:
            rest = many(params, data, key, ids[whole:])
            carry = jax.tree.map(lambda c, a: c + a.sum(0), carry, rest)
        return carry

    def cohort(params, data, key, ids):
        if devices == 1:
            return summed(params, data, key, ids)
        here = PartitionSpec()
        shared = jax.shard_map(
            lambda *a: jax.lax.psum(summed(*a), "d"), mesh=mesh_of(devices),
            in_specs=(here, here, here, PartitionSpec("d")), out_specs=here, check_vma=False,
        )  # fmt: skip
        return shared(params, data, key, ids)

    @jax.jit
    def rounds(key, params, data, ids):
        def one_round(i, carry):
            params, losses = carry
            (change, loss), weight = cohort(params, data, jax.random.fold_in(key, i), ids[i])
            params = jax.tree.map(lambda p, c: p + c / weight, params, change)
            return params, losses.at[i].set(loss / weight)

        return jax.lax.fori_loop(0, num_rounds, one_round, (params, jnp.zeros(num_rounds)))

    return rounds


def dispatched(work: Workload, *, per_step: bool) -> Callable:
    """A Python loop over the clients of one cohort, (key, params, x, y, ids) -> params.

    One jitted call a client, or one a local step; clients are dealt to the devices in turn, without waiting for them.
    """
    devices = jax.devices()

    @jax.jit
    def client(total, params, data, key, id):
        x, y = data
        change, _ = _client(work, params, x[id], y[id], client_seed(key, id))
        return jax.tree.map(jnp.add, total, change)

    @jax.jit
    def begin(key, x, id):
        rows = x.shape[1]
        order = shuffled(client_seed(key, id), jnp.arange(rows), jnp.ones(rows, bool))
        return order.reshape(work.num_steps, work.batch_size)

    @jax.jit
    def step(params, data, id, order, t):
        x, y = data
        gradient = jax.grad(lambda p: _mean_loss(work, p, x[id, order[t]], y[id, order[t]]))(params)
        return jax.tree.map(lambda p, g: p - work.learning_rate * g, params, gradient)

    @jax.jit
    def finish(total, params, local):
        return jax.tree.map(lambda t, p, q: t + (q - p), total, params, local)

    def run(key, params, x, y, ids):
        held = [jax.device_put((params, (x, y), key), device) for device in devices]
        totals = [jax.tree.map(jnp.zeros_like, here[0]) for here in held]
        for i, id in enumerate(np.asarray(ids)):
            where = i % len(devices)
            here, data_here, key_here = held[where]
            if not per_step:
                totals[where] = client(totals[where], here, data_here, key_here, id)
                continue
            local, order = here, begin(key_here, data_here[0], id)
            for t in range(work.num_steps):
                local = step(local, data_here, id, order, np.int32(t))
            totals[where] = finish(totals[where], here, local)
        total = jax.tree.map(lambda *parts: sum(np.asarray(part) for part in parts), *totals)
        return jax.tree.map(lambda p, t: p + t / len(ids), params, total)

    return run


def centralised(work: Workload, loss_fn: Callable, batch: int, *, devices: int) -> Callable:
    """(params, x, y) -> params: SGD over flat rows in large batches, one jitted step each, for equal FLOPs.

    With `devices` > 1 each of them takes a share of the batch; with one, XLA may still use every core inside a layer.
    """

    def mean(params, x, y):
        return loss_fn(params, {"x": x, "y": y}, None)["loss"].mean()

    def step(params, x, y):
        gradient = jax.grad(mean)(params, x, y)
        gradient = gradient if devices == 1 else jax.lax.pmean(gradient, "d")
        return jax.tree.map(lambda p, g: p - work.learning_rate * g, params, gradient)

    if devices > 1:
        here, split = PartitionSpec(), PartitionSpec("d")
        specs = {"in_specs": (here, split, split), "out_specs": here, "check_vma": False}
        step = jax.shard_map(step, mesh=mesh_of(devices), **specs)
    step = jax.jit(step)

    def run(params, batches):
        for x, y in batches:
            params = step(params, x, y)
        return params

    def split_rows(x, y):
        places = jax.sharding.NamedSharding(mesh_of(devices), PartitionSpec("d")) if devices > 1 else jax.devices()[0]
        cuts = range(0, x.shape[0] - batch + 1, batch)
        return [jax.device_put((x[i : i + batch], y[i : i + batch]), places) for i in cuts]

    run.batches = split_rows
    return run


# ---- what the machine can do


def gemm_side() -> int:
    """A side at which matrix products reach the peak of the backend."""
    return 2048 if jax.default_backend() == "cpu" else 8192


def gemm_peak(side: int) -> dict[str, Callable]:
    """Float32 matrix products of `side`, by every road to the machine's peak; each call is 2 side^3 FLOPs a device."""
    a = jnp.ones((len(jax.devices()), side, side))
    split = jax.sharding.NamedSharding(mesh_of(len(jax.devices())), PartitionSpec("d"))
    many = jax.device_put(a, split)
    spec = PartitionSpec("d")
    product = jax.jit(jax.shard_map(lambda x: x @ x, mesh=split.mesh, in_specs=spec, out_specs=spec, check_vma=False))
    single, one, host = jax.jit(lambda x: x @ x), a[0], np.ones((side, side), np.float32)
    return {
        "jax, every device its own": lambda: product(many),
        "jax, one device": lambda: single(one),
        "numpy": lambda: host @ host,
    }


def copy_peak(megabytes: int) -> dict[str, Callable]:
    """Functions that read and write `megabytes` each, from memory to memory."""
    values = megabytes * (1 << 18)
    split = jax.sharding.NamedSharding(mesh_of(len(jax.devices())), PartitionSpec("d"))
    held = [jax.device_put(jnp.ones(values), split)]
    host, target = np.ones(values, np.float32), np.ones(values, np.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: fresh pages would cost more than the copy

    def in_place():
        held[0] = add(held[0])
        return held[0]

    return {"jax, all devices, in place": in_place, "numpy, one core": lambda: np.copyto(target, host)}
