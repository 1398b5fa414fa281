"""SplitGNN against training on the whole graph, numbers by hand, and counted arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.graphs import partitions, worked_example
from fedjax_sim import algorithms, models, network, population, run, sampling, transform
from fedjax_sim.models.graph import apply_layer
from fedjax_sim.models.graph_layers import graph_convolution, known_edges
from fedjax_sim.prng import stream
from fedjax_sim.round.round import observe
from fedjax_sim.types import GraphData
from tests.refusals import refused

KEY = jax.random.key(0)
FULL = (1.316497, 2.074915, 3.299660, 3.224745)
DROPPED = (1.5, 1.5, 3.5, 3.5)


def blocks(parties, partition="random", num_nodes=48):
    options = {"num_nodes": num_nodes, "num_classes": 3, "num_features": 5, "labelled_share": 0.4}
    return population.stochastic_blocks(num_clients=parties, partition=partition, **options)


def trained(model, parties, *, rounds=8, optimizer=None, data=None, **options):
    """(parameters, infos) of some rounds with everybody."""
    data = blocks(parties) if data is None else data
    made = algorithms.split_gnn(model, sampling.full(parties), optimizer or optax.adam(0.05), **options)
    state, step, infos = made.init(KEY, model.init(KEY)[0], data.train), jax.jit(made.step), []
    for i in range(rounds):
        state, info = step(jax.random.fold_in(KEY, i), state, data.train)
        infos.append(jax.device_get(info))
    return made.params(state), infos


def check_close(a, b, tolerance=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), a, b)


def whole_graph(model, data, *, rounds, rate, decay=0.0):
    """Gradient descent on the whole graph, written out; dropout draws as in the rounds."""
    x = jax.tree.map(jnp.asarray, data.test["x"])
    y = np.full(x.ids.shape, -1, np.int32)
    known = data.train.examples
    for ids, labels in zip(np.asarray(known["x"].ids), np.asarray(known["y"]), strict=True):
        y[0, ids[labels >= 0]] = labels[labels >= 0]

    def loss(params, key):
        values = models.node_cross_entropy(model.apply(params, (), x, key, True)[0], jnp.asarray(y))
        first = sum((leaf**2).sum() for leaf in jax.tree.leaves(params["graph_0"]))
        return values["loss"][0] + decay / 2 * first

    @jax.jit
    def step(params, key):
        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params, key))

    params = model.init(KEY)[0]
    for i in range(rounds):
        params = step(params, stream(jax.random.fold_in(KEY, i), "loss"))
    return params


@pytest.mark.parametrize(
    "make", [models.gcn] + [pytest.param(make, marks=pytest.mark.full) for make in (models.graph_sage, models.gat)]
)
def test_exchange_is_the_whole_graph(make):
    """Catches a halo that points elsewhere, a degree without cut edges, gradients that stop at a boundary, a mean of
    parties' means, dropout that goes by place."""
    model = make(5, 3, hidden=(4,), dropout=0.3)
    data = blocks(4)
    wanted = whole_graph(model, data, rounds=8, rate=0.3, decay=0.01)
    options = {"optimizer": optax.sgd(0.3), "client_layers": 2, "weight_decay": 0.01}
    check_close(trained(model, 4, data=data, **options)[0], wanted)
    if make is models.graph_sage:
        check_close(trained(model, 7, data=blocks(7, "label"), **options)[0], wanted)
        apart, _ = trained(model, 4, data=data, cut_edges="drop", **options)
        assert np.abs(apart["output"]["kernel"] - wanted["output"]["kernel"]).max() > 1e-2


