"""Secure and modular sums in which clients count by their examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, validate
from fedjax_sim.types import Aggregator, Array, Metric, PyTree, Received

__all__ = ["by_examples"]

LARGEST_WEIGHT = 2.0**31 - 128  # the largest float32 that is an int32
CAPPED = Metric("capped_weights", "messages whose weight was above max_weight", "count")


def by_examples(aggregator: Aggregator, max_weight: int) -> Aggregator:
    """Clients count by their examples in a sum of integers: sum_i n_i q_i / sum_i n_i.

    Each client sends its integers times its weight, and the weight beside them. The server gets both sums, and nothing
    else that `aggregator` hides.

    Args:
      aggregator: a `modular_sum`, or a sum that hides messages around one (`secure_sum`, `real_secure_sum`,
        `additive_shares`); its divisor does not matter.
      max_weight: W in [1, 2^31 - 1]; n_i is the weight that a client reports (its examples), rounded to a whole number
        in [1, W]. The ring has to hold m W times the largest integer of a message, which is checked with the round.

    Returns: an Aggregator with the metrics of the given one, whose `total_weight` counts messages, and
    `capped_weights`, the messages whose weight was above W. One client moves the mean by an amount that depends on the
    others, so no sensitivity is stated, and noise is refused beside it.

    Raises: ValueError, TypeError for an aggregator of real numbers, or with such weights already, and for W out of
    range.

    Guarantees: NumPy's weighted mean of those who stay, bit for bit the same in every hidden sum, with one message of
    weight n as n messages of weight 1 (tests/aggregation/secure/test_by_examples.py); the bytes of one number more
    (::test_bytes); sums that could wrap are refused (::test_what_is_refused).

    References: Bonawitz et al. 2019 (federated learning at scale), section 6: sums of (n_i u_i, n_i).

    >>> from fedjax_sim.aggregation import modular_sum
    >>> made = by_examples(modular_sum(1.0, modulus_bits=40), max_weight=100)
    >>> made.facts.weighted, made.facts.max_weight, made.facts.sensitivity
    (True, 100, None)
    """
    validate.part("aggregator", aggregator, Aggregator)
    validate.integer("max_weight", max_weight, 1, validate.INT32_MAX)
    if aggregator.facts.modulus is None or aggregator.facts.max_weight != 1:
        shown = "a sum of real numbers" if aggregator.facts.modulus is None else "one by examples already"
        hint = "Real numbers are weighed by aggregation.mean()."
        validate.fail("aggregator", "a modular sum, or one that hides messages around it", shown, hint)

    def pair(messages: PyTree, weights: Array) -> dict[str, PyTree]:
        return {"weighted": messages, "weight": weights}

    def paired(update_spec: PyTree) -> dict[str, PyTree]:
        return pair(update_spec, jax.ShapeDtypeStruct((), jnp.int32))

    def whole_weights(weights: Array) -> Array:
        whole = jnp.clip(jnp.round(weights), 1, LARGEST_WEIGHT).astype(jnp.int32)
        return jnp.minimum(whole, max_weight)

    def sent(received: Received) -> Received:
        weights = whole_weights(received.weights)
        weighted = jax.tree.map(lambda x: x * weights.reshape(-1, *[1] * (x.ndim - 1)), received.updates)
        return received._replace(updates=pair(weighted, weights))

    def init(update_spec, num_slots):
        return {"sum": aggregator.init(paired(update_spec), num_slots), "capped": jnp.zeros((), jnp.int32)}

    def accumulate(key, round, carry, received):
        capped = (received.weights > max_weight).sum(dtype=jnp.int32)
        total = aggregator.accumulate(key, round, carry["sum"], sent(received))
        return {"sum": total, "capped": carry["capped"] + capped}

    def finalize(key, round, carry):
        sums, metrics = aggregator.finalize(key, round, carry["sum"])
        total = sums["weight"]
        divisor = jnp.where(total == 0, 1, total)  # NaN where the sum was aborted
        mean = jax.tree.map(lambda x: engine.divide(x, jnp.broadcast_to(divisor, x.shape)), sums["weighted"])
        return mean, metrics | {"capped_weights": carry["capped"]}

    def view(key, round, received):
        return aggregator.view(key, round, sent(received))

    def wired(wire):
        return wire and (lambda update_spec, *rest: wire(paired(update_spec), *rest))

    made = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, view=aggregator.view and view)
    return made.stating(
        sensitivity=None,
        weighted=True,
        max_weight=max_weight,
        metrics=(*aggregator.facts.metrics, CAPPED),
        wire=wired(aggregator.facts.wire),
        wire_down=wired(aggregator.facts.wire_down),
    )
