"""This module runs clients to the error floor whose quantisation error has a closed form, on two grids of levels."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import theory, transform
from fedjax_sim.study.bits.messages import GRID_NAMES, conditions_of
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.problems import Vectors
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Array, UpdateTransform

STEP_SIZE = 0.5  # of the runs to the floor
MEASURED_ROUNDS = (
    1,
    2,
    4,
    8,
    24,
)  # rounds that are measured; (1 - STEP_SIZE)^48 is negligible, so the last is at the floor
BATCH = 50  # runs under one vmap


class QuantizedClients(Vectors):
    """Clients whose updates at the floor fill the interval [-s/3, s/3] evenly, where s is the quantiser's range.

    For every even number of bits b this interval consists of whole cells between the 2^b levels. The mean quantisation
    error is therefore that of a uniform position in a cell.
    """

    def __init__(self, size: int, dimension: int):
        """Makes the clients.

        Args:
          size: N.
          dimension: d.
        """
        golden = (math.sqrt(5) - 1) / 2
        # Multiples of the golden ratio modulo 1 fill [0, 1) evenly in each coordinate, without random numbers.
        positions = (np.arange(1, size * dimension + 1) * golden % 1).reshape(dimension, size).T
        super().__init__(2 * positions - 1)
        self.range = 3 * STEP_SIZE
        self.start = self.mean + 1.5  # with updates up to 5/6 of the range

    def quantizer(self, bits: int, keeps_zeros: bool = False) -> UpdateTransform:
        """Makes stochastic rounding over a range that holds all updates of the runs.

        Args:
          bits: bits for each number.
          keeps_zeros: says whether zero is among the levels; the textbook's grid has no zero.
        """
        return transform.quantize(bits, range=self.range, keeps_zeros=keeps_zeros)

    def bytes(self, quantizer: UpdateTransform) -> float:
        """Returns the bytes that a client sends in a round."""
        return wire_of(quantizer, {"w": jax.ShapeDtypeStruct((self.dimension,), jnp.float32)}).bits / 8

    def floor(self, bits: int) -> float:
        """Predicts E |w - w*|^2 in steady state on the textbook's grid, by the closed form."""
        return theory.quantization_floor(self.dimension, bits, self.range, self.size, 1 - STEP_SIZE, keeps_zeros=False)

    def expected(self, bits: int, num_rounds: int) -> np.ndarray:
        """Predicts E |w_t - w*|^2 on the textbook's grid, by `theory.budget`.

        Args:
          bits: bits for each number; 0 sends floats.
          num_rounds: T.

        Returns: [T + 1].
        """
        hessians = np.broadcast_to(np.eye(self.dimension), (self.size, self.dimension, self.dimension))
        variance = theory.expected_squared_error(1, bits, self.range, keeps_zeros=False) if bits else 0.0
        budget = theory.budget(hessians, self.values, step_size=STEP_SIZE, quantization_variance=variance)
        # With unit curvature the squared distance is twice the excess loss.
        return 2 * budget.expected_loss(num_rounds, start=self.start)

    def path(self, key: Array, bits: int, num_runs: int) -> Iterator[Comparison]:
        """Measures squared distances on the way to the floor and at the floor, on the textbook's grid.

        Args:
          key: the random key of all runs.
          bits: bits for each number.
          num_runs: independent runs.

        Yields: for each of the rounds `LOOKS` the squared distance to the optimum; the last one is the floor.
        """
        quantizer = self.quantizer(bits)
        algorithm = self.algorithm(quantizer, step_size=STEP_SIZE)
        errors = self.errors(key, algorithm, num_runs, MEASURED_ROUNDS, batch=BATCH, start=self.start)
        expected = self.expected(bits, MEASURED_ROUNDS[-1]).tolist()
        for i, t in enumerate(MEASURED_ROUNDS):
            is_floor = t == MEASURED_ROUNDS[-1]
            conditions = conditions_of("floor" if is_floor else "path", GRID_NAMES[False], bits=bits,
                                       cohort_size=self.size, rounds=t,
                                       bytes_sent=t * self.bytes(quantizer))  # fmt: skip
            predicted = self.floor(bits) if is_floor else expected[t]
            yield measured(conditions, "squared distance", errors[:, i], predicted, kind="leading order",
                           resolution=1e-5 * predicted)  # fmt: skip

    def with_zero(self, key: Array, bits: int, num_runs: int) -> Comparison:
        """Measures the floor on the grid with a zero, whose cells the updates do not fill evenly.

        Args:
          key: the random key of all runs.
          bits: bits for each number.
          num_runs: independent runs.
        """
        algorithm = self.algorithm(self.quantizer(bits, True), step_size=STEP_SIZE)
        errors = self.errors(key, algorithm, num_runs, MEASURED_ROUNDS[-1], batch=BATCH, start=self.start)
        conditions = conditions_of(
            "floor", GRID_NAMES[True], bits=bits, cohort_size=self.size, rounds=MEASURED_ROUNDS[-1]
        )
        predicted = self.floor_with_zero(bits)
        return measured(conditions, "squared distance", errors, predicted, kind="leading order",
                        resolution=1e-5 * predicted)  # fmt: skip

    def floor_with_zero(self, bits: int) -> float:
        """Predicts E |w - w*|^2 in steady state on the grid with a zero, from the error of each update at the optimum.

        Args:
          bits: bits for each number.
        """
        error = theory.quantization_error(STEP_SIZE * (self.values - self.mean), bits, range=self.range)
        return theory.noise_floor(float(error.variance.sum()) / self.size**2, 1 - STEP_SIZE)
