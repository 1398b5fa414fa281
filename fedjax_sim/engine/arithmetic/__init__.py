"""Computes with the same bits on any devices, or with the faster arithmetic of the compiler."""

from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.engine.arithmetic.barrier import rounded_here, unsigned_zeros
from fedjax_sim.engine.arithmetic.mode import fast_arithmetic
from fedjax_sim.engine.arithmetic.rewriter import reproducible

__all__ = ["exact_sums", "fast_arithmetic", "reproducible", "rounded_here", "unsigned_zeros"]
