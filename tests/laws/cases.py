"""One row for every public factory of the subpackages that make up a round. A member without a row fails the suite."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from fedjax_sim import (
    adversary,
    aggregation,
    algorithms,
    client,
    models,
    network,
    population,
    sampling,
    server,
    transform,
    tree,
)
from fedjax_sim.algorithms.server.mime_optimizer import base_optimizer
from fedjax_sim.config import signatures
from fedjax_sim.models import from_fn, layer, per_example, sequential, squared_error
from fedjax_sim.models.graph import graph_network
from fedjax_sim.models.graph_layers import GraphLayer
from fedjax_sim.types import ClientData, ClientUpdate, Cohort, Devices, GraphData, ParamsKind, Report, Round, Spent
from tests.laws import problems as p
from tests.laws.row import Row

SUBPACKAGES = {
    "network": network,
    "sampling": sampling,
    "client": client,
    "transform": transform,
    "aggregation": aggregation,
    "server": server,
    "algorithms": algorithms,
}
RETURNED = {  # the types of a subpackage's parts, as factories annotate them
    "network": ("Availability", "Devices", "Distribution", "Graph", "Hazard", "Link", "Mixing"),
    "sampling": ("Sampler",),
    "client": ("ClientUpdate",),
    "transform": ("UpdateTransform",),
    "aggregation": ("Aggregator",),
    "server": ("ServerUpdate", "optax.GradientTransformation"),
    "algorithms": ("Algorithm", "ClientUpdate"),
}
NO_PARTS = {  # public functions that make no part; each other one needs a row
    "network": {
        "algebraic_connectivity",
        "hears_back",
        "is_connected",
        "laplacian_extremes",
        "laplacian_matrix",
        "load_of",
        "matrix_of",
        "mixed",
        "most_feasible_work",
        "smallest_deadline",
        "spectrum",
        "transcript",
        "within_budget",
    },
    "client": {"local_work", "over_rounds", "plain_sgd_rate", "unroll", "work"},
    "algorithms": {"split_costs", "split_loss", "vertical_loss", "vertical_transcript"},
}
TOTAL = float(p.SIZES.sum())
DESIGN = sampling.uniform(p.NUM_CLIENTS, p.SLOTS).design
SAMPLER = sampling.uniform(p.NUM_CLIENTS, p.SLOTS)
WORK = {"num_steps": 2, "batch_size": p.BATCH}
BASE = base_optimizer("adam")
RUN = {"plan": p.PLAN, "mesh": None}


def phones():  # no part is made on import: scripts choose their devices after it
    return network.heterogeneous(
        p.NUM_CLIENTS,
        speed=network.lognormal(100.0, 1.0),
        bandwidth_down=network.constant(100.0),
        bandwidth_up=network.constant(10.0),
        compute_watts=network.constant(2.0),
        availability=network.bernoulli(0.8, slot_seconds=1),
    )


def clocked():
    return sampling.with_clock(SAMPLER, phones())


PROFILE = network.Profile(
    speed=1e9,
    bandwidth_down=1e6,
    bandwidth_up=1e5,
    latency=0.1,
    joules_per_flop=1e-9,
    joules_per_byte=1e-6,
    compute_watts=2.0,
    radio_watts=1.0,
)
HERE = pathlib.Path(__file__).parent
GRAPH = network.erdos_renyi(p.NUM_CLIENTS, 0.25, seed=1)


def _local():
    return client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(**WORK))


def _touched():
    """The model's numbers as the first rows of a table; each client reads two of them."""

    def loss(params, examples, key):
        return (examples["x"].sum(1) * params["table"][examples["token"], 0] - examples["y"]) ** 2 / 2

    work = client.touched_rows(
        client.local_sgd(loss, optax.sgd(p.RATE), client.work(**WORK)), table="table", tokens="token"
    )

    def apply(key, broadcast, state, data):
        table = jnp.concatenate([broadcast, jnp.zeros(100)])[:, None]
        tokens = {"token": jnp.arange(data.mask.size) % 2}
        report, state = work.apply(key, {"table": table}, state, data._replace(examples=data.examples | tokens))
        return report._replace(update=report.update["table"][: broadcast.size, 0]), state

    return work._replace(apply=apply)


def _devices():
    """Some clients take ten times as long as others."""

    def spend(key, ids, load):
        took = (1 + ids * 7 % 11) * jnp.where(ids % 6 == 0, 10, 1)
        return Spent(took, took, took, load.flops)

    return Devices(p.NUM_CLIENTS, spend)


def _asynchronous(make, **options):
    traffic = {"population_size": p.NUM_CLIENTS, "concurrency": 12}
    return lambda: make(p.linear_loss, _devices(), optax.sgd(p.RATE), **traffic, **WORK, **RUN, **options)


def _recipe(make, **options):
    return lambda: make(p.linear_loss, SAMPLER, optax.sgd(p.RATE), **WORK, **RUN, **options)


def _keeping(make, **options):
    """An algorithm whose clients keep a part of the model: the laws' model is the sum of a shared and an own one."""

    def loss(parts, examples, key):
        return p.linear_loss(jax.tree.map(jnp.add, parts["shared"], parts["own"]), examples, key)

    def made():
        algorithm = make(loss, SAMPLER, optax.sgd(p.RATE), own=["own"], **WORK, **RUN, **options)

        def init(key, params, people):
            return algorithm.init(key, {"own": tree.zeros_like(params), "shared": params}, people)

        return algorithm._replace(init=init, params=lambda state: algorithm.params(state)["shared"], observe=None)

    return made


def _with_classes(people, id):
    """A client's rows, labelled by the sign of their targets."""
    data = people.client(id)
    return data._replace(examples={"x": data.examples["x"], "y": (data.examples["y"] > 0).astype(jnp.int32)})


def _by_class():
    """FedProto, whose embeddings are the features times the laws' model; the laws see the model of one client."""
    body = layer("body", lambda key: jnp.ones(3), lambda w, x: x * w[None, : x.shape[1]])
    middle = layer("middle", None, lambda h: 2 * h)
    head = layer("head", None, lambda h: jnp.stack([h.sum(1), -h.sum(1)], 1))
    width = p.WIDTH if p.ROWS != 50 else 64  # of the rows of `device_rows`

    def loss(outputs, y):
        return squared_error(outputs[:, :1], y.astype(outputs.dtype)[:, None])

    made = algorithms.fedproto(
        sequential([body, middle, head]), loss, SAMPLER, optax.sgd(0.02), input_shape=(width,), coefficient=0.1,
        **WORK, **RUN,
    )  # fmt: skip

    def labelled(people):
        return population.Generated(people.size, _with_classes, people)

    def init(key, params, people):
        return made.init(key, {"body": ravel_pytree(params)[0]}, labelled(people))

    def step(key, state, people):
        return made.step(key, state, labelled(people))

    def params(state):
        return made.evaluated.personal(state, jnp.arange(1))["body"][0]

    return made._replace(init=init, step=step, params=params, observe=None)


def three_logits(params, x):
    """A classifier of three classes, in which the laws' model scales the features."""
    return x[:, :3] * jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(params)])[None, :3]


def _with_larger(people, id):
    """A client's rows, labelled by the larger of their first two features; nobody has the last of three classes."""
    data = people.client(id)
    x = data.examples["x"]
    return data._replace(examples={"x": x, "y": (x[:, 1] > x[:, 0]).astype(jnp.int32)})


def _classified(algorithm):
    """The algorithm on rows that have classes."""

    def labelled(people):
        return population.Generated(people.size, _with_larger, people)

    return algorithm._replace(
        init=lambda key, params, people: algorithm.init(key, params, labelled(people)),
        step=lambda key, state, people: algorithm.step(key, state, labelled(people)),
        observe=None,
    )


def _classifying(make, **options):
    """A recipe of classifiers."""

    def made():
        model = from_fn(lambda key: jnp.zeros(3), three_logits)
        return _classified(make(model, SAMPLER, optax.sgd(p.RATE), **WORK, **RUN, **options))

    return made


def _two_heads():
    """FedRoD, whose heads are three biases; the laws' model is the body."""
    model = from_fn(
        lambda key: {"body": jnp.zeros(3), "output": jnp.zeros(3)},
        lambda params, x: three_logits(params["body"], x) + params["output"][None],
    )
    made = _classified(algorithms.fedrod(model, SAMPLER, optax.sgd(p.RATE), **WORK, **RUN))
    return made._replace(
        init=lambda key, params, people: made.init(key, {"body": params, "output": jnp.zeros(3)}, people),
        params=lambda state: made.params(state)["body"],
    )


