"""Computes with the same bits on any devices, or with the faster arithmetic of the compiler."""

from fedjax_sim.engine.arithmetic import exact_sums as exact_sums
from fedjax_sim.engine.arithmetic.barrier import rounded_here as rounded_here, unsigned_zeros as unsigned_zeros
from fedjax_sim.engine.arithmetic.mode import fast_arithmetic as fast_arithmetic
from fedjax_sim.engine.arithmetic.rewriter import reproducible as reproducible
