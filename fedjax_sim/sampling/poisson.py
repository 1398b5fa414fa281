"""Poisson sampling, which privacy accountants assume, with a fixed number of slots."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.prng import random_bits, stream
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.sampling.permutation import permute
from fedjax_sim.types import Array, Cohort, Metric, Sampler
from fedjax_sim.validate import PopulationSize

_OVERFLOW = 1e-9  # bound on the probability that a cohort exceeds the default number of slots
_MAX_TABLE_BYTES = 1 << 20


@validate.named_arguments
def poisson(population_size: PopulationSize, rate: float, *, num_slots: int | None = None) -> Sampler:
    """Invites every client independently with probability q.

    The number of invited clients, K ~ Binomial(N, q), is drawn by inversion of a table made on the host. The cohort is
    the first min(K, num_slots) clients of a random permutation. So if K exceeds the slots, a uniform subset is invited;
    `metrics["overflow"]` counts the clients left out.

    Args:
      population_size: N in [1, 2^31 - 1].
      rate: q in (0, 1], a Python number.
      num_slots: in [1, N]; None: the least number with P(K > num_slots) < 1e-9.

    Returns: a sampler whose scheme is `truncated_poisson`, or `poisson` if num_slots = N.

    Raises: ValueError or TypeError for values out of range; MemoryError for a table of more than 1 MB (q N > 5e7).

    Guarantees:
      - K has mean qN, variance Nq(1-q) and the whole binomial distribution
        (tests/sampling/test_poisson.py::test_number_of_clients_is_binomial)
      - the table is exact to 2^-48 (test_table_is_the_binomial_law)
      - P(overflow) = P(Bin(N, q) > num_slots) (test_overflow_is_the_binomial_tail)
      - clients are invited independently (test_pairs_are_independent)

    References: Abadi et al. 2016, section 3.1; Mironov, Talwar and Zhang 2019.

    >>> sampler = poisson(1000, 0.01)
    >>> sampler.num_slots, sampler.design.scheme
    (34, 'truncated_poisson')
    """
    if isinstance(rate, Tracer):
        validate.fail("rate", "a Python number", rate, "The table of cohort sizes is made on the host.", TypeError)
    validate.in_range("rate", rate, 0, 1, open_low=True, hint="It is the probability that a round invites a client.")
    rate = float(rate)
    num_slots = _default_slots(population_size, rate) if num_slots is None else num_slots
    validate.integer("num_slots", num_slots, 1, population_size)
    least_count, table = _binomial_table(population_size, rate)

    def sample(key, state):
        random_words = random_bits(stream(key, "cohort_size"), 2)
        num_drawn = least_count + _count_below(random_words, table)
        slots = jnp.arange(num_slots, dtype=jnp.int32)
        invited = slots < num_drawn
        overflow = jnp.maximum(num_drawn - num_slots, 0)
        ids = permute(stream(key, "cohort"), slots, population_size)
        return Cohort(ids=ids, invited=invited, reported=invited, metrics={"overflow": overflow}), state

    design = SamplingDesign(
        scheme="poisson" if num_slots == population_size else "truncated_poisson",
        population_size=population_size,
        cohort_size=population_size * rate,
        num_slots=num_slots,
        rate=rate,
    )
    overflow_metric = Metric("overflow", "clients left out of full cohorts", "count")
    return Sampler(lambda: (), sample, num_slots, design, metrics=(overflow_metric,))


def _default_slots(population_size: int, rate: float) -> int:
    """Finds the least number of slots that a cohort exceeds with probability below `_OVERFLOW`."""
    from scipy import stats

    slots = max(1, int(stats.binom.isf(_OVERFLOW, population_size, rate)))
    while not stats.binom.sf(slots, population_size, rate) < _OVERFLOW:
        slots += 1
    return min(slots, population_size)


def _binomial_table(population_size: int, rate: float) -> tuple[np.int32, np.ndarray]:
    """Computes the cumulative distribution of K ~ Binomial(N, q).

    The window of counts misses less than 2^-60 of the mass (Bernstein's inequality); the missing mass is added to the
    mode.

    Args:
      population_size: N.
      rate: q in (0, 1].

    Returns: (the least count, int32; thresholds). The thresholds are 2^64 P(K <= count) for every count of the window
    but the last, as high and low words [2, counts - 1] uint32.

    Raises: MemoryError for a table of more than 1 MB.
    """
    from scipy import stats

    mean = population_size * rate
    variance = population_size * rate * (1 - rate)
    log_mass = 61 * math.log(2)  # each tail outside of the window has a mass of at most 2^-61
    width = log_mass / 3 + math.sqrt(log_mass**2 / 9 + 2 * log_mass * variance) if variance > 0 else 0
    hint = "So large a cohort varies by less than 1 part in 5,000: use uniform."
    validate.fits_in_memory("rate", 8 * math.ceil(2 * width), _MAX_TABLE_BYTES, hint=hint)
    counts = np.arange(max(0, math.floor(mean - width)), min(population_size, math.ceil(mean + width)) + 1)
    mass = stats.binom.pmf(counts, population_size, rate)
    units = [int(x) for x in mass / mass.sum() * 2.0**64]
    units[int(np.argmax(mass))] += 2**64 - sum(units)
    # Without the empty tails, only the last cumulative sum is 2^64, which no word holds; it is dropped.
    support = np.flatnonzero(units)
    counts = counts[support[0] : support[-1] + 1]
    units = units[support[0] : support[-1]]
    cumulative = np.cumsum(np.array(units, np.uint64), dtype=np.uint64)
    return np.int32(counts[0]), np.stack([cumulative >> np.uint64(32), cumulative]).astype(np.uint32)


def _count_below(words: Array, table: np.ndarray) -> Array:
    """[] int32: how many thresholds of the table are at most the 64-bit number words[0] 2^32 + words[1]."""
    high = jnp.asarray(table[0])
    low = jnp.asarray(table[1])
    return ((high < words[0]) | ((high == words[0]) & (low <= words[1]))).sum(dtype=jnp.int32)
