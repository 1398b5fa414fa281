"""Samplers that learn from losses: whom they choose, and how far that leans from the population."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, run, sampling, transform
from fedjax_sim.privacy import mechanism_of
from fedjax_sim.types import Outcome
from tests.laws import problems as p
from tests.sampling.time.problems import tables, told

KEY = jax.random.key(0)
N = 12
LOSSES = np.array([0.5, 4.0, 1.5, 2.5, 3.0, 0.2, 3.5, 1.0, 2.0, 5.0, 0.1, 4.5], np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _observed(sampler, state, ids, losses, spent):
    there = jnp.ones(ids.shape, bool)
    cohort = sampler.sample(KEY, state)[0]._replace(ids=ids, invited=there, reported=there).timed(spent=spent)
    return sampler.observe(state, cohort, Outcome(there, losses))


def observed(sampler, state, ids, losses, spent=None):
    """The state after a round of these clients with these losses."""
    return _observed(sampler, state, np.asarray(ids, np.int32), np.asarray(losses, np.float32), spent)


@pytest.mark.full
def test_as_many_candidates_as_places():
    """A run of three rounds, bit for bit. Catches candidates that are reordered, and draws that choosing changes."""
    plain = sampling.uniform(p.NUM_CLIENTS, 7)
    found = []
    for sampler in (plain, sampling.power_of_choice(plain, 7)):
        made = algorithms.fedavg(
            p.linear_loss, sampler, optax.sgd(0.1), num_steps=2, batch_size=2, weighting="uniform", mesh=None
        )
        found.append(run(KEY, made, jnp.array(p.START), p.ragged(), 3))
    (state, history), (chosen, other) = found
    assert p.digest(state.server) == p.digest(chosen.server) and history.records == other.records
    seen = np.isfinite(np.asarray(chosen.sampler.losses))
    assert 7 <= seen.sum() <= 21


def test_the_bias_of_power_of_choice():
    """m = 3 of d = 6 of 12 clients with known losses: 40,000 cohorts, each client's frequency within 5 standard errors
    of the hypergeometric law, and the mean loss of who is chosen 1.57 times that of all.

    Catches the lowest losses, candidates by loss, and losses of other clients.
    """
    sampler = sampling.power_of_choice(sampling.uniform(N, 6), 3)
    state = observed(sampler, sampler.init(), np.arange(N)[:3], LOSSES[:3])
    for i in range(3, N, 3):
        state = observed(sampler, state, np.arange(i, i + 3), LOSSES[i : i + 3])
    np.testing.assert_array_equal(state.losses, LOSSES)
    keys = jax.random.split(jax.random.key(1), 40_000)
    ids = np.asarray(jax.jit(jax.vmap(lambda key: sampler.sample(key, state)[0].ids))(keys))
    rank = np.argsort(np.argsort(-LOSSES))  # how many are higher
    chance = 0.5 * stats.hypergeom.cdf(2, N - 1, rank, 5)  # a candidate, and of the others at most 2 are higher
    found = np.bincount(ids.ravel(), minlength=N) / len(keys)
    assert (np.abs(found - chance) < 5 * np.sqrt(chance * (1 - chance) / len(keys)) + 1e-12).all()
    assert chance.sum() == pytest.approx(3) and abs(chance @ LOSSES / 3 / LOSSES.mean() - 1.57) < 0.01


def test_what_is_learned():
    """Catches a loss that is no number and is kept, one of padding, and unknown clients that are not asked first."""
    sampler = sampling.power_of_choice(sampling.poisson(N, 0.5), 4)
    state = observed(sampler, sampler.init(), [3, 5, 7], [np.nan, np.inf, 2.0])
    assert np.isinf(np.asarray(state.losses)).sum() == N - 1 and float(state.losses[7]) == 2

    @jax.jit
    def unheard(state, ids, invited):
        nobody = sampler.sample(KEY, state)[0]._replace(invited=invited, ids=ids)
        return sampler.observe(state, nobody, Outcome(invited, jnp.full(4, 9.0)))

    assert float(unheard(state, np.full(4, 7, np.int32), np.zeros(4, bool)).losses[7]) == 2
    known = state._replace(losses=np.where(np.isin(np.arange(N), [0, 5]), np.float32(np.inf), LOSSES))
    everybody = sampling.power_of_choice(sampling.full(N), 3)
    cohort, _ = jax.jit(everybody.sample)(KEY, everybody.init()._replace(losses=known.losses))
    assert cohort.ids.tolist() == [0, 5, 9]
    few = sampling.power_of_choice(sampling.poisson(N, 0.1, num_slots=N), 6)
    draw = jax.jit(
        lambda key: (few.sample(key, few.init())[0], sampling.poisson(N, 0.1, num_slots=N).sample(key, ())[0])
    )
    for seed in range(6):
        cohort, plain = jax.device_get(draw(jax.random.key(seed)))
        assert set(cohort.ids[cohort.invited].tolist()) == set(plain.ids[plain.invited].tolist())


def oort(**options):
    """An Oort of six clients, five of whom reported in round 1."""
    given = {"exploration": 0.5, "exploration_decay": 1.0, "least_exploration": 0.5, "cutoff": 0.01} | options
    return sampling.oort(np.full(6, 2.0), 2, tables(*[np.ones(6)] * 3), **given)


def seen(sampler, losses=(1.0, 2.0, 3.0, 4.0, 10.0), ticks=None):
    state = jax.jit(sampler.sample)(KEY, sampler.init())[1]
    if ticks is not None:
        zeros = np.zeros(2, np.int32)
        clocked = sampling.with_clock(sampling.uniform(6, 2), tables(*[np.ones(6)] * 3))
        like = jax.jit(lambda: clocked.sample(KEY, told(clocked))[0].timing.spent)()
    for i, loss in enumerate(losses):
        spent = None if ticks is None else like._replace(down=zeros + np.int32(ticks[i]), compute=zeros, up=zeros)
        state = observed(sampler, state, [i, i], [loss, loss], spent)
    return state


def frequencies(sampler, state, count=40_000):
    keys = jax.random.split(jax.random.key(3), count)
    cohort = jax.jit(jax.vmap(lambda key: sampler.sample(key, state)[0]))(keys)
    return np.asarray(cohort.ids), np.bincount(np.asarray(cohort.ids).ravel(), minlength=6) / count


@pytest.mark.full
def test_exploitation_is_in_proportion_to_utility():
    """One place each for a known and the new client; five standard errors. Catches utility that forgets the number of
    examples or the rounds since, a cutoff by the wrong rank, and an explored client among the new ones."""
    sampler = oort()
    state = seen(sampler)
    ids, found = frequencies(sampler, state)
    assert found[5] == 1 and (ids[:, 1] == 5).all()
    utility = 2 * np.array([1, 2, 3, 4, 10.0]) + np.sqrt(0.1 * np.log(2) / 1)
    expected = utility / utility.sum()
    assert (np.abs(found[:5] - expected) < 5 * np.sqrt(expected / 40_000)).all()
    _, found = frequencies(oort(cutoff=0.39), state, 2_000)
    assert (found[:3] == 0).all() and (found[3:5] > 0).all()  # 8.26 > 0.39 * 20.26 > 6.26


@pytest.mark.full
def test_a_small_share_is_explored():
    """A share of 0.1 of two places is one in five rounds; five standard errors. Catches 0.2 that is rounded to none."""
    sampler = oort(exploration=0.1, least_exploration=0.1)
    _, found = frequencies(sampler, seen(sampler), 4_000)
    assert abs(found[5] - 0.2) < 5 * np.sqrt(0.16 / 4_000)


@pytest.mark.full
def test_exploration_ends():
    """Catches an epsilon of another round, and places left to new clients when there are none."""
    sampler = oort(exploration=1.0, exploration_decay=0.5, least_exploration=0.0)
    state = sampler.init()
    for expected in ({2}, {1}, {0, 1}):  # 2 * 0.5^(R - 1), rounded up or down
        cohort, state = sampler.sample(KEY, state._replace(utility=jnp.full(6, jnp.nan).at[:3].set(1.0)))
        assert int(cohort.metrics["explored"]) in expected
        assert (np.asarray(cohort.ids) >= 3).sum() == int(cohort.metrics["explored"])
    _, nobody_knows = oort(exploration=0.0, least_exploration=0.0), sampler.init()
    cohort, _ = sampler.sample(KEY, nobody_knows)
    assert int(cohort.metrics["explored"]) == 2 and len(set(cohort.ids.tolist())) == 2
    everybody = oort(exploration=1.0)
    state = everybody.init()._replace(utility=jnp.zeros(6))
    for seed in range(20):
        cohort, _ = everybody.sample(jax.random.key(seed), state)
        assert int(cohort.metrics["explored"]) == 0 and len(set(cohort.ids.tolist())) == 2


def test_speed_counts():
    """Catches a penalty of who is fast, none of who is slow, and durations in seconds that are ticks."""
    state = seen(oort(preferred_seconds=2.0), losses=[3.0] * 5, ticks=[100, 2000, 4000, 8000, 1])
    assert state.ticks.tolist() == [100, 2000, 4000, 8000, 1, 0]
    _, found = frequencies(oort(preferred_seconds=2.0, penalty=2.0), state)
    expected = np.array([1, 1, 1 / 4, 1 / 16, 1])
    assert (np.abs(found[:5] - expected / expected.sum()) < 5 * np.sqrt(0.3 / 40_000)).all()


def test_the_pacer():
    """Two rounds a window. Catches a T that grows while utility does, or that never grows."""
    sampler = oort(window=2, pacer_seconds=5.0, preferred_seconds=1.0)
    for losses, expected in (((1.0, 1.0, 2.0, 2.0), 1.0), ((2.0, 2.0, 1.0, 1.0), 6.0), ((9.0, 1.0, 1.0), 1.0)):
        state = sampler.init()
        for loss in losses:
            state = observed(sampler, sampler.sample(KEY, state)[1], [0, 1], [loss, loss])
        cohort, _ = sampler.sample(KEY, state)
        assert float(cohort.metrics["preferred_seconds"]) == expected


def test_it_is_refused_by_name():
    """Catches an epsilon, or weights that count twice, of who is chosen for a loss; and an unknown option."""
    for sampler in (sampling.power_of_choice(sampling.uniform(N, 6), 3), sampling.oort(np.ones(N), 3)):
        parts = {"sampler": sampler, "transform": transform.gaussian_mechanism(0.5, 1.2)}
        with pytest.raises(ValueError, match="observes no losses"):
            mechanism_of(parts | {"aggregator": aggregation.fixed_mean(3.0)})
        with pytest.raises(ValueError, match="scheme is unknown"):
            algorithms.fedavg(p.linear_loss, sampler, optax.sgd(0.1), num_steps=1)
    with pytest.raises(ValueError, match="cohort_size"):
        sampling.power_of_choice(sampling.uniform(N, 6), 7)
    with pytest.raises(ValueError, match="without a clock"):
        sampling.power_of_choice(sampling.with_clock(sampling.uniform(N, 6), tables()), 3)
    for name, wrong in (("cutoff", 0.0), ("window", 0), ("exploration", 1.5), ("pacer_seconds", float("nan"))):
        with pytest.raises(ValueError, match=name):
            sampling.oort(np.ones(N), 3, **{name: wrong})
