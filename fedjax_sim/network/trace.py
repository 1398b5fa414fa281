"""This module simulates availability as it was recorded: the intervals of a CSV file."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.network.csv_file import SECONDS, Table, columns, factor, numbers
from fedjax_sim.types import Availability, FilePath
from fedjax_sim.validate import PositiveInt

DATE = "date"  # the unit that stands for dates
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
    """Clients are available in the intervals that a file lists. The intervals repeat after a period.

    A client that joins and leaves once has a single interval, in a period longer than the run.

    Args:
      path: of a CSV file with a header and one row for each interval. Intervals of a client may overlap.
      client, start, end: names of the columns. The clients of the file are numbered in the order in which they appear,
        and client i has the intervals of number i % clients. An interval begins at `start` and ends before `end`.
      unit: of the times: "s", "ms", "us", "min" or "h". Or "date": dates with times in ISO 8601, such as 2024-03-01
        09:40:00.5 or 2024-03-01T09:40+01:00; a date without a zone is in UTC.
      origin: the time in the file at which a run begins, written as in the file. Examples are 1709286000 for Unix
        times, and "2024-03-01" for dates. Dates need an origin.
      period_seconds: the time after which all intervals repeat; None: the last end, in whole seconds.
      delimiter: between values, as in `measured`.
      max_clients: how many clients of the file are used, in the order in which they appear; None for all. They may have
        2^18 intervals together.

    Returns: `Availability`. A query is a binary search among the intervals of its client. Its `rate` is the share of a
    whole period. A shorter run may see all of it, or nothing.

    Raises: ValueError for a file that cannot be read, for times that are no numbers or lie before the origin, and for
    intervals that end before they begin or after the period. Also if the first interval begins after more than a year
    and more than the file's own span.

    Guarantees: Availability is as in the file at every second (tests/network/test_trace.py::test_every_second). The
    share of each client is exact (::test_shares_are_exact). It is no probability in a round, so everything that needs a
    probability refuses it (::test_a_share_is_no_chance). Unix times, with which no client would be available for
    decades, are refused without their origin (::test_times_since_another_moment). Dates are seconds (::test_dates), and
    the first clients are as in the whole file (::test_first_clients).
    """
    column_names = {"client": client, "start": start, "end": end}
    way_out = "Take fewer of the file's clients: max_clients."
    table = columns(path, column_names, delimiter=delimiter, first={"client": max_clients}, way_out=way_out)
    texts = table.texts
    for row, id in zip(table.rows, texts["client"], strict=True):
        if text_files.says_missing(id):
            validate.fail("client", f"a client id in row {row}", id, "Drop the row, or give it an id.")
    times = _seconds_of_dates(table, origin) if unit == DATE else _seconds(table, unit, origin)
    # Rounded to microseconds first, so that times in ms or us do not end up one second later.
    begins, ends = (np.ceil(np.round(time, 6)) for time in times)
    for row in np.flatnonzero(ends < begins)[:1]:
        validate.fail("end", f"no end before the start in row {table.rows[row]}", texts["end"][row])
    last_end = max(int(ends.max()), 1)
    earliest = begins.min()
    if earliest > max(YEAR, last_end - earliest):
        hint = "Nobody would be there before. If these are times since another moment, name it: origin."
        validate.fail(
            "start", "a first interval within a year of the run's begin", f"{earliest / YEAR:.3g} years", hint
        )
    if last_end > validate.INT32_MAX:
        validate.fail(
            "end", "times within 2^31 seconds of the origin", last_end, "If they are milliseconds: unit='ms'."
        )
    period = last_end if period_seconds is None else period_seconds
    validate.integer("period_seconds", period, last_end, hint="It holds all intervals of the file.")
    client_numbers = {name: number for number, name in enumerate(dict.fromkeys(texts["client"]))}
    owners = np.array([client_numbers[name] for name in texts["client"]], np.int32)
    intervals = _disjoint(owners, begins.astype(np.int32), ends.astype(np.int32))
    owners, begins, ends = intervals.T
    shares = np.bincount(owners, ends - begins, len(client_numbers)) / period
    first_interval = np.searchsorted(owners, np.arange(len(client_numbers) + 1)).astype(np.int32)
    # The same number of steps for all clients, enough for the client with the most intervals.
    num_halvings = int(np.diff(first_interval).max()).bit_length()

    def at(ids, seconds):
        client_number = ids % len(client_numbers)
        now = jnp.broadcast_to(jnp.asarray(seconds, jnp.int32) % period, ids.shape)
        own_first = jnp.asarray(first_interval)[client_number]

        def halve(_, bounds):
            """Halves the range that holds the client's first interval which begins after `now`."""
            low, high = bounds
            middle = (low + high) // 2
            later = (jnp.asarray(begins)[jnp.minimum(middle, len(begins) - 1)] > now) | (low == high)
            return jnp.where(later, low, middle + 1), jnp.where(later, middle, high)

        next_interval, _ = jax.lax.fori_loop(
            0, num_halvings, halve, (own_first, jnp.asarray(first_interval)[client_number + 1])
        )
        # The interval before `next_interval` has begun; the client is available if that interval has not ended.
        return (next_interval > own_first) & (now < jnp.asarray(ends)[jnp.maximum(next_interval - 1, 0)])

    return Availability(at, lambda ids: shares[np.asarray(ids) % len(client_numbers)])


