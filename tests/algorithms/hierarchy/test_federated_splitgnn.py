"""SplitGNN inside of a federation, against SplitGNN, training on each group's own graph, FedAvg, and counted arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, models, network, population, run, sampling, transform
from fedjax_sim.types import noisy_parts
from tests.algorithms.split.test_splitgnn import KEY, blocks, check_close, path_data
from tests.refusals import refused

MODEL = models.gcn(5, 3, hidden=(4,), dropout=0.0)
GROUPS = np.array([1, 0, 1, 0, 1])  # neither in order nor of one size


def trained(made, start, people, rounds):
    state, step, infos = made.init(KEY, start, people), jax.jit(made.step), []
    for i in range(rounds):
        state, info = step(jax.random.fold_in(KEY, i), state, people)
        infos.append(jax.device_get(info))
    return made.params(state), infos


def hierarchy(people, optimizer, *, model=MODEL, **options):
    size = people.size
    options = {"group_size": people.group_size, "mesh": None} | options
    return algorithms.hierarchical_split_gnn(model, sampling.full(size), optimizer, **options)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"keep_edges": True}, pytest.param({"edge_rounds": 3, "client_layers": 2}, marks=pytest.mark.full)]
)
def test_one_client_is_split_gnn(options):
    """N5. Catches an optimiser that begins anew, embeddings that go elsewhere in a group, other counts."""
    data, start = blocks(4), MODEL.init(KEY)[0]
    everybody, rounds = population.grouped(data.train, [0] * 4), 3
    keeps = options.get("keep_edges", False)
    optimizer = optax.adam(0.05) if keeps else optax.sgd(0.3)
    found, infos = trained(hierarchy(everybody, optimizer, **options), start, everybody, rounds)
    inside = options.get("edge_rounds", 1)
    alone = algorithms.split_gnn(MODEL, sampling.full(4), optimizer, client_layers=options.get("client_layers", 1))
    wanted, others = trained(alone, start, data.train, rounds * inside)
    check_close(found, wanted, 1e-6)
    for name in ("uplink_bytes", "downlink_bytes", "boundary_bytes", "activation_bytes"):
        assert infos[0][f"edge_{name}"].total() == inside * others[0][name].total() > 0 or "activation" in name
    mean = np.mean([x["local_loss"] for x in others[:inside]])
    np.testing.assert_allclose(infos[0]["local_loss"], mean, rtol=1e-6)


def own_graph(data, mine, start, *, steps, rate):
    """(parameters, number of labelled nodes) after gradient descent on the graph of some parties, written out."""
    known, x = data.train.examples, jax.tree.map(np.asarray, data.test["x"])
    y, held = np.full(x.ids.shape, -1, np.int32), np.zeros(x.ids.shape[1], bool)
    for ids, labels in zip(np.asarray(known["x"].ids)[mine], np.asarray(known["y"])[mine], strict=True):
        y[0, ids[labels >= 0]], held[ids[ids >= 0]] = labels[labels >= 0], True
    among = held[x.senders] & held[x.receivers]
    graph = x._replace(senders=np.where(among, x.senders, -1), receivers=np.where(among, x.receivers, -1))

    def loss(params):
        return models.node_cross_entropy(MODEL.apply(params, (), graph, None, False)[0], jnp.asarray(y))["loss"][0]

    for _ in range(steps):
        start = jax.tree.map(lambda p, g: p - rate * g, start, jax.jit(jax.grad(loss))(start))
    return start, (y >= 0).sum()


@pytest.mark.full
def test_groups_are_fedavg():
    """Two groups of parties on a graph that joins them. Catches halos that are looked up by place in the group,
    embeddings that cross between groups, weights that count parties, and places that nobody has."""
    data, params = blocks(5), MODEL.init(KEY)[0]
    people = population.grouped(data.train, GROUPS)
    made = hierarchy(people, optax.sgd(0.3), edge_rounds=2, client_layers=2)
    found, infos = trained(made, params, people, 2)
    for _ in range(2):
        parts = [own_graph(data, GROUPS == g, params, steps=2, rate=0.3) for g in (0, 1)]
        weights = np.array([count for _, count in parts]) / sum(count for _, count in parts)
        assert weights[0] != 0.4
        params = jax.tree.map(lambda *x, w=weights: w[0] * x[0] + w[1] * x[1], *(end for end, _ in parts))
    check_close(found, params)
    assert infos[0]["edge_clients_reported"].total() == infos[0]["edge_clients_invited"].total() == 2 * 5


@pytest.mark.full
def test_a_device_and_its_gateway():
    """Groups of one, in another order: FedAvg of the whole network. Catches a gateway with somebody else's graph."""
    data, start = blocks(3), MODEL.init(KEY)[0]
    people = population.grouped(data.train, [2, 0, 1])
    found, infos = trained(hierarchy(people, optax.sgd(0.3), edge_rounds=2), start, people, 2)
    loss_fn = models.supervised(MODEL, models.node_cross_entropy)
    whole = algorithms.fedavg(loss_fn, sampling.full(3), optax.sgd(0.3), num_steps=2, mesh=None)
    wanted, _ = trained(whole, start, data.train, 2)
    check_close(found, wanted)
    assert infos[0]["edge_boundary_bytes"].total() == 0
    assert infos[0]["edge_activation_bytes"].total() == 2 * 48 * 2 * 4 * 4, "steps, nodes, ways, width, bytes"


