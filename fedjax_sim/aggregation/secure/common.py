"""What sums that hide their messages share: what they wrap, who leaves them, sums of elements, and aborted rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import prng, tree, validate
from fedjax_sim.aggregation.secure.modular import ModularSum
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.types import Aggregator, Array, Metric, PyTree
from fedjax_sim.validate import PositiveInt

__all__ = [
    "SECURE_SUM_METRICS",
    "check_majority",
    "check_secure_sum_options",
    "check_survivors_connected",
    "lane_sums",
    "luck",
    "released_unless_aborted",
    "secure_sum_start",
    "words",
]

SECURE_SUM_METRICS = (
    Metric("aborted_rounds", "secure sums aborted", "count"),
    Metric("secure_dropouts", "clients that left during secure aggregation", "count"),
)


@validate.named_arguments
def check_secure_sum_options(aggregator: Aggregator, min_messages: PositiveInt | None, masks: bool, hint: str) -> None:
    """Raises ValueError or TypeError for what no `modular_sum` can be wrapped with."""
    validate.part("aggregator", aggregator, Aggregator)
    if aggregator.facts.modulus is None or aggregator.view is not None:
        found = "a sum of numbers" if aggregator.facts.modulus is None else "one that is secure already"
        validate.fail("aggregator", "a modular_sum", found, hint)
    if aggregator.facts.weighted:
        validate.fail("aggregator", "a modular_sum itself", "one around it", "Put by_examples around the hidden sum.")
    if not isinstance(masks, bool):
        validate.fail("masks", "True or False", masks, error=TypeError)


def check_majority(threshold: int, holders: int) -> None:
    """Raises ValueError unless two sets of so many holders of a secret must share one, who would notice a lie."""
    if 2 * threshold <= holders:
        hint = "The server could tell one half that a client uploaded, and the other that it left."
        validate.fail("threshold", f"more than half of the {holders} holders, for signed", threshold, hint)


def check_survivors_connected(threshold: int, neighbours: int) -> None:
    """Raises ValueError unless the clients that stay in an opened sum on a circle are always connected.

    Each of them has `threshold` neighbours left. If that is more than half, there is one to each side of it, within the
    reach of its neighbours, and so on around the circle. Survivors in two parts would share no mask between the parts,
    and the server could read the sum of each.

    Guarantees: tests/aggregation/secure/test_masks.py::test_the_server_can_open_one_sum_only.
    """
    if 2 * threshold <= neighbours:
        hint = "Clients that leave could cut the circle into parts, and the server would read the sum of each part."
        validate.fail("threshold", f"more than half of the {neighbours} neighbours who hold shares", threshold, hint)


def secure_sum_start(aggregator: Aggregator, update_spec: PyTree, num_slots: int, **least: int | None) -> ModularSum:
    """The carry of the wrapped `modular_sum`.

    Args:
      least: numbers of clients that a sum needs, by the option's name.

    Raises: ValueError where one is above the slots of a cohort, and for an aggregator around a `modular_sum`.
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
    """[c] float32, uniform in [0, 1): each client's own draw, whatever its slot."""
    key = prng.stream(key, label)
    return jax.vmap(lambda id: jax.random.uniform(prng.client_key(key, id), dtype=jnp.float32))(ids)


def lane_sums(ring: Ring, here: Array, elements: Array) -> Array:
    """[lanes, ...] uint32: sums of the lanes of elements [c, words, ...] over those who are here, [c] bool."""
    lanes = jnp.stack(ring.lanes(tuple(jnp.moveaxis(elements, 1, 0))), axis=1)
    return tree.where(here, lanes, 0).sum(0, dtype=jnp.uint32)


def words(ring: Ring, lanes: Array) -> Array:
    """[words, ...] uint32: the element that sums of lanes [lanes, ...] stand for."""
    return jnp.stack(ring.gathered(tuple(lanes)))


def released_unless_aborted(
    aborted: Array, update: PyTree, metrics: dict[str, Array], left: Array
) -> tuple[PyTree, dict[str, Array]]:
    """The aggregate, NaN where the round is aborted, and `metrics` with `SECURE_SUM_METRICS`; left: [m] bool, who
    did."""
    counts = {"aborted_rounds": aborted.astype(jnp.int32), "secure_dropouts": left.sum(dtype=jnp.int32)}
    return jax.tree.map(lambda x: jnp.where(aborted, jnp.nan, x), update), metrics | counts