def _contrasting():
    """MOON, whose embeddings are a function of the features times the laws' model."""
    body = layer("body", lambda key: jnp.ones(3), lambda w, x: x * w[None, : x.shape[1]])
    middle = layer("middle", None, jnp.tanh)
    head = layer("head", None, lambda h: h.sum(1))

    def loss(outputs, y):
        return squared_error(outputs, y.astype(outputs.dtype))

    made = algorithms.moon(sequential([body, middle, head]), loss, SAMPLER, optax.sgd(p.RATE), **WORK, **RUN)
    return made._replace(
        init=lambda key, params, people: made.init(key, {"body": ravel_pytree(params)[0]}, people),
        params=lambda state: made.params(state)["body"],
        observe=None,
    )


def _imitating():
    """FedMD, with FedDF's model of three classes; the laws see the model of one client."""

    def logits(params, x):
        return x * jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(params)])[None, :3]

    made = algorithms.fedmd(
        from_fn(lambda key: jnp.zeros(3), logits), p.linear_loss, SAMPLER, optax.sgd(p.RATE), _own(),
        distill_optimizer=optax.sgd(0.05), distill_steps=2, distill_batch_size=3, **WORK, **RUN,
    )  # fmt: skip

    def params(state):
        return jax.tree.map(lambda x: x[0], made.evaluated.personal(state, jnp.arange(1)))

    return made._replace(params=params)


def _alone():
    """Local training; the laws see the model of one client."""
    made = algorithms.local(p.linear_loss, SAMPLER, optax.sgd(p.RATE), **WORK, **RUN)

    def params(state):
        return jax.tree.map(lambda x: x[0], made.evaluated.personal(state, jnp.arange(1)))

    return made._replace(params=params)


def _by_width():
    """HeteroFL of two units that are the laws' model, of which every other client holds one."""
    first = layer("first", lambda key: {"kernel": jnp.zeros((3, 2))}, lambda w, x: x @ w["kernel"])
    output = layer("output", lambda key: {"kernel": jnp.ones((2, 1))}, lambda w, x: (x @ w["kernel"])[:, 0])
    model = sequential([first, output])

    def loss(params, examples, key):
        outputs, _ = model.apply(params, (), examples["x"], None, False)
        return squared_error(outputs, examples["y"].astype(outputs.dtype))

    made = algorithms.heterofl(model, loss, SAMPLER, optax.sgd(0.02), **WORK, **RUN)

    def init(key, params, people):
        width = jax.eval_shape(people.client, jnp.int32(0)).examples["x"].shape[1]
        row = ravel_pytree(params)[0][:width]
        halves = {"kernel": jnp.full((2, 1), 0.5, row.dtype)}
        return made.init(key, {"first": {"kernel": jnp.stack([row, row], 1)}, "output": halves}, people)

    return made._replace(init=init, params=lambda state: made.params(state)["first"]["kernel"].mean(1))


def _of_components():
    """FedEM, whose components are the laws' model; the laws see the mean of the components."""

    def loss(outputs, y):
        return p.linear_loss(outputs[0], {"x": outputs[1], "y": y}, None)

    made = algorithms.fedem(
        from_fn(lambda key: jnp.zeros(3), lambda params, x: (params, x)), loss, SAMPLER, optax.sgd(p.RATE),
        task="regression", num_components=2, **WORK, **RUN,
    )  # fmt: skip

    def params(state):
        return jax.tree.map(lambda x: x.mean(0), made.params(state)["components"])

    return made._replace(params=params)


def _of_factors():
    """FlexLoRA of two factors, whose product is the laws' model."""

    def product(pair):
        return (pair["a"] @ pair["b"])[:, 0]

    def loss(pair, examples, key):
        return p.linear_loss(product(pair), examples, key)

    made = algorithms.flexlora(loss, SAMPLER, optax.sgd(0.02), **WORK, **RUN)

    def init(key, params, people):
        column = ravel_pytree(params)[0][:, None]
        return made.init(key, {"a": column, "b": jnp.ones((1, 1), column.dtype)}, people)

    return made._replace(init=init, params=lambda state: product(made.params(state)))


def _statistic(make, **options):
    """A federated statistic, which starts from an estimate of its own. The laws see three numbers: those with which its
    arrays begin, added."""

    def made():
        algorithm = make(SAMPLER, **options, **RUN)

        def init(key, params, people):
            width = _width(people)
            # Rows of another length than the laws' own need centers of their length.
            centers = jax.random.normal(jax.random.key(1), (2, width))
            start = ()
            if "num_clusters" in options and width != p.WIDTH:
                start = {"centroids": centers}
            if "num_components" in options and width != p.WIDTH:
                start = {"weights": jnp.full(2, 0.5), "means": centers, "variances": jnp.ones((2, width))}
            return algorithm.init(key, start, people)

        def shown(state):
            arrays = [x for x in jax.tree.leaves(algorithm.params(state)) if x.size >= 3]
            return sum(x.reshape(-1)[:3].astype(jnp.float32) for x in arrays)

        return algorithm._replace(init=init, params=shown, observe=None)

    return made


def _width(people) -> int:
    return jax.eval_shape(people.client, jnp.int32(0)).examples["x"].shape[-1]


def _boosted():
    """Trees for rows of the laws' own length, or of the population's where it is another one."""

    def of(width):
        trees = {"num_trees": 30, "max_depth": 2, "low": -3.0, "high": 3.0, "num_bins": 4, "objective": "squared"}
        return _statistic(algorithms.boosted_trees, input_shape=(width,), **trees)()

    usual = of(p.WIDTH)

    def fitting(people):
        return usual if _width(people) == p.WIDTH else of(_width(people))

    return usual._replace(
        init=lambda key, params, people: fitting(people).init(key, params, people),
        step=lambda key, state, people: fitting(people).step(key, state, people),
    )


def signs(examples):
    """A symbol in [0, 8) of each row: the signs of its features."""
    return ((examples["x"][:, :3] > 0).astype(jnp.int32) * jnp.array([[4, 2, 1]])).sum(1, dtype=jnp.int32)


def _gossip(make, *options, mixing=None, **more):
    """An algorithm without a server, on an irregular graph with an edge that fails now and then."""
    mixing = network.with_link_failures(network.metropolis(GRAPH), 0.1) if mixing is None else mixing(GRAPH)
    return lambda: make(p.linear_loss, mixing, *options, **more, **RUN)


def _first_of_two():
    """Two rules side by side, fed with the same messages; the laws see the first one's aggregate."""
    rule = aggregation.by_part({"one": aggregation.fixed_mean(5.0), "other": aggregation.mean()})

    def finalize(key, cohort, carry):
        aggregate, metrics = rule.finalize(key, cohort, carry)
        return aggregate["one"], metrics

    def accumulate(key, cohort, carry, received):
        both = received._replace(updates={"one": received.updates, "other": received.updates})
        return rule.accumulate(key, cohort, carry, both)

    return rule._replace(
        init=lambda spec, num_slots: rule.init({"one": spec, "other": spec}, num_slots),
        accumulate=accumulate,
        finalize=finalize,
    ).stating(sensitivity=aggregation.fixed_mean(5.0).facts.sensitivity)


def _trusting():
    """A server whose own update is the model that was broadcast."""
    own = ClientUpdate(lambda params: (), lambda key, broadcast, state, data: (Report(broadcast, 1.0, {}), state))
    return aggregation.fltrust(own, ClientData({"x": jnp.ones((2, 3))}, jnp.ones(2, bool)))


def _fixed_point(wrapped=lambda rule: rule):
    """A modular sum of messages in units of 2^-20, or an aggregator around it; the laws send floats."""
    rule, unit = wrapped(aggregation.modular_sum(5.0)), 2.0**-20

    def integers(received):
        return received._replace(updates=jnp.round(received.updates / unit).astype(jnp.int32))

    def finalize(key, cohort, carry):
        aggregate, metrics = rule.finalize(key, cohort, carry)
        return aggregate * unit, metrics

    return rule._replace(
        init=lambda spec, num_slots: rule.init(jax.ShapeDtypeStruct(spec.shape, jnp.int32), num_slots),
        accumulate=lambda key, cohort, carry, received: rule.accumulate(key, cohort, carry, integers(received)),
        finalize=finalize,
    )


