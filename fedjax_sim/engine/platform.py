"""Which platform a program is traced for: that of this machine's devices, unless somebody compiles for another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from fedjax_sim import validate

__all__ = ["SERIAL_FLAG", "compiler_options", "compiling_for", "target"]

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}  # as JAX lowers for them: as backends are named
SPLITTING = "cpu-parallel-task-assigner"  # XLA's pass that cuts element-wise loops into a task for each thread
SERIAL_FLAG = f"--xla_disable_hlo_passes={SPLITTING}"  # for XLA_FLAGS; `compiler_options` is the same for one program
_platform = jax.make_user_context(None)  # what JAX has traced for one platform it does not take for another


def target() -> str:
    """ "cpu", "gpu" or "tpu": what code that differs by hardware chooses by, when it is traced."""
    return _platform.value or jax.default_backend()


def compiler_options() -> dict[str, str]:
    """For `jax.jit(..., compiler_options=)` of a program of rounds: on a CPU, a device's element-wise loops stay whole.

    XLA cuts them into a task for each thread of the pool. A simulation has a device for each core already, and loops of
    a few microseconds: handing out the tasks took longer than the work, and a round two to three times as long.
    The option stands in the place of passes that XLA_FLAGS disables: in such a program these run.

    Guarantees: no loop of a compiled round is cut (tests/test_compilation.py::test_loops_are_not_cut).
    """
    return {"xla_disable_hlo_passes": SPLITTING} if target() == "cpu" else {}


@contextlib.contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """What is traced inside the block is meant for a platform: a program for a TPU can be made and read on a laptop.

    Args:
      platform: "cpu", "cuda", "rocm" or "tpu", as `lowering_platforms` has them.

    A function that `jax.jit` has traced outside of the block is traced anew inside.

    Guarantees: every row of the law tests lowers for cpu, cuda and tpu (tests/laws/test_platforms.py).

    >>> import jax
    >>> from fedjax_sim import engine
    >>> with compiling_for("cuda"):
    ...     platform = engine.target()
    >>> platform, engine.target() == jax.default_backend()
    ('gpu', True)
    """
    validate.one_of("platform", platform, PLATFORMS)
    with _platform(PLATFORMS[platform]):
        yield
