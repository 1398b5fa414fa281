"""Successive halving: all combinations of a sweep run for few rounds, and the best of them for more and more rounds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim import validate
from fedjax_sim.config.document import Config
from fedjax_sim.sweeps.config import Halving, SweepConfig, run_sweep
from fedjax_sim.sweeps.finished import POINTS
from fedjax_sim.sweeps.results import Sweep


class Rung(NamedTuple):
    """What ran for the same number of rounds."""

    num_rounds: int
    result: Sweep
    kept: list[dict[str, Any]]  # combinations that ran on, the best first; at the last rung the best one


def halving_rounds(num_combinations: int, num_rounds: int, factor: int) -> list[int]:
    """Returns the rounds of each rung: the last has all rounds, and each earlier one a `factor`-th of the next.

    There are as many rungs as the combinations can be divided by the factor, and each has at least one round more than
    the one before.

    >>> halving_rounds(9, 90, 3), halving_rounds(8, 100, 2), halving_rounds(27, 4, 3), halving_rounds(1, 5, 3)
    ([10, 30, 90], [12, 25, 50, 100], [1, 4], [5])
    """
    num_rungs = 1
    while factor**num_rungs <= num_combinations:
        num_rungs += 1
    rounds = [num_rounds // factor ** (num_rungs - 1 - rung) for rung in range(num_rungs)]
    return sorted({number for number in rounds if number >= 1})


def survivors(result: Sweep, halving: Halving) -> list[dict[str, Any]]:
    """Returns the combinations of a rung that run on, the best first: one in `factor`, rounded up.

    The mean over seeds decides. A combination of which a seed diverged comes last.

    >>> rows = [{"seed": 0, "round": 1, "a": a, "loss": a} for a in (3.0, 1.0, 2.0)]
    >>> survivors(Sweep(rows, ("a",), [0], 1, True), Halving("loss", "lowest", 2))
    [{'a': 1.0}, {'a': 2.0}]
    """
    sign = 1.0 if halving.best == "lowest" else -1.0
    cells = result.summary(halving.metric)
    cells.sort(key=lambda cell: sign * cell["mean"] if math.isfinite(cell["mean"]) else math.inf)
    kept = cells[: -(-len(cells) // halving.factor)]
    return [{name: cell[name] for name in result.names} for cell in kept]


def run_halving(
    loaded: SweepConfig, directory: str | Path | None = None, *, resume: bool = False, progress: bool = False
) -> list[Rung]:
    """Runs a sweep with `[sweep.halving]`: rungs with more and more rounds for fewer and fewer combinations.

    Each rung is a sweep like others, in a folder of its own, `rung-1`, `rung-2`, ... It begins anew: with a factor of 3
    that costs at most half again as many rounds as going on would. The winner was chosen by the metric on which it is
    reported, so its mean is likely too good: report it on other seeds.

    Args:
      loaded: as `load_sweep` returns it, with a `halving`.
      directory: where the rungs are written; None to write none.
      resume: continue in `directory`.
      progress: show a bar for each rung.

    Raises: those of `run_sweep`; ValueError for a metric that rows do not have.

    Guarantees: the rows of each rung are those of `run_sweep` over its combinations, and a resume does no rung again
    (tests/sweeps/test_halving.py::test_rungs_are_sweeps).
    """
    halving = loaded.halving
    if halving is None:
        validate.fail("loaded", "a sweep with [sweep.halving]", "none")
    total_rounds = loaded.configs[0].resolved()["run"]["rounds"]
    rungs: list[Rung] = []
    remaining = loaded
    for number, num_rounds in enumerate(halving_rounds(len(loaded.configs), total_rounds, halving.factor), 1):
        folder = None if directory is None else Path(directory) / f"rung-{number}"
        has_begun = folder is not None and any(folder.glob(f"**/{POINTS}"))
        result = run_sweep(
            _with_rounds(remaining, num_rounds),
            folder,
            resume=resume and has_begun,
            progress=progress,
            metric=halving.metric,
        )
        kept = survivors(result, halving)
        is_last = num_rounds == total_rounds
        rungs.append(Rung(num_rounds, result, kept[:1] if is_last else kept))
        remaining = remaining.only(kept)
    return rungs


def _with_rounds(loaded: SweepConfig, num_rounds: int) -> SweepConfig:
    """Returns the sweep with another number of rounds."""
    configs = []
    for config in loaded.configs:
        tables = config.resolved()
        tables["run"]["rounds"] = num_rounds
        configs.append(Config(tables))
    return loaded._replace(configs=configs)
