"""Secure sums: the plain sum of those who stay, whoever leaves at whichever step, or nothing."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, aggregation, engine, server, theory, transform
from fedjax_sim.aggregation.secure import shamir
from fedjax_sim.aggregation.secure.cost import secure_sum_cost
from fedjax_sim.aggregation.secure.masks import Stages, circle, is_aborted, masked, unmasked
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.aggregation.secure.secagg import STEP_NAMES, secure_sum, stages_of
from fedjax_sim.algorithms import federated
from fedjax_sim.prng import stream
from fedjax_sim.round.round import observe
from fedjax_sim.types import Cohort, Received, Round
from tests.laws import cases, laws, problems as p
from tests.refusals import refused

RNG, KEY = np.random.default_rng(0), jax.random.key(0)


def stages(left) -> Stages:
    """From the step before which each client leaves: 1 or less before it shares, 2 to upload, 3 to unmask, 4 never."""
    left = jnp.asarray(left)
    return Stages(left > 1, left > 2, left > 3)


def in_ring(ring: Ring, sums) -> list[int]:
    """Signed Python integers of words [words, d]."""
    whole = sum(np.asarray(x).astype(object) << 32 * i for i, x in enumerate(sums))
    return [int(x) - ring.modulus if x >= (ring.modulus + 1) // 2 else int(x) for x in whole]


def protocol(ring, messages, graph, key, threshold):
    """(left [m]) -> (the sum after unmasking, aborted), jitted over many cases at once."""
    slots = jnp.arange(len(messages))

    @jax.jit
    @jax.vmap
    def run(left):
        steps = stages(left)
        sent = masked(ring, key, graph, jnp.asarray(messages), shared=steps.shared, slots=slots)
        kept = jnp.where(steps.uploaded[:, None, None], sent, 0)
        sums = jnp.stack(ring.total(tuple(jnp.moveaxis(kept, 1, 0))))
        opened = unmasked(ring, key, graph, steps, sums, threshold=threshold)
        return opened, is_aborted(graph, steps, threshold, 1)

    return run


def edges_of(graph, size):
    """[m, m] bool: whether the second holds a share of the first's secrets."""
    holds = np.zeros((size, size), bool)
    for distance in graph.distances:
        holds[np.arange(size), np.asarray(graph.others(jnp.arange(size), jnp.int32(distance)))] = True
    return holds


def too_few(left, holds, threshold) -> bool:
    """The protocol's abort, from its description: a secret that is needed has fewer than t holders who answer."""
    left = np.asarray(left)
    if not (left > 2).any():
        return True
    for u in range(len(left)):
        dropped = left[u] == 2 and (holds[u] & (left > 2) & (np.arange(len(left)) != u)).any()
        if (left[u] > 2 or dropped) and (holds[u] & (left > 3)).sum() < threshold:
            return True
    return False


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    ("ring", "size", "neighbours", "threshold"),
    [
        (Ring(20), 5, None, 3),
        (Ring(31, prime=True), 5, 4, 2),
        pytest.param(Ring(32), 6, None, 4, marks=pytest.mark.full),
        pytest.param(Ring(50), 6, 4, 3, marks=pytest.mark.full),
        pytest.param(Ring(31, prime=True), 6, None, 2, marks=pytest.mark.full),
    ],
)
def test_every_dropout_at_every_step(ring, size, neighbours, threshold):
    """All 4^m ways to leave: bit for bit the sum of those who uploaded, or an abort where the description has one.

    Catches an edge that is taken off twice or not at all, the wrong sign of a mask, and shares of the wrong secret.
    """
    key = jax.random.key(size)
    graph, messages = circle(key, size, neighbours), RNG.integers(-99, 99, (size, 2)).astype(np.int32)
    cases = np.array(list(itertools.product(range(1, 5), repeat=size)))
    run, holds = protocol(ring, messages, graph, key, threshold), edges_of(graph, size)
    sums, aborted = run(cases)
    assert aborted.tolist() == [too_few(case, holds, threshold) for case in cases]
    open_cases = ~np.asarray(aborted)
    true = np.where(cases[:, :, None] > 2, messages, 0).sum(1)
    found = np.moveaxis(np.asarray(sums), 1, 0)
    got = np.array(in_ring(ring, [x[open_cases].reshape(-1) for x in found]))
    assert 0 < open_cases.sum() < len(cases)
    assert (got.reshape(-1, 2) == true[open_cases]).all()


