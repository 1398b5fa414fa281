"""A ledger that never under-reports, whatever crashes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from fedjax_sim.privacy import Ledger, Mechanism, account, compose

SIZES = {"scheme": "full", "population_size": 100, "cohort_size": 100, "num_slots": 100}
ONE, TWO = (Mechanism(noise_multiplier=z, **SIZES) for z in (10.0, 20.0))


def stored(ledger):
    """As it comes back from a file."""
    return Ledger.from_state(json.loads(json.dumps(ledger.state())))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 4),  # rounds entered at once
            st.integers(0, 4),  # of which so many run before it dies, if it does
            st.booleans(),  # it dies
            st.integers(0, 6),  # rounds behind of the checkpoint it resumes from
            st.booleans(),  # and then goes on with the other mechanism
        ),
        max_size=12,
    )
)
def test_never_under_reports_after_crashes(steps):
    """Catches rounds that are entered after they ran, a resume that forgets them, and a change that overwrites."""
    ledger, mechanism, at = Ledger(1e-5), ONE, 0
    released: set[tuple] = set()  # (mechanism, start of its life, round): what an observer may have seen
    life, died, saved = 0, False, [(0, stored(ledger))]
    for chunk, ran, dies, behind, changes in steps:
        ledger.enter(mechanism, at, at + chunk)
        disk = stored(ledger)
        done = min(ran, chunk) if dies else chunk
        released |= {(mechanism, life, r) for r in range(at, at + done)}
        at += done
        saved.append((at, disk))
        if dies:
            died = True
            candidates = [x for x in saved if x[0] <= at]
            at, old = candidates[max(0, len(candidates) - 1 - behind)]
            saved = [x for x in saved if x[0] <= at]
            ledger = stored(old).merged(disk)
            if changes:
                mechanism, life = (TWO if mechanism is ONE else ONE), life + 1
    held = ledger.state()["segments"]
    for own in (ONE, TWO):
        entered = sum(x["stop"] - x["start"] for x in held if x["fingerprint"] == own.fingerprint)
        assert entered >= sum(1 for m, _, _ in released if m is own)
    if not died:
        assert ledger.rounds == len(released)


def test_repeated_rounds_count_once():
    """Catches a resume that charges the rounds that it repeats, bit for bit, a second time."""
    ledger = Ledger(1e-5)
    ledger.enter(ONE, 0, 10, stream="seed 1")
    old = stored(ledger)
    ledger.enter(ONE, 10, 20, stream="seed 1")
    resumed = old.merged(stored(ledger))
    resumed.enter(ONE, 10, 15, stream="seed 1")
    assert resumed.rounds == 20 and resumed.spent() == account(ONE, 20, 1e-5)
    assert resumed.spent(through=12) == account(ONE, 12, 1e-5)
    resumed.enter(ONE, 15, 20, stream="seed 2")
    assert resumed.rounds == 25  # another seed is another release
    assert Ledger(1e-5).spent() is None


def test_a_changed_mechanism_composes():
    """Catches a change of noise that is charged for the whole run, or not at all."""
    ledger = Ledger(1e-5)
    ledger.enter(ONE, 0, 10)
    ledger.enter(TWO, 8, 20)
    assert ledger.spent().epsilon == compose([(ONE, 10), (TWO, 12)], 1e-5).epsilon
    assert ledger.spent(through=10).epsilon == compose([(ONE, 10), (TWO, 2)], 1e-5).epsilon
    ledger.enter(ONE, 20, 21)
    assert ledger.rounds == 23 and stored(ledger).spent() == ledger.spent()
    other = Mechanism(noise_multiplier=10.0, adjacency="replace_one", **SIZES)
    with pytest.raises(ValueError, match="adjacency"):
        ledger.enter(other, 21, 22)
    assert ledger.rounds == 23


def test_ledgers_that_differ_are_added():
    """Catches a merge that keeps one of two histories."""
    left, right = Ledger(1e-5), Ledger(1e-5)
    left.enter(ONE, 0, 5)
    left.enter(TWO, 5, 8)
    right.enter(ONE, 0, 7)
    assert left.merged(right).rounds == right.merged(left).rounds == 10
    with pytest.raises(ValueError, match="delta"):
        left.merged(Ledger(1e-6))


def test_rounds_in_order():
    """Catches rounds that ran without being entered."""
    ledger = Ledger(1e-5)
    ledger.enter(ONE, 0, 5)
    with pytest.raises(ValueError, match="without being entered"):
        ledger.enter(ONE, 6, 7)
    with pytest.raises(ValueError, match="stop"):
        ledger.enter(ONE, 5, 4)
    ledger.enter(ONE, 5, 5)
    assert ledger.rounds == 5


def test_broken_states_are_refused():
    """Catches a file that was edited or cut, and one of another version."""
    ledger = Ledger(1e-5)
    ledger.enter(ONE, 0, 5)
    good = ledger.state()
    (segment,) = good["segments"]
    quieter = {**segment, "mechanism": {**segment["mechanism"], "noise_multiplier": 99.0}}
    for state in (
        {**good, "version": 2},
        {**good, "delta": 0},
        {"version": 1},
        {**good, "segments": [{**segment, "stop": 0}]},
        {**good, "segments": [quieter]},
        {**good, "segments": [{"start": 0}]},
        [],
    ):
        with pytest.raises(ValueError):
            Ledger.from_state(state)
    for state in ({**good, "segments": "x"}, {**good, "segments": [{**segment, "stream": 1}]}):
        with pytest.raises(TypeError):
            Ledger.from_state(state)
