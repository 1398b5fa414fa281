"""Push-sum: averages over directed graphs, where columns of the mixing matrix add up to 1 and rows need not."""

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

__all__ = ["push_sum"]


@validate.named_arguments
def push_sum(
    loss_fn: LossFn,
    mixing: Mixing,
    optimizer: optax.GradientTransformation,
    **options: Unpack[NodeOptions],
) -> Algorithm:
    """Stochastic gradient push: nodes give shares of a sum x_i and of a weight w_i, and train from x_i / w_i.

    x <- A (x + u(x / w)), w <- A w, with the columns of A adding up to 1 and w = 1 at the start: sums are kept, and so
    x_i / w_i approaches the average on every strongly connected graph. A round after which a weight would be below what
    floats hold, or a model not finite, is skipped.

    Args:
      mixing: keeps sums; `network.push` of a directed graph, `network.epidemic`, or any that `dpsgd` takes.
      optimizer, num_steps, num_epochs, batch_size, shuffle, devices, barrier, nonfinite, plan, mesh: as in `dpsgd`.
        Messages are a model, in float32 or wider, and one number more. A step moves x_i / w_i by 1 / w_i of it: where
        weights get small, as with `epidemic`, take a smaller rate.

    Returns: an Algorithm. `personal` is x_i / w_i; `params` is the sum of all x_i over that of all w_i.

    Raises: ValueError also for a graph with nodes that give and do not get: their weights would fall to 0.

    Guarantees: NumPy's models, and the average where taking shares is biased
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

    def models(own: PyTree) -> PyTree:
        weight = own["weight"]

        def leaf(x):
            return x / weight.reshape(weight.shape + (1,) * (x.ndim - weight.ndim)).astype(x.dtype)

        return jax.tree.map(leaf, own["sum"])

    def start(params):
        sums = tree.widened(params)  # many roundings of a narrow sum, and one of its weight, would move the average
        return {"sum": sums, "weight": jnp.ones((), tree.common_dtype(jnp.float32, *jax.tree.leaves(sums)))}

    def moved(own, update):
        return own | {"sum": jax.tree.map(lambda x, u: (x + u).astype(x.dtype), own["sum"], update)}

    node = training(local, start, models, moved)
    nodes = nodes_of(node, mixing, models=models, message=lambda own: own, **node_options)

    def combined(links, done):
        rows = mixed(links, done.after)
        weight = rows["weight"]
        return rows | {"weight": jnp.where(weight >= jnp.finfo(weight.dtype).tiny, weight, jnp.nan)}  # skips the round

    made = node_algorithm(nodes, combined)

    @engine.steady
    def mean(own, like):
        total = own["weight"].sum()
        return tree.cast(jax.tree.map(lambda x: x.sum(0) / total, own["sum"]), like)

    def params(state):
        ids = jnp.arange(mixing.graph.population_size, dtype=jnp.int32)
        return mean(engine.take(state.star.clients, ids)[0], state.star.server)

    return made._replace(params=params)
