"""What `fedjax-sim account` and `fedjax-sim calibrate` print: text, and the same as a dict for programs."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedjax_sim.privacy.accountant import account
from fedjax_sim.privacy.calibration import calibrate, compare, comparison_table, written_down
from fedjax_sim.privacy.mechanism import Mechanism
from fedjax_sim.privacy.words import explain

__all__ = ["Answer", "account_report", "calibrate_report"]


class Answer(NamedTuple):
    """Text, and the same as JSON."""

    text: str
    fields: dict[str, Any]


def account_report(
    *,
    rounds: int,
    delta: float,
    accountant: str = "best",
    mechanism: Mechanism | None = None,
    member_delta: float | None = None,
    **options: Any,
) -> Answer:
    """The epsilon of so many rounds, explained; where clients are federations, for one of their clients too.

    Args:
      delta, member_delta: for a client, and for a client of one that is a federation; None = the same.
      mechanism: of a config; or the options of `written_down`: population_size, cohort_size, noise_multiplier, scheme,
        num_slots, place, adjacency, clip_norm, noise_cohort_size.

    Raises: as `account` and `written_down`.

    >>> answer = account_report(rounds=1, delta=1e-5, population_size=9, cohort_size=9, noise_multiplier=1.0)
    >>> answer.fields["spent"]["epsilon"]
    4.3772
    """
    made = written_down(**options) if mechanism is None else mechanism
    spent = account(made, rounds, delta, accountant=accountant)
    event = made.event(rounds)
    fields = {"spent": spent.as_dict(), "mechanism": made.as_dict(), "event": _event(event)}
    lines = [explain(spent), "", *explain(made).splitlines()[:3], f"Event: {_event(event)}."]
    lines += _of_members(made, rounds, delta if member_delta is None else member_delta, accountant, fields)
    if made.law == "without_replacement" and made.place == "central" and not made.detail("noise_cohort_size"):
        poisson = account(_as_poisson(made), rounds, delta)
        fields["poisson_epsilon"] = poisson.as_dict()["epsilon"]
        lines.append(f"With a Poisson sample of the same expected size, epsilon would be {poisson.epsilon:.5g}{_WHY}")
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
    **options: Any,
) -> Answer:
    """The noise multiplier that a budget needs, explained; with `table`, what it costs with noise in three places.

    Args:
      delta, member_delta: as in `account_report`; the budget is that of a federation with all its clients.
      mechanism: of a config, whose noise is sought; or the options of `written_down`, but for noise_multiplier.

    Raises: as `calibrate` and `written_down`.

    Guarantees: answers for a million clients within 20 s; for fixed-size cohorts it states why they need more noise
    (tests/privacy/test_commands.py::test_a_million_clients).

    >>> answer = calibrate_report(epsilon=1.0, delta=1e-5, rounds=1, population_size=9, cohort_size=9, scheme="full")
    >>> answer.text.splitlines()[0]
    'Noise multiplier 3.7307: standard deviation 3.7307 with clip norm 1.'
    """
    found = calibrate(epsilon, delta, rounds, mechanism, accountant=accountant, **options)
    made, z = found.mechanism, found.noise_multiplier
    event = _event(made.event(rounds))
    fields = {
        "noise_multiplier": z,
        "spent": found.spent.as_dict(),
        "mechanism": made.as_dict(),
        "event": event,
    }
    std = f"standard deviation {z * made.clip_norm:.6g} with clip norm {made.clip_norm:g}"
    lines = [f"Noise multiplier {z:.5g}: {std}.", explain(found.spent), "", *explain(made).splitlines()[:3],
             f"Event: {event}."]  # fmt: skip
    lines += _of_members(made, rounds, delta if member_delta is None else member_delta, accountant, fields)
    if made.detail("clip_units"):
        grid = made.clip_norm / made.detail("clip_units")
        lines.append(f"It holds with granularity = {grid:.9g} written out: by default the grid follows the noise.")
    if made.law == "without_replacement" and made.place == "central" and not made.detail("noise_cohort_size"):
        poisson = calibrate(epsilon, delta, rounds, _as_poisson(made)).noise_multiplier
        fields["poisson_noise_multiplier"] = poisson
        lines.append(f"With a Poisson sample of the same expected size, {poisson:.5g} would do{_WHY}")
    if table:
        m = max(1, round(made.cohort_size))
        rows = compare(epsilon, delta, rounds, population_size=made.population_size, cohort_size=m,
                       clip_norm=made.clip_norm)  # fmt: skip
        fields["table"] = [row._asdict() for row in rows]
        lines += ["", comparison_table(rows)]
    return Answer("\n".join(lines), fields)


def _of_members(made: Mechanism, rounds: int, delta: float, accountant: str, fields: dict[str, Any]) -> list[str]:
    """The statement for one client under a federation, which `fields` get too; nothing where clients are no
    federations."""
    inside = made.of_members()
    if inside is None:
        return []
    spent = account(inside, rounds, delta, accountant=accountant)
    fields["members"] = spent.as_dict()
    return ["", explain(spent)]


_WHY = (
    ": there, a client that is added or removed moves the sum by one clip norm, and nobody else, and its law is known. "
    "In a cohort of fixed size it takes another client's slot (two clip norms), and a looser bound is all there is. "
    "Sample with sampling.poisson to have that, never by naming the number."
)


def _as_poisson(made: Mechanism) -> Mechanism:
    sizes = {"population_size": made.population_size, "cohort_size": made.cohort_size}
    return written_down(noise_multiplier=made.noise_multiplier, clip_norm=made.clip_norm, **sizes)


def _event(event: Any) -> str:
    return "none in dp-accounting" if event is None else str(event)