def _at_a_mean(member):
    """A mechanism as under fixed_mean(10), for a law that has no aggregator."""

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        return member.on_server(key, cohort, aggregate, state, measured, 0.1)

    return member._replace(on_server=on_server)


def _own():
    """A server's examples."""
    return ClientData({"x": jnp.arange(5.0)[:, None]}, jnp.arange(5) < 4)


def own_part(path):
    """A server that keeps and trains a part of the model, of any name."""
    return server.with_own_part(server.optimizer(optax.sgd(1.0)), _own_steps(), _own(), [path])


def clients_part(path):
    """A server whose clients keep a part of the model, of any name."""
    return server.with_clients_part(server.optimizer(optax.sgd(1.0)), [path])


def _own_steps():
    """A server's local work that suits any model: a tenth of the way to its examples' mean."""

    def apply(key, params, state, data):
        mean = jnp.where(data.mask, data.examples["x"][:, 0], 0).sum() / data.mask.sum(dtype=jnp.float32)
        return Report(jax.tree.map(lambda x: ((mean - x) / 10).astype(x.dtype), params), jnp.ones(()), {}), state

    return ClientUpdate(lambda params: (), apply)


def _distilled():
    """FedDF, with a model of three classes that takes its first three numbers for weights."""

    def logits(params, x):
        return x * jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(params)])[None, :3]

    return algorithms.feddf(
        from_fn(lambda key: jnp.zeros(3), logits), p.linear_loss, SAMPLER, optax.sgd(p.RATE), _own(),
        distill_optimizer=optax.sgd(0.05), distill_steps=2, distill_batch_size=3, **WORK, **RUN,
    )  # fmt: skip


GROUPS = np.arange(p.NUM_CLIENTS) * 7 % 24 // 5  # four groups of 5 clients and one of 4


def _in_groups(**options):
    """HierFAVG over the laws' clients, who are grouped inside: two of five edges make two rounds each."""
    return _over_groups(
        algorithms.hierarchical_fedavg(
            p.linear_loss, sampling.uniform(5, 2), optax.sgd(p.RATE), edge_rounds=2, group_size=5,
            **options, **WORK, **RUN,
        )
    )  # fmt: skip


def _gossiping():
    """Five edges on a path, with a cloud in every third round."""
    path = np.diag([0.75, 0.5, 0.5, 0.5, 0.75]) + (np.eye(5, k=1) + np.eye(5, k=-1)) / 4
    edge = algorithms.fedavg(p.linear_loss, sampling.uniform(5, 3), optax.sgd(p.RATE), **WORK, plan=RUN["plan"]).parts
    return _over_groups(algorithms.hierarchical_gossip(edge, path, cloud_every=3, mesh=RUN["mesh"]))


def _by_party():
    """Three parties of the laws' columns over a noisy link: two scale what they send, the first has the laws' model."""

    def scaled(start, stop):
        scale = models.layer("scale", lambda key: jnp.ones(()), lambda scale, x: scale * x[:, start:stop])
        return [scale]

    parties = {
        "party_0": [models.layer("own", None, lambda x: x[:, :1])],
        "party_1": scaled(1, 2),
        "party_2": scaled(2, None),
    }
    split = models.branches("parties", parties, lambda parts: jnp.concatenate(parts, 1))
    top = models.layer("model", lambda key: jnp.zeros(3), lambda params, x: (params, x))

    def loss(outputs, y):
        return p.linear_loss(outputs[0], {"x": outputs[1], "y": y}, None)

    noisy = {"forward": transform.local_gaussian(100.0, 1e-4), "backward": transform.qsgd(64)}
    made = algorithms.vertical(
        models.sequential([split, top]), loss, SAMPLER, optax.sgd(p.RATE / 10), **noisy, **WORK, **RUN
    )
    ones = {"scale": jnp.ones(())}

    def init(key, params, people):
        return made.init(key, {"parties": {"party_1": ones, "party_2": ones}, "model": params}, people)

    return made._replace(init=init, params=lambda state: made.params(state)["model"], parts=None, observe=None)


def _over_groups(made):
    """An algorithm over groups, as one over the laws' clients."""

    def init(key, params, people):
        return made.init(key, params, population.grouped(people, GROUPS))

    def step(key, state, people):
        return made.step(key, state, population.grouped(people, GROUPS))

    return made._replace(init=init, step=step, observe=None)


def _as_graph(people, id):
    """A client's rows as nodes on a path, whose first hears the first of the next client."""
    data = people.client(id)
    n = data.mask.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    y = data.examples["y"].astype(jnp.float32)[:, None]
    graph = GraphData(
        jnp.concatenate([data.examples["x"], y], 1),
        jnp.where(data.mask, id * n + place, -1),
        jnp.concatenate([place[:-1], jnp.full(1, n)]),
        jnp.concatenate([place[1:], jnp.zeros(1, jnp.int32)]),
    )
    halo = jnp.full(1, (id + 1) % people.size * n, jnp.int32)
    examples = {"x": graph, "halo": halo, "y": jnp.where(data.mask, 0, -1)}
    return ClientData(jax.tree.map(lambda x: x[None], examples), jnp.ones(1, bool))


def _over_graphs(groups=None):
    """SplitGNN over the laws' clients, or over groups of them that are clients of a federation.

    A node's features are mixed with its neighbours', and label 0 is a small loss of the laws' model.
    """

    def combine(params, graph, h, sent, received):
        near = jnp.concatenate([sent, received]).at[graph.senders].get(mode="fill", fill_value=0)
        mixed = h[:, :-1] + 0.1 * jnp.zeros(h.shape).at[graph.receivers].add(near, mode="drop")[:, :-1]
        y = h[:, -1].astype(jnp.int32) if p.ROWS == 50 else h[:, -1]  # classes, of the rows of `device_rows`
        loss = per_example(p.linear_loss(params, {"x": mixed, "y": y}, None))["loss"]
        return jnp.stack([-loss, jnp.zeros_like(loss)], 1)

    width = p.WIDTH + 1 if p.ROWS != 50 else 65
    only = GraphLayer(
        "only", None, lambda params, graph, h: h, combine, width=width, num_outputs=2, activation=lambda x: x
    )
    model, step_size = graph_network([only], width), optax.sgd(p.RATE, momentum=0.5)
    if groups is None:
        made = algorithms.split_gnn(model, SAMPLER, optax.sgd(p.RATE))
    else:
        inside = {"edge_sampler": sampling.uniform(5, 3), "edge_rounds": 2, "keep_edges": True, "mesh": RUN["mesh"]}
        made = algorithms.hierarchical_split_gnn(model, sampling.uniform(5, 2), step_size, **inside)

    def graphs(people):
        nodes = population.Generated(people.size, _as_graph, people)
        return nodes if groups is None else population.grouped(nodes, groups)

    def init(key, params, people):
        return made.init(key, {"only": params}, graphs(people))

    def step(key, state, people):
        return made.step(key, state, graphs(people))

    return made._replace(init=init, step=step, params=lambda state: made.params(state)["only"], observe=None)


def _split(make, **options):
    """A linear model, of which a client has the first number and the server the rest; its bits cross the link."""

    def first(w, x):
        return jnp.concatenate([x[:, :1] * w[None], x[:, 1:]], axis=1)

    def rest(w, x):
        return x[:, 0] + (x[:, 1:] * w[None, : x.shape[1] - 1]).sum(1)

    model = sequential([layer(name, lambda key: jnp.zeros(1), f) for name, f in (("first", first), ("rest", rest))])
    made = make(model, options)

    def init(key, params, people):
        flat = ravel_pytree(params)[0]
        return made.init(key, {"first": flat[:1], "rest": flat[1:]}, people)

    def params(state):
        found = made.params(state)
        return jnp.concatenate([found["first"], found["rest"]])

    return made._replace(init=init, params=params)


def split_recipe(make, *, rate=1.0, sampler=None, **options):
    def made(model, more):  # no part is made on import, and the sampler is the one of the moment
        link, step = network.link(forward=transform.quantize(8)), optax.sgd(rate * p.RATE)
        who = SAMPLER if sampler is None else sampler
        return make(model, squared_error, who, step, cut="first", link=link, **WORK, **RUN, **more)

    return lambda: _split(made, **options)


def _split_star(model, options):
    split = algorithms.split_loss(model, squared_error, "first", link=network.link(backward=transform.qsgd(8)))
    work = algorithms.split_client([split, split], optax.sgd(p.RATE), client.work(**WORK), tier=_drawn_tier)
    return algorithms.federated(SAMPLER, work, aggregation.mean(), server.optimizer(optax.sgd(1.0)), **RUN)


