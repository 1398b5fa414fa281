"""Compiles blocks of rounds: each block is one call of a compiled program."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.prng import fold_in
from fedjax_sim.running import executables
from fedjax_sim.running.beside import beside
from fedjax_sim.running.executables import BlockRounds, KeptRound
from fedjax_sim.running.planning import check_memory
from fedjax_sim.running.processes import current
from fedjax_sim.running.shared_arrays import on_all_devices, whole
from fedjax_sim.types import Algorithm, Array, PyTree

MAX_INFO = 4096  # the most numbers in an entry of a round's info
MAX_BLOCK = 256  # the most rounds between two returns to the host


class TracedRound(NamedTuple):
    """A round that was traced, and not yet compiled."""

    jitted: Callable  # (key, state, population) -> (state, info)
    traced: Any  # as `jax.jit(step).trace` returns it
    seconds: float  # that tracing took
    warned: bool  # whether tracing warned, which a round that is not traced could not


def traced_round(algorithm: Algorithm, key: Array, state: PyTree, population: PyTree) -> TracedRound:
    """Traces a round.

    Args:
      algorithm: whose `step` is a round.
      key, state, population: of the run; only their shapes count.

    Raises: TypeError for a round that does not return (state, info by name); ValueError for an info with large arrays.
    """
    start_seconds = time.perf_counter()
    # The block calls the same jitted step, so that it is not traced again there.
    jitted = jax.jit(algorithm.step)
    with warnings.catch_warnings(record=True) as caught:
        traced = jitted.trace(*on_all_devices((key, state, population)))
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    match traced.out_info:
        case (_, Mapping() as info):
            _check_info(info)
        case other:
            rule, hint = "a function that returns (state, info)", "Its scalars stand in info by name; {} for none."
            validate.fail("algorithm.step", rule, type(other).__name__, hint, TypeError)
    return TracedRound(jitted, traced, time.perf_counter() - start_seconds, bool(caught))


def compiled_block(
    round: TracedRound | KeptRound,
    key: Array,
    state: PyTree,
    population: PyTree,
    *,
    keep: Callable[..., None] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Callable, PyTree, PyTree, float]:
    """Compiles a loop over rounds, whose length is an argument: one compilation serves every block.

    Args:
      round: the round, traced for arrays of these shapes, or as an earlier process compiled it.
      key: the key of the run; round t gets fold_in(key, t).
      state: the algorithm's state before the first round; its buffers are donated, so do not use it afterwards.
      population: the clients of the run.
      keep: keeps a round that was traced, as `executables.keep_round` with its name and its programs; None for none.
      meanwhile: called in this thread while a round that was traced is compiled in another.

    Returns: (block, state, population, seconds). State and population are on their devices, and `seconds` is the time
    that tracing and compilation took. `block(state, population, first, count) -> (state, infos)` runs `count` <=
    MAX_BLOCK rounds from round `first` on, and donates the buffers of its state. `infos` have a leading axis of
    MAX_BLOCK rounds, and are on the host.

    Raises: MemoryError for a program that does not fit.

    Guarantees: large arrays that a loss closes over, such as frozen parameters, are in memory once, and in no compiled
    program (tests/running/test_blocks.py::test_frozen_parameters_are_arguments).
    """
    start_seconds = time.perf_counter()
    key, state, population = on_all_devices((key, state, population))
    if isinstance(round, KeptRound):
        compiled, constants, info = round.block, round.constants, round.info
        end_seconds = start_seconds
    else:
        compile_block, constants = _lowered(round, key, state, population)
        (compiled, name), end_seconds = beside(lambda: (compile_block(), time.perf_counter()), meanwhile)
        info = round.traced.out_info[1]
        if keep is not None and not round.warned:
            keep(block=name, constants=constants, info=info)
    seconds = round.seconds + end_seconds - start_seconds
    # A program that is too large for one process ends all of them.
    current().agreed(lambda: check_memory(engine.needs(compiled)))
    (key_sharding, state_sharding, population_sharding, _, constants_sharding), _ = compiled.input_shardings
    key = jax.device_put(key, key_sharding)
    state = _placed(state, state_sharding)
    population = jax.device_put(population, population_sharding)
    constants = jax.device_put(constants, constants_sharding)

    def call(state, population, first, count):
        rounds = BlockRounds(np.int32(first), np.int32(count))
        state, log_rows = compiled(key, state, population, rounds, constants)
        return _placed(state, state_sharding), _unpacked(jax.device_get(whole(log_rows)), info)

    return call, state, population, seconds


def _lowered(traced_round: TracedRound, key: Array, state: PyTree, population: PyTree) -> tuple[Callable, list[Array]]:
    """Lowers the loop over rounds; returns (a function as `executables.lowered` does, the round's large constants).

    The program is (key, state, population, `BlockRounds`, constants) -> (state, log rows as `_packed` makes them).

    Args:
      traced_round, key, state, population: as for `compiled_block`.
    """
    jitted, traced = traced_round.jitted, traced_round.traced
    constants, run = engine.constants_as_arguments(traced.jaxpr)
    constants = on_all_devices(constants)

    def block(key, state, population, rounds, constants):
        log_rows = [jnp.zeros((MAX_BLOCK, *x.shape), x.dtype) for x in jax.eval_shape(_packed, traced.out_info[1])]

        def step(*args):
            if not constants:
                return jitted(*args)
            return jax.tree.unflatten(jax.tree.structure(traced.out_info), run(constants, jax.tree.leaves(args)))

        def one_round(i, carry):
            state, log_rows = carry
            state, info = step(fold_in(key, rounds.first + i), state, population)
            return state, [rows.at[i].set(x) for rows, x in zip(log_rows, _packed(info), strict=True)]

        return jax.lax.fori_loop(0, rounds.num_rounds, one_round, (state, log_rows))

    no_rounds = BlockRounds(np.int32(0), np.int32(0))
    # With several processes infos are replicated, since every process reads them; the compiler places the state.
    jit = partial(jax.jit, out_shardings=(None, key.sharding)) if current().several else jax.jit
    options = engine.compiler_options()
    program = jit(block, donate_argnums=1, compiler_options=options)
    return executables.lowered(program.trace(key, state, population, no_rounds, constants), options), constants


def _packed(info: PyTree) -> list[Array]:
    """Returns a round's info as one flat array for each dtype.

    So a round writes one log row for each dtype, and the program is smaller than with a row for each entry.
    """
    leaves = jax.tree.leaves(info)
    return [jnp.concatenate([x.reshape(-1) for x in leaves if x.dtype == dtype]) for dtype in _dtypes(leaves)]


def _unpacked(log_rows: list[np.ndarray], spec: PyTree) -> PyTree:
    """Returns infos, leaves [R, ...], from `_packed` infos of R rounds.

    Args:
      log_rows: an array [R, k] for each dtype.
      spec: shapes and dtypes of the info of one round.
    """
    leaves, structure = jax.tree.flatten(spec)
    rows_of = dict(zip(_dtypes(leaves), log_rows, strict=True))
    ends = dict.fromkeys(rows_of, 0)

    def taken(leaf):
        start = ends[leaf.dtype]
        ends[leaf.dtype] += leaf.size
        rows = rows_of[leaf.dtype]
        return rows[:, start : ends[leaf.dtype]].reshape(len(rows), *leaf.shape)

    return structure.unflatten(map(taken, leaves))


def _dtypes(leaves: list) -> list:
    """Returns the dtypes of leaves, each once, in the order of the leaves."""
    return list(dict.fromkeys(x.dtype for x in leaves))


@contextmanager
def memory_errors(memory_files: Sequence) -> Iterator[None]:
    """Raises the errors of client memory on disk in place of JAX's own error, which says only that a callback failed.

    Args:
      memory_files: the stores of client memory, each with a `check()` that raises its error.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError:
        for file in memory_files:
            file.check()
        raise
    for file in memory_files:
        file.check()


def _check_info(info: Mapping[str, Any]) -> None:
    """Refuses large arrays in a round's info, because the log holds scalars, one record a round."""
    for name, value in info.items():
        size = max((x.size for x in jax.tree.leaves(value)), default=0)
        if size > MAX_INFO:
            hint = "The log holds scalars. To see what a server saw, replay the round: fedjax_sim.round.observe."
            validate.fail(f"info[{name!r}]", f"at most {MAX_INFO:,} numbers", f"{size:,} numbers", hint)


def _placed(state: PyTree, shardings: PyTree) -> PyTree:
    """Moves the state to where the program wants it.

    An array that is there already is not put again: the copy would share its buffer, and JAX does not write over an
    array that shares its buffer with another.
    """

    def placed(x, sharding):
        is_there = x.sharding.is_equivalent_to(sharding, x.ndim)
        return x if is_there else jax.device_put(x, sharding)

    return jax.tree.map(placed, state, shardings)