@pytest.mark.full
def test_a_server_with_the_graph():
    """Catches a server that sums over fewer edges than it knows. N2: the parties only multiply their features."""
    model = models.gcn(5, 3, hidden=(4,), dropout=0.2)
    data = blocks(4)
    wanted = whole_graph(model, data, rounds=8, rate=0.3)
    for cut_edges in ("exchange", "drop"):
        options = {"optimizer": optax.sgd(0.3), "graph_at": "server", "cut_edges": cut_edges, "data": data}
        found, infos = trained(model, 4, **options)
        check_close(found, wanted)
        assert infos[0]["boundary_bytes"].total() == 0
        assert infos[0]["activation_bytes"].total() == 2 * 48 * 4 * 4
    with pytest.raises(ValueError, match=r"graph_at: expected \"clients\""):
        algorithms.split_gnn(models.graph_sage(5, 3), sampling.full(2), optax.sgd(0.1), graph_at="server")


@pytest.mark.full
def test_two_graph_layers():
    """Catches a server's layer that drops cut edges: 5 -> 8 (parties) -> 6 (server, whole graph) -> 3 (dense)."""
    model = models.gcn(5, 3, hidden=(8, 6), output="dense", dropout=0.0)
    data = blocks(3)
    wanted = whole_graph(model, data, rounds=5, rate=0.3)
    found, infos = trained(model, 3, data=data, rounds=5, optimizer=optax.sgd(0.3))
    check_close(found, wanted)
    apart, others = trained(model, 3, data=data, rounds=5, optimizer=optax.sgd(0.3), cut_edges="drop")
    assert infos[0]["cut_edges_used"] > 0 and others[0]["cut_edges_used"] == 0
    assert np.abs(apart["graph_1"]["kernel"] - wanted["graph_1"]["kernel"]).max() > 1e-3


def test_path_by_hand():
    """Catches dropped edges that change boundary nodes alone: their neighbours' degrees change nodes 1 and 4 as well.

    The path 1-2-3-4 with features 1, 2, 3, 4, cut between 2 and 3; one sum over neighbours with weight 1.
    """
    graph = population.graph_data(np.arange(1.0, 5)[:, None], [[0, 1], [1, 2], [2, 3]])
    parties = population.parties_of(graph, node_owner=[0, 0, 1, 1])
    layer = graph_convolution("sum", 1, 1, activation=lambda x: x)
    params = {"kernel": jnp.ones((1, 1)), "bias": jnp.zeros(1)}
    graphs = jax.tree.map(jnp.asarray, parties.graphs)
    for there, wanted in ((parties.halo >= 0, FULL), (np.zeros_like(parties.halo, bool), DROPPED)):

        def exchange(sent, there=there):
            return sent, jnp.where(there[..., None], sent.reshape(-1, 1)[np.maximum(parties.halo, 0)], 0)

        @jax.jit
        def outputs(graphs, there, exchange=exchange):
            edges = jax.vmap(known_edges)(graphs, there)
            return apply_layer(layer, params, edges, graphs.nodes, None, exchange=exchange)

        out = outputs(graphs, there)
        np.testing.assert_allclose(out.reshape(-1), wanted, atol=1e-6)


def path_data(parties):
    graph = population.graph_data(np.arange(1.0, 5)[:, None], [[0, 1], [1, 2], [2, 3]])
    options = {"num_clients": parties, "partition": "label", "name": "path"}
    return population.node_data(graph, np.array([0, 0, 1, 1]), np.array([0, 3]), np.array([1, 2]), **options)


@pytest.mark.full
@pytest.mark.parametrize("cut_edges, wanted", [("exchange", FULL), ("drop", DROPPED)])
def test_path_through_the_algorithm(cut_edges, wanted):
    """The same sums as the server sees them. Catches an algorithm that exchanges where it should drop."""
    model = models.gcn(1, 2, hidden=(1,), output="dense", dropout=0.0)
    params = {
        "graph_0": {"kernel": jnp.ones((1, 1)), "bias": jnp.zeros(1)},
        "output": {"kernel": jnp.ones((1, 2)), "bias": jnp.zeros(2)},
    }
    data = path_data(2)
    made = algorithms.split_gnn(model, sampling.full(2), optax.sgd(0.1), cut_edges=cut_edges)
    seen = observe(made, KEY, made.init(KEY, params, data.train), data.train)
    np.testing.assert_allclose(np.sort(seen.messages["embeddings"].reshape(-1)), np.sort(wanted), atol=1e-6)


