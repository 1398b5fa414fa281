"""One row for every public factory of the subpackages that make up a round. A member without a row fails the suite."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

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
from fedjax_sim.config.signatures import public_names
from fedjax_sim.models import from_fn, layer, per_example, sequential, squared_error
from fedjax_sim.models.graph import graph_network
from fedjax_sim.models.graph_layers import GraphLayer
from fedjax_sim.types import ClientData, ClientUpdate, Cohort, Devices, GraphData, Report, Round, Spent
from tests.laws import problems as p

SUBPACKAGES = {
    "network": network,
    "sampling": sampling,
    "client": client,
    "transform": transform,
    "aggregation": aggregation,
    "server": server,
    "algorithms": algorithms,
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


CASES = {
    "network": {
        "always": network.always,
        "bernoulli": lambda: network.bernoulli(network.uniform(0.2, 0.8)),
        "both": lambda: network.both(network.bernoulli(0.5), network.daily_window(0.5)),
        "charging_and_wifi": network.charging_and_wifi,
        "complete": lambda: network.complete(p.NUM_CLIENTS),
        "constant": lambda: network.constant(2.0),
        "control_cycle": lambda: network.control_cycle(
            p.NUM_CLIENTS, period=[50, 60], act=[38, 60], flops_per_microsecond=[7]
        ),
        "cross_device": lambda: network.cross_device(p.NUM_CLIENTS),
        "cross_silo": lambda: network.cross_silo(p.NUM_CLIENTS),
        "daily_window": lambda: network.daily_window(0.3),
        "diurnal": lambda: network.diurnal(0.3, 0.2),
        "epidemic": lambda: network.epidemic(GRAPH),
        "erdos_renyi": lambda: GRAPH,
        "exponential": lambda: network.exponential(p.NUM_CLIENTS),
        "from_csv": lambda: network.from_csv(p.NUM_CLIENTS, str(HERE / "edges.csv")),
        "from_edges": lambda: network.from_edges(p.NUM_CLIENTS, [(0, 1), (1, 2), (2, 0)], directed=True),
        "heterogeneous": lambda: network.heterogeneous(
            p.NUM_CLIENTS,
            speed=network.lognormal(1e9, 1.0),
            bandwidth_down=network.pareto(1e5, 2.0),
            bandwidth_up=network.tiers([0.5, 0.5], [1e5, 1e6]),
            joules_per_flop=1e-9,
            jitter=0.3,
        ),
        "hypercube": lambda: network.hypercube(16),
        "k_regular": lambda: network.k_regular(p.NUM_CLIENTS, 3),
        "laplacian": lambda: network.laplacian(GRAPH),
        "lazy": lambda: network.lazy(network.push(network.exponential(p.NUM_CLIENTS))),
        "link": lambda: network.link(forward=transform.quantize(8), encrypted=True),
        "lognormal": lambda: network.lognormal(3.0, 1.0),
        "markov": lambda: network.markov(1800.0, 3600.0),
        "measured": lambda: network.measured(p.NUM_CLIENTS, str(HERE / "phones.csv")),
        "memoryless": lambda: network.memoryless(network.lognormal(100.0, 0.5)),
        "metropolis": lambda: network.metropolis(GRAPH),
        "neighbour_mean": lambda: network.neighbour_mean(GRAPH),
        "of_profiles": lambda: network.of_profiles(
            p.NUM_CLIENTS, lambda ids: network.Profile(*(x * (1 + ids / 8) for x in PROFILE))
        ),
        "one_peer_exponential": lambda: network.one_peer_exponential(p.NUM_CLIENTS),
        "pareto": lambda: network.pareto(2.0, 3.0),
        "path": lambda: network.path(p.NUM_CLIENTS),
        "push": lambda: network.push(network.exponential(p.NUM_CLIENTS)),
        "random_matching": lambda: network.random_matching(GRAPH),
        "remove_node": lambda: network.remove_node(GRAPH, 3),
        "ring": lambda: network.ring(p.NUM_CLIENTS),
        "small_world": lambda: network.small_world(p.NUM_CLIENTS, 4, 0.2),
        "star": lambda: network.star(p.NUM_CLIENTS),
        "stochastic_block": lambda: network.stochastic_block(p.NUM_CLIENTS, 2, 0.6, 0.2),
        "tiers": lambda: network.tiers([0.3, 0.7], [5.0, 1.0]),
        "torus": lambda: network.torus(p.NUM_CLIENTS),
        "trace": lambda: network.trace(str(HERE / "presence.csv")),
        "uniform": lambda: network.uniform(1.0, 2.0),
        "weibull": lambda: network.weibull(100.0, 2.0),
        "with_link_failures": lambda: network.with_link_failures(network.push(network.exponential(p.NUM_CLIENTS)), 0.3),
        "with_node_failures": lambda: network.with_node_failures(network.random_matching(GRAPH), 0.3),
    },
    "sampling": {
        "cyclic": lambda: sampling.cyclic(p.NUM_CLIENTS, p.SLOTS, shuffled=True),
        "full": lambda: sampling.full(p.NUM_CLIENTS),
        "oort": lambda: sampling.oort(p.SIZES, p.SLOTS),
        "poisson": lambda: sampling.poisson(p.NUM_CLIENTS, 0.3),
        "power_of_choice": lambda: sampling.power_of_choice(SAMPLER, 6),
        "uniform": lambda: SAMPLER,
        "weighted": lambda: sampling.weighted(p.SIZES, p.SLOTS),
        "weighted_without_replacement": lambda: sampling.weighted_without_replacement(p.SIZES, p.SLOTS),
        "with_battery": lambda: sampling.with_battery(clocked(), network.uniform(1.0, 40.0)),
        "with_clock": lambda: sampling.with_clock(SAMPLER, phones(), num_invited=6),
        "with_deadline": lambda: sampling.with_deadline(clocked(), 3.0, late="partial"),
        "with_distinct_clients": lambda: sampling.with_distinct_clients(SAMPLER),
        "with_dropout": lambda: sampling.with_dropout(SAMPLER, 0.3),
        "with_hazard": lambda: sampling.with_hazard(clocked(), network.memoryless(1.0)),
        "with_local_steps": lambda: sampling.with_local_steps(SAMPLER, [1, WORK["num_steps"]]),
        "with_over_invitation": lambda: sampling.with_over_invitation(SAMPLER, 6),
        "with_membership": lambda: sampling.with_membership(SAMPLER, [1, 2], [3, 4], num_invited=8),
        "with_over_selection": lambda: sampling.with_over_selection(clocked(), 4),
        "with_radio_budget": lambda: sampling.with_radio_budget(clocked(), airtime_seconds=2.0),
        "with_replacement": lambda: sampling.with_replacement(p.NUM_CLIENTS, p.SLOTS),
        "with_response_rates": lambda: sampling.with_response_rates(SAMPLER, [1.0, 0.5]),
        "with_stragglers": lambda: sampling.with_stragglers(
            sampling.with_stragglers(SAMPLER, 0.3, num_parts=2), 0.3, late="dropped"
        ),
    },
    "client": {
        "dynamic": lambda: client.dynamic(
            p.linear_loss, optax.sgd(p.RATE), 0.5, client.work(weighting="examples", **WORK)
        ),
        "full_gradient": lambda: client.full_gradient(p.linear_loss),
        "local_sgd": _local,
        "mime": lambda: client.mime(
            p.linear_loss, p.RATE, lambda g, s: g + s, client.work(weighting="examples", **WORK)
        ),
        "normalized": lambda: client.normalized(_local()),
        "private_sgd": lambda: client.private_sgd(
            p.linear_loss, 1.0, 0.5, p.RATE, num_examples=p.ROWS, weighting="examples", **WORK
        ),
        "proximal": lambda: client.proximal(p.linear_loss, optax.sgd(p.RATE), 0.1, client.work(**WORK)),
        "scaffold": lambda: client.scaffold(p.linear_loss, p.RATE, client.work(weighting="examples", **WORK)),
        "send_model": lambda: client.send_model(_local()),
        "touched_rows": _touched,
    },
    "transform": {
        "adaptive_clip": lambda: _at_a_mean(transform.adaptive_clip(1.0, initial_clip_norm=1.0, quantile_noise=2.0)),
        "block_k": lambda: transform.block_k(count=1, block_size=2),
        "cast": lambda: transform.cast("float16"),
        "chain": lambda: transform.chain(transform.identity(), transform.stateless(lambda key, x: x * 2)),
        "clip": lambda: transform.clip(1.0),
        "discrete_gaussian_mechanism": lambda: transform.discrete_gaussian_mechanism(1.0, 1.0, 10, granularity=0.1),
        "distributed_gaussian": lambda: transform.distributed_gaussian(1.0, 1.0, 10),
        "drive": transform.drive,
        "ef21": lambda: transform.ef21(transform.top_k(count=1), p.NUM_CLIENTS),
        "client_momentum": lambda: transform.client_momentum(0.9),
        "error_feedback": lambda: transform.error_feedback(transform.top_k(count=1)),
        "gaussian_mechanism": lambda: _at_a_mean(transform.gaussian_mechanism(1.0, 1.0)),
        "identity": transform.identity,
        "local_gaussian": lambda: transform.local_gaussian(1.0, 1.0),
        "local_laplace": lambda: transform.local_laplace(1.0, 1.0),
        "privunit": lambda: transform.privunit(1.0, 2.0),
        "randomized_response": lambda: transform.randomized_response(1.0),
        "low_rank": lambda: transform.low_rank(1),
        "matrix_mechanism": lambda: _at_a_mean(transform.matrix_mechanism(1.0, 0.5, num_rounds=8, bands=3)),
        "natural_compression": transform.natural_compression,
        "personal_clip": lambda: transform.personal_clip(0.5),
        "qsgd": lambda: transform.qsgd(4),
        "quantize": lambda: transform.quantize(4, range=2.0, keeps_zeros=False),
        "random_k": lambda: transform.random_k(0.5),
        "rotated": lambda: transform.rotated(transform.scaled_sign()),
        "scaled_sign": transform.scaled_sign,
        "skellam_mechanism": lambda: transform.skellam_mechanism(1.0, 1.0, 10, granularity=0.1),
        "stateless": lambda: transform.stateless(lambda key, x: jnp.clip(x, -1, 1), l2_bound=3.0, nonexpansive=True),
        "terngrad": transform.terngrad,
        "threshold": lambda: transform.threshold(0.5),
        "top_k": lambda: transform.top_k(0.5),
    },
    "aggregation": {
        "adaptive_clipping": lambda: aggregation.adaptive_clipping(aggregation.median(), 1),
        "additive_shares": lambda: _fixed_point(lambda rule: aggregation.additive_shares(rule, 2, masks=True)),
        "bucketing": lambda: aggregation.bucketing(aggregation.trimmed_mean(1), 2),
        "bulyan": lambda: aggregation.bulyan(1),
        "by_examples": lambda: _fixed_point(lambda rule: aggregation.by_examples(rule, 8)),
        "by_part": _first_of_two,
        "centered_clipping": lambda: aggregation.centered_clipping(1.0),
        "extrapolated": aggregation.extrapolated,
        "fixed_mean": lambda: aggregation.fixed_mean(5.0),
        "fltrust": _trusting,
        "foolsgold": lambda: aggregation.foolsgold(p.NUM_CLIENTS),
        "gather": lambda: aggregation.gather(lambda key, updates, weights, ids: (updates * weights[:, None]).sum(0)),
        "geometric_median": lambda: aggregation.geometric_median(3),
        "homomorphic_mean": aggregation.homomorphic_mean,
        "horvitz_thompson": lambda: aggregation.horvitz_thompson(DESIGN, TOTAL),
        "keep_old": lambda: aggregation.keep_old(TOTAL),
        "krum": lambda: aggregation.krum(1, 2),
        "li_scheme_one": aggregation.li_scheme_one,
        "li_scheme_two": lambda: aggregation.li_scheme_two(DESIGN, TOTAL),
        "mean": aggregation.mean,
        "mean_around_median": lambda: aggregation.mean_around_median(1),
        "median": lambda: aggregation.median(trust_weights=True),
        "minimum_diameter": lambda: aggregation.minimum_diameter(1),
        "modular_sum": _fixed_point,
        "real_secure_sum": lambda: _fixed_point(lambda rule: aggregation.real_secure_sum(rule, 1)),
        "secure_sum": lambda: _fixed_point(lambda rule: aggregation.secure_sum(rule, 1, masks=True)),
        "nearest_neighbour_mixing": lambda: aggregation.nearest_neighbour_mixing(aggregation.median(), 1),
        "norm_bounding": lambda: aggregation.norm_bounding(aggregation.mean(), 1.0),
        "sign_majority": aggregation.sign_majority,
        "total": aggregation.total,
        "trimmed_mean": lambda: aggregation.trimmed_mean(1),
    },
    "server": {
        "adaptive": lambda: server.optimizer(server.adaptive("yogi", 0.1)),
        "control_variates": lambda: server.control_variates(server.optimizer(optax.sgd(1.0))),
        "downlink": lambda: server.downlink(server.optimizer(optax.sgd(1.0)), transform.top_k(count=2)),
        "dynamic": lambda: server.dynamic(server.optimizer(optax.sgd(1.0)), 0.5),
        "last_two": lambda: server.last_two(server.optimizer(optax.sgd(1.0))),
        "optimizer": lambda: server.optimizer(optax.sgd(1.0, momentum=0.9)),
        "replacement": server.replacement,
        "rescaled": lambda: server.rescaled(server.optimizer(optax.sgd(1.0))),
        "with_clients_part": lambda: clients_part("half"),
        "with_own_data": lambda: server.with_own_data(server.optimizer(optax.sgd(1.0)), _own_steps(), _own()),
        "with_own_part": lambda: own_part("half"),
        "statistics": lambda: server.statistics(server.optimizer(optax.sgd(1.0)), *BASE[::2]),
    },
    "algorithms": {
        "as_client_update": lambda: _in_groups(
            edge_sampler=sampling.uniform(5, 3), edge_optimizer=optax.sgd(0.5, momentum=0.5), keep_edges=True
        ),
        "clustered_by_updates": lambda: algorithms.clustered_by_updates(
            p.linear_loss,
            sampling.full(p.NUM_CLIENTS),
            optax.sgd(p.RATE),
            max_clusters=3,
            mean_norm=0.5,
            client_norm=0.5,
            **WORK,
            **RUN,
        ),
        "choco": lambda: _gossip(
            algorithms.choco,
            optax.sgd(p.RATE),
            transform=transform.top_k(0.5),
            mixing=network.metropolis,
            **WORK,
        )(),
        "clipped_gossip": lambda: _gossip(
            algorithms.clipped_gossip,
            optax.sgd(p.RATE),
            num_byzantine=1,
            attack=adversary.alie(),
            who=adversary.clients([3]),
            **WORK,
        )(),
        "consensus": lambda: _gossip(algorithms.consensus, optax.sgd(p.RATE), **WORK)(),
        "dgd": lambda: _gossip(algorithms.dgd, learning_rate=0.05)(),
        "dpsgd": lambda: _gossip(algorithms.dpsgd, optax.sgd(p.RATE), **WORK)(),
        "asynchronous": lambda: algorithms.asynchronous(
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
        "fedadagrad": _recipe(algorithms.fedadagrad),
        "fedadam": _recipe(algorithms.fedadam),
        "fedasync": _asynchronous(algorithms.fedasync, arrivals_per_step=3),
        "fedat": lambda: algorithms.fedat(
            p.linear_loss,
            _devices(),
            optax.sgd(p.RATE),
            population_size=p.NUM_CLIENTS,
            num_tiers=3,
            clients_per_tier=5,
            **WORK,
            **RUN,
        ),
        "agnostic": lambda: algorithms.agnostic(
            p.linear_loss, sampling.full(p.NUM_CLIENTS), optax.sgd(p.RATE), **WORK, **RUN
        ),
        "apfl": _recipe(algorithms.apfl),
        "ditto": _recipe(algorithms.ditto),
        "fedavg": _recipe(algorithms.fedavg),
        "fedavgm": _recipe(algorithms.fedavgm, server_learning_rate=0.3),
        "fedbabu": _keeping(algorithms.fedbabu),
        "fedbuff": _asynchronous(algorithms.fedbuff, buffer_size=5),
        "feddf": _distilled,
        "feddyn": _recipe(algorithms.feddyn, coefficient=1.0, weighting="uniform"),
        "fedem": _of_components,
        "federated": lambda: algorithms.federated(
            sampling.with_dropout(SAMPLER, 0.2),
            p.counting(_local()),
            aggregation.mean(),
            server.optimizer(optax.sgd(1.0)),
            transform.stateless(lambda key, update: jax.tree.map(lambda x: x * 0.9, update)),
            **RUN,
        ),
        "fedexp": _recipe(algorithms.fedexp, weighting="uniform"),
        "fedmd": _imitating,
        "fedmgda": _recipe(algorithms.fedmgda, server_learning_rate=0.1),
        "fednova": _recipe(algorithms.fednova),
        "fedper": _keeping(algorithms.fedper),
        "fedprox": _recipe(algorithms.fedprox, coefficient=0.5),
        "fedproto": _by_class,
        "fedrep": _keeping(algorithms.fedrep),
        "fedsgd": lambda: algorithms.fedsgd(p.linear_loss, SAMPLER, optax.sgd(p.RATE), **RUN),
        "fedyogi": _recipe(algorithms.fedyogi),
        "heterofl": _by_width,
        "fine_tuned": lambda: algorithms.fine_tuned(
            _recipe(algorithms.fedavg)(), p.linear_loss, optax.sgd(p.RATE), num_steps=2
        ),
        "flexlora": _of_factors,
        "hierarchical_fedavg": _in_groups,
        "boosted_trees": _boosted,
        "gaussian_mixture": _statistic(
            algorithms.gaussian_mixture, num_components=2, low=-2.0, high=2.0, input_shape=(p.WIDTH,)
        ),
        "heavy_hitters": _statistic(
            algorithms.heavy_hitters, num_symbols=8, bits_per_round=2, threshold=0.1, symbols=signs
        ),
        "histogram": _statistic(algorithms.histogram, low=-2.0, high=2.0, num_bins=3, column=0),
        "kmeans": _statistic(algorithms.kmeans, num_clusters=2, low=-1.0, input_shape=(p.WIDTH,)),
        "quantiles": _statistic(algorithms.quantiles, low=-3.0, high=3.0, column=0),
        "ifca": _recipe(algorithms.ifca, num_clusters=2),
        "local": _alone,
        "gradient_tracking": lambda: _gossip(algorithms.gradient_tracking, learning_rate=0.02)(),
        "mime": lambda: algorithms.mime(p.linear_loss, SAMPLER, optax.sgd(0.05), weighting="uniform", **WORK, **RUN),
        "mime_lite": lambda: algorithms.mime_lite(
            p.linear_loss, SAMPLER, optax.sgd(0.05), weighting="uniform", **WORK, **RUN
        ),
        "pairwise_gossip": lambda: algorithms.pairwise_gossip(
            p.linear_loss, SAMPLER, optax.sgd(p.RATE), network.ring(p.NUM_CLIENTS), **WORK, **RUN
        ),
        "per_fedavg": _recipe(algorithms.per_fedavg),
        "pfedme": _recipe(algorithms.pfedme),
        "qfedavg": _recipe(algorithms.qfedavg),
        "term": _recipe(algorithms.term),
        "push_sum": lambda: _gossip(
            algorithms.push_sum,
            optax.sgd(p.RATE),
            mixing=lambda graph: network.with_node_failures(network.push(network.exponential(p.NUM_CLIENTS)), 0.1),
            **WORK,
        )(),
        "hierarchical_gossip": _gossiping,
        "pretrained": lambda: algorithms.pretrained(_recipe(algorithms.fedavg)(), _own_steps(), _own()),
        "record_private_fedavg": lambda: algorithms.record_private_fedavg(
            p.linear_loss,
            SAMPLER,
            optax.sgd(p.RATE),
            clip_norm=1.0,
            noise_multiplier=0.5,
            num_examples=p.ROWS,
            **WORK | {"batch_size": WORK["batch_size"] or p.ROWS},
            **RUN,
        ),
        "scaffold": _recipe(algorithms.scaffold, weighting="uniform"),
        "hierarchical_split_gnn": lambda: _over_graphs(GROUPS),
        "split_gnn": _over_graphs,
        "vertical": _by_party,
        "split_client": lambda: _split(_split_star),
        "split_learning": split_recipe(algorithms.split_learning, handover="peer", rate=0.02),
        "splitfed": split_recipe(algorithms.splitfed, server_copies=3),
    },
}


def round_for(aggregator) -> Round:
    """What an aggregator may read in a round of a model of three numbers: ids, who reported, state and model."""
    state = () if aggregator.start is None else aggregator.start(jax.ShapeDtypeStruct((3,), jnp.float32))
    cohort = Cohort(jnp.arange(p.SLOTS, dtype=jnp.int32), None, jnp.ones(p.SLOTS, bool))
    return Round(cohort, jnp.ones(3, jnp.float32), state)


NO_PARTS = {"load_of", "over_rounds", "most_feasible_work", "smallest_deadline", "within_budget", "work"}
NO_PARTS |= {"local_work", "plain_sgd_rate", "unroll"}
NO_PARTS |= {
    "algebraic_connectivity",
    "hears_back",
    "is_connected",
    "laplacian_extremes",
    "laplacian_matrix",
    "spectrum",
}  # of graphs
NO_PARTS |= {"matrix_of", "mixed", "split_costs", "split_loss", "transcript", "vertical_loss", "vertical_transcript"}


def members(name: str) -> list[str]:
    """The factories of a subpackage: every public name that is not a class, except what makes no part."""
    subpackage = SUBPACKAGES[name]
    return sorted(
        public
        for public in public_names(subpackage.__name__)
        if not isinstance(getattr(subpackage, public), type) and public not in NO_PARTS
    )


# Algorithms that train no model: no loss is differentiated, and none is reported by all of them.
STATISTICS = {"boosted_trees", "gaussian_mixture", "heavy_hitters", "histogram", "kmeans", "quantiles"}
COMPILED = {  # one row a family, where a law compiles each row
    "client": ("normalized", "private_sgd", "scaffold"),
    "aggregation": ("gather", "krum", "mean", "modular_sum"),
    "algorithms": ("dpsgd", "fedadam", "fedasync", "hierarchical_fedavg", "scaffold", "splitfed"),
    "sampling": ("cyclic", "full", "poisson", "with_dropout"),
}
TRACED = (*COMPILED["algorithms"], "ditto", "kmeans")  # one algorithm a wing, where a law traces each row


def rows(names: Iterable[str], compiled: Iterable[str]) -> list:
    """Parameters of a law that compiles: `compiled` in every run of the tests, the other rows by `pytest -m full`."""
    assert set(compiled) < set(names), "rows that do not exist, or nothing left for `-m full`"
    return [name if name in compiled else pytest.param(name, marks=pytest.mark.full) for name in names]


def compiled_rows(subpackage: str) -> list:
    """`rows` of a subpackage's cases."""
    return rows(sorted(CASES[subpackage]), COMPILED[subpackage])
