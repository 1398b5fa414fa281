"""A mechanism = sampling design + weighting + clip + noise: what an accountant accounts for, or the reason why not.

What is read beside the facts of `types`, in `Noise.details`, a dict, or the NamedTuple of `transform.discrete`:

    noise_cohort_size   central: M, the noise of the mean is that of a cohort of M clients
    adaptive            central: the clip norm follows the updates' norms, and the noise follows the clip norm
    cohort_size         distributed: the fewest messages that the shares of noise count on
    clip_units          integers: c, the clip norm in units of the grid
    dimension           integers: d, the numbers in an update
    l2_units, l1_units  integers: the most that a rounded update's norm, and the sum of its magnitudes, can be
    table_error         integers: total variation between a drawn integer and its law
    separation          correlated over rounds: rounds between two participations of a client, at least
    num_rounds          correlated: T of the whole run, to which the noise multiplier belongs
    participations      correlated: of a client, at most
    steps               record: noisy steps of a client in a round
    sampling            record: "poisson", "truncated_poisson" or "shuffled" batches
    rate                record: chance that a step's batch has a certain record
    num_examples        record: the most that a client has
    max_batch_size      record: the most that a truncated batch has
    max_reports         the most messages that count, where more clients are invited
    first               whose: "random", or "client" where it depends on their devices and data
    level               clients are federations of this name, such as "edge"; what is sampled and clipped is one of them
    num_members         level: clients under all of them, on the lowest level; absent where nobody told
    protects            level: "members", one client under a federation; absent: a federation with all its clients
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedjax_sim import validate
from fedjax_sim.sampling.design import UNKNOWN

__all__ = ["ADJACENCIES", "Mechanism"]

ADJACENCIES = ("add_or_remove_one", "replace_one", "zero_out")
INTEGERS = ("discrete_gaussian", "skellam")
CORRELATED = ("banded_toeplitz", "tree")
KINDS = ("gaussian", *CORRELATED, *INTEGERS)
PLACES = ("central", "distributed", "local")
_FIXED = "uniform_without_replacement"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What is released in a round, as far as privacy depends on it; plain numbers, so it can be stored and compared.

    Args:
      noise_multiplier: standard deviation of the noise over the clip norm: of the released sum, of one message
        ("local"), or of one step of a client ("record").
      scheme: law of the cohort, a scheme of `SamplingDesign`.
      population_size, cohort_size, num_slots: N, the expected number invited, the most that can be.
      place: "central", "distributed" or "local".
      kind: "gaussian"; "banded_toeplitz" or "tree", correlated over rounds; "discrete_gaussian" or "skellam", integers.
      unit: "client" or "record".
      adjacency: "add_or_remove_one" (the sum moves by a clip norm), "zero_out" (a unit's contribution becomes zero: the
        same) or "replace_one" (two clip norms); None: what suits the scheme.
      clip_norm: C.
      thinned: whether invited clients may fail to report.
      details: see the module; numbers and strings only.

    Raises: ValueError, TypeError for a mechanism that no accountant here accounts for, with the reason.

    Guarantees: fixed-size cohorts are refused under any Poisson adjacency, as are schemes with replacement, unknown
    ones, cyclic ones without correlated noise, and shares of noise that may be missing
    (tests/privacy/test_mechanism.py::test_refusals).

    >>> made = Mechanism(noise_multiplier=1.0, scheme="full", population_size=10, cohort_size=10, num_slots=10)
    >>> made.adjacency, made.moves
    ('add_or_remove_one', 1)
    """

    noise_multiplier: float
    scheme: str
    population_size: int
    cohort_size: float
    num_slots: int
    place: str = "central"
    kind: str = "gaussian"
    unit: str = "client"
    adjacency: str | None = None
    clip_norm: float = 1.0
    thinned: bool = False
    details: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        hint = "A sweep varies it, so it has no value here: read the mechanism outside of the sweep."
        for name in ("noise_multiplier", "clip_norm"):
            value = getattr(self, name)
            validate.in_range(name, value)
            try:
                object.__setattr__(self, name, float(value))
            except TypeError:
                validate.fail(name, "a number", type(value).__name__, hint, TypeError)
        validate.in_range("noise_multiplier", self.noise_multiplier, 0, 1e9)
        validate.positive("clip_norm", self.clip_norm)
        validate.one_of("kind", self.kind, KINDS, hint="There is no accountant for another.")
        validate.one_of("place", self.place, PLACES)
        validate.one_of("unit", self.unit, ("client", "record"))
        if isinstance(self.details, Mapping):
            object.__setattr__(self, "details", tuple(sorted(self.details.items())))
        _check_scheme(self)
        object.__setattr__(self, "cohort_size", float(self.cohort_size))
        if self.scheme in (_FIXED, "poisson") and self.cohort_size == self.population_size:
            object.__setattr__(self, "scheme", "full")
        allowed = _adjacencies(self)
        if self.adjacency is None:
            object.__setattr__(self, "adjacency", allowed[0])
        validate.one_of("adjacency", self.adjacency, ADJACENCIES)
        if self.adjacency not in allowed:
            rule = "one of " + ", ".join(map(repr, allowed))
            validate.fail("adjacency", rule, self.adjacency, _why_not(self))

    @property
    def rate(self) -> float:
        """q: the chance that a client is invited to a round."""
        return self.cohort_size / self.population_size

    @property
    def moves(self) -> int:
        """Clip norms by which one unit may move what the noise is added to."""
        return 2 if self.adjacency == "replace_one" else 1

    @property
    def moves_unsampled(self) -> int:
        """`moves` if nothing were sampled. Where slots are too few, a unit that is added takes another one's slot; one
        whose contribution is replaced keeps its own, and the others are drawn as before."""
        return 2 if self.law == "truncated_poisson" and self.adjacency == "add_or_remove_one" else self.moves

    @property
    def law(self) -> str:
        """How units are drawn for a release: "always", "poisson", "truncated_poisson" or "without_replacement"."""
        if self.unit == "record":
            sampling = self.detail("sampling")
            return "always" if sampling == "shuffled" or self.detail("rate") == 1 else sampling
        if self.place == "local" or self.scheme == "full" or self.kind in CORRELATED:
            return "always"
        return "without_replacement" if self.scheme == _FIXED else self.scheme

    @property
    def drawn_from(self) -> tuple[int, float, int]:
        """(units, chance of each, the most that are drawn) of one release."""
        if self.unit == "record":
            size = self.detail("num_examples", 1)
            return size, self.detail("rate", 1.0), self.detail("max_batch_size", size)
        return self.population_size, self.rate, self.num_slots

    @property
    def protected(self) -> str:
        """What an epsilon of this mechanism protects one of, as a phrase.

        Guarantees: tests/privacy/test_levels.py::test_each_level_has_its_own_statement.
        """
        level = self.detail("level")
        if level is None:
            return self.unit
        if self.detail("protects") == "members":
            return f"client of {'an' if level[0].lower() in 'aeiou' else 'a'} {level}"
        return f"{level} with all its clients"

    def of_members(self) -> Mechanism | None:
        """The same mechanism as it protects one client under a federation; None where clients are no federations.

        Whether that client is added, removed or replaced, its federation is sampled as before and sends another message
        of at most the clip norm: it is replaced, and the sum moves by up to two clip norms.

        Guarantees: no client moves a release further (tests/laws/test_privacy.py).
        """
        if self.detail("level") is None:
            return None
        details = dict(self.details) | {"protects": "members"}
        return dataclasses.replace(self, adjacency="replace_one", details=details)

    @property
    def num_units(self) -> int | None:
        """Clients, federations, or the most records that all clients can have; None for clients under federations whose
        number nobody told."""
        if self.detail("protects") == "members":
            return self.detail("num_members")
        return self.population_size * (int(self.detail("num_examples", 1)) if self.unit == "record" else 1)

    def releases(self, rounds: int) -> int:
        """The number of Gaussian releases in so many rounds that may depend on a unit."""
        validate.integer("rounds", rounds, 0)
        if self.kind in CORRELATED:
            return min(rounds, 1)  # all rounds together are one Gaussian mechanism
        if self.place == "local" and self.scheme == "cyclic":
            rounds = -(-rounds * int(self.num_slots) // self.population_size)  # messages of one client
        elif self.place == "local" and self.scheme == "shuffled_cyclic":
            rounds = min(
                rounds, -(-rounds // -(-self.population_size // self.num_slots)) + 1
            )  # the current pass may have begun before
        return rounds * int(self.detail("steps", 1))

    def detail(self, name: str, default: Any = None) -> Any:
        """One of the details."""
        return dict(self.details).get(name, default)

    def with_multiplier(self, noise_multiplier: float) -> Mechanism:
        """The same with another noise."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**dataclasses.asdict(self), "details": dict(self.details)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Mechanism:
        """From JSON; every field is checked again."""
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, Mapping) or not set(fields) <= known:
            validate.fail("mechanism", "an object with the fields " + ", ".join(sorted(known)), fields)
        return cls(**fields)

    @property
    def fingerprint(self) -> str:
        """64 hex digits: equal for equal mechanisms only."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def event(self, rounds: int):
        """dp-accounting's event of so many rounds, to check by hand; None for noise in integers: it has none.

        It is for `PLDAccountant`, which itself allows for the two clip norms by which replacing moves a sum. That of a
        fixed-size sample is for `RdpAccountant`, which does not, so its Gaussian has half the noise multiplier.
        """
        import dp_accounting as dp

        count, z = self.releases(rounds), self.noise_multiplier
        if self.kind in INTEGERS:
            return None
        if count == 0:
            return dp.NoOpDpEvent()
        if z == 0:
            return dp.NonPrivateDpEvent()
        event = dp.GaussianDpEvent(z)
        if self.law == "poisson":
            event = dp.PoissonSampledDpEvent(self.drawn_from[1], event)
        elif self.law == "truncated_poisson":
            event = dp.TruncatedSubsampledGaussianDpEvent(*self.drawn_from, z)
        elif self.law == "without_replacement":
            half = dp.GaussianDpEvent(z / self.moves)
            event = dp.SampledWithoutReplacementDpEvent(self.population_size, int(self.cohort_size), half)
        return dp.SelfComposedDpEvent(event, count)


def _check_scheme(made: Mechanism) -> None:
    schemes = ("poisson", "truncated_poisson", _FIXED, "full", "cyclic", "shuffled_cyclic")
    if made.scheme in ("with_replacement", "weighted_with_replacement"):
        hint = (
            "A client may fill several slots, and no accountant here bounds what it then moves: use poisson or uniform."
        )
        validate.fail("sampler", "a scheme without replacement", made.scheme, hint)
    if made.scheme in UNKNOWN:
        hint = (
            "Who takes part follows from what was observed, such as losses, or, in asynchronous algorithms, from who "
            "arrives first. Take an algorithm that draws cohorts, by poisson, uniform or full."
        )
        validate.fail("scheme", "a law of who takes part that an accountant knows", made.scheme, hint)
    validate.one_of("scheme", made.scheme, schemes)
    validate.integer("population_size", made.population_size)
    validate.integer("num_slots", made.num_slots, 1, made.population_size)
    hint = "A cohort has at most the population's clients."
    validate.in_range("cohort_size", made.cohort_size, 0, made.population_size, open_low=True, hint=hint)
    if made.scheme in (_FIXED, "full") and made.cohort_size != int(made.cohort_size):
        validate.fail("cohort_size", "a whole number of clients", made.cohort_size)
    if made.kind in CORRELATED:
        _check_separation(made)
    elif "cyclic" in made.scheme and made.place != "local":
        hint = "Who comes next depends on who came before, so sampling amplifies nothing: use poisson, uniform or full."
        validate.fail("sampler", "independent rounds", made.scheme, hint)
    if made.place == "distributed":
        hint = "A missing message takes its share of the noise along: use uniform or full, without dropout."
        if made.scheme not in (_FIXED, "full") or made.thinned:
            validate.fail("sampler", "as many messages in every round as have a share of the noise", made.scheme, hint)
        counted = made.detail("cohort_size", made.num_slots)
        if counted > made.num_slots:
            validate.fail("noise.details.cohort_size", f"at most {made.num_slots} messages", counted, hint)
    if made.kind in INTEGERS:
        if made.place != "distributed" or made.unit != "client":
            validate.fail("place", f"'distributed' for {made.kind} noise", made.place, "Messages carry shares of it.")
        for name in ("clip_units", "cohort_size", "dimension", "l1_units", "l2_units"):
            validate.positive(name, made.detail(name), hint="Integer noise is accounted for in units of its grid.")
    if made.unit == "record":
        if made.detail("steps") is None or made.detail("sampling") not in ("poisson", "truncated_poisson", "shuffled"):
            hint = "How often a step may see one record is needed, as client.private_sgd states it."
            validate.fail("noise.details", "a dict with `steps`, `sampling` and `rate`", dict(made.details), hint)
        validate.integer("steps", made.detail("steps"))
        validate.in_range("rate", made.detail("rate"), 0, 1, open_low=True)
        if made.detail("sampling") == "truncated_poisson":
            for name in ("num_examples", "max_batch_size"):
                validate.integer(name, made.detail(name))


def _check_separation(made: Mechanism) -> None:
    for name in ("num_rounds", "separation", "participations"):
        validate.integer(name, made.detail(name), hint="As transform.matrix_mechanism states it.")
    in_turn = made.scheme == "cyclic"
    apart = made.population_size // made.num_slots if in_turn else 1
    if not (min(made.detail("separation"), made.detail("num_rounds")) <= apart):
        hint = f"The sampler may invite a client again after {apart} round{'s' if apart > 1 else ''}."
        validate.fail("separation", f"at most {apart}, or the sampler cyclic in order", made.detail("separation"), hint)


def _adjacencies(made: Mechanism) -> tuple[str, ...]:
    """What a neighbour may be; the first is the default."""
    if made.unit == "record":
        return ("zero_out", "replace_one") if made.detail("sampling") == "shuffled" else ADJACENCIES
    if made.detail("first") == "client" and made.place == "central":
        return ("replace_one",)
    if made.kind in CORRELATED:
        return ("zero_out", "replace_one")
    if made.place == "local":
        return ("replace_one", "zero_out")
    if made.detail("max_reports") is not None and made.place == "central":
        return ("replace_one",) if made.scheme == _FIXED else ("replace_one", "zero_out")
    if made.detail("adaptive") and made.scheme != _FIXED:
        return ("add_or_remove_one", "replace_one")
    if made.place == "distributed":
        return ("replace_one", "zero_out") if made.scheme == "full" else ("replace_one",)
    return ("replace_one",) if made.scheme == _FIXED else ADJACENCIES


def _why_not(made: Mechanism) -> str:
    if made.unit == "record":
        return "A record more or less puts all others into other batches of an epoch. Use Poisson batches."
    if made.detail("first") == "client" and made.place == "central":
        return "A client that is not in time gives its place to another one, so the sum moves by two clip norms."
    if made.kind in CORRELATED:
        return "A client more or less would change the rounds in which the others take part."
    if made.detail("max_reports") is not None and made.place == "central":
        return "Without a client another one's message counts, so the sum moves by two clip norms: replace_one."
    if made.detail("adaptive") and made.adjacency == "zero_out":
        return "A message of zeros is not clipped: its bit in the count of clipped updates moves twice as far."
    if made.place == "local":
        return "Whoever sees the messages sees who sent one."
    if made.place == "distributed" and made.adjacency == "add_or_remove_one":
        return "A client that is absent adds no share of the noise either."
    return (
        "A cohort of fixed size is no Poisson sample: without a client, another one takes its slot, and the sum "
        "moves by two clip norms. Account for replace_one, or sample with sampling.poisson."
    )
