"""What the findings of `bits` say, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedjax_sim import theory
from fedjax_sim.study.bits.clients import QuantizedClients
from fedjax_sim.study.bits.messages import FEEDBACK_ROUNDS, GRIDS
from fedjax_sim.study.charts import rows_of
from fedjax_sim.study.findings import Comparison

__all__ = ["bits_reading"]


def bits_reading(field: QuantizedClients, found: Sequence[Comparison], bits: Sequence[int]) -> Iterator[str]:
    """Paragraphs, from the numbers that were found."""
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
