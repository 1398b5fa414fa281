"""This module gives the law of a cohort from its `SamplingDesign`: report counts, pairs, and all cohorts.

All schemes without replacement share one fact. Take the block of clients that may be drawn (all clients, or a window of
a cyclic order), and the number K of reports. Given both, the reporting cohort is a uniform subset of size K. Dropout,
truncation and over-invitation change only the law of K.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign

MAX_COHORTS = 1 << 21
_BATCH = 1 << 20  # array elements in a batch of cohorts, which bounds the memory


def check_design(design: SamplingDesign) -> None:
    """Refuses everything but a design with a known distribution.

    Raises: TypeError if `design` is no `SamplingDesign`. ValueError for an unknown scheme, and if a sweep varies the
    response rate.
    """
    if not isinstance(design, SamplingDesign):
        validate.fail("design", "a SamplingDesign", design, "A sampler carries it: sampler.design.", TypeError)
    design.check_known()


def known_response_rate(design: SamplingDesign) -> float:
    """Returns the probability that the report of an invited client counts, of a design that `check_design` accepts.

    >>> known_response_rate(SamplingDesign(scheme="poisson", population_size=10, cohort_size=1, num_slots=10))
    1.0
    """
    check_design(design)
    rate = design.response_rate
    assert rate is not None, "check_design refuses a design without a rate"
    return rate


def _binomial(trials: int, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Computes counts and probabilities of a binomial law, without tails whose mass is below 1e-16."""
    from scipy import stats

    half_width = 12 * math.sqrt(trials * rate * (1 - rate)) + 40
    low = max(0, math.floor(trials * rate - half_width))
    high = min(trials, math.ceil(trials * rate + half_width))
    counts = np.arange(low, high + 1)
    return counts, stats.binom.pmf(counts, trials, rate)