@pytest.mark.full
def test_bytes():
    """Catches a direction left out, halo rows for boundary rows and the reverse, padding that is counted.

    The path cut in the middle: 2 boundary nodes (2 and 3), 2 halo nodes; 4 nodes.
    """
    model, data = models.gcn(1, 2, hidden=(3,), dropout=0.0), path_data(2)
    own = 1 * 3 + 3
    _, infos = trained(model, 2, data=data, rounds=1)  # the first layer at the parties, the second at the server
    assert infos[0]["boundary_bytes"].total() == 2 * (2 + 2) * 3 * 4
    assert infos[0]["activation_bytes"].total() == 2 * 4 * 3 * 4
    each = ((2 + 2) * 3 + 4 * 3 + 2 * own) * 4
    assert infos[0]["uplink_bytes"].total() == infos[0]["downlink_bytes"].total() == each
    assert infos[0]["cut_edges_used"] == 2
    _, infos = trained(model, 2, data=data, rounds=1, client_layers=2)
    assert infos[0]["boundary_bytes"].total() == 2 * (2 + 2) * (3 + 2) * 4
    assert infos[0]["activation_bytes"].total() == 0
    assert infos[0]["uplink_bytes"].total() == ((2 + 2) * 5 + 2 * (own + 3 * 2 + 2)) * 4
    # A star over three parties: each of its three nodes is asked for, the middle one by two: 3 boundary, 4 halo nodes.
    star = population.graph_data(np.arange(3.0)[:, None], [[0, 1], [0, 2]])
    options = {"num_clients": 3, "partition": "label", "name": "star"}
    star = population.node_data(star, np.array([0, 1, 1]), np.array([0]), np.array([1]), **options)
    _, infos = trained(model, 3, data=star, rounds=1)
    assert infos[0]["uplink_bytes"].total() == infos[0]["downlink_bytes"].total() == (7 * 3 + 3 * 3 + 3 * own) * 4
    half = transform.stateless(lambda key, x: x, wire=lambda spec, wire: wire._replace(payload_bits=8 * wire.values))
    _, infos = trained(model, 3, data=star, rounds=1, link=network.link(forward=half))  # a byte a number, forward only
    up, down = (infos[0][f"{way}link_bytes"].total() for way in ("up", "down"))
    assert up == 3 * 3 + 4 * 3 * 4 + 3 * 3 + 3 * own * 4
    assert down == 4 * 3 + 3 * 3 * 4 + 3 * 3 * 4 + 3 * own * 4
    _, infos = trained(model, 2, data=data, rounds=1, link=network.link(encrypted=True))  # 28 bytes a batch
    assert infos[0]["boundary_bytes"].total() == 2 * (2 + 2) * (3 * 4 + 28)  # as many parties as rows, in this layer
    assert infos[0]["activation_bytes"].total() == 2 * (4 * 3 * 4 + 2 * 28)
    assert infos[0]["uplink_bytes"].total() == infos[0]["downlink_bytes"].total() == each + 4 * 28 + 2 * 28
    _, infos = trained(model, 2, data=data, rounds=1, cut_edges="drop", link=network.link(encrypted=True))
    assert infos[0]["boundary_bytes"].total() == infos[0]["cut_edges_used"] == 0
    assert infos[0]["activation_bytes"].total() == 2 * (4 * 3 * 4 + 2 * 28)


