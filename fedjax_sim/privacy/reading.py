"""Reads a mechanism from the parts of an algorithm, and refuses what no accountant here can account for."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedjax_sim import validate
from fedjax_sim.privacy.mechanism import Mechanism
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.types import AggregatorFacts, Algorithm, Population, Star, TransformFacts, noisy_parts

__all__ = ["mechanism_from", "mechanism_of"]


def mechanism_from(
    design: SamplingDesign, noise: Any, *, adjacency: str | None = None, dimension: int | None = None
) -> Mechanism:
    """The mechanism of a sampling design and a part's `Noise`; integer noise needs the dimension of an update.

    Raises: ValueError, TypeError where there is no accountant for it, with the reason.

    >>> from fedjax_sim.types import Noise
    >>> design = SamplingDesign(scheme="poisson", population_size=1000, cohort_size=10, num_slots=1000)
    >>> mechanism_from(design, Noise("gaussian", "central", 1.0, 0.5, "client")).law
    'poisson'
    """
    if not isinstance(design, SamplingDesign):
        hint = "An accountant must know the law of the cohort: give the sampler a design."
        validate.fail("sampler.design", "a SamplingDesign", type(design).__name__, hint, TypeError)
    details = _details(noise, dimension)
    _check_response(design, noise)
    limit = design.max_reports
    if limit is None and "poisson" not in design.scheme and design.num_slots < design.cohort_size:
        limit = design.num_slots  # of those drawn the first so many are invited
    if limit is not None:
        details |= {"max_reports": limit, "first": design.response}
    scheme, cohort_size, num_slots = design.scheme, design.cohort_size, design.num_slots
    if "poisson" in scheme:
        cohort_size = design.rate * design.population_size
    larger = details.get("noise_cohort_size")
    if larger is not None and noise.place == "central":
        hint = "No cohort of that size can be drawn from this population, so there is nothing to account for."
        validate.integer("noise_cohort_size", larger, 1, design.population_size, hint=hint)
        if larger < cohort_size:
            hint = "It simulates a larger cohort, not a smaller one."
            validate.fail("noise_cohort_size", f"at least the cohort's {cohort_size:g} clients", larger, hint)
        details["simulated_cohort_size"] = cohort_size
        cohort_size = float(larger)
        if scheme in ("poisson", "truncated_poisson"):
            scheme, num_slots = "poisson", design.population_size
        elif scheme == "full" and larger != design.population_size:
            validate.fail("noise_cohort_size", f"the population's {design.population_size} clients", larger,
                          "Everybody takes part.")  # fmt: skip
        else:
            num_slots = int(larger)
    return Mechanism(
        noise_multiplier=noise.multiplier,
        scheme=scheme,
        population_size=design.population_size,
        cohort_size=cohort_size,
        num_slots=num_slots,
        place="local" if noise.unit == "record" else noise.place,
        kind=noise.mechanism,
        unit=noise.unit,
        adjacency=adjacency,
        clip_norm=noise.clip_norm,
        thinned=bool(design.response_rates) or design.client_rates is not None or design.response != "random",
        details=details,
    )


def mechanism_of(
    algorithm: Any,
    *,
    adjacency: str | None = None,
    dimension: int | None = None,
    population: Population | None = None,
) -> Mechanism | None:
    """The mechanism of an `Algorithm`, read from its parts; None if no part has noise.

    Where clients are federations it protects one of them with all its clients; `Mechanism.of_members` states what the
    same noise does for one client under them.

    Args:
      algorithm: an `Algorithm`, a `Star`, or some of its parts by name: {"sampler", "client", "transform", ...}.
      adjacency: as in `Mechanism`.
      dimension: d, the numbers in an update; needed for integer noise only, whose rounding depends on it.
      population: which the algorithm is run on; of groups it tells the number of their clients.

    Raises: ValueError, TypeError with the reason where noise is there, but its privacy cannot be accounted for: an
    aggregate that a client moves without bound (example weights, a divisor of the realised cohort), messages longer
    than the noise's clip norm, rounds without messages, or with few, that release no noise, two parts with noise, a
    sampler that observes losses (`Sampler.observe`), and what `Mechanism` refuses, an unknown scheme among it.

    Guarantees: each of these is refused (tests/privacy/test_mechanism.py::test_refusals_of_parts); parts as this
    package composes them are read (::test_reads_the_parts); each level of a hierarchy has its own statement
    (tests/privacy/test_levels.py).
    """
    star = algorithm.parts if isinstance(algorithm, Algorithm) else algorithm
    parts = star._asdict() if isinstance(star, Star) else star or {}
    noisy = list(noisy_parts(parts).items())
    if not noisy:
        return None
    if len(noisy) > 1:
        hint = "Each has a unit and an epsilon of its own: leave one out."
        validate.fail("noise", "one part with noise", [part for part, _ in noisy], hint)
    part, noise = noisy[0]
    if part not in ("client", "transform"):
        hint = "What it does to the noise, and to whom, is not known: put it into a transform or a client."
        validate.fail("noise", "in the part client or transform", f"one in {part}", hint)
    if "sampler" not in parts:
        validate.fail("sampler", "a part with a design", None, "An accountant must know the law of the cohort.")
    if getattr(parts["sampler"], "observe", None) is not None:
        hint = "Whom it invites may tell clients' losses, which bear no noise: use poisson, uniform or full."
        validate.fail("sampler", "one that observes no losses", "one with `observe`", hint)
    aggregator = getattr(parts.get("aggregator"), "facts", AggregatorFacts())  # nothing is known of one that is missing
    if part == "transform" and noise.place != "local":
        _check_aggregator(parts["transform"].facts, aggregator, noise)
    if part == "transform" and aggregator.weighted:
        hint = "The weights that clients report bear no noise: weigh uniformly; your own rule states weighted=False."
        validate.fail("aggregator", "one that takes no weights from clients", "one that does", hint)
    made = mechanism_from(parts["sampler"].design, noise, adjacency=adjacency, dimension=dimension)
    federation = getattr(parts.get("client"), "federation", None)
    if federation is None:
        return made
    if noise.place == "distributed" and not _always_sends(federation):
        hint = "Without reports it sends nothing, and its share of the noise is missing: take full inside, without "
        hint += "dropouts, and no sum that may be aborted."
        validate.fail("client", "federations that send a message in every round", "one that may send none", hint)
    num_members = getattr(population, "num_members", None)
    levels = {"level": parts["client"].facts.level} | ({} if num_members is None else {"num_members": num_members})
    return dataclasses.replace(made, details=dict(made.details) | levels)


def _always_sends(star: Star) -> bool:
    """Whether somebody surely reports in each round of a federation, so that it sends a message."""
    design, aggregator, inner = star.sampler.design, star.aggregator, star.client.federation
    if not isinstance(design, SamplingDesign) or design.scheme != "full" or design.response != "random":
        return False
    if design.response_rates or design.client_rates is not None:
        return False
    if aggregator.stays is not None or aggregator.facts.least is not None:
        return False
    return inner is None or _always_sends(inner)


def _check_response(design: SamplingDesign, noise: Any) -> None:
    if design.response == "others":
        hint = (
            "One client's presence or speed decides which others take part, and no noise hides that: leave out "
            "availability and limits that depend on simulated time."
        )
        validate.fail("sampler", "one in which no client decides who else takes part", design.response, hint)
    if design.response == "client" and noise.unit == "record":
        hint = "Whether a client sends anything may depend on how many records it has, and no noise hides that."
        validate.fail("sampler", "one whose clients respond whatever they hold", design.response, hint)


def _details(noise: Any, dimension: int | None) -> dict[str, Any]:
    """A noise's details as plain numbers and strings; integer noise has its norms worked out for the dimension."""
    details = noise.details
    if hasattr(details, "rounded_norm"):
        hint = "What rounding adds to an update's norm depends on it: pass dimension=d."
        if dimension is None:
            validate.fail("dimension", "the numbers in an update", None, hint)
        validate.integer("dimension", dimension)
        return {
            "clip_units": float(details.clip_units),
            "cohort_size": int(details.cohort_size),
            "dimension": int(dimension),
            "l1_units": float(details.rounded_l1(dimension)),
            "l2_units": float(details.rounded_norm(dimension)),
            "table_error": float(details.table_error),
        }
    return {name: value for name, value in noise.named_details.items() if isinstance(value, (int, float, str))}


def _check_aggregator(transform: TransformFacts, aggregator: AggregatorFacts, noise: Any) -> None:
    if aggregator.sensitivity is None:
        hint = (
            "Weights or a divisor that depend on data (example counts, the realised cohort) let one client move it "
            "without bound: use aggregation.fixed_mean(m) with uniform weights."
        )
        validate.fail("aggregator.sensitivity", "a bound on what one client moves", None, hint)
    if noise.place != "central":
        return
    if not transform.releases_when_empty:
        hint = "A round without messages would release no noise, and so show that nobody was there."
        validate.fail("transform.releases_when_empty", "True", transform.releases_when_empty, hint)
    if aggregator.least is not None:
        hint = "A sum of too few messages releases no noise, and so shows that too few were there."
        validate.fail("aggregator.least", "None beside central noise", aggregator.least, hint)
    if noise.named_details.get("adaptive"):
        return
    bound = transform.l2_bound
    if bound is None or not (bound <= noise.clip_norm * (1 + 1e-6)):
        hint = "The noise is scaled to that norm: a longer message is less private than stated. Clip last."
        validate.fail("transform.l2_bound", f"at most the clip norm {noise.clip_norm:g} of the noise", bound, hint)