@pytest.mark.full
def test_every_survivor_set():
    """All 2^8 sets that upload, everybody else lost before or after sharing; m = 8, t = 5: exact at t and above.

    Catches a threshold off by one.
    """
    ring, size, threshold = Ring(24), 8, 5
    key = jax.random.key(8)
    graph, messages = circle(key, size, None), RNG.integers(-999, 999, (size, 1)).astype(np.int32)
    survive = np.array(list(itertools.product([False, True], repeat=size)))
    run = protocol(ring, messages, graph, key, threshold)
    for lost in (1, 2):
        sums, aborted = run(np.where(survive, 4, lost))
        assert (np.asarray(aborted) == (survive.sum(1) < threshold)).all()
        there = ~np.asarray(aborted)
        assert in_ring(ring, np.asarray(sums)[there, :, 0].T) == (survive[there] @ messages)[:, 0].tolist()


def test_aborts():
    """Every case of 6 slots and two graphs, against a count of who holds what."""
    cases = np.array(list(itertools.product(range(1, 5), repeat=6)))
    for neighbours, threshold in ((None, 4), (4, 3), (2, 2)):
        graph = circle(jax.random.key(0), 6, neighbours)
        found = jax.jit(jax.vmap(lambda left, g=graph, t=threshold: is_aborted(g, stages(left), t, 1)))(cases)
        holds = edges_of(graph, 6)
        assert found.tolist() == [too_few(case, holds, threshold) for case in cases]


@pytest.mark.full
def test_too_few_shares_leave_the_sum_masked():
    """A sum that is opened with a share too few is not the sum. Catches a server that can do without the shares."""
    ring, key = Ring(32), jax.random.key(2)
    graph, messages = circle(key, 5, None), np.ones((5, 4), np.int32)
    sums, aborted = protocol(ring, messages, graph, key, 4)(np.array([[4, 4, 4, 3, 3]]))
    assert aborted.all() and not set(in_ring(ring, np.asarray(sums)[0])) & set(range(-100, 100))


def aggregated(made, messages, *, reported=None, weights=None, chunks=1, key=None):
    """(aggregate, metrics) of a cohort's messages."""
    size, key = len(messages), jax.random.key(0) if key is None else key
    reported = jnp.ones(size, bool) if reported is None else jnp.asarray(reported)
    weights = reported.astype(jnp.float32) if weights is None else jnp.asarray(weights, jnp.float32)
    round, slots = Round(Cohort(jnp.arange(size), jnp.ones(size, bool), reported)), jnp.arange(size)
    carry = made.init(jax.ShapeDtypeStruct(messages.shape[1:], jnp.int32), size)
    add = jax.jit(made.accumulate)
    for part in np.array_split(np.arange(size), chunks):
        carry = add(key, round, carry, Received(jnp.asarray(messages)[part], weights[part], slots[part], slots[part]))
    return jax.jit(made.finalize)(key, round, carry)


RINGS = [pytest.param(x, marks=pytest.mark.full) for x in ({}, {"prime": True}, {"modulus_bits": 14})]


