"""Gaussian noise: its level to 1 %, its place, its independence, and what shares and shrinking cohorts do to it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, engine, models, population, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.running.loop import run
from fedjax_sim.transform import (
    adaptive_clip,
    chain,
    distributed_gaussian,
    gaussian_mechanism,
    identity,
    local_gaussian,
    quantize,
    stateless,
)
from fedjax_sim.transform.chain import plain_wire, wire_of
from fedjax_sim.types import ClientUpdate, Mean, Report, Wire
from tests.laws import cases, laws, problems as p
from tests.refusals import refused

KEY = jax.random.key(0)
MANY = 1 << 20
MEASURED = {
    "clipped_update_share": Mean(jnp.float32(3), jnp.float32(10)),
    "unclipped_norm": Mean(jnp.float32(1), jnp.float32(1)),
}


def level(draws, std: float) -> float:
    """The chi-square of the draws around 0, as standard deviations from what `std` gives."""
    draws = np.asarray(draws, np.float64).ravel()
    return float(((draws / std) ** 2).mean() - 1) / math.sqrt(2 / draws.size)


def check_level(draws, std: float) -> None:
    """Accepts `std`, rejects 1.01 and 0.99 of it: 7 standard deviations of 2^20 draws, both errors below 1e-10."""
    draws = np.asarray(draws)
    assert draws.size >= MANY - 1000 and abs(level(draws, std)) < 7
    assert level(draws, 1.01 * std) < -7 and level(draws, 0.99 * std) > 7


def release(member, aggregate, *, sensitivity=0.1, key=KEY, state=(), measured=MEASURED):
    act = jax.jit(lambda key, x, state: member.on_server(key, None, x, state, measured, sensitivity))
    return act(key, aggregate, state)


def test_central_noise_level():
    """std = z C / m. Catches noise as for the sum, a variance for a std, bfloat16 noise, a leaf without."""
    member = gaussian_mechanism(0.5, 3.0)
    aggregate = {"a": jnp.full((1 << 10, 1 << 10), 2.0), "b": jnp.zeros(MANY, jnp.bfloat16), "c": jnp.zeros(())}
    noisy = release(member, aggregate)[0]
    for name in "ab":
        assert noisy[name].dtype == jnp.float32 and noisy[name].shape == aggregate[name].shape
        check_level(noisy[name] - aggregate[name].astype(jnp.float32), 0.15)
    assert float(noisy["c"]) != 0
    draws = np.asarray(noisy["b"], np.float64)[:100_000] / 0.15
    assert stats.kstest(draws, "norm").pvalue > 1e-4
    assert member.facts.releases_when_empty and member.facts.l2_bound == 0.5 and member.facts.nonexpansive
    assert member.facts.noise[:4] == ("gaussian", "central", 3.0, 0.5) and member.facts.noise.details is None


@pytest.mark.full
@pytest.mark.optimised
def test_noise_is_independent():
    """Correlations over 2^20 pairs stay below 7 standard errors. Catches one key for two leaves, rounds or parts."""
    member = gaussian_mechanism(1.0, 1.0)
    zeros = {"a": jnp.zeros(MANY), "b": jnp.zeros(MANY)}
    act = jax.jit(lambda key: member.on_server(key, None, zeros, (), MEASURED, 0.1)[0])
    first, second, again = (act(jax.random.fold_in(KEY, i)) for i in (0, 1, 0))
    laws.check_equal_bits(first, again, "the same round")
    a, b, later = (np.asarray(x, np.float64) for x in (first["a"], first["b"], second["a"]))
    for x, y in ((a, b), (a, later), (a[1:], a[:-1]), (a[1024:], a[:-1024]), (np.abs(a[1:]), np.abs(a[:-1]))):
        assert abs(np.corrcoef(x, y)[0, 1]) < 7 / math.sqrt(MANY)
    local = jax.vmap(lambda key: local_gaussian(1.0, 1.0).on_client(key, jnp.zeros(1 << 17), (), ())[0])
    messages = np.asarray(local(jax.random.split(KEY, 8)), np.float64)
    assert np.abs(np.corrcoef(messages) - np.eye(8)).max() < 7 / math.sqrt(1 << 17)


def still(width: int) -> tuple[ClientUpdate, dict]:
    """Clients who send zeros."""
    params = {"w": jnp.zeros(width), "half": jnp.zeros(64, jnp.bfloat16)}

    def apply(key, broadcast, state, data):
        return Report(jax.tree.map(jnp.zeros_like, broadcast), jnp.float32(1), {}), state

    return ClientUpdate(lambda params: (), apply), params


class Rounds:
    """Single rounds of clients who send zeros, compiled once."""

    def __init__(self, member, *, width: int, plan=p.PLAN, mesh=None):
        client, self.start = still(width)
        parts = {"client": client, "transform": member, "aggregator": aggregation.fixed_mean(10.0)}
        self.federation = p.Federation(**parts, server=server.optimizer(optax.sgd(1.0)), plan=plan, mesh=mesh)

    def moves(self, num_rounds: int, who=p.COHORT):
        """What each of some rounds adds to the model, and the last one's info."""
        done = [self.federation.run(who, params=self.start, keys=[i]) for i in range(num_rounds)]
        moved = [jax.device_get(self.federation.algorithm.params(state)) for state, _ in done]
        return np.stack([x["w"] for x in moved]), moved, done[-1][1][0]


