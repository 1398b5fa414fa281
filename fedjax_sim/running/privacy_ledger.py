"""Keeps the privacy ledger of a run: it is written before rounds run, beside the log and in every checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from fedjax_sim import tree, validate
from fedjax_sim.files.regular_files import content_of, json_of
from fedjax_sim.round.costs import message_spec
from fedjax_sim.running import checkpoint, checksums, fingerprint
from fedjax_sim.running.processes import current
from fedjax_sim.types import Algorithm, Array, Population, PyTree

if TYPE_CHECKING:
    from fedjax_sim.privacy import Mechanism

LEDGER_FILE = "privacy.json"
MISSING_NOISE = "a message that should have had noise was missing: this is released without noise, so no epsilon holds."
ABORTED = "a secure sum was aborted: that too few clients were left is released without noise, so no epsilon holds."
UNKNOWN_PARTS = "The algorithm does not state its parts (`Algorithm.parts`), so nothing is known of its privacy."
OPAQUE_PROGRAM = (
    "The program calls the host, and what it computes there cannot be read: another program with this seed may share "
    "its noise, so this holds only if the seed was used for this run alone."
)
# Fields of a log that depend on the released models alone; any other field may depend on more.
COVERED = {"round", "epsilon"}
LEDGER_FIELDS = {"ledger", "stream", "void"}


def default_delta(num_units: int) -> float:
    """Returns n^-1.1 for n clients (or records, where these are hidden), at most 0.1.

    A useful delta is well below 1 / n: a mechanism that publishes one random client satisfies delta = 1 / n.

    >>> f"{default_delta(1_000_000):.2e}"
    '2.51e-07'
    """
    if not num_units >= 1:
        validate.fail("clients", "at least one", num_units)
    return min(float(num_units) ** -1.1, 0.1)


def message_dimension(algorithm: Algorithm, params: PyTree, population: Population) -> int:
    """Returns the number of values in a message: the model's dimension, or more where a client sends a pair."""
    star = algorithm.parts
    assert star is not None, "the algorithm states its parts"
    broadcast = jax.eval_shape(lambda params: star.server.broadcast(star.server.init(params)), params)
    return tree.num_values(message_spec(star, broadcast, population))


