"""Availability as somebody recorded it: the intervals of a CSV file."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.csv_file import SECONDS, Table, columns, factor, numbers
from fedjax_sim.types import Availability, FilePath
from fedjax_sim.validate import PositiveInt

__all__ = ["trace"]

DATE = "date"  # the unit of dates
YEAR = 365 * 86_400  # seconds


@validate.named_arguments
def trace(
    path: FilePath,
    *,
    client: str = "client",
    start: str = "start",
    end: str = "end",
    unit: str = "s",
    origin: float | str = 0.0,
    period_seconds: int | None = None,
    delimiter: str = "auto",
    max_clients: PositiveInt | None = None,
) -> Availability:
    """Clients are there in the intervals that a file lists, which repeat.

    A client that joins and leaves once has one interval, in a period longer than the run.

    Args:
      path: of a CSV file with a header and a row for each interval; intervals of a client may overlap.
      client, start, end: names of its columns. The clients of the file are numbered as they first appear, and client i
        has the intervals of number i % clients. An interval begins at `start` and ends before `end`.
      unit: of the times, "s", "ms", "us", "min" or "h"; or "date": dates with times as ISO 8601 writes them, such as
        2024-03-01 09:40:00.5 or 2024-03-01T09:40+01:00; one without a zone is in UTC.
      origin: the time in the file, as the file writes it, at which a run begins, such as 1709286000 of Unix times or
        "2024-03-01" of dates, which need one.
      period_seconds: after which all repeats; None: the last end, in whole seconds.
      delimiter: between values, as in `measured`.
      max_clients: of the file, so many as they first appear; None for all. It may have 2^18 intervals of theirs.

    Returns: `Availability`; a query is a binary search among the intervals of its client. Its `rate` is the share of a
    whole period: what a shorter run sees of it may be all or nothing.

    Raises: ValueError for a file that cannot be read, times that are no numbers or before the origin, intervals that
    end before they begin or after the period, and where the first one begins after more than a year and more than the
    file's own span.

    Guarantees: as the file says, at every second (tests/network/test_trace.py::test_every_second); the share of each
    client is exact (::test_shares_are_exact), and stands for no chance in a round: nothing that needs one takes it
    (::test_a_share_is_no_chance); Unix times, which would leave a run alone for decades, are refused without their
    origin (::test_times_since_another_moment); dates are seconds (::test_dates), and the first clients are as in the
    whole file (::test_first_clients).
    """
    named = {"client": client, "start": start, "end": end}
    way_out = "Take fewer of the file's clients: max_clients."
    table = columns(path, named, delimiter=delimiter, first={"client": max_clients}, way_out=way_out)
    texts = table.texts
    times = _seconds_of_dates(table, origin) if unit == DATE else _seconds(table, unit, origin)
    begins, ends = (np.ceil(np.round(time, 6)) for time in times)
    for i in np.flatnonzero(ends < begins)[:1]:
        validate.fail("end", f"no end before the start in row {table.rows[i]}", texts["end"][i])
    last, earliest = max(int(ends.max()), 1), begins.min()
    if earliest > max(YEAR, last - earliest):
        hint = "Nobody would be there before. If these are times since another moment, name it: origin."
        validate.fail(
            "start", "a first interval within a year of the run's begin", f"{earliest / YEAR:.3g} years", hint
        )
    if last > validate.INT32_MAX:
        validate.fail("end", "times within 2^31 seconds of the origin", last, "If they are milliseconds: unit='ms'.")
    period = last if period_seconds is None else period_seconds
    validate.integer("period_seconds", period, last, hint="It holds all intervals of the file.")
    numbered = {name: i for i, name in enumerate(dict.fromkeys(texts["client"]))}
    owners = np.array([numbered[name] for name in texts["client"]], np.int32)
    intervals = _disjoint(owners, begins.astype(np.int32), ends.astype(np.int32))
    owners, begins, ends = intervals.T
    shares = np.bincount(owners, ends - begins, len(numbered)) / period
    first = np.searchsorted(owners, np.arange(len(numbered) + 1)).astype(np.int32)
    halvings = int(np.diff(first).max()).bit_length()

    def at(ids, seconds):
        who = ids % len(numbered)
        now = jnp.broadcast_to(jnp.asarray(seconds, jnp.int32) % period, ids.shape)
        own = jnp.asarray(first)[who]

        def halve(_, bounds):  # towards the first own interval that begins after now
            low, high = bounds
            middle = (low + high) // 2
            later = (jnp.asarray(begins)[jnp.minimum(middle, len(begins) - 1)] > now) | (low == high)
            return jnp.where(later, low, middle + 1), jnp.where(later, middle, high)

        after, _ = jax.lax.fori_loop(0, halvings, halve, (own, jnp.asarray(first)[who + 1]))
        return (after > own) & (now < jnp.asarray(ends)[jnp.maximum(after - 1, 0)])

    return Availability(at, lambda ids: shares[np.asarray(ids) % len(numbered)])


def _seconds(table: Table, unit: str, origin: float | str) -> Iterator[np.ndarray]:
    """Start and end of each interval, in seconds since the origin."""
    seconds = factor("unit", unit, {**SECONDS, DATE: 1.0})
    if isinstance(origin, str):
        validate.fail("origin", f"a number of {unit}", origin, f"If the file's times are dates: unit = {DATE!r}.")
    validate.in_range("origin", origin, 0, 1e15)
    first = float(origin)
    hint = f"If these are dates: unit = {DATE!r}."
    return ((numbers(name, table, first, hint=hint) - first) * seconds for name in ("start", "end"))


def _seconds_of_dates(table: Table, origin: float | str) -> Iterator[np.ndarray]:
    """The same of dates."""
    if not isinstance(origin, str):
        rule = "the date at which a run begins, as a text"
        validate.fail("origin", rule, origin, f"The file's first row begins at {table.texts['start'][0]!r}.")
    begin = _date("origin", str(origin))
    for name in ("start", "end"):
        found = np.empty(len(table.rows))
        for i, text in enumerate(table.texts[name]):
            found[i] = (_date(f"{name} in row {table.rows[i]}", text) - begin).total_seconds()
            if found[i] < 0:
                validate.fail(name, f"no date before the origin {origin} in row {table.rows[i]}", text)
        yield found


def _date(place: str, text: str) -> datetime.datetime:
    """A date of ISO 8601, in UTC where it names no zone."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        validate.fail(place, "a date such as '2024-03-01 09:40:00'", text, "Write other dates as ISO 8601 does.")
        raise
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def _disjoint(owners: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[intervals, 3] int32 (client, begin, end), by client and time; those that touch are one, and none is empty."""
    kept: list[list[int]] = []
    for i in np.lexsort((begins, owners)):
        owner, begin, end = int(owners[i]), int(begins[i]), int(ends[i])
        if kept and kept[-1][0] == owner and begin <= kept[-1][2]:
            kept[-1][2] = max(kept[-1][2], end)
        elif begin < end:
            kept.append([owner, begin, end])
    return np.array(kept or [[0, 0, 0]], np.int32)
