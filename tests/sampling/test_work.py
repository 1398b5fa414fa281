"""How much of its work a client completes: the distribution of stragglers, and numbers of steps by client."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import sampling

N, SHARE, STEPS = 1_000, 0.6, 4


def drawn(sampler, rounds):
    keys = jax.random.split(jax.random.key(5), rounds)
    return np.asarray(jax.vmap(lambda key: sampler.sample(key, sampler.init())[0].work)(keys))


def test_law_of_stragglers():
    """100,000 draws in K = 4 steps: chi-square over 1..K, and the chance of each client by itself.

    Accepts the true law with an error of 1e-6 and rejects a share 5 % off. Catches parts drawn from 0 or up to K - 1,
    and a draw that all clients or rounds share.
    """
    work = drawn(sampling.with_stragglers(sampling.full(N), SHARE), 100)
    assert work.min() > 0 and work.max() == 1
    counts = np.bincount(np.ceil(work * STEPS).astype(int).ravel(), minlength=STEPS + 1)[1:]

    def chi_square(share):
        expected = work.size * np.array([share / STEPS] * (STEPS - 1) + [1 - share + share / STEPS])
        return ((counts - expected) ** 2 / expected).sum()

    limit = 30.66  # chi-square with 3 degrees of freedom: 1e-6
    assert chi_square(SHARE) < limit < min(chi_square(1.05 * SHARE), chi_square(0.95 * SHARE))
    late = work < 1
    for axis in (0, 1):  # means over rounds, over clients: 5.5 standard deviations of independent draws
        means = late.mean(axis)
        assert np.abs(means - SHARE).max() < 5.5 * np.sqrt(SHARE * (1 - SHARE) / late.shape[axis])


def test_stragglers_belong_to_clients():
    """Catches draws by slot, and a second wrapper that repeats the first."""
    key, twice = jax.random.key(0), sampling.with_stragglers(sampling.with_stragglers(sampling.full(N), 0.5), 0.5)
    cohort, _ = twice.sample(key, ())
    once, _ = sampling.with_stragglers(sampling.full(N), 0.5).sample(key, ())
    assert (cohort.work <= once.work).all() and 0.7 < float((cohort.work < 1).mean()) < 0.8
    few, _ = sampling.with_stragglers(sampling.uniform(N, 50), 0.5).sample(key, ())
    everybody = dict(zip(once.ids.tolist(), once.work.tolist(), strict=True))
    assert few.work.tolist() == [everybody[id] for id in few.ids.tolist()]


def test_shares_are_float32():
    """With double precision too. Catches clients that take another number of steps there: 0.1 K, rounded up."""
    late = sampling.with_stragglers(sampling.full(N), 0.5)
    single = late.sample(jax.random.key(0), ())[0].work
    with jax.enable_x64(True):
        double = late.sample(jax.random.key(0), ())[0].work
    assert single.dtype == double.dtype == jnp.float32 and (single == double).all()


def test_share_may_be_traced():
    """Catches a share that a sweep cannot vary."""
    work = jax.jit(
        lambda share: sampling.with_stragglers(sampling.full(9), share).sample(jax.random.key(1), ())[0].work
    )
    assert (work(0.0) == 1).all() and (work(1.0) < 1).any()


def test_local_steps_are_taken():
    """Catches steps by slot in place of client."""
    sampler = sampling.with_local_steps(sampling.uniform(N, 30), [1, 2, 5])
    cohort, _ = sampler.sample(jax.random.key(2), sampler.init())
    assert cohort.work.tolist() == [(1, 2, 5)[id % 3] for id in cohort.ids.tolist()]
    assert cohort.work.dtype == jnp.int32


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sampling.with_local_steps(sampling.full(4), []), "steps: expected at least one number"),
        (lambda: sampling.with_local_steps(sampling.full(4), [1, 0]), r"steps\[1\]: expected an integer in"),
        (lambda: sampling.with_local_steps(sampling.full(1), [1, 2]), "steps: expected at most 1 numbers"),
        (lambda: both(sampling.with_local_steps, [1], sampling.with_stragglers, 0.5), "does not fix its clients'"),
        (lambda: both(sampling.with_stragglers, 0.5, sampling.with_local_steps, [1]), "do all of their work"),
    ],
)
def test_wrong_input(make, words):
    """Catches numbers that mean nothing, and two wrappers that contradict each other."""
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def both(first, one, second, other):
    sampler = second(first(sampling.full(4), one), other)
    return sampler.sample(jax.random.key(0), sampler.init())