@pytest.mark.full
@pytest.mark.parametrize("options", [{"modulus_bits": 48}, *RINGS])
@pytest.mark.parametrize("neighbours", [None, 6])
def test_masks_change_nothing(options, neighbours):
    """Drawn masks, masks that are not drawn, and the modular sum of those who uploaded: equal numbers, metrics too.

    Rounds with absent clients and unusable messages, in two chunks. Catches a client that one of them counts.
    """
    size, differs = 12, 0
    plain = aggregation.modular_sum(3.0, **options)
    ways = [
        secure_sum(plain, 4, neighbours=neighbours, dropout=[0.05, 0.05, 0.2, 0.1], min_messages=2, masks=masks)
        for masks in (False, True)
    ]
    for seed in range(4):
        messages = RNG.integers(-300, 300, (size, 3)).astype(np.int32)
        reported = RNG.random(size) < 0.9
        weights = reported & (RNG.random(size) < 0.9)
        both = [
            aggregated(way, messages, reported=reported, weights=weights, chunks=2, key=jax.random.key(seed))
            for way in ways
        ]
        assert str(both[0]) == str(both[1])
        found, metrics = both[0]
        differs += int(metrics["secure_dropouts"] > 0) + int(metrics["aborted_rounds"] == 0)
        if metrics["aborted_rounds"] == 0:
            stays = ways[0].stays(jax.random.key(seed), Round(Cohort(jnp.arange(size), reported, reported)))
            assert float(metrics["total_weight"]) == (weights & stays).sum()
            assert float(metrics["secure_dropouts"]) == (reported & ~stays).sum()
        else:
            assert np.isnan(found).all()
    assert differs >= 2


@pytest.mark.full
@pytest.mark.parametrize("masks", [False, True])
def test_empty_slots_change_nothing(masks):
    """7 clients, some of whom leave, on a circle in 12 slots, as samplers of random size leave them, and in 7: equal
    numbers. Catches a circle on which an empty slot is a client who left.
    """
    made = secure_sum(aggregation.modular_sum(1.0), 3, neighbours=4, dropout=0.03, masks=masks)
    messages, slots = RNG.integers(-99, 99, (7, 2)).astype(np.int32), jnp.array([11, 0, 5, 2, 8, 9, 4])
    spread = jnp.zeros((12, 2), jnp.int32).at[slots].set(messages)
    spread_ids, there = jnp.zeros(12, jnp.int32).at[slots].set(jnp.arange(7)), jnp.zeros(12, bool).at[slots].set(True)
    aborted = set()

    @jax.jit
    def run(key, messages, ids, there):
        round, everyone = Round(Cohort(ids, there, there)), jnp.arange(len(ids))
        carry = made.init(jax.ShapeDtypeStruct((2,), jnp.int32), len(ids))
        received = Received(messages, there.astype(jnp.float32), ids, everyone)
        return made.finalize(key, round, made.accumulate(key, round, carry, received))

    for seed in range(8):
        found = run(jax.random.key(seed), spread, spread_ids, there)
        assert str(found) == str(run(jax.random.key(seed), messages, jnp.arange(7), jnp.ones(7, bool)))
        aborted.add(int(found[1]["aborted_rounds"]))
    assert 0 in aborted


@pytest.mark.full
@pytest.mark.default_rows("True")
@pytest.mark.parametrize("masks", [False, True])
def test_nobody_leaves_is_the_modular_sum(masks):
    """Bits equal the wrapped aggregator's. Catches a mean over another number."""
    messages = RNG.integers(-(2**20), 2**20, (7, 5)).astype(np.int32)
    plain = aggregation.modular_sum(7.0)
    expected, _ = aggregated(plain, messages)
    found, _ = aggregated(secure_sum(plain, 7, masks=masks), messages)
    assert found.tolist() == expected.tolist()


@pytest.mark.full
@pytest.mark.parametrize("masks", [False, True])
def test_any_leaves(masks):
    """Bare scalars, leaves without numbers, and no leaves. Catches shapes that only full leaves have."""
    made = secure_sum(aggregation.modular_sum(1.0, modulus_bits=40), 2, masks=masks)
    for updates in ((), jnp.ones((3, 0), jnp.int32), ({"a": jnp.ones((3, 0, 2), jnp.int32)}, jnp.int32([1, 2, -4]))):
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), updates)
        slots, there = jnp.arange(3), jnp.ones(3, bool)
        round, received = Round(Cohort(slots, there, there)), Received(updates, jnp.ones(3), slots, slots)
        total, _ = made.finalize(KEY, round, made.accumulate(KEY, round, made.init(spec, 3), received))
        assert jax.tree.map(jnp.shape, total) == jax.tree.map(lambda x: x.shape, spec)
        assert all(float(x) == -1 for x in jax.tree.leaves(total) if x.size)
        assert jax.tree.structure(made.view(KEY, round, received)[0]) == jax.tree.structure(updates)


