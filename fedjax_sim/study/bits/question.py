"""How few bits will do? Floors and bytes of quantised letters, two roundings, and what feedback repairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import theory, transform, validate
from fedjax_sim.prng import stream
from fedjax_sim.report import plots
from fedjax_sim.study.bits.messages import FEEDBACK_ROUNDS, GRIDS, conditions_of, feedback_floors, single_releases
from fedjax_sim.study.charts import DASHED, DOTTED, chart, points, rows_of
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured
from fedjax_sim.study.problems import Vectors
from fedjax_sim.transform.chain import wire_of
from fedjax_sim.types import Array, UpdateTransform

__all__ = ["bits"]

QUESTION = "How few bits will do?"
STEP_SIZE = 0.5  # of the runs to the floor
LOOKS = (1, 2, 4, 8, 24)  # rounds; (1 - STEP_SIZE)^48 is nothing
BATCH = 50  # runs under one vmap
LEAST = 1e-5  # squared distance that the figure shows


def bits(
    *,
    bits: Sequence[int] = (2, 4, 8),
    num_clients: int = 32,
    dimension: int = 16,
    cohort_sizes: Sequence[int] = (1, 2, 3, 10),
    step_sizes: Sequence[float] = (0.08, 0.04, 0.02),
    num_runs: int = 1500,
    num_releases: int = 2000,
    seed: int = 0,
) -> Findings:
    """How few bits will do? Floors against bits and bytes, nearest against stochastic rounding, feedback against none.

    Clients hold vectors and all take part. Letters of the runs to the floor spread evenly over whole cells of the
    textbook's 2^b levels, so that d Delta^2 / 6 is their error.

    Args:
      bits: b of a number, rising and even.
      num_clients: N of the runs to the floor. dimension: d of their letters.
      cohort_sizes: m of single releases: 1, and others for the crossover of the two roundings.
      step_sizes: falling, of runs with top-k and signs.
      num_runs: runs behind each floor. num_releases: rounds behind each error of one release.
      seed: decides everything.

    Returns: `Findings`: E |w - w*|^2 at rest and on the way there, mean squared errors of one release.

    Guarantees: every prediction lies in its interval (tests/study/test_bits.py::test_predictions_hold); floors a bit
    apart are told apart (::test_it_can_tell_a_bit); bare compressors stall, feedback converges (::test_feedback).

    References: Suresh et al. 2017, section 2; Alistarh et al. 2017; Karimireddy et al. 2019; Richtarik et al. 2021.
    """
    _check(locals())
    key = jax.random.key(seed)
    field = _Field(num_clients, dimension)
    found = [one for b in bits for one in field.path(stream(key, f"floor {b}"), b, num_runs)]
    found += _ratios(found, bits)
    found += [field.with_zero(stream(key, f"zero {b}"), b, num_runs) for b in bits[:1]]
    found += single_releases(key, cohort_sizes, num_releases, seed)
    found += feedback_floors(key, step_sizes, seed)
    options = {
        "bits": list(bits), "num_clients": num_clients, "dimension": dimension, "cohort_sizes": list(cohort_sizes),
        "step_sizes": list(step_sizes), "num_runs": num_runs, "num_releases": num_releases, "seed": seed,
    }  # fmt: skip
    reading = list(_reading(field, found, bits))
    return Findings("bits", QUESTION, found, reading, partial(_figure, field, bits, cohort_sizes, found), options)


def _check(options: dict[str, Any]) -> None:
    for name, rising in (("bits", True), ("cohort_sizes", True), ("step_sizes", False)):
        validate.sequence(name, options[name])
        values = list(options[name])
        if values != sorted(set(values), reverse=not rising):
            validate.fail(name, f"{'rising' if rising else 'falling'} numbers", values)
    for value in options["bits"]:
        validate.integer("bits", value, 2, 12)
        if value % 2:
            validate.fail("bits", "even numbers", value, "Letters fill whole cells of an even number of bits alone.")
    for value in options["cohort_sizes"]:
        validate.integer("cohort_sizes", value, 1, 10_000)
    validate.integer(
        "cohort_sizes[0]", options["cohort_sizes"][0], 1, 1, hint="The crossover is a ratio to one client."
    )
    for value in options["step_sizes"]:
        validate.in_range("step_sizes", value, 0.01, 0.1, hint="Runs have 1,200 rounds, and larger steps may diverge.")
    validate.integer("num_clients", options["num_clients"], 8, 10_000)
    validate.integer("dimension", options["dimension"], 1, 10_000)
    validate.integer("num_runs", options["num_runs"], max(100, least_runs(options["dimension"])), hint=FEW)
    validate.integer("num_releases", options["num_releases"], 100)
    validate.integer("seed", options["seed"], 0)


class _Field(Vectors):
    """Clients whose letters at rest fill [-s/3, s/3]: for every even b these are whole cells of 2^b levels."""

    def __init__(self, size: int, dimension: int):
        golden = (math.sqrt(5) - 1) / 2
        spread = (np.arange(1, size * dimension + 1) * golden % 1).reshape(dimension, size).T  # even in each coordinate
        super().__init__(2 * spread - 1)
        self.range = 3 * STEP_SIZE
        self.start = self.mean + 1.5  # with letters up to 5/6 of the range

    def quantizer(self, bits: int, keeps_zeros: bool = False) -> UpdateTransform:
        return transform.quantize(bits, range=self.range, keeps_zeros=keeps_zeros)

    def bytes(self, letters: UpdateTransform) -> float:
        """That a client sends in a round."""
        return wire_of(letters, {"w": jax.ShapeDtypeStruct((self.dimension,), jnp.float32)}).bits / 8

    def floor(self, bits: int) -> float:
        return theory.quantization_floor(self.dimension, bits, self.range, self.size, 1 - STEP_SIZE, keeps_zeros=False)

    def expected(self, bits: int, num_rounds: int) -> np.ndarray:
        """[T + 1] E |w_t - w*|^2: twice the excess loss of unit curvatures."""
        hessians = np.broadcast_to(np.eye(self.dimension), (self.size, self.dimension, self.dimension))
        each = theory.expected_squared_error(1, bits, self.range, keeps_zeros=False) if bits else 0.0
        made = theory.budget(hessians, self.values, step_size=STEP_SIZE, quantization_variance=each)
        return 2 * made.expected_loss(num_rounds, start=self.start)

    def path(self, key: Array, bits: int, num_runs: int) -> Iterator[Comparison]:
        """Down to the floor, on the textbook's grid."""
        letters = self.quantizer(bits)
        errors = self.errors(key, self.algorithm(letters, step_size=STEP_SIZE), num_runs, LOOKS, batch=BATCH,
                             start=self.start)  # fmt: skip
        expected = self.expected(bits, LOOKS[-1]).tolist()
        for i, t in enumerate(LOOKS):
            at_rest = t == LOOKS[-1]
            conditions = conditions_of("floor" if at_rest else "path", GRIDS[False], bits=bits, cohort_size=self.size,
                                     rounds=t, bytes_sent=t * self.bytes(letters))  # fmt: skip
            predicted = self.floor(bits) if at_rest else expected[t]
            yield measured(conditions, "squared distance", errors[:, i], predicted, kind="leading order",
                           resolution=1e-5 * predicted)  # fmt: skip

    def with_zero(self, key: Array, bits: int, num_runs: int) -> Comparison:
        """The floor on the grid with a zero, whose cells letters do not fill evenly: from the letters at rest."""
        algorithm = self.algorithm(self.quantizer(bits, True), step_size=STEP_SIZE)
        errors = self.errors(key, algorithm, num_runs, LOOKS[-1], batch=BATCH, start=self.start)
        conditions = conditions_of("floor", GRIDS[True], bits=bits, cohort_size=self.size, rounds=LOOKS[-1])
        predicted = self.floor_with_zero(bits)
        return measured(conditions, "squared distance", errors, predicted, kind="leading order",
                        resolution=1e-5 * predicted)  # fmt: skip

    def floor_with_zero(self, bits: int) -> float:
        at_rest = theory.quantization_error(STEP_SIZE * (self.values - self.mean), bits, range=self.range)
        return theory.noise_floor(float(at_rest.variance.sum()) / self.size**2, 1 - STEP_SIZE)