@pytest.mark.full
def test_links():
    """Catches a link left out of one way, gradients quantised where they are added up, and bytes of plain floats.

    Halving every embedding on its way to another party halves its weight; halving gradients changes what goes back.
    """
    model, data = models.gcn(5, 3, hidden=(4,), dropout=0.0), blocks(3)
    half = transform.stateless(lambda key, x: jax.tree.map(lambda y: y / 2, x))
    options = {"data": data, "rounds": 2, "optimizer": optax.sgd(0.3), "client_layers": 2}
    plain, _ = trained(model, 3, **options)
    identity, _ = trained(model, 3, link=network.link(), **options)
    jax.tree.map(np.testing.assert_array_equal, plain, identity)
    for way in ("forward", "backward"):
        moved, _ = trained(model, 3, link=network.link(**{way: half}), **options)
        assert np.abs(moved["graph_0"]["kernel"] - plain["graph_0"]["kernel"]).max() > 1e-4, way
    eight = transform.quantize(8)
    close, infos = trained(model, 3, link=network.link(forward=eight, backward=eight), **options)
    check_close(close, plain, 0.02)
    _, exact = trained(model, 3, **options)
    assert infos[0]["boundary_bytes"].total() < 0.7 * exact[0]["boundary_bytes"].total()


@pytest.mark.full
def test_worked_example():
    """N6, N7: 100 nodes with 16 features, 16 -> 32 -> 7, 30 steps of Adam at 0.005 on random labels.

    Catches other counts: 6,400 floats a step cross to the server and back; and a loss that starts far from ln 7.
    """
    found = worked_example.main()
    assert (found["client"], found["server"], found["floats"]) == (544, 231, 192_000)
    assert abs(found["first"] - np.log(7)) < 0.3 and found["last"] < found["first"]


@pytest.mark.full
def test_what_partitions_cost():
    """The path by hand, cut by nodes, by edges and by neighbourhoods. Catches an edge or a node counted twice, and an
    error of padding."""
    x = np.arange(1.0, 5)
    graph = population.graph_data(x[:, None], [[0, 1], [1, 2], [2, 3]])
    size = np.mean(np.square(FULL))
    apart = partitions.cost(graph, population.parties_of(graph, node_owner=[0, 0, 1, 1]))
    error = np.mean(np.square(np.array(FULL) - DROPPED)) / size
    assert (apart["cut"], apart["copies"], apart["nodes"], apart["holders"]) == (2 / 6, 4 / 6, 1, 1)
    np.testing.assert_allclose(apart["error"], error, rtol=1e-5)
    middle = (graph.senders + graph.receivers > 3).astype(int)  # the last edge at party 1; node 3 is at both
    edges = partitions.cost(graph, population.parties_of(graph, edge_owner=middle))
    assert (edges["cut"], edges["copies"], edges["nodes"], edges["holders"]) == (0, 1, 1, 5 / 4)
    second = (x[0] + x[2]) / np.sqrt(6) + x[1] / 3  # node 3 has one neighbour at each party, so node 2 changes too
    third, fourth = x[1] / np.sqrt(6) + x[2] / 2, x[2] / 2 + x[3] / 2  # node 3 at party 0, nodes 3 and 4 at party 1
    there = [
        0,
        (second - FULL[1]) ** 2,
        ((third - FULL[2]) ** 2 + (fourth - FULL[2]) ** 2) / 2,
        (fourth - FULL[3]) ** 2,
    ]
    np.testing.assert_allclose(edges["error"], np.mean(there) / size, rtol=1e-5)
    whole = partitions.cost(graph, population.parties_of(graph, held=np.ones((2, 4), bool)))
    assert whole == {"cut": 0, "copies": 2, "nodes": 1, "holders": 2, "error": pytest.approx(0, abs=1e-12)}


