"""Federations seen as clients: weights, bytes and state by level, groups of unequal size, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import two_edges
from fedjax_sim import (
    InvalidType,
    aggregation,
    algorithms,
    client,
    engine,
    network,
    population,
    sampling,
    server,
    theory,
    transform,
)
from fedjax_sim.algorithms import as_client_update, federated
from fedjax_sim.instruments.variance_budget import variance_budget
from fedjax_sim.privacy import mechanism_of
from fedjax_sim.round import invite
from fedjax_sim.running import loop
from fedjax_sim.types import Algorithm, Count, Devices, Level, Spent, Star
from tests.laws import cases, laws, problems as p
from tests.refusals import refused

KEY, START = jax.random.key(5), jnp.array(p.START)
GROUPS = np.random.default_rng(3).choice(4, p.NUM_CLIENTS, p=[0.1, 0.2, 0.3, 0.4])
SIZE = int(np.bincount(GROUPS).max())
WORK = {"num_steps": 2, "batch_size": None, "mesh": None, "plan": p.PLAN}
STEP = server.optimizer(optax.sgd(1.0))


def edges(sampler=None, **options):
    sampler = sampling.full(SIZE) if sampler is None else sampler
    return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), **WORK | options).parts


def over(star, *args, size=4, sampler=None, aggregator=None, step=STEP, **options):
    sampler = sampling.full(size) if sampler is None else sampler
    return federated(
        sampler, as_client_update(star, *args, **options), aggregator or aggregation.mean(), step, mesh=None
    )


def _at_once(key, ids, load):
    none = jnp.zeros_like(ids)
    return Spent(none, none, none, jnp.zeros(ids.shape))


AT_ONCE = Devices(p.NUM_CLIENTS, _at_once)


def run(algorithm, people, rounds=2, start=START):
    """(state, info of the last round, on the host)."""
    state, step = algorithm.init(KEY, start, people), jax.jit(algorithm.step)
    for t in range(rounds):
        state, info = step(jax.random.fold_in(KEY, t), state, people)
    return state, {k: x.total() if isinstance(x, Count) else np.asarray(x) for k, x in info.items()}


def model(algorithm, *args, **options):
    return np.asarray(algorithm.params(run(algorithm, *args, **options)[0]), np.float64)


def flat(**options):
    return algorithms.fedavg(p.linear_loss, sampling.full(p.NUM_CLIENTS), optax.sgd(p.RATE), **WORK | options)


def test_one_edge_round_is_flat():
    """Random ragged groups, to 1e-6: with edges weighed by data it is FedAvg over all devices; the cloud hears four
    edges, where flat it hears 24 clients.

    Faults: weights by the number of clients; edges that start from their own model; places that count as clients.
    """
    people = p.ragged()
    groups = population.grouped(people, GROUPS)
    expected, wide = run(flat(), people)
    state, info = run(over(edges()), groups)
    np.testing.assert_allclose(state.server.params, expected.server.params, atol=1e-6, rtol=0)
    assert info["total_weight"] == wide["total_weight"] == p.SIZES.sum()
    np.testing.assert_allclose(info["local_loss"], wide["local_loss"], rtol=1e-6)
    for way in ("uplink_bytes", "downlink_bytes"):
        assert info[way] == 4 * START.nbytes and info[f"edge_{way}"] == wide[way] == p.NUM_CLIENTS * START.nbytes
    assert info["clients_reported"] == 4 and info["edge_clients_reported"] == info["edge_clients_invited"] == 24


def halves_loss(model, examples, key):
    return p.linear_loss(model["shared"] + model["own"], examples, key)


@pytest.mark.full
def test_edges_that_count_alike_are_not_flat():
    """Fault: a weighting that an edge ignores."""
    people = p.ragged()
    alike = model(over(edges(), weighting="uniform"), population.grouped(people, GROUPS))
    assert np.abs(alike - model(flat(), people)).max() > 1e-2


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedrep", "ditto", "apfl", "fedbabu", "fedper", "per_fedavg", "pfedme"])
def test_personal_clients_under_edges_are_flat(name):
    """Full batches, each edge one round: the shared model is that of all clients under one server, to 1e-5.

    Catches own models that begin anew in the next round above, and an edge that trains what its clients keep.
    """
    own = {"own": ["own"]} if name in ("fedbabu", "fedper", "fedrep") else {}
    loss, start = (halves_loss, {"own": START, "shared": START}) if own else (p.linear_loss, START)

    def made(size):
        return getattr(algorithms, name)(loss, sampling.full(size), optax.sgd(p.RATE), **own, **WORK)

    people = p.ragged()
    expected = made(p.NUM_CLIENTS)
    state, _ = run(expected, people, rounds=3, start=start)
    above = over(made(SIZE).parts, keep=True)
    edges_state, _ = run(above, population.grouped(people, GROUPS), rounds=3, start=start)
    wanted, found = expected.params(state), above.params(edges_state)
    for x, y in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(y, x, atol=1e-5, rtol=0)


CURVATURES, CENTERS, EDGES = [1, 10, 2], [0.0, 1.0, -1.0], [0, 0, 1]


@pytest.mark.full
@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.full), 50])
def test_fixed_points(rounds):
    """kappa edge rounds converge to the closed form, to 1e-6. Fault: a round too many or too few inside."""
    people = population.grouped(population.quadratic_population(CURVATURES, CENTERS), EDGES)
    local = {"num_steps": 5, "mesh": None, "plan": p.PLAN}
    star = algorithms.fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(0.05), **local).parts
    made = over(star, rounds, size=2)
    state = made.init(KEY, {"w": jnp.zeros(1)}, people)
    end = jax.jit(lambda state: jax.lax.fori_loop(0, 40, lambda t, state: made.step(KEY, state, people)[0], state))(
        state
    )
    expected = theory.hierarchy_fixed_point(CURVATURES, CENTERS, EDGES, edge_rounds=rounds, num_steps=5, step_size=0.05)
    np.testing.assert_allclose(made.params(end)["w"], expected, atol=1e-6)


@pytest.mark.full
@pytest.mark.optimised
def test_empty_groups():
    """Faults: a division by no examples; a group that sends its own start as an update; a model that loses its bits."""
    made = over(edges(), 2)
    step = jax.jit(made.step)
    sizes = np.where(GROUPS == 1, 0, p.SIZES)
    nobody, some = (population.grouped(p.ragged(sizes=x), GROUPS) for x in (0 * p.SIZES, sizes))
    start = made.init(KEY, START, nobody)
    state, info = step(KEY, start, nobody)
    laws.check_equal_bits(state.server, start.server, "nobody has examples")
    assert int(info["skipped_rounds"]) == 1 and int(info["clients_reported"]) == 0
    state, info = step(KEY, start, some)
    assert int(info["clients_reported"]) == 3 and info["edge_skipped_rounds"].total() == 2
    assert float(info["total_weight"]) == sizes.sum()  # of one round, not of two
    assert np.isfinite(np.asarray(state.server.params)).all()
    without = population.grouped(p.ragged(), GROUPS)
    changed, _ = step(KEY, start, without)
    assert (np.asarray(changed.server.params) != np.asarray(state.server.params)).all()


@pytest.mark.full
@pytest.mark.optimised
def test_time_of_an_empty_group():
    """Rounds of simulated time over edges, one of which has no examples: the bits of rounds without time, and times
    that are numbers. Catches an edge without a message that nobody waits for, or that stops the clock."""
    alike = {"speed": 1e4, "bandwidth_down": 1e3, "bandwidth_up": network.tiers([0.5, 0.5], [12.0, 120.0])}
    people = population.grouped(p.ragged(sizes=np.where(GROUPS == 1, 0, p.SIZES)), GROUPS)
    timed = sampling.with_clock(sampling.full(4), network.heterogeneous(4, **alike))
    phones = network.heterogeneous(p.NUM_CLIENTS, **alike)
    (state, info), (plain, same) = (
        run(over(edges(), 2, devices=phones, sampler=sampler), people) for sampler in (timed, None)
    )
    laws.check_equal_bits(state.server, plain.server, "time")
    assert info["clients_reported"] == 3 and all(info[name] == same[name] for name in same if np.ndim(same[name]) == 0)
    assert info["simulated_seconds"] == 2 * info["round_seconds"] > 2 and 0 < info["utilisation"] <= 1


@pytest.mark.full
@pytest.mark.optimised
def test_an_edge_too_late_for_a_deadline():
    """Its devices have sent all that they send, and its message changes nothing. Fault: bytes inside of it that nobody
    counts, or an edge that is heard after all."""

    def spend(key, ids, load):
        one = jnp.ones_like(ids)
        return Spent(one, one, jnp.where(ids == 2, 50, one), jnp.zeros(ids.shape))

    timed, people = sampling.with_clock(sampling.full(4), Devices(4, spend)), population.grouped(p.ragged(), GROUPS)
    late, (_, whole) = (
        over(edges(), devices=AT_ONCE, sampler=sampling.with_deadline(timed, 0.01)),
        run(over(edges(), devices=AT_ONCE, sampler=timed), people, 1),
    )
    invited = jax.jit(lambda key, state: invite(late.parts, key, state)[0])
    cohort = invited(jax.random.fold_in(KEY, 0), late.init(KEY, START, people))
    state, info = run(late, people, 1)
    assert 0 < info["clients_reported"] == int(cohort.reported.sum()) < 4 and info["wasted_bytes"] > 0
    inside = [name for name in whole if name.startswith("edge_") and name.endswith("bytes")]
    assert inside and all(info[name] == whole[name] > 0 for name in inside if "wasted" not in name)
    sizes = np.where(np.isin(GROUPS, np.flatnonzero(cohort.reported)), p.SIZES, 0)
    others = run(over(edges()), population.grouped(p.ragged(sizes=sizes), GROUPS), 1)[0]
    laws.check_equal_bits(state.server, others.server, "an edge that is late equals one without examples")


def told(algorithm, people):
    """Info of a first round, from a model of one number."""
    return run(algorithm, people, 1, {"w": jnp.zeros(1)})[1]


def twelve():
    """Six edges of two devices each, and one of them."""
    people = population.grouped(population.quadratic_population([1.0] * 12, np.arange(12) / 100), np.arange(12) // 2)
    rate = optax.sgd(0.5)
    device = algorithms.fedavg(population.quadratic_loss, sampling.full(2), rate, num_steps=1, mesh=None).parts
    return people, as_client_update(device, weighting="uniform", devices=AT_ONCE._replace(population_size=12))


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("plan", [None, engine.Plan(1, 3)], ids=["one by one", "three at once"])
def test_late_edges_of_a_region(plan):
    """Three edges of each region send, one counts. Fault: chunks that are passed over, for nobody in them is heard."""
    people, edge = twelve()
    over = sampling.with_over_invitation(sampling.full(3), 1)
    region = as_client_update(
        federated(over, edge, aggregation.mean(), STEP, plan=plan, mesh=None).parts, name="region"
    )
    cloud = federated(sampling.full(2), region, aggregation.mean(), STEP, mesh=None)
    info = told(cloud, population.grouped(people, np.arange(6) // 3))
    assert (info["region_uplink_bytes"], info["region_wasted_bytes"]) == (6 * 4, 4 * 4)
    assert (info["edge_uplink_bytes"], info["edge_clients_reported"]) == (12 * 4, 12)


@pytest.mark.full
def test_edges_that_leave_a_secure_sum():
    """They are counted above, so their insides are, with a deadline that nobody misses and without."""
    people, edge = twelve()
    one = lambda ids: jnp.ones_like(ids)  # noqa: E731
    spend = lambda key, ids, load: Spent(one(ids), one(ids), one(ids), jnp.ones(ids.shape))  # noqa: E731
    timed = sampling.with_clock(sampling.full(6), Devices(6, spend))
    rule = aggregation.additive_shares(aggregation.modular_sum(6, modulus_bits=16), 2, dropout=0.4)
    bits = transform.quantize(8, range=1.0, integers=True)
    for sampler in (timed, sampling.with_deadline(timed, 10.0)):
        info = told(federated(sampler, edge, rule, STEP, bits, mesh=None), people)
        assert 0 < info["secure_dropouts"] < 6
        assert (info["edge_uplink_bytes"], info["edge_clients_reported"]) == (12 * 4, 12)


@pytest.mark.optimised
@pytest.mark.full
def test_messages_that_are_not_finite():
    """A device inside whose update is NaN equals an absent one and is counted; with "error" its edge is named.

    Fault: one device that takes its whole edge with it.
    """
    groups = [population.grouped(p.ragged(**x), GROUPS) for x in ({"spoil": {5: np.inf}}, {"sizes": without(5)})]
    made = over(edges())
    step = jax.jit(made.step)
    (bad, info), (gone, other) = (step(KEY, made.init(KEY, START, people), people) for people in groups)
    laws.check_equal_bits(bad.server, gone.server, "an absent device")
    assert info["edge_dropped_clients"].total() == 1 and other["edge_dropped_clients"].total() == 0
    assert int(info["dropped_clients"]) == 0
    strict = federated(
        sampling.full(4),
        as_client_update(edges(nonfinite="error")),
        aggregation.mean(),
        STEP,
        nonfinite="error",
        mesh=None,
    )
    _, info = jax.jit(strict.step)(KEY, strict.init(KEY, START, groups[0]), groups[0])
    assert info["error_ids"].tolist() == [int(GROUPS[5])] + [-1] * 3


def without(id):
    return np.where(np.arange(p.NUM_CLIENTS) == id, 0, p.SIZES)


@pytest.mark.full
@pytest.mark.parametrize("keep", [True, False])
def test_momentum_at_the_edge(keep):
    """NumPy's heavy ball at each edge, kept between cloud rounds or begun anew. Fault: a momentum of another edge, or
    a model that is kept where its momentum should be."""
    c, edge_of, rate, h = np.array([0.0, 1.0, 4.0, -2.0]), np.array([0, 0, 1, 1]), 0.3, np.array([1.0, 0.2])
    people = population.grouped(population.quadratic_population(h[edge_of], c), edge_of)
    momentum = optax.sgd(1.0, momentum=0.5)
    star = algorithms.fedavg(
        population.quadratic_loss, sampling.full(2), optax.sgd(rate), num_steps=1, server_optimizer=momentum, mesh=None
    ).parts
    made = over(star, 2, size=2, keep=keep)
    found = run(made, people, rounds=3, start={"w": jnp.zeros(1)})[0].server.params["w"]
    w, speed = 0.0, np.zeros(2)
    for _ in range(3):
        own, speed = np.full(2, w), speed if keep else np.zeros(2)
        for _ in range(2):
            speed = 0.5 * speed + rate * h * (np.array([c[edge_of == e].mean() for e in (0, 1)]) - own)
            own = own + speed
        w = own.mean()
    np.testing.assert_allclose(found, w, rtol=1e-5)


@pytest.mark.slow
def test_the_recipe():
    """NumPy's HierFAVG: three edge rounds, momentum at both levels, one of four devices dropped by its edge's rule.

    Faults: an optimiser at the other level, an edge's rule that the cloud uses, edges weighed by what did not count.
    """
    c, edge_of, rate = np.array([0.0, 1.0, 4.0, -2.0, 9.0]), np.array([0, 0, 1, 1, 1]), 0.3
    people = population.grouped(population.quadratic_population(np.ones(5), c), edge_of)
    momenta = {"edge_optimizer": optax.sgd(0.5, momentum=0.5), "server_optimizer": optax.sgd(0.9, momentum=0.4)}
    made = algorithms.hierarchical_fedavg(
        population.quadratic_loss, sampling.full(2), optax.sgd(rate), num_steps=1, edge_rounds=3, group_size=3,
        edge_aggregator=aggregation.median(), mesh=None, **momenta,
    )  # fmt: skip
    found = run(made, people, rounds=3, start={"w": jnp.zeros(1)})[0].server.params["w"]
    w = speed = 0.0
    for _ in range(3):
        models = []
        for e in (0, 1):
            own, inner = w, 0.0
            for _ in range(3):
                inner = 0.5 * inner + np.median(rate * (c[edge_of == e] - own))
                own += 0.5 * inner
            models.append(own)
        speed = 0.4 * speed + np.average(models, weights=[2, 3]) - w
        w += 0.9 * speed
    np.testing.assert_allclose(found, w, rtol=1e-5)


@pytest.mark.full
@pytest.mark.optimised(False)  # one program, stopped and started again
def test_a_resumed_hierarchy_has_the_same_bits(tmp_path):
    """Fault: momentum or memory of an edge that a checkpoint forgets."""
    groups = population.grouped(p.ragged(), GROUPS)
    momentum = {"server_optimizer": optax.sgd(0.5, momentum=0.9), **PARTS["remembers"]}
    made = over(edges(sampling.poisson(SIZE, 0.6), **momentum), 2, keep=True)
    straight, history = loop.run(KEY, made, START, groups, 4)
    loop.run(KEY, made, START, groups, 2, directory=tmp_path)
    resumed, records = loop.run(KEY, made, START, groups, 4, resume=True, directory=tmp_path)
    assert records.records == history.records
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.full
def test_the_worked_example():
    """Two edges with two and three clients of 20 rows. Fault: weights of 1/2, or an epoch that is no 20 steps."""
    found = two_edges.main()
    assert found["shares"] == [0.4, 0.6] and found["messages"] == [2, 5]
    assert found["steps"] == [20] and found["weight"] == [100]
    assert found["loss"][-1] < 0.05 < found["loss"][0]


@pytest.mark.full
def test_three_levels():
    """Devices, edges, regions, cloud: one round on each level is flat. Bytes are told by level.

    Faults: members of another edge; levels that add up what is below them twice.
    """
    people = p.ragged()
    inner = population.grouped(people, np.arange(24) // 5)  # five edges of 5, 5, 5, 5 and 4
    outer = population.grouped(inner, [0, 1, 0, 1, 1])
    region = over(edges(sampling.full(5)), size=3).parts
    state, info = run(over(region, name="region", size=2), outer)
    expected, _ = run(flat(), people)
    np.testing.assert_allclose(state.server.params, expected.server.params, atol=1e-6, rtol=0)
    found = [info[f"{level}uplink_bytes"] // START.nbytes for level in ("", "region_", "edge_")]
    assert found == [2, 5, 24]
    with refused("name", rule="level inside"):
        twice = over(region, size=2)
        jax.eval_shape(twice.step, KEY, twice.init(KEY, START, outer), outer)


PARTS = {
    "robust": {"aggregator": aggregation.trimmed_mean(1)},
    "secure": {
        "aggregator": aggregation.secure_sum(aggregation.modular_sum(SIZE, modulus_bits=16), 1),
        "transform": transform.quantize(8, range=1.0, integers=True),
        "weighting": "uniform",
    },
    "private": {
        "aggregator": aggregation.fixed_mean(SIZE),
        "transform": transform.gaussian_mechanism(1.0, 0.5),
        "weighting": "uniform",
    },
    "remembers": {"transform": transform.error_feedback(transform.top_k(count=1))},
}


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(PARTS, ["remembers"]))
def test_any_part_at_the_edge(name):
    """Fault: a robust rule, a secure sum, noise or a memory that only works under one server."""
    made = over(edges(**PARTS[name]), 2, keep=name == "remembers")
    groups = population.grouped(p.ragged(), GROUPS)
    state, info = run(made, groups, rounds=2)
    assert np.isfinite(np.asarray(state.server.params)).all() and int(info["skipped_rounds"]) == 0
    assert (np.asarray(state.server.params) != p.START).any() and info["edge_skipped_rounds"] == 0


@pytest.mark.full
def test_skipped_rounds_weigh_nothing():
    """Groups too small for their shares of noise release nothing. Fault: an edge that weighs what arrived in a round
    that it skipped, and so holds the others back."""
    shares = transform.distributed_gaussian(1.0, 0.1, SIZE)
    made = over(edges(aggregator=aggregation.fixed_mean(SIZE), transform=shares, weighting="uniform"))
    _, info = run(made, population.grouped(p.ragged(), GROUPS), rounds=1)
    assert info["clients_reported"] == 1 and info["edge_skipped_rounds"] == 3 and info["total_weight"] == SIZE


def test_noise_inside_an_edge_has_no_epsilon():
    """Noise at an edge is seen from above, and refused by name; noise at the cloud hides an edge with all its devices.

    Fault: a run that states an epsilon for one release a round where each edge makes several, or none at all.
    """
    for inside in (PARTS["private"], {"transform": transform.local_gaussian(1.0, 1.0), "weighting": "uniform"}):
        made = over(edges(**inside), 2, weighting="uniform", aggregator=aggregation.fixed_mean(4.0))
        with refused("noise", value="one in client.transform", rule="client or transform"):
            mechanism_of(made)
    cloud = federated(
        sampling.poisson(4, 0.5),
        as_client_update(edges(), weighting="uniform"),
        aggregation.fixed_mean(2.0),
        STEP,
        transform.gaussian_mechanism(1.0, 1.0),
        mesh=None,
    )
    found = mechanism_of(cloud)
    assert (found.unit, found.population_size, found.law) == ("client", 4, "poisson")
    with refused("aggregator.sensitivity", rule="bound"):
        mechanism_of(cloud._replace(parts=cloud.parts._replace(aggregator=aggregation.mean())))


@pytest.mark.full
def test_skipped_chunks_change_nothing():
    """A group of one among groups of twelve has the bits that it has alone, empty places and all.

    Fault: places that are skipped though somebody is there, or that reach a sum.
    """
    people, alone = p.ragged(), np.where(np.arange(24) == 7, 0, 1)
    wide = population.grouped(people, alone)  # sizes 1 and 23
    star = edges(sampling.full(23))
    group, expected = wide.group(jnp.int32(0)), people.client(jnp.int32(7))
    report, _ = jax.jit(as_client_update(star).apply)(KEY, START, (), group)
    one = algorithms.fedavg(p.linear_loss, sampling.full(1), optax.sgd(p.RATE), **WORK)
    single = population.stored(
        jax.tree.map(lambda x: np.asarray(x)[np.asarray(expected.mask)], expected.examples), [0, int(p.SIZES[7])]
    )
    found = model(one, single, rounds=1) - np.asarray(START)
    np.testing.assert_allclose(report.update, found, atol=1e-6)
    assert float(report.weight) == p.SIZES[7]


def test_what_is_refused():
    """Faults: cohorts that repeat for ever, noise of an optimiser that is lost, a population without borders."""
    stateful = edges(sampling.cyclic(SIZE, 2))
    with refused("sampler", rule="keep=False"):
        as_client_update(stateful)
    made = over(stateful, keep=True)
    with refused("sampler", rule="unequal"):
        made.init(KEY, START, population.grouped(p.ragged(), GROUPS))
    for keep in (True, False):
        alike = over(edges(sampling.with_over_invitation(sampling.full(6), 1)), keep=keep)
        alike.init(KEY, START, population.grouped(p.ragged(), np.repeat(range(4), 6)))
        made = over(edges(sampling.with_over_invitation(sampling.full(SIZE), 1)), keep=keep)
        with refused("sampler", rule="limit of reports"):
            made.init(KEY, START, population.grouped(p.ragged(), GROUPS))
    design = sampling.uniform(SIZE, 2).design
    with refused("aggregator", rule="as they come"):
        as_client_update(edges(sampling.uniform(SIZE, 2), aggregator=aggregation.horvitz_thompson(design, 90.0)))
    with refused("population", value="Generated", kind=InvalidType):
        over(edges(), size=24).init(KEY, START, p.ragged())
    with refused("sampler", rule="population's"):
        over(edges(sampling.full(3))).init(KEY, START, population.grouped(p.ragged(), GROUPS))
    with refused("client", rule="no federation"):
        variance_budget(over(edges()), START, population.grouped(p.ragged(), GROUPS), num_clients=2)
    alike = {name: network.constant(1.0) for name in ("speed", "bandwidth_down", "bandwidth_up")}
    clocked = sampling.with_clock(sampling.full(SIZE), network.heterogeneous(SIZE, **alike))
    with refused("sampler", rule="without a clock"):
        as_client_update(edges(clocked), keep=True)
    for wrong in ({"rounds": 0}, {"name": "the edge"}, {"weighting": "clients"}, {"keep": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
            as_client_update(edges(), **wrong)


@pytest.mark.parametrize("name", sorted(cases.CASES["algorithms"]))
def test_what_an_edge_would_lose(name):
    """Every algorithm: an edge makes whole ones' rounds, and refuses the others, whether it keeps its state or not.

    Faults: Mime without its first pass; a SCAFFOLD that forgets its control variates; FedExP whose mean of two models,
    made for evaluation, is trained from; stale updates without their versions; pre-training that nobody did.
    """
    row = cases.CASES["algorithms"][name]
    star = row().parts
    if star is None:  # gossip
        return
    if row.edge == "whole":
        as_client_update(star, name="region", keep=True)
        return
    rules = {"server": "server: expected one that can go on", "star": "star: expected the parts of a whole"}
    for keep in (True, False):
        with pytest.raises(ValueError, match=rules[row.edge]):  # or state another `edge` in tests/laws/cases.py
            as_client_update(star, keep=keep)


def test_parts_that_say_nothing_are_no_algorithm():
    """Faults: a default that promises; a server with a state of its own that begins anew without a word."""
    star = edges()
    with refused("star", rule="whole algorithm"):
        as_client_update(Star(*star[:5]))
    for unknown in (star.server._replace(moved=None), server.downlink(STEP, transform.top_k(count=1))):
        with refused("server", rule="another model"):
            as_client_update(star._replace(server=unknown))


def of_its_own(**fields):
    """An algorithm of a user's own that is a level, with these fields of its level changed."""
    level = Level(edges(), init=None, step=None)
    return Algorithm(init=None, step=None, params=None, level=level._replace(**fields))


