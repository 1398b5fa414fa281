"""The law of a cohort, read from its `SamplingDesign`: how many report, which pairs, every cohort one by one.

All schemes but those with replacement share one fact: given the block of clients in turn (everyone, or a window of a
cyclic order) and the number K of reports, the reporting cohort is a uniform subset of size K. Dropout, truncation and
over-invitation change the law of K only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign

__all__ = [
    "MAX_COHORTS",
    "blocks",
    "check_design",
    "enumerate_cohorts",
    "joint_inclusion_probability",
    "num_cohorts",
    "report_counts",
]

MAX_COHORTS = 1 << 21
_BATCH = 1 << 20  # numbers in a batch of cohorts


def check_design(design: SamplingDesign) -> None:
    """Refuses all but a design with a known distribution.

    Raises: TypeError for what is no design; ValueError for an unknown scheme, and if a sweep varies the response rate.
    """
    if not isinstance(design, SamplingDesign):
        validate.fail("design", "a SamplingDesign", design, "A sampler carries it: sampler.design.", TypeError)
    design.check_known()


def _binomial(trials: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts and probabilities, less tails of mass below 1e-16."""
    from scipy import stats

    width = 12 * math.sqrt(trials * rate * (1 - rate)) + 40
    low, high = max(0, math.floor(trials * rate - width)), min(trials, math.ceil(trials * rate + width))
    counts = np.arange(low, high + 1)
    return counts, stats.binom.pmf(counts, trials, rate)


