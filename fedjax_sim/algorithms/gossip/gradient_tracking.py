"""Gradient tracking: nodes follow the mean gradient of all, and so reach the optimum with a constant rate."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.algorithms.gossip.dpsgd import trained
from fedjax_sim.algorithms.gossip.rounds import node_algorithm
from fedjax_sim.algorithms.gossip.state import GossipOptions, check_average, nodes_of, training
from fedjax_sim.network import Mixing, mixed
from fedjax_sim.types import Algorithm
from fedjax_sim.validate import LossFn, Positive

__all__ = ["gradient_tracking"]


@validate.named_arguments
def gradient_tracking(
    loss_fn: LossFn,
    mixing: Mixing,
    *,
    learning_rate: Positive = 0.1,
    batch_size: int | None = None,
    shuffle: bool = True,
    **options: Unpack[GossipOptions],
) -> Algorithm:
    """DIGing: y_i <- sum_j W_ij y_j + g_i(x_i) - (its last gradient); x_i <- sum_j W_ij x_j - rate y_i.

    The mean of all y_i is always the mean of the last gradients, so the nodes agree on the point where that is zero.

    Args:
      learning_rate: > 0; too large a one diverges, the earlier the nearer an eigenvalue of W is to 1 or to -1. Where
        it is near -1, `network.lazy` helps.
      batch_size: of the gradients, drawn anew in each round; None for all examples, with which the limit is exact.
      mixing, devices, barrier, nonfinite, plan, mesh: as in `dpsgd`. Messages are two models long.

    Guarantees: NumPy's models, and the optimum of quadratics to 1e-5, where DGD stops at a distance of its rate
    (tests/algorithms/gossip/test_gradient_tracking.py::test_tracking_is_exact_where_dgd_stops); under failures of links
    and nodes too (::test_tracking_under_failures).

    References: Nedic, Olshevsky and Shi 2017, section 2 (DIGing); Shi et al. 2015 (EXTRA, the first to be exact); Pu
    and Nedic 2021 with minibatches.
    """
    check_average(mixing)
    gradient = {"num_steps": 1, "batch_size": batch_size, "shuffle": shuffle}
    local, _ = trained(loss_fn, optax.sgd(1.0), gradient)

    def start(params):
        zeros = tree.zeros_like(params)
        return {"model": params, "direction": zeros, "gradient": zeros}

    def moved(own, update):
        return own | {"gradient": jax.tree.map(jnp.negative, update)}

    node = training(local, start, lambda own: own["model"], moved)
    nodes = nodes_of(
        node, mixing, message=lambda own: {"model": own["model"], "direction": own["direction"]}, **options
    )

    def combine(links, done):
        before, after = done.before, done.after
        heard = mixed(links, {name: before[name] for name in ("model", "direction")})
        changed = tree.subtract(after["gradient"], before["gradient"])
        direction = jax.tree.map(jnp.add, heard["direction"], changed)
        model = jax.tree.map(lambda x, y: x - learning_rate * y, heard["model"], direction)
        return {"model": model, "direction": direction, "gradient": after["gradient"]}

    return node_algorithm(nodes, combine)
