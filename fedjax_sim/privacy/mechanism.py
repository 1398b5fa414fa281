"""A mechanism is a sampling design, a weighting, a clip and a noise: all that an accountant needs to know of a round.

A mechanism that cannot be accounted for is refused with the reason. Beside the facts of `types`, these entries of
`Noise.details` are read. The details are a dict, or the NamedTuple of `transform.discrete`:

    noise_cohort_size   central: M; the noise on the mean is that of a cohort of M clients
    adaptive            central: the clip norm follows the norms of updates, and the noise follows the clip norm
    cohort_size         distributed: the least number of messages whose shares of noise are counted on
    clip_units          integer noise: c, the clip norm in units of the grid
    dimension           integer noise: d, the number of parameters in an update
    l2_units, l1_units  integer noise: the largest L2 norm and L1 norm of a rounded update, in units of the grid
    table_error         integer noise: total variation distance between a drawn integer and its exact law
    separation          correlated over rounds: the least number of rounds between two participations of a client
    num_rounds          correlated: T, rounds of the whole run, to which the noise multiplier belongs
    participations      correlated: the most participations of a client in the run
    steps               record: noisy steps of a client in a round
    sampling            record: "poisson", "truncated_poisson" or "shuffled" batches
    rate                record: probability that a step's batch contains a given record
    num_examples        record: the most examples that a client has
    max_batch_size      record: the most examples that a truncated batch has
    max_reports         the most messages that count, if more clients are invited
    first               which messages count: "random" ones, or "client" if that depends on devices and data of clients
    preparation         what was learnt from the rows of several clients and is taken as public, as sentences; "" for
                        nothing; absent if it is not known
    level               clients are federations with this name, such as "edge"; a federation is sampled and clipped
    num_members         level: number of clients under all federations, on the lowest level; absent if not known
    protects            level: "members" for one client under a federation; absent for a federation with all its clients
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedjax_sim import validate
from fedjax_sim.sampling.design import UNKNOWN

ADJACENCIES = ("add_or_remove_one", "replace_one", "zero_out")
INTEGERS = ("discrete_gaussian", "skellam")
CORRELATED = ("banded_toeplitz", "tree")
# Each message is differentially private by itself, without a delta, at the epsilon 1 / noise_multiplier.
PURE = ("laplace", "privunit", "randomized_response")
KINDS = ("gaussian", *CORRELATED, *INTEGERS, *PURE)
PLACES = ("central", "distributed", "local")
_FIXED = "uniform_without_replacement"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The parts of a round that privacy depends on.

    All fields are plain numbers and strings, so that a mechanism can be stored and compared.

    Args:
      noise_multiplier: standard deviation of the noise over the clip norm: of the released sum, of one message (place
        "local"), or of one step of a client (unit "record"). Of a kind without a delta, one over the epsilon of a
        message.
      scheme: the law of the cohort, a scheme of `SamplingDesign`.
      population_size: N, the number of clients.
      cohort_size: the expected number of invited clients, in (0, N].
      num_slots: the most clients that are invited to a round.
      place: who adds the noise. "central": the server, to the sum; "distributed": each client adds a share; "local":
        each client adds noise that hides its own message.
      kind: "gaussian"; "banded_toeplitz" or "tree" for noise that is correlated over rounds; "discrete_gaussian" or
        "skellam" for integer noise; "laplace", "privunit" or "randomized_response" for messages that are
        differentially private by themselves, without a delta.
      unit: "client" or "record".
      adjacency: how neighbouring data sets differ. "add_or_remove_one": the sum moves by one clip norm, or by two where
        a truncated cohort is full. "zero_out": the
        contribution of a unit becomes zero, which also moves the sum by one clip norm. "replace_one": the sum moves by
        two clip norms. None: the first adjacency that suits the scheme.
      clip_norm: C > 0.
      thinned: whether invited clients may fail to report.
      details: entries as listed in the module's docstring; numbers and strings only.

    Raises: ValueError, TypeError with the reason, for a mechanism that no accountant here can account for.

    Guarantees: These are refused (tests/privacy/test_mechanism.py::test_refusals): fixed-size cohorts under
    add_or_remove_one, and under zero_out unless the noise is local or correlated; schemes with replacement; unknown
    schemes; cyclic schemes unless the noise is local or correlated; and shares of noise that may be missing.

    >>> mechanism = Mechanism(noise_multiplier=1.0, scheme="full", population_size=10, cohort_size=10, num_slots=10)
    >>> mechanism.adjacency, mechanism.moves
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
    details: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()  # kept as pairs, which can be hashed

    def __post_init__(self) -> None:
        hint = "A sweep varies it, so it has no value here: read the mechanism outside of the sweep."
        for name in ("noise_multiplier", "clip_norm"):
            value = getattr(self, name)
            validate.in_range(name, value)
            try:
                # The class is frozen, so normalised values are set past it.
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
        # A sample of the whole population is no sample.
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
        """q: the probability that a client is invited to a round."""
        return self.cohort_size / self.population_size

    @property
    def moves(self) -> int:
        """The number of clip norms by which one unit may move the value to which the noise is added."""
        return 2 if self.adjacency == "replace_one" else 1

    @property
    def moves_unsampled(self) -> int:
        """`moves` as if nothing were sampled.

        If slots are too few, a unit that is added takes another unit's slot, so the sum moves by two clip norms. A unit
        whose contribution is replaced keeps its own slot, and the other units are drawn as before.
        """
        return 2 if self.law == "truncated_poisson" and self.adjacency == "add_or_remove_one" else self.moves

    @property
    def law(self) -> str:
        """How units are drawn for a release: "always", "poisson", "truncated_poisson" or "without_replacement"."""
        if self.unit == "record":
            sampling = self.detail("sampling")
            return "always" if sampling == "shuffled" or self.detail("rate") == 1 else sampling
        # Sampling amplifies nothing for single messages, full cohorts, and rounds that are one mechanism together.
        if self.place == "local" or self.scheme == "full" or self.kind in CORRELATED:
            return "always"
        return "without_replacement" if self.scheme == _FIXED else self.scheme

    @property
    def drawn_from(self) -> tuple[int, float, int]:
        """Returns (number of units, probability of each, the most units that are drawn), all for one release."""
        if self.unit == "record":
            size = self.detail("num_examples", 1)
            return size, self.detail("rate", 1.0), self.detail("max_batch_size", size)
        return self.population_size, self.rate, self.num_slots

    @property
    def protected(self) -> str:
        """The unit that an epsilon of this mechanism protects, as a phrase.

        Guarantees: Each level of a hierarchy has its own phrase
        (tests/privacy/test_levels.py::test_each_level_has_its_own_statement).
        """
        level = self.detail("level")
        if level is None:
            return self.unit
        if self.detail("protects") == "members":
            return f"client of {'an' if level[0].lower() in 'aeiou' else 'a'} {level}"
        return f"{level} with all its clients"

    def of_members(self) -> Mechanism | None:
        """Returns the same mechanism as it protects one client under a federation; None without federations.

        If that client is added, removed or replaced, its federation is sampled as before, and sends another message of
        at most the clip norm. So the message is replaced, and the sum moves by up to two clip norms.

        Guarantees: No client moves a release further (tests/laws/test_privacy.py).
        """
        if self.detail("level") is None:
            return None
        details = dict(self.details) | {"protects": "members"}
        return dataclasses.replace(self, adjacency="replace_one", details=details)

    @property
    def num_units(self) -> int | None:
        """The number of units that are protected: clients, federations, or the most records that all clients can have.

        None for clients under federations, if their number is not known.
        """
        if self.detail("protects") == "members":
            return self.detail("num_members")
        return self.population_size * (int(self.detail("num_examples", 1)) if self.unit == "record" else 1)

    def releases(self, rounds: int) -> int:
        """Computes the number of Gaussian releases in `rounds` rounds that may depend on a given unit."""
        validate.integer("rounds", rounds, 0)
        if self.kind in CORRELATED:
            # All rounds together are one Gaussian mechanism.
            return min(rounds, 1)
        # With cyclic schemes, a client sends a message in only some of the rounds. -(-a // b) is a / b rounded up.
        if self.place == "local" and self.scheme == "cyclic":
            rounds = -(-rounds * int(self.num_slots) // self.population_size)
        elif self.place == "local" and self.scheme == "shuffled_cyclic":
            # One more, because the first of these rounds may lie inside of a pass that began before.
            rounds = min(rounds, -(-rounds // -(-self.population_size // self.num_slots)) + 1)
        return rounds * int(self.detail("steps", 1))

    def detail(self, name: str, default: Any = None) -> Any:
        """Returns the detail `name`, or `default` if the mechanism does not have it."""
        return dict(self.details).get(name, default)

    def with_multiplier(self, noise_multiplier: float) -> Mechanism:
        """Returns the same mechanism with another noise multiplier."""
        return dataclasses.replace(self, noise_multiplier=noise_multiplier)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**dataclasses.asdict(self), "details": dict(self.details)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Mechanism:
        """Restores a mechanism from JSON values. Every field is checked again."""
        field_names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, Mapping) or not set(fields) <= field_names:
            validate.fail("mechanism", "an object with the fields " + ", ".join(sorted(field_names)), fields)
        return cls(**fields)

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits, which are equal for equal mechanisms only."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def event(self, rounds: int):
        """Returns dp-accounting's event for `rounds` rounds, to check epsilon by hand; None if it is not Gaussian.

        The event is meant for `PLDAccountant`, which itself allows for the two clip norms by which a replaced unit
        moves a sum. The event of a fixed-size sample is meant for `RdpAccountant`, which does not allow for this. So
        its Gaussian has half the noise multiplier.

        Args:
          rounds: T >= 0.
        """
        import dp_accounting as dp

        count = self.releases(rounds)
        z = self.noise_multiplier
        # dp-accounting has no event for integer noise, nor for PrivUnit.
        if self.kind in (*INTEGERS, *PURE):
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
            # The accountant for samples of fixed size does not allow for two clip norms, so the noise is halved.
            halved_noise = dp.GaussianDpEvent(z / self.moves)
            event = dp.SampledWithoutReplacementDpEvent(self.population_size, int(self.cohort_size), halved_noise)
        return dp.SelfComposedDpEvent(event, count)


def _check_scheme(mechanism: Mechanism) -> None:
    """Refuses a mechanism whose parts do not fit together, or that no accountant knows, with the reason.

    Args:
      mechanism: its multiplier, clip norm, kind, place and unit are checked already, and its adjacency is not.
    """
    schemes = ("poisson", "truncated_poisson", _FIXED, "full", "cyclic", "shuffled_cyclic")
    # Sampling: a client must fill at most one slot, by a law that an accountant knows.
    if mechanism.scheme in ("with_replacement", "weighted_with_replacement"):
        hint = (
            "A client may fill several slots, and no accountant here bounds what it then moves: use poisson or uniform."
        )
        validate.fail("sampler", "a scheme without replacement", mechanism.scheme, hint)
    if mechanism.scheme in UNKNOWN:
        hint = (
            "Who takes part follows from what was observed, such as losses, or, in asynchronous algorithms, from who "
            "arrives first. Take an algorithm that draws cohorts, by poisson, uniform or full."
        )
        validate.fail("scheme", "a law of who takes part that an accountant knows", mechanism.scheme, hint)
    validate.one_of("scheme", mechanism.scheme, schemes)
    validate.integer("population_size", mechanism.population_size)
    validate.integer("num_slots", mechanism.num_slots, 1, mechanism.population_size)
    hint = "A cohort has at most the population's clients."
    validate.in_range("cohort_size", mechanism.cohort_size, 0, mechanism.population_size, open_low=True, hint=hint)
    if mechanism.scheme in (_FIXED, "full") and mechanism.cohort_size != int(mechanism.cohort_size):
        validate.fail("cohort_size", "a whole number of clients", mechanism.cohort_size)
    # Rounds: without correlated noise they must be independent.
    if mechanism.kind in CORRELATED:
        _check_separation(mechanism)
    # Local noise needs no sampling, so cyclic schemes are fine there.
    elif "cyclic" in mechanism.scheme and mechanism.place != "local":
        hint = "Who comes next depends on who came before, so sampling amplifies nothing: use poisson, uniform or full."
        validate.fail("sampler", "independent rounds", mechanism.scheme, hint)
    # Shares of noise: they add up to the noise only if every message arrives.
    if mechanism.place == "distributed":
        hint = "A missing message takes its share of the noise along: use uniform or full, without dropout."
        if mechanism.scheme not in (_FIXED, "full") or mechanism.thinned:
            validate.fail(
                "sampler", "as many messages in every round as have a share of the noise", mechanism.scheme, hint
            )
        num_counted = mechanism.detail("cohort_size", mechanism.num_slots)
        if num_counted > mechanism.num_slots:
            validate.fail("noise.details.cohort_size", f"at most {mechanism.num_slots} messages", num_counted, hint)
    # Integer noise: its accountant needs norms in units of the grid.
    if mechanism.kind in INTEGERS:
        if mechanism.place != "distributed" or mechanism.unit != "client":
            validate.fail(
                "place", f"'distributed' for {mechanism.kind} noise", mechanism.place, "Messages carry shares of it."
            )
        for name in ("clip_units", "cohort_size", "dimension", "l1_units", "l2_units"):
            validate.positive(name, mechanism.detail(name), hint="Integer noise is accounted for in units of its grid.")
    if mechanism.kind in PURE and (mechanism.place != "local" or mechanism.unit != "client"):
        hint = "Its epsilon is that of one message with all of a client's data."
        validate.fail("place", f"'local' for {mechanism.kind}, and the unit 'client'", mechanism.place, hint)
    # Records: the accountant needs the steps, and how often a step sees a record.
    if mechanism.unit == "record":
        if mechanism.detail("steps") is None or mechanism.detail("sampling") not in (
            "poisson",
            "truncated_poisson",
            "shuffled",
        ):
            hint = "How often a step may see one record is needed, as client.private_sgd states it."
            validate.fail("noise.details", "a dict with `steps`, `sampling` and `rate`", dict(mechanism.details), hint)
        validate.integer("steps", mechanism.detail("steps"))
        validate.in_range("rate", mechanism.detail("rate"), 0, 1, open_low=True)
        if mechanism.detail("sampling") == "truncated_poisson":
            for name in ("num_examples", "max_batch_size"):
                validate.integer(name, mechanism.detail(name))


def _check_separation(mechanism: Mechanism) -> None:
    """Checks that the sampler keeps the separation between participations that correlated noise was built for.

    Args:
      mechanism: of a kind in `CORRELATED`, with a scheme of N clients in `num_slots` slots. Its `separation` is in
        rounds: b means that a client takes part at most once in b consecutive rounds.
    """
    for name in ("num_rounds", "separation", "participations"):
        validate.integer(name, mechanism.detail(name), hint="As transform.matrix_mechanism states it.")
    is_cyclic = mechanism.scheme == "cyclic"
    # A cyclic order returns to a client after N / slots rounds; other samplers may invite it again at once.
    guaranteed_separation = mechanism.population_size // mechanism.num_slots if is_cyclic else 1
    if not (min(mechanism.detail("separation"), mechanism.detail("num_rounds")) <= guaranteed_separation):
        plural = "s" if guaranteed_separation > 1 else ""
        hint = f"The sampler may invite a client again after {guaranteed_separation} round{plural}."
        validate.fail(
            "separation",
            f"at most {guaranteed_separation}, or the sampler cyclic in order",
            mechanism.detail("separation"),
            hint,
        )


def _adjacencies(mechanism: Mechanism) -> tuple[str, ...]:
    """Returns the adjacencies that hold for this mechanism; the first is the default.

    Args:
      mechanism: with a checked scheme. Its own adjacency is not read.
    """
    # Shuffled batches have a fixed size, so a record cannot be added without moving others.
    if mechanism.unit == "record":
        return ("zero_out", "replace_one") if mechanism.detail("sampling") == "shuffled" else ADJACENCIES
    if mechanism.detail("first") == "client" and mechanism.place == "central":
        return ("replace_one",)
    if mechanism.kind in CORRELATED:
        return ("zero_out", "replace_one")
    if mechanism.place == "local":
        return ("replace_one", "zero_out")
    if mechanism.detail("max_reports") is not None and mechanism.place == "central":
        return ("replace_one",) if mechanism.scheme == _FIXED else ("replace_one", "zero_out")
    # Zeroing a message moves its clip bit twice as far, see `_why_not`.
    if mechanism.detail("adaptive") and mechanism.scheme != _FIXED:
        return ("add_or_remove_one", "replace_one")
    if mechanism.place == "distributed":
        return ("replace_one", "zero_out") if mechanism.scheme == "full" else ("replace_one",)
    return ("replace_one",) if mechanism.scheme == _FIXED else ADJACENCIES


def _why_not(mechanism: Mechanism) -> str:
    """Returns the reason why the mechanism's adjacency is refused, as a sentence.

    Args:
      mechanism: with an adjacency that `_adjacencies` does not list.
    """
    if mechanism.unit == "record":
        return "A record more or less puts all others into other batches of an epoch. Use Poisson batches."
    if mechanism.detail("first") == "client" and mechanism.place == "central":
        return "A client that is not in time gives its place to another one, so the sum moves by two clip norms."
    if mechanism.kind in CORRELATED:
        return "A client more or less would change the rounds in which the others take part."
    if mechanism.detail("max_reports") is not None and mechanism.place == "central":
        return "Without a client another one's message counts, so the sum moves by two clip norms: replace_one."
    if mechanism.detail("adaptive") and mechanism.adjacency == "zero_out":
        return "A message of zeros is not clipped: its bit in the count of clipped updates moves twice as far."
    if mechanism.place == "local":
        return "Whoever sees the messages sees who sent one."
    if mechanism.place == "distributed" and mechanism.adjacency == "add_or_remove_one":
        return "A client that is absent adds no share of the noise either."
    return (
        "A cohort of fixed size is no Poisson sample: without a client, another one takes its slot, and the sum "
        "moves by two clip norms. Account for replace_one, or sample with sampling.poisson."
    )
