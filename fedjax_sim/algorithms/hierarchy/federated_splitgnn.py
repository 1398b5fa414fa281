"""SplitGNN inside of a federation: each client is a group of parties that hold a graph, with a server of its own."""

from __future__ import annotations

from typing import Annotated, Literal

import optax
from jax.sharding import Mesh

from fedjax_sim import aggregation, engine, server, validate
from fedjax_sim.algorithms.hierarchy.hierfavg import as_client_update, sampler_inside
from fedjax_sim.algorithms.split.splitgnn import split_gnn
from fedjax_sim.models import Model
from fedjax_sim.network import Link
from fedjax_sim.round.federated import federated
from fedjax_sim.types import Aggregator, Algorithm, Sampler, UpdateTransform
from fedjax_sim.validate import Checked, FromData, PositiveInt


@validate.named_arguments
def hierarchical_split_gnn(
    model: Model,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    edge_rounds: PositiveInt = 1,
    group_size: Annotated[int | None, FromData("group_size")] = None,
    edge_sampler: Sampler | None = None,
    edge_weighting: str | None = None,
    keep_edges: bool = False,
    client_layers: int = 1,
    cut_edges: str = "exchange",
    graph_at: str = "clients",
    weight_decay: float = 0.0,
    link: Link | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    transform: UpdateTransform | None = None,
    downlink: UpdateTransform | None = None,
    nonfinite: Annotated[Literal["drop", "error"], FromData("nonfinite")] = "drop",
    mesh: Annotated[Mesh | Literal["all"] | None, FromData("mesh"), Checked(engine.check_mesh)] = "all",
) -> Algorithm:
    """Makes FedAvg whose clients are edges that train by SplitGNN, each with its group of parties.

    A group of one party is a device whose gateway computes the server's layers. In the info, `uplink_bytes`,
    `clients_reported`, ... count messages between edges and cloud, `edge_uplink_bytes`, `edge_boundary_bytes`, ...
    messages inside of the groups.

    Args:
      model, client_layers, cut_edges, graph_at, weight_decay, link: as in `split_gnn`. Edges of the graph that join two
        groups are dropped.
      sampler, aggregator, transform, downlink, server_optimizer, nonfinite, mesh: of the cloud, whose clients are the
        edges; as in `hierarchical_fedavg`.
      optimizer: of the whole model, at each edge.
      edge_rounds, edge_weighting, keep_edges: the steps of an edge in a round of the cloud, its weight ("examples": the
        number of its labelled nodes), and whether its optimiser goes on: `rounds`, `weighting` and `keep` of
        `as_client_update`.
      group_size: number of parties in the largest group (`Grouped.group_size`), all of whom take part unless there is
        an `edge_sampler`, beside which it may be None.
      edge_sampler: draws from that number of parties; None: all of them take part.

    Raises: ValueError as `split_gnn` and `as_client_update`, and for samplers with a clock.

    Guarantees: one group is SplitGNN
    (tests/algorithms/hierarchy/test_federated_splitgnn.py::test_one_client_is_split_gnn), groups are FedAvg of networks
    on their own graphs (::test_groups_are_fedavg), a device with its gateway trains the whole network
    (::test_a_device_and_its_gateway); bytes are counted arrays (::test_bytes).

    >>> import jax
    >>> from fedjax_sim import models, population, sampling
    >>> data = population.stochastic_blocks(num_clients=4, num_nodes=40, num_classes=2, num_features=3)
    >>> regions, model = population.with_groups(data, num_groups=2).train, models.gcn(3, 2)
    >>> algorithm = hierarchical_split_gnn(model, sampling.full(2), optax.sgd(0.1), group_size=regions.group_size)
    >>> state = algorithm.init(jax.random.key(0), model.init(jax.random.key(0))[0], regions)
    >>> int(jax.jit(algorithm.step)(jax.random.key(0), state, regions)[1]["edge_clients_reported"].total())
    4
    """
    edge_sampler = sampler_inside(edge_sampler, group_size, "parties")
    options = {"client_layers": client_layers, "cut_edges": cut_edges, "graph_at": graph_at, "link": link}
    edge = split_gnn(model, edge_sampler, optimizer, weight_decay=weight_decay, **options)
    # `split_gnn` has no option `nonfinite`: the edge takes that of the cloud.
    level = edge.level
    assert level is not None, "`split_gnn` states its level"
    star = level.star._replace(execution=level.star.execution._replace(nonfinite=nonfinite))
    edge = edge._replace(level=level._replace(star=star))
    work = as_client_update(edge, edge_rounds, weighting=edge_weighting, keep=keep_edges)
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    return federated(sampler, work, rule, step, transform, downlink=downlink, nonfinite=nonfinite, mesh=mesh)