def _drawn_tier(key, data):
    """The state of a device in a round."""
    return jax.random.bits(key) >> 31


def _with_control(model):
    """What SCAFFOLD and Mime send to a client."""
    return {"params": model, "control": jnp.ones(3)}


def _without_half(model):
    """The laws' model of two parts, without the second."""
    return {"w": model["w"]}


def _without_own_part():
    """A client of the laws' problem that knows the first part of such a model alone."""

    def loss(model, examples, key):
        return p.linear_loss(model["w"], examples, key)

    return client.local_sgd(loss, optax.sgd(p.RATE), client.work(**WORK))


def _matrix(graph):
    """A mixing matrix on the host, as edges take it."""
    return network.matrix_of(network.metropolis(graph), jax.random.key(0), jnp.int32(0)).toarray()


def _edges_on(devices, **options):
    """Two of five edges make two rounds each, of three of their five clients."""
    cloud = sampling.with_clock(sampling.uniform(5, 2), devices(5))
    options |= {"edge_rounds": 2, "group_size": 5, "edge_sampler": sampling.uniform(5, 3)}
    options |= {"edge_devices": devices(p.NUM_CLIENTS)}
    made = algorithms.hierarchical_fedavg(p.linear_loss, cloud, optax.sgd(p.RATE), **options, **WORK, **RUN)
    return _over_groups(made)


def _federated_on(devices):
    """`federated` from its parts, with a transform that sends less; the laws' sampler has the clock."""
    step, half = server.optimizer(optax.sgd(1.0)), transform.top_k(count=1)
    return algorithms.federated(SAMPLER, _local(), aggregation.mean(), step, half, **RUN)


def _gossip_on(make, *options, mixing=lambda: network.metropolis(network.ring(p.NUM_CLIENTS)), **more):
    """An algorithm without a server, on a graph in which every node has as many neighbours."""
    return lambda devices: make(p.linear_loss, mixing(), *options, **more, **RUN, devices=devices(p.NUM_CLIENTS))


def _trained_on(make, **more):
    """The same of nodes that train."""
    return lambda devices: _gossip_on(make, optax.sgd(p.RATE), **more, **WORK)(devices)


def _clipped_on(devices):
    """Clipped gossip with an attacker, who is not made on import."""
    attack = {"num_byzantine": 1, "attack": adversary.alie(), "who": adversary.clients([3])}
    return _trained_on(algorithms.clipped_gossip, **attack)(devices)


def _everybody_on(make):
    """An algorithm in whose rounds all clients take part."""

    def made(devices):
        everyone = sampling.with_clock(sampling.full(p.NUM_CLIENTS), devices(p.NUM_CLIENTS))
        return make(p.linear_loss, everyone, optax.sgd(p.RATE), **WORK, **RUN)

    return made