@pytest.mark.full
@pytest.mark.optimised
@pytest.mark.parametrize(
    "place, meshes",
    [("central", 1)] + [pytest.param(place, 2, marks=pytest.mark.full) for place in ("central", "local")],
)
def test_devices_and_chunks(place, meshes):
    """Noise once, of the level that the mean of 10 messages has, also where none came; and the same bits on two devices
    in chunks of 2. Catches noise added by every chunk or device (as tests/laws/test_invariance.py does), or twice, and
    a round without noise, which would show that nobody was there."""
    width = 1 << 18 if place == "central" else 1 << 13
    member = {"central": gaussian_mechanism, "local": local_gaussian}[place](2.0, 1.5)
    one = Rounds(member, width=width)
    expected, models, _ = one.moves(4)
    if meshes == 2:
        _, others, _ = Rounds(member, width=width, plan=engine.Plan(2, 2), mesh=engine.device_mesh(2)).moves(4)
        laws.check_equal_bits(models, others, "two devices")
    nobody, _, info = one.moves(4, p.cohort(p.COHORT, reported=False))
    if place == "central":
        check_level(expected, 3 / 10)
        check_level(nobody, 3 / 10)
        assert not info["skipped_rounds"] and info["clipped_update_share"] == 0
    else:
        assert abs(level(expected, 3 / math.sqrt(10))) < 6
        assert not nobody.any() and info["skipped_rounds"]


@pytest.mark.full
def test_central_against_local():
    """Variance in the mean of m messages: slopes -2.00 and -1.00 in m, ratio m at equal z C (Kairouz et al. 2021).

    2,000 coordinates give each variance to 3 % and the slopes to 0.006. Catches a divisor sqrt(m), noise per message
    called central, and clients who share their noise.
    """
    sizes, width = np.array([10, 100, 1000, 10_000]), 2000
    member = local_gaussian(1.0, 1.0)

    keys = jax.random.split(KEY, int(sizes[-1]))

    @jax.jit
    def both(m):
        def add(i, total):
            return total + member.on_client(keys[i], jnp.zeros(width), (), ())[0]

        zeros = jnp.zeros(10 * width)
        once = gaussian_mechanism(1.0, 1.0).on_server(jax.random.fold_in(KEY, m), None, zeros, (), MEASURED, 1 / m)[0]
        return jnp.var(jax.lax.fori_loop(0, m, add, jnp.zeros(width)) / m), jnp.var(once)

    local, central = np.array([both(int(m)) for m in sizes], np.float64).T
    assert abs(np.polyfit(np.log(sizes), np.log(central), 1)[0] + 2) < 0.02
    assert abs(np.polyfit(np.log(sizes), np.log(local), 1)[0] + 1) < 0.02
    np.testing.assert_allclose(local / central, sizes, rtol=0.2)  # 5 standard errors
    np.testing.assert_allclose(local[1], 1e-2, rtol=0.2)
    np.testing.assert_allclose(central[1], 1e-4, rtol=0.1)


