"""The rows of a sweep, made of what its programs return at the evaluated rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.running.log import as_record

__all__ = ["Recorder"]


class Recorder:
    """Makes rows of what a program returns of its points, at each evaluated round."""

    def __init__(self, evaluation: Callable | None, metrics: Sequence[str] | None, combinations: list, seeds: list,
                 epsilons: list, needed: str | None):  # fmt: skip
        self.evaluation = evaluation
        self.metrics = metrics
        self.epsilons = epsilons
        self.needed = needed
        self.combinations = combinations
        self.seeds = seeds

    def rows(self, points: list[int], looks: Iterable) -> dict[int, list[dict]]:
        """By point, a row for each evaluated round; `looks` are (round, (infos, counts since the last one, params))."""
        found: dict[int, list[dict]] = {point: [] for point in points}
        totals: dict[str, np.ndarray] = {}
        for round, (infos, counted, params) in looks:
            totals = {name: totals.get(name, 0) + value.astype(np.int64) for name, value in counted.items()}
            for i, point in enumerate(points):
                combination, seed = divmod(point, len(self.seeds))
                record = as_record(round, infos, i)
                del record["round"]
                if self.evaluation is not None:
                    model = jax.tree.map(lambda x, i=i: jnp.array(x[i]), params)
                    record |= self._new(as_record(round, self.evaluation(model)), record)
                record |= self.epsilons[combination].record(round, {name: value[i] for name, value in totals.items()})
                record |= {f"{name}_so_far": int(value[i]) for name, value in totals.items()}
                values = self.combinations[combination]
                found[point].append({"seed": self.seeds[seed], **values, "round": round, **self._kept(record, values)})
        return found

    def _new(self, evaluated: dict, record: dict) -> dict:
        del evaluated["round"]
        for name in evaluated:
            if name in record or name == "epsilon":
                validate.fail("evaluation", "names that the round does not use", name, "Put a prefix before it.")
        return evaluated

    def _kept(self, record: dict, values: Mapping[str, Any]) -> dict:
        for name in values:
            if name in record:
                validate.fail("grid", "names that no metric has", name, "Give make's argument another name.")
        for name in self.metrics or ():
            if name not in record:
                validate.fail("metrics", "some of " + ", ".join(record), name, validate.nearest(name, record))
        kept = {name: x for name, x in record.items()
                if self.metrics is None or name in self.metrics or name.endswith("_so_far")}  # fmt: skip
        if self.needed is not None and self.needed not in kept:
            validate.fail("metric", "one of " + ", ".join(kept), self.needed, validate.nearest(self.needed, kept))
        return kept
