"""Keeps compiled programs, so that a later start neither compiles nor, where it is told what it runs, traces.

There are two kinds of files. A program's file holds an executable, under a digest of the text that the compiler gets. A
round's file names a program and holds what tracing tells beside it, under the digest of the round's origin.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import ArrayLike

from fedjax_sim.engine.all_messages.rows import AXIS
from fedjax_sim.prng import is_key
from fedjax_sim.running import program_files
from fedjax_sim.running.checkpoint_format import kind_of
from fedjax_sim.running.fingerprint import RoundProgram, is_opaque
from fedjax_sim.running.origin import digest_of, machine
from fedjax_sim.running.processes import current
from fedjax_sim.types import Array, Count, PyTree

# jaxlib says nothing of its types, so that type checkers take its class for a variable.
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]
MOST_CONSTANT_BYTES = 1 << 25  # of the arrays that a kept round closes over
# Calls of code outside of the program, whose address is known only where the program was lowered.
CALLS_OUTSIDE = re.compile(r"custom_call|\.(send|recv|infeed|outfeed)\b")
WHOLE = -1  # the place of an array that every device holds
# What JAX raises for an executable that it cannot write or read, or where a version lacks a method.
REFUSALS = (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, LookupError)


class Loaded:
    """A program that was read from disk, with the methods of `jax.stages.Compiled` that running it takes.

    Args:
      executable: of XLA.
      meta: of its file.
      in_tree, out_tree: the structures of ((arguments), {}) and of the results.
    """

    def __init__(self, executable: Any, meta: Mapping, in_tree: Any, out_tree: Any):
        at = _sharding_of(executable.local_devices())
        self._executable = executable
        self._inputs = [entry and (entry[0], at(entry[1])) for entry in meta["inputs"]]
        self._outputs = [(tuple(shape), at(place)) for shape, place in meta["outputs"]]
        self._in_tree = in_tree
        self._out_tree = out_tree

    @property
    def input_shardings(self) -> PyTree:
        """The shardings of ((arguments), {}); None for an argument that the program does not read."""
        return jax.tree.unflatten(self._in_tree, [entry and entry[1] for entry in self._inputs])

    def memory_analysis(self) -> Any:
        """Returns the bytes that the compiler allots to the program on each device."""
        return self._executable.get_compiled_memory_stats()

    def __call__(self, *args: PyTree) -> PyTree:
        """Runs the program. It takes over the buffers that it was compiled to take over.

        Raises: TypeError for arguments of other shapes or dtypes.
        """
        buffers = []
        for leaf, entry in zip(jax.tree.leaves(args), self._inputs, strict=True):
            if entry is None:
                continue
            kind, sharding = entry
            if kind_of("", leaf) != kind:
                raise TypeError(f"a program that takes {kind} was given {kind_of('', leaf)}")
            leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
            # An array that is there is not put again: a copy would share the buffer that the program takes over.
            is_there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            buffers.append(leaf if is_there else jax.device_put(leaf, sharding))
        shards = self._executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
        results = [
            jax.make_array_from_single_device_arrays(shape, sharding, arrays)
            for (shape, sharding), arrays in zip(self._outputs, shards, strict=True)
        ]
        return jax.tree.unflatten(self._out_tree, results)


def _sharding_of(devices: Sequence[Device]) -> Callable[[int], Sharding]:
    """Returns a function of an array's place on these devices: `WHOLE`, or the axis that they share."""
    if len(devices) == 1:
        return lambda place: SingleDeviceSharding(devices[0])
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    return lambda place: NamedSharding(
        mesh, PartitionSpec() if place == WHOLE else PartitionSpec(*[None] * place, AXIS)
    )


def _place(sharding: Sharding, num_axes: int, devices: Sequence[Device]) -> int:
    """Returns an array's place on the devices of a program.

    Raises: ValueError for any other place, such as two axes or the memory of the host.
    """
    at = _sharding_of(devices)
    for place in (WHOLE, *range(num_axes)):
        if sharding.is_equivalent_to(at(place), num_axes):
            return place
    raise ValueError(f"an array at {sharding}")


def compiled(traced: jax.stages.Traced, options: Mapping[str, str]) -> tuple[Any, str | None]:
    """Compiles a program, or reads what an earlier process compiled from the same text for the same machine.

    Args:
      traced: the program.
      options: the compiler options of its `jax.jit`.

    Returns: (the program, as `jax.stages.Compiled` or `Loaded`; the name of its file, None if it is not kept).

    Guarantees:
      A loaded program gives the bits of the compiled one (tests/running/test_executables.py::test_the_same_bits), and
      is that of the same text, options and machine (::test_what_a_program_depends_on).
      A damaged file is compiled and written anew (::test_damage_is_mended).
      Programs that call code outside of themselves are not kept (::test_what_is_not_kept).
    """
    return lowered(traced, options)()


