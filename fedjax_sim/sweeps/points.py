"""Runs many points of a sweep as one compiled program: round by round, split over the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fedjax_sim import engine, tree, validate
from fedjax_sim.prng import init_key
from fedjax_sim.round.counts import word_pair_sum, words_of
from fedjax_sim.running import executables
from fedjax_sim.running.planning import check_memory
from fedjax_sim.sweeps.traced_hyperparameters import Trace, lifted, replay, traced_program
from fedjax_sim.types import Algorithm, Array, Count, PyTree

# What is summed between two looks: counts that show divergence, and what curves are drawn over.
SUMMED = ("dropped_clients", "skipped_rounds", "uplink_bytes", "downlink_bytes", "round_seconds")
POINTS_AT_ONCE = 4096  # points in one program on a device
MEMORY = 0.25  # the share of memory that points may take


class Kind(NamedTuple):
    """An algorithm as traced programs; two kinds with equal `name` differ only in floats."""

    name: Any
    init: Trace
    step: Trace
    params: Trace
    state: PyTree  # shapes and dtypes of the state
    info: PyTree  # shapes and dtypes of a round's info


def traced(algorithm: Algorithm, params: PyTree, population: PyTree) -> Kind:
    """Traces the init, step and params functions of an algorithm on one device.

    Combinations whose kinds have equal names differ only in floats, and share a program.

    Args:
      algorithm: the algorithm of a combination.
      params, population: arrays, or specs: only their shapes and dtypes count.

    Returns: `Kind`, with the three traces, and the shapes and dtypes of the state and of a round's info.

    Raises: ValueError for an algorithm whose state changes its shapes, that has a mesh of its own, or that stops at
    non-finite updates.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    with engine.one_device(), engine.client_memory("device"):
        init, state = traced_program(lambda *args: _strong(algorithm.init(*args)), key, params, population)
        # A new lambda is traced anew: a cached trace may have been made for other devices.
        step, (after, info) = traced_program(lambda *args: algorithm.step(*args), key, state, population)
        model, _ = traced_program(lambda state: jax.tree.map(jnp.asarray, algorithm.params(state)), state)
    if tree.spec(after) != tree.spec(state):
        validate.fail("make", "an algorithm whose state keeps its shapes", tree.spec(after))
    if any(part.uses("shard_map") for part in (init, step)):
        hint = "A sweep splits its points over the devices: leave out mesh, or make it None."
        validate.fail("make", "an algorithm on one device", "one with its own mesh", hint)
    if "error_ids" in info:
        hint = "A sweep reports which points diverged."
        validate.fail("make", "an algorithm that goes on past non-finite updates", "nonfinite='error'", hint)
    return Kind(name=(init.kind, step.kind, model.kind), init=init, step=step, params=model, state=state, info=info)


def _strong(state: PyTree) -> PyTree:
    """Returns the state without the weak types of Python's numbers, because a loop's carry must keep its types."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), state)


def replicated(values: PyTree) -> PyTree:
    """Returns arrays of which every device of a sweep holds a copy."""
    return _put(values, engine.device_mesh(), PartitionSpec())


def _put(values: PyTree, mesh: Mesh | AbstractMesh | None, spec: PartitionSpec) -> PyTree:
    """Puts arrays on the devices of a mesh, split as `spec` says; None is one device."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, values)
    return jax.device_put(values, NamedSharding(mesh, spec))


