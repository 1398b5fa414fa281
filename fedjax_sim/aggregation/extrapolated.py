"""FedExP's aggregator: a mean, extrapolated by a factor that grows as the updates differ."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.aggregation.linear import mean
from fedjax_sim.aggregation.rows import squared_norms
from fedjax_sim.types import Aggregator, AggregatorFacts, Metric
from fedjax_sim.validate import Positive

__all__ = ["extrapolated"]


@validate.named_arguments
def extrapolated(*, epsilon: Positive = 1e-3, weighting: str = "examples") -> Aggregator:
    """FedExP: the mean update times max(1, mean |u_i|^2 / (2 (|mean u_i|^2 + epsilon))).

    Where updates point in different directions their mean is short and a longer step is safe; where they agree it is
    the mean. The norms are computed from the messages as they arrive, after any transform, so nothing more is sent;
    `federated` refuses integers, whose unit is not that of epsilon. Iterates may oscillate from round to round: see
    `server.last_two`.

    Args:
      epsilon: positive, in the unit of squared updates; from mean |u_i|^2 / 2 on, no step is extrapolated.
      weighting: of both means, "examples" or "uniform", as in `mean`; the paper's is uniform.

    Returns: an Aggregator; the metric `extrapolation` is the factor (the paper's eta_g).

    Guarantees: matches the paper's rule in NumPy (tests/oracles/test_fedexp.py::test_matches_the_paper); never shorter
    than the mean (::test_never_shorter_than_the_mean); the same bits for any chunk and devices (::test_same_bits).
    Sensitivity is unbounded. A squared norm that overflows skips the round, which is counted.

    References: Jhunjhunwala, Wang and Joshi 2023 (FedExP), equation 4 and algorithm 1.
    """
    rule = mean(weighting=weighting)

    def init(update_spec, num_slots):
        return rule.init((update_spec, jax.ShapeDtypeStruct((), jnp.float32)), num_slots)

    def accumulate(key, cohort, carry, received):
        squares = squared_norms(received.updates)
        return rule.accumulate(key, cohort, carry, received._replace(updates=(received.updates, squares)))

    def finalize(key, cohort, carry):
        (update, square), metrics = rule.finalize(key, cohort, carry)
        zero = engine.hidden_zero(square)
        update, square = engine.rounded_here((update, square), zero)
        (length,) = squared_norms(jax.tree.map(lambda x: x[None], update), zero)
        factor = jnp.maximum(1, square / (2 * (length + epsilon)))
        return tree.scaled(update, factor), metrics | {"extrapolation": factor}

    stretch = Metric("extrapolation", "mean stretch of the server's step", pooled="mean")
    facts = AggregatorFacts(weighted=rule.facts.weighted, homogeneous=False, metrics=(stretch,))
    return Aggregator(init, accumulate, finalize, facts)
