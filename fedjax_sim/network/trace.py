"""Availability as somebody recorded it: the intervals of a CSV file."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.network.csv_file import SECONDS, columns, factor, numbers
from fedjax_sim.types import Availability, FilePath

__all__ = ["trace"]

YEAR = 365 * 86_400  # seconds


def trace(
    path: FilePath,
    *,
    client: str = "client",
    start: str = "start",
    end: str = "end",
    unit: str = "s",
    origin: float = 0.0,
    period_seconds: int | None = None,
    delimiter: str = "auto",
) -> Availability:
    """Clients are there in the intervals that a file lists, which repeat.

    A client that joins and leaves once has one interval, in a period longer than the run.

    Args:
      path: of a CSV file with a header and a row for each interval; intervals of a client may overlap.
      client, start, end: names of its columns. The clients of the file are numbered as they first appear, and client i
        has the intervals of number i % clients. An interval begins at `start` and ends before `end`.
      unit: of the times, "s", "ms", "min" or "h".
      origin: the time in the file, in its unit, at which a run begins, such as 1709286000 of Unix times.
      period_seconds: after which all repeats; None: the last end, in whole seconds.
      delimiter: between values, as in `measured`.

    Returns: `Availability`; a query is a binary search among the intervals of its client. Its `rate` is the share of a
    whole period: what a shorter run sees of it may be all or nothing.

    Raises: ValueError for a file that cannot be read, times that are no numbers or before the origin, intervals that
    end before they begin or after the period, and where the first one begins after more than a year and more than the
    file's own span.

    Guarantees: as the file says, at every second (tests/network/test_trace.py::test_every_second); the share of each
    client is exact (::test_shares_are_exact), and stands for no chance in a round: nothing that needs one takes it
    (::test_a_share_is_no_chance); Unix times, which would leave a run alone for decades, are refused without their
    origin (::test_times_since_another_moment).
    """
    table = columns(path, {"client": client, "start": start, "end": end}, delimiter=delimiter)
    texts = table.texts
    seconds = factor("unit", unit, SECONDS)
    validate.in_range("origin", origin, 0, 1e15)
    times = (numbers(name, table, origin) - origin for name in ("start", "end"))
    begins, ends = (np.ceil(np.round(time * seconds, 6)) for time in times)
    for i in np.flatnonzero(ends < begins)[:1]:
        validate.fail("end", f"no end before the start in row {i + 1}", texts["end"][i])
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
