"""Feature skew: clients whose inputs follow different laws for the same labels."""

from __future__ import annotations

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.arrays import checked_examples, checked_offsets
from fedjax_sim.population.partition import Partition, generator
from fedjax_sim.population.population import Stored, stored
from fedjax_sim.validate import NonNegative

__all__ = ["feature_shift"]


@validate.named_arguments
def feature_shift(examples: dict, partition: Partition, *, scale: NonNegative, seed: int) -> Stored:
    """Feature skew: client i holds x + s_i with s_i ~ N(0, scale^2 I), one shift for all of its rows.

    Args:
      examples: dict of arrays [rows, ...] with a floating "x".
      partition: who holds which rows.
      scale: standard deviation of the shift per feature, >= 0.
      seed: of the shifts.
    Guarantees: one shift per client, everything else untouched
      (tests/population/test_partition.py::test_feature_shift_moves_each_client_rigidly).

    >>> from fedjax_sim.population.partition import iid
    >>> population = feature_shift({"x": np.zeros((4, 2))}, iid(4, 2, seed=0), scale=1.0, seed=0)
    >>> x = population.client(0).examples["x"]
    >>> bool((x[0] == x[1]).all())
    True
    """
    examples, rows = checked_examples("examples", examples)
    if not isinstance(examples, dict) or "x" not in examples or examples["x"].dtype.kind != "f":
        validate.fail(
            "examples", 'a dict with floating features "x"', type(examples).__name__, "Convert images to floats."
        )
    indices, offsets = np.asarray(partition[0]), checked_offsets("partition.offsets", partition[1], len(partition[0]))
    if not (0 <= indices.min() and indices.max() < rows):
        validate.fail("partition.indices", f"rows in [0, {rows})", f"rows up to {indices.max()}")
    held = {name: x[indices] for name, x in examples.items()}
    shape = (len(offsets) - 1, *held["x"].shape[1:])
    shift = scale * generator("feature_shift", seed).standard_normal(shape, np.float32)
    shift = np.repeat(shift, np.diff(offsets), axis=0).astype(held["x"].dtype)
    return stored({**held, "x": held["x"] + shift}, offsets)
