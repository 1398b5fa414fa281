"""How much of its work a client completes: the distribution of stragglers, and numbers of steps by client."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import client, sampling

N, SHARE, STEPS = 1_000, 0.6, 4


def drawn(sampler, rounds):
    keys = jax.random.split(jax.random.key(5), rounds)
    return np.asarray(jax.jit(jax.vmap(lambda key: sampler.sample(key, sampler.init())[0].work))(keys))


def cohort_of(sampler, key):
    return jax.device_get(jax.jit(sampler.sample)(key, ())[0])


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


@pytest.mark.full
def test_epochs_of_stragglers():
    """100,000 stragglers of E = 20 epochs: chi-square over 1..E, with an error of 1e-6.

    Rejects 1..E-1, as the authors' code draws, and 0..E. Catches epochs that follow from who straggles.
    """
    epochs = 20
    work = drawn(sampling.with_stragglers(sampling.full(N), 1.0, num_parts=epochs), 100) * epochs
    np.testing.assert_allclose(work, np.round(work), atol=1e-4)

    def chi_square(drawn_epochs):
        counts = np.bincount(drawn_epochs.ravel(), minlength=epochs + 1)[1 : epochs + 1]
        return ((counts - work.size / epochs) ** 2).sum() * epochs / work.size

    seen, limit = np.round(work).astype(int), 63.7  # chi-square with 19 degrees of freedom: 1e-6
    rng = np.random.default_rng(0)
    others = [rng.integers(low, high, work.shape) for low, high in ((1, epochs), (0, epochs + 1))]
    assert seen.min() == 1 and chi_square(seen) < limit < min(map(chi_square, others))
    # Among those who straggle by chance the law is the same.
    some = drawn(sampling.with_stragglers(sampling.full(N), SHARE, num_parts=epochs), 100)
    fewer = np.bincount(np.round(some[some < 1] * epochs).astype(int), minlength=epochs + 1)[1:]
    assert ((fewer - fewer.mean()) ** 2).sum() / fewer.mean() < limit


def test_parts_are_whole_epochs():
    """Every part of E epochs, at every number of steps up to 2^21. Catches a product that is rounded up or down."""
    sizes = np.unique(np.geomspace(1, 2**21, 4_000).astype(np.int32))
    for epochs in (3, 100):
        shares = np.unique(drawn(sampling.with_stragglers(sampling.full(N), 1.0, num_parts=epochs), 20))
        assert len(shares) == epochs
        per_epoch = sizes[sizes <= 2**21 // epochs]
        work = client.work(num_epochs=epochs, batch_size=1)
        steps = jax.jit(jax.vmap(work.own_steps, (None, 0)))(per_epoch, shares)
        np.testing.assert_array_equal(steps, np.arange(1, epochs + 1)[:, None] * per_epoch[None])


def test_dropped_are_the_stragglers():
    """Catches other stragglers than those with partial work, other parts, a design and a count without them."""
    sampler, key = sampling.with_over_invitation(sampling.uniform(N, 500), 400), jax.random.key(3)
    partial, dropped = (
        sampling.with_stragglers(sampler, SHARE, num_parts=4, late=late) for late in ("partial", "dropped")
    )
    whole, fewer = cohort_of(partial, key), cohort_of(dropped, key)
    late = whole.work < 1
    np.testing.assert_array_equal(whole.work, fewer.work)
    np.testing.assert_array_equal(fewer.reported, whole.reported & ~late)
    np.testing.assert_array_equal(fewer.timing.sent, whole.timing.sent & ~late)
    assert int(fewer.metrics["stragglers"]) == (whole.reported & late).sum() > 0
    assert partial.design == sampler.design
    assert dropped.design.response_rates == (*sampler.design.response_rates, 1 - SHARE)
    twice = sampling.with_stragglers(dropped, SHARE, late="dropped")
    assert [metric.name for metric in twice.metrics].count("stragglers") == 1
    again = cohort_of(twice, key)
    lost = whole.reported & ~again.reported
    assert int(again.metrics["stragglers"]) == lost.sum() > (whole.reported & late).sum()


def test_stragglers_belong_to_clients():
    """Catches draws by slot, and a second wrapper that repeats the first."""
    key, twice = jax.random.key(0), sampling.with_stragglers(sampling.with_stragglers(sampling.full(N), 0.5), 0.5)
    cohort, once = cohort_of(twice, key), cohort_of(sampling.with_stragglers(sampling.full(N), 0.5), key)
    assert (cohort.work <= once.work).all() and 0.7 < float((cohort.work < 1).mean()) < 0.8
    few = cohort_of(sampling.with_stragglers(sampling.uniform(N, 50), 0.5), key)
    everybody = dict(zip(once.ids.tolist(), once.work.tolist(), strict=True))
    assert few.work.tolist() == [everybody[id] for id in few.ids.tolist()]


def test_shares_are_float32():
    """With double precision too. Catches clients that take another number of steps there: 0.1 K, rounded up."""
    late = sampling.with_stragglers(sampling.full(N), 0.5)
    single = cohort_of(late, jax.random.key(0)).work
    with jax.enable_x64(True):
        double = cohort_of(late, jax.random.key(0)).work
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
    cohort = cohort_of(sampler, jax.random.key(2))
    assert cohort.work.tolist() == [(1, 2, 5)[id % 3] for id in cohort.ids.tolist()]
    assert cohort.work.dtype == jnp.int32


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sampling.with_local_steps(sampling.full(4), []), "steps: expected at least one number"),
        (lambda: sampling.with_local_steps(sampling.full(4), [1, 0]), r"steps\[1\]: expected an integer in"),
        (lambda: sampling.with_local_steps(sampling.full(1), [1, 2]), "steps: expected at most 1 numbers"),
        (
            lambda: sampling.with_stragglers(sampling.full(4), 1.0, late="dropped"),
            r"share: expected a number in \[0, 1\)",
        ),
        (lambda: sampling.with_stragglers(sampling.full(4), 0.5, late="lost"), "late: expected one of"),
        (lambda: sampling.with_stragglers(sampling.full(4), 0.5, num_parts=0), "num_parts: expected an integer in"),
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
