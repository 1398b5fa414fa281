"""Secure aggregation with real cryptography inside of a round, for a few hundred clients on one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_sim import engine, prng, validate
from fedjax_sim.aggregation.secure.masks import Circle, Stages, circle
from fedjax_sim.aggregation.secure.modular import ring_of
from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.protocol.protocol import client_down_bytes, client_up_bytes, run_secure_sum
from fedjax_sim.aggregation.secure.secagg import leaves_before, left_by, secure_sum, stages_of
from fedjax_sim.tree import num_values
from fedjax_sim.types import Aggregator, Count, Metric, Wire

__all__ = ["real_secure_sum"]


def real_secure_sum(
    aggregator: Aggregator,
    threshold: int,
    *,
    neighbours: int | None = None,
    dropout: float | Sequence[float] = 0.0,
    min_messages: int | None = None,
    signed: bool = False,
) -> Aggregator:
    """`secure_sum` by real keys, seals, masks and shares: the protocol runs on the host in each round.

    Who leaves, the sum and the aborts are `secure_sum`'s for the same key, bit for bit; all m messages are kept until
    the end of the round.

    Args: as `secure_sum`; with `signed` keys are signed, and clients compare what the server told them before they open
      shares, which is exchanged among those who stay to the end.

    Returns: an Aggregator with the metrics of `secure_sum`, and `protocol_bytes`, all that clients and server sent.
    `observe` shows the masked messages, leaves [m, words, ...] uint32.

    Raises: ImportError without `cryptography`, naming the extra; ValueError on several devices, for updates without
    numbers, and as `secure_sum`.

    Guarantees: bits of `secure_sum` in every ring, with dropouts and aborts
    (tests/aggregation/secure/protocol/test_aggregator.py::test_bits_of_the_simulated_one, ::test_federations_agree),
    signed or not; a lying server opens nothing (tests/aggregation/secure/protocol/test_active_server.py).

    References: Bonawitz et al. 2017; Bell, Bonawitz, Gascon, Lepoint and Raykova 2020.
    """
    crypto.check_installed()
    options = {"neighbours": neighbours, "dropout": dropout, "min_messages": min_messages, "signed": signed}
    simulated = secure_sum(aggregator, threshold, **options)
    ring = ring_of(aggregator)
    cumulative = left_by(dropout)

    def init(update_spec, num_slots):
        if not num_values(update_spec):
            validate.fail("update", "numbers to sum", "none")
        return {"simulated": simulated.init(update_spec, num_slots), "rows": engine.buffer(update_spec, num_slots)}

    def accumulate(key, round, carry, received):
        total = simulated.accumulate(key, round, carry["simulated"], received)
        return {"simulated": total, "rows": engine.fill(carry["rows"], received.slots, received.updates)}

    def protocol(key, round, uploaded, messages, results, shown):
        """`results` of a run on the host; messages: leaves [m, ...]."""
        number = round.cohort.ids.shape[0]
        graph = circle(key, number, neighbours, round)
        advertised = round.cohort.reported & (leaves_before(key, round.cohort.ids, cumulative) > 0)
        stages = stages_of(key, round.cohort.ids, round.cohort.reported, uploaded, cumulative)
        table = jnp.concatenate([x.reshape(number, -1) for x in jax.tree.leaves(messages)], axis=1)
        seed = jax.random.bits(prng.stream(key, "real_secrets"), (8,), jnp.uint32)
        flags = jnp.stack([advertised, *stages]).astype(jnp.int32)
        run = partial(_run, ring, threshold, simulated.facts.least, graph.distances, signed, shown)
        around = graph.order, graph.place, jnp.int32(graph.size)
        return engine.on_host(run, results, table, flags, *around, seed, vmap_method="sequential")

    def finalize(key, round, carry):
        rows, total = carry["rows"], carry["simulated"]
        _check_one_device(rows.mesh)
        uploaded = total["uploaded"] > 0
        messages = engine.all_rows(rows, jnp.arange(uploaded.shape[0], dtype=jnp.int32))
        one = jax.tree.map(lambda x: x[0], messages)
        word = partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)
        results = [word((ring.words, num_values(one))), word(()), word((2,))]
        words, aborted, sent = protocol(key, round, uploaded, messages, results, False)
        lanes = _as_messages(jnp.stack(ring.lanes(tuple(words))), one)
        found = total | {"sum": total["sum"]._replace(lanes=lanes)}
        update, metrics = simulated.finalize(key, round, found)
        update = jax.tree.map(lambda x: jnp.where(aborted > 0, jnp.nan, x), update)
        return update, metrics | {"protocol_bytes": Count(jnp.int32(1), sent)}

    def view(key, round, received):
        here = (received.weights > 0) & round.cohort.reported & (leaves_before(key, round.cohort.ids, cumulative) > 2)
        one = jax.tree.map(lambda x: x[0], received.updates)
        results = [jax.ShapeDtypeStruct((here.shape[0], ring.words, num_values(one)), jnp.uint32)]
        (masked,) = protocol(key, round, here, received.updates, results, True)
        return _as_messages(masked, one), jnp.where(here, received.weights, 0)

    def wire(update_spec, wire, num_invited):
        values = num_values(update_spec)
        around, keeps = (num_invited - 1, True) if neighbours is None else (neighbours, False)
        sent = 8 * client_up_bytes(around, keeps, values, ring, signed)
        return Wire(values, values * ring.bits, sent - values * ring.bits)

    def wire_down(update_spec, wire, num_invited):
        return wire.with_side(8 * client_down_bytes(num_invited, neighbours, signed))

    stated = Metric("protocol_bytes", "bytes of secure aggregation, clients and server", "bytes")
    made = simulated._replace(init=init, accumulate=accumulate, finalize=finalize, view=view)
    return made.stating(metrics=(*simulated.facts.metrics, stated), wire=wire, wire_down=wire_down)


def _check_one_device(mesh: Mesh | None) -> None:
    if mesh is not None and mesh.size > 1:
        hint = "The protocol runs on the host, once: mesh=None (in a config run.devices = 1), or secure_sum."
        validate.fail("mesh", "one device for real_secure_sum", f"{mesh.size} devices", hint)


def _as_messages(table, like):
    """Leaves [a, b, ...] of a table [a, b, d], for messages of d numbers in all."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    parts = jnp.split(table, ends, axis=-1)
    return structure.unflatten([p.reshape(*p.shape[:-1], *x.shape) for p, x in zip(parts, leaves, strict=True)])


def _run(ring, threshold, least, distances, signed, shown, out, messages, flags, order, place, on_circle, seed):
    """Fills `out` with the sum's words, whether it was aborted, and the bytes; or with the masked messages."""
    advertised, *stages = flags > 0
    run = run_secure_sum(
        messages,
        ring,
        threshold,
        graph=Circle(order, place, distances, int(on_circle)),
        stages=Stages(*stages),
        advertised=advertised,
        min_messages=least,
        signed=signed,
        seed=np.asarray(seed).tobytes(),
    )
    if shown:
        out[0][...] = np.stack(_words(ring, run.masked), axis=1)
        return
    size = messages.shape[1]
    total = np.zeros(size, np.uint64) if run.sum is None else crypto.reduced(ring, run.sum)
    out[0][...] = np.stack(_words(ring, total))
    out[1][...] = run.aborted
    out[2][...] = divmod(int(run.client_bytes.sum() + run.server_bytes.sum()), 1 << 32)


def _words(ring, elements):
    return [(elements >> np.uint64(32 * i)).astype(np.uint32) for i in range(ring.words)]
