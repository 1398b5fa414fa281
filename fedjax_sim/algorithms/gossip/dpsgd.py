"""Learning without a server: nodes train from their own models and mix them with their neighbours'.

Notation: x_i is node i's model, W the mixing matrix, f_i node i's mean loss, N the number of nodes. All of these
minimise (1/N) sum_i f_i, in which nodes count alike whatever they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import client, engine, validate
from fedjax_sim.algorithms.gossip.rounds import finish, links_of, mean_model, node_algorithm, own_models, train
from fedjax_sim.algorithms.gossip.state import NODE_METRICS, GossipOptions, begun, check_average, nodes_of, training
from fedjax_sim.network import Mixing, mixed
from fedjax_sim.types import Algorithm, ClientUpdate, Evaluated, PyTree, Work
from fedjax_sim.validate import LossFn, Positive

__all__ = ["FORMS", "NodeOptions", "consensus", "dgd", "dpsgd", "from_model", "trained"]

FORMS = ("combine_while_adapt", "adapt_then_combine")


class NodeOptions(client.LocalSteps, GossipOptions, total=False):
    """The options of `client.work` without a weight, and those of rounds between nodes."""


def trained(
    loss_fn: Callable, optimizer: optax.GradientTransformation, options: Mapping[str, Any]
) -> tuple[ClientUpdate, dict[str, Any]]:
    """Local training of a node, whose report counts like any other's, and the options that do not describe it."""
    work, others = client.local_work({**options, "weighting": "uniform"})
    return client.local_sgd(loss_fn, optimizer, work), others


def from_model(local: ClientUpdate) -> ClientUpdate:
    """A node that keeps its model and nothing else."""

    def moved(own: PyTree, update: PyTree) -> PyTree:
        return {"model": jax.tree.map(lambda x, u: (x + u).astype(x.dtype), own["model"], update)}

    return training(local, lambda params: {"model": params}, lambda own: own["model"], moved)


@validate.named_arguments
def dpsgd(
    loss_fn: LossFn,
    mixing: Mixing,
    optimizer: optax.GradientTransformation,
    *,
    form: Literal["combine_while_adapt", "adapt_then_combine"] = "combine_while_adapt",
    **options: Unpack[NodeOptions],
) -> Algorithm:
    """Decentralised parallel SGD: in each round nodes take local steps u_i, and mix their models once.

    x_i <- sum_j W_ij x_j + u_i(x_i), the paper's form, or x_i <- sum_j W_ij (x_j + u_j(x_j)).

    Args:
      mixing: keeps the nodes' average; `network.metropolis`, `laplacian`, ...
      optimizer: of the local steps; its state starts anew in each round. `num_steps`, `num_epochs`, `batch_size`,
        `shuffle` as in `client.work`: one step is the paper's algorithm.
      form: "combine_while_adapt" (the first) or "adapt_then_combine".
      devices: what the nodes run on, for simulated time. A node's round is its local work, a message to each neighbour
        and one from each.
      barrier: "global": a node starts its next round when all are done with this one; "local": when it and those that
        it hears are.
      nonfinite, plan, mesh: as in `algorithms.federated`. A node whose result is not finite mixes without it.

    Returns: an Algorithm. `params` is the mean over the nodes, `personal` each node's own model. Its info holds
    `consensus_distance` (the root of the nodes' mean squared distance from their mean model), `edges` (links that were
    used), `uplink_bytes` (a model each way over each of them), and the nodes' metrics; with devices
    `simulated_seconds` and `first_seconds`, when the last and the first node were done.

    Raises: ValueError for a mixing that would move the average.

    Guarantees: NumPy's models (tests/algorithms/gossip/test_dpsgd.py::test_numpy, both forms); on the complete graph
    "adapt_then_combine" is FedAvg of everybody (::test_the_complete_graph_is_fedavg); exact bytes
    (::test_bytes_go_with_edges); quadratics' floor (tests/theory/test_consensus.py::test_floor_of_noisy_quadratics).

    References: Lian et al. 2017, algorithm 1; Nedic and Ozdaglar 2009; Sayed 2014 for the names of the forms.
    """
    check_average(mixing)
    local, node_options = trained(loss_fn, optimizer, options)
    nodes = nodes_of(from_model(local), mixing, **node_options)

    def combine(links, done):
        if form == "adapt_then_combine":
            return mixed(links, done.after)
        return jax.tree.map(lambda m, x, y: m + (y - x), mixed(links, done.before), done.before, done.after)

    return node_algorithm(nodes, combine)