def test_a_level_of_a_users_own_is_checked():
    """Faults: an `assert` while the level above trains, for a server that cannot go on from another model; an error of
    Python for a level that is none."""
    unknown = edges()._replace(server=edges().server._replace(moved=None))
    with refused("server", rule="another model"):
        as_client_update(of_its_own(star=unknown), keep=True)
    as_client_update(of_its_own(star=unknown), keep=False)  # begins anew from each broadcast
    with refused("federation.level.star", rule="Star", kind=InvalidType):
        as_client_update(of_its_own(star=None))
    with refused("federation.level", rule="Level", kind=InvalidType):
        as_client_update(of_its_own()._replace(level=edges()))


def counting_rounds():
    """An aggregator with a state."""
    rule = aggregation.mean()

    def finalize(key, cohort, carry):
        return *rule.finalize(key, cohort, carry), cohort.state + 1

    return rule._replace(start=lambda spec: jnp.zeros(()), finalize=finalize)


KEEPERS = {
    "client": lambda: edges()._replace(
        client=client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=1))._replace(init=lambda x: x)
    ),
    "transform": lambda: edges(**PARTS["remembers"]),
    "aggregator": lambda: edges(aggregator=counting_rounds()),
}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", KEEPERS)
def test_a_state_that_is_not_kept(name):
    """Fault: error feedback whose memory begins at zero in each round above: what was left out is never sent."""
    groups = population.grouped(p.ragged(), GROUPS)
    with refused(name, rule="keeps nothing"):
        made = over(KEEPERS[name]())
        jax.eval_shape(made.step, KEY, made.init(KEY, START, groups), groups)


ALONE = {
    "fedavgm": {"server_learning_rate": 0.3},
    "fednova": {},
    "fedprox": {"coefficient": 0.5},
    "fedyogi": {},
}


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) for name in ALONE if name != "fedavgm"]
                         + ["fedavgm"])  # fmt: skip
def test_one_edge_of_everybody_is_its_algorithm(name):
    """Three cloud rounds of an edge that keeps its state, with everybody under it, are three of its own rounds, to
    1e-6. Fault: an edge that loses a part of the algorithm inside, such as its momentum or its moments."""
    options = ALONE[name] | {"num_steps": 2, "mesh": None, "plan": p.PLAN}
    made = getattr(algorithms, name)(p.linear_loss, sampling.full(p.NUM_CLIENTS), optax.sgd(p.RATE), **options)
    people, everybody = p.ragged(), population.grouped(p.ragged(), [0] * p.NUM_CLIENTS)
    found = model(over(made.parts, size=1, keep=True), everybody, rounds=3)
    np.testing.assert_allclose(found, model(made, people, rounds=3), atol=1e-6, rtol=0)
