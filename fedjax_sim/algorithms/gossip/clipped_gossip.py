"""Robust gossip: nodes clip how far a neighbour's message is from their own model, and some neighbours attack."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.adversary import Alone, Omniscient, Together, corrupted
from fedjax_sim.algorithms.gossip.dpsgd import NodeOptions, trained
from fedjax_sim.algorithms.gossip.rounds import node_algorithm
from fedjax_sim.algorithms.gossip.state import check_average, kept_by_node, nodes_of
from fedjax_sim.network import Links, Mixing, mixed
from fedjax_sim.types import Algorithm, Array, Attackers, PyTree
from fedjax_sim.validate import LossFn

__all__ = ["clipped_gossip", "distances"]


@validate.named_arguments
def clipped_gossip(
    loss_fn: LossFn,
    mixing: Mixing,
    optimizer: optax.GradientTransformation,
    *,
    radius: float | None = None,
    num_byzantine: int | None = None,
    attack: Alone | Omniscient | Together | None = None,
    who: Attackers | None = None,
    **options: Unpack[NodeOptions],
) -> Algorithm:
    """ClippedGossip: y_i = x_i + u_i(x_i), then x_i <- y_i + sum_j W_ij clip(y_j - y_i, tau_i).

    Args:
      mixing: symmetric; with a radius that clips nothing this is `dpsgd`, "adapt_then_combine".
      radius: tau, the same for all nodes; or
      num_byzantine: b, how many of a node's neighbours may attack. Then tau_i^2 is the weighted sum of the squared
        distances of all neighbours but the b farthest, over the weight of those b.
      attack: what attackers send instead of y, as in `adversary.corrupted`; None = nobody attacks.
      who: (key, ids) -> [N] bool: who attacks. Attackers train and mix like others, and send something else.
      optimizer, num_steps, num_epochs, batch_size, shuffle, devices, barrier, nonfinite, plan, mesh: as in `dpsgd`.

    Returns: an Algorithm whose `params` and `consensus_distance` leave attackers out (those of the round).

    Raises: ValueError for a mixing that is not symmetric, unless exactly one of `radius` and `num_byzantine` is given,
    and for an attack without attackers.

    Guarantees: NumPy's models (tests/algorithms/gossip/test_clipped_gossip.py::test_numpy); honest nodes stay together
    where plain gossip is led away (::test_attackers_do_little); a large radius is D-PSGD
    (::test_a_large_radius_is_gossip).

    References: He, Karimireddy and Jaggi 2022 (Byzantine-robust decentralized learning via ClippedGossip), algorithm 1
    and the clipping radius of its section 4; without momentum of the gradients.
    """
    check_average(mixing)
    if not mixing.symmetric:
        hint = "What a clip takes from one it must take from the other: metropolis."
        validate.fail("mixing", "a symmetric one", "another", hint)
    if (radius is None) == (num_byzantine is None):
        validate.fail("radius, num_byzantine", "exactly one of the two", (radius, num_byzantine))
    if radius is not None:
        validate.positive("radius", radius)
    else:
        validate.integer("num_byzantine", num_byzantine, 1)
    if (attack is None) != (who is None):
        validate.fail("attack, who", "both or none", (attack, who), "Who attacks, and what they send, belong together.")
    local, node_options = trained(loss_fn, optimizer, options)

    def apply(key, broadcast, own, data):
        report, _ = local.apply(key, own["model"], (), data)
        model = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), own["model"], report.update)
        return report._replace(update=model), {"model": model}

    node = local._replace(init=lambda params: {"model": params}, apply=apply)
    rows = kept_by_node() if attack is None else corrupted(kept_by_node(), attack, who)
    nodes = nodes_of(node, mixing, aggregator=rows, attackers=who, **node_options)

    def combine(links, done):
        own, there = done.after["model"], done.sent["weights"] > 0
        sent = tree.where(there, done.sent["updates"], own)  # who could not train sends the model that it had
        lost = done.arrived & ~there  # what an attacker sent and nobody could read
        links = links._replace(weights=jnp.where(lost[links.neighbours], 0, links.weights))
        away = distances(links, own, sent)
        limit = radius if radius is not None else _adaptive(links.weights, away, num_byzantine)[:, None]
        factors = jnp.minimum(1, limit / jnp.maximum(away, jnp.finfo(jnp.float32).tiny))
        return {"model": mixed(links._replace(weights=links.weights * factors), own, sent)}

    return node_algorithm(nodes, combine)


def distances(links: Links, own: PyTree, sent: PyTree) -> Array:
    """[N, k] |s_j - x_i| of each node's neighbours, from what they have and what they send, leaves [N, ...]."""

    def column(ids):
        def leaf(x, y):
            away = (y[ids] - x).astype(tree.at_least_float32(x.dtype)).reshape(x.shape[0], -1)
            return (away * away).sum(1)

        return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(leaf, own, sent))))

    return jax.lax.map(column, links.neighbours.T).T


def _adaptive(weights: Array, away: Array, num_byzantine: int) -> Array:
    """[N] the clipping radius of each node; 0 where it has no more neighbours than may attack."""
    away = jnp.where(weights > 0, away, -1)
    rank = jnp.argsort(jnp.argsort(-away, axis=1, stable=True), axis=1)
    far = (rank < num_byzantine) & (weights > 0)
    spread = jnp.where(far | (weights == 0), 0, weights * (away * away)).sum(1)
    heavy = jnp.where(far, weights, 0).sum(1)
    return jnp.sqrt(spread / jnp.maximum(heavy, jnp.finfo(jnp.float32).tiny))
