"""Compressors with memory: what they keep, where they converge, what they refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, population, sampling, server, theory, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.transform import chain, ef21, error_feedback, identity, quantize, random_k, stateless, top_k
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Noise
from tests.laws import cases, laws, problems as p
from tests.refusals import refused

KEY = jax.random.key(0)
INNER = {
    "top_k": lambda: top_k(count=2),
    "random_k": lambda: random_k(0.25, scaled=False),
    "quantize": lambda: quantize(3),
    "integers": lambda: quantize(4, range=4.0, integers=True),
    "low_rank": lambda: transform.low_rank(1),
    "chain": lambda: chain(top_k(0.3), quantize(3)),
}


def updates(num_rounds=40):
    """Updates [rounds, ...] of a matrix, a scalar and a bfloat16 vector."""
    rng = np.random.default_rng(0)
    shapes = {"a": (6, 5), "b": (), "c": (7,)}
    stacked = {name: jnp.array(rng.normal(size=(num_rounds, *s)), jnp.float32) for name, s in shapes.items()}
    return stacked | {"c": stacked["c"].astype(jnp.bfloat16)}


def messages(member, stacked):
    """(the numbers that each round's message decodes to, the last memory) of one client."""
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
    state = member.init(spec)

    def body(memory, slice):
        i, update = slice
        key = jax.random.fold_in(KEY, i)
        message, memory, measured = member.on_client(key, update, state, memory)
        if member.facts.integer_range is not None:
            assert all(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(message))
            message, _, _ = member.on_server(key, None, message, state, measured, None)
        return memory, message

    rounds = jnp.arange(len(stacked["b"]))
    memory, sent = jax.jit(lambda: jax.lax.scan(body, member.init_client(spec), (rounds, stacked)))()
    return sent, memory


@pytest.mark.default_rows("integers")
@pytest.mark.parametrize("name", cases.rows(INNER, ["integers", "low_rank", "chain"]))
def test_sent_and_residual_add_up_to_the_updates(name):
    """In float64, to 2^-22 of the largest |u + e| a round. Catches a residual of u instead of u + e, one that misses
    what rounding to bfloat16 took, and integers that are not decoded."""
    stacked = updates()
    sent, memory = messages(error_feedback(INNER[name]()), stacked)
    assert np.abs(p.flat(memory)).max() > 0.01  # or the law would be empty
    for leaf in stacked:
        u, s = (np.asarray(x[leaf], np.float64) for x in (stacked, sent))
        residual = np.asarray(memory.numbers[leaf], np.float64)
        assert memory.numbers[leaf].dtype == jnp.float32
        largest = np.abs(np.cumsum(u - s, axis=0) + s).max()
        assert np.abs(s.sum(0) + residual - u.sum(0)).max() <= len(u) * 2.0**-22 * largest


@pytest.mark.full
@pytest.mark.optimised
def test_feedback_over_what_changes_nothing_changes_nothing():
    """Bit for bit. Catches a residual that is not zero."""
    stacked = updates()
    sent, memory = messages(error_feedback(identity()), stacked)
    laws.check_equal_bits(sent, stacked, "messages")
    assert not p.flat(memory).any()


def test_a_compressor_is_tried_once():
    """Catches a trial that each new first state repeats, and one that is skipped for other shapes."""
    seen, specs = [], [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (3, 4)]
    half = stateless(lambda key, update: (seen.append(update.shape), update / 2)[1])
    made = error_feedback(half)
    for spec in (*specs, *specs):
        made.init_client(spec)
    counts = [seen.count(spec.shape) for spec in specs]
    assert all(counts)
    made.init_client(specs[0])
    assert counts == [seen.count(spec.shape) for spec in specs]
    error_feedback(half).init_client(specs[0])
    assert seen.count((3,)) == 2 * counts[0]


def test_only_reporting_clients_remember():
    """Catches a residual written for who did not report, for padding, or for a message that was dropped."""
    federation = p.Federation(transform=error_feedback(top_k(count=1)))
    there = np.arange(p.SLOTS) % 3 > 0
    spoiled = int(p.COHORT[1])
    data = p.ragged(spoil={spoiled: np.nan})
    state, infos = federation.run(p.cohort(p.COHORT, reported=there), data, num_rounds=2)
    kept = np.abs(np.asarray(state.memory.numbers)).sum(1) > 0
    heard = np.isin(np.arange(p.NUM_CLIENTS), p.COHORT[there]) & (np.arange(p.NUM_CLIENTS) != spoiled)
    assert kept.tolist() == heard.tolist() and infos[0]["dropped_clients"] == 1
    again, _ = federation.run(p.COHORT[:3], state=jax.tree.map(jnp.asarray, state), num_rounds=1)
    same = (np.asarray(again.memory.numbers) == np.asarray(state.memory.numbers)).all(1)
    assert same[~np.isin(np.arange(p.NUM_CLIENTS), p.COHORT[:3])].all() and not same[p.COHORT[0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: error_feedback(chain(top_k(count=2), quantize(4))),
        pytest.param(lambda: ef21(quantize(3), p.NUM_CLIENTS), marks=pytest.mark.slow),
    ],
    ids=["error_feedback", "ef21"],
)
@pytest.mark.full  # ef21 on two devices runs always, in tests/laws/test_compositions.py
@pytest.mark.optimised
def test_bits_do_not_depend_on_devices(make):
    """Catches a residual, or a step of g, whose rounding another program changes."""
    parts = {"transform": make(), "aggregator": aggregation.fixed_mean(p.NUM_CLIENTS)}
    runs = [p.Federation(**parts, mesh=mesh).run(p.COHORT, num_rounds=3) for mesh in (None, engine.device_mesh())]
    laws.check_equal_bits(*(engine.gathered(p.outcome(*run)) for run in runs), "devices")


# ---- convergence on heterogeneous quadratics

CLIENTS, DIMENSION = 10, 12
DATA = population.quadratics(num_clients=CLIENTS, dimension=DIMENSION, heterogeneity=1.0)


def optimum():
    hessians, centers = (np.asarray(DATA.test[name]) for name in ("hessian", "center"))
    return theory.quadratic_optimum(hessians, centers)


def distances(transform, rates, *, cohort_size=CLIENTS, num_rounds=2000):
    """|w - w*| after the rounds for each rate; everybody takes one gradient step of the rate."""
    sampler = sampling.uniform(CLIENTS, cohort_size) if cohort_size < CLIENTS else sampling.full(CLIENTS)

    @jax.jit
    def run(rates, data):
        def one(rate):
            algorithm = federated(
                sampler,
                client.local_sgd(
                    population.quadratic_loss, optax.sgd(1.0), client.work(num_steps=1, weighting="uniform")
                ),
                aggregation.fixed_mean(CLIENTS),
                server.optimizer(optax.sgd(rate)),
                transform,
                mesh=None,
                plan=engine.Plan(5, 5),
            )
            state = algorithm.init(KEY, {"w": jnp.zeros(DIMENSION)}, data)

            def body(state, key):
                return algorithm.step(key, state, data)[0], None

            state, _ = jax.lax.scan(body, state, jax.random.split(KEY, num_rounds))
            return algorithm.params(state)["w"]

        return jax.vmap(one)(rates)

    reached = run(jnp.array(rates), DATA.train)
    return np.linalg.norm(np.asarray(reached, np.float64) - optimum(), axis=1)


@pytest.mark.full
def test_feedback_converges_where_the_bare_compressor_stalls():
    """Top-1 of 12 stays far from the optimum at any rate; with error feedback it comes as near as the rate (and so the
    residual) is small; without compression it reaches it. Catches a residual that is dropped, or fed back with the
    wrong sign."""
    bare = distances(top_k(count=1), [0.1, 0.05])
    fed = distances(error_feedback(top_k(count=1)), [0.1, 0.05, 0.01])
    assert distances(identity(), [0.1]) < 1e-5
    assert (bare > 0.3).all()
    assert fed[1] < 0.25 * bare[1] and fed[2] < 0.05 * bare[1]
    assert fed[0] > 1.5 * fed[1] > 4 * fed[2]


@pytest.mark.full
def test_ef21_reaches_the_optimum():
    """By full and by partial participation, at a constant rate, where error feedback has an error floor. Catches g
    divided by the cohort's size, memories of absent clients that are dropped from g, and a g that starts anew each
    round."""
    assert distances(ef21(top_k(count=1), CLIENTS), [0.03]) < 1e-4
    assert distances(ef21(chain(top_k(count=4), quantize(8)), CLIENTS), [0.03], cohort_size=4) < 1e-4


# ---- EF21


def test_ef21_keeps_the_mean_of_the_memories():
    """Whoever reported, to rounding; the model moves by g. Catches absent clients counted as zeros, and a g that a
    dropped message moved."""
    member = ef21(top_k(count=1), p.NUM_CLIENTS)
    federation = p.Federation(transform=member, aggregator=aggregation.fixed_mean(p.NUM_CLIENTS))
    data = p.ragged(spoil={5: np.inf})
    state = federation.init(data=data)
    for i, reported in enumerate((True, np.arange(p.SLOTS) < 4, np.arange(p.SLOTS) > 6)):
        before = np.asarray(state.server.params, np.float64)
        state, infos = federation.run(p.cohort(p.COHORT, reported=reported), data, state=state, num_rounds=1, keys=[i])
        memories = np.asarray(state.memory.numbers, np.float64)
        np.testing.assert_allclose(np.asarray(state.transform.mean), memories.mean(0), atol=1e-6)
        np.testing.assert_allclose(np.asarray(state.server.params) - before, memories.mean(0), atol=1e-6)
        assert not memories[5].any() and infos[0]["dropped_clients"] == (
            1 if 5 in p.COHORT[np.asarray(reported)] else 0
        )
        state = jax.tree.map(jnp.asarray, state)


@pytest.mark.full
def test_ef21_converges_to_the_updates():
    """With equal updates the memory becomes them, top-1 in as many rounds as there are entries, and messages vanish."""
    update = {"a": jnp.array([3.0, -1.0, 0.5]), "b": jnp.float32(2.0)}
    member = ef21(top_k(count=1), 1)
    state, memory = member.init(update), member.init_client(update)
    for i in range(5):
        message, memory, measured = member.on_client(KEY, update, state, memory)
        g, state, _ = member.on_server(KEY, None, message, state, measured, None)
        assert (np.abs(p.flat(message)) > 0).sum() == (i < 4)
    for x in (memory.numbers, g, state.mean):
        assert p.flat(x).tolist() == [3.0, -1.0, 0.5, 2.0]


@pytest.mark.default_rows(2)
@pytest.mark.parametrize(
    "aggregator, got",
    [
        (aggregation.mean(), "without a sensitivity"),
        (aggregation.fixed_mean(10), "divides by 10"),
        (aggregation.keep_old(24.0), "without a sensitivity"),
        (aggregation.total(), "divides by 1"),
    ],
)
def test_ef21_refuses_other_aggregators(aggregator, got):
    """Catches g moved N/m times too much, in silence."""
    federation = p.Federation(transform=ef21(top_k(count=1), p.NUM_CLIENTS), aggregator=aggregator)
    with refused("aggregator", rule="fixed_mean(24)") as raised:
        federation.run(p.COHORT)
    assert raised.value.value.endswith(got)


# ---- facts and refusals


def test_facts():
    """Catches an unbiasedness or an error inherited from the compressor, and bits of the memory counted as sent."""
    spec = jax.ShapeDtypeStruct((100,), jnp.float32)
    for member in (error_feedback(random_k(0.9)), ef21(random_k(0.9), 5)):
        assert not member.facts.unbiased and not member.facts.nonexpansive and member.squared_error is None
        assert wire_of(member, spec) == wire_of(random_k(0.9), spec) and member.facts.l2_bound is None
    bounded = stateless(lambda key, x: x, l2_bound=2.0)
    assert error_feedback(bounded).facts.l2_bound == 2.0
    assert error_feedback(quantize(4, range=1.0, integers=True)).facts.integer_range == (-7, 7)


@pytest.mark.full
@pytest.mark.parametrize("wrap", [error_feedback, lambda member: ef21(member, 3)], ids=["error_feedback", "ef21"])
def test_what_is_refused(wrap):
    """Catches noise taken back by a memory, memories in memories, and residuals that grow for ever, be it for unequal
    entries alone, on which few levels lose more than there is, or with an error of which only a bound is known."""
    spec = jax.ShapeDtypeStruct((100,), jnp.float32)
    noisy = stateless(lambda key, x: x, noise=Noise("gaussian", "local", 1.0, 1.0, "client"))
    with refused("transform", value="gaussian"):
        wrap(noisy)
    for wrong in (None, top_k, "top_k"):
        with pytest.raises(TypeError, match="transform: expected an UpdateTransform"):
            wrap(wrong)
    for nested in (error_feedback(top_k(0.1)), chain(identity(), ef21(top_k(0.1), 3))):
        with pytest.raises(ValueError, match="of its own"):
            wrap(nested).init_client(spec)
    for expansive in (random_k(0.5), transform.qsgd(1), quantize(2), transform.rotated(quantize(2))):
        with refused("transform", rule="|Q(x) - x|^2"):
            wrap(expansive).init_client(jax.ShapeDtypeStruct((500,), jnp.float32))
    for fine in (
        quantize(3),
        random_k(0.6),
        random_k(0.1, scaled=False),
        quantize(1, range=1.0, keeps_zeros=False),
    ):
        assert wrap(fine).init_client(spec).numbers.shape == (100,)
        jax.jit(lambda fine=fine: wrap(fine).init_client(spec))()
    assert wrap(top_k(0.5, scope="leaf")).init_client({"half": jnp.zeros(4, jnp.float16), "none": jnp.zeros(0)})


def test_population_sizes():
    """Catches sizes that are none."""
    for wrong, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="population_size: "):
            ef21(top_k(0.1), wrong)


@pytest.mark.parametrize("remembers", ["transform", "client"])
def test_cohorts_with_replacement_are_refused(remembers):
    """Catches a client drawn twice, whose second message overwrites what it remembers of the first."""
    work = client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(num_steps=1))
    algorithm = federated(
        sampling.with_replacement(p.NUM_CLIENTS, p.SLOTS),
        p.counting(work) if remembers == "client" else work,
        aggregation.mean(),
        server.optimizer(optax.sgd(1.0)),
        error_feedback(top_k(0.5)) if remembers == "transform" else None,
    )
    with refused("sampler", rule="with state"):
        algorithm.init(jax.random.key(0), p.START, p.ragged())
