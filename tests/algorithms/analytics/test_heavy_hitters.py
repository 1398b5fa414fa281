"""The tree of prefixes: what it must find, what it must not, and how often it may miss."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import aggregation, algorithms, population, sampling, theory, transform
from fedjax_sim.types import ClientData
from tests.algorithms.analytics import problem as p
from tests.refusals import refused

SYMBOLS = 1000  # 10 bits
VOTES = np.random.default_rng(5).choice([3, 5, 512, 513, 999, 40], p=[0.3, 0.2, 0.2, 0.15, 0.1, 0.05], size=200)


def voters(symbols):
    """A client for each symbol."""

    def read(arrays, id):
        return ClientData({"x": jnp.zeros((1, 1)), "y": arrays["y"][id][None]}, jnp.ones(1, bool))

    return population.generated(len(symbols), read, {"y": jnp.array(symbols, jnp.int32)})


def found(estimate):
    kept = estimate["symbols"] >= 0
    return dict(zip(estimate["symbols"][kept].tolist(), estimate["shares"][kept].tolist(), strict=True))


@pytest.mark.default_rows("3")
@pytest.mark.parametrize("bits", [1, 3, 4])
def test_everybody_together_finds_all_and_no_others(bits):
    """Exactly the symbols at or above the threshold, with their shares. Catches bits that are read from the wrong end,
    prefixes of other lengths, and a threshold that is not met by equality."""
    symbols, counts = np.unique(VOTES, return_counts=True)
    threshold = float(counts[symbols == 999][0] / len(VOTES))  # met by equality
    options = {"num_symbols": SYMBOLS, "bits_per_round": bits, "threshold": threshold * (1 - 1e-6)}
    made = algorithms.heavy_hitters(sampling.full(len(VOTES)), **options)
    num_rounds = -(-10 // bits)
    estimates, _ = p.rounds(made, num_rounds + 2, data=voters(VOTES))
    expected = {s: c / len(VOTES) for s, c in zip(symbols.tolist(), counts, strict=True) if c / len(VOTES) >= threshold}
    assert not found(estimates[num_rounds - 2])  # no prefix is called a symbol
    for estimate in estimates[num_rounds - 1 :]:  # further rounds change nothing
        assert found(estimate) == pytest.approx(expected, rel=1e-5)
    assert estimates[-1]["symbols"][0] == 3  # by falling shares


@pytest.mark.full
def test_misses_are_as_rare_as_stated():
    """A symbol of share 0.2 at a threshold of 0.1, with cohorts of 50 and noise of 0.003 on a share, in 200 runs.

    The stated rate is below 0.2. Even if it held with equality, more misses than the limit would have probability 1e-6.
    Fewer than three misses would mean that the threshold is not used: the true rate is about 0.05, and three or more
    misses have probability 0.997. Catches votes that are lost, noise that is larger than stated, a bound too small.
    """
    size, cohort, share, threshold, bits = 1000, 50, 0.2, 0.1, 4
    symbols = np.where(np.arange(size) < share * size, 777, np.random.default_rng(1).integers(0, SYMBOLS, size))
    noise = transform.distributed_gaussian(1.0, 0.15, cohort)
    made = algorithms.heavy_hitters(
        sampling.uniform(size, cohort),
        num_symbols=SYMBOLS,
        bits_per_round=bits,
        threshold=threshold,
        transform=noise,
        aggregator=aggregation.fixed_mean(float(cohort), weighting="uniform"),
    )
    last = p.repeated(made, 3, 200, data=voters(symbols))
    misses = int((~(last["symbols"] == 777).any(1)).sum())
    real_share = (symbols == 777).mean()
    cells = 20 * 2**bits
    stated = theory.heavy_hitter_miss_rate(real_share, threshold, cohort, 3, noise_std=0.003, num_cells=cells)
    assert stated < 0.2 and misses <= stats.binom.isf(1e-6, 200, stated)
    assert misses >= 3  # a chance of misses there is: the threshold is used


def test_the_bound_without_noise_is_the_binomial():
    """One round, no noise. Catches a tail that begins one vote too late."""
    rate = theory.heavy_hitter_miss_rate(0.3, 0.2, 50, 1)
    assert rate == pytest.approx(stats.binom.cdf(9, 50, 0.3))
    assert theory.heavy_hitter_miss_rate(0.3, 0.2, 50, 4) == pytest.approx(4 * rate)
    assert theory.heavy_hitter_miss_rate(0.1, 0.2, 50, 1) == 1.0
    assert rate < theory.heavy_hitter_miss_rate(0.3, 0.2, 50, 1, noise_std=0.01, num_cells=100) < 1


@pytest.mark.full
def test_a_client_votes_once():
    """For one of its symbols, uniformly among all of them. Catches a client with many rows that votes often."""
    made = algorithms.heavy_hitters(p.EVERYBODY, num_symbols=4, bits_per_round=2, threshold=0.01)
    estimates = p.repeated(made, 1, 400, data=p.people())
    assert (estimates["shares"].sum(1) <= (p.SIZES > 0).mean() + 1e-6).all()
    shares = np.zeros(4)
    for runs, values in zip(estimates["symbols"], estimates["shares"], strict=True):
        shares[runs[runs >= 0]] += values[runs >= 0] / 400
    expected = sum(np.bincount(p.Y[i][p.MASK[i]], minlength=4) / p.SIZES[i] for i in range(30) if p.SIZES[i]) / 30
    # A vote has variance <= 1/4: 6 standard errors of 400 runs of 30 clients.
    np.testing.assert_allclose(shares, expected, atol=6 * 0.5 / np.sqrt(400 * 30))


@pytest.mark.full
def test_symbols_of_your_own():
    """From the rows, of which those below 0 are left out."""
    made = algorithms.heavy_hitters(
        p.EVERYBODY, num_symbols=8, threshold=0.05, bits_per_round=3, symbols=lambda examples: examples["y"] * 2 - 2
    )
    estimates, _ = p.rounds(made, 1)
    assert set(found(estimates[-1])) <= {0, 2, 4} and found(estimates[-1])


def test_what_is_refused():
    """Before anything compiles."""
    with refused("num_symbols", rule="symbols"):
        algorithms.heavy_hitters(p.EVERYBODY)
    with refused("num_prefixes", rule="messages"):
        algorithms.heavy_hitters(p.EVERYBODY, num_symbols=2**31 - 1, threshold=1e-3, bits_per_round=16)
    remembering = transform.error_feedback(transform.top_k(0.1))
    with refused("transform", rule="without a memory"):
        algorithms.heavy_hitters(p.EVERYBODY, num_symbols=4, transform=remembering)
    made = algorithms.heavy_hitters(p.EVERYBODY, num_symbols=4)
    with pytest.raises(ValueError, match=r"params: expected \(\)"):
        made.init(None, {"symbols": jnp.zeros(3)}, p.people())


@pytest.mark.full
def test_the_largest_symbols():
    """31 bits in rounds of four. Catches prefixes that overflow, and noise that finds a symbol that does not exist."""
    votes = np.array([2**31 - 2] * 10 + [7] * 5)
    noise = transform.distributed_gaussian(1.0, 0.5, 15)
    rule = aggregation.fixed_mean(15.0, weighting="uniform")
    parts = {"transform": noise, "aggregator": rule, "threshold": 0.25}
    made = algorithms.heavy_hitters(sampling.full(15), num_symbols=2**31 - 1, **parts)
    last = p.repeated(made, 8, 20, data=voters(votes))
    assert (last["symbols"] <= 2**31 - 2).all() and (last["symbols"] >= -1).all()
    assert (last["symbols"] == 2**31 - 2).any(1).all() and (last["symbols"] == 7).any(1).mean() > 0.5
    # Noise that passes the threshold finds wrong symbols, but none beyond the last one of 2^30 + 5.
    loud = {"transform": transform.distributed_gaussian(1.0, 3.0, 15), "aggregator": rule, "threshold": 0.1}
    made = algorithms.heavy_hitters(sampling.full(15), num_symbols=2**30 + 5, **loud)
    last = p.repeated(made, 8, 20, data=voters(votes % 2**30))
    assert (last["symbols"] <= 2**30 + 4).all() and (last["symbols"] >= 0).any()
