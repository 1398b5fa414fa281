"""A ledger of what a run has spent, which under-reports nothing even if the run crashes.

Rounds are entered before they run. A run that dies and goes on from an older checkpoint repeats rounds that were
entered; with the same mechanism and stream of noise they are the same release, bit for bit, and count once. With
another mechanism or stream they are a second release, and count again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from fedjax_sim import validate
from fedjax_sim.privacy.accountant import MAX_ROUNDS, PrivacySpent, compose
from fedjax_sim.privacy.mechanism import Mechanism

__all__ = ["Ledger"]

VERSION = 1


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Rounds start, ..., stop - 1 under one mechanism and one stream of noise."""

    mechanism: Mechanism
    stream: str
    start: int
    stop: int

    def same_as(self, other: _Segment) -> bool:
        return self.mechanism == other.mechanism and self.stream == other.stream

    def as_dict(self) -> dict[str, Any]:
        fields = {"stream": self.stream, "start": self.start, "stop": self.stop}
        return {"mechanism": self.mechanism.as_dict(), "fingerprint": self.mechanism.fingerprint, **fields}


class Ledger:
    """Which mechanisms ran for which rounds, at one delta. Its `state` is JSON, to be stored before the rounds run.

    Args:
      delta: in (0, 1), at which epsilon is stated.

    Guarantees: whatever crashes and resumes, it never holds fewer rounds than ran, and exactly those if nothing crashed
    (tests/privacy/test_ledger.py::test_never_under_reports_after_crashes); a mechanism that changes composes
    (::test_a_changed_mechanism_composes); broken states are refused (::test_broken_states_are_refused).

    >>> made = Mechanism(noise_multiplier=1.0, scheme="full", population_size=100, cohort_size=100, num_slots=100)
    >>> ledger = Ledger(1e-5)
    >>> ledger.enter(made, 0, 10)
    >>> ledger.enter(made, 5, 12)  # it had died, and went on from round 5
    >>> ledger.rounds, Ledger.from_state(ledger.state()).rounds
    (12, 12)
    """

    def __init__(self, delta: float, _segments: tuple[_Segment, ...] = ()) -> None:
        validate.in_range("delta", delta, 0, 1, open_low=True, open_high=True)
        self.delta = float(delta)
        self._segments = _segments

    @property
    def rounds(self) -> int:
        """The number of rounds entered; those that were released twice count twice."""
        return sum(segment.stop - segment.start for segment in self._segments)

    @property
    def stop(self) -> int:
        """One past the last round entered; 0 if none was."""
        return max((segment.stop for segment in self._segments), default=0)

    def enter(self, mechanism: Mechanism, start: int, stop: int, *, stream: str = "") -> None:
        """Rounds start, ..., stop - 1 are about to run: enter them, store `state`, then run.

        Args:
          stream: names all else that decides the noise, such as the seed; another one is another release.

        Raises: ValueError, TypeError for rounds out of order or skipped, and for a mechanism whose unit or adjacency
        differs from the one before: no one epsilon would hold.
        """
        validate.integer("start", start, 0, MAX_ROUNDS)
        validate.integer("stop", stop, start, MAX_ROUNDS)
        if start == stop:
            return
        new = _Segment(mechanism, stream, start, stop)
        if self._segments:
            last = self._segments[-1]
            if start > last.stop:
                hint = "Rounds between them ran without being entered."
                validate.fail("start", f"a round up to {last.stop}", start, hint)
            compose([(last.mechanism, 0), (mechanism, 0)], self.delta)  # refuses what does not compose
            if last.same_as(new) and start >= last.start:
                joined = dataclasses.replace(last, stop=max(last.stop, stop))
                self._segments = (*self._segments[:-1], joined)
                return
        self._segments = (*self._segments, new)

    def spent(self, through: int | None = None) -> PrivacySpent | None:
        """What all entered rounds have spent, or all before round `through`; None if nothing was entered.

        Rounds that only an earlier mechanism or stream ran are counted in full.
        """
        segments = self._segments
        if through is not None and segments and through < segments[-1].stop:
            last = segments[-1]
            segments = (*segments[:-1], dataclasses.replace(last, stop=max(last.start, through)))
        return _spent(segments, self.delta) if segments else None

    def of_members(self, delta: float) -> Ledger | None:
        """The same rounds as they concern one client under a federation, at a delta of its own; None where some
        mechanism's clients are no federations.

        Guarantees: tests/privacy/test_levels.py::test_a_run_states_both.
        """
        inside = [(segment, segment.mechanism.of_members()) for segment in self._segments]
        if any(mechanism is None for _, mechanism in inside):
            return None
        return Ledger(delta, tuple(dataclasses.replace(segment, mechanism=made) for segment, made in inside))

    def state(self) -> dict[str, Any]:
        """As JSON."""
        segments = [segment.as_dict() for segment in self._segments]
        return {"version": VERSION, "delta": self.delta, "segments": segments}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """From JSON, every field of which is checked."""
        wanted = {"version", "delta", "segments"}
        if not isinstance(state, Mapping) or set(state) != wanted or state["version"] != VERSION:
            validate.fail("ledger", f"an object of version {VERSION} with {sorted(wanted)}", state)
        if not isinstance(state["segments"], list):
            validate.fail("ledger.segments", "a list", state["segments"], error=TypeError)
        return cls(state["delta"], tuple(_segment(fields) for fields in state["segments"]))

    def merged(self, other: Ledger) -> Ledger:
        """With another copy of the same run's ledger, such as an older checkpoint's: the one that holds more.

        Where neither is the beginning of the other, what only one of them has is counted as well.

        Raises: ValueError for ledgers at different deltas.
        """
        if other.delta != self.delta:
            validate.fail("ledger.delta", f"{self.delta:g}", other.delta, "An epsilon is stated at one delta.")
        mine, theirs, kept = list(self._segments), list(other._segments), []
        while mine and theirs and mine[0].same_as(theirs[0]) and mine[0].start == theirs[0].start:
            stop = max(mine[0].stop, theirs[0].stop)
            kept.append(dataclasses.replace(mine[0], stop=stop))
            ended = mine[0].stop != theirs[0].stop
            mine, theirs = mine[1:], theirs[1:]
            if ended:
                break
        return Ledger(self.delta, (*kept, *mine, *theirs))


def _segment(fields: Any) -> _Segment:
    wanted = {"mechanism", "fingerprint", "stream", "start", "stop"}
    if not isinstance(fields, Mapping) or set(fields) != wanted:
        validate.fail("ledger.segments", f"objects with {sorted(wanted)}", fields)
    mechanism = Mechanism.from_dict(fields["mechanism"])
    if mechanism.fingerprint != fields["fingerprint"]:
        hint = "The mechanism was changed in the file, or by another version of fedjax_sim."
        validate.fail("ledger.fingerprint", mechanism.fingerprint, fields["fingerprint"], hint)
    validate.integer("ledger.start", fields["start"], 0, MAX_ROUNDS)
    validate.integer("ledger.stop", fields["stop"], fields["start"] + 1, MAX_ROUNDS)
    if not isinstance(fields["stream"], str):
        validate.fail("ledger.stream", "a string", fields["stream"], error=TypeError)
    return _Segment(mechanism, fields["stream"], fields["start"], fields["stop"])


@functools.lru_cache(maxsize=64)
def _spent(segments: tuple[_Segment, ...], delta: float) -> PrivacySpent:
    return compose([(segment.mechanism, segment.stop - segment.start) for segment in segments], delta)
