"""Push-sum averages over directed graphs, where columns of the mixing matrix add up to 1 and rows need not."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import engine, tree, validate
from fedjax_sim.algorithms.gossip.dpsgd import NodeOptions, trained
from fedjax_sim.algorithms.gossip.rounds import node_algorithm
from fedjax_sim.algorithms.gossip.state import check_average, nodes_of, training
from fedjax_sim.network import Mixing, hears_back, mixed
from fedjax_sim.types import Algorithm, PyTree
from fedjax_sim.validate import LossFn


@validate.named_arguments
def push_sum(
    loss_fn: LossFn,
    mixing: Mixing,
    optimizer: optax.GradientTransformation,
    **options: Unpack[NodeOptions],
) -> Algorithm:
    """Makes stochastic gradient push: each node has a vector x_i and a weight w_i, and trains from x_i / w_i.

    Nodes pass on shares of both. A round is x <- A (x + u(x / w)), w <- A w, where the columns of A add up to 1 and
    w = 1 at the start. So the sums of all x_i and of all w_i are kept by mixing, and x_i / w_i approaches the average
    on every strongly connected graph. A round is skipped if a weight would underflow or a model would not be finite
    after it.

    Args:
      loss_fn: as in `client.local_sgd`.
      mixing: keeps sums; `network.push` of a directed graph, `network.epidemic`, or any mixing that `dpsgd` takes.
      optimizer, num_steps, num_epochs, batch_size, shuffle, devices, barrier, nonfinite, plan, mesh: as in `dpsgd`.
        A message is a model, in float32 or wider, and one more number. A local update u moves x_i / w_i by u / w_i:
        where weights get small, as with `epidemic`, take a smaller rate.

    Returns: an Algorithm with the info of `dpsgd`. `personal` is x_i / w_i; `params` is the sum of all x_i divided by
    the sum of all w_i.

    Raises: ValueError as `dpsgd`, and for a graph with nodes that send and do not receive: their weights would fall
    to 0.

    Guarantees: the models are those of NumPy, and nodes reach the average on directed graphs, where a mean of received
    models would count some nodes more
    (tests/algorithms/gossip/test_push_sum.py::test_numpy, ::test_the_average_of_a_directed_graph), of bfloat16 models
    too (::test_narrow_models_keep_their_average); a model that is not finite is never kept
    (::test_weights_that_vanish).

    References: Kempe, Dobra and Gehrke 2003; Nedic and Olshevsky 2015 (subgradient-push); Assran et al. 2019,
    algorithm 1.
    """
    check_average(mixing, constants=False)
    if not hears_back(mixing.graph):
        hint = "Weights of nodes that give and do not get fall to 0. Add edges that lead back."
        validate.fail("mixing", "a graph in which every node can be reached from all that it reaches", "another", hint)
    local, node_options = trained(loss_fn, optimizer, options)

    def models(states: PyTree) -> PyTree:
        weight = states["weight"]

        def leaf(x):
            return x / weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim)).astype(x.dtype)

        return jax.tree.map(leaf, states["sum"])

    def start(params):
        # Sums are in float32 at least: a sum in 16 bits is rounded in every round, which would move the average.
        sums = tree.widened(params)
        return {"sum": sums, "weight": jnp.ones((), tree.common_dtype(jnp.float32, *jax.tree.leaves(sums)))}

    def add_update(state, update):
        return state | {"sum": jax.tree.map(lambda x, u: (x + u).astype(x.dtype), state["sum"], update)}

    node = training(local, start, models, add_update)
    nodes = nodes_of(node, mixing, models=models, message=lambda state: state, **node_options)

    def combine(links, trained_nodes):
        rows = mixed(links, trained_nodes.after)
        weight = rows["weight"]
        # A weight that underflows becomes NaN, and `finish` skips a round whose states are not finite.
        return rows | {"weight": jnp.where(weight >= jnp.finfo(weight.dtype).tiny, weight, jnp.nan)}

    algorithm = node_algorithm(nodes, combine)

    @engine.reproducible
    def mean(states, like):
        total_weight = states["weight"].sum()
        return tree.cast_like(jax.tree.map(lambda x: x.sum(0) / total_weight, states["sum"]), like)

    def params(state):
        ids = jnp.arange(mixing.graph.population_size, dtype=jnp.int32)
        return mean(engine.take(state.star.clients, ids)[0], state.star.server)

    return algorithm._replace(params=params)