def _seconds(table: Table, unit: str, origin: float | str) -> Iterator[np.ndarray]:
    """Computes start and end of each interval, as seconds since the origin."""
    seconds = factor("unit", unit, {**SECONDS, DATE: 1.0})
    if isinstance(origin, str):
        validate.fail("origin", f"a number of {unit}", origin, f"If the file's times are dates: unit = {DATE!r}.")
    validate.in_range("origin", origin, 0, 1e15)
    first_time = float(origin)
    hint = f"If these are dates: unit = {DATE!r}."
    return ((numbers(name, table, first_time, hint=hint) - first_time) * seconds for name in ("start", "end"))


def _seconds_of_dates(table: Table, origin: float | str) -> Iterator[np.ndarray]:
    """Computes start and end of each interval, as seconds since the origin, from dates.

    Args:
      table: with the options "start" and "end".
      origin: the date at which a run begins.

    Yields: the starts and then the ends, [rows] float64 >= 0 each.

    Raises: ValueError for an origin or a text that is no date, and for a date before the origin.
    """
    if not isinstance(origin, str):
        rule = "the date at which a run begins, as a text"
        validate.fail("origin", rule, origin, f"The file's first row begins at {table.texts['start'][0]!r}.")
    # Differences of dates are exact to a microsecond, whatever their time zones.
    origin_date = _date("origin", str(origin))
    for name in ("start", "end"):
        seconds = np.empty(len(table.rows))
        for row, text in enumerate(table.texts[name]):
            seconds[row] = (_date(f"{name} in row {table.rows[row]}", text) - origin_date).total_seconds()
            if seconds[row] < 0:
                validate.fail(name, f"no date before the origin {origin} in row {table.rows[row]}", text)
        yield seconds


def _date(place: str, text: str) -> datetime.datetime:
    """Reads a date of ISO 8601, in UTC if it names no zone."""
    try:
        date = datetime.datetime.fromisoformat(text)
    except ValueError:
        validate.fail(place, "a date such as '2024-03-01 09:40:00'", text, "Write other dates as ISO 8601 does.")
        raise
    return date if date.tzinfo else date.replace(tzinfo=datetime.UTC)


def _disjoint(owners: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Merges the intervals [begin, end) of each client that overlap or touch, and leaves out empty ones.

    Args:
      owners: [rows] int32, the client of each interval.
      begins, ends: [rows] int32 seconds, begin <= end.

    Returns: [intervals, 3] int32 (client, begin, end), sorted. If all are empty, one empty interval of client 0.
    """
    merged: list[list[int]] = []
    for index in np.lexsort((begins, owners)):
        owner = int(owners[index])
        begin = int(begins[index])
        end = int(ends[index])
        if merged and merged[-1][0] == owner and begin <= merged[-1][2]:
            merged[-1][2] = max(merged[-1][2], end)
        elif begin < end:
            merged.append([owner, begin, end])
    # If all intervals are empty, one empty interval remains, so that lookups have an entry.
    return np.array(merged or [[0, 0, 0]], np.int32)
