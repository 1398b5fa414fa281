"""One client's part of a round: local work, the client's end of the transform, and whether the message is usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.round.counts import bytes_of
from fedjax_sim.round.extension import Extension
from fedjax_sim.types import Array, Cohort, PyTree, Star

LARGEST = 2.0**100  # weighted updates of this magnitude count as non-finite: a sum of them could overflow
SMALLEST = 2.0**-60  # weights between 0 and this count as non-finite too: a weighted sum of updates could vanish


class Shared(NamedTuple):
    """The inputs that all clients of a round share."""

    key: Array  # of the round
    broadcast: PyTree  # what the server sends
    transform: PyTree  # the transform's server-side state
    population: PyTree
    cohort: Cohort
    aggregator: PyTree  # the aggregator's state from the round before
    extension: PyTree = None  # `Extension.shared`, what a wing adds for all clients
    round: Array | None = None  # [] int32, for clients that read it


class Slot(NamedTuple):
    """A `Slot` holds the inputs of one slot of the cohort."""

    position: Array  # [] int32 in [0, m)
    id: Array  # [] int32 of the client
    keys: tuple[Array, Array]  # key data of the client's own streams: for its work, and for its transform
    reported: Array  # [] bool; False in the engine's padding
    worked: Array  # [] bool; whether the client works, and its counts are added (`Inputs.works`)
    client: PyTree  # the client's state
    memory: PyTree  # the transform's memory of this client
    work: Array | None  # [], as `Cohort.work`
    extension: PyTree = None  # the slot's row of `Extension.rows`, what a wing adds
    version: Array | None = None  # [] int32 round of the model that it starts from; None = this one


class Message(NamedTuple):
    """The message of one client, and whether it can be used."""

    update: PyTree  # after the client's end of the transform
    weight: Array  # [] float32
    means: PyTree  # (the client's metrics, the transform's measurements), as Mean
    arrived: Array  # [] bool; it reported, and its message is finite and has a positive weight
    dropped: Array  # [] bool; it reported a message that cannot be used
    counts: dict[str, Array]  # [4] or [8] uint32, the bytes of each count, the lowest first


class SlotResult(NamedTuple):
    """A `SlotResult` holds what a round keeps of one slot beside the sums over all messages."""

    client: PyTree  # the client's next state
    memory: PyTree  # the transform's next memory of this client
    arrived: Array  # [] bool, as `Message.arrived`
    dropped: Array  # [] bool, as `Message.dropped`
    loss: PyTree  # [] the client's mean local loss, for a sampler that observes losses; else ()


def stays_finite(old: PyTree, new: PyTree, finite: PyTree = ()) -> Array:
    """Whether no array that was finite became NaN or infinite.

    Parameters alone do not tell: a moment of an optimizer that overflowed ends learning while they stay finite.

    Args:
      old, new: pytrees of the same structure, such as a server's state before and after its step.
      finite: leaves of `new` that are known to be finite; they are not looked at again.

    Returns: [] bool.

    Guarantees: a server step that diverges is skipped (tests/laws/test_nonfinite.py::test_diverging_server_step).

    >>> bool(stays_finite(jnp.ones(2), jnp.array([1.0, jnp.inf])))
    False
    """
    known = jax.tree.leaves(finite)
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    unknown = [(x, y) for x, y in pairs if not any(y is leaf for leaf in known)]
    checks = [engine.all_finite(y) | ~engine.all_finite(x) for x, y in unknown]
    return jnp.stack(checks).all() if checks else jnp.asarray(True)


def usable_rows(messages: Message) -> Message:
    """Replaces updates, weights and metrics by zeros where the message did not arrive or cannot be used.

    Args:
      messages: a chunk, leaves [c, ...].

    Guarantees: a non-finite client equals an absent one bit for bit
    (tests/laws/test_nonfinite.py::test_dropped_clients_equal_absent_ones).
    """

    def masked(x):
        # Flat, because XLA:CPU vectorises the last axis, and the last axis of a leaf may be short.
        flat = x.reshape(x.shape[0], -1)
        return jnp.where(messages.arrived[:, None], flat, jnp.zeros_like(flat)).reshape(x.shape)

    update, weight, means = jax.tree.map(masked, (messages.update, messages.weight, messages.means))
    return messages._replace(update=update, weight=weight, means=means)


def client_round(star: Star, read: Callable, extension: Extension) -> Callable:
    """Makes the function that `engine.fold` maps over the slots of a cohort.

    Args:
      star: the parts.
      read: (Shared, Slot, rows) -> what the client trains on (`Inputs.read`).
      extension: what a wing adds to the slots.

    Returns: (Shared, Slot, rows) -> (Message, SlotResult), for ONE slot. `rows` is the number of a client's rows that
    are read, a static integer; None reads all.

    Raises: TypeError, when traced, for a count that is not a scalar integer of at most 32 bits.

    Guarantees: a client's draws and result do not depend on its slot (tests/laws/test_invariance.py), and a client
    outside of the population is dropped (tests/laws/test_nonfinite.py::test_a_client_who_does_not_exist_is_counted).
    """
    train = jax.jit(star.client.apply)  # traced once, though `eval_shape` comes before the run

    def run_client(shared: Shared, slot: Slot, rows: int | None):
        data = read(shared, slot, rows)
        # Slots carry keys as plain integers (key data), here they become keys of the round's implementation again.
        client_key, transform_key = (
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(shared.key)) for x in slot.keys
        )
        start = extension.start(shared.broadcast, shared.extension, slot.extension)
        report, client_state = train(client_key, start, slot.client, data)
        update = extension.scaled(report.update, slot.extension)
        update, memory, measured = star.transform.on_client(transform_key, update, shared.transform, slot.memory)
        if star.aggregator.facts.modulus is None and star.transform.facts.integer_range is not None:
            update = jax.tree.map(lambda x: x.astype(jnp.float32), update)  # which holds them all: `check_parts`
        weight = report.weight.astype(jnp.float32)
        means = report.metrics, measured
        if engine.target() == "cpu":
            # The message is written for the aggregator in any case. Without the barrier, the checks would compute it
            # anew, and write the bits of every number. On a GPU it is one more kernel.
            update, weight, means = jax.lax.optimization_barrier((update, weight, means))
        # Comparisons with NaN are False, so a NaN anywhere makes the message unusable.
        peaks = jnp.stack([engine.largest_magnitude(x).astype(jnp.float32) for x in tree.packed(update)])
        is_usable = (peaks < LARGEST).all() & (peaks * weight < LARGEST).all() & (weight >= 0) & (weight < LARGEST)
        is_usable &= (weight == 0) | (weight >= SMALLEST)
        is_usable &= stays_finite((slot.client, slot.memory), (client_state, memory))
        is_usable &= engine.all_finite(tree.packed(means))
        id_exists = (slot.id >= 0) & (slot.id < shared.population.size)  # or a wrong id would pass as an empty client
        arrived = slot.reported & id_exists & is_usable & (weight > 0)
        # A weight of 0 says that there is nothing to report: such a client is absent, and not dropped.
        dropped = slot.reported & (~id_exists | (~is_usable & (weight != 0)))
        counts = {name: _count_bytes(x, slot.worked & id_exists, name) for name, x in report.counts.items()}
        message = Message(update=update, weight=weight, means=means, arrived=arrived, dropped=dropped, counts=counts)
        loss = _loss(report.metrics, arrived) if star.sampler.observe is not None else ()
        client_state, memory = engine.unsigned_zeros((client_state, memory))
        return message, SlotResult(client_state, memory, arrived, dropped, loss)

    return run_client


def _count_bytes(count: Array, is_counted: Array, name: str) -> Array:
    """Returns the bytes of a 32-bit count, the lowest first, [4] uint32; [8] for a count in two words.

    Each byte has a uint32 of its own, so sums over 2^24 clients are exact.
    """
    if count.dtype == jnp.uint32 and jnp.shape(count) == (2,):
        return jnp.where(is_counted, bytes_of(count), 0)
    if not jnp.issubdtype(count.dtype, jnp.integer) or jnp.shape(count) or count.dtype.itemsize > 4:
        hint = "Numbers that are not counts belong in metrics."
        validate.fail(
            f"counts[{name!r}]", "a scalar of an integer dtype of at most 32 bits", count.dtype, hint, TypeError
        )
    return bytes_of(jnp.where(is_counted & (count >= 0), count, 0))


def _loss(metrics: dict, arrived: Array) -> Array:
    """[] the client's mean local loss; NaN where nothing arrived, or where the client reports no loss."""
    loss = metrics.get("local_loss")
    if loss is None:
        return jnp.full((), jnp.nan)
    has_loss = arrived & (loss.weight > 0)
    weight = jnp.where(has_loss, loss.weight, 1)  # no division by zero
    return jnp.where(has_loss, loss.total / weight, jnp.nan)
