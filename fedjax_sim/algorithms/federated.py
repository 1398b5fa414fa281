"""The star: sampler -> broadcast -> clients -> letters -> aggregate -> server, as one compiled program."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fedjax_sim import engine, tree, validate
from fedjax_sim.algorithms.compatibility import check_aggregate, check_parts, looks_like_the_model
from fedjax_sim.engine import exact
from fedjax_sim.population.protocol import num_rows
from fedjax_sim.prng import client_keys, stream
from fedjax_sim.server import downlink as with_downlink
from fedjax_sim.transform import identity
from fedjax_sim.transform.chain import plain_wire, wire_of
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientData,
    ClientUpdate,
    Cohort,
    Count,
    Noise,
    PyTree,
    Received,
    Sampler,
    ServerUpdate,
    UpdateTransform,
)

__all__ = ["FederatedState", "federated"]

LARGEST = 2.0**100  # weighted updates at or past this count as non-finite: sums of them could overflow
SMALLEST = 2.0**-60  # weights between 0 and this too: sums of what they weigh could vanish
NAMED_CLIENTS = 8  # ids that an error names


class FederatedState(NamedTuple):
    """What the next round needs; one slot per room."""

    round: Array  # [] int32 rounds so far
    sampler: PyTree
    clients: PyTree  # [N, ...] per-client state; () if stateless
    memory: PyTree  # [N, ...] per-client memory of the transform
    transform: PyTree
    server: PyTree


class _Shared(NamedTuple):
    key: Array
    broadcast: PyTree
    transform: PyTree
    population: PyTree
    cohort: Cohort


class _Slot(NamedTuple):
    position: Array
    id: Array
    keys: tuple[Array, Array]  # key data of the client's own streams: its work, its transform
    reported: Array  # False in the engine's padding
    client: PyTree
    memory: PyTree


class _Letter(NamedTuple):
    update: PyTree
    weight: Array
    means: PyTree  # metrics of the client and measurements of the transform, as Mean
    arrived: Array
    dropped: Array


def _stays_finite(old: PyTree, new: PyTree) -> Array:
    """[] bool: no finite number became NaN or infinite; an overflowed moment would end all learning in silence."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    checks = [jnp.isfinite(y).all() | ~jnp.isfinite(x).all() for x, y in pairs if jnp.issubdtype(y.dtype, jnp.inexact)]
    return jnp.stack(checks).all() if checks else jnp.asarray(True)


def _arrived(letters: _Letter) -> _Letter:
    """Letters [c, ...] with zeros in place of what did not arrive, or must not."""

    def kept(x):  # flat: XLA:CPU vectorises the last axis, and that of a leaf may be short
        flat = x.reshape(x.shape[0], -1)
        return jnp.where(letters.arrived[:, None], flat, jnp.zeros_like(flat)).reshape(x.shape)

    update, weight, means = jax.tree.map(kept, (letters.update, letters.weight, letters.means))
    return letters._replace(update=update, weight=weight, means=means)


