"""This study compares noise by the server, in secure shares and by every client: the variance of the mean it causes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from fedjax_sim import privacy, theory, transform, validate
from fedjax_sim.prng import stream
from fedjax_sim.study.central_local.claims import central_local_claims
from fedjax_sim.study.central_local.figure import central_local_figure
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured, rows_of
from fedjax_sim.study.problems import Vectors, side_by_side
from fedjax_sim.types import Array, UpdateTransform
from fedjax_sim.validate import Integer, NonNegativeInt, Number, OpenShare, Positive, PositiveInt

QUESTION = "Who should add the noise: the server, shares that add up, or every client?"
PLACES = ("central", "distributed", "local")
NUM_GROUPS = 20  # of releases; each group gives a sample of the slope


class _Noise(NamedTuple):
    """A kind of noise to measure.

    Fields:
      part: the part of the study.
      name: the place with its assumptions, such as "local, replaced message".
      place: an entry of PLACES.
      multiplier: standard deviation over clip norm, as the transform takes it.
      variance: the variance of a coordinate of the mean, by theory.
    """

    part: str
    name: str
    place: str
    multiplier: float
    variance: float


@validate.named_arguments
def central_local(
    *,
    cohort_sizes: Sequence[int] = (10, 300, 10_000),
    dimension: Annotated[int, Integer(1, 10000)] = 128,
    noise_multiplier: Annotated[float, Number(0.001, 1000.0)] = 1.0,
    clip_norm: Annotated[float, Number(0.001, 1000.0)] = 1.0,
    num_clients: Annotated[int, Integer(2)] = 100_000,
    epsilon: Positive = 2.0,
    delta: OpenShare = 1e-6,
    num_rounds: PositiveInt = 100,
    num_releases: int = 80,
    seed: NonNegativeInt = 0,
) -> Findings:
    """Who should add the noise? Compares the variance of the mean under central, distributed and local noise.

    The places are compared at one noise multiplier first. The smallest and the largest cohort are then compared at one
    (epsilon, delta), where central noise is amplified by sampling and local noise is not. Updates are fixed, and the
    noise is made by the library's transforms.

    Args:
      cohort_sizes: m, rising, at least two values.
      dimension: d; a larger value makes the intervals of variances narrower.
      noise_multiplier: z.
      clip_norm: C.
      num_clients: N that cohorts are drawn from, which decides the amplification by sampling.
      epsilon: the epsilon of all rounds together.
      delta: the delta of all rounds together.
      num_rounds: rounds that share the budget.
      num_releases: independent rounds behind each variance.
      seed: decides everything.

    Returns: `Findings`; variances are those of one coordinate of the mean.

    Guarantees: every prediction lies in its interval (tests/study/test_central_local.py::test_predictions_hold).
    Another power of m does not (::test_it_can_tell_another_power).

    References: Kairouz et al. 2021, section 4.4; Duchi, Jordan and Wainwright 2018.
    """
    validate.sequence("cohort_sizes", cohort_sizes, least=2)
    for size in cohort_sizes:
        validate.integer("cohort_sizes", size, 2, num_clients)
    if list(cohort_sizes) != sorted(set(cohort_sizes)):
        validate.fail("cohort_sizes", "rising numbers", list(cohort_sizes))
    validate.integer("num_releases", num_releases, max(2 * NUM_GROUPS, least_runs(dimension)), hint=FEW)
    key = jax.random.key(seed)
    comparisons = []
    draws = {}  # squared errors [num_releases], by (part, name, m)
    budget = {"epsilon": epsilon, "delta": delta, "rounds": num_rounds, "population_size": num_clients}
    for size in cohort_sizes:
        noises = [*_equal_multiplier(noise_multiplier, clip_norm, size)]
        # Two sizes are enough to see how the multipliers depend on the cohort.
        if size in (cohort_sizes[0], cohort_sizes[-1]):
            noises += _equal_epsilon(budget, clip_norm, size)
        clients = _clients(size, dimension, clip_norm, seed)
        for place in PLACES:
            # Noises of one place differ in their multiplier only, and so share a program.
            place_noises = [noise for noise in noises if noise.place == place]
            errors = _variances(
                stream(key, f"{place} {size}"), clients, place, clip_norm, noises=place_noises, releases=num_releases
            )
            for i, noise in enumerate(place_noises):
                draws[noise.part, noise.name, size] = errors[:, i]
                conditions = {"part": noise.part, "place": noise.name, "cohort_size": size,
                              "noise_multiplier": noise.multiplier}  # fmt: skip
                comparisons.append(measured(conditions, "variance", errors[:, i], noise.variance,
                                            resolution=1e-5 * noise.variance))  # fmt: skip
    comparisons += _slopes(draws, cohort_sizes, noise_multiplier, clip_norm)
    comparisons += _ratios(draws, cohort_sizes)
    options = {
        "cohort_sizes": list(cohort_sizes), "dimension": dimension, "noise_multiplier": noise_multiplier,
        "clip_norm": clip_norm, "num_clients": num_clients, "epsilon": epsilon, "delta": delta,
        "num_rounds": num_rounds, "num_releases": num_releases, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="central_local",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(central_local_claims(rows, options)),
        figure=partial(central_local_figure, rows, options),
        options=options,
    )


def _equal_multiplier(multiplier: float, clip_norm: float, size: int) -> Iterator[_Noise]:
    """Yields the noise of each place at one multiplier."""
    for place in PLACES:
        variance = theory.noise_variance(multiplier, clip_norm, size, place=place)
        yield _Noise("equal multiplier", place, place, multiplier, variance)
    # To hide which message was sent, noise must cover a replaced message, which moves by up to two clip norms.
    variance = theory.noise_variance(multiplier, clip_norm, size, place="local", replace_one=True)
    yield _Noise("equal multiplier", "local, replaced message", "local", 2 * multiplier, variance)


def _equal_epsilon(budget: dict[str, Any], clip_norm: float, size: int) -> Iterator[_Noise]:
    """Yields the noise of each place at one privacy budget, with multipliers from accountants."""
    for row in privacy.compare(**budget, cohort_size=size, clip_norm=clip_norm):
        place = row.place.split(",")[0]  # "central, Poisson" is central
        yield _Noise("equal epsilon", row.place, place, row.noise_multiplier, row.mean_std**2)


def _clients(size: int, dimension: int, clip_norm: float, seed: int) -> Vectors:
    """Makes clients with updates of unequal norms, none of which is clipped."""
    values = np.random.default_rng([seed, size]).normal(size=(size, dimension))
    lengths = np.linspace(0.1, 0.9, size)[:, None] * clip_norm
    return Vectors(values * lengths / np.linalg.norm(values, axis=1, keepdims=True))


def _mechanism(place: str, clip_norm: float, multiplier: Any, size: int) -> UpdateTransform:
    """Makes the transform that adds noise at a place."""
    if place == "central":
        return transform.gaussian_mechanism(clip_norm, multiplier)
    if place == "local":
        return transform.local_gaussian(clip_norm, multiplier)
    return transform.distributed_gaussian(clip_norm, multiplier, size)


def _variances(
    key: Array, clients: Vectors, place: str, clip_norm: float, *, noises: Sequence[_Noise], releases: int
) -> np.ndarray:
    """Returns the squared error of each released mean, averaged over coordinates, [releases, noises]."""

    def make(multiplier):
        return clients.algorithm(_mechanism(place, clip_norm, multiplier, clients.size))

    algorithm = side_by_side(make, {"multiplier": [noise.multiplier for noise in noises]})
    return clients.errors(key, algorithm, releases) / clients.dimension


def _slopes(draws: dict[tuple, np.ndarray], sizes: Sequence[int], multiplier: float, clip_norm: float):
    """Measures the slope of log variance against log m, with one sample for each group of releases.

    All groups have the same degrees of freedom, so the bias of the logarithms cancels in a slope.

    Args:
      draws: as in `_ratios`.
      sizes: m, rising.
      multiplier: z, that of all places.
      clip_norm: C.

    Yields: for each place the slope, over `GROUPS` groups.
    """
    for place in PLACES:
        grouped = [
            [group.mean() for group in np.array_split(draws["equal multiplier", place, m], NUM_GROUPS)] for m in sizes
        ]
        exact = [theory.noise_variance(multiplier, clip_norm, m, place=place) for m in sizes]
        slopes, (predicted,) = (np.polyfit(np.log(sizes), np.log(np.reshape(y, (len(sizes), -1))), 1)[0]
                                for y in (grouped, exact))  # fmt: skip
        yield measured({"part": "slope", "place": place}, "slope", slopes, predicted, resolution=1e-5)


def _ratios(draws: dict[tuple, np.ndarray], sizes: Sequence[int]) -> Iterator[Comparison]:
    """Measures the variance of local noise divided by that of central noise.

    Theory gives m, and 4 m for noise that hides a replaced message. The standard error adds the two relative errors in
    squares.

    Args:
      draws: squared errors of a released mean, averaged over coordinates, [R] by (part, name of the noise, m).
      sizes: m, rising.

    Yields: two comparisons for each m.
    """
    for m in sizes:
        central = draws["equal multiplier", "central", m]
        for name, replaced in (("local", False), ("local, replaced message", True)):
            local = draws["equal multiplier", name, m]
            ratio = local.mean() / central.mean()
            # Relative errors of independent means add in squares, to first order.
            relative_errors = [x.std(ddof=1) / x.mean() / math.sqrt(len(x)) for x in (local, central)]
            predicted = float(theory.local_to_central_ratio(m, replace_one=replaced))
            yield Comparison(
                conditions={"part": "ratio", "place": name, "cohort_size": m},
                quantity="variance / central",
                measured=float(ratio),
                standard_error=float(ratio * math.hypot(*relative_errors)),
                degrees=len(local) - 1,
                predicted=predicted,
            )
