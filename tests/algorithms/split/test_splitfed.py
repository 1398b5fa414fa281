"""SplitFed and the relay against FedAvg, centralised SGD and NumPy's loops."""

from functools import partial

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, models, network, population, sampling, transform, tree
from fedjax_sim.models import mlp, softmax_cross_entropy, supervised
from fedjax_sim.prng import stream
from tests.refusals import refused

KEY = jax.random.key(0)
MODEL = mlp(input_shape=(6,), num_outputs=3, hidden=(5, 4))
LOSS = supervised(MODEL, softmax_cross_entropy)
CUT = {"cut": "hidden_0", "mesh": None}
SIZES = [4, 7, 2, 5, 6]
RNG = np.random.default_rng(0)
X = [RNG.normal(size=(n, 6)).astype(np.float32) for n in SIZES]
Y = [RNG.integers(0, 3, n).astype(np.int32) for n in SIZES]
PEOPLE = population.from_clients([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)])
FULL = sampling.full(5)
START = MODEL.init(KEY)[0]
RATE = 0.3


def run(made, rounds=2, people=PEOPLE):
    state, step, infos = made.init(KEY, START, people), jax.jit(made.step), []
    for t in range(rounds):
        state, info = step(jax.random.fold_in(KEY, t), state, people)
        infos.append(info)
    return made.params(state), infos


def same(a, b, **how):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **(how or {"atol": 1e-6}))


def gradient(params, i):
    examples = {"x": X[i], "y": Y[i]}
    return jax.grad(lambda p: LOSS(p, examples)["loss"].mean())(params)


def stepped(params, i):
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradient(params, i))


@pytest.mark.full
def test_version_one_is_fedavg():
    """Catches a server part that is not averaged, and weights that differ between the parts: bit for bit."""
    work = {"num_steps": 3, "batch_size": 2}
    expected, infos = run(algorithms.fedavg(LOSS, FULL, optax.sgd(RATE), mesh=None, **work))
    got, split = run(algorithms.splitfed(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, **work))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True))
    assert split[0]["local_loss"] == infos[0]["local_loss"]
    u = CUT | {"cut": ["hidden_0", "hidden_1"], "u_shaped": True}
    same(expected, run(algorithms.splitfed(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **u, **work))[0])


@pytest.mark.full
def test_one_step_is_fedsgd():
    """Catches a mean over steps, or over clients without their sizes."""
    expected = run(algorithms.fedsgd(LOSS, FULL, optax.sgd(RATE), mesh=None))[0]
    same(expected, run(algorithms.splitfed(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1))[0])


def copies_by_hand(params, copies):
    """One round with one full-batch step each: turns of `copies` clients, client i in copy i % copies."""
    ends, weights, own = [params] * copies, np.zeros(copies), []
    for i in range(5):
        copy = i % copies
        after = stepped({**ends[copy], "hidden_0": params["hidden_0"]}, i)
        own.append(after["hidden_0"])
        ends[copy] = after
        weights[copy] += SIZES[i]
    rest = jax.tree.map(lambda *x: np.average(x, axis=0, weights=weights), *ends)
    first = jax.tree.map(lambda *x: np.average(x, axis=0, weights=SIZES), *own)
    return {**rest, "hidden_0": first}


@pytest.mark.full
@pytest.mark.parametrize("copies", [1, 2])
def test_copies_by_hand(copies):
    """V2, two copies, one for each. Catches copies that begin anew, clients' parts that go on, weights by turns."""
    options = {**CUT, "num_steps": 1, "server_copies": copies}
    got, infos = run(algorithms.splitfed(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **options))
    same(copies_by_hand(copies_by_hand(START, copies), copies), got)
    assert int(infos[0]["clients_reported"]) == 5 and infos[0]["uplink_bytes"].total() == 5 * 35 * 4
    assert infos[0]["split_up_bytes"].total() == sum(SIZES) * 4 * 6


@pytest.mark.full
def test_relay_is_centralised_sgd():
    """Catches a client that starts from the broadcast, a server part that is averaged, another order of clients."""
    made = algorithms.split_learning(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1)
    expected = START
    for i in [*range(5), *range(5)]:
        expected = stepped(expected, i)
    got, _ = run(made)
    same(expected, got)
    batches = {"num_epochs": 1, "batch_size": 2, "shuffle": False}
    relay = algorithms.split_learning(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, **batches)
    expected = START
    for i in range(5):
        for start in range(0, SIZES[i], 2):
            rows = slice(start, start + 2)
            grad = jax.grad(lambda p, i=i, rows=rows: LOSS(p, {"x": X[i][rows], "y": Y[i][rows]})["loss"].mean())
            expected = jax.tree.map(lambda p, g: p - RATE * g, expected, jax.jit(grad)(expected))
    same(expected, run(relay, 1)[0])


@pytest.mark.full
def test_handover():
    """Catches bytes of the server's part, weights that pass a server that should not see them, and another model."""
    models = []
    for handover in ("server", "peer"):
        options = {**CUT, "num_steps": 1, "handover": handover}
        made = algorithms.split_learning(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **options)
        model, infos = run(made, 1)
        models.append(model)
        sent = [infos[0][name].total() for name in ("uplink_bytes", "downlink_bytes")]
        assert sent == ([5 * 35 * 4] * 2 if handover == "server" else [0, 0])
        assert (handover == "peer") == ("peer_bytes" in infos[0])
    assert infos[0]["peer_bytes"].total() == 5 * 35 * 4
    same(*models)