def lowered(traced: jax.stages.Traced, options: Mapping[str, str]) -> Callable[[], tuple[Any, str | None]]:
    """Lowers a program; returns a function that compiles it, or reads it, in any thread. It returns as `compiled` does.

    The arguments are those of `compiled`.
    """
    program = traced.lower()
    return partial(_compiled, program, _name_of_program(program, traced.out_info, options))


def _compiled(lowered: jax.stages.Lowered, name: str | None) -> tuple[Any, str | None]:
    """Compiles or reads a program; returns as `compiled` does.

    Args:
      lowered: the program.
      name: as `_name_of_program` returns it; None: the program is not kept.
    """
    if name is None:
        return lowered.compile(), None
    folder = program_files.folder()
    was_there = folder is not None and os.path.lexists(folder / name)
    loaded = _load(name, lowered.in_tree, lowered.out_tree)
    if loaded is not None:
        return loaded, name
    # What JAX reads from its own cache cannot be written again: XLA leaves functions out.
    with _without_cache() if was_there else _watching_cache() as is_new:
        program = lowered.compile()
    return program, name if is_new() and _keep_program(name, program, lowered) else None


def _name_of_program(lowered: jax.stages.Lowered, results: PyTree, options: Mapping[str, str]) -> str | None:
    """Returns the name of a program's file; None if the program cannot be kept.

    Args:
      lowered, options: as for `compiled`.
      results: shapes and types of the results.
    """
    settings = jax.config.values
    checks_results = settings["jax_debug_nans"] or settings["jax_debug_infs"]  # as it runs a program
    if program_files.folder() is None or current().several or checks_results:
        return None
    # Arrays come back from the disk as plain ones.
    if any(is_key(x) or x.weak_type for x in jax.tree.leaves(results)):
        return None
    text = lowered.as_text()
    return None if CALLS_OUTSIDE.search(text) else f"{digest_of(text, sorted(options.items()), machine())}.program"


def _keep_program(name: str, program: jax.stages.Compiled, lowered: jax.stages.Lowered) -> bool:
    """Writes a program that was compiled just now; returns whether it could be written.

    Args:
      name: of its file.
      program: compiled from `lowered`.
      lowered: for the shapes of arguments and results.
    """
    try:
        executable = program.runtime_executable()
        if executable is None:
            return False
        devices = executable.local_devices()
        arguments = jax.tree.leaves(lowered.args_info)
        # None stands for an argument that is not read, and for an absent part of an argument too, which is no leaf.
        shardings = lowered.in_tree.flatten_up_to(program.input_shardings)
        inputs = [
            sharding and (kind_of("", x), _place(sharding, len(x.shape), devices))
            for x, sharding in zip(arguments, shardings, strict=True)
        ]
        # JAX may make arguments of a program's constants, which nobody would pass.
        if len(executable.get_parameter_layouts()) != sum(entry is not None for entry in inputs):
            return False
        results = zip(jax.tree.leaves(lowered.out_info), jax.tree.leaves(program.output_shardings), strict=True)
        outputs = [(x.shape, _place(sharding, len(x.shape), devices)) for x, sharding in results]
        content = np.frombuffer(executable.serialize(), np.uint8)
    except REFUSALS:
        return False
    meta = {"inputs": inputs, "outputs": outputs, "devices": [device.id for device in devices]}
    return program_files.write_program(name, meta, [content])


def _load(name: str, in_tree: Any, out_tree: Any) -> Loaded | None:
    """Returns the program of a file; None if there is none, or none that this version can load.

    Args:
      name: of the file.
      in_tree, out_tree: as for `Loaded`.
    """
    if (stored := program_files.read_program(name)) is None:
        return None
    meta, (content,) = stored
    device_by_id = {device.id: device for device in jax.local_devices()}
    try:
        devices = tuple(device_by_id[id] for id in meta["devices"])
        executable = devices[0].client.deserialize_executable(content.tobytes(), executable_devices=devices)
        return Loaded(executable, meta, in_tree, out_tree)
    except REFUSALS:
        return None


