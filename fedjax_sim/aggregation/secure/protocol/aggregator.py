"""`real_secure_sum` runs secure aggregation with real cryptography inside of a round, for a few hundred clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_sim import engine, prng, validate
from fedjax_sim.aggregation.secure.masks import Circle, Stages, circle
from fedjax_sim.aggregation.secure.modular import ring_of
from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.protocol.protocol import client_down_bytes, client_up_bytes, run_secure_sum
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.aggregation.secure.secagg import leaves_before, left_by, secure_sum, stages_of
from fedjax_sim.tree import num_values
from fedjax_sim.types import Aggregator, Count, Metric, Wire


class _Settings(NamedTuple):
    """The settings of the protocol that all rounds share."""

    ring: Ring
    threshold: int  # the shares that open a secret
    least: int | None  # a round with fewer messages is aborted; None = the threshold
    signed: bool  # as in `real_secure_sum`


def real_secure_sum(
    aggregator: Aggregator,
    threshold: int,
    *,
    neighbours: int | None = None,
    dropout: float | Sequence[float] = 0.0,
    min_messages: int | None = None,
    signed: bool = False,
) -> Aggregator:
    """The server computes a modular sum of masked messages, by a protocol with real keys, run on the host each round.

    `secure_sum` simulates the same protocol. For the same key, the same clients leave, and the sums and aborts are the
    same, bit for bit. All m messages are kept until the end of the round.

    Args:
      aggregator: a `modular_sum`, as in `secure_sum`.
      threshold: as in `secure_sum`.
      neighbours: as in `secure_sum`.
      dropout: as in `secure_sum`.
      min_messages: as in `secure_sum`.
      signed: True: clients sign their keys, and before they open shares they compare what the server told them. For
        that they exchange signed statements with the clients that stay to the end.

    Returns: an Aggregator with the metrics of `secure_sum`, and `protocol_bytes`, the bytes that clients and server
    sent. `observe` shows the masked messages, leaves [m, words, ...] uint32.

    Raises: ImportError without `cryptography`, naming the extra; ValueError on several devices, for updates without
      numbers, and as `secure_sum` does.

    Guarantees:
      - the bits are those of `secure_sum` in every ring, with dropouts and aborts, signed or not
        (tests/aggregation/secure/protocol/test_aggregator.py::test_bits_of_the_simulated_one, ::test_federations_agree)
      - a lying server opens nothing (tests/aggregation/secure/protocol/test_active_server.py)

    References: Bonawitz et al. 2017; Bell, Bonawitz, Gascon, Lepoint and Raykova 2020.
    """
    crypto.check_cryptography_installed()
    options = {"neighbours": neighbours, "dropout": dropout, "min_messages": min_messages, "signed": signed}
    simulated = secure_sum(aggregator, threshold, **options)
    ring = ring_of(aggregator)
    cumulative = left_by(dropout)
    settings = _Settings(ring, threshold, simulated.facts.least, signed)

    def init(update_spec, num_slots):
        if not num_values(update_spec):
            validate.fail("update", "numbers to sum", "none")
        return {"simulated": simulated.init(update_spec, num_slots), "rows": engine.buffer(update_spec, num_slots)}

    def accumulate(key, round, carry, received):
        total = simulated.accumulate(key, round, carry["simulated"], received)
        return {"simulated": total, "rows": engine.fill(carry["rows"], received.slots, received.updates)}

    def run_protocol(key, round, uploaded, messages, *, results, returns_masked):
        """Runs the protocol on the host.

        Args:
          uploaded: [m] bool.
          messages: leaves [m, ...].
          results: shapes and dtypes of what `_run` fills.
          returns_masked: whether the masked messages are returned, instead of the sum.
        """
        num_slots = round.cohort.ids.shape[0]
        graph = circle(key, num_slots, neighbours, round)
        advertised = round.cohort.reported & (leaves_before(key, round.cohort.ids, cumulative) > 0)
        stages = stages_of(key, round.cohort.ids, round.cohort.reported, uploaded, cumulative)
        table = jnp.concatenate([x.reshape(num_slots, -1) for x in jax.tree.leaves(messages)], axis=1)
        # All secrets of the host's run follow from the round's key, so that a round repeats.
        seed = jax.random.bits(prng.stream(key, "real_secrets"), (8,), jnp.uint32)
        flags = jnp.stack([advertised, *stages]).astype(jnp.int32)
        run = partial(_run, settings, graph.distances, returns_masked)
        graph_arrays = graph.order, graph.place, jnp.int32(graph.size)
        return engine.on_host(run, results, table, flags, *graph_arrays, seed, vmap_method="sequential")

    def finalize(key, round, carry):
        rows = carry["rows"]
        total = carry["simulated"]
        _check_one_device(rows.mesh)
        uploaded = total["uploaded"] > 0
        messages = engine.all_rows(rows, jnp.arange(uploaded.shape[0], dtype=jnp.int32))
        one_message = jax.tree.map(lambda x: x[0], messages)
        words_spec = partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)
        results = [words_spec((ring.words, num_values(one_message))), words_spec(()), words_spec((2,))]
        words, aborted, num_bytes = run_protocol(key, round, uploaded, messages, results=results, returns_masked=False)
        # The simulated sum decides who left and finalizes; the integers of the real protocol take its sum's place.
        lanes = _as_messages(jnp.stack(ring.lanes(tuple(words))), one_message)
        real_total = total | {"sum": total["sum"]._replace(lanes=lanes)}
        update, metrics = simulated.finalize(key, round, real_total)
        update = jax.tree.map(lambda x: jnp.where(aborted > 0, jnp.nan, x), update)
        return update, metrics | {"protocol_bytes": Count(jnp.int32(1), num_bytes)}

    def view(key, round, received):
        stays_for_upload = leaves_before(key, round.cohort.ids, cumulative) > 2
        does_upload = (received.weights > 0) & round.cohort.reported & stays_for_upload
        one_message = jax.tree.map(lambda x: x[0], received.updates)
        results = [jax.ShapeDtypeStruct((does_upload.shape[0], ring.words, num_values(one_message)), jnp.uint32)]
        (masked,) = run_protocol(key, round, does_upload, received.updates, results=results, returns_masked=True)
        return _as_messages(masked, one_message), jnp.where(does_upload, received.weights, 0)

    def wire(update_spec, wire, num_invited):
        values = num_values(update_spec)
        num_neighbours, keeps_share = (num_invited - 1, True) if neighbours is None else (neighbours, False)
        bits = 8 * client_up_bytes(num_neighbours, keeps_share, values, ring, signed)
        return Wire(values, values * ring.bits, bits - values * ring.bits)

    def wire_down(update_spec, wire, num_invited):
        return wire.with_side(8 * client_down_bytes(num_invited, neighbours, signed))

    protocol_bytes = Metric("protocol_bytes", "bytes of secure aggregation, clients and server", "bytes")
    real = simulated._replace(init=init, accumulate=accumulate, finalize=finalize, view=view)
    return real.stating(metrics=(*simulated.facts.metrics, protocol_bytes), wire=wire, wire_down=wire_down)


def _check_one_device(mesh: Mesh | None) -> None:
    """Refuses several devices, since the protocol runs once, on the host."""
    if mesh is not None and mesh.size > 1:
        hint = "The protocol runs on the host, once: mesh=None (in a config run.devices = 1), or secure_sum."
        validate.fail("mesh", "one device for real_secure_sum", f"{mesh.size} devices", hint)


def _as_messages(table, like):
    """Splits a table [..., d] into leaves [..., *shape], for a message `like` of d numbers."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    parts = jnp.split(table, ends, axis=-1)
    return structure.unflatten([p.reshape(*p.shape[:-1], *x.shape) for p, x in zip(parts, leaves, strict=True)])


