"""How processes agree, seen from one of two whose peer is made up. Real ones are in test_distributed.py."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedjax_sim.running.processes import PeerFailed, Processes, everywhere, exit_code


@dataclasses.dataclass(frozen=True)
class Beside(Processes):
    """One of two processes; the other one gathers these numbers."""

    number: int = 2
    others: tuple[int, ...] = (0,)

    def gathered_numbers(self, *numbers):
        rows = [numbers, self.others]
        return np.array(rows[:: -1 if self.index else 1], np.int32)


def fail(error):
    raise error


def test_one_process_agrees_with_itself():
    """Fault: a process on its own that waits for others, or whose errors change."""
    alone = Processes()
    assert alone.is_first and not alone.several
    assert alone.agreed(lambda: 3) == alone.from_first(lambda: 3) == alone.by_first(lambda: 3) == 3
    assert alone.gathered_numbers(4, True).tolist() == [[4, 1]]
    alone.check_same("data", "ab" * 32, "")
    error = ValueError("x")
    with pytest.raises(ValueError) as raised:
        alone.agreed(lambda: fail(error))
    assert raised.value is error and alone.reports(error) and not alone.lost_peer(RuntimeError("Gloo"))
    alone.leave(error)  # an orderly exit


def test_an_error_of_one_is_an_error_of_all():
    """Fault: a process that goes on without the other, an error that both report, and an exit code that differs."""
    assert Beside().agreed(lambda: 3) == 3
    with pytest.raises(PeerFailed) as raised:
        Beside(others=(130,)).agreed(lambda: 3)
    assert exit_code(raised.value) == 130 and not Beside().reports(raised.value)
    with pytest.raises(KeyError) as raised:
        Beside().agreed(lambda: fail(KeyError("own")))
    assert Beside().reports(raised.value) and not Beside(index=1).reports(raised.value)


def test_only_the_first_runs_what_is_the_firsts():
    """Fault: a file that every process writes."""
    assert Beside().by_first(lambda: 3) == 3
    assert Beside(index=1).by_first(lambda: fail(AssertionError)) is None


def test_different_data_are_told_everywhere():
    """Fault: processes that train on other files, or each of which tells so."""
    digest = "0000001" * 9 + "1"
    same = tuple(int(digest[i : i + 7], 16) for i in range(0, 64, 7))
    Beside(others=same).check_same("data", digest, "")
    with pytest.raises(RuntimeError, match=r"data: .* got others on \[1\]\. Look") as raised:
        Beside(others=(*same[:-1], 2)).check_same("data", digest, "Look.")
    assert Beside().reports(raised.value) and not Beside(index=1).reports(raised.value)


def test_who_failed_alone_leaves_at_once(monkeypatch):
    """Fault: a process that waits for the others, which wait for it; or one that leaves while all fail together."""
    codes = []
    monkeypatch.setattr("os._exit", codes.append)
    Beside().leave(everywhere(ValueError("all")))
    assert codes == []
    Beside().leave(ValueError("own"))
    assert codes == [2]
