"""Keeps the points of a sweep that is a part of a study beside the study's other results."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_sim.running import kept_results
from fedjax_sim.running.files import CheckpointError
from fedjax_sim.running.fingerprint import array_digest
from fedjax_sim.sweeps.finished import POINTS
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.sweep import sweep
from fedjax_sim.types import Population, PyTree


def kept_sweep(
    make: Callable, params: PyTree | Callable, population: Population, num_rounds: int, *,
    grid: Mapping[str, Sequence], seeds: Sequence[int], **options: Any,
) -> Sweep:  # fmt: skip
    """Runs a sweep as `sweeps.sweep` does; inside of `kept_results.keeping`, points that are finished are kept.

    Points of other code or versions are refused by the sweep, and are then run again.

    Args:
      make, params, population, num_rounds, grid, seeds, options: as for `sweep`.
    """
    kept = kept_results.current_results()
    arguments = {"grid": grid, "seeds": seeds, **options}
    if kept is None:
        return sweep(make, params, population, num_rounds, **arguments)
    words = [array_digest(population), num_rounds, list(seeds), json.dumps({name: list(x) for name, x in grid.items()})]
    folder = kept.folder / f"sweep-{hashlib.sha256(repr(words).encode()).hexdigest()[:16]}"
    if (folder / POINTS).exists():
        try:
            result = sweep(make, params, population, num_rounds, directory=folder, resume=True, **arguments)
            kept.used.add(folder.name)
            return result
        except CheckpointError:
            shutil.rmtree(folder)  # points of other code or versions, or damaged ones
    kept.num_computed += 1
    return sweep(make, params, population, num_rounds, directory=folder, **arguments)
