"""D-PSGD, DGD and average consensus: nodes train from their own models and mix them with those of neighbours.

Notation: x_i is node i's model, W the mixing matrix, f_i node i's mean loss, N the number of nodes. These algorithms
minimise (1/N) sum_i f_i, in which all nodes have the same weight, whatever number of examples they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import client, engine, validate
from fedjax_sim.algorithms.gossip.rounds import finish, links_of, mean_model, node_algorithm, own_models, train_nodes
from fedjax_sim.algorithms.gossip.state import NODE_METRICS, GossipOptions, begun, check_average, nodes_of, training
from fedjax_sim.network import Mixing, mixed
from fedjax_sim.types import Algorithm, ClientUpdate, Evaluated, ParamsKind, PyTree, Work
from fedjax_sim.validate import LossFn, Positive

FORMS = ("combine_while_adapt", "adapt_then_combine")


class NodeOptions(client.LocalSteps, GossipOptions, total=False):
    """The options of `client.work` without `weighting`, and those of rounds between nodes (`GossipOptions`)."""


def trained(
    loss_fn: Callable, optimizer: optax.GradientTransformation, options: Mapping[str, Any]
) -> tuple[ClientUpdate, dict[str, Any]]:
    """Makes the local training of a node, from the options of an algorithm.

    All nodes have the same weight.

    Args:
      loss_fn, optimizer: as in `client.local_sgd`.
      options: of the algorithm.

    Returns: (the local training, the options that do not describe it).
    """
    work, other_options = client.local_work({**options, "weighting": "uniform"})
    return client.local_sgd(loss_fn, optimizer, work), other_options


def from_model(local: ClientUpdate) -> ClientUpdate:
    """Makes a node whose state is its model alone: it trains from its model and keeps the result."""

    def add_update(state: PyTree, update: PyTree) -> PyTree:
        return {"model": jax.tree.map(lambda x, u: (x + u).astype(x.dtype), state["model"], update)}

    return training(local, lambda params: {"model": params}, lambda state: state["model"], add_update)


@validate.named_arguments
def dpsgd(
    loss_fn: LossFn,
    mixing: Mixing,
    optimizer: optax.GradientTransformation,
    *,
    form: Literal["combine_while_adapt", "adapt_then_combine"] = "combine_while_adapt",
    **options: Unpack[NodeOptions],
) -> Algorithm:
    """Makes decentralised parallel SGD: in each round all nodes train, and mix their models with neighbours' once.

    Let u_i(x_i) be the update of node i's local steps from x_i. A round is x_i <- sum_j W_ij x_j + u_i(x_i), the
    paper's form, or x_i <- sum_j W_ij (x_j + u_j(x_j)).

    Args:
      loss_fn: as in `client.local_sgd`.
      mixing: keeps the nodes' average; `network.metropolis`, `laplacian`, ...
      optimizer: of the local steps; its state starts anew in each round. `num_steps`, `num_epochs`, `batch_size`,
        `shuffle` as in `client.work`: one step is the paper's algorithm.
      form: "combine_while_adapt" is the first formula, "adapt_then_combine" the second.
      devices: the nodes' devices, for simulated time; None = time is not simulated. A node's round is its local work, a
        message to each neighbour and a message from each neighbour.
      barrier: "global": a node starts its next round when all nodes are done with this one. "local": when the node and
        those from which it receives messages are done.
      nonfinite, plan, mesh: as in `algorithms.federated`. A node whose result is not finite mixes the model that it
        had.

    Returns: an Algorithm. `params` is the mean over the nodes, `personal` each node's own model. Its info holds
      `consensus_distance`: the root of the nodes' mean squared distance from their mean model;
      `edges`: the number of links that were used;
      `uplink_bytes`: of a model each way over each of these links;
      with devices `simulated_seconds` and `first_seconds`: when the last and the first node were done;
      and the nodes' metrics.

    Raises: ValueError for a mixing that would move the average.

    Guarantees: the models are those of NumPy (tests/algorithms/gossip/test_dpsgd.py::test_numpy, both forms); on the
    complete graph "adapt_then_combine" is FedAvg with all clients (::test_the_complete_graph_is_fedavg); bytes are
    exact (::test_bytes_go_with_edges); the error floor on quadratics is that of theory
    (tests/theory/test_consensus.py::test_floor_of_noisy_quadratics).

    References: Lian et al. 2017, algorithm 1; Nedic and Ozdaglar 2009; Sayed 2014 for the names of the forms.
    """
    check_average(mixing)
    local, node_options = trained(loss_fn, optimizer, options)
    nodes = nodes_of(from_model(local), mixing, **node_options)

    def combine(links, trained_nodes):
        before = trained_nodes.before
        after = trained_nodes.after
        if form == "adapt_then_combine":
            return mixed(links, after)
        # The update u_i(x_i) is y - x, where y is the model after the local steps from x.
        return jax.tree.map(lambda m, x, y: m + (y - x), mixed(links, before), before, after)

    return node_algorithm(nodes, combine)


@validate.named_arguments
def dgd(
    loss_fn: LossFn,
    mixing: Mixing,
    *,
    learning_rate: Positive = 0.1,
    form: Literal["combine_while_adapt", "adapt_then_combine"] = "combine_while_adapt",
    **options: Unpack[GossipOptions],
) -> Algorithm:
    """Makes decentralised gradient descent: `dpsgd` with one step along the gradient of all of a node's examples.

    With a constant rate it converges to a point within O(rate) of the optimum, which is further away the worse the
    graph is connected.

    Args:
      loss_fn, mixing, form: as in `dpsgd`.
      learning_rate: > 0.
      devices, barrier, nonfinite, plan, mesh: as in `dpsgd`.

    Guarantees: on quadratics the point to which it converges is that of a closed form
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
    """Makes average consensus: every node trains alone, once, before the first round; rounds only mix, x <- W x.

    All models approach the mean of the nodes' models after training, at the rate of the mixing matrix
    (`network.spectrum`).

    Args: as for `dpsgd`; simulated time starts after the training, and models stay on the devices. A node whose
      training is not finite keeps the first model. No info counts it, and `nonfinite` does not apply: there is no
      round yet.

    Guarantees: the average stays to 1e-6 (tests/network/test_mixing.py::test_the_average_stays); the consensus distance
    shrinks as predicted from all eigenvalues
    (tests/algorithms/gossip/test_dpsgd.py::test_consensus_shrinks_as_predicted).

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
        def train_alone(key, state, population):
            trained_nodes = train_nodes(nodes, key, state, population, jnp.ones(size, bool))
            ids = jnp.arange(size, dtype=jnp.int32)
            clients = engine.put(trained_nodes.memory, ids, trained_nodes.after, ids >= 0)
            return state.star._replace(clients=clients)

        # A memory file on disk holds only rows that rounds write, and here rows are written before the first round.
        with engine.client_memory("device"):
            state = begun(nodes, params, population)
        return state._replace(star=jax.jit(train_alone)(key, state, population))

    def step(key, state, population):
        links = links_of(nodes, key, state)
        ids = jnp.arange(size, dtype=jnp.int32)
        before, memory = engine.take(state.star.clients, ids)
        rows = engine.reproducible(mixed)(links, before)
        # `finish` counts the bytes of messages by the links, so this is local work alone.
        no_work = Work(bytes_up=0, bytes_down=0, steps=None, flops=0.0)
        state, info = finish(nodes, key, state, links, memory=memory, before=before, rows=rows, work=no_work)
        none_dropped = {"dropped_clients": jnp.zeros((), jnp.int32)}
        return state, none_dropped | info

    return Algorithm(
        init,
        step,
        lambda state: mean_model(nodes, state),
        evaluated=Evaluated(personal=lambda state, ids: own_models(nodes, state, ids)),
        metrics=NODE_METRICS,
        params_kind=ParamsKind.MEAN,
    )
