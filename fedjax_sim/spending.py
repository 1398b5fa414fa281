"""The privacy ledger of a run: entered before rounds run, kept beside the log and in every checkpoint."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim import checkpoint, distributed, tree, validate
from fedjax_sim.types import Algorithm, Array, Population, PyTree

__all__ = ["Spending", "default_delta", "letter_dimension"]

FILE = "privacy.json"


def default_delta(num_units: int) -> float:
    """n^-1.1 for n clients (records, where those are hidden): below 1 / n, as a delta must be to mean anything.

    >>> f"{default_delta(1_000_000):.2e}"
    '2.51e-07'
    """
    if not num_units >= 1:
        validate.fail("clients", "at least one", num_units)
    return min(float(num_units) ** -1.1, 0.1)


def letter_dimension(algorithm: Algorithm, params: PyTree, population: Population) -> int:
    """Numbers in one letter: those of the model, or more where a client sends a pair; nothing is computed."""

    def letter(params, population):
        client, server = algorithm.parts["client"], algorithm.parts["server"]
        broadcast = server.broadcast(server.init(params))
        data = population.client(jnp.zeros((), jnp.int32))
        return client.apply(jax.random.key(0), broadcast, client.init(broadcast), data)[0].update

    return tree.num_values(jax.eval_shape(letter, params, population))


class Spending:
    """What a run spends of its clients' privacy.

    Rounds are entered, and the entry is on disk, before they run; a resume counts what the file and the checkpoint
    hold together. Rounds that a killed run repeats are the same release, bit for bit, and count once. Where noise
    cannot be accounted for, the run goes on without an epsilon, and `refused` says why.

    Args:
      algorithm, params, population: of the run; what is private is read from the algorithm's parts.
      identity: of the run, its key in it: with another one, a round that is repeated is another release.
      delta: in (0, 1); by default `default_delta` of the clients, or records.
      directory: where `privacy.json` goes; None for nowhere.

    Guarantees: a killed run never reports less than its rounds spent (tests/test_spending.py::test_a_crash_is_counted);
    epsilon is that of the accountant by hand (::test_epsilon_is_the_accountants).
    """

    def __init__(
        self,
        algorithm: Algorithm,
        params: PyTree,
        population: Population,
        identity: dict,
        delta: float | None,
        directory: Path | None,
    ):
        self.mechanism, self.refused, self.path = None, "", directory and directory / FILE
        words = json.dumps(identity, sort_keys=True).encode()
        self.stream = hashlib.sha256(words).hexdigest()[:16]
        if delta is not None:
            validate.in_range("delta", delta, 0, 1, open_low=True, open_high=True)
        if not any(getattr(part, "noise", None) for part in algorithm.parts.values()):
            return
        from fedjax_sim import privacy  # the desk's libraries take a second

        try:
            self.mechanism = privacy.mechanism_of(algorithm, dimension=letter_dimension(algorithm, params, population))
        except (TypeError, ValueError) as error:
            self.refused = str(error)
            return
        self.ledger = privacy.Ledger(default_delta(self.mechanism.num_units) if delta is None else delta)

    def resume(self, saved: dict[str, Any] | None, first: int) -> None:
        """Takes over what a checkpoint of round `first` and the file hold."""
        found = [state for state in (saved, distributed.from_first(self._read)) if state is not None]
        if self.mechanism is None:
            if found and not self.refused:
                self.refused = "earlier rounds of this run had noise, and these have none: no epsilon holds for both."
            return
        from fedjax_sim.privacy import Ledger

        for state in found:
            self.ledger = self.ledger.merged(Ledger.from_state(state))
        if first and not self.ledger.rounds:
            self.mechanism = None
            self.refused = f"the first {first} rounds ran without a ledger: nobody knows what they released."

    def _read(self) -> dict[str, Any] | None:
        """What the file holds."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            from fedjax_sim.privacy import Ledger

            ledger = json.loads(self.path.read_bytes())["ledger"]
            Ledger.from_state(ledger)  # an empty one would be passed over
            return ledger
        except (KeyError, TypeError, ValueError) as error:
            raise checkpoint.CheckpointError(f"{self.path}: expected a privacy ledger, got a damaged one.") from error

    def enter(self, start: int, stop: int) -> None:
        """Rounds start, ..., stop - 1 are about to run."""
        if self.mechanism is None:
            return
        self.ledger.enter(self.mechanism, start, stop, stream=self.stream)
        if self.path is not None:
            text = json.dumps({"ledger": self.ledger.state()}, indent=2) + "\n"
            checkpoint.write_atomically(self.path, [text.encode()])

    def state(self) -> dict[str, Any] | None:
        """The ledger as JSON, for a checkpoint."""
        return None if self.mechanism is None else self.ledger.state()

    def record(self, rounds: int) -> dict[str, Array]:
        """{"epsilon": spent by the first `rounds` rounds}, or nothing."""
        return {} if self.mechanism is None else {"epsilon": self.ledger.spent(through=rounds).epsilon}

    def summary(self) -> dict[str, Any]:
        """What was spent, with all that it depends on, for a run's summary."""
        if self.refused:
            return {"privacy": {"refused": self.refused}}
        if self.mechanism is None or not self.ledger.rounds:
            return {}
        from fedjax_sim.privacy import explain

        spent = self.ledger.spent()
        return {"privacy": {"statement": str(spent), **spent.as_dict(), "explanation": explain(spent)}}