CASES = {
    "network": {
        "always": Row(network.always),
        "bernoulli": Row(
            lambda: network.bernoulli(network.uniform(0.2, 0.8)), config=("rate={name='uniform', low=0.1, high=0.9}",)
        ),
        "both": Row(
            lambda: network.both(network.bernoulli(0.5), network.daily_window(0.5)),
            config=("first={name='always'}", "second={name='charging_and_wifi', wifi=0.5}"),
        ),
        "charging_and_wifi": Row(network.charging_and_wifi),
        "complete": Row(lambda: network.complete(p.NUM_CLIENTS)),
        "constant": Row(lambda: network.constant(2.0), config=("value=2.0",)),
        "control_cycle": Row(
            lambda: network.control_cycle(p.NUM_CLIENTS, period=[50, 60], act=[38, 60], flops_per_microsecond=[7]),
            config=("period=[50]", "flops_per_microsecond=[7]"),
        ),
        "cross_device": Row(lambda: network.cross_device(p.NUM_CLIENTS), idle_joules=True),
        "cross_silo": Row(lambda: network.cross_silo(p.NUM_CLIENTS), idle_joules=True),
        "daily_window": Row(lambda: network.daily_window(0.3), config=("share=0.3",)),
        "diurnal": Row(lambda: network.diurnal(0.3, 0.2), config=("mean=0.3", "amplitude=0.2")),
        "epidemic": Row(lambda: network.epidemic(GRAPH)),
        "erdos_renyi": Row(lambda: GRAPH),
        "exponential": Row(lambda: network.exponential(p.NUM_CLIENTS)),
        "from_csv": Row(lambda: network.from_csv(p.NUM_CLIENTS, str(HERE / "edges.csv"))),
        "from_edges": Row(lambda: network.from_edges(p.NUM_CLIENTS, [(0, 1), (1, 2), (2, 0)], directed=True)),
        "heterogeneous": Row(
            lambda: network.heterogeneous(
                p.NUM_CLIENTS,
                speed=network.lognormal(1e9, 1.0),
                bandwidth_down=network.pareto(1e5, 2.0),
                bandwidth_up=network.tiers([0.5, 0.5], [1e5, 1e6]),
                joules_per_flop=1e-9,
                jitter=0.3,
            )
        ),
        "hypercube": Row(lambda: network.hypercube(16)),
        "k_regular": Row(lambda: network.k_regular(p.NUM_CLIENTS, 3)),
        "laplacian": Row(lambda: network.laplacian(GRAPH)),
        "lazy": Row(lambda: network.lazy(network.push(network.exponential(p.NUM_CLIENTS)))),
        "link": Row(lambda: network.link(forward=transform.quantize(8), encrypted=True)),
        "lognormal": Row(lambda: network.lognormal(3.0, 1.0), config=("median=1e9", "sigma=1.0")),
        "markov": Row(lambda: network.markov(1800.0, 3600.0), config=("mean_on_seconds=1800", "mean_off_seconds=7200")),
        "measured": Row(
            lambda: network.measured(p.NUM_CLIENTS, str(HERE / "phones.csv")), config=(f"path='{HERE}/phones.csv'",)
        ),
        "memoryless": Row(lambda: network.memoryless(network.lognormal(100.0, 0.5))),
        "metropolis": Row(lambda: network.metropolis(GRAPH)),
        "neighbour_mean": Row(lambda: network.neighbour_mean(GRAPH)),
        "of_profiles": Row(
            lambda: network.of_profiles(
                p.NUM_CLIENTS, lambda ids: network.Profile(*(x * (1 + ids / 8) for x in PROFILE))
            ),
            idle_joules=True,
        ),
        "one_peer_exponential": Row(lambda: network.one_peer_exponential(p.NUM_CLIENTS)),
        "pareto": Row(lambda: network.pareto(2.0, 3.0), config=("minimum=1e8", "shape=2.0")),
        "path": Row(lambda: network.path(p.NUM_CLIENTS)),
        "push": Row(lambda: network.push(network.exponential(p.NUM_CLIENTS))),
        "random_matching": Row(lambda: network.random_matching(GRAPH)),
        "remove_node": Row(lambda: network.remove_node(GRAPH, 3)),
        "ring": Row(lambda: network.ring(p.NUM_CLIENTS)),
        "small_world": Row(lambda: network.small_world(p.NUM_CLIENTS, 4, 0.2)),
        "star": Row(lambda: network.star(p.NUM_CLIENTS)),
        "stochastic_block": Row(lambda: network.stochastic_block(p.NUM_CLIENTS, 2, 0.6, 0.2)),
        "tiers": Row(lambda: network.tiers([0.3, 0.7], [5.0, 1.0]), config=("shares=[0.5, 0.5]", "values=[1e9, 2e9]")),
        "torus": Row(lambda: network.torus(p.NUM_CLIENTS)),
        "trace": Row(lambda: network.trace(str(HERE / "presence.csv")), config=(f"path='{HERE}/presence.csv'",)),
        "uniform": Row(lambda: network.uniform(1.0, 2.0), config=("low=1e8", "high=1e9")),
        "weibull": Row(lambda: network.weibull(100.0, 2.0)),
        "with_link_failures": Row(
            lambda: network.with_link_failures(network.push(network.exponential(p.NUM_CLIENTS)), 0.3)
        ),
        "with_node_failures": Row(lambda: network.with_node_failures(network.random_matching(GRAPH), 0.3)),
    },
    "sampling": {
        "cyclic": Row(lambda: sampling.cyclic(p.NUM_CLIENTS, p.SLOTS, shuffled=True), compiled=True),
        "full": Row(lambda: sampling.full(p.NUM_CLIENTS), compiled=True),
        "oort": Row(lambda: sampling.oort(p.SIZES, p.SLOTS), config=("aggregator.name=li_scheme_one",)),
        "poisson": Row(lambda: sampling.poisson(p.NUM_CLIENTS, 0.3), compiled=True),
        "power_of_choice": Row(
            lambda: sampling.power_of_choice(SAMPLER, 6),
            config=("sampler.power_of_choice.cohort_size=3", "aggregator.name=li_scheme_one"),
        ),
        "uniform": Row(lambda: SAMPLER),
        "weighted": Row(lambda: sampling.weighted(p.SIZES, p.SLOTS), config=("aggregator.name=li_scheme_one",)),
        "weighted_without_replacement": Row(
            lambda: sampling.weighted_without_replacement(p.SIZES, p.SLOTS), config=("aggregator.name=li_scheme_one",)
        ),
        "with_battery": Row(
            lambda: sampling.with_battery(clocked(), network.uniform(1.0, 40.0)),
            config=("sampler.with_battery.joules=5.0",),
        ),
        "with_clock": Row(
            lambda: sampling.with_clock(SAMPLER, phones(), num_invited=6),
            config=("sampler.with_clock.overhead_seconds=1.0",),
        ),
        "with_deadline": Row(
            lambda: sampling.with_deadline(clocked(), 3.0, late="partial"),
            config=("sampler.with_deadline.seconds=60.0",),
        ),
        "with_distinct_clients": Row(lambda: sampling.with_distinct_clients(SAMPLER)),
        "with_dropout": Row(
            lambda: sampling.with_dropout(SAMPLER, 0.3), compiled=True, config=("sampler.with_dropout.rate=0.1",)
        ),
        "with_hazard": Row(
            lambda: sampling.with_hazard(clocked(), network.memoryless(1.0)),
            config=("sampler.with_hazard.hazard={name='memoryless', mean_seconds=60.0}",),
        ),
        "with_local_steps": Row(
            lambda: sampling.with_local_steps(SAMPLER, [1, WORK["num_steps"]]),
            config=("sampler.with_local_steps.steps=[1, 2]",),
        ),
        "with_over_invitation": Row(
            lambda: sampling.with_over_invitation(SAMPLER, 6), config=("sampler.with_over_invitation.num_reports=3",)
        ),
        "with_membership": Row(
            lambda: sampling.with_membership(SAMPLER, [1, 2], [3, 4], num_invited=8),
            config=("sampler.with_membership.joins=[1, 2]",),
        ),
        "with_over_selection": Row(
            lambda: sampling.with_over_selection(clocked(), 4), config=("sampler.with_over_selection.num_reports=3",)
        ),
        "with_radio_budget": Row(
            lambda: sampling.with_radio_budget(clocked(), airtime_seconds=2.0),
            config=("sampler.with_radio_budget.budget_bytes=1e9",),
        ),
        "with_replacement": Row(lambda: sampling.with_replacement(p.NUM_CLIENTS, p.SLOTS)),
        "with_response_rates": Row(
            lambda: sampling.with_response_rates(SAMPLER, [1.0, 0.5]),
            config=("sampler.with_response_rates.rates=[0.5, 1.0]",),
        ),
        "with_stragglers": Row(
            lambda: sampling.with_stragglers(sampling.with_stragglers(SAMPLER, 0.3, num_parts=2), 0.3, late="dropped"),
            config=("sampler.with_stragglers.share=0.5",),
        ),
    },
    "client": {
        "dynamic": Row(
            lambda: client.dynamic(p.linear_loss, optax.sgd(p.RATE), 0.5, client.work(weighting="examples", **WORK)),
            alone=False,
            in_recipes=True,
        ),
        "full_gradient": Row(lambda: client.full_gradient(p.linear_loss), in_recipes=True),
        "local_sgd": Row(_local, in_recipes=True),
        "mime": Row(
            lambda: client.mime(p.linear_loss, p.RATE, lambda g, s: g + s, client.work(weighting="examples", **WORK)),
            alone=False,
            in_recipes=True,
            broadcast=lambda model: _with_control(model) | {"statistics": jnp.ones(3)},
        ),
        "normalized": Row(lambda: client.normalized(_local()), compiled=True, alone=False, in_recipes=True),
        "private_sgd": Row(
            lambda: client.private_sgd(
                p.linear_loss, 1.0, 0.5, p.RATE, num_examples=p.ROWS, weighting="examples", **WORK
            ),
            compiled=True,
            in_recipes=True,
        ),
        "proximal": Row(
            lambda: client.proximal(p.linear_loss, optax.sgd(p.RATE), 0.1, client.work(**WORK)), in_recipes=True
        ),
        "scaffold": Row(
            lambda: client.scaffold(p.linear_loss, p.RATE, client.work(weighting="examples", **WORK)),
            compiled=True,
            alone=False,
            in_recipes=True,
            broadcast=_with_control,
        ),
        "send_model": Row(lambda: client.send_model(_local()), needs={"server": server.replacement}),
        "sharpness_aware": Row(
            lambda: client.sharpness_aware(p.linear_loss, optax.sgd(p.RATE), 0.1, client.work(**WORK)),
            in_recipes=True,
        ),
        "touched_rows": Row(_touched),
    },
    "transform": {
        "adaptive_clip": Row(
            lambda: _at_a_mean(transform.adaptive_clip(1.0, initial_clip_norm=1.0, quantile_noise=2.0))
        ),
        "block_k": Row(lambda: transform.block_k(count=1, block_size=2)),
        "cast": Row(lambda: transform.cast("float16")),
        "chain": Row(lambda: transform.chain(transform.identity(), transform.stateless(lambda key, x: x * 2))),
        "clip": Row(lambda: transform.clip(1.0)),
        "discrete_gaussian_mechanism": Row(
            lambda: transform.discrete_gaussian_mechanism(1.0, 1.0, 10, granularity=0.1),
            needs={"aggregator": lambda: aggregation.modular_sum(denominator=10.0)},
            config=("aggregator.name=modular_sum", "aggregator.denominator=10.0"),
        ),
        "distributed_gaussian": Row(lambda: transform.distributed_gaussian(1.0, 1.0, 10)),
        "drive": Row(transform.drive),
        "ef21": Row(
            lambda: transform.ef21(transform.top_k(count=1), p.NUM_CLIENTS),
            needs={"aggregator": lambda: aggregation.fixed_mean(float(p.NUM_CLIENTS))},
            config=("aggregator.name=fixed_mean", "aggregator.denominator=40"),
        ),
        "client_momentum": Row(lambda: transform.client_momentum(0.9)),
        "error_feedback": Row(lambda: transform.error_feedback(transform.top_k(count=1))),
        "gaussian_mechanism": Row(lambda: _at_a_mean(transform.gaussian_mechanism(1.0, 1.0))),
        "identity": Row(transform.identity),
        "local_gaussian": Row(lambda: transform.local_gaussian(1.0, 1.0)),
        "local_laplace": Row(lambda: transform.local_laplace(1.0, 1.0)),
        "privunit": Row(lambda: transform.privunit(1.0, 2.0), answers_at_random=True),
        "randomized_response": Row(lambda: transform.randomized_response(1.0), answers_at_random=True),
        "low_rank": Row(lambda: transform.low_rank(1)),
        "matrix_mechanism": Row(lambda: _at_a_mean(transform.matrix_mechanism(1.0, 0.5, num_rounds=8, bands=3))),
        "natural_compression": Row(transform.natural_compression, unbiased_as=transform.natural_compression),
        "personal_clip": Row(lambda: transform.personal_clip(0.5)),
        "qsgd": Row(lambda: transform.qsgd(4), unbiased_as=lambda: transform.qsgd(100)),
        "quantize": Row(
            lambda: transform.quantize(4, range=2.0, keeps_zeros=False), unbiased_as=lambda: transform.quantize(8)
        ),
        "random_k": Row(lambda: transform.random_k(0.5), unbiased_as=lambda: transform.random_k(count=3)),
        "rotated": Row(
            lambda: transform.rotated(transform.scaled_sign()),
            unbiased_as=lambda: transform.rotated(transform.quantize(8)),
        ),
        "scaled_sign": Row(transform.scaled_sign),
        "skellam_mechanism": Row(
            lambda: transform.skellam_mechanism(1.0, 1.0, 10, granularity=0.1),
            needs={"aggregator": lambda: aggregation.modular_sum(denominator=10.0)},
            config=("aggregator.name=modular_sum", "aggregator.denominator=10.0"),
        ),
        "stateless": Row(
            lambda: transform.stateless(lambda key, x: jnp.clip(x, -1, 1), l2_bound=3.0, nonexpansive=True)
        ),
        "terngrad": Row(transform.terngrad, unbiased_as=transform.terngrad),
        "threshold": Row(lambda: transform.threshold(0.5)),
        "top_k": Row(lambda: transform.top_k(0.5)),
    },
    "aggregation": {
        "adaptive_clipping": Row(
            lambda: aggregation.adaptive_clipping(aggregation.median(), 1),
            about_origin=None,  # it shortens towards zero, by which the median behind it moves in some draws only
            not_attacked="a composition there",
            config=("aggregator.adaptive_clipping.num_byzantine=1",),
        ),
        "additive_shares": Row(
            lambda: _fixed_point(lambda rule: aggregation.additive_shares(rule, 2, masks=True)),
            config=("aggregator.additive_shares.num_servers=2",),
        ),
        "bucketing": Row(
            lambda: aggregation.bucketing(aggregation.trimmed_mean(1), 2),
            not_attacked="a composition there",
            config=("aggregator.bucketing.bucket_size=2",),
        ),
        "bulyan": Row(lambda: aggregation.bulyan(1), withstands=lambda: aggregation.bulyan(2)),
        "by_examples": Row(
            lambda: _fixed_point(lambda rule: aggregation.by_examples(rule, 8)),
            config=("aggregator.by_examples.max_weight=100",),
        ),
        "by_part": Row(_first_of_two, about_origin=None),  # its messages are dicts
        "centered_clipping": Row(
            lambda: aggregation.centered_clipping(1.0),
            about_origin=True,
            withstands=lambda: aggregation.centered_clipping(1.0, 20),
            long_messages=False,
        ),
        "extrapolated": Row(aggregation.extrapolated, about_origin=True),
        "fixed_mean": Row(lambda: aggregation.fixed_mean(5.0), about_origin=True),
        "fltrust": Row(_trusting, about_origin=True, long_messages=False, config=("data.with_server_rows={}",)),
        "foolsgold": Row(lambda: aggregation.foolsgold(p.NUM_CLIENTS), about_origin=True, long_messages=False),
        "gather": Row(
            lambda: aggregation.gather(lambda key, updates, weights, ids: (updates * weights[:, None]).sum(0)),
            compiled=True,
            about_origin=True,
            long_messages=False,  # its own rule is a plain sum
        ),
        "geometric_median": Row(lambda: aggregation.geometric_median(3), withstands=aggregation.geometric_median),
        # Its error is another number for another message.
        "homomorphic_mean": Row(aggregation.homomorphic_mean, about_origin=None),
        "horvitz_thompson": Row(lambda: aggregation.horvitz_thompson(DESIGN, TOTAL), about_origin=True),
        "keep_old": Row(lambda: aggregation.keep_old(TOTAL), about_origin=True),
        "krum": Row(lambda: aggregation.krum(1, 2), compiled=True, withstands=lambda: aggregation.krum(3)),
        "li_scheme_one": Row(aggregation.li_scheme_one),
        "li_scheme_two": Row(lambda: aggregation.li_scheme_two(DESIGN, TOTAL), about_origin=True),
        "mean": Row(aggregation.mean, compiled=True),
        "mean_around_median": Row(
            lambda: aggregation.mean_around_median(1), withstands=lambda: aggregation.mean_around_median(3)
        ),
        "median": Row(lambda: aggregation.median(trust_weights=True), withstands=aggregation.median),
        "minimum_diameter": Row(
            lambda: aggregation.minimum_diameter(1), withstands=lambda: aggregation.minimum_diameter(3)
        ),
        "modular_sum": Row(
            _fixed_point,
            compiled=True,
            config=("transform.quantize.bits=4", "transform.quantize.range=1.0", "transform.quantize.integers=true"),
        ),
        "real_secure_sum": Row(
            lambda: _fixed_point(lambda rule: aggregation.real_secure_sum(rule, 1)),
            long_messages=False,
            config=("aggregator.real_secure_sum.threshold=6",),
        ),
        "secure_sum": Row(
            lambda: _fixed_point(lambda rule: aggregation.secure_sum(rule, 1, masks=True)),
            long_messages=False,
            config=("aggregator.secure_sum.threshold=6",),
        ),
        "nearest_neighbour_mixing": Row(
            lambda: aggregation.nearest_neighbour_mixing(aggregation.median(), 1),
            not_attacked="a composition there",
            config=("aggregator.nearest_neighbour_mixing.num_byzantine=1",),
        ),
        "norm_bounding": Row(
            lambda: aggregation.norm_bounding(aggregation.mean(), 1.0),
            about_origin=True,
            config=("aggregator.norm_bounding.max_norm=1.0",),
        ),
        "sign_majority": Row(
            aggregation.sign_majority,
            about_origin=True,
            not_attacked="it withstands a minority at each sign, and has no width",
        ),
        "total": Row(aggregation.total, about_origin=True),
        "trimmed_mean": Row(lambda: aggregation.trimmed_mean(1), withstands=lambda: aggregation.trimmed_mean(3)),
    },
    "server": {
        "adaptive": Row(lambda: server.optimizer(server.adaptive("yogi", 0.1)), in_recipes=True),
        "control_variates": Row(
            lambda: server.control_variates(server.optimizer(optax.sgd(1.0))),
            alone=False,
            in_recipes=True,
            aggregate=lambda mean: {"params": mean, "control": mean},
            model_in=lambda sent: sent["params"],
        ),
        "downlink": Row(lambda: server.downlink(server.optimizer(optax.sgd(1.0)), transform.top_k(count=2))),
        "dynamic": Row(
            lambda: server.dynamic(server.optimizer(optax.sgd(1.0)), 0.5),
            alone=False,
            in_recipes=True,
            aggregate=lambda mean: {"cohort": mean, "population": mean},
        ),
        "last_two": Row(lambda: server.last_two(server.optimizer(optax.sgd(1.0))), in_recipes=True),
        "optimizer": Row(lambda: server.optimizer(optax.sgd(1.0, momentum=0.9)), in_recipes=True, every_shape=True),
        "replacement": Row(server.replacement, alone=False, in_recipes=True),
        "rescaled": Row(
            lambda: server.rescaled(server.optimizer(optax.sgd(1.0))),
            alone=False,
            in_recipes=True,
            aggregate=lambda mean: {"direction": mean, "steps": jnp.float32(1)},
        ),
        "with_clients_part": Row(
            lambda: clients_part("half"),
            alone=False,
            in_recipes=True,
            aggregate=_without_half,
            of_part=clients_part,
            params_kind=ParamsKind.PART,
        ),
        "with_own_data": Row(lambda: server.with_own_data(server.optimizer(optax.sgd(1.0)), _own_steps(), _own())),
        "with_own_part": Row(
            lambda: own_part("half"),
            needs={"client": _without_own_part},
            aggregate=_without_half,
            known=_without_half,
            start=lambda: {"w": jnp.array(p.START), "half": jnp.ones(2)},
            of_part=own_part,
        ),
        "statistics": Row(
            lambda: server.statistics(server.optimizer(optax.sgd(1.0)), *BASE[::2]),
            alone=False,
            in_recipes=True,
            aggregate=lambda mean: {"params": mean, "gradient": mean},
            model_in=lambda sent: sent["params"],
        ),
    },
    "algorithms": {
        "as_client_update": Row(
            lambda: _in_groups(
                edge_sampler=sampling.uniform(5, 3), edge_optimizer=optax.sgd(0.5, momentum=0.5), keep_edges=True
            ),
            edge="whole",
            timed=lambda devices: _edges_on(devices, edge_transform=transform.top_k(count=1)),
            has_epochs=True,
            named_arguments=False,
            changes_rounds=False,
        ),
        "clustered_by_updates": Row(
            lambda: algorithms.clustered_by_updates(
                p.linear_loss,
                sampling.full(p.NUM_CLIENTS),
                optax.sgd(p.RATE),
                max_clusters=3,
                mean_norm=0.5,
                client_norm=0.5,
                **WORK,
                **RUN,
            ),
            params_kind=ParamsKind.ONE_OF,
            own_models=True,
            timed=_everybody_on(algorithms.clustered_by_updates),
            everybody=True,
            config=("sampler.name=full",),
        ),
        "choco": Row(
            lambda: _gossip(
                algorithms.choco,
                optax.sgd(p.RATE),
                transform=transform.top_k(0.5),
                mixing=network.metropolis,
                **WORK,
            )(),
            params_kind=ParamsKind.MEAN,
            own_models=True,
            timed=_trained_on(algorithms.choco, transform=transform.top_k(count=2)),
        ),
        "clipped_gossip": Row(
            lambda: _gossip(
                algorithms.clipped_gossip,
                optax.sgd(p.RATE),
                num_byzantine=1,
                attack=adversary.alie(),
                who=adversary.clients([3]),
                **WORK,
            )(),
            params_kind=ParamsKind.MEAN,
            plain_mean=False,  # some nodes attack
            own_models=True,
            timed=_clipped_on,
        ),
        "consensus": Row(
            lambda: _gossip(algorithms.consensus, optax.sgd(p.RATE), **WORK)(),
            trains_in_rounds=False,
            params_kind=ParamsKind.MEAN,
            own_models=True,
            timed=_trained_on(algorithms.consensus),
        ),
        "dgd": Row(
            lambda: _gossip(algorithms.dgd, learning_rate=0.05)(),
            params_kind=ParamsKind.MEAN,
            own_models=True,
            timed=_gossip_on(algorithms.dgd, learning_rate=0.05),
        ),
        "dpsgd": Row(
            lambda: _gossip(algorithms.dpsgd, optax.sgd(p.RATE), **WORK)(),
            compiled=True,
            params_kind=ParamsKind.MEAN,
            own_models=True,
            timed=_trained_on(algorithms.dpsgd),
        ),
        "asynchronous": Row(
            lambda: algorithms.asynchronous(
                _devices(),
                p.counting(_local()),
                aggregation.fixed_mean(5.0),
                server.optimizer(optax.sgd(1.0)),
                transform.top_k(0.5),
                population_size=p.NUM_CLIENTS,
                concurrency=9,
                buffer_size=5,
                refill="same",
                **RUN,
            ),
            other={"refill": "other"},
        ),
        "fedadagrad": Row(_recipe(algorithms.fedadagrad), edge="whole"),
        "fedadam": Row(_recipe(algorithms.fedadam), compiled=True, edge="whole"),
        "fedala": Row(
            _keeping(algorithms.fedala),
            own_models=True,
            edge="whole",
            weighed=False,
            other={"weight_learning_rate": 0.2, "weight_steps": 1},
        ),
        "fedamp": Row(
            _recipe(algorithms.fedamp),
            params_kind=ParamsKind.ONE_OF,
            own_models=True,
            counts_alike=True,
            other={"width": 3.0},
        ),
        "fedasync": Row(_asynchronous(algorithms.fedasync, arrivals_per_step=3), compiled=True),
        "fedat": Row(
            lambda: algorithms.fedat(
                p.linear_loss,
                _devices(),
                optax.sgd(p.RATE),
                population_size=p.NUM_CLIENTS,
                num_tiers=3,
                clients_per_tier=5,
                **WORK,
                **RUN,
            )
        ),
        "agnostic": Row(
            lambda: algorithms.agnostic(p.linear_loss, sampling.full(p.NUM_CLIENTS), optax.sgd(p.RATE), **WORK, **RUN),
            edge="server",
            timed=_everybody_on(algorithms.agnostic),
            everybody=True,
            config=("sampler.name=full",),
        ),
        "apfl": Row(_recipe(algorithms.apfl), own_models=True, edge="whole"),
        "ditto": Row(_recipe(algorithms.ditto), traced=True, own_models=True, edge="whole"),
        "fedavg": Row(_recipe(algorithms.fedavg), edge="whole"),
        "fedavgm": Row(_recipe(algorithms.fedavgm, server_learning_rate=0.3), edge="whole"),
        "fedbabu": Row(
            _keeping(algorithms.fedbabu), params_kind=ParamsKind.START, own_models=True, edge="whole", weighed=False
        ),
        "fedbuff": Row(
            _asynchronous(algorithms.fedbuff, buffer_size=5),
            other={"weighting": "examples"},  # its default stands for "uniform"
        ),
        "feddf": Row(
            _distilled,
            edge="server",
            beside={"squared_temperature": {"temperature": 2.0}},
            weighed=False,
            config=("data.with_server_rows.examples=20", "algorithm.distill_steps=2"),
        ),
        "feddyn": Row(
            _recipe(algorithms.feddyn, coefficient=1.0, weighting="uniform"),
            edge="server",
            other={"weighting": "examples"},
        ),
        "fedem": Row(
            _of_components,
            params_kind=ParamsKind.PART,
            params_at_server=False,  # which has no mixture's weights (`test_fedem.py` has them)
            own_models=True,
            edge="server",
            weighed=False,
        ),
        "federated": Row(
            lambda: algorithms.federated(
                sampling.with_dropout(SAMPLER, 0.2),
                p.counting(_local()),
                aggregation.mean(),
                server.optimizer(optax.sgd(1.0)),
                transform.stateless(lambda key, update: jax.tree.map(lambda x: x * 0.9, update)),
                **RUN,
            ),
            edge="whole",
            timed=_federated_on,
        ),
        "fedexp": Row(_recipe(algorithms.fedexp, weighting="uniform"), edge="server", other={"weighting": "examples"}),
        "fedlc": Row(_classifying(algorithms.fedlc), edge="whole", other={"calibration": 0.3}, weighed=False),
        "fedmd": Row(
            _imitating,
            params_kind=ParamsKind.UNTRAINED,
            own_models=True,
            edge="server",
            beside={"squared_temperature": {"temperature": 2.0}},
            counts_alike=True,
            config=("data.with_server_rows.examples=20", "algorithm.distill_steps=2"),
        ),
        "fedmgda": Row(_recipe(algorithms.fedmgda, server_learning_rate=0.1), edge="whole", counts_alike=True),
        "fednova": Row(_recipe(algorithms.fednova), edge="whole", plain_sgd=True),
        "fedntd": Row(_classifying(algorithms.fedntd), edge="whole", weighed=False),
        "fedper": Row(
            _keeping(algorithms.fedper), params_kind=ParamsKind.PART, own_models=True, edge="whole", weighed=False
        ),
        "fedprox": Row(_recipe(algorithms.fedprox, coefficient=0.5), edge="whole"),
        "fedproto": Row(_by_class, any_params=False, params_kind=ParamsKind.UNTRAINED, own_models=True, edge="server"),
        "fedrep": Row(
            _keeping(algorithms.fedrep), params_kind=ParamsKind.PART, own_models=True, edge="whole", weighed=False
        ),
        "moon": Row(_contrasting, any_params=False, edge="whole", weighed=False),
        "fedrs": Row(_classifying(algorithms.fedrs), edge="whole", other={"absent_scale": 0.2}, weighed=False),
        "fedrod": Row(_two_heads, own_models=True, edge="whole", weighed=False, other={"own": ["body"]}),
        "fedsam": Row(_recipe(algorithms.fedsam), edge="whole"),
        "fedsgd": Row(
            lambda: algorithms.fedsgd(p.linear_loss, SAMPLER, optax.sgd(p.RATE), **RUN), edge="whole", plain_sgd=True
        ),
        "fedyogi": Row(_recipe(algorithms.fedyogi), edge="whole"),
        "heterofl": Row(_by_width, any_params=False, own_models=True, clock="refused", weighed=False),
        "fine_tuned": Row(
            lambda: algorithms.fine_tuned(_recipe(algorithms.fedavg)(), p.linear_loss, optax.sgd(p.RATE), num_steps=2),
            edge="whole",
            changes_rounds=False,  # tests/algorithms/personal/test_judged.py has what its options change
        ),
        "flexlora": Row(_of_factors, any_params=False, edge="server", weighed=False, config=("model.lora.rank=2",)),
        "hierarchical_fedavg": Row(
            _in_groups,
            compiled=True,
            edge="whole",
            timed=_edges_on,
            beside={"keep_edges": {"edge_optimizer": optax.sgd(0.5, momentum=0.5)}},
            weighed=False,  # its weighting is of clients in edges, its aggregator of edges
            config=("data.with_groups.num_groups=12",),
        ),
        "boosted_trees": Row(
            _boosted,
            trains=False,
            edge="server",
            other={"aggregator": aggregation.median(), "objective": "logistic"},
            config=("data.name=breast_cancer", "algorithm.low=-3.0", "algorithm.high=3.0"),
        ),
        "gaussian_mixture": Row(
            _statistic(algorithms.gaussian_mixture, num_components=2, low=-2.0, high=2.0, input_shape=(p.WIDTH,)),
            trains=False,
            params_kind=ParamsKind.ANSWER,
            edge="server",
            other={"aggregator": aggregation.median()},
        ),
        "heavy_hitters": Row(
            _statistic(algorithms.heavy_hitters, num_symbols=8, bits_per_round=2, threshold=0.1, symbols=signs),
            trains=False,
            params_kind=ParamsKind.ANSWER,
            edge="server",
            python_only=("symbols",),
        ),
        "histogram": Row(
            _statistic(algorithms.histogram, low=-2.0, high=2.0, num_bins=3, column=0),
            trains=False,
            params_kind=ParamsKind.ANSWER,
            edge="server",
            beside={"num_categories": {"low": None, "high": None, "num_bins": None, "column": None}},
        ),
        "kmeans": Row(
            _statistic(algorithms.kmeans, num_clusters=2, low=-1.0, input_shape=(p.WIDTH,)),
            traced=True,
            trains=False,
            params_kind=ParamsKind.ANSWER,
            edge="server",
            other={"aggregator": aggregation.median()},
        ),
        "quantiles": Row(
            _statistic(algorithms.quantiles, low=-3.0, high=3.0, column=0),
            trains=False,
            params_kind=ParamsKind.ANSWER,
            edge="server",
            other={"aggregator": aggregation.median()},
        ),
        "ifca": Row(
            _recipe(algorithms.ifca, num_clusters=2), params_kind=ParamsKind.ONE_OF, own_models=True, edge="server"
        ),
        "local": Row(_alone, params_kind=ParamsKind.UNTRAINED, own_models=True, edge="server", sends=False),
        "gradient_tracking": Row(
            lambda: _gossip(algorithms.gradient_tracking, learning_rate=0.02)(),
            params_kind=ParamsKind.MEAN,
            own_models=True,
            timed=_gossip_on(algorithms.gradient_tracking, learning_rate=0.02),
            beside={"shuffle": {"batch_size": 1}},
        ),
        "mime": Row(
            lambda: algorithms.mime(p.linear_loss, SAMPLER, optax.sgd(0.05), weighting="uniform", **WORK, **RUN),
            other={"weighting": "examples"},
            plain_sgd=True,
        ),
        "mime_lite": Row(
            lambda: algorithms.mime_lite(p.linear_loss, SAMPLER, optax.sgd(0.05), weighting="uniform", **WORK, **RUN),
            edge="server",
            other={"weighting": "examples"},
            plain_sgd=True,
        ),
        "pairwise_gossip": Row(
            lambda: algorithms.pairwise_gossip(
                p.linear_loss, SAMPLER, optax.sgd(p.RATE), network.ring(p.NUM_CLIENTS), **WORK, **RUN
            ),
            params_kind=ParamsKind.MEAN,
            own_models=True,
        ),
        "per_fedavg": Row(_recipe(algorithms.per_fedavg), params_kind=ParamsKind.START, edge="whole"),
        "pfedme": Row(_recipe(algorithms.pfedme), own_models=True, edge="whole"),
        "qfedavg": Row(_recipe(algorithms.qfedavg), edge="server"),
        "term": Row(_recipe(algorithms.term), edge="server"),
        "push_sum": Row(
            lambda: _gossip(
                algorithms.push_sum,
                optax.sgd(p.RATE),
                mixing=lambda graph: network.with_node_failures(network.push(network.exponential(p.NUM_CLIENTS)), 0.1),
                **WORK,
            )(),
            params_kind=ParamsKind.MEAN,
            plain_mean=False,  # nodes have weights
            own_models=True,
            mixing=network.push,
            timed=_trained_on(algorithms.push_sum, mixing=lambda: network.push(network.exponential(p.NUM_CLIENTS))),
        ),
        "hierarchical_gossip": Row(_gossiping, params_kind=ParamsKind.MEAN, mixing=_matrix, clock="none"),
        "pretrained": Row(lambda: algorithms.pretrained(_recipe(algorithms.fedavg)(), _own_steps(), _own())),
        "record_private_fedavg": Row(
            lambda: algorithms.record_private_fedavg(
                p.linear_loss,
                SAMPLER,
                optax.sgd(p.RATE),
                clip_norm=1.0,
                noise_multiplier=0.5,
                num_examples=p.ROWS,
                **WORK | {"batch_size": WORK["batch_size"] or p.ROWS},
                **RUN,
            ),
            edge="whole",
            other={"weighting": "examples"},
            counts_alike=True,
            plain_sgd=True,
            config=("algorithm.clip_norm=1.0", "algorithm.noise_multiplier=1.0"),
        ),
        "scaffold": Row(
            _recipe(algorithms.scaffold, weighting="uniform"),
            compiled=True,
            edge="server",
            other={"weighting": "examples"},
            plain_sgd=True,
        ),
        "hierarchical_split_gnn": Row(
            lambda: _over_graphs(GROUPS),
            edge="whole",
            clock="none",
            other={"keep_edges": False},
            idle_options=("cut_edges", "link"),  # no edge of the row's graph connects two parties of a group
            config=("data.name=stochastic_blocks", "data.num_clients=12", "model.name=gcn", "sampler.name=full"),
        ),
        "split_gnn": Row(
            _over_graphs,
            clock="none",
            config=("data.name=stochastic_blocks", "data.num_clients=12", "model.name=gcn", "sampler.name=full"),
        ),
        "vertical": Row(
            _by_party,
            clock="refused",
            weighed=False,
            config=("model.name=vertical_mlp", "model.hidden=[4]", "model.top=[4]", "data.with_parties.num_parties=2"),
            python_only=("links",),
        ),
        "split_client": Row(
            lambda: _split(_split_star),
            any_params=False,
            edge="whole",
            clock="none",
            changes_rounds=False,
            python_only=("tier",),
        ),
        "split_learning": Row(
            split_recipe(algorithms.split_learning, handover="peer", rate=0.02),
            any_params=False,
            in_turns=True,
            clock="refused",
            other={"handover": "server"},
        ),
        "splitfed": Row(
            split_recipe(algorithms.splitfed, server_copies=3),
            compiled=True,
            any_params=False,
            in_turns=True,
            clock="refused",
            weighed=False,
        ),
    },
}


