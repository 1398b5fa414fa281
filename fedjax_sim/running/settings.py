"""Groups the arguments of `run` by what they are about: its functions pass five records instead of twenty values.

What each argument means is in the docstring of `running.loop.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_sim.running.loggers import Logger
from fedjax_sim.types import Algorithm, Array, PyTree


class Training(NamedTuple):
    """What is trained. The clients are not here, since a session has them in arrays of its own."""

    key: Array  # the only source of randomness
    algorithm: Algorithm
    params: PyTree  # the initial model


class Judging(NamedTuple):
    """How a model is judged while it is trained."""

    evaluation: Callable | None  # params, or (params, state) -> numbers by name; None for no values
    evaluate_every: int  # rounds from one evaluation to the next, >= 1


class Stopping(NamedTuple):
    """When a run ends."""

    num_rounds: int  # T >= 0, counted from the start, also after a resume
    callbacks: Sequence[Callable]  # (round, state, record) -> whether the run stops, called when an evaluation is due


class Keeping(NamedTuple):
    """What a run writes, and where it keeps what its clients remember."""

    directory: str | Path | None  # None to write no files
    checkpoint_every: int | None  # rounds from one checkpoint to the next; None for one after each evaluation
    keep_checkpoints: int  # how many of the newest checkpoints stay, >= 1
    client_memory: str  # "device", "disk" or "auto"
    files: Mapping[str, str]  # texts by name, written once the run is certain to start or continue
    loggers: Sequence[Logger]  # they get every record too


class Resuming(NamedTuple):
    """Whether a run goes on from a checkpoint in its directory."""

    resume: bool
    allow_previous: bool  # whether it may go on from an earlier checkpoint if the newest is damaged
