"""`fedjax-sim run`, alone or as several processes, and what it leaves behind."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from experiments.benchmarks.processes import ROOT


class Unavailable(RuntimeError):
    """The command does not run here; the text is the reason."""


class Trained(NamedTuple):
    """A finished run."""

    metrics: bytes  # metrics.jsonl
    seconds: list[tuple[int, float]]  # (round, seconds of rounds until then), from timing.jsonl
    summary: dict
    first_round_seconds: float  # from the start of the process until the first round was in the log
    inside_seconds: float  # of those, from the call of `run` on
    began: float  # the start of the process, on the clock of `time.perf_counter`


@contextmanager
def _held(cores: set[int] | None) -> Iterator[None]:
    """This thread on some cores only, where the system can do that."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def small_job(*, rounds: int, cohort: int) -> list[str]:
    """Settings of a job whose data are made in an instant."""
    values = {
        "data.num_clients": 2000, "sampler.cohort_size": cohort, "run.rounds": rounds,
        "run.evaluate_every": max(rounds // 2, 1), "data.max_examples": 40,
    }  # fmt: skip
    return [f"{name}={value}" for name, value in values.items()]


def train(
    settings: list[str], *, processes: int = 1, devices: int | None = None, environment: dict[str, str] | None = None,
    cores: set[int] | None = None, timeout: float = 300, module: str = "fedjax_sim",
) -> Trained:  # fmt: skip
    """Runs the command line to its end, as a user starts it: Python may keep the bytecode of what it imports.

    Args:
      settings: a.b=c overrides of the default config.
      processes: 2 and more go through `fedjax-sim launch -n`.
      devices: virtual CPU devices of each process.
      cores: that the run may use; all by default.
      module: what Python runs; a module that calls the command line's `main` may note more.
    Raises: Unavailable where the command fails, with the end of its output.
    """
    held = {} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    variables = os.environ | held | (environment or {})
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "run"
        job = ["run", "--quiet", "--out", str(out), *(x for setting in settings for x in ("--set", setting))]
        prefix = [] if processes == 1 else ["launch", "-n", str(processes), "--"]
        began = time.perf_counter()
        with _held(cores):  # the child inherits it
            process = subprocess.Popen(
                [sys.executable, "-m", module, *prefix, *job], cwd=ROOT, env=variables,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        log, first = out / "metrics.jsonl", None
        while process.poll() is None:
            if first is None and log.is_file() and log.read_bytes().count(b"\n") > 1:  # after the record of round 0
                first = time.perf_counter() - began
            if time.perf_counter() - began > timeout:
                process.kill()
            time.sleep(0.002 if first is None else 0.05)
        output = process.stdout.read()
        process.stdout.close()
        if process.returncode or not log.is_file():
            words = " ".join(output.split())[-300:].replace(str(ROOT), ".").replace(folder, "OUT")
            raise Unavailable(f"`fedjax-sim {' '.join([*prefix, 'run'])}` ended with {process.returncode}: {words}")
        timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
        timing = [line for line in timing if line["round"]]
        return Trained(
            metrics=log.read_bytes(),
            seconds=[(line["round"], line["seconds"]) for line in timing],
            summary=json.loads((out / "summary.json").read_text()),
            first_round_seconds=first or time.perf_counter() - began,
            inside_seconds=timing[0]["elapsed_seconds"],
            began=began,
        )
