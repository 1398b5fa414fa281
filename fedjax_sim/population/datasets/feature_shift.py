"""With feature skew the inputs of clients follow different distributions for the same labels."""

from __future__ import annotations

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.arrays import checked_examples, checked_offsets
from fedjax_sim.population.partition import Partition, generator
from fedjax_sim.population.population import Stored, stored
from fedjax_sim.validate import NonNegative


@validate.named_arguments
def feature_shift(examples: dict, partition: Partition, *, scale: NonNegative, seed: int) -> Stored:
    """Shifts the features of each client: client i holds x + s_i, with one s_i ~ N(0, scale^2 I) for all of its rows.

    Args:
      examples: dict of arrays [rows, ...] with a floating-point "x".
      partition: which client holds which rows.
      scale: standard deviation >= 0 of the shift of each feature.
      seed: of the shifts.
    Returns: a population that holds copies of the rows.
    Guarantees: each client has one shift, and everything else stays as it was
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
    indices = np.asarray(partition[0])
    offsets = checked_offsets("partition.offsets", partition[1], len(partition[0]))
    if not (0 <= indices.min() and indices.max() < rows):
        validate.fail("partition.indices", f"rows in [0, {rows})", f"rows up to {indices.max()}")
    client_examples = {name: x[indices] for name, x in examples.items()}  # in the order of the clients
    shape = (len(offsets) - 1, *client_examples["x"].shape[1:])
    client_shifts = scale * generator("feature_shift", seed).standard_normal(shape, np.float32)
    row_shifts = np.repeat(client_shifts, np.diff(offsets), axis=0).astype(client_examples["x"].dtype)
    return stored({**client_examples, "x": client_examples["x"] + row_shifts}, offsets)
