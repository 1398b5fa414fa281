"""Checks the arguments of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from fedjax_sim import validate
from fedjax_sim.running.arguments import check_kinds
from fedjax_sim.running.processes import current
from fedjax_sim.sweeps.finished import check_directory
from fedjax_sim.types import Algorithm, Array, Population
from fedjax_sim.validate import PositiveInt


@validate.named_arguments
def check_sweep_numbers(
    num_rounds: PositiveInt, evaluate_every: PositiveInt, batch: PositiveInt, directory: str | Path | None, resume: bool
) -> None:
    """Checks the numbers of a sweep, and its folder.

    Raises: ValueError or TypeError for numbers out of range, FileExistsError or FileNotFoundError for the folder.
    """
    if resume and directory is None:
        validate.fail("directory", "the folder of the sweep to resume", None)
    check_directory(directory, resume)


def check_run(key: Array, algorithm: Algorithm, population: Population, evaluation: Callable | None) -> None:
    """Raises ValueError or TypeError for a run that a sweep cannot make.

    A sweep cannot run in several processes.
    """
    if current().several:
        validate.fail("sweep", "one process", jax.process_count(), "Its points are divided over one process's devices.")
    check_kinds(key, algorithm, population, evaluation, ())