def _ratios(found: Sequence[Comparison], bits: Sequence[int]) -> Iterator[Comparison]:
    """What more bits divide the floor by."""
    floors = {one.conditions["bits"]: one for one in found if one.conditions["part"] == "floor"}
    for few, many in pairwise(bits):
        pair = floors[few], floors[many]
        ratio = pair[0].measured / pair[1].measured
        error = ratio * math.hypot(*(one.standard_error / one.measured for one in pair))
        distances = [theory.level_distance(b, keeps_zeros=False) for b in (few, many)]
        conditions = conditions_of("ratio of floors", f"{few} and {many} bits")
        yield Comparison(conditions, "floor / floor", ratio, error, pair[0].degrees,
                         (distances[0] / distances[1]) ** 2, "leading order")  # fmt: skip


def _reading(field: _Field, found: Sequence[Comparison], bits: Sequence[int]) -> Iterator[str]:
    ratios = ", ".join(f"{row['letters']}: {row['measured']:.4g} (theory {row['predicted']:.4g})"
                       for row in rows_of(found, part="ratio of floors"))  # fmt: skip
    sent = ", ".join(f"{field.bytes(field.quantizer(b)):g} bytes with {b} bits" for b in bits)
    yield (
        "Unbiased rounding lets constant steps come to rest d Delta^2 / (6 m) / (1 - r^2) from the optimum, with "
        f"Delta = 2 s / (2^b - 1). Ratios of floors: {ratios}. A client sends {sent} a round, and "
        f"{4 * field.dimension} as floats: few bits are the cheapest way to a coarse answer, and no number of rounds "
        "makes them a fine one. Floors are those of equal cohorts and constant steps: with steps that decay as 1/t "
        "they vanish."
    )
    small = {row["letters"]: row["measured"] for row in rows_of(found, part="near zero", cohort_size=1)}
    textbook, zero = (small[f"stochastic, {GRIDS[keeps]}"] for keeps in (False, True))
    formula = theory.expected_squared_error(1, 2, keeps_zeros=False)
    yield (
        "d Delta^2 / 6 is a mean over positions between two levels, which letters spread over whole cells have, as "
        "here. Of a fixed letter the error is sum u (1 - u) Delta^2. The textbook's 2^b levels have no zero among "
        f"them: numbers close to zero stand midway and cost Delta^2 / 4, {textbook / formula:.4g} times the formula; "
        f"with zero among the levels they cost {zero / formula:.2g} times the formula. Sparse and small updates "
        "want that grid. s is assumed to hold all numbers: outside of it clipping is a bias."
    )
    yield (
        "Nearest rounding has no variance given the letter, and half of the error of a single one whose position is "
        "uniform. Where clients share the position it does not average out, and stochastic rounding, whose variance "
        f"falls as 1/m, is better from m = {theory.crossover_cohort_size(0.3):.2f} clients on at position 0.3. Where "
        "positions differ over clients ('spread') the error of nearest rounding is as good as random and averages out "
        "too: that a deterministic quantiser has variance zero is true of a fixed letter only."
    )
    last = min(row["step_size"] for row in rows_of(found, part="feedback"))
    stall = {row["letters"]: row["measured"] for row in rows_of(found, part="feedback", step_size=last)}
    fed = [stall[f"{name}, error feedback"] for name in ("top-k", "sign")]
    yield (
        f"At step {last:g}, after {FEEDBACK_ROUNDS:,} rounds, top-k rests at a squared distance of "
        f"{stall['top-k']:.2g} and signs at {stall['sign']:.2g}, for clients disagree at the optimum and what they "
        f"leave out does not cancel. With error feedback it is {fed[0]:.2g} and {fed[1]:.2g}, and falls with the step; "
        f"EF21 reaches the optimum ({stall['top-k, EF21']:.1g}) at a constant step."
    )
    omega = theory.stochastic_relative_variance(field.dimension, 2)
    yield (
        "A fixed range makes the error independent of the letter, and the steps that are stable stay so. With a range "
        f"that follows each letter it grows with the gradient: two bits of {field.dimension} numbers have omega up to "
        f"{omega:.3g}, and steps must stay below {theory.largest_stable_step(1.0, omega):.3g} / L for one client, "
        f"{theory.largest_stable_step(1.0, omega, field.size):.3g} / L for {field.size}, in place of 2 / L."
    )