def _thinned(counts: np.ndarray, probabilities: np.ndarray, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Computes the law of K after each of the K reports is kept with probability `rate`."""
    if rate == 1:
        return counts, probabilities
    masses = np.zeros(int(counts.max()) + 1)
    for count, probability in zip(counts.tolist(), probabilities.tolist(), strict=True):
        if probability > 1e-20:
            kept_counts, kept_mass = _binomial(count, rate)
            masses[kept_counts] += probability * kept_mass
    kept_counts = np.flatnonzero(masses)
    return kept_counts, masses[kept_counts]


def _limited(counts: np.ndarray, probabilities: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the law of min(K, limit)."""
    is_below = counts < limit
    if is_below.all():
        return counts, probabilities
    return np.append(counts[is_below], limit), np.append(probabilities[is_below], probabilities[~is_below].sum())


def report_counts(design: SamplingDesign) -> tuple[np.ndarray, np.ndarray]:
    """Computes the law of K, the number of slots that report in a round, for a design without replacement.

    For cyclic schemes it is the law of a round at a random moment.

    Args:
      design: a `SamplingDesign`.

    Returns: ([k] int counts K in rising order, [k] float64 probabilities).

    Raises: ValueError for a design with replacement. TypeError if `design` is no design.

    Guarantees: The law equals the frequencies of the real samplers, with dropout, truncation and over-invitation in any
    order (tests/theory/test_sampling_variance.py::test_report_counts_are_those_of_the_samplers).

    >>> design = SamplingDesign(scheme="poisson", population_size=2, cohort_size=1, num_slots=2)
    >>> [x.round(3).tolist() for x in report_counts(design)]
    [[0, 1, 2], [0.25, 0.5, 0.25]]
    """
    check_design(design)
    if design.replacement:
        validate.fail("design", "a design without replacement", design.scheme, "There a client may fill several slots.")
    population_size = design.population_size
    slots = design.num_slots
    rates = [rate for rate in design.response_rates if rate is not None]  # check_design refuses None
    poisson_rate = design.rate
    assert poisson_rate is not None, "a SamplingDesign computes a rate that is not given"
    if design.scheme == "poisson":
        return _binomial(population_size, poisson_rate * known_response_rate(design))
    if design.scheme == "truncated_poisson":
        law = _limited(*_binomial(population_size, poisson_rate), slots)
    elif design.scheme == "shuffled_cyclic" and population_size % slots:
        # The last round of a pass over all clients is shorter if the slots do not divide N.
        rounds = -(-population_size // slots)
        law = np.array([population_size % slots, slots]), np.array([1 / rounds, 1 - 1 / rounds])
    else:
        law = np.array([slots]), np.ones(1)
    limit_position = design.reports_limited_after
    if limit_position is not None and design.max_reports is not None:  # a design has both, or neither
        law = _limited(*_thinned(*law, math.prod(rates[:limit_position], start=1.0)), design.max_reports)
        # The rate at the limit's own position follows from the rates before it, so it is skipped.
        rates = rates[limit_position + 1 :]
    counts, probabilities = _thinned(*law, math.prod(rates, start=1.0))
    return counts, probabilities / probabilities.sum()


def joint_inclusion_probability(design: SamplingDesign) -> float:
    """Computes pi_ij: the probability that two given clients, i != j, both report in a round.

    For uniform cohorts without replacement it is m (m - 1) / (N (N - 1)). So the covariance of the indicators is pi_ij
    - pi^2 < 0.

    Args:
      design: a `SamplingDesign` that treats all pairs alike.

    Returns: a number in [0, 1].

    Raises: ValueError for a single client, and for designs in which pairs differ (weighted, cyclic in order).

    Guarantees: The covariance of two indicators has the known value for m = 10 of N = 100, and the probability is the
    frequency over all cohorts (tests/theory/test_sampling_variance.py::test_joint_inclusion).

    References: Cochran 1977, section 2.9.

    >>> design = SamplingDesign(scheme="uniform_without_replacement", population_size=100, cohort_size=10, num_slots=10)
    >>> round(joint_inclusion_probability(design) - 0.1**2, 9)
    -0.000909091
    """
    check_design(design)
    population_size = design.population_size
    if population_size < 2 or design.scheme in ("cyclic", "weighted_with_replacement"):
        validate.fail("design", "two clients or more, all pairs alike", design)
    if design.replacement:
        # Inclusion and exclusion: P(both) = 1 - P(not i) - P(not j) + P(neither).
        neither_drawn = (1 - 2 / population_size) ** design.num_slots
        response_rate = known_response_rate(design)
        return (1 - 2 * (1 - 1 / population_size) ** design.num_slots + neither_drawn) * response_rate**2
    counts, probabilities = report_counts(design)
    return float(probabilities @ (counts * (counts - 1.0))) / (population_size * (population_size - 1))


def blocks(design: SamplingDesign) -> tuple[np.ndarray, int]:
    """Returns the blocks of clients from which cohorts are drawn: the windows of a cyclic order.

    Returns: ([k] starts, number of clients in each window). Other schemes have a single block: [0], N.

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
    """Counts the cohorts that `enumerate_cohorts` would list; 2^62 stands for more than any limit.

    Args:
      design: a `SamplingDesign` of any scheme.

    >>> num_cohorts(SamplingDesign(scheme="poisson", population_size=10, cohort_size=1, num_slots=10))
    1024
    """
    check_design(design)
    size = design.population_size
    slots = design.num_slots
    if design.replacement:
        if size + slots > 1000:
            return 1 << 62
        return math.comb(size + slots - 1, slots) * (1 if design.response_rate == 1 else 2**size)
    starts, members = blocks(design)
    counts = report_counts(design)[0]
    if len(counts) > 64 or (members > 1 << 12 and 2 < counts[-1] < members - 2):
        # The sum of binomials would be far beyond any limit, and take long to compute.
        return 1 << 62
    return len(starts) * sum(math.comb(members, int(k)) for k in counts)


def enumerate_cohorts(design: SamplingDesign, *, limit: int = MAX_COHORTS) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Lists every cohort of a round with its probability, in batches.

    Args:
      design: a `SamplingDesign`.
      limit: more cohorts than this are refused.

    Returns: an iterator of ([s] probabilities, [s, N] float64 numbers of times that each client reports).

    Raises: ValueError for more than `limit` cohorts.

    Guarantees: Probabilities sum to one, and the counts have the design's moments
    (tests/theory/test_sampling_variance.py::test_every_cohort_once).

    >>> design = SamplingDesign(scheme="with_replacement", population_size=2, cohort_size=2, num_slots=2)
    >>> [(probabilities.tolist(), counts.tolist()) for probabilities, counts in enumerate_cohorts(design)]
    [([0.25, 0.5, 0.25], [[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]])]
    """
    number = num_cohorts(design)
    if number > limit:
        validate.fail("design", f"at most {limit} cohorts to enumerate", number, "Use method='leading order'.")
    return _draws(design) if design.replacement else _subsets(design)


def _batches(choices: Iterator[tuple[int, ...]], width: int, num_clients: int) -> Iterator[np.ndarray]:
    """Yields batches [s, num_clients] of the number of times that each client occurs in each choice."""
    while rows := list(itertools.islice(choices, max(1, _BATCH // (num_clients + width)))):
        counts = np.zeros((len(rows), num_clients))
        # `np.add.at` counts a client twice if a choice contains the client twice; plain indexing would not.
        np.add.at(counts, (np.arange(len(rows))[:, None], np.array(rows, np.int64).reshape(len(rows), width)), 1)
        yield counts


def _subsets(design: SamplingDesign) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the cohorts of a design without replacement: all subsets of each block, of each possible size."""
    starts, block_size = blocks(design)
    for start in starts.tolist():
        ids = [(start + offset) % design.population_size for offset in range(block_size)]
        for count, probability in zip(*(x.tolist() for x in report_counts(design)), strict=True):
            cohort_probability = probability / len(starts) / math.comb(block_size, count)
            for counts in _batches(itertools.combinations(ids, count), count, design.population_size):
                yield np.full(len(counts), cohort_probability), counts


def _draws(design: SamplingDesign) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the cohorts of a design with replacement: multisets under the multinomial law.

    A client that drops out does so in all of its slots. With c_i slots for client i of m slots in all, and with z_i = 1
    if the client responds and else 0,

        P(c, z) = m! prod_i (p_i^c_i / c_i!)  prod_i q^z_i (1 - q)^(1 - z_i)

    The same counts c_i z_i may thus be yielded several times.

    Args:
      design: a design with replacement: m slots, response rate q, draw probabilities p_i (1/N if it has none).

    Returns: an iterator of batches ([s] probabilities, [s, N] c_i z_i). All probabilities sum to 1.
    """
    from scipy.special import gammaln

    num_clients = design.population_size
    slots = design.num_slots
    rate = known_response_rate(design)
    draw_probabilities = (
        np.full(num_clients, 1 / num_clients) if design.draw_probabilities is None else design.draw_probabilities
    )
    masks = itertools.product((0.0, 1.0), repeat=num_clients) if rate < 1 else [(1.0,) * num_clients]
    for mask in map(np.array, masks):
        mask_probability = rate ** mask.sum() * (1 - rate) ** (num_clients - mask.sum())
        multisets = itertools.combinations_with_replacement(range(num_clients), slots)
        for counts in _batches(multisets, slots, num_clients):
            # The multinomial coefficient: the number of orders in which the slots may be filled.
            num_orders = np.rint(np.exp(gammaln(slots + 1) - gammaln(counts + 1).sum(1)))
            yield mask_probability * num_orders * np.prod(draw_probabilities**counts, 1), counts * mask