def test_messages_bear_their_noise():
    """A message holds its noise before it is sent, in every leaf and dtype. Catches noise left to the server."""
    member = local_gaussian(0.5, 3.0)
    update = {"a": jnp.full(MANY, 1.0), "b": jnp.zeros(1 << 16, jnp.bfloat16)}
    message = jax.jit(lambda update: member.on_client(KEY, update, (), ())[0])(update)
    clipped = 0.5 / math.sqrt(MANY)
    check_level(np.asarray(message["a"], np.float64) - clipped, 1.5)
    assert message["b"].dtype == jnp.bfloat16 and abs(level(np.float32(message["b"]), 1.5)) < 6
    real = sum(((np.float64(message[k]) - np.float64(update[k])) ** 2).sum() for k in update)
    np.testing.assert_allclose(jax.jit(member.squared_error)(update), real, rtol=5e-3)
    assert member.facts.noise[:4] == ("gaussian", "local", 3.0, 0.5)
    assert member.facts.noise.details == {"sensitivity": 1.0}
    assert member.facts.l2_bound is None and not member.facts.nonexpansive and not member.facts.releases_when_empty
    aggregate = release(member, jnp.ones(3), sensitivity=None)[0]
    assert aggregate.tolist() == [1, 1, 1]
    half = jnp.zeros(5, jnp.bfloat16)  # what a quantiser hands on is float32, and so is its sum with the noise
    assert (wire_of(member, half).bits, wire_of(chain(quantize(), member), half).bits) == (80, 160)


