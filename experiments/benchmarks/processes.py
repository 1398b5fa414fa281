"""Processes with another number of devices, or a memory of their own, that serve calls by name.

A worker's function prepares its data once and returns named functions; the parent calls these by name, so that several
workers take turns (A, B, C, A, B, C, ...) and none works while another one is timed.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Worker:
    """One process that holds what `module.function(**arguments)` returned: a dict of functions.

    Args:
      function: a module-level function, found by its name.
      devices: virtual CPU devices; None for one per core, as the command line has.
      environment: further variables.
    """

    def __init__(
        self, function: Callable, arguments: dict | None = None, *, devices: int | None = None,
        environment: dict[str, str] | None = None,
    ):  # fmt: skip
        variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | dict(os.environ)  # several may share an accelerator
        if devices is not None:
            variables |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        what = json.dumps([function.__module__, function.__name__, arguments or {}])
        command = [sys.executable, "-m", __name__, what]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=variables | (environment or {}), **pipes)
        self._name = function.__name__

    def call(self, name: str = "run") -> Any:
        """What the worker's function of that name returns, through JSON."""
        try:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"{self._name}: the worker ended with code {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def workers(**starts: dict) -> Iterator[dict[str, Worker]]:
    """Named workers, started one after the other and ended together; each value holds `Worker`'s arguments."""
    with ExitStack() as stack:
        made = {}
        for name, start in starts.items():
            made[name] = Worker(**start)
            stack.callback(made[name].close)
        yield made


def once(function: Callable, arguments: dict | None = None, name: str = "run", **options: Any) -> Any:
    """One answer of a fresh process."""
    with workers(it={"function": function, "arguments": arguments, **options}) as made:
        return made["it"].call(name)


def peak_memory_bytes() -> int:
    """The most memory that this process has held."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _serve(module: str, function: str, arguments: dict) -> None:
    from fedjax_sim.running.environment import prepare

    prepare()
    out, sys.stdout = sys.stdout, sys.stderr  # what the work prints does not belong between the answers
    functions = getattr(importlib.import_module(module), function)(**arguments)
    for line in sys.stdin:
        print(json.dumps(functions[line.strip()]()), file=out, flush=True)


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