@contextlib.contextmanager
def _watching_cache() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether this thread compiled what JAX's cache did not have."""
    thread = threading.get_ident()
    misses = []

    def listener(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_misses" and threading.get_ident() == thread:
            misses.append(event)

    jax.monitoring.register_event_listener(listener)
    try:
        yield lambda: bool(misses)
    finally:
        jax.monitoring.unregister_event_listener(listener)


@contextlib.contextmanager
def _without_cache() -> Iterator[Callable[[], bool]]:
    """Turns JAX's cache off in the block, so that what is compiled there is new."""
    was_on = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX settles once whether there is a cache
    try:
        yield lambda: True
    finally:
        jax.config.update("jax_enable_compilation_cache", was_on)
        compilation_cache.reset_cache()


class BlockRounds(NamedTuple):
    """The rounds that a call of a compiled block runs."""

    first: ArrayLike  # [] int, the number of the first one, counted from 0
    num_rounds: ArrayLike  # [] int, how many


class KeptRound(NamedTuple):
    """A block of rounds that an earlier process compiled, with what tracing its round would tell."""

    block: Loaded  # (key, state, population, `BlockRounds`, constants) -> (state, log rows, one for each dtype)
    info: dict[str, Any]  # shapes of the info of one round
    constants: list[np.ndarray]  # the large arrays that the round closes over
    round_program: RoundProgram
    private_program: str  # `fingerprint.program_digest` of a private run; "" for any other
    seconds: float  # that reading took


def name_of_round(origin: str | None, key: Array, state: PyTree, population: PyTree) -> str | None:
    """Returns the name of the file of a round; None if its origin is not known.

    Args:
      origin: as `origin_of` returns it; None: not known.
      key, state, population: the arguments of the round, whose shapes and places count.
    """
    if origin is None:
        return None
    arguments = (key, state, population)
    # Static fields of a structure follow from the origin. Their texts may hold addresses in memory.
    structure = re.sub("0x[0-9a-f]+", "", str(jax.tree.structure(arguments)))
    leaves = [(kind_of("", x), getattr(x, "weak_type", False), str(x.sharding)) for x in jax.tree.leaves(arguments)]
    return f"{digest_of(origin, structure, leaves)}.round"


def find_round(name: str | None, key: Array, state: PyTree, population: PyTree) -> KeptRound | None:
    """Returns the round that a file keeps; None if there is none.

    Args:
      name: as `name_of_round` returns it; None: no file keeps it.
      key, state, population: the arguments of the round.

    Guarantees: a run has the log, the state and the fingerprint that it would have if it were traced
    (tests/running/test_warm_starts.py::test_the_same_run).
    """
    start_seconds = time.perf_counter()
    if name is None or (stored := program_files.read_program(name)) is None:
        return None
    meta, constants = stored
    info = {}
    for entry, shapes in meta["info"].items():
        leaves = [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in shapes]
        info[entry] = Count._make(leaves) if len(leaves) == len(Count._fields) else leaves[0]
    log_rows = [0] * len({x.dtype for x in jax.tree.leaves(info)})
    in_tree = jax.tree.structure(((key, state, population, BlockRounds(0, 0), constants), {}))
    block = _load(meta["block"], in_tree, jax.tree.structure((state, log_rows)))
    if block is None:
        return None
    seconds = time.perf_counter() - start_seconds
    return KeptRound(
        block=block,
        info=info,
        constants=constants,
        round_program=RoundProgram(*meta["round_program"]),
        private_program=meta["private_program"],
        seconds=seconds,
    )


def keep_round(
    name: str | None,
    round_program: RoundProgram,
    private_program: str,
    *,
    block: str | None,
    constants: Sequence[Array],
    info: Mapping[str, Any],
) -> None:
    """Keeps a round that was traced and compiled, for `find_round`; what cannot be kept is left out.

    Args:
      name: as `name_of_round` returns it; None: it is not kept.
      round_program, private_program, constants: as in `KeptRound`.
      block: the name of the compiled block's file; None: there is none, so the round is not kept.
      info: of the round, arrays or shapes.
    """
    is_plain = all(isinstance(x, Count) or jax.tree_util.all_leaves([x]) for x in info.values())
    is_small = sum(x.nbytes for x in constants) <= MOST_CONSTANT_BYTES
    if name is None or block is None or not is_plain or not is_small or is_opaque(round_program.sha256):
        return
    meta = {
        "block": block,
        "info": {entry: [(x.shape, x.dtype.name) for x in jax.tree.leaves(value)] for entry, value in info.items()},
        "round_program": round_program,
        "private_program": private_program,
    }
    program_files.write_program(name, meta, [np.asarray(x) for x in constants])