def test_shares_add_up():
    """The sum of m messages has std z C; of half as many, sqrt(1/2) of it. Catches shares of 1/m, or of the slots."""
    size, width = 4, 1 << 16
    member = distributed_gaussian(0.5, 4.0, size)
    messages = jax.jit(jax.vmap(lambda key: member.on_client(key, jnp.zeros(width), (), ())[0]))
    rows = np.asarray(messages(jax.random.split(KEY, 16 * size)), np.float64).reshape(16, size, width)
    check_level(rows.sum(1), 2.0)
    check_level(rows[:, : size // 2].sum(1), 2 * math.sqrt(0.5))
    assert member.facts.noise[:4] == ("gaussian", "distributed", 4.0, 0.5)
    short = p.cohort(p.COHORT)
    with refused("cohort_size", rule="10 slots"):
        distributed_gaussian(0.5, 4.0, 16).on_server(KEY, short, jnp.zeros(3), (), MEASURED, 0.1)
    made = distributed_gaussian(0.5, 4.0, 10)
    assert made.on_server(KEY, short, jnp.zeros(3), (), MEASURED, 0.1)[0].tolist() == [0] * 3


def test_noise_as_of_a_larger_cohort():
    """z C / M in the mean, whatever m. Catches M / m the wrong way round, and a sum taken for a mean."""
    member = gaussian_mechanism(2.0, 1.0, noise_cohort_size=100)
    for m in (10.0, 100.0):
        check_level(release(member, jnp.zeros(MANY), sensitivity=1 / m)[0], 0.02)
    details = member.facts.noise.details
    assert details["noise_cohort_size"] == 100 and "at that size only" in details["warning"]
    with refused("noise_cohort_size", value=100, rule="[1000, ", hint="larger cohort"):
        release(member, jnp.zeros(3), sensitivity=1e-3)
    with refused("aggregator.sensitivity", value=1.0, rule="a mean"):
        release(member, jnp.zeros(3), sensitivity=1.0)


def test_noise_needs_a_sensitivity():
    """Catches noise of a level that no divisor justifies."""
    for member, state in ((gaussian_mechanism(1.0, 1.0), ()), (_adaptive(), jnp.float32(1))):
        with refused("aggregator.sensitivity", value=None, hint="fixed_mean"):
            release(member, jnp.zeros(3), sensitivity=None, state=state)
    with pytest.raises(ValueError, match="aggregator: expected one whose result"):
        federated(
            p.given(10), still(3)[0], aggregation.mean(), server.replacement(), gaussian_mechanism(1.0, 1.0), mesh=None
        )


def test_the_illegal_order_is_refused():
    """Catches a quantiser after the clip that the noise relies on: rounding lengthens."""
    longer = stateless(lambda key, x: jax.tree.map(jnp.ceil, x), unbiased=True)
    with refused("transforms[1]", rule="never lengthens", hint="before the mechanism"):
        chain(gaussian_mechanism(1.0, 1.0), longer)
    with pytest.raises(ValueError, match="nothing after noise that adds up"):
        chain(distributed_gaussian(1.0, 1.0, 5), identity())
    assert chain(longer, gaussian_mechanism(1.0, 1.0)).facts.noise.place == "central"
    with pytest.raises(ValueError, match="one member with noise"):
        chain(local_gaussian(1.0, 1.0), gaussian_mechanism(1.0, 1.0))


def test_without_noise_it_is_the_clip():
    """Catches noise from nowhere: z = 0 changes no bit of the aggregate."""
    aggregate = jnp.array([1.0, -2.0, 1e-30])
    assert release(gaussian_mechanism(1.0, 0), aggregate)[0].tolist() == aggregate.tolist()


def _adaptive(**options):
    return adaptive_clip(**{"noise_multiplier": 1.0, "initial_clip_norm": 1.0, "quantile_noise": 5.0} | options)


@pytest.mark.full
def test_adaptive_noise_level():
    """The update's noise at the raised multiplier and at the state's C; the count's noise on the quantile.

    Catches a multiplier that is not raised, noise at the first clip norm, and a count that is released without noise.
    """
    member = _adaptive(noise_multiplier=2.0, quantile_noise=1.25)
    raised = (2.0**-2 - 2.5**-2) ** -0.5
    np.testing.assert_allclose(member.facts.noise.details["update_multiplier"], raised, rtol=1e-12)
    noisy, _, metrics = release(member, jnp.zeros(MANY), state=jnp.float32(0.3))
    check_level(noisy, raised * 0.3 * 0.1)
    assert float(metrics["clip_norm"]) == np.float32(0.3)

    def log_step(key):
        _, after, _ = member.on_server(key, None, jnp.zeros(1), jnp.float32(0.3), MEASURED, 0.1)
        return jnp.log(after / 0.3)

    steps = np.asarray(jax.jit(jax.vmap(log_step))(jax.random.split(KEY, 20_000)), np.float64)
    share = 0.5 - steps / 0.2  # of updates below the norm: 7 of 10, with noise 1.25 / 10
    np.testing.assert_allclose(share.mean(), 0.7, atol=6 * 0.125 / math.sqrt(20_000))
    assert abs(level(share - 0.7, 0.125)) < 6
    assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1]) < 7 / math.sqrt(20_000)


def test_the_least_noise_has_no_overflow():
    """Catches z ** -2 past the floats: with next to no noise on the update, the count's takes nothing from it."""
    made = adaptive_clip(1e-200, initial_clip_norm=1.0, quantile_noise=5.0)
    assert made.facts.noise.details["update_multiplier"] == 1e-200


@pytest.mark.full
@pytest.mark.parametrize("quantile", cases.rows([0.3, 0.5, 0.8], [0.3]))
def test_clip_norm_finds_the_quantile(quantile):
    """Log-normal norms from a start 100 times too low: C converges to their quantile. Catches an update with the wrong
    sign, of the complement's quantile, and a count divided by those who came."""
    member = _adaptive(target_quantile=quantile, initial_clip_norm=0.01)
    m = 100

    def one(state, key):
        norms = jnp.exp(jax.random.normal(jax.random.fold_in(key, 1), (m,)))
        send = jax.vmap(lambda norm: member.on_client(key, jnp.array([norm, 0.0]), state, ())[2])
        measured = jax.tree.map(jnp.sum, send(norms))
        _, state, metrics = member.on_server(key, None, jnp.zeros(2), state, measured, 1 / m)
        return state, metrics["clip_norm"]

    _, path = jax.jit(lambda keys: jax.lax.scan(one, member.init(None), keys))(jax.random.split(KEY, 600))
    assert float(path[0]) == np.float32(0.01)
    truth = math.exp(stats.norm.ppf(quantile))
    np.testing.assert_allclose(np.median(np.asarray(path)[200:]), truth, rtol=0.06)
    facts = member.facts
    assert facts.noise.details["adaptive"] and facts.noise.multiplier == 1.0 and facts.releases_when_empty


