"""This module writes the reading of `bits`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedjax_sim import theory
from fedjax_sim.study.bits.clients import QuantizedClients
from fedjax_sim.study.bits.messages import FEEDBACK_ROUNDS, GRID_NAMES
from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.findings import Comparison


def bits_reading(clients: QuantizedClients, found: Sequence[Comparison], bits: Sequence[int]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      clients: the clients of the runs to the floor.
      found: the comparisons of the study.
      bits: bits for each number.
    """
    ratios = ", ".join(f"{row['messages']}: {row['measured']:.4g} (theory {row['predicted']:.4g})"
                       for row in rows_of(found, part="ratio of floors"))  # fmt: skip
    ratios = f"Ratios of floors: {ratios}. " * bool(ratios)  # a single number of bits has no ratio
    sent = ", ".join(f"{clients.bytes(clients.quantizer(b)):g} bytes with {b} bits" for b in bits)
    yield (
        "With unbiased rounding and a constant step the expected squared distance to the optimum falls to d Delta^2 / "
        f"(6 m) / (1 - r^2), Delta = 2 s / (2^b - 1). {ratios}A client sends {sent} a round, and "
        f"{4 * clients.dimension} as floats: few bits are the cheapest way to a coarse answer, and more rounds do not "
        "make it a fine one. The floors hold for equal cohorts and constant steps: with steps that decay as 1/t they "
        "vanish."
    )
    near_zero = {row["messages"]: row["measured"] for row in rows_of(found, part="near zero", cohort_size=1)}
    textbook, zero = (near_zero[f"stochastic, {GRID_NAMES[keeps_zeros]}"] for keeps_zeros in (False, True))
    formula = theory.expected_squared_error(1, 2, keeps_zeros=False)
    yield (
        "d Delta^2 / 6 is a mean over positions between two levels: the error of updates that spread over whole cells, "
        "as here. For a fixed update the error is sum u (1 - u) Delta^2. Zero is not among the textbook's 2^b levels: "
        f"numbers close to zero lie midway and cost Delta^2 / 4, {textbook / formula:.4g} times the formula; with zero "
        f"among the levels they cost {zero / formula:.2g} times the formula. Sparse and small updates need that grid. "
        "All numbers are assumed to lie in [-s, s]: clipping those outside is a bias."
    )
    yield (
        "Nearest rounding has no variance given the update, and for one update at uniform positions half of the error "
        "of stochastic rounding. Where clients share the position the error does not average out, and stochastic "
        f"rounding, whose variance falls as 1/m, is better from m = {theory.crossover_cohort_size(0.3):.2f} clients on "
        "at position 0.3. Where positions differ over clients ('spread') the error of nearest rounding is as good as "
        "random and averages out too: that a deterministic quantiser has variance zero is true for a fixed update only."
    )
    smallest_step = min(row["step_size"] for row in rows_of(found, part="feedback"))
    distances = {row["messages"]: row["measured"] for row in rows_of(found, part="feedback", step_size=smallest_step)}
    with_feedback = [distances[f"{name}, error feedback"] for name in ("top-k", "sign")]
    yield (
        f"At step {smallest_step:g}, after {FEEDBACK_ROUNDS:,} rounds, top-k has stalled at a squared distance of "
        f"{distances['top-k']:.2g} and signs at {distances['sign']:.2g}: at the optimum the clients' gradients differ, "
        f"and what the compressors leave out does not cancel. With error feedback it is {with_feedback[0]:.2g} and "
        f"{with_feedback[1]:.2g}, and falls with the step; EF21 reaches the optimum ({distances['top-k, EF21']:.1g}) "
        "at a constant step."
    )
    omega = theory.stochastic_relative_variance(clients.dimension, 2)
    yield (
        "With a fixed range the error does not depend on the update, and stable steps remain stable. With a range that "
        f"follows each update it grows with the gradient: two bits of {clients.dimension} numbers have omega up to "
        f"{omega:.3g}, and steps must stay below {theory.largest_stable_step(1.0, omega):.3g} / L for one client, "
        f"{theory.largest_stable_step(1.0, omega, clients.size):.3g} / L for {clients.size}, in place of 2 / L."
    )