class Spending:
    """Accounts for the privacy that a run has spent.

    Rounds are entered, and the entry is on disk, before they run; a resume merges the ledgers of file and checkpoint.
    Rounds that a killed run repeats are the same release, bit for bit, and count once. They are recognised by the
    `stream` of their noise, to which the key is bound. A stream is a text of the fingerprints of every program, initial
    model and data set that the model went through. If noise cannot be accounted for, the run continues without an
    epsilon, and `refused` is the reason.

    Args:
      algorithm, params, population: the run's algorithm, initial model and clients; the algorithm's parts tell what is
        private.
      source: the run's `fingerprint`.
      delta: in (0, 1); by default `default_delta` of the number of units that are protected: clients, records, or
        federations. The statement for the clients under federations has the default for their number.
      directory: the folder of `privacy.json`; None to write no file.

    Guarantees:
      Whatever is killed, resumed and changed, epsilon is not below that of all rounds that ran, and no two releases
      share noise (tests/running/test_privacy_ledger.py::test_no_history_tells_less_than_the_truth,
      ::test_a_crash_is_counted, ::test_changed_runs_share_nothing).
      Epsilon is the accountant's, as computed by hand
      (tests/running/test_privacy_ledger.py::test_epsilon_is_the_accountants).
      There is no epsilon after a missing message with noise, or after rounds without a ledger
      (tests/running/test_privacy_ledger.py::test_missing_messages_void_it, ::test_what_no_ledger_saw_has_no_epsilon).
      A ledger that was deleted is an error (tests/running/test_privacy_ledger.py::test_a_crash_is_counted).
      Noise that no accountant covers gives no epsilon
      (tests/running/test_privacy_ledger.py::test_noise_in_any_part_is_seen).
      The statement of a program that cannot be read says so
      (tests/running/test_privacy_ledger.py::test_programs_that_call_the_host_share_nothing).
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: PyTree,
        population: Population,
        source: str,
        *,
        delta: float | None,
        directory: Path | None,
    ):
        self.mechanism: Mechanism | None = None
        self.void = ""
        self.member_delta = None  # if clients are federations: the delta of the statement for one client under them
        self.refused = UNKNOWN_PARTS if algorithm.parts is None else ""
        self.source = self.stream = source
        self.path = directory and directory / LEDGER_FILE
        self.private = fingerprint.is_private(algorithm)
        if delta is not None:
            validate.in_range("delta", delta, 0, 1, open_low=True, open_high=True)
        if not self.private:
            return
        from fedjax_sim import privacy  # imported here, because its libraries take a second

        # Noise that no accountant covers does not stop the run: it has no epsilon, and says why.
        try:
            dimension = message_dimension(algorithm, params, population)
            self.mechanism = privacy.mechanism_of(algorithm, dimension=dimension, population=population)
        except (TypeError, ValueError) as error:
            self.refused = str(error)
            return
        assert self.mechanism is not None, "noise was found in the parts"
        num_units = self.mechanism.num_units
        assert num_units is not None, "the number of clients under federations alone may be unknown"
        self.ledger = privacy.Ledger(default_delta(num_units) if delta is None else delta)
        members = self.mechanism.of_members()
        if members is not None:
            self.member_delta = default_delta(members.num_units or num_units) if delta is None else delta

    def key(self, key: Array) -> Array:
        """Returns a run's key, bound to its stream of noise; without noise, the key itself."""
        return fingerprint.bound(key, self.stream)

    def start(self) -> None:
        """Creates the file of a run with noise; from now on it is an error if the file is missing."""
        if self.private:
            self._write()

    def resume(self, saved: dict[str, Any] | None, first: int) -> None:
        """Continues from the ledgers in a checkpoint and in the file.

        Args:
          saved: the `state()` in the checkpoint; None if it has none.
          first: the round of the checkpoint.

        Raises: CheckpointError for a file that was deleted or damaged.
        """
        # The file may be ahead of the checkpoint: rounds are entered before they run.
        in_file = current().from_first(self._read)
        if in_file is None and saved is not None and saved["ledger"] is not None and self.path is not None:
            raise checkpoint.CheckpointError(
                f"{self.path}: expected the privacy ledger of this run, got no file: deleted. Rounds after the last "
                "checkpoint are recorded only there. Put it back from a copy, or start a new run, whose epsilon adds "
                "to that of this one."
            )
        states = [_checked(state) for state in (saved, in_file) if state is not None]
        if not states and not self.private:
            return None
        earlier_stream = "" if saved is None else saved["stream"]
        if self.source:
            # The program may have changed since the checkpoint: its rounds then belong to another stream.
            is_same = earlier_stream.rpartition(":")[2] == self.source
            self.stream = earlier_stream if is_same else f"{earlier_stream} {first}:{self.source}"
        self.void = next((state["void"] for state in states if state["void"]), "")
        if self.void:
            return None
        if not self.private:
            return self._end("earlier rounds of this run had noise, and these have none: no epsilon holds for both.")
        if saved is None or any(state["ledger"] is None for state in states):
            return self._end(f"the first {first} rounds ran without a ledger: what they released is unknown.")
        if self.mechanism is None:
            return self._end(self.refused)
        from fedjax_sim.privacy import Ledger

        # Rounds that both ledgers have are the same release, and count once.
        for state in states:
            self.ledger = self.ledger.merged(Ledger.from_state(state["ledger"]))
        # The killed run may have run rounds after the checkpoint, which now run again.
        if self.ledger.stop > first and fingerprint.is_opaque(self.source):
            rounds = f"rounds {first + 1} to {self.ledger.stop}"
            self._end(f"{rounds} ran before, and the program calls the host: whether they repeat exactly is unknown.")

    def _read(self) -> dict[str, Any] | None:
        """Returns the file's content; None if there never was a file."""
        if self.path is None or not (self.path.is_file() or checksums.is_listed(self.path)):
            return None
        checksums.check_files(self.path.parent, [LEDGER_FILE], needed=True)
        try:
            return _checked(json_of(content_of(self.path)))
        except (OSError, TypeError, ValueError, checkpoint.CheckpointError) as error:
            raise checkpoint.CheckpointError(f"{self.path}: expected a privacy ledger, got a damaged one.") from error

    def enter(self, start: int, stop: int) -> None:
        """Records that rounds start, ..., stop - 1 are about to run."""
        # On disk before the rounds run, so that a killed run cannot have spent more than its file says.
        if self.mechanism is not None and not self.void:
            self.ledger.enter(self.mechanism, start, stop, stream=self.stream)
            self._write()

    def observe(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Checks the records of rounds that have run, before they are logged."""
        missing = [record for record in records if self.misses(record)]
        if missing and not self.void:
            words = ABORTED if missing[0].get("aborted_rounds") else MISSING_NOISE
            self._end(f"in round {missing[0]['round']} {words}")

    def misses(self, counts: Mapping[str, Any]) -> bool:
        """Returns whether rounds with these counts lack a message that should have had noise.

        With distributed noise such rounds are counted as skipped; with local noise the clients are counted as dropped.
        An absent count means that a message is missing.
        """
        # Central noise is added at the server, whatever messages arrive.
        counters = {"distributed": "skipped_rounds", "local": "dropped_clients"}
        name = None if self.mechanism is None else counters.get(self.mechanism.place)
        return name is not None and counts.get(name, 1) > 0

    def _end(self, reason: str) -> None:
        """Voids the epsilon of this run from now on, also after a resume."""
        self.void = reason
        self._write()

    def _write(self) -> None:
        """Writes the file, if there is a folder."""
        if self.path is not None:
            checksums.write(self.path, (json.dumps(self.state(), indent=2) + "\n").encode())

    def state(self) -> dict[str, Any] | None:
        """Returns the ledger as JSON, for a checkpoint; None if there never was noise."""
        if not self.private and not self.void:
            return None
        ledger = None if self.mechanism is None else self.ledger.state()
        return {"ledger": ledger, "stream": self.stream, "void": self.void}

    def record(self, rounds: int) -> dict[str, float]:
        """Returns {"epsilon": spent by the first `rounds` rounds}, or {} without an epsilon."""
        if self.mechanism is None or self.void:
            return {}
        spent = self.ledger.spent(through=rounds)
        return {} if spent is None else {"epsilon": spent.epsilon}

    def summary(self, shown: Iterable[str] = ()) -> dict[str, Any]:
        """Returns what was spent, with all that it depends on, for a run's summary.

        Args:
          shown: the names of all fields that the run's log shows.

        Returns: {"privacy": statement, explanation and numbers}; the reason if there is no epsilon; {} without noise.
        """
        if self.void or self.refused:
            return {"privacy": {"refused": self.void or self.refused}}
        if self.mechanism is None or (spent := self.ledger.spent()) is None:
            return {}
        from fedjax_sim.privacy import explain

        of_members = None if self.member_delta is None else self.ledger.of_members(self.member_delta)
        spent_of_members = None if of_members is None else of_members.spent()
        all_spent = [spent] if spent_of_members is None else [spent, spent_of_members]
        statements = [str(one_spent) for one_spent in all_spent]
        lines = [explain(one_spent) for one_spent in all_spent]
        if fingerprint.is_opaque(self.source):
            statements.append("the program calls the host: a seed for this run alone")
            lines.append(f"- {OPAQUE_PROGRAM}")
        uncovered = sorted(set(shown) - COVERED)
        if uncovered:
            lines.append(f"- Not covered, and shown by the log of this run: {', '.join(uncovered)}.")
        texts = {"explanation": "\n".join(lines), "uncovered": uncovered}
        if spent_of_members is not None:
            texts["members"] = spent_of_members.as_dict()
        return {"privacy": {"statement": "; ".join(statements), **spent.as_dict(), **texts}}


def _checked(state: Any) -> dict[str, Any]:
    """Returns the state of a `Spending`, after checking its fields.

    Args:
      state: what `Spending.state` returned, read back from JSON: {"ledger", "stream", "void"}. The ledger is None where
        no accountant covers the noise.

    Raises: CheckpointError, TypeError or ValueError for a state with other fields, or with other kinds of values.
    """
    from fedjax_sim.privacy import Ledger

    if not isinstance(state, dict) or set(state) != LEDGER_FIELDS:
        raise checkpoint.CheckpointError("expected a privacy ledger of this version of fedjax_sim, got another one.")
    for name in ("stream", "void"):
        if not isinstance(state[name], str):
            validate.fail(name, "a text", state[name], error=TypeError)
    if state["ledger"] is not None:
        Ledger.from_state(state["ledger"])
    return state