def _run(
    settings: _Settings, distances: np.ndarray, returns_masked: bool, out: list[np.ndarray], *arrays: np.ndarray
) -> None:
    """Runs the protocol on the host, and fills `out` (`engine.on_host`).

    Args:
      settings: of the protocol.
      distances: of the `Circle`, [h].
      returns_masked: what `out` gets. True: the masked messages [m, words, d] uint32. False: the words of the sum,
        [words, d] uint32; whether the round is aborted, [] uint32; and the number of bytes, [2] uint32, the high word
        first.
      out: the arrays that are filled.
      arrays: the messages [m, d] int32; the flags [4, m] int32 of the clients that advertise, share, upload and answer;
        `order` [m], `place` [m] and `size` [] of the `Circle`, int32; the seed of all secrets, [8] uint32.
    """
    messages, flags, order, place, size, seed = arrays
    ring = settings.ring
    advertised, *stages = flags > 0
    run = run_secure_sum(
        messages,
        ring,
        settings.threshold,
        graph=Circle(order, place, distances, int(size)),
        stages=Stages(*stages),
        advertised=advertised,
        min_messages=settings.least,
        signed=settings.signed,
        seed=np.asarray(seed).tobytes(),
    )
    if returns_masked:
        out[0][...] = np.stack(_words(ring, run.masked), axis=1)
        return
    dimension = messages.shape[1]
    total = np.zeros(dimension, np.uint64) if run.sum is None else crypto.reduced(ring, run.sum)
    out[0][...] = np.stack(_words(ring, total))
    out[1][...] = run.aborted
    num_bytes = int(run.client_bytes.sum() + run.server_bytes.sum())
    out[2][...] = divmod(num_bytes, 1 << 32)  # (high word, low word)


def _words(ring, elements):
    """Returns the uint32 words of uint64 elements, from the lowest word on."""
    return [(elements >> np.uint64(32 * i)).astype(np.uint32) for i in range(ring.words)]