def round_for(aggregator) -> Round:
    """What an aggregator may read in a round of a model of three numbers: ids, who reported, state and model."""
    state = () if aggregator.start is None else aggregator.start(jax.ShapeDtypeStruct((3,), jnp.float32))
    cohort = Cohort(jnp.arange(p.SLOTS, dtype=jnp.int32), None, jnp.ones(p.SLOTS, bool))
    return Round(cohort, jnp.ones(3, jnp.float32), state)


def functions(subpackage: str) -> list[str]:
    """The public names of a subpackage that are no classes."""
    module = SUBPACKAGES[subpackage]
    return sorted(name for name in signatures.parts(subpackage) if not isinstance(getattr(module, name), type))


def members(subpackage: str) -> list[str]:
    """The factories of a subpackage, by what they return; one that does not say what it returns counts as one."""
    found = signatures.parts(subpackage)
    return [name for name in functions(subpackage) if found[name].returns in ("", *RETURNED[subpackage])]


def named(subpackage: str, keep: Callable[[Row], bool]) -> list[str]:
    """The names of the rows of which this holds, sorted."""
    return sorted(name for name, row in CASES[subpackage].items() if keep(row))


def rows(names: Iterable[str], compiled: Iterable[str]) -> list:
    """Parameters of a law that compiles: `compiled` in every run of the tests, the other rows by `pytest -m full`."""
    assert set(compiled) < set(names), "rows that do not exist, or nothing left for `-m full`"
    return [name if name in compiled else pytest.param(name, marks=pytest.mark.full) for name in names]


def integer_sums() -> set[str]:
    """Aggregators that sum integers, by their own fact: a round needs a transform that sends such messages."""
    return {name for name, row in CASES["aggregation"].items() if row().facts.modulus is not None}


def compiled_rows(subpackage: str, keep: Callable[[Row], bool] = lambda row: True) -> list:
    """`rows` of a law that compiles each row of a subpackage, or each of which something holds."""
    return rows(named(subpackage, keep), named(subpackage, lambda row: keep(row) and row.compiled))


def traced_rows() -> list:
    """`rows` of a law that traces a round of each algorithm."""
    return rows(named("algorithms", lambda row: True), named("algorithms", lambda row: row.compiled or row.traced))