@validate.named_arguments
def dgd(
    loss_fn: LossFn,
    mixing: Mixing,
    *,
    learning_rate: Positive = 0.1,
    form: str = "combine_while_adapt",
    **options: Unpack[GossipOptions],
) -> Algorithm:
    """Decentralised gradient descent: `dpsgd` with one step along the gradient of all of a node's examples.

    With a constant rate it stops within O(rate) of the optimum, further away the worse the graph is connected.

    Guarantees: the closed form of where it stops on quadratics
    (tests/algorithms/gossip/test_gradient_tracking.py::test_tracking_is_exact_where_dgd_stops).

    References: Nedic and Ozdaglar 2009; Yuan, Ling and Yin 2016, section 2.
    """
    return dpsgd(loss_fn, mixing, optax.sgd(learning_rate), form=form, num_steps=1, **options)


@validate.named_arguments
def consensus(
    loss_fn: LossFn,
    mixing: Mixing,
    optimizer: optax.GradientTransformation,
    **options: Unpack[NodeOptions],
) -> Algorithm:
    """Average consensus: every node trains alone, once, before the first round; rounds only mix, x <- W x.

    All models approach the mean of what the nodes had, at the rate of the mixing matrix (`network.spectrum`).

    Args: as for `dpsgd`; time starts after the training, and models stay on the devices.

    Guarantees: the average stays to 1e-6 (tests/network/test_mixing.py::test_the_average_stays), the distance shrinks
    as predicted from all eigenvalues (tests/algorithms/gossip/test_dpsgd.py::test_consensus_shrinks_as_predicted).

    References: Olfati-Saber and Murray 2004; Xiao and Boyd 2004; Boyd, Ghosh, Prabhakar and Shah 2006 (gossip).
    """
    check_average(mixing)
    local, node_options = trained(loss_fn, optimizer, options)
    if local.facts.reads_round:
        rule = "a rate that does not fall over rounds, for nodes train once, before the first"
        validate.fail("optimizer", rule, "one", "Take a constant rate, or a schedule over local steps.")
    nodes = nodes_of(from_model(local), mixing, **node_options)
    size = mixing.graph.population_size

    def init(key, params, population):
        def alone(key, state, population):
            done = train(nodes, key, state, population, jnp.ones(size, bool))
            ids = jnp.arange(size, dtype=jnp.int32)
            return state.star._replace(clients=engine.put(done.memory, ids, done.after, ids >= 0))

        with engine.client_memory("device"):  # a memory file holds what rounds write, and no round has run
            state = begun(nodes, params, population)
        return state._replace(star=jax.jit(alone)(key, state, population))

    def step(key, state, population):
        links = links_of(nodes, key, state)
        ids = jnp.arange(size, dtype=jnp.int32)
        before, memory = engine.take(state.star.clients, ids)
        rows = engine.steady(mixed)(links, before)
        state, info = finish(nodes, key, state, links, memory, before, rows, Work(0, 0, None, 0.0))
        none = {"dropped_clients": jnp.zeros((), jnp.int32)}
        return state, none | info

    return Algorithm(
        init,
        step,
        lambda state: mean_model(nodes, state),
        evaluated=Evaluated(personal=lambda state, ids: own_models(nodes, state, ids)),
        metrics=NODE_METRICS,
    )