@pytest.mark.full
@pytest.mark.parametrize("neighbours", [pytest.param(None, marks=pytest.mark.full), 4])
def test_double_precision_changes_nothing(neighbours):
    """Catches secrets, masks and dropouts that are drawn in the default width."""
    made = secure_sum(aggregation.modular_sum(None), 3, neighbours=neighbours, dropout=0.04, masks=True)
    messages = RNG.integers(-99, 99, (6, 2)).astype(np.int32)
    found = []
    for doubles in (False, True):
        with jax.enable_x64(doubles):
            found.append(str(jax.device_get(aggregated(made, messages))))
    assert found[0] == found[1] and "nan" not in found[0]


def test_an_abort_reveals_nothing():
    """Catches a partial sum in the aggregate or in a metric."""
    messages = RNG.integers(1000, 2000, (5, 3)).astype(np.int32)
    for options in ({"min_messages": 5}, {"dropout": [0, 0, 0, 1.0]}):
        made = secure_sum(aggregation.modular_sum(1.0), 3, **options)
        reported = np.array([True] * 4 + [False])
        found, metrics = aggregated(made, messages, reported=reported)
        assert np.isnan(found).all() and int(metrics["aborted_rounds"]) == 1
        assert max(float(x) for x in metrics.values()) <= 5


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("around", [secure_sum, aggregation.additive_shares])
def test_an_aborted_round_changes_nothing(around):
    """Server with momentum and without NaNs, clients with a state. Catches an abort that a server's step makes 0 of."""
    made = around(aggregation.modular_sum(None), 2, dropout=0.7, min_messages=9)
    step = server.optimizer(optax.chain(optax.zero_nans(), optax.sgd(1.0, momentum=0.9)))
    federation = p.Federation(transform=transform.quantize(8, range=5.0, integers=True), aggregator=made, server=step)
    state, infos = federation.run(p.COHORT, num_rounds=3)
    start = federation.init()
    assert [int(info[name]) for info in infos for name in ("aborted_rounds", "skipped_rounds")] == [1] * 6
    kept = [(x.server, x.clients, x.transform) for x in (start, state)]
    laws.check_equal_bits(*jax.device_get(kept), "an aborted round")


LEAVING = {
    "complete graph": lambda: secure_sum(aggregation.modular_sum(None), 5, dropout=[0, 0.2, 0.2, 0.2]),
    "circle": lambda: secure_sum(aggregation.modular_sum(None), 3, neighbours=4, dropout=0.06),
    "servers": lambda: aggregation.additive_shares(aggregation.modular_sum(None), 2, dropout=0.4, min_messages=5),
}


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("name", cases.rows(LEAVING, ["circle"]))
def test_order_is_irrelevant(name):
    """Catches a client that leaves, or a graph that follows, by its place in the cohort."""
    member = transform.quantize(8, range=5.0, integers=True)
    federation = p.Federation(transform=member, aggregator=LEAVING[name]())
    (state, infos), other = (federation.run(ids, num_rounds=8) for ids in (p.COHORT, p.COHORT[::-1]))
    laws.check_equal_bits(p.outcome(state, infos), p.outcome(*other), name)
    assert {int(info["aborted_rounds"]) for info in infos} == {0, 1}


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize("name", cases.rows(["complete graph", "servers"], ["servers"]))
def test_who_leaves_did_not_report(name):
    """The round in which they do not report, but for the counts of it: model, their states, and metrics. A client with
    NaN is dropped or has left, never both.

    Catches clients who keep the state of a message that nobody got, and metrics of them.
    """
    member, made = transform.quantize(8, range=5.0, integers=True), LEAVING[name]()
    whole, seen = p.Federation(transform=member, aggregator=made), []
    part = p.Federation(transform=member, aggregator=aggregation.modular_sum(None))
    for federation in (whole, part):  # clients with NaN are no error
        federation._step = jax.jit(federated(*federation.algorithm.parts[:5]).step)
    data, round = p.ragged(spoil={17: np.nan, 5: np.nan}), Round(p.cohort(p.COHORT))
    for i in range(5):
        key = stream(jax.random.fold_in(jax.random.key(1), i), "aggregation")
        stays = np.asarray(made.stays(key, round))
        state, (info,) = whole.run(p.COHORT, data, keys=[i])
        alone, (other,) = part.run(p.cohort(p.COHORT, reported=stays), data, keys=[i])
        seen.append((int(info["dropped_clients"]), int(info["aborted_rounds"])))
        if not info["aborted_rounds"]:
            laws.check_equal_bits(*(jax.device_get((x.server, x.clients)) for x in (state, alone)), name)
            assert info["local_loss"] == other["local_loss"]
        assert int(info["clients_reported"]) == int(other["clients_reported"])
        assert seen[-1][0] + int(info["clients_reported"]) + int(info["secure_dropouts"]) == p.SLOTS
    assert len({dropped for dropped, _ in seen}) > 1 and (0 in {aborted for _, aborted in seen})


