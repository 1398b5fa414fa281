"""Gradient tracking: nodes track the mean gradient of all nodes, and so reach the optimum with a constant rate."""

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
    """Makes gradient tracking (DIGing): each node steps along a direction that tracks the mean gradient of all nodes.

    A round is y_i <- sum_j W_ij y_j + g_i(x_i) - (node i's gradient of the round before); then
    x_i <- sum_j W_ij x_j - rate y_i. The mean of all directions y_i always is the mean of the last gradients, so the
    nodes agree on the point where this mean is zero.

    Args:
      loss_fn: as in `client.local_sgd`.
      learning_rate: > 0. A rate that is too large diverges. The largest stable rate is lower, the nearer an eigenvalue
        of W is to 1 or to -1; where it is near -1, `network.lazy` helps.
      batch_size: of the gradients, drawn anew in each round; None for all examples, with which the limit is exact.
      shuffle: as in `client.work`.
      mixing, devices, barrier, nonfinite, plan, mesh: as in `dpsgd`. Messages are two models long.

    Returns: an Algorithm with the info of `dpsgd`.

    Guarantees: the models are those of NumPy, and reach the optimum of quadratics to 1e-5, where DGD keeps a distance
    of the order of its rate
    (tests/algorithms/gossip/test_gradient_tracking.py::test_tracking_is_exact_where_dgd_stops); under failures of links
    and nodes too (::test_tracking_under_failures).

    References: Nedic, Olshevsky and Shi 2017, section 2 (DIGing); Shi et al. 2015 (EXTRA, the first to be exact); Pu
    and Nedic 2021 with minibatches.
    """
    check_average(mixing)
    # One step of SGD with rate 1 moves the model by minus the gradient.
    one_gradient = {"num_steps": 1, "batch_size": batch_size, "shuffle": shuffle}
    local, _ = trained(loss_fn, optax.sgd(1.0), one_gradient)

    def start(params):
        zeros = tree.zeros_like(params)
        return {"model": params, "direction": zeros, "gradient": zeros}

    def keep_gradient(state, update):
        return state | {"gradient": jax.tree.map(jnp.negative, update)}

    node = training(local, start, lambda state: state["model"], keep_gradient)
    nodes = nodes_of(
        node, mixing, message=lambda state: {"model": state["model"], "direction": state["direction"]}, **options
    )

    def combine(links, trained_nodes):
        before = trained_nodes.before
        after = trained_nodes.after
        mixed_states = mixed(links, {name: before[name] for name in ("model", "direction")})
        gradient_change = tree.subtract(after["gradient"], before["gradient"])
        direction = jax.tree.map(jnp.add, mixed_states["direction"], gradient_change)
        model = jax.tree.map(lambda x, y: x - learning_rate * y, mixed_states["model"], direction)
        return {"model": model, "direction": direction, "gradient": after["gradient"]}

    return node_algorithm(nodes, combine)
