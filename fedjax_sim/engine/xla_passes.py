"""States which of XLA's passes a program of rounds is compiled without."""

from __future__ import annotations

from fedjax_sim.engine.arithmetic.mode import is_fast
from fedjax_sim.engine.platform import target

SPLITTING = "cpu-parallel-task-assigner"  # cuts element-wise loops into a task for each thread
TREES = "tree_reduction_rewriter"  # puts windows of 32 numbers before a reduction over more of them
SERIAL_FLAG = f"--xla_disable_hlo_passes={SPLITTING}"  # for XLA_FLAGS; `compiler_options` is for one program


def compiler_options() -> dict[str, str]:
    """Returns options for `jax.jit(..., compiler_options=)` of a program of rounds.

    On a CPU they keep a device's element-wise loops whole. XLA would cut the loops into a task for each thread of the
    pool. A simulation already has a device for each core, and its loops take a few microseconds. Handing out the tasks
    took longer than the work, and made a round two to three times as long. On other platforms there are no options.

    On a CPU they also keep reductions whole. XLA would reduce windows of 32 numbers first, so that a float sum rounds
    less. A round has fixed the order of its float sums, and its sums of integers are exact in any order. There the
    windows only cost kernels and time. In fast arithmetic the order is XLA's, and the windows stay.

    The option replaces the list of passes that XLA_FLAGS disables, so passes that are disabled there run in such a
    program.

    Guarantees:
      No loop of a compiled round is cut (tests/test_compilation.py::test_loops_are_not_cut).
      No integers of a round are summed in windows, and the bits are those with windows
      (tests/test_compilation.py::test_reductions_are_whole).

    >>> from fedjax_sim import engine
    >>> with engine.compiling_for("cuda"):
    ...     compiler_options()
    {}
    """
    if target() != "cpu":
        return {}
    return {"xla_disable_hlo_passes": SPLITTING if is_fast() else f"{SPLITTING},{TREES}"}