def test_clients_leave_with_the_stated_probability():
    """20,000 slots, 4.5 standard errors at each step. Catches steps that share a draw, and the last step skipped."""
    each = np.array([0.1, 0.2, 0.3, 0.4])
    stays, all_there = np.cumprod(1 - each), jnp.ones(20_000, bool)
    made = secure_sum(aggregation.modular_sum(1.0), 1, dropout=each.tolist())
    round = Round(Cohort(jnp.arange(20_000), all_there, all_there))
    received = Received(jnp.ones((20_000, 1), jnp.int32), jnp.ones(20_000), jnp.arange(20_000), jnp.arange(20_000))

    @jax.jit
    def steps(key, round, received):
        carry = made.accumulate(key, round, made.init(jax.ShapeDtypeStruct((1,), jnp.int32), 20_000), received)
        uploaded = carry["uploaded"] > 0
        return uploaded, stages_of(key, round.cohort.ids, all_there, uploaded, 1 - stays)

    uploaded, found = jax.device_get(steps(jax.random.key(0), round, received))
    assert not (uploaded & ~found.shared).any() and len(STEP_NAMES) == 4
    for mask, expected in zip(found, stays[1:], strict=True):
        assert abs(float(mask.mean()) - expected) < 4.5 * np.sqrt(expected * (1 - expected) / 20_000)


def test_never_both_secrets(monkeypatch):
    """All cases of 5 slots: what the server asks the holders for is one secret of a client, own mask or key, and both
    kinds are asked for. Catches a server that could unmask one message.
    """
    asked, opened = [], shamir.reconstructed
    monkeypatch.setattr(shamir, "reconstructed", lambda held, there, t: asked.append(there) or opened(held, there, t))
    graph, sums = circle(KEY, 5, None), jnp.zeros((1, 1), jnp.uint32)

    @jax.jit
    @jax.vmap
    def run(left):
        asked.clear()
        unmasked(Ring(9), KEY, graph, stages(left), sums, threshold=2)
        return [there.any(1) for there in asked]

    own, pairs = run(np.array(list(itertools.product(range(1, 5), repeat=5))))
    assert not (own & pairs).any() and own.any() and pairs.any()