@pytest.mark.full
def test_absent_parties_leave_no_trace():
    """Catches embeddings of parties that take no part: their edges are dropped for the round, their labels too."""
    model, data = models.gcn(5, 3, hidden=(4,), dropout=0.0), blocks(4)
    ids = np.asarray(data.train.examples["x"].ids)

    sampler = sampling.poisson(4, 0.5)
    made = algorithms.split_gnn(model, sampler, optax.sgd(0.5), client_layers=2)
    for seed in range(20):
        key = jax.random.key(seed)
        cohort, _ = sampler.sample(stream(key, "sampling"), sampler.init())
        present = np.sort(np.asarray(cohort.ids)[np.asarray(cohort.reported)])
        if len(present) in (2, 3):
            break
    step = jax.jit(made.step)

    def after(data):
        return made.params(step(key, made.init(KEY, model.init(KEY)[0], data.train), data.train)[0])

    found = after(data)
    examples = data.train.examples
    absent = ~np.isin(np.arange(4), present)[:, None, None]
    holder = np.asarray(examples["halo"]) // ids.shape[-1]
    spoiled = examples | {"x": examples["x"]._replace(nodes=jnp.where(absent, 1e6, examples["x"].nodes))}
    spoiled["halo"] = jnp.where(np.isin(holder, present), examples["halo"], -1)  # nobody asks for what is not there
    spoiled = data._replace(train=population.stored(spoiled, np.arange(5)))
    jax.tree.map(np.testing.assert_array_equal, found, after(spoiled))
    assert np.abs(found["output"]["kernel"] - model.init(KEY)[0]["output"]["kernel"]).max() > 0


@pytest.mark.full
def test_what_the_server_sees():
    """Structural: catches inputs or labels in the view, and gradients of parties that do not add up."""
    model, data = models.gcn(5, 3, hidden=(4,), dropout=0.0), blocks(4)
    made = algorithms.split_gnn(model, sampling.full(4), optax.sgd(0.5))
    state = made.init(KEY, model.init(KEY)[0], data.train)
    seen = observe(made, KEY, state, data.train)
    assert set(seen.messages) == {"embeddings", "boundary_graph_0", "boundary_graph_0_gradients", "gradients"}
    shapes = {x.shape[-1] for x in jax.tree.leaves(seen.messages) if x.ndim == 3 and x.shape[1] != 5}
    assert shapes == {4}, "five features would be inputs"
    assert set(seen.broadcast) == {"graph_0"} == set(seen.messages["gradients"])
    after = made.params(made.step(KEY, state, data.train)[0])
    total = jax.tree.map(lambda x: x.sum(0), seen.messages["gradients"]["graph_0"])
    moved = jax.tree.map(lambda old, new: (old - new) / 0.5, made.params(state)["graph_0"], after["graph_0"])
    check_close(total, moved, 1e-5)
    whole = jax.jit(model.layers[0].send)
    assert callable(whole) and not np.isnan(seen.messages["embeddings"]).any()


@pytest.mark.full
def test_a_step_that_is_not_finite_is_skipped():
    """Catches a model of NaN after one step that overflows."""
    model, data = models.gcn(5, 3, hidden=(4,), dropout=0.0), blocks(2)
    start = model.init(KEY)[0]
    found, infos = trained(model, 2, data=data, rounds=2, optimizer=optax.chain(optax.scale(1e38), optax.scale(1e38)))
    assert [int(info["skipped_rounds"]) for info in infos] == [1, 1]
    jax.tree.map(np.testing.assert_array_equal, start, found)


