"""FedExP's aggregator: a mean update, extrapolated by a factor that grows as the updates differ."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.aggregation.linear import mean
from fedjax_sim.aggregation.rows import squared_norms
from fedjax_sim.types import Aggregator, AggregatorFacts, Metric
from fedjax_sim.validate import Positive


@validate.named_arguments
def extrapolated(*, epsilon: Positive = 1e-3, weighting: str = "examples") -> Aggregator:
    """The aggregate is the mean update, extrapolated by FedExP's adaptive factor of at least 1.

    With updates u_i, the aggregate is

        mean(u) * max(1, mean |u_i|^2 / (2 (|mean u_i|^2 + epsilon)))

    Where updates point in different directions their mean is short, and a longer server step is safe. Where updates
    agree the factor is 1. The norms are computed at the server, from the messages as they arrive after any transform,
    so clients send nothing more. Iterates may oscillate from round to round: see `server.last_two`.

    Args:
      epsilon: positive, in the unit of squared updates. If epsilon is at least mean |u_i|^2 / 2, no step is
        extrapolated.
      weighting: of both means, "examples" or "uniform", as in `mean`; the paper's is uniform.

    Returns: an Aggregator; the metric `extrapolation` is the factor (the paper's eta_g). `federated` refuses messages
    of integers, whose unit is not that of epsilon.

    Guarantees:
      - the aggregate matches the paper's rule in NumPy (tests/oracles/test_fedexp.py::test_matches_the_paper)
      - the aggregate is never shorter than the mean (::test_never_shorter_than_the_mean)
      - the bits are the same for any chunk size and any number of devices (::test_same_bits)
      - sensitivity is unbounded; a squared norm that overflows skips the round, which is counted

    References: Jhunjhunwala, Wang and Joshi 2023 (FedExP), equation 4 and algorithm 1.
    """
    mean_rule = mean(weighting=weighting)

    # The squared norm of each message is averaged as one more leaf of the update, with the same weights.
    def init(update_spec, num_slots):
        return mean_rule.init((update_spec, jax.ShapeDtypeStruct((), jnp.float32)), num_slots)

    def accumulate(key, cohort, carry, received):
        squares = squared_norms(received.updates)
        with_squares = received._replace(updates=(received.updates, squares))
        return mean_rule.accumulate(key, cohort, carry, with_squares)

    def finalize(key, cohort, carry):
        (mean_update, mean_square), metrics = mean_rule.finalize(key, cohort, carry)
        one_row = jax.tree.map(lambda x: x[None], mean_update)
        (square_of_mean,) = squared_norms(one_row)
        factor = jnp.maximum(1, mean_square / (2 * (square_of_mean + epsilon)))
        return tree.scaled(mean_update, factor), metrics | {"extrapolation": factor}

    extrapolation = Metric("extrapolation", "mean stretch of the server's step", pooled="mean")
    facts = AggregatorFacts(weighted=mean_rule.facts.weighted, homogeneous=False, metrics=(extrapolation,))
    return Aggregator(init, accumulate, finalize, facts)
