"""How the tests' programs are compiled: as users compile them, or in about half of the time.

A law about bits, or about a compiled program, is a law about the compiler too: its tests are marked `optimised`, as are
all in `tests/laws` and `tests/engine`. The others compare with closed forms, transcriptions and each other to a
tolerance; they are compiled quickly, unless `pytest --optimised` asks for the users' compiler everywhere.
"""

from __future__ import annotations

import functools
import itertools
import threading

import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

QUICK = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
PROGRAMS = 256
_optimised, _on_purpose = True, True
_programs, _numbers = jax.make_user_context(), itertools.count(2)


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
    """Lets `choose` decide for each compilation of this process, and programs share the context they are written in."""
    mlir.make_ir_context = _Contexts(mlir.make_ir_context)
    original = compiler.get_compile_options

    def get_compile_options(*args, **kwargs):
        options = original(*args, **kwargs)
        if not _optimised:
            options.env_option_overrides = [*options.env_option_overrides, *known().items()]
        return options

    compiler.get_compile_options = get_compile_options


class _Contexts(threading.local):
    """JAX 0.10 makes a new context for each program, which takes longer than a small program does; a thread keeps one
    here for some of them, for a context holds every constant that was written in it. What is compiled while another
    program is written would be written into that one, and has its own."""

    def __init__(self, make):
        self.make, self.count, self.context = make, itertools.count(), None

    def __call__(self):
        if ir.Context.current is not None:
            return self.make()
        if next(self.count) % PROGRAMS == 0:
            self.context = self.make()
        return self.context


def choose(optimised: bool, on_purpose: bool) -> None:
    """The compiler of the next test, for which what the other one compiled is not there."""
    global _optimised, _on_purpose
    known()  # asked for here, not within a compilation
    _programs.set_global(int(optimised))
    _optimised, _on_purpose = optimised, on_purpose


def alone() -> None:
    """From here on the test finds no program that was traced before, and leaves none: what it patches may be in one."""
    _programs.set_global(next(_numbers))


def check_bits_may_be_compared() -> None:
    """Raises where bits are compared that no user's program has; no AssertionError, for planted faults wait for one."""
    if not _optimised and not _on_purpose:
        raise RuntimeError("expected the test of a law about bits to be marked `pytest.mark.optimised`")
