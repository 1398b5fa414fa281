"""Functions that all sums of hidden messages share: checks, draws of who leaves, sums of elements, aborted rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import prng, tree, validate
from fedjax_sim.aggregation.secure.modular import ModularSum
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.types import Aggregator, Array, Metric, PyTree
from fedjax_sim.validate import PositiveInt

SECURE_SUM_METRICS = (
    Metric("aborted_rounds", "secure sums aborted", "count"),
    Metric("secure_dropouts", "clients that left during secure aggregation", "count"),
)


@validate.named_arguments
def check_secure_sum_options(aggregator: Aggregator, min_messages: PositiveInt | None, masks: bool, hint: str) -> None:
    """Checks the options that every sum of hidden messages has.

    Args:
      aggregator: the aggregator to wrap.
      min_messages: the least number of messages in a sum, positive; None = another default.
      masks: whether masks or shares are drawn.
      hint: what the error says if `aggregator` is not a `modular_sum`.

    Raises: ValueError or TypeError for an aggregator other than a `modular_sum`, and for options out of range.
    """
    validate.part("aggregator", aggregator, Aggregator)
    if aggregator.facts.modulus is None or aggregator.view is not None:
        refused = "a sum of numbers" if aggregator.facts.modulus is None else "one that is secure already"
        validate.fail("aggregator", "a modular_sum", refused, hint)
    if aggregator.facts.weighted:
        validate.fail("aggregator", "a modular_sum itself", "one around it", "Put by_examples around the hidden sum.")
    if not isinstance(masks, bool):
        validate.fail("masks", "True or False", masks, error=TypeError)


def check_majority(threshold: int, holders: int) -> None:
    """Checks that the threshold is more than half of a secret's holders.

    Any two sets of `threshold` holders then have a holder in common, who would notice that the server tells them
    different things.

    Raises: ValueError for a threshold of at most half of the holders.
    """
    if 2 * threshold <= holders:
        hint = "The server could tell one half that a client uploaded, and the other that it left."
        validate.fail("threshold", f"more than half of the {holders} holders, for signed", threshold, hint)


def check_survivors_connected(threshold: int, neighbours: int) -> None:
    """Checks that the clients whose messages are in an opened sum are always connected on the circle.

    If the survivors were in two parts without neighbours across, no mask would join the parts, and the server could
    read the sum of each part. In an opened sum, each survivor has at least `threshold` surviving neighbours. If that is
    more than half of its neighbours, it has one on each side. By induction around the circle, all survivors are
    connected.

    Args:
      threshold: the shares that open a secret.
      neighbours: the number of neighbours of each client on the circle.

    Raises: ValueError for a threshold of at most half of the neighbours.

    Guarantees: with a threshold that passes this check, a round that opens lets the server open one sum, in random
    departures of 16 clients; with half of the neighbours as the threshold, some departures open several sums
    (tests/aggregation/secure/test_masks.py::test_the_server_can_open_one_sum_only).
    """
    if 2 * threshold <= neighbours:
        hint = "Clients that leave could cut the circle into parts, and the server would read the sum of each part."
        validate.fail("threshold", f"more than half of the {neighbours} neighbours who hold shares", threshold, hint)


def secure_sum_start(aggregator: Aggregator, update_spec: PyTree, num_slots: int, **least: int | None) -> ModularSum:
    """Returns the carry of the wrapped `modular_sum` before the first message.

    Args:
      aggregator: the `modular_sum`.
      update_spec: shapes and dtypes of a message.
      num_slots: m, the slots of a cohort.
      least: numbers of clients that a sum requires, by the name of the option; None = no requirement.

    Raises: ValueError if a sum requires more clients than the cohort has slots, and for an aggregator that wraps a
      `modular_sum`.
    """
    for name, value in least.items():
        if value is not None and value > num_slots:
            hint = "Every round would be aborted."
            validate.fail(name, f"at most the {num_slots} slots of the cohort", value, hint)
    carry = aggregator.init(update_spec, num_slots)
    if not isinstance(carry, ModularSum):
        validate.fail("aggregator", "a modular_sum itself", "one around it", "Wrap the secure sum instead.")
    return carry


def luck(key: Array, ids: Array, label: str) -> Array:
    """Draws a uniform number in [0, 1) for each client, [c] float32, which depends on its id and not on its slot.

    Args:
      key: of the round.
      ids: [c] int32 client ids.
      label: the name of the random stream.
    """
    key = prng.stream(key, label)
    return jax.vmap(lambda id: jax.random.uniform(prng.client_key(key, id), dtype=jnp.float32))(ids)


def lane_sums(ring: Ring, here: Array, elements: Array) -> Array:
    """Sums the lanes of elements over the clients that a mask marks.

    Args:
      ring: of the elements.
      here: [c] bool, the clients that count.
      elements: [c, words, ...] uint32.

    Returns: [lanes, ...] uint32, as `Ring.lanes` orders them.
    """
    lanes = jnp.stack(ring.lanes(tuple(jnp.moveaxis(elements, 1, 0))), axis=1)
    return tree.where(here, lanes, 0).sum(0, dtype=jnp.uint32)


def words(ring: Ring, lanes: Array) -> Array:
    """Converts sums of lanes, [lanes, ...] uint32, to the element that they represent, [words, ...] uint32."""
    return jnp.stack(ring.gathered(tuple(lanes)))


def released_unless_aborted(
    aborted: Array, update: PyTree, metrics: dict[str, Array], left: Array
) -> tuple[PyTree, dict[str, Array]]:
    """Replaces the aggregate of an aborted round by NaN, which skips the round, and adds `SECURE_SUM_METRICS`.

    Args:
      aborted: [] bool.
      update: the aggregate.
      metrics: of the wrapped sum.
      left: [m] bool, the clients that reported and left during the secure sum.

    Returns: (aggregate, metrics).
    """
    counts = {"aborted_rounds": aborted.astype(jnp.int32), "secure_dropouts": left.sum(dtype=jnp.int32)}
    return jax.tree.map(lambda x: jnp.where(aborted, jnp.nan, x), update), metrics | counts