def _thinned(counts: np.ndarray, chances: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """The law after each of K is kept with chance `rate`."""
    if rate == 1:
        return counts, chances
    found = np.zeros(int(counts.max()) + 1)
    for count, chance in zip(counts.tolist(), chances.tolist(), strict=True):
        if chance > 1e-20:
            kept, mass = _binomial(count, rate)
            found[kept] += chance * mass
    kept = np.flatnonzero(found)
    return kept, found[kept]


def _limited(counts: np.ndarray, chances: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The law of min(K, limit)."""
    below = counts < limit
    if below.all():
        return counts, chances
    return np.append(counts[below], limit), np.append(chances[below], chances[~below].sum())


def report_counts(design: SamplingDesign) -> tuple[np.ndarray, np.ndarray]:
    """The law of K, the number of slots that report in a round, for a design without replacement.

    Cyclic schemes: of a round at a random moment.

    Returns: ([k] int counts, [k] float64 probabilities), K in rising order.

    Raises: ValueError for a design with replacement; TypeError for what is no design.

    Guarantees: the real samplers' frequencies, dropout, truncation and over-invitation in any order
    (tests/theory/test_sampling_variance.py::test_report_counts_are_those_of_the_samplers).

    >>> design = SamplingDesign(scheme="poisson", population_size=2, cohort_size=1, num_slots=2)
    >>> [x.round(3).tolist() for x in report_counts(design)]
    [[0, 1, 2], [0.25, 0.5, 0.25]]
    """
    check_design(design)
    if design.replacement:
        validate.fail("design", "a design without replacement", design.scheme, "There a client may fill several slots.")
    size, slots, rates = design.population_size, design.num_slots, list(design.response_rates)
    if design.scheme == "poisson":
        return _binomial(size, design.rate * design.response_rate)
    if design.scheme == "truncated_poisson":
        law = _limited(*_binomial(size, design.rate), slots)
    elif design.scheme == "shuffled_cyclic" and size % slots:
        rounds = -(-size // slots)
        law = np.array([size % slots, slots]), np.array([1 / rounds, 1 - 1 / rounds])
    else:
        law = np.array([slots]), np.ones(1)
    if (place := design.reports_limited_after) is not None:
        law = _limited(*_thinned(*law, math.prod(rates[:place], start=1.0)), design.max_reports)
        rates = rates[place + 1 :]  # the limit's own rate follows from those before it
    counts, chances = _thinned(*law, math.prod(rates, start=1.0))
    return counts, chances / chances.sum()


def joint_inclusion_probability(design: SamplingDesign) -> float:
    """pi_ij: the chance that two given clients, i != j, both report in a round.

    Uniform without replacement: m (m - 1) / (N (N - 1)), so that the indicators' covariance is pi_ij - pi^2 < 0.

    Raises: ValueError for one client, and for designs in which pairs differ (weighted, cyclic in order).

    Guarantees: the indicators' covariance for m = 10 of N = 100, and the frequency over all cohorts
    (tests/theory/test_sampling_variance.py::test_joint_inclusion).

    References: Cochran 1977, section 2.9.

    >>> design = SamplingDesign(scheme="uniform_without_replacement", population_size=100, cohort_size=10, num_slots=10)
    >>> round(joint_inclusion_probability(design) - 0.1**2, 9)
    -0.000909091
    """
    check_design(design)
    size = design.population_size
    if size < 2 or design.scheme in ("cyclic", "weighted_with_replacement"):
        validate.fail("design", "two clients or more, all pairs alike", design)
    if design.replacement:
        neither = (1 - 2 / size) ** design.num_slots
        return (1 - 2 * (1 - 1 / size) ** design.num_slots + neither) * design.response_rate**2
    counts, chances = report_counts(design)
    return float(chances @ (counts * (counts - 1.0))) / (size * (size - 1))


def blocks(design: SamplingDesign) -> tuple[np.ndarray, int]:
    """Where the windows of a cyclic order start, and how many clients each has: [0], N for other schemes.

    >>> design = SamplingDesign(scheme="cyclic", population_size=6, cohort_size=4, num_slots=4)
    >>> [x for x in blocks(design)]
    [array([0, 2, 4]), 4]
    """
    check_design(design)
    size = design.population_size
    if design.scheme != "cyclic":
        return np.zeros(1, np.int64), size
    return np.arange(0, size, math.gcd(size, design.num_slots)), design.num_slots


def num_cohorts(design: SamplingDesign) -> int:
    """How many cohorts `enumerate_cohorts` would list.

    >>> num_cohorts(SamplingDesign(scheme="poisson", population_size=10, cohort_size=1, num_slots=10))
    1024
    """
    check_design(design)
    size, slots = design.population_size, design.num_slots
    if design.replacement:
        if size + slots > 1000:
            return 1 << 62
        return math.comb(size + slots - 1, slots) * (1 if design.response_rate == 1 else 2**size)
    starts, members = blocks(design)
    counts = report_counts(design)[0]
    if len(counts) > 64 or (members > 1 << 12 and 2 < counts[-1] < members - 2):
        return 1 << 62  # a sum of numbers far beyond any limit
    return len(starts) * sum(math.comb(members, int(k)) for k in counts)


def enumerate_cohorts(design: SamplingDesign, *, limit: int = MAX_COHORTS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every cohort of a round with its probability, in batches.

    Args:
      limit: refuse more cohorts than this.

    Returns: an iterator of ([s] probabilities, [s, N] float64 times that each client reports).

    Raises: ValueError for more than `limit` cohorts.

    Guarantees: probabilities sum to one, and counts have the design's moments
    (tests/theory/test_sampling_variance.py::test_every_cohort_once).

    >>> design = SamplingDesign(scheme="with_replacement", population_size=2, cohort_size=2, num_slots=2)
    >>> [(p.tolist(), c.tolist()) for p, c in enumerate_cohorts(design)]
    [([0.25, 0.5, 0.25], [[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]])]
    """
    number = num_cohorts(design)
    if number > limit:
        validate.fail("design", f"at most {limit} cohorts to enumerate", number, "Use method='leading order'.")
    return _draws(design) if design.replacement else _subsets(design)


def _batches(choices: Iterator[tuple[int, ...]], width: int, size: int) -> Iterator[np.ndarray]:
    """[s, size] how often each client occurs in each choice."""
    while rows := list(itertools.islice(choices, max(1, _BATCH // (size + width)))):
        counts = np.zeros((len(rows), size))
        np.add.at(counts, (np.arange(len(rows))[:, None], np.array(rows, np.int64).reshape(len(rows), width)), 1)
        yield counts


def _subsets(design: SamplingDesign) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    starts, members = blocks(design)
    for start in starts.tolist():
        ids = [(start + i) % design.population_size for i in range(members)]
        for count, chance in zip(*(x.tolist() for x in report_counts(design)), strict=True):
            each = chance / len(starts) / math.comb(members, count)
            for counts in _batches(itertools.combinations(ids, count), count, design.population_size):
                yield np.full(len(counts), each), counts


def _draws(design: SamplingDesign) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Multisets under the multinomial law; a client that drops out does so in all of its slots."""
    from scipy.special import gammaln

    size, slots, rate = design.population_size, design.num_slots, design.response_rate
    drawn = np.full(size, 1 / size) if design.draw_probabilities is None else design.draw_probabilities
    masks = itertools.product((0.0, 1.0), repeat=size) if rate < 1 else [(1.0,) * size]
    for mask in map(np.array, masks):
        responds = rate ** mask.sum() * (1 - rate) ** (size - mask.sum())
        multisets = itertools.combinations_with_replacement(range(size), slots)
        for counts in _batches(multisets, slots, size):
            orders = np.rint(np.exp(gammaln(slots + 1) - gammaln(counts + 1).sum(1)))
            yield responds * orders * np.prod(drawn**counts, 1), counts * mask