@pytest.mark.full
def test_only_the_clients_part_travels():
    """Catches a transform, or bytes, of the server's part."""
    halved = transform.stateless(lambda key, update: jax.tree.map(lambda x: x / 2, update))
    plain, half = (
        algorithms.splitfed(
            MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1, transform=transform_
        )
        for transform_ in (None, halved)
    )
    (a, infos), (b, _) = run(plain, 1), run(half, 1)
    for name, factor in (("hidden_0", 0.5), ("hidden_1", 1.0), ("output", 1.0)):
        moved, less = (tree.subtract(x[name], START[name]) for x in (a, b))
        same(jax.tree.map(lambda x, factor=factor: factor * x, moved), less)
    assert [infos[0][name].total() for name in ("uplink_bytes", "downlink_bytes")] == [5 * 35 * 4] * 2
    few = algorithms.splitfed(
        MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1, transform=transform.quantize(8)
    )
    assert run(few, 1)[1][0]["uplink_bytes"].total() == 5 * (35 + 2 * 4)


@pytest.mark.full
def test_aggregators_see_zeros_for_the_absent():
    """A rule without weights, over five slots of which one is empty. Catches the end of a copy in the place of nobody's
    message."""
    rule = aggregation.gather(lambda key, updates, weights, ids: jax.tree.map(lambda x: x.sum(0), updates))
    few = sampling.poisson(5, 0.6, num_slots=5)
    for copies in (None, 1):
        options = {**CUT, "num_steps": 1, "server_copies": copies, "aggregator": rule, "weighting": "uniform"}
        made = algorithms.splitfed(MODEL, softmax_cross_entropy, few, optax.sgd(RATE), **options)
        state = made.init(KEY, START, PEOPLE)
        cohort, _ = few.sample(stream(KEY, "sampling"), few.init())
        there = [int(i) for i, invited in zip(cohort.ids, cohort.invited, strict=True) if invited]
        assert 1 < len(there) < 5
        ends = [START]
        for i in there:
            before = START if copies is None else {**ends[-1], "hidden_0": START["hidden_0"]}
            ends.append(stepped(before, i))
        sums = jax.tree.map(lambda s, *x: s + sum(y - s for y in x), START, *ends[1:])
        moved = tree.scaled(tree.subtract(ends[-1], START), float(len(there)))
        rest = sums if copies is None else jax.tree.map(np.add, START, moved)
        same({**rest, "hidden_0": sums["hidden_0"]}, made.params(jax.jit(made.step)(KEY, state, PEOPLE)[0]))


@pytest.mark.full
def test_a_client_that_breaks_hands_on_what_it_got():
    """Catches a chain that one client's overflow ends, and one that is not counted."""
    spoilt = [x.copy() for x in X]
    spoilt[2][:] = 3e38
    people = population.from_clients([{"x": x, "y": y} for x, y in zip(spoilt, Y, strict=True)])
    made = algorithms.split_learning(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1)
    expected = START
    for i in (0, 1, 3, 4):
        expected = stepped(expected, i)
    got, infos = run(made, 1, people)
    same(expected, got)
    assert int(infos[0]["dropped_clients"]) == 1


def test_turns_are_not_all_of_a_star():
    """Catches an edge that would make plain rounds of what is served in turns, or relayed."""
    made = [
        algorithms.splitfed(
            MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1, server_copies=copies
        )
        for copies in (None, 2)
    ]
    relay = algorithms.split_learning(MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1)
    assert [x.parts.complete for x in (*made, relay)] == [True, False, False]


def test_what_is_refused():
    """Catches clocks that would price the wrong work, noise on a part of what learns, and memories that are lost."""
    devices = network.heterogeneous(5, speed=1e9, bandwidth_down=1e6, bandwidth_up=1e6)
    for options, words in (
        ({"sampler": sampling.with_clock(FULL, devices)}, "take no time"),
        ({"transform": transform.gaussian_mechanism(1.0, 1.0)}, "without noise"),
        ({"transform": transform.error_feedback(transform.top_k(0.5)), "server_copies": 2}, "memory"),
        ({"server_copies": 6}, "server_copies"),
        ({"cut": "output"}, "cut: expected layers among"),
        ({"sampler": sampling.with_replacement(5, 3), "server_copies": 1, "weighting": "uniform"}, "replacement"),
    ):
        options = {"sampler": FULL, **CUT, "num_steps": 1} | options
        with pytest.raises(ValueError, match=words):
            algorithms.splitfed(MODEL, softmax_cross_entropy, optimizer=optax.sgd(RATE), **options)
    graphs = models.gcn(3, 2)
    for make in (algorithms.splitfed, partial(algorithms.splitfed, server_copies=1), algorithms.split_learning):
        with refused("model", hint="algorithms.split_gnn"):
            make(graphs, models.node_cross_entropy, FULL, optax.sgd(RATE), cut="graph_0", num_steps=1)
    with pytest.raises(ValueError, match="handover"):
        algorithms.split_learning(
            MODEL, softmax_cross_entropy, FULL, optax.sgd(RATE), **CUT, num_steps=1, handover="pear"
        )
