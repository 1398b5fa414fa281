"""Makes the rows of a sweep from what its programs return at the evaluated rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.running.arguments import num_arguments
from fedjax_sim.running.log import as_record, as_records, plain
from fedjax_sim.sweeps.results import OWN_MODELS


class Recorder:
    """Makes rows of what a program returns of its points, at each evaluated round.

    Args:
      evaluations: for each combination a function params -> dict of numbers, or (params, state) -> dict of numbers;
        None for none.
      metrics: the metrics that rows keep; None for all.
      combinations, seeds: of the sweep; point p has combination p // S and seed p % S, for S seeds.
      epsilons: for each combination, an object whose `record(round, counts)` gives the privacy entries.
      needed: metrics that rows must have.
    """

    def __init__(
        self,
        evaluations: Sequence[Callable | None],
        *,
        metrics: Sequence[str] | None,
        combinations: list,
        seeds: list,
        epsilons: list,
        needed: Sequence[str],
    ):
        self.evaluations = evaluations
        self.metrics = metrics
        self.epsilons = epsilons
        self.needed = needed
        self.combinations = combinations
        self.seeds = seeds

    def rows(self, points: list[int], looks: Iterable) -> dict[int, list[dict]]:
        """Returns, by point, a row for each evaluated round.

        Args:
          points: numbers of the points, in the order of the results' rows.
          looks: (round, (infos of that round, counts since the look before, params, states)), in ascending order of
            rounds.

        Raises: ValueError for names of the evaluation or the grid that the round uses, and for missing metrics.
        """
        rows_by_point: dict[int, list[dict]] = {point: [] for point in points}
        totals: dict[str, np.ndarray] = {}
        for round, (infos, counts, params, states) in looks:
            totals = {name: totals.get(name, 0) + _exact(value) for name, value in counts.items()}
            records = as_records(round, infos, len(points))
            for i, (point, record) in enumerate(zip(points, records, strict=True)):
                combination, seed = divmod(point, len(self.seeds))
                # A row puts the round behind the values of the grid.
                del record["round"]
                evaluation = self.evaluations[combination]
                if evaluation is not None:
                    model, state = jax.tree.map(lambda x, i=i: jnp.array(x[i]), (params, states))
                    arguments = (model, state) if num_arguments(evaluation) == 2 else (model,)
                    record |= self._new(as_record(round, evaluation(*arguments)), record)
                # A message that was missing in any round so far voids the epsilon from then on.
                totals_of_point = {name: value[i] for name, value in totals.items()}
                record |= self.epsilons[combination].record(round, totals_of_point)
                record |= {f"{name}_so_far": plain(value) for name, value in totals_of_point.items()}
                values = self.combinations[combination]
                rows_by_point[point].append(
                    {"seed": self.seeds[seed], **values, "round": round, **self._kept(record, values)}
                )
        return rows_by_point

    def _new(self, evaluated: dict, record: dict) -> dict:
        """Returns an evaluation's entries, after checking that the round does not use their names."""
        del evaluated["round"]
        for name in evaluated:
            if name in record or name == "epsilon":
                validate.fail("evaluation", "names that the round does not use", name, "Put a prefix before it.")
        return evaluated

    def _kept(self, record: dict, values: Mapping[str, Any]) -> dict:
        """Returns the entries of a record that a row keeps, after checking the names of the grid and of the metrics.

        The counts that show divergence are always kept, and how many clients' own models were judged.

        Args:
          record: all numbers of a point after a round, by name, without the round itself.
          values: the point's combination, by name of the grid.

        Returns: the entries of `record` that are among the sweep's metrics; all if it names none.

        Raises: ValueError for a name of the grid that a metric has, and for a metric that the record lacks.
        """
        for name in values:
            if name in record:
                validate.fail("grid", "names that no metric has", name, "Give make's argument another name.")
        for name in self.metrics or ():
            if name not in record:
                validate.fail("metrics", "some of " + ", ".join(record), name, validate.nearest(name, record))
        entries = {
            name: value
            for name, value in record.items()
            if self.metrics is None or name in self.metrics or name.endswith("_so_far") or name == OWN_MODELS
        }
        for name in self.needed:
            if name not in entries:
                validate.fail("metric", "one of " + ", ".join(entries), name, validate.nearest(name, entries))
        return entries


def _exact(sums: np.ndarray) -> np.ndarray:
    """Returns sums of each point, [n], in 64 bits; [n, 2] uint32 are the high and the low words of integers."""
    if sums.ndim == 2:
        return sums[:, 0].astype(np.int64) << 32 | sums[:, 1]
    return sums.astype(np.float64 if np.issubdtype(sums.dtype, np.floating) else np.int64)