def _figure(field: _Field, bits: Sequence[int], cohorts: Sequence[int], found: Sequence[Comparison]) -> Any:
    figure, panels = chart(2, 2)
    by_bytes, by_bits, rounding, feedback = panels
    looks = ((plots.ORANGE, "^", DOTTED), (plots.BLUE, "o", "-"), (plots.BLACK, "s", DASHED)) * len(bits)
    for b, (colour, marker, line) in zip(bits, looks, strict=False):
        path, each = field.expected(b, LOOKS[-1]), field.bytes(field.quantizer(b))
        by_bytes.plot(np.arange(1, len(path)) * each, path[1:], color=colour, linestyle=line, linewidth=1.3)
        rows = [row for row in rows_of(found, bits=b, letters=GRIDS[False]) if row["part"] in ("path", "floor")]
        points(by_bytes, rows, "bytes_sent", colour, marker, f"{b} bits")
    path, each = field.expected(0, LOOKS[-1]), 4 * field.dimension
    by_bytes.plot(np.arange(1, len(path)) * each, path[1:], color=plots.GREY, linewidth=1.1, label="floats: theory")
    bottom = min(field.floor(b) for b in bits)
    by_bytes.set(xlabel="Bytes sent by a client", ylabel="Squared distance from the optimum", ylim=(bottom / 4, 20))

    grid = range(bits[0], bits[-1] + 1, 2)
    by_bits.plot(grid, [field.floor(b) for b in grid], color=plots.BLUE, linewidth=1.3, label="textbook grid: theory")
    by_bits.plot(grid, [field.floor_with_zero(b) for b in grid], color=plots.BLACK, linewidth=1.1, linestyle=DASHED,
                 label="grid with zero: theory")  # fmt: skip
    for keeps_zeros, colour, marker in ((False, plots.BLUE, "o"), (True, plots.BLACK, "s")):
        points(by_bits, rows_of(found, part="floor", letters=GRIDS[keeps_zeros]), "bits", colour, marker, "measured")
    by_bits.set(xlabel="Bits a number", ylabel="Squared distance at rest")

    sizes = np.geomspace(1, cohorts[-1], 60)
    for name, colour, marker, line in (("alike, at 0.3", plots.BLUE, "o", "-"), ("spread", plots.ORANGE, "^", DOTTED)):
        nearest = rows_of(found, part=name, letters=f"nearest, {GRIDS[False]}")
        rows = rows_of(found, part=name, letters=f"stochastic, {GRIDS[False]}")
        if name != "spread":  # the spread letters are others for each m
            rounding.plot(sizes, rows[0]["predicted"] / sizes, color=colour, linestyle=line, linewidth=1.3)
            rounding.axhline(nearest[0]["predicted"], color=plots.BLACK, linewidth=1.1, linestyle=DASHED)
        points(rounding, rows, "cohort_size", colour, marker, f"stochastic, {name}")
        points(rounding, nearest, "cohort_size", plots.BLACK if name != "spread" else plots.GREY,
               "s" if name != "spread" else "D", f"nearest, {name}")  # fmt: skip
    rounding.set(xlabel="Cohort size m", ylabel="Squared error of a mean's number")

    for name, colour, marker, line in (
        ("top-k", plots.BLUE, "o", DASHED), ("sign", plots.BLACK, "s", DASHED),
        ("top-k, error feedback", plots.BLUE, "^", "-"), ("sign, error feedback", plots.BLACK, "v", "-"),
        ("top-k, EF21", plots.ORANGE, "D", "-"),
    ):  # fmt: skip
        rows = rows_of(found, part="feedback", letters=name)
        steps, floors = ([row[name] for row in rows] for name in ("step_size", "measured"))
        feedback.plot(steps, np.maximum(floors, LEAST), color=colour, linestyle=line, marker=marker, markersize=5,
                      markeredgecolor="white", linewidth=1.1,
                      label=name + (f" (below {LEAST:g})" if floors[-1] < LEAST else ""))  # fmt: skip
    feedback.set(xlabel="Step size", ylabel="Squared distance at rest (measured)")
    for axes in panels:
        plots.logarithmic(axes, "y" if axes is by_bits else "xy")
        axes.legend(fontsize=7.5)
    return figure