def test_wires():
    """Catches a sparse code kept under noise, and a bit that nobody pays."""
    spec = jax.ShapeDtypeStruct((8,), jnp.float32)
    sparse = stateless(lambda key, x: x, wire=lambda spec, wire: Wire(2, 64, 6))
    for noisy in (local_gaussian(1.0, 1.0), distributed_gaussian(1.0, 1.0, 5)):
        assert wire_of(chain(sparse, noisy), spec) == plain_wire(spec)
    assert wire_of(chain(sparse, gaussian_mechanism(1.0, 1.0)), spec) == Wire(2, 64, 38)
    assert wire_of(_adaptive(), spec) == Wire(8, 256, 1)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: gaussian_mechanism(1.0, -0.1), "noise_multiplier"),
        (lambda: gaussian_mechanism(1.0, float("nan")), "noise_multiplier"),
        (lambda: gaussian_mechanism(1.0, 1.0, noise_cohort_size=0), "noise_cohort_size"),
        (lambda: local_gaussian(1.0, True), "noise_multiplier"),
        (lambda: local_gaussian(float("inf"), 1.0), "clip_norm"),
        (lambda: local_gaussian(None, 1.0), "clip_norm: expected"),
        (lambda: distributed_gaussian("1", 1.0, 2), "clip_norm: expected"),
        (lambda: distributed_gaussian(1.0, 1.0, 1.5), "cohort_size"),
        (lambda: _adaptive(noise_multiplier=0), "noise_multiplier"),
        (lambda: _adaptive(quantile_noise=0.5), "quantile_noise: .*alone spends the budget"),
        (lambda: _adaptive(target_quantile=1.1), "target_quantile"),
        (lambda: _adaptive(learning_rate=0.0), "learning_rate"),
        (lambda: _adaptive(initial_clip_norm=-1.0), "initial_clip_norm"),
    ],
)
def test_wrong_options_are_refused(make, wrong):
    """Catches numbers that mean nothing."""
    with pytest.raises((ValueError, TypeError), match=wrong):
        make()


NOISY = {
    "gaussian": lambda: transform.gaussian_mechanism(0.46, 0.33),
    "adaptive": lambda: transform.adaptive_clip(0.33, initial_clip_norm=0.46, quantile_noise=2.0),
    "banded": lambda: transform.matrix_mechanism(0.46, 0.33, num_rounds=4),
    "local": lambda: transform.local_gaussian(0.46, 0.05),
}


@pytest.mark.full  # central, distributed and correlated noise of tests/laws/test_invariance.py runs always
@pytest.mark.optimised
@pytest.mark.parametrize("name", NOISY)
def test_a_models_noise_has_the_same_bits_on_two_devices(name):
    """Fault: a draw that is rounded as the rest of the program has it; small shapes and pytrees do not show it."""
    data = population.digits(num_clients=30)
    model = models.linear(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn = models.supervised(model, models.default_loss(data.task))

    def after(mesh):
        made = algorithms.fedprox(
            loss_fn, sampling.uniform(30, 6), optax.sgd(0.23, momentum=0.73), coefficient=0.23, num_steps=3,
            batch_size=4, weighting="uniform", aggregator=aggregation.fixed_mean(6.0), transform=NOISY[name](),
            mesh=mesh,
        )  # fmt: skip
        return jax.tree.leaves(run(jax.random.key(4), made, model.init(jax.random.key(0))[0], data.train, 3)[0])

    for x, y in zip(after(None), after("all"), strict=True):
        np.testing.assert_array_equal(x, y)
