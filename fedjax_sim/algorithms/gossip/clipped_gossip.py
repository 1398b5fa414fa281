"""Robust gossip: nodes clip the difference between a neighbour's message and their own model; neighbours may attack."""

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
    """Makes ClippedGossip: nodes train, and then mix with neighbours whose messages they clip.

    Node i trains, y_i = x_i + u_i(x_i), and then mixes, x_i <- y_i + sum_j W_ij clip(y_j - y_i, tau_i), where the clip
    shortens a difference to the length tau_i.

    Args:
      loss_fn: as in `client.local_sgd`.
      mixing: symmetric. With a radius that clips nothing this is `dpsgd` in the form "adapt_then_combine".
      radius: tau, the same for all nodes; None if `num_byzantine` is given.
      num_byzantine: b, how many of a node's neighbours may attack; None if `radius` is given. Then tau_i^2 is the
        weighted sum of the squared distances of all neighbours except the b farthest, divided by the weight of these b.
      attack: what attackers send in place of y, as in `adversary.corrupted`; None = nobody attacks.
      who: (key, ids) -> [N] bool, which nodes attack. Attackers train and mix like others, but send another message.
        None without an attack.
      optimizer, num_steps, num_epochs, batch_size, shuffle, devices, barrier, nonfinite, plan, mesh: as in `dpsgd`.

    Returns: an Algorithm with the info of `dpsgd`. Its `params` and `consensus_distance` leave out the nodes that
    attack in the round.

    Raises: ValueError for a mixing that is not symmetric, unless exactly one of `radius` and `num_byzantine` is given,
    and for an attack without attackers.

    Guarantees: the models are those of NumPy (tests/algorithms/gossip/test_clipped_gossip.py::test_numpy); honest nodes
    stay together where attackers move plain gossip away (::test_attackers_do_little); with a large radius it is D-PSGD
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

    def apply(key, broadcast, state, data):
        report, _ = local.apply(key, state["model"], (), data)
        model = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), state["model"], report.update)
        return report._replace(update=model), {"model": model}

    node = local._replace(init=lambda params: {"model": params}, apply=apply)
    rows = kept_by_node() if attack is None or who is None else corrupted(kept_by_node(), attack, who)
    nodes = nodes_of(node, mixing, aggregator=rows, attackers=who, **node_options)

    def combine(links, trained_nodes):
        own = trained_nodes.after["model"]
        has_message = trained_nodes.sent["weights"] > 0
        sent = tree.where(has_message, trained_nodes.sent["updates"], own)  # who could not train sends the model it had
        # An attacker's message may be unusable, such as NaN: then its neighbours mix without it.
        is_lost = trained_nodes.arrived & ~has_message
        links = links._replace(weights=jnp.where(is_lost[links.neighbours], 0, links.weights))
        lengths = distances(links, own, sent)
        if radius is not None:
            limit = radius
        else:
            assert num_byzantine is not None, "without a radius it is given, as checked above"
            limit = _adaptive_radius(links.weights, lengths, num_byzantine)[:, None]
        # A clip of the difference is a smaller weight of the link; equal models have distance 0.
        factors = jnp.minimum(1, limit / jnp.maximum(lengths, jnp.finfo(jnp.float32).tiny))
        return {"model": mixed(links._replace(weights=links.weights * factors), own, sent)}

    return node_algorithm(nodes, combine)


def distances(links: Links, own: PyTree, sent: PyTree) -> Array:
    """Computes the distance |s_j - x_i| of each neighbour's message s_j from a node's own model x_i, [N, k].

    Args:
      links: of the round, with the neighbours of each node.
      own: the nodes' models x, leaves [N, ...].
      sent: their messages s, leaves [N, ...].
    """

    # One neighbour of every node at a time: all differences at once would take k times the memory of the models.
    def column(ids):
        def leaf(x, y):
            difference = (y[ids] - x).astype(tree.at_least_float32(x.dtype)).reshape(x.shape[0], -1)
            return (difference * difference).sum(1)

        return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(leaf, own, sent))))

    return jax.lax.map(column, links.neighbours.T).T


def _adaptive_radius(weights: Array, lengths: Array, num_byzantine: int) -> Array:
    """The clipping radius tau_i of each node, [N]; 0 for a node with no more neighbours than may attack.

    Args:
      weights: [N, k] of the links; 0 = no link.
      lengths: [N, k] `distances`.
    """
    lengths = jnp.where(weights > 0, lengths, -1)  # places without a link come last in the order
    rank = jnp.argsort(jnp.argsort(-lengths, axis=1, stable=True), axis=1)
    is_farthest = (rank < num_byzantine) & (weights > 0)
    squared_distances = jnp.where(is_farthest | (weights == 0), 0, weights * (lengths * lengths)).sum(1)
    farthest_weight = jnp.where(is_farthest, weights, 0).sum(1)
    return jnp.sqrt(squared_distances / jnp.maximum(farthest_weight, jnp.finfo(jnp.float32).tiny))
