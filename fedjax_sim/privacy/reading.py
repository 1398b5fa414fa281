"""This module reads a mechanism from the parts of an algorithm, and refuses what no accountant can account for."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Protocol, runtime_checkable

from fedjax_sim import validate
from fedjax_sim.privacy.mechanism import Mechanism
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.types import (
    AggregatorFacts,
    Algorithm,
    Groups,
    Learned,
    Population,
    Star,
    TransformFacts,
    learned_from,
    noisy_parts,
)


@runtime_checkable
class RoundedNorms(Protocol):
    """What an accountant reads of integer noise (`transform.discrete`), in grid units."""

    clip_units: float  # the clip norm, before rounding
    cohort_size: int
    table_error: float

    def rounded_l1(self, dimension: int) -> float:
        """The largest L1 norm of a message of so many numbers."""
        ...

    def rounded_norm(self, dimension: int) -> float:
        """The largest L2 norm of a message of so many numbers."""
        ...


def mechanism_from(
    design: SamplingDesign, noise: Any, *, adjacency: str | None = None, dimension: int | None = None
) -> Mechanism:
    """Builds the mechanism of a sampling design and of the `Noise` of a part.

    Args:
      design: a `SamplingDesign`.
      noise: a `Noise`, as in `transform.facts.noise` or `client.facts.noise`.
      adjacency: as in `Mechanism`.
      dimension: d, the number of parameters in an update; needed for integer noise, else it may be None.

    Returns: `Mechanism`.

    Raises: ValueError, TypeError with the reason, if no accountant knows the mechanism.

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
    max_reports = design.max_reports
    if max_reports is None and "poisson" not in design.scheme and design.num_slots < design.cohort_size:
        # More clients are drawn than have slots; the first of them are invited.
        max_reports = design.num_slots
    if max_reports is not None:
        details |= {"max_reports": max_reports, "first": design.response}
    scheme = design.scheme
    cohort_size = design.cohort_size
    num_slots = design.num_slots
    if "poisson" in scheme:
        assert design.rate is not None, "a SamplingDesign computes a rate that is not given"
        cohort_size = design.rate * design.population_size
    noise_cohort_size = details.get("noise_cohort_size")
    # The noise is that of a larger cohort, so the larger cohort is accounted for; the run's own is only noted.
    if noise_cohort_size is not None and noise.place == "central":
        hint = "No cohort of that size can be drawn from this population, so there is nothing to account for."
        validate.integer("noise_cohort_size", noise_cohort_size, 1, design.population_size, hint=hint)
        if noise_cohort_size < cohort_size:
            hint = "It simulates a larger cohort, not a smaller one."
            validate.fail(
                "noise_cohort_size", f"at least the cohort's {cohort_size:g} clients", noise_cohort_size, hint
            )
        details["simulated_cohort_size"] = cohort_size
        cohort_size = float(noise_cohort_size)
        if scheme in ("poisson", "truncated_poisson"):
            scheme = "poisson"
            num_slots = design.population_size
        elif scheme == "full" and noise_cohort_size != design.population_size:
            validate.fail("noise_cohort_size", f"the population's {design.population_size} clients", noise_cohort_size,
                          "Everybody takes part.")  # fmt: skip
        else:
            num_slots = int(noise_cohort_size)
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
    """Reads the mechanism of an `Algorithm` from its parts; None if no part adds noise.

    If clients are federations, the mechanism protects one federation with all its clients. `Mechanism.of_members` gives
    the mechanism that the same noise is for one client under a federation.

    Args:
      algorithm: an `Algorithm`, a `Star`, or some of its parts by name: {"sampler", "client", "transform", ...}.
      adjacency: as in `Mechanism`.
      dimension: d, the number of parameters in an update; needed for integer noise, whose rounding depends on d;
        else it may be None.
      population: the population of the run. Its record says what was learnt from several clients' rows to prepare their
        inputs (`types.Learned`). For None the statement says that nothing is known of that. A population of groups
        also gives the number of their clients.

    Returns: `Mechanism` or None.

    Raises: ValueError, TypeError with the reason, if a part adds noise whose privacy cannot be accounted for. The
      reasons are:
      - an aggregate that one client moves without bound, by example weights or a divisor that is the realised cohort;
      - messages longer than the noise's clip norm;
      - rounds without messages, or with few messages, that release no noise;
      - two parts with noise;
      - inputs that depend on other clients' rows, by a mean of all rows, say (`preparation_of`);
      - a sampler that observes losses (`Sampler.observe`);
      - whatever `Mechanism` refuses, such as an unknown scheme.

    Guarantees: One client more moves the sum by at most `moves` clip norms, for every data set with such options
    (tests/privacy/test_preparation.py::test_one_client_more). Each of these is refused
    (tests/privacy/test_mechanism.py::test_refusals_of_parts). Parts as this package composes them are read
    (::test_reads_the_parts). Each level of a hierarchy has its own statement (tests/privacy/test_levels.py).
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
    # Without an aggregator the default facts apply, which promise least.
    aggregator_facts = getattr(parts.get("aggregator"), "facts", AggregatorFacts())
    if part == "transform" and noise.place != "local":
        _check_aggregator(parts["transform"].facts, aggregator_facts, noise)
    if part == "transform" and aggregator_facts.weighted:
        hint = "The weights that clients report bear no noise: weigh uniformly; your own rule states weighted=False."
        validate.fail("aggregator", "one that takes no weights from clients", "one that does", hint)
    mechanism = mechanism_from(parts["sampler"].design, noise, adjacency=adjacency, dimension=dimension)
    preparation = None if population is None else preparation_of(population, noise.unit)
    if preparation is not None:
        details = dict(mechanism.details) | {"preparation": preparation}
        mechanism = dataclasses.replace(mechanism, details=details)
    federation = getattr(parts.get("client"), "federation", None)
    if federation is None:
        return mechanism
    # A federation that sends nothing leaves its share of the noise out of the sum.
    if noise.place == "distributed" and not _always_sends(federation):
        hint = "Without reports it sends nothing, and its share of the noise is missing: take full inside, without "
        hint += "dropouts, and no sum that may be aborted."
        validate.fail("client", "federations that send a message in every round", "one that may send none", hint)
    num_members = population.num_members if isinstance(population, Groups) else None
    level_details = {"level": parts["client"].facts.level} | (
        {} if num_members is None else {"num_members": num_members}
    )
    return dataclasses.replace(mechanism, details=dict(mechanism.details) | level_details)


def preparation_of(population: Population, unit: str = "client") -> str | None:
    """Returns what a statement assumes about how the inputs of a population were prepared, for `Mechanism.details`.

    Args:
      population: of the run.
      unit: of privacy. What one row changes at its own client counts where single records are to be hidden.

    Returns: "" if nothing was learnt from the rows of several clients; sentences if something was that the user takes
      as public (`population.with_public_preparation`); None if the population does not say.

    Raises: ValueError for anything else that was learnt: one client could then move the messages of all others.

    >>> from fedjax_sim import population
    >>> preparation_of(population.digits(num_clients=5).train)
    ''
    """
    learned = learned_from(population)
    if learned is None:
        return None
    learned = tuple(record for record in learned if record.unit in ("client", unit))
    kept = [record for record in learned if not record.is_public]
    if kept:
        stated = "; ".join(record.instead for record in kept if record.instead)
        hint = f"One {kept[0].unit} can {kept[0].effect}, which no noise for one message hides. "
        hint += f"State what is known without the rows: {stated}. " if stated else ""
        hint += "If it is public, say so: [data.with_public_preparation]."
        name = re.match(r"\w*", kept[0].instead)[0] or "data"  # type: ignore[index]
        found = "; ".join(f"{record}, learnt from the rows of {_whose(record)}" for record in kept)
        validate.fail(name, "constants beside noise", found, hint)
    return " ".join(
        f"Taken as public by the config, although learnt from the rows of {_whose(record)} without noise: {record}. "
        f"One {record.unit} can {record.effect}. What that shows of its rows is NOT covered."
        for record in learned
    )


def _whose(record: Learned) -> str:
    """Returns whose rows a record was learnt from, in words."""
    return "all clients" if record.unit == "client" else "its client"


def _always_sends(star: Star) -> bool:
    """Tells whether at least one client surely reports in each round, so that the federation sends a message."""
    design = star.sampler.design
    aggregator = star.aggregator
    inner_federation = star.client.federation
    if not isinstance(design, SamplingDesign) or design.scheme != "full" or design.response != "random":
        return False
    if design.response_rates or design.client_rates is not None:
        return False
    if aggregator.stays is not None or aggregator.facts.least is not None:
        return False
    return inner_federation is None or _always_sends(inner_federation)


def _check_response(design: SamplingDesign, noise: Any) -> None:
    """Refuses designs in which who reports depends on data or devices in a way that no noise hides."""
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
    """Returns the details of a noise as plain numbers and strings, with norms computed for the dimension.

    Args:
      noise: a `Noise`. Its details are a mapping, or the NamedTuple of `transform.discrete` for integer noise.
      dimension: d, the number of parameters in an update; None is allowed except for integer noise.

    Returns: the entries that `privacy.mechanism` lists, as far as the noise has them.
    """
    details = noise.details
    # Integer noise: the norm of a rounded update depends on the dimension.
    if isinstance(details, RoundedNorms):
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
    # Other values are dropped, because a mechanism must be plain to be stored and compared.
    return {name: value for name, value in noise.named_details.items() if isinstance(value, (int, float, str))}


def _check_aggregator(transform: TransformFacts, aggregator: AggregatorFacts, noise: Any) -> None:
    """Refuses an aggregator or a transform that lets one client move the sum further than the noise assumes.

    Args:
      transform: facts of the transform that adds the noise, with all transforms it is chained with.
      aggregator: facts of the aggregator.
      noise: the `Noise`, central or distributed. For distributed noise only the sensitivity is checked. The demands on
        empty rounds, on the number of messages and on their length hold for central noise alone, the last only for a
        fixed clip norm.
    """
    if aggregator.sensitivity is None:
        hint = (
            "Weights or a divisor that depend on data (example counts, the realised cohort) let one client move it "
            "without bound: use aggregation.fixed_mean(m) with uniform weights."
        )
        validate.fail("aggregator.sensitivity", "a bound on what one client moves", None, hint)
    validate.in_range("aggregator.sensitivity", aggregator.sensitivity, 0)
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
    # The tolerance is for float32: a clipped message may exceed the clip norm by rounding.
    bound = transform.l2_bound
    if bound is None or not (bound <= noise.clip_norm * (1 + 1e-6)):
        hint = "The noise is scaled to that norm: a longer message is less private than stated. Clip last."
        validate.fail("transform.l2_bound", f"at most the clip norm {noise.clip_norm:g} of the noise", bound, hint)
