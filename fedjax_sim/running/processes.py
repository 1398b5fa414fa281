"""The processes of a job: which of them this one is, and how they agree on decisions and errors.

Every process runs the same program; process 0 alone reads the config, writes files and prints. A decision that depends
on wall time, files or signals is made by one process and sent to all. Otherwise the processes would run different
collectives. A process on its own imports no JAX here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from fedjax_sim.running import seconds

T = TypeVar("T")
MARK = "reported_by"  # the attribute of an error that says which process reports it


class PeerFailed(RuntimeError):
    """Another process failed at a step that all processes take together; that process reports why."""

    code = 1  # the exit code of this process


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job, as one of them sees them. With one process, every method returns what it is given.

    >>> alone = Processes()
    >>> alone.is_first, alone.several, alone.from_first(lambda: 3)
    (True, False, 3)
    """

    index: int = 0  # of this process
    number: int = 1  # how many there are

    @property
    def several(self) -> bool:
        """Whether other processes work on this job."""
        return self.number > 1

    @property
    def is_first(self) -> bool:
        """Whether this process reads, writes and prints for the job."""
        return self.index == 0

    def gathered_numbers(self, *numbers: int) -> Any:
        """Gathers the numbers of every process: an int32 array [processes, numbers], the same on all of them."""
        import numpy as np

        own_numbers = np.array(numbers, np.int32)
        if not self.several:
            return own_numbers[None]
        from jax.experimental import multihost_utils

        with seconds.timed_part("waiting"):
            return np.asarray(multihost_utils.process_allgather(own_numbers)).reshape(-1, len(numbers))

    def agreed(self, call: Callable[[], T]) -> T:
        """Returns what `call` returns on this process; if it fails on one process, it fails on all.

        Args:
          call: takes nothing; all processes call it at the same point.

        Raises: the error of `call`; PeerFailed if only other processes have an error.
        """
        if not self.several:
            return call()
        failure: BaseException | None = None
        results: list[T] = []  # one, unless the call fails
        try:
            results.append(call())
        except BaseException as error:
            # Every kind of error is caught, since the others must learn of an interrupt too.
            failure = error
        # A collective: all processes meet here, whether their call failed or not.
        codes = self.gathered_numbers(0 if failure is None else exit_code(failure))[:, 0]
        if codes.any():
            first_to_fail = int(codes.nonzero()[0][0])
            if failure is None:
                failure = PeerFailed(f"process {first_to_fail} failed; it reports why")
            _mark(failure, first_to_fail)
            if isinstance(failure, PeerFailed):
                failure.code = int(codes[first_to_fail])
            raise failure
        return results[0]

    def by_first(self, call: Callable[[], T]) -> T | None:
        """Returns what `call` returns on process 0, which alone runs it; returns None on the others.

        Raises: the error of `call` on process 0, and PeerFailed elsewhere.
        """
        return self.agreed(lambda: call() if self.is_first else None)

    def from_first(self, call: Callable[[], T]) -> T:
        """Returns on every process what `call` returns on process 0; the result must be a JSON value."""
        if not self.several:
            return call()
        import numpy as np
        from jax.experimental import multihost_utils

        value = self.by_first(call)
        text = json.dumps(value).encode() if self.is_first else b""
        # Collectives need equal shapes everywhere, so the length is sent before the text.
        size = int(self.gathered_numbers(len(text))[0, 0])
        sent = multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(size), np.uint8))
        # The others have None. So has process 0 if `call` returned it, which is sent as any other value.
        return json.loads(np.asarray(sent).tobytes()) if value is None else value

    def check_same(self, name: str, digest: str, hint: str) -> None:
        """Raises RuntimeError, on all processes, if they differ in something that must be the same.

        Args:
          name: what must be the same, for the error message.
          digest: its digest on this process, in hexadecimal.
          hint: what to do about a difference.
        """
        # Seven hexadecimal digits fit an int32.
        words = self.gathered_numbers(*(int(digest[i : i + 7], 16) for i in range(0, len(digest), 7)))
        differing_processes = [i for i, row in enumerate(words) if (row != words[0]).any()]
        if differing_processes:
            raise everywhere(
                RuntimeError(f"{name}: expected the same on all processes, got others on {differing_processes}. {hint}")
            )

    def reports(self, error: BaseException) -> bool:
        """Returns whether this process is the one that reports an error."""
        return not self.several or vars(error).get(MARK, self.index) == self.index

    def lost_peer(self, error: BaseException) -> bool:
        """Returns whether an error says that another process died."""
        words = ("Gloo", "NCCL", "coordination service", "heartbeat")
        return self.several and any(word in str(error) for word in words)

    def leave(self, error: BaseException) -> None:
        """Exits at once if this process failed alone.

        An orderly exit would wait for the other processes, which wait for this one in a collective.
        """
        if self.several and MARK not in vars(error):
            _exit(exit_code(error))


def current() -> Processes:
    """Returns the processes of this job, as JAX's runtime knows them; does not import or start JAX."""
    # JAX can be asked only if somebody else has imported it: a process without JAX is on its own.
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized():
        return Processes()
    return Processes(jax.process_index(), jax.process_count())


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error: 2 for wrong input, 130 for an interrupt, 1 for a run that failed."""
    if isinstance(error, PeerFailed):
        return error.code
    is_wrong_input = isinstance(error, (ValueError, TypeError, FileExistsError, FileNotFoundError))
    return 2 if is_wrong_input else 130 if isinstance(error, KeyboardInterrupt) else 1


def everywhere(error: BaseException) -> BaseException:
    """Marks an error as raised by all processes at the same place, so that process 0 alone reports it; returns it."""
    _mark(error, 0)
    return error


def _mark(error: BaseException, index: int) -> None:
    """Marks an error of any class as one that process `index` reports."""
    vars(error)[MARK] = index


def _exit(code: int) -> NoReturn:
    """Ends this process without JAX's own exit, which waits for the other processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
