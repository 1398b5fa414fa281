"""`by_examples` weighs clients by their examples in secure and modular sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Aggregator, Array, Metric, PyTree, Received

LARGEST_WEIGHT = 2.0**31 - 128  # the largest float32 that is an int32
CAPPED = Metric("capped_weights", "messages whose weight was above max_weight", "count")


def by_examples(aggregator: Aggregator, max_weight: int) -> Aggregator:
    """The aggregate is the mean of integer messages q_i, weighted by examples: sum_i n_i q_i / sum_i n_i.

    Each client multiplies its integers by its weight, and sends the weight with them. The server learns both sums, and
    nothing else of what `aggregator` hides.

    Args:
      aggregator: a `modular_sum`, or a sum that hides the messages of a `modular_sum` (`secure_sum`, `real_secure_sum`,
        `additive_shares`). Its divisor has no effect, since it divides both sums.
      max_weight: W in [1, 2^31 - 1]. n_i is the weight that a client reports (its examples), rounded to a whole number
        in [1, W]. The ring must hold m W times the largest integer of a message; this is checked when the round is
        built.

    Returns: an Aggregator. It has the metrics of `aggregator`, of which `total_weight` still counts messages. Its own
    metric `capped_weights` is the number of messages whose weight was above W. One client moves the mean by an amount
    that depends on the others, so no sensitivity is stated, and `federated` refuses noise with this aggregator.

    Raises: ValueError or TypeError for an aggregator of real numbers, for an aggregator that `by_examples` made, and
      for W out of range.

    Guarantees:
      - NumPy's weighted mean of the clients in the sum, bit for bit the same in every hidden sum; a message of weight n
        counts as n messages of weight 1 (tests/aggregation/secure/test_by_examples.py)
      - a message costs the bytes of one number more (::test_bytes)
      - sums that could wrap around are refused (::test_what_is_refused)

    References: Bonawitz et al. 2019 (federated learning at scale), section 6: sums of (n_i u_i, n_i).

    >>> from fedjax_sim.aggregation import modular_sum
    >>> weighted_sum = by_examples(modular_sum(1.0, modulus_bits=40), max_weight=100)
    >>> weighted_sum.facts.weighted, weighted_sum.facts.max_weight, weighted_sum.facts.sensitivity
    (True, 100, None)
    """
    validate.part("aggregator", aggregator, Aggregator)
    validate.integer("max_weight", max_weight, 1, validate.INT32_MAX)
    if aggregator.facts.modulus is None or aggregator.facts.max_weight != 1:
        refused = "a sum of real numbers" if aggregator.facts.modulus is None else "one by examples already"
        hint = "Real numbers are weighed by aggregation.mean()."
        validate.fail("aggregator", "a modular sum, or one that hides messages around it", refused, hint)

    def pair(messages: PyTree, weights: Array | jax.ShapeDtypeStruct) -> dict[str, PyTree]:
        return {"weighted": messages, "weight": weights}

    def pair_spec(update_spec: PyTree) -> dict[str, PyTree]:
        return pair(update_spec, jax.ShapeDtypeStruct((), jnp.int32))

    def whole_weights(weights: Array) -> Array:
        whole = jnp.clip(jnp.round(weights), 1, LARGEST_WEIGHT).astype(jnp.int32)
        return jnp.minimum(whole, max_weight)

    def weighted_messages(received: Received) -> Received:
        """Returns what clients send: their integers times their weight, and the weight."""
        weights = whole_weights(received.weights)
        weighted = jax.tree.map(lambda x: x * weights.reshape(-1, *[1] * (x.ndim - 1)), received.updates)
        return received._replace(updates=pair(weighted, weights))

    def init(update_spec, num_slots):
        return {"sum": aggregator.init(pair_spec(update_spec), num_slots), "capped": jnp.zeros((), jnp.int32)}

    def accumulate(key, round, carry, received):
        num_capped = (received.weights > max_weight).sum(dtype=jnp.int32)
        sums = aggregator.accumulate(key, round, carry["sum"], weighted_messages(received))
        return {"sum": sums, "capped": carry["capped"] + num_capped}

    def finalize(key, round, carry):
        sums, metrics = aggregator.finalize(key, round, carry["sum"])
        # The divisor of `aggregator` divides both sums, so it cancels. An aborted sum is NaN, and stays NaN.
        total_weight = sums["weight"]
        divisor = jnp.where(total_weight == 0, 1, total_weight)
        mean = jax.tree.map(lambda x: x / divisor, sums["weighted"])
        return mean, metrics | {"capped_weights": carry["capped"]}

    inner_view = aggregator.view

    def view(key, round, received):
        assert inner_view is not None, "only then it is stated"
        return inner_view(key, round, weighted_messages(received))

    def of_pairs(wire):
        """The same bytes function, for messages that carry a weight; None where there is none."""
        return wire and (lambda update_spec, *others: wire(pair_spec(update_spec), *others))

    weighted = aggregator._replace(init=init, accumulate=accumulate, finalize=finalize, view=inner_view and view)
    return weighted.stating(
        sensitivity=None,
        weighted=True,
        max_weight=max_weight,
        metrics=(*aggregator.facts.metrics, CAPPED),
        wire=of_pairs(aggregator.facts.wire),
        wire_down=of_pairs(aggregator.facts.wire_down),
    )
