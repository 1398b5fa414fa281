"""This module bounds how often a tree of prefixes misses a symbol that many clients hold."""

from __future__ import annotations

import numpy as np

from fedjax_sim import validate
from fedjax_sim.validate import NonNegative, OpenShare, PositiveInt, Share

SLACKS = 400  # candidates for the slack between votes and noise; any of them gives a bound


@validate.named_arguments
def heavy_hitter_miss_rate(
    share: Share,
    threshold: OpenShare,
    cohort_size: PositiveInt,
    num_rounds: PositiveInt,
    *,
    noise_std: NonNegative = 0.0,
    num_cells: PositiveInt = 1,
) -> float:
    """Bounds the probability that `algorithms.heavy_hitters` misses a symbol, with L >= 2 / threshold prefixes.

    In each round m clients are drawn at random, and each votes for the symbol with probability f. Votes for a prefix of
    the symbol are at least those for the symbol. For every slack 0 <= v <= theta / 2, the symbol is missed in a round
    only if it has at most m (theta + v) votes, or the noise of a cell exceeds v in magnitude. If neither happens, every
    prefix that passes the threshold has at least m theta / 2 votes, so that there are at most 2 / theta of them, and
    each has a place. Hence, for T rounds and C cells, the rate is at most

        T min over v of (P(Binomial(m, f) < m (theta + v)) + C P(|N(0, s^2)| > v)).

    Votes of a cohort that is drawn without replacement are distributed as a sum of independent Bernoulli variables
    (Borcea, Branden and Liggett 2009). Such a sum is at most c with no higher probability than a binomial variable of
    the same mean, for c <= m f - 1 (Hoeffding 1956). So the bound holds for it as well.

    Args:
      share: f in [0, 1], the probability that a random client votes for the symbol.
      threshold: theta.
      cohort_size: m.
      num_rounds: T.
      noise_std: s, the standard deviation of the noise on a share of votes: z C / m for the noise multiplier z, the
        clip norm C = 1 and a mean over m messages. Integer noise has tails below those of the Gaussian up to its
        rounding.
      num_cells: C, the numbers of a message, L 2^b; without noise it has no effect.

    Returns: a rate in [0, 1].

    References: Hoeffding 1956 (On the distribution of the number of successes in independent trials, theorem 5);
    Borcea, Branden and Liggett 2009 (Negative dependence and the geometry of polynomials).

    Guarantees: simulated runs miss a symbol no more often
    (tests/algorithms/analytics/test_heavy_hitters.py::test_misses_are_as_rare_as_stated).

    >>> heavy_hitter_miss_rate(0.5, 0.1, 10, 1)  # no vote of ten: 2^-10
    0.0009765625
    """
    from scipy import stats

    slacks = np.linspace(0, threshold / 2, SLACKS) if noise_std else np.zeros(1)
    # Fewer than m (theta + v) votes; a product that should be an integer may be rounded up.
    least_votes = np.ceil(cohort_size * (threshold + slacks) * (1 - 1e-12))
    too_few = np.where(least_votes <= cohort_size * share, stats.binom.cdf(least_votes - 1, cohort_size, share), 1.0)
    noise = 2 * num_cells * stats.norm.sf(slacks / noise_std) if noise_std else np.zeros(1)
    return float(min(1.0, num_rounds * np.min(too_few + noise)))
