"""This module keeps a ledger of the privacy that a run has spent. It never under-reports, even after a crash.

Rounds are entered before they run. A run that dies and resumes from an older checkpoint repeats rounds that were
entered before. With the same mechanism and the same stream of noise, the repeated rounds are the same release, bit for
bit, and count once. With another mechanism or stream they are a second release, and count again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from fedjax_sim import validate
from fedjax_sim.privacy.accountant import MAX_ROUNDS, PrivacySpent, compose
from fedjax_sim.privacy.mechanism import Mechanism

VERSION = 1


@dataclasses.dataclass(frozen=True)
class _Segment:
    """The rounds start, ..., stop - 1, which ran under one mechanism and one stream of noise."""

    mechanism: Mechanism
    stream: str
    start: int
    stop: int

    def same_as(self, other: _Segment) -> bool:
        """Tells whether both segments would release the same values in the rounds that they share."""
        return self.mechanism == other.mechanism and self.stream == other.stream

    def as_dict(self) -> dict[str, Any]:
        fields = {"stream": self.stream, "start": self.start, "stop": self.stop}
        return {"mechanism": self.mechanism.as_dict(), "fingerprint": self.mechanism.fingerprint, **fields}


class Ledger:
    """A `Ledger` records which mechanisms ran for which rounds, at one delta.

    Store its `state`, which is JSON, before rounds run.

    Args:
      delta: in (0, 1), at which epsilon is stated.

    Guarantees: Whatever crashes and resumes happen, the ledger never holds fewer rounds than ran, and it holds exactly
    the rounds that ran if nothing crashed (tests/privacy/test_ledger.py::test_never_under_reports_after_crashes). A
    mechanism that changes is composed (::test_a_changed_mechanism_composes). Broken states are refused
    (::test_broken_states_are_refused).

    >>> mechanism = Mechanism(noise_multiplier=1.0, scheme="full", population_size=100, cohort_size=100, num_slots=100)
    >>> ledger = Ledger(1e-5)
    >>> ledger.enter(mechanism, 0, 10)
    >>> ledger.enter(mechanism, 5, 12)  # the run died and resumed from round 5: rounds 5 to 9 count once
    >>> ledger.rounds, Ledger.from_state(ledger.state()).rounds
    (12, 12)
    """

    def __init__(self, delta: float, _segments: tuple[_Segment, ...] = ()) -> None:
        validate.in_range("delta", delta, 0, 1, open_low=True, open_high=True)
        self.delta = float(delta)
        self._segments = _segments

    @property
    def rounds(self) -> int:
        """The number of entered rounds. Rounds that were released twice count twice."""
        return sum(segment.stop - segment.start for segment in self._segments)

    @property
    def stop(self) -> int:
        """One past the last entered round; 0 if no round was entered."""
        return max((segment.stop for segment in self._segments), default=0)

    def enter(self, mechanism: Mechanism, start: int, stop: int, *, stream: str = "") -> None:
        """Enters the rounds start, ..., stop - 1, which are about to run. Store `state` afterwards, and only then run.

        Args:
          mechanism: the mechanism of these rounds.
          start, stop: 0 <= start <= stop <= 10^8. `start` may lie before rounds that were entered, but may skip none.
          stream: a name for everything else that decides the noise, such as the seed. Another stream is another
            release.

        Raises: ValueError, TypeError for rounds out of order or skipped. Also for a mechanism whose unit or adjacency
        differs from that of the rounds before, because no single epsilon would hold.
        """
        validate.integer("start", start, 0, MAX_ROUNDS)
        validate.integer("stop", stop, start, MAX_ROUNDS)
        if start == stop:
            return
        new_segment = _Segment(mechanism, stream, start, stop)
        if self._segments:
            last_segment = self._segments[-1]
            if start > last_segment.stop:
                hint = "Rounds between them ran without being entered."
                validate.fail("start", f"a round up to {last_segment.stop}", start, hint)
            # Composition of no rounds costs nothing, and raises for mechanisms that do not compose.
            compose([(last_segment.mechanism, 0), (mechanism, 0)], self.delta)
            # Repeated rounds of the same release are covered by the last segment, which is extended only.
            if last_segment.same_as(new_segment) and start >= last_segment.start:
                extended_segment = dataclasses.replace(last_segment, stop=max(last_segment.stop, stop))
                self._segments = (*self._segments[:-1], extended_segment)
                return
        self._segments = (*self._segments, new_segment)

    def spent(self, through: int | None = None) -> PrivacySpent | None:
        """Computes the privacy that all entered rounds have spent, or all rounds before round `through`.

        Returns: `PrivacySpent`; None if nothing was entered.

        Rounds that only an earlier mechanism or stream ran are counted in full.
        """
        segments = self._segments
        if through is not None and segments and through < segments[-1].stop:
            last_segment = segments[-1]
            segments = (*segments[:-1], dataclasses.replace(last_segment, stop=max(last_segment.start, through)))
        return _spent(segments, self.delta) if segments else None

    def of_members(self, delta: float) -> Ledger | None:
        """Returns the same rounds as they concern one client under a federation, at a delta of its own.

        Returns: `Ledger`; None if the clients of some mechanism are not federations.

        Guarantees: A run states both epsilons (tests/privacy/test_levels.py::test_a_run_states_both).
        """
        member_mechanisms = [(segment, segment.mechanism.of_members()) for segment in self._segments]
        if any(mechanism is None for _, mechanism in member_mechanisms):
            return None
        return Ledger(
            delta, tuple(dataclasses.replace(segment, mechanism=mechanism) for segment, mechanism in member_mechanisms)
        )

    def state(self) -> dict[str, Any]:
        """Returns the ledger as JSON values."""
        segments = [segment.as_dict() for segment in self._segments]
        return {"version": VERSION, "delta": self.delta, "segments": segments}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """Restores a ledger from JSON values. Every field is checked.

        Raises: ValueError, TypeError for a state of another version, and for missing, additional or wrong fields.
        """
        expected_fields = {"version", "delta", "segments"}
        if not isinstance(state, Mapping) or set(state) != expected_fields or state["version"] != VERSION:
            validate.fail("ledger", f"an object of version {VERSION} with {sorted(expected_fields)}", state)
        if not isinstance(state["segments"], list):
            validate.fail("ledger.segments", "a list", state["segments"], error=TypeError)
        return cls(state["delta"], tuple(_segment_from(fields) for fields in state["segments"]))

    def merged(self, other: Ledger) -> Ledger:
        """Merges another copy of the same run's ledger, such as an older checkpoint's; the copy that holds more wins.

        If neither copy is the beginning of the other, the segments that only one of them has are counted as well.

        Args:
          other: at the same delta.

        Raises: ValueError for ledgers at different deltas.
        """
        if other.delta != self.delta:
            validate.fail("ledger.delta", f"{self.delta:g}", other.delta, "An epsilon is stated at one delta.")
        mine = list(self._segments)
        theirs = list(other._segments)
        shared = []
        # The common beginning counts once. It ends after the first segment that one copy has extended further, because
        # whatever follows in the other copy was released on its own.
        while mine and theirs and mine[0].same_as(theirs[0]) and mine[0].start == theirs[0].start:
            stop = max(mine[0].stop, theirs[0].stop)
            shared.append(dataclasses.replace(mine[0], stop=stop))
            lengths_differ = mine[0].stop != theirs[0].stop
            mine, theirs = mine[1:], theirs[1:]
            if lengths_differ:
                break
        return Ledger(self.delta, (*shared, *mine, *theirs))


def _segment_from(fields: Any) -> _Segment:
    """Restores a segment from JSON values, and checks that its mechanism has the fingerprint that was stored.

    Args:
      fields: what `_Segment.as_dict` wrote: an object with mechanism, fingerprint, stream, start and stop, where
        0 <= start < stop. Anything else is refused.
    """
    expected_fields = {"mechanism", "fingerprint", "stream", "start", "stop"}
    if not isinstance(fields, Mapping) or set(fields) != expected_fields:
        validate.fail("ledger.segments", f"objects with {sorted(expected_fields)}", fields)
    mechanism = Mechanism.from_dict(fields["mechanism"])
    # The fingerprint reveals a mechanism that was edited by hand, which would falsify what was spent.
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
    """Computes the privacy that segments have spent.

    The result is cached, because a progress line asks after every round.
    """
    return compose([(segment.mechanism, segment.stop - segment.start) for segment in segments], delta)