class Points:
    """Lowers all combinations of one kind as two programs: one starts points, one advances them.

    `compile` compiles them, in any thread, before `run`.

    Args:
      kinds: a `Kind` for each combination, all with one name.
      params: leaves [S, ...], a row for each seed; `replicated`, as the population.
      population: the clients, shared by all points.
      impl: the name of the keys' random generator.
      batch: points vmapped at once. With 1, points run one after the other, each as it would run alone.
      most: the number of points that will be run.
      yields_states: whether `run` yields the algorithms' states, which models of clients' own are in.
    """

    # Both are there once `compile` was called.
    _start: Callable  # (points, active) -> state
    _advance: Callable  # (points, active, state, (first, count)) -> (state, infos, counts, params)

    def __init__(self, kinds: Sequence[Kind], params: PyTree, population: PyTree, *, impl: str, batch: int, most: int,
                 yields_states: bool = False):  # fmt: skip
        self.yields_states = yields_states
        self.kind = kinds[0]
        self.impl = impl
        self.mesh = engine.device_mesh()
        self.devices = self.mesh.size if self.mesh is not None else 1
        self.batch = min(batch, -(-most // self.devices))
        # A point takes about three times the memory of its state, and its info.
        bytes_per_point = 3 * tree.num_bytes(self.kind.state) + tree.num_bytes(self.kind.info)
        bytes_per_group = bytes_per_point * self.devices * self.batch
        most_groups = int(MEMORY * engine.total_memory() / max(bytes_per_group, 1))
        groups_needed = -(-most // (self.devices * self.batch))
        self.groups = max(1, min(most_groups, POINTS_AT_ONCE // self.batch, groups_needed))
        traces = [[getattr(kind, name) for kind in kinds] for name in ("init", "step", "params")]
        self._lower([lifted(traces_of_part) for traces_of_part in traces], params, population)

    def _lower(self, floats: list, params: PyTree, population: PyTree) -> None:
        """Lowers both programs for G groups of B points on each of D devices.

        Args:
          floats: for init, step and params the floats in which combinations differ, as `lifted` returns them: each
            [C, ...] for C combinations, or None.
          params: leaves [S, ...], the initial params of each seed.
          population: the clients.
        """
        start, advance = self._of_one_point()

        # A point is its key data (of the seed, and of the rounds), the row of its combination, and the row of its seed.
        def started(points, shared, active):
            words, _, *combination_and_seed = points
            return self._over(start, active, (words, *combination_and_seed), shared)

        def advanced(points, shared, active, state, first_and_count):
            _, bound, combination, _ = points
            return self._over(advance, active, (bound, combination, state), (*shared, *first_and_count))

        on_each = PartitionSpec()
        split = PartitionSpec(None if self.mesh is None else self.mesh.axis_names[0])
        shared = _put((floats, params, population), self.mesh, on_each)
        # Points of the right shape: the program is compiled for them, and gets other values when it runs.
        words = np.zeros((self.devices * self.groups, self.batch, *_key_shape(self.impl)), np.uint32)
        number = np.zeros(words.shape[:2], np.int32)
        points = _put((words, words, number, number), self.mesh, split)
        zero = np.int32(0)
        places = (split, on_each, on_each)
        compile_start, states = self._lowered(started, (points, shared, zero), places, split)
        # After its start a point needs the floats and the population, and no longer the initial params.
        without_params = (shared[0], shared[2])
        arguments = (points, without_params, zero, states, (zero, zero))
        places = (split, on_each, on_each, split, on_each)
        compile_advance, _ = self._lowered(advanced, arguments, places, split)

        def compile_both() -> None:
            start_all = compile_start()
            advance_all = compile_advance()
            self._start = lambda points, active: start_all(points, shared, active)
            self._advance = lambda points, active, state, first_and_count: advance_all(
                points, without_params, active, state, first_and_count
            )

        self._compile = compile_both
        self._split = split

    def compile(self) -> None:
        """Compiles both programs, or reads what an earlier process compiled.

        Raises: MemoryError if a program does not fit.
        """
        self._compile()

    def _of_one_point(self) -> tuple[Callable, Callable]:
        """Returns two functions of one point: its first state, and `count` rounds of it from round `first` on."""
        init, step, model, _, info = self.kind[1:]
        impl = self.impl

        def of_combination(values: Sequence, combination: Array) -> list:
            """Returns the combination's floats; None for floats that all combinations share."""
            return [None if x is None else x[combination] for x in values]

        def start(point, shared):
            """Returns the first state of a point."""
            words, combination, seed = point
            floats, params, population = shared
            key = init_key(jax.random.wrap_key_data(words, impl=impl))
            values = of_combination(floats[0], combination)
            return replay(init, values, key, jax.tree.map(lambda x: x[seed], params), population)

        def advance(point, shared):
            """Returns (state, last info, counts, params) of a point after `count` rounds from round `first` on."""
            words, combination, state = point
            floats, population, first, count = shared
            key = jax.random.wrap_key_data(words, impl=impl)
            values = of_combination(floats[1], combination)

            def one_round(i, carry):
                state, _, counted = carry
                state, info = replay(step, values, jax.random.fold_in(key, first + i), state, population)
                return state, info, {name: _plus(sum_before, info[name]) for name, sum_before in counted.items()}

            no_info = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info)
            carry = (state, no_info, {name: _zero(info[name]) for name in SUMMED if name in info})
            # Constants must vary over the devices as the results do, or the loop's types would differ.
            carry = tree.varying(carry, words.reshape(-1)[0])
            state, last_info, counted = jax.lax.fori_loop(0, count, one_round, carry)
            return state, last_info, counted, replay(model, of_combination(floats[2], combination), state)

        return start, advance

    def _over(self, of_point: Callable, active: Array, points: tuple, shared: tuple) -> PyTree:
        """Calls `of_point` at each point of the active groups of a device.

        The number of active groups is an argument, so that few points take little time in the same program.

        Args:
          of_point: (values of a point, what all points share) -> results.
          active: [] int32, the groups that are computed, at most G.
          points: leaves [G, B, ...], for B points in each of G groups.
          shared: what all points share.

        Returns: the results, with leaves [G, B, ...]; zeros for groups that are not active.
        """

        def of_group(points):
            if self.batch > 1:
                return jax.vmap(of_point, in_axes=(0, None))(points, shared)
            # A point alone is not vmapped: so it has the bits of its single run.
            result = of_point(jax.tree.map(lambda x: x[0], points), shared)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], result)

        def add_group(i, results):
            points_of_group = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), points)
            put_row = jax.lax.dynamic_update_index_in_dim
            return jax.tree.map(lambda rows, x: put_row(rows, x, i, 0), results, of_group(points_of_group))

        spec = jax.eval_shape(of_group, jax.tree.map(lambda x: x[0], points))
        results = jax.tree.map(lambda x: jnp.zeros((self.groups, *x.shape), x.dtype), spec)
        return jax.lax.fori_loop(0, active, add_group, results)

    def _lowered(self, function: Callable, arguments: tuple, places: tuple, split: PartitionSpec) -> tuple:
        """Lowers a function over the devices.

        Args:
          function: takes and returns arrays of one device.
          arguments: of the function, or their shapes and places.
          places: how each argument is split over the devices.
          split: how the results are split.

        Returns: (a function that compiles the program, and raises MemoryError if it does not fit; the shapes and places
        of its results).
        """
        if self.mesh is not None:
            specs = {"in_specs": places, "out_specs": split, "check_vma": False}
            function = jax.shard_map(function, mesh=self.mesh, **specs)
        with engine.one_device():
            options = engine.compiler_options()
            traced_function = jax.jit(function, compiler_options=options).trace(*arguments)
            compile_function = executables.lowered(traced_function, options)

        def compiled() -> Callable:
            program, _ = compile_function()
            check_memory(engine.needs(program))
            return program

        sharding = None if self.mesh is None else NamedSharding(self.mesh, split)
        results = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), traced_function.out_info
        )
        return compiled, results

    @property
    def room(self) -> int:
        """The number of points that `run` takes at once."""
        return self.devices * self.groups * self.batch

    def run(
        self, words: np.ndarray, bound: np.ndarray, combination: np.ndarray, seed: np.ndarray, rounds: Sequence[int]
    ) -> Iterator[tuple]:
        """Runs n <= room points through all rounds.

        Args:
          words: [n, ...] key data of the seeds.
          bound: [n, ...] key data of the rounds.
          combination, seed: [n] int32, rows of the combinations and of the seeds that the program was made with.
          rounds: the rounds to report, ascending.

        Yields: at each of these rounds (infos of that round, counts since the look before, params, states), leaves
        [n, ...]. The states are `()` unless `yields_states`.
        """
        count = len(seed)
        num_active = -(-count // (self.devices * self.batch))
        # Each device gets the same number of groups, so that all finish together.
        device, row = np.divmod(np.arange(count), num_active * self.batch)
        position = device * self.groups * self.batch + row

        def dealt(x: np.ndarray) -> np.ndarray:
            """Returns rows of points at their positions; other positions repeat the first point, and do not run."""
            rows = np.broadcast_to(x[:1], (self.room, *x.shape[1:])).copy()
            rows[position] = x
            return rows.reshape(self.devices * self.groups, self.batch, *x.shape[1:])

        points = _put(tuple(map(dealt, (words, bound, combination, seed))), self.mesh, self._split)
        state = self._start(points, np.int32(num_active))
        done = 0
        for round in rounds:
            first_and_count = np.int32(done), np.int32(round - done)
            state, *results = self._advance(points, np.int32(num_active), state, first_and_count)
            done = round
            results.append(state if self.yields_states else ())
            yield jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:])[position], tuple(results))


def _key_shape(impl: str) -> tuple[int, ...]:
    """Returns the shape of the data of a key of this random generator."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape


def _zero(entry: Any) -> Array:
    """Returns the empty sum of an entry of a round's info: of a `Count`, the two words of an integer."""
    return jnp.zeros(2, jnp.uint32) if isinstance(entry, Count) else jnp.zeros(entry.shape, entry.dtype)


def _plus(sum_before: Array, entry: Any) -> Array:
    """Returns a sum with another round's entry; bytes are exact modulo 2^64."""
    return word_pair_sum(sum_before, words_of(entry)) if isinstance(entry, Count) else sum_before + entry