@pytest.mark.full
def test_bytes():
    """The path 1-2-3-4 at two parties, one group or two. Catches bytes counted once for several steps, the cloud's
    without the server's layers, and cut edges between groups that are paid for."""
    model, data = models.gcn(1, 2, hidden=(3,), dropout=0.0), path_data(2)
    first, whole = (1 * 3 + 3) * 4, (1 * 3 + 3 + 3 * 2 + 2) * 4
    for groups, boundary in (([0, 0], 2 * (2 + 2) * 3 * 4), ([1, 0], 0)):
        people = population.grouped(data.train, groups)
        made = hierarchy(people, optax.sgd(0.1), model=model, edge_rounds=5)
        info = trained(made, model.init(KEY)[0], people, 1)[1][0]
        assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == people.size * whole
        assert info["edge_boundary_bytes"].total() == 5 * boundary
        assert info["edge_activation_bytes"].total() == 5 * 2 * 4 * 3 * 4
        for way in ("up", "down"):
            assert info[f"edge_{way}link_bytes"].total() == 5 * (boundary // 2 + 4 * 3 * 4 + 2 * first)
        assert info["edge_cut_edges_used"].total() == 5 * 2 * (boundary > 0)


@pytest.mark.full
def test_devices_and_resume(tmp_path):
    """Dropout, Adam, some parties and some edges. Catches bits that follow the devices, and moments of an edge that a
    checkpoint lacks."""
    model, data = models.gcn(5, 3, hidden=(4,)), blocks(9)
    people, start = population.grouped(data.train, np.arange(9) % 4), model.init(KEY)[0]

    def made(mesh):
        options = {"edge_rounds": 2, "keep_edges": True, "edge_sampler": sampling.uniform(3, 2), "mesh": mesh}
        return algorithms.hierarchical_split_gnn(model, sampling.uniform(4, 3), optax.adam(0.05), **options)

    options = {"directory": tmp_path / "run", "checkpoint_every": 1}
    whole, history = run(KEY, made(engine.device_mesh(2)), start, people, 4)
    run(KEY, made(engine.device_mesh(2)), start, people, 2, **options)
    again, records = run(KEY, made(None), start, people, 4, resume=True, **options)
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(made(None).params(x)) for x in (whole, again)))
    assert records.records == history.records


@pytest.mark.full
def test_steps_that_are_not_finite():
    """Catches an overflow inside of a group that nobody hears of where it is an error, or that moves the model."""
    data, start = blocks(4), MODEL.init(KEY)[0]
    people = population.grouped(data.train, [0, 1, 0, 1])
    far = optax.chain(optax.scale(1e38), optax.scale(1e38))
    found, infos = trained(hierarchy(people, far), start, people, 1)
    jax.tree.map(np.testing.assert_array_equal, start, found)
    assert infos[0]["edge_skipped_rounds"].total() == 2 and infos[0]["clients_reported"] == 0
    with pytest.raises(FloatingPointError, match="client"):
        run(KEY, hierarchy(people, far, nonfinite="error"), start, people, 1)


@pytest.mark.full
def test_other_steps_of_an_edge_go_on():
    """One party's labels are none. Catches an edge that is lost for one step of several, by a loss of NaN."""
    data, start = blocks(4), MODEL.init(KEY)[0]
    rows = data.train.examples
    y = np.array(rows["y"])
    y[0] = np.where(y[0] >= 0, 9, -1)
    people = population.grouped(population.stored(rows | {"y": y}, np.arange(5)), [0] * 4)
    made = hierarchy(people, optax.sgd(0.3), edge_sampler=sampling.uniform(4, 2), edge_rounds=8)
    found, infos = trained(made, start, people, 1)
    assert 0 < infos[0]["edge_skipped_rounds"].total() < 8
    assert infos[0]["clients_reported"] == 1 and np.isfinite(infos[0]["local_loss"])
    assert np.abs(found["output"]["kernel"] - start["output"]["kernel"]).max() > 1e-3


def test_what_is_refused():
    """Catches groups that are taken for parties, a clock that prices nothing, and noise that nobody states."""
    data, start = blocks(4), MODEL.init(KEY)[0]
    singles = population.grouped(data.train, [3, 2, 1, 0])
    alone = algorithms.split_gnn(MODEL, sampling.full(4), optax.sgd(0.1))
    with refused("population", value="groups of parties"):
        jax.eval_shape(alone.step, KEY, alone.init(KEY, start, singles), singles)
    with pytest.raises(ValueError, match="group_size: expected the parties"):
        hierarchy(singles, optax.sgd(0.1), group_size=None)
    with pytest.raises(ValueError, match="edge_rounds: expected an integer"):
        hierarchy(singles, optax.sgd(0.1), edge_rounds=0)
    with refused("sampler", rule="1 parties", hint="group_size"):
        trained(hierarchy(singles, optax.sgd(0.1), group_size=2), start, singles, 1)
    clock = sampling.with_clock(sampling.full(4), network.cross_silo(4))
    with refused("sampler", rule="no time"):
        algorithms.hierarchical_split_gnn(MODEL, clock, optax.sgd(0.1), group_size=1)
    with refused("sampler", rule="keep=False"):
        hierarchy(singles, optax.sgd(0.1), group_size=4, edge_sampler=sampling.cyclic(4, 2))
    noisy = network.link(forward=transform.local_gaussian(1.0, 1.0))
    noise = noisy_parts(hierarchy(singles, optax.sgd(0.1), link=noisy).parts)
    assert [x.mechanism for x in noise.values()] == ["noise on links"]
    assert not noisy_parts(hierarchy(singles, optax.sgd(0.1)).parts)