@pytest.mark.optimised
@pytest.mark.full
def test_federated():
    """Rounds under secure sums: the state of those under the modular sum, masks drawn or not, on one device and two;
    what goes up is the ring's width a number, keys and shares; and `observe` shows masked messages.

    Catches facts that a wrapper drops, masks that depend on a chunk, and a view of the messages themselves.
    """
    member = transform.quantize(8, range=5.0, integers=True)
    plain = aggregation.modular_sum(10.0, modulus_bits=40)
    hidden = secure_sum(plain, 3, neighbours=4, masks=True)
    found, seen = {}, {}
    for name, made in {"plain": plain, "secure": secure_sum(plain, 2), "one": hidden, "two": hidden}.items():
        how = {"plan": engine.Plan(2, 2), "mesh": engine.device_mesh(2)} if name == "two" else {}
        federation = p.Federation(transform=member, aggregator=made, **how)
        state, infos = federation.run(p.COHORT, num_rounds=1)
        found[name] = jax.device_get((state.server, state.memory))
        laws.check_equal_bits(found["plain"], found[name], name)
        if name == "plain" or made is hidden:
            start = federation.init()._replace(sampler=p.cohort(p.COHORT))
            seen[name] = np.asarray(observe(federation.algorithm, jax.random.key(4), start, p.ragged()).messages)
        if name != "plain":
            neighbours = None if name == "secure" else 4
            bits = secure_sum_cost(10, 3, 40, neighbours=neighbours).client_up_bits
            assert infos[0]["uplink_bytes"].total() == 10 * -(-bits // 8)
    messages, masked = seen["plain"], seen["one"]
    assert messages.shape == (10, 3) and masked.shape == (10, 2, 3) and masked.dtype == np.uint32
    total = sum(masked[:, i].astype(object).sum(0) << 32 * i for i in range(2)) % 2**40
    assert (np.abs(messages) < 2**10).all() and not (masked[:, 0] < 2**20).any()  # one alarm in 100
    assert (total != messages.sum(0)).all()  # own masks are still on it
    assert (masked == seen["two"]).all()


def test_wrong_options_are_refused():
    """Catches options that would abort every round, or mask nothing."""
    plain = aggregation.modular_sum(1.0)
    wrong = partial(pytest.raises, ValueError)
    for match, call in {
        "aggregator: expected a modular_sum, got 'a sum of numbers'": lambda: secure_sum(aggregation.mean(), 2),
        "aggregator: expected a modular_sum, got 'one that is secure": lambda: secure_sum(secure_sum(plain, 2), 2),
        "threshold: expected": lambda: secure_sum(plain, 0),
        "neighbours: expected an even number": lambda: secure_sum(plain, 2, neighbours=3),
        "threshold: expected at most the 4 neighbours": lambda: secure_sum(plain, 5, neighbours=4),
        "threshold: expected more than half of the 4 neighbours": lambda: secure_sum(plain, 2, neighbours=4),
        "dropout: expected a probability, or one for each": lambda: secure_sum(plain, 2, dropout=[0.1, 0.1]),
        r"dropout\[0\]: expected a number in \[0, 1\], got nan": lambda: secure_sum(plain, 2, dropout=float("nan")),
        r"dropout\[2\]: expected": lambda: secure_sum(plain, 2, dropout=[0, 0, 2, 0]),
        "min_messages: expected": lambda: secure_sum(plain, 2, min_messages=0),
        "neighbours: expected fewer than the 4 slots": lambda: aggregated(
            secure_sum(plain, 3, neighbours=4), np.ones((4, 1), np.int32)
        ),
        "threshold: expected at most the 4 slots": lambda: aggregated(secure_sum(plain, 5), np.ones((4, 1), np.int32)),
    }.items():
        with wrong(match=match):
            call()
    with pytest.raises(TypeError, match="masks: expected True or False"):
        secure_sum(plain, 2, masks=1)
    for call in (secure_sum, aggregation.real_secure_sum, partial(theory.abort_probability, 5)):
        with refused("dropout[0]", value=None, rule="[0, 1]", kind=InvalidType):
            call(*([plain] if call in (secure_sum, aggregation.real_secure_sum) else []), 2, dropout=None)


def test_noise_is_shared_among_the_least_number():
    """Catches a sum of fewer messages than its noise needs."""
    noisy = transform.discrete_gaussian_mechanism(1.0, 1.0, p.SLOTS - 1)
    plain = aggregation.modular_sum(float(p.SLOTS))
    with refused("aggregator.least", rule="shares"):
        p.Federation(transform=noisy, aggregator=secure_sum(plain, p.SLOTS - 2))
    p.Federation(transform=noisy, aggregator=secure_sum(plain, p.SLOTS - 2, min_messages=p.SLOTS - 1))


def test_rings_that_are_too_small_are_refused():
    """The error says how many bits hold the sum: 36 for a million messages of 16 bits (H4)."""
    wide = transform.quantize(16, range=1.0, integers=True)
    with pytest.raises(ValueError, match=r"modulus_bits=\d+, fewer bits a message"):
        p.Federation(transform=wide, aggregator=secure_sum(aggregation.modular_sum(10.0, modulus_bits=16), 2))