@partial(jax.jit, inline=True)
def _peak(x: Array) -> Array:
    """[] float32 largest magnitude; NaN where there is one.

    Halves laid over each other are vector operations on XLA:CPU; a reduction of a few thousand numbers takes as long as
    that of many.
    """
    x = jnp.abs(x.reshape(-1)).astype(jnp.float32)
    while 64 < x.size <= 1 << 14:
        half = -(-x.size // 2)
        x = jnp.maximum(x[:half], x[x.size - half :])
    return x.max(initial=0)


def _info(own: dict, **parts: dict) -> dict:
    """The round's own numbers and the metrics of its parts, none of which may bear the name of one of those."""
    metrics = tree.joined(parts)
    for name in ("round", "epsilon", *own):
        if name in metrics:
            validate.fail("metrics", "names that no other part uses", name, "Rename it in the loss or the part.")
    return metrics | own


def _parts(**parts: tuple[Any, type]) -> None:
    for name, (value, kind) in parts.items():
        if not isinstance(value, kind):
            validate.fail(name, f"a {kind.__name__}", type(value).__name__, "Call the factory.", TypeError)


def no_aggregator(name: str, options: dict) -> None:
    """Refuses a table where the algorithm `name` has its own."""
    if "aggregator" in options:
        validate.fail("aggregator", f"none for {name}, which has its own", options["aggregator"], error=TypeError)


def _shares(noise: Noise) -> int:
    """The letters that a distributed noise counts on."""
    details = noise.details._asdict() if hasattr(noise.details, "_asdict") else noise.details or {}
    return details.get("cohort_size", 1)


def federated(
    sampler: Sampler,
    client: ClientUpdate,
    aggregator: Aggregator,
    server: ServerUpdate,
    transform: UpdateTransform | None = None,
    *,
    downlink: UpdateTransform | None = None,
    nonfinite: str = "drop",
    plan: engine.Plan | None = None,
    mesh: Mesh | str | None = "all",
) -> Algorithm:
    """Federated learning on a star, from its parts.

    Args:
      sampler, client, aggregator, server, transform: the rooms' parts; no transform sends letters as they are.
      downlink: what the broadcast goes through, by `server.downlink`; None sends the model as it is.
      nonfinite: what a NaN, infinite or overflowing update, weight, metric or client state, or a weight that vanishes
        in a sum, does. "drop": the round goes on as if that client had not reported, and counts it in
        `dropped_clients`. "error": the same, and `run` stops, naming the clients; refused beside noise, whose secret
        that would be.
      plan: clients vmapped and summed at once; by default fitted to the cache.
      mesh: devices to share the cohort; "all" visible ones by default, None for one.

    With noise in shares on the letters (place "distributed"), a round in which fewer letters arrive than share it is
    skipped: nothing of it is released but that a letter was missing, which voids the epsilon of a run.

    Returns: an Algorithm. Its info holds `clients_invited`, `clients_reported`, `dropped_clients`, `skipped_rounds`
    (1 where nothing usable arrived: the model is then unchanged), `uplink_bytes`, `downlink_bytes`, `update_norm`, and
    the pooled metrics of clients, sampler, transform and aggregator, with the part's name before a name that two of
    them use; `uplink_coded_bytes` where an entropy code would make letters smaller; `wasted_bytes` under
    over-invitation: those of `uplink_bytes` that came too late to count.

    Raises: ValueError for a modular sum of what is no integer or could wrap, for integers at a table whose result is
    not in their unit, for noise at one whose result a client moves without bound, for clients drawn by unequal chances
    at one that weighs them too, for "error" beside noise (tests/running/test_spending.py::test_stopping_is_no_secret),
    and for what `server.downlink` refuses. `init` refuses updates of other shapes or dtypes than the server takes
    (tests/laws/test_foreign_updates.py).

    Guarantees: the same bits for any number of devices and order of the cohort (tests/laws/test_devices.py), and any
    padding under a rule that does not count rows (tests/laws/test_invariance.py); a non-finite client equals an absent
    one bit for bit (tests/laws/test_nonfinite.py); traced once per shape (tests/test_compilation.py); `downlink` is the
    server wrapped by hand (tests/server/test_downlink.py::test_federated_wraps_its_server); parts that do not fit are
    refused by their facts (`algorithms.compatibility`); every byte that was sent is counted
    (tests/sampling/test_participation.py::test_late_messages_are_counted).
    """
    transform = identity() if transform is None else transform
    _parts(
        sampler=(sampler, Sampler),
        client=(client, ClientUpdate),
        aggregator=(aggregator, Aggregator),
        server=(server, ServerUpdate),
        transform=(transform, UpdateTransform),
    )
    if downlink is not None:
        server = with_downlink(server, downlink)
    validate.one_of("nonfinite", nonfinite, ("drop", "error"))
    if nonfinite == "error" and (transform.noise, client.noise) != (None, None):
        hint = "A run that stops, and names clients, tells what the noise is to hide."
        validate.fail("nonfinite", "'drop' beside noise", nonfinite, hint)
    check_parts(sampler, client, transform, aggregator)
    train = jax.jit(client.apply)

    def devices():
        return engine.device_mesh() if mesh == "all" else mesh

    def report_spec(broadcast, client_state, population):
        def one_report(broadcast, client_state, population):
            data = population.client(jnp.zeros((), jnp.int32))
            return train(jax.random.key(0), broadcast, client_state, data)[0].update

        return jax.eval_shape(one_report, broadcast, client_state, population)

    def init(key, params, population):
        design_size = getattr(sampler.design, "population_size", None)
        if design_size != population.size:
            validate.fail("sampler", f"a design for the population's {population.size} clients", design_size)
        server_state = server.init(params)
        broadcast = server.broadcast(server_state)
        client_state = client.init(broadcast)
        spec = report_spec(broadcast, client_state, population)
        memory = transform.init_client(spec)
        if sampler.design.replacement and jax.tree.leaves((client_state, memory)):
            hint = "A client drawn twice would remember one of its two letters."
            validate.fail("sampler", "a design without replacement, for clients remember", sampler.design.scheme, hint)
        state = FederatedState(
            round=jnp.zeros((), jnp.int32),
            sampler=sampler.init(),
            clients=engine.store(client_state, population.size, mesh=devices()),
            memory=engine.store(memory, population.size, mesh=devices(), name="transform"),
            transform=transform.init(spec),
            server=server_state,
        )
        state = jax.tree.map(jnp.asarray, state)
        if not looks_like_the_model(spec, server, tree.spec(params)):
            jax.eval_shape(step, key, state, population)  # what the aggregator makes of it decides
        return state

    def one(shared: _Shared, slot: _Slot, rows: int | None):
        population = shared.population
        whole = rows is None or rows == num_rows(population)
        data = (population if whole else population.capped(rows)).client(slot.id)
        mask = data.mask & slot.reported  # who will not report need not train
        data = ClientData(tree.where(mask, data.examples, tree.zeros_like(data.examples)), mask)
        client_key, transform_key = (
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(shared.key)) for x in slot.keys
        )
        report, client_state = train(client_key, shared.broadcast, slot.client, data)
        update, memory, measured = transform.on_client(transform_key, report.update, shared.transform, slot.memory)
        if aggregator.modulus is None and transform.integer_range is not None:
            update = jax.tree.map(lambda x: x.astype(jnp.float32), update)  # which holds them all: `check_parts`
        weight = report.weight.astype(jnp.float32)
        peaks = jnp.stack([_peak(x) for x in jax.tree.leaves(update)])
        sound = (peaks < LARGEST).all() & (peaks * weight < LARGEST).all() & (weight >= 0) & (weight < LARGEST)
        sound &= (weight == 0) | (weight >= SMALLEST)
        sound &= _stays_finite((slot.client, slot.memory), (client_state, memory))
        sound &= tree.all_finite((report.metrics, measured))
        known = (slot.id >= 0) & (slot.id < shared.population.size)  # a sampler's fault would pass as an empty client
        arrived = slot.reported & known & sound & (weight > 0)
        dropped = slot.reported & (~known | (~sound & (weight != 0)))
        letter = _Letter(update, weight, (report.metrics, measured), arrived, dropped)
        return letter, (*tree.unsigned_zeros((client_state, memory)), arrived, dropped)

    @partial(jax.jit, static_argnames="rows")  # traced once, though its shape is asked for before it runs
    def each(shared: _Shared, slot: _Slot, rows: int | None = None):
        return engine.steady(partial(one, rows=rows))(shared, slot)

    def unequal(population, cohort: Cohort) -> dict:
        """What `fold` must know of clients that differ in their work."""
        classed = client.num_steps is not None and hasattr(population, "capped")
        classes = getattr(population, "capacities", ()) if classed else ()
        if not hasattr(population, "count") or (len(classes) < 2 and not callable(client.num_steps)):
            return {}
        sizes = jnp.where(cohort.reported, jax.vmap(population.count)(cohort.ids), 0)
        return {"sizes": sizes, "capacities": classes or (num_rows(population),)}

    def accumulate(*args):
        return engine.steady(gather)(*args)

    def gather(shared: _Shared, carry, letters: _Letter, slots: _Slot, valid):
        table, means, arrived, dropped = carry
        letters = _arrived(letters)
        position = jnp.where(valid, slots.position, sampler.num_slots)
        received = Received(letters.update, letters.weight, slots.id, position)
        table = aggregator.accumulate(stream(shared.key, "aggregation"), shared.cohort, table, received)
        arrived = arrived + letters.arrived.sum(dtype=jnp.int32)
        return table, exact.add(means, letters.means), arrived, dropped + letters.dropped.sum(dtype=jnp.int32)

    def step(key, state: FederatedState, population):
        cohort, sampler_state = engine.steady(sampler.sample)(stream(key, "sampling"), state.sampler)
        ids = cohort.ids
        announces = hasattr(population, "announce") and not engine.is_unplaced()
        wanted = population.announce(ids) if announces else ids
        broadcast = engine.steady(server.broadcast)(state.server)
        zero = jnp.zeros((), jnp.int32)
        shared = _Shared(key, broadcast, state.transform, population, cohort)
        positions = jnp.arange(sampler.num_slots, dtype=jnp.int32)
        client_rows, clients = engine.take(state.clients, ids)
        memory_rows, memory = engine.take(state.memory, ids)
        keys = tuple(client_keys(stream(key, name), ids) for name in ("client", "transform"))
        slots = _Slot(positions, wanted, keys, cohort.reported, client_rows, memory_rows)
        letter, _ = jax.eval_shape(each, shared, jax.tree.map(lambda x: x[0], slots))
        carry = (aggregator.init(letter.update, sampler.num_slots), exact.zeros(letter.means), zero, zero)
        carry = tree.varying(carry, state.round)
        carry, per_slot = engine.fold(
            each, accumulate, shared, carry, slots, plan=plan, mesh=devices(), **unequal(population, cohort)
        )
        client_rows, memory_rows, arrived_slots, dropped_slots = per_slot
        usable, transform_state, moved, length, found = engine.steady(close)(key, cohort, carry, state)
        new = FederatedState(
            round=state.round + 1,
            sampler=sampler_state,
            clients=engine.put(clients, ids, client_rows, arrived_slots & usable),
            memory=engine.put(memory, ids, memory_rows, arrived_slots & usable),
            transform=transform_state,
            server=moved,
        )
        letter = wire_of(transform, report_spec(broadcast, client.init(broadcast), population))
        received = (plain_wire if server.wire is None else server.wire)(broadcast)
        uploads = cohort.reported if cohort.sent is None else cohort.sent
        invited, reported, sent = (x.sum(dtype=jnp.int32) for x in (cohort.invited, cohort.reported, uploads))
        own = {
            "clients_invited": invited,
            "clients_reported": carry[2],
            "dropped_clients": carry[3],
            "skipped_rounds": (~usable).astype(jnp.int32),
            "update_norm": length,
            "uplink_bytes": Count.of(sent, -(-letter.bits // 8)),
            "downlink_bytes": Count.of(invited, -(-received.bits // 8)),
        }
        if letter.coded < letter.bits:
            own["uplink_coded_bytes"] = Count.of(sent, -(-letter.coded // 8))
        if cohort.sent is not None:
            own["wasted_bytes"] = Count.of(sent - reported, -(-letter.bits // 8))
        if nonfinite == "error":
            first = jnp.argsort(~dropped_slots, stable=True)[:NAMED_CLIENTS]
            own["error_ids"] = jnp.where(dropped_slots[first], ids[first], -1)
        return new, _info(own, sampler=cohort.metrics, **found)

    def close(key, cohort: Cohort, carry, state: FederatedState):
        """What the server makes of what it got: (usable, the transform's state, its own, its step's norm, metrics)."""
        table, means, arrived, _ = carry
        aggregate, table_metrics = aggregator.finalize(stream(key, "aggregation"), cohort, table)
        metrics, measured = exact.total(means)
        aggregate, transform_state, transform_metrics = transform.on_server(
            stream(key, "transform_server"), cohort, aggregate, state.transform, measured, aggregator.sensitivity
        )
        check_aggregate(aggregate, server, tree.spec(server.params(state.server)))
        moved = server.apply(stream(key, "server"), aggregate, state.server)
        usable = (arrived > 0) | transform.releases_when_empty
        if transform.noise is not None and transform.noise.place == "distributed":
            usable = arrived >= _shares(transform.noise)  # fewer letters hold less noise: nothing is released
        usable &= tree.all_finite(server.params(moved)) & _stays_finite(state.server, moved)
        kept = transform.releases_when_empty & tree.all_finite(transform_state)  # what was released was released
        moved = tree.where(usable, moved, state.server)
        pooled = {name: mean.total / mean.weight for name, mean in metrics.items()}
        length = optax.tree.norm(tree.subtract(server.params(moved), server.params(state.server)))
        found = {"client": pooled, "aggregator": table_metrics, "transform": transform_metrics}
        return usable, tree.where(usable | kept, transform_state, state.transform), moved, length, found

    parts = {"sampler": sampler, "client": client, "transform": transform, "aggregator": aggregator, "server": server}
    return Algorithm(init, step, lambda state: server.params(state.server), parts)
