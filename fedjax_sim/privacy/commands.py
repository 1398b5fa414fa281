"""This module writes the reports of `fedjax-sim account` and `fedjax-sim calibrate`, as text and as a dict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_sim.privacy.accountant import account
from fedjax_sim.privacy.calibration import calibrate, compare, comparison_table, written_down
from fedjax_sim.privacy.mechanism import Mechanism
from fedjax_sim.privacy.words import explain
from fedjax_sim.text.bounds import shown_up


class Answer(NamedTuple):
    """A report as text, and the same content as JSON values."""

    text: str
    fields: dict[str, Any]


def account_report(
    *,
    rounds: int,
    delta: float,
    accountant: str = "best",
    mechanism: Mechanism | None = None,
    member_delta: float | None = None,
    notes: Sequence[str] = (),
    **options: Any,
) -> Answer:
    """Reports the epsilon of a number of rounds, with an explanation.

    If clients are federations, the report also states the epsilon of one client under a federation.

    Args:
      rounds: T in [0, 10^8].
      delta: in (0, 1); for one client, or for one federation with all its clients.
      accountant: as in `account`.
      mechanism: the mechanism of a config. None: give the options of `written_down` instead.
      member_delta: delta for one client under a federation; None: the same as `delta`.
      notes: sentences that the statement also depends on.
      options: population_size, cohort_size, noise_multiplier, scheme, num_slots, place, adjacency, clip_norm,
        noise_cohort_size, as in `written_down`.

    Returns: `Answer`.

    Raises: what `account` and `written_down` raise.

    >>> answer = account_report(rounds=1, delta=1e-5, population_size=9, cohort_size=9, noise_multiplier=1.0)
    >>> answer.fields["spent"]["epsilon"]
    4.3772
    """
    mechanism = written_down(**options) if mechanism is None else mechanism
    spent = account(mechanism, rounds, delta, accountant=accountant)
    event = mechanism.event(rounds)
    fields = {"spent": spent.as_dict(), "mechanism": mechanism.as_dict(), "event": _event(event), "notes": [*notes]}
    lines = [explain(spent), *_listed(notes), "", *explain(mechanism).splitlines()[:3], f"Event: {_event(event)}."]
    lines += _of_members(mechanism, rounds, delta if member_delta is None else member_delta, accountant, fields)
    # The report says what a Poisson sample of the same size would have cost, because that is the usual remedy.
    if (
        mechanism.law == "without_replacement"
        and mechanism.place == "central"
        and not mechanism.detail("noise_cohort_size")
    ):
        poisson = account(_as_poisson(mechanism), rounds, delta)
        fields["poisson_epsilon"] = poisson.as_dict()["epsilon"]
        lines.append(
            f"With a Poisson sample of the same expected size, epsilon would be {shown_up(poisson.epsilon, 5)}{_WHY}"
        )
    return Answer("\n".join(lines), fields)


def calibrate_report(
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    accountant: str = "best",
    table: bool = False,
    mechanism: Mechanism | None = None,
    member_delta: float | None = None,
    notes: Sequence[str] = (),
    **options: Any,
) -> Answer:
    """Reports the noise multiplier that a budget needs, with an explanation.

    Args:
      epsilon, delta: the budget. If clients are federations, it is that of one federation with all its clients.
      rounds: T >= 1.
      accountant: as in `account`.
      table: whether the report compares central, distributed and local noise at the same budget.
      mechanism: the mechanism of a config, whose noise is sought. None: give the options of `written_down` instead.
      member_delta, notes: as in `account_report`.
      options: as in `account_report`, without noise_multiplier.

    Returns: `Answer`.

    Raises: what `calibrate` and `written_down` raise.

    Guarantees: A population of a million clients is answered within 20 s. For fixed-size cohorts, the report states why
    they need more noise (tests/privacy/test_commands.py::test_a_million_clients).

    >>> answer = calibrate_report(epsilon=1.0, delta=1e-5, rounds=1, population_size=9, cohort_size=9, scheme="full")
    >>> answer.text.splitlines()[0]
    'Noise multiplier 3.7307: standard deviation 3.7307 with clip norm 1.'
    """
    calibrated = calibrate(epsilon, delta, rounds, mechanism, accountant=accountant, **options)
    calibrated_mechanism = calibrated.mechanism
    z = calibrated.noise_multiplier
    event = _event(calibrated_mechanism.event(rounds))
    fields = {
        "noise_multiplier": z,
        "spent": calibrated.spent.as_dict(),
        "mechanism": calibrated_mechanism.as_dict(),
        "event": event,
        "notes": [*notes],
    }
    std = (
        f"standard deviation {shown_up(z * calibrated_mechanism.clip_norm, 6)} with clip norm "
        f"{calibrated_mechanism.clip_norm:g}"
    )
    lines = [
        f"Noise multiplier {shown_up(z, 5)}: {std}.",
        explain(calibrated.spent),
        *_listed(notes),
        "",
        *explain(calibrated_mechanism).splitlines()[:3],
        f"Event: {event}.",
    ]
    lines += _of_members(
        calibrated_mechanism, rounds, delta if member_delta is None else member_delta, accountant, fields
    )
    # Integer noise: the grid is part of the calibrated mechanism, so the report states it.
    if calibrated_mechanism.detail("clip_units"):
        grid = calibrated_mechanism.clip_norm / calibrated_mechanism.detail("clip_units")
        lines.append(f"It holds with granularity = {grid:.9g} written out: by default the grid follows the noise.")
    if (
        calibrated_mechanism.law == "without_replacement"
        and calibrated_mechanism.place == "central"
        and not calibrated_mechanism.detail("noise_cohort_size")
    ):
        # The report says how much less noise a Poisson sample of the same size would need.
        poisson = calibrate(epsilon, delta, rounds, _as_poisson(calibrated_mechanism)).noise_multiplier
        fields["poisson_noise_multiplier"] = poisson
        lines.append(f"With a Poisson sample of the same expected size, {shown_up(poisson, 5)} would do{_WHY}")
    # The comparison needs whole clients, while the cohort size of a Poisson sample may be fractional.
    if table:
        cohort_size = max(1, round(calibrated_mechanism.cohort_size))
        rows = compare(
            epsilon,
            delta,
            rounds,
            population_size=calibrated_mechanism.population_size,
            cohort_size=cohort_size,
            clip_norm=calibrated_mechanism.clip_norm,
        )
        fields["table"] = [row._asdict() for row in rows]
        lines += ["", comparison_table(rows)]
    return Answer("\n".join(lines), fields)


def _listed(notes: Sequence[str]) -> list[str]:
    """Returns sentences as the lines of a list."""
    return [f"- {note}" for note in notes]


def _of_members(mechanism: Mechanism, rounds: int, delta: float, accountant: str, fields: dict[str, Any]) -> list[str]:
    """Writes the report's lines about one client under a federation; empty without federations.

    The same content is added to `fields`.
    """
    member_mechanism = mechanism.of_members()
    if member_mechanism is None:
        return []
    spent = account(member_mechanism, rounds, delta, accountant=accountant)
    fields["members"] = spent.as_dict()
    return ["", explain(spent)]


_WHY = (
    ": there, a client that is added or removed moves the sum by one clip norm, and nobody else, and its law is known. "
    "In a cohort of fixed size it takes another client's slot (two clip norms), and a looser bound is all there is. "
    "Sample with sampling.poisson to have that, never by naming the number."
)


def _as_poisson(mechanism: Mechanism) -> Mechanism:
    """Returns the same mechanism on a Poisson sample with the same expected cohort size."""
    sizes = {"population_size": mechanism.population_size, "cohort_size": mechanism.cohort_size}
    return written_down(noise_multiplier=mechanism.noise_multiplier, clip_norm=mechanism.clip_norm, **sizes)


def _event(event: Any) -> str:
    """Returns dp-accounting's event as text."""
    return "none in dp-accounting" if event is None else str(event)
