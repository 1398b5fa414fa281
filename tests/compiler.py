"""How the tests' programs are compiled: as users compile them, or in about half of the time.

A law about bits, or about a compiled program, is a law about the compiler too: its tests are marked `optimised`, as are
all in `tests/laws` and `tests/engine`. The others compare with closed forms, transcriptions and each other to a
tolerance; they are compiled quickly, unless `pytest --optimised` asks for the users' compiler everywhere.
"""

from __future__ import annotations

import functools

import jax
from jax._src import compiler

__all__ = ["QUICK", "check_bits_may_be_compared", "choose", "install", "known"]

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
_optimised, _on_purpose = True, True


@functools.cache
def known() -> dict[str, int | bool]:
    """Those of `QUICK` that this version of the compiler has."""

    def accepted(name):
        try:
            return jax.jit(lambda: 0).lower().compile(compiler_options={name: QUICK[name]}) is not None
        except jax.errors.JaxRuntimeError:
            return False

    return {name: value for name, value in QUICK.items() if accepted(name)}


def install() -> None:
    """Lets `choose` decide for each compilation of this process."""
    original = compiler.get_compile_options

    def get_compile_options(*args, **kwargs):
        options = original(*args, **kwargs)
        if not _optimised:
            options.env_option_overrides = [*options.env_option_overrides, *known().items()]
        return options

    compiler.get_compile_options = get_compile_options


def choose(optimised: bool, on_purpose: bool) -> None:
    """The compiler of the next test; programs that were compiled quickly are forgotten where bits count."""
    global _optimised, _on_purpose
    known()  # asked for here, not within a compilation
    if optimised and not _optimised:
        jax.clear_caches()
    _optimised, _on_purpose = optimised, on_purpose


def check_bits_may_be_compared() -> None:
    """Raises where bits are compared that no user's program has; no AssertionError, for planted faults wait for one."""
    if not _optimised and not _on_purpose:
        raise RuntimeError("expected the test of a law about bits to be marked `pytest.mark.optimised`")