@pytest.mark.full
def test_resume_gives_the_same_bits(tmp_path):
    """Catches a state that a checkpoint lacks, with cohorts of some, dropout and Adam."""
    model, data = models.gcn(5, 3, hidden=(4,)), blocks(4)
    made, start = algorithms.split_gnn(model, sampling.uniform(4, 3), optax.adam(0.05)), model.init(KEY)[0]
    options = {"directory": tmp_path / "run", "checkpoint_every": 1}
    whole, _ = run(KEY, made, start, data.train, 5)
    run(KEY, made, start, data.train, 2, **options)
    again, _ = run(KEY, made, start, data.train, 5, resume=True, **options)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(whole), jax.device_get(again))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"client_layers": 3}, r"client_layers: expected an integer in \[1, 2\]"),
        ({"client_layers": 0}, "client_layers"),
        ({"cut_edges": "keep"}, "cut_edges"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"model": models.linear(input_shape=(5,), num_outputs=3)}, "model: expected a network of graph layers"),
        ({"sampler": sampling.with_replacement(4, 2)}, "sampler"),
        ({"sampler": sampling.weighted_without_replacement([1, 2, 3, 4], 2)}, "sampler"),
        (
            {"sampler": sampling.with_over_invitation(sampling.uniform(4, 2), 2)},
            "sampler: expected one whose parties do",
        ),
        ({"sampler": sampling.with_stragglers(sampling.full(4), 0.5)}, "sampler: expected one whose parties do"),
        ({"sampler": sampling.power_of_choice(sampling.uniform(4, 3), 2)}, "sampler"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    """Catches a cut that is not there, and cohorts that would bias the loss."""
    given = {"model": models.gcn(5, 3), "sampler": sampling.full(4), "optimizer": optax.sgd(0.1)} | options
    with pytest.raises(ValueError, match=words):
        algorithms.split_gnn(**given)


@pytest.mark.parametrize("params, shown", [(None, "'NoneType'"), ({"output": {}}, r"\['output'\]. .*'graph_0'")])
def test_a_model_of_another_kind_is_refused(params, shown):
    made = algorithms.split_gnn(models.gcn(5, 3), sampling.full(4), optax.sgd(0.1))
    with pytest.raises(ValueError, match=f"params: expected .*, got {shown}"):
        made.init(KEY, params, blocks(4).train)


@pytest.mark.full
def test_an_empty_cohort():
    """Catches a loss of 0 where nobody was there, bytes of nobody, and a step on nothing."""
    data, start = blocks(4), models.gcn(5, 3).init(KEY)[0]
    made = algorithms.split_gnn(models.gcn(5, 3), sampling.poisson(4, 1e-6), optax.sgd(0.1), weight_decay=0.1)
    state, info = made.step(KEY, made.init(KEY, start, data.train), data.train)
    jax.tree.map(np.testing.assert_array_equal, start, made.params(state))
    assert np.isnan(info["local_loss"]) and np.isnan(info["local_accuracy"]) and info["skipped_rounds"] == 1
    assert all(info[name].total() == 0 for name in ("uplink_bytes", "downlink_bytes", "boundary_bytes"))


@pytest.mark.full
def test_bytes_of_wider_numbers():
    """Under JAX_ENABLE_X64. Catches rows that are counted as float32 where parameters make them float64."""
    model, data = models.gcn(1, 2, hidden=(3,), dropout=0.0), path_data(2)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype(np.float64), jax.device_get(model.init(KEY)[0]))
        made = algorithms.split_gnn(model, sampling.full(2), optax.sgd(0.1))
        state = made.init(KEY, params, data.train)
        seen, info = observe(made, KEY, state, data.train).messages, made.step(KEY, state, data.train)[1]
        assert seen["embeddings"].dtype == seen["boundary_graph_0"].dtype == np.float64
        assert info["activation_bytes"].total() == 2 * 4 * 3 * 8
        assert info["boundary_bytes"].total() == 2 * (2 + 2) * 3 * 8


def test_a_readout_is_refused():
    """Catches nodes that are classified by a network for whole graphs, whose readout is ignored."""
    data, model = blocks(2), models.gcn(5, 3, readout="mean")
    made = algorithms.split_gnn(model, sampling.full(2), optax.sgd(0.1))
    with pytest.raises(ValueError, match="model: expected outputs for each node"):
        jax.eval_shape(made.step, KEY, made.init(KEY, model.init(KEY)[0], data.train), data.train)


def test_data_of_another_kind_are_refused():
    """Catches rows that would be taken for graphs."""
    made = algorithms.split_gnn(models.gcn(64, 10), sampling.full(10), optax.sgd(0.1))
    digits = population.digits(num_clients=10).train
    state = made.init(KEY, models.gcn(64, 10).init(KEY)[0], digits)
    with refused("population", rule='"halo"'):
        jax.eval_shape(made.step, KEY, state, digits)
    assert GraphData._fields[0] == "nodes"
