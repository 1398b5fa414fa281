"""Many runs as one compiled program: points of one kind, advanced round by round, split over the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_sim import engine, tree, validate
from fedjax_sim.prng import init_key
from fedjax_sim.running.planning import check_memory
from fedjax_sim.sweeps.traced_hyperparameters import Trace, lifted, replay, traced_program
from fedjax_sim.types import Algorithm, Array, PyTree

__all__ = ["Kind", "Points", "traced"]

COUNTED = ("dropped_clients", "skipped_rounds")
MOST = 4096  # points in one program on a device
MEMORY = 0.25  # the share of memory that points may take


class Kind(NamedTuple):
    """An algorithm as programs; two with equal `name` differ in floats only."""

    name: Any
    init: Trace
    step: Trace
    params: Trace
    state: PyTree  # specs
    info: PyTree


def traced(algorithm: Algorithm, params: PyTree, population: PyTree) -> Kind:
    """An algorithm's programs, on one device, for params and a population of these shapes."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    with engine.one_device(), engine.client_memory("device"):
        init, state = traced_program(lambda *args: _strong(algorithm.init(*args)), key, params, population)
        # a function of its own: not a cached trace
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
    return Kind((init.kind, step.kind, model.kind), init, step, model, state, info)


def _strong(state: PyTree) -> PyTree:
    """The state without weak types, which Python's numbers have: a loop's carry must keep its types."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), state)


class Points:
    """All combinations of one kind as two compiled programs, which start points and advance them.

    Args:
      kinds: one per combination, all of one name.
      params: leaves [S, ...], a row for each seed.
      batch: points vmapped at once; 1 runs one after the other, each as it would run alone.
      most: points that will be run.
    """

    def __init__(self, kinds: Sequence[Kind], params: PyTree, population: PyTree, *, impl: str, batch: int, most: int):
        self.kind = kinds[0]
        self.impl = impl
        self.mesh = engine.device_mesh()
        self.devices = self.mesh.size if self.mesh is not None else 1
        self.batch = min(batch, -(-most // self.devices))
        each = 3 * tree.num_bytes(self.kind.state) + tree.num_bytes(self.kind.info)
        fit = int(MEMORY * engine.total_memory() / max(each * self.devices * self.batch, 1))
        self.groups = max(1, min(fit, MOST // self.batch, -(-most // (self.devices * self.batch))))
        parts = [[getattr(kind, name) for kind in kinds] for name in ("init", "step", "params")]
        self._compile([lifted(part) for part in parts], params, population)

    def _compile(self, floats: list, params: PyTree, population: PyTree) -> None:
        start, advance = self._of_one_point()

        def started(points, shared, active):
            own, _, *which = points
            return self._over(start, active, (own, *which), *shared)

        def advanced(points, shared, active, state, first, count):
            _, bound, combination, _ = points
            return self._over(advance, active, (bound, combination, state), *shared, first, count)

        here = PartitionSpec()
        split = PartitionSpec(None if self.mesh is None else self.mesh.axis_names[0])
        shared = self._put((floats, params, population), here)
        words = np.zeros((self.devices * self.groups, self.batch, *_key_shape(self.impl)), np.uint32)
        number = np.zeros(words.shape[:2], np.int32)
        points = self._put((words, words, number, number), split)
        zero = np.int32(0)
        start_all = self._compiled(started, (split, here, here), split, points, shared, zero)
        at_start = start_all(points, shared, zero)  # nothing of it is active
        known = (shared[0], shared[2])
        places = (split, here, here, split, here, here)
        advance_all = self._compiled(advanced, places, split, points, known, zero, at_start, zero, zero)
        self._start = lambda points, active: start_all(points, shared, active)
        self._advance = lambda points, active, state, *rounds: advance_all(points, known, active, state, *rounds)
        self._split = split

    def _of_one_point(self) -> tuple[Callable, Callable]:
        """Functions of one point: its first state, and `count` rounds of it from round `first` on."""
        init, step, model, _, info = self.kind[1:]
        impl = self.impl

        def own(values: Sequence, combination: Array) -> list:
            return [None if x is None else x[combination] for x in values]

        def start(words, combination, seed, floats, params, population):
            key = init_key(jax.random.wrap_key_data(words, impl=impl))
            return replay(init, own(floats[0], combination), key, jax.tree.map(lambda x: x[seed], params), population)

        def advance(words, combination, state, floats, population, first, count):
            key = jax.random.wrap_key_data(words, impl=impl)
            values = own(floats[1], combination)

            def turn(i, carry):
                state, _, counted = carry
                state, info = replay(step, values, jax.random.fold_in(key, first + i), state, population)
                return state, info, {name: counted[name] + info[name] for name in counted}

            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), info)
            carry = (state, nothing, {name: nothing[name] for name in COUNTED if name in info})
            carry = tree.varying(carry, words.reshape(-1)[0])
            state, last, counted = jax.lax.fori_loop(0, count, turn, carry)
            return state, last, counted, replay(model, own(floats[2], combination), state)

        return start, advance

    def _over(self, one: Callable, active: Array, points: tuple, *shared: PyTree) -> PyTree:
        """`one` at each active group of points [groups, batch, ...]."""

        def several(points):
            if self.batch > 1:
                return jax.vmap(one, in_axes=(0,) * len(points) + (None,) * len(shared))(*points, *shared)
            found = one(*jax.tree.map(lambda x: x[0], points), *shared)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], found)

        def group(i, found):
            here = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), points)
            put = jax.lax.dynamic_update_index_in_dim
            return jax.tree.map(lambda rows, x: put(rows, x, i, 0), found, several(here))

        spec = jax.eval_shape(several, jax.tree.map(lambda x: x[0], points))
        out = jax.tree.map(lambda x: jnp.zeros((self.groups, *x.shape), x.dtype), spec)
        return jax.lax.fori_loop(0, active, group, out)

    def _compiled(self, function: Callable, places: tuple, split: PartitionSpec, *args: PyTree) -> Callable:
        """A function over the devices: its arguments in their `places`, its results split over the devices."""
        if self.mesh is not None:
            specs = {"in_specs": places, "out_specs": split, "check_vma": False}
            function = jax.shard_map(function, mesh=self.mesh, **specs)
        with engine.one_device():
            program = jax.jit(function, compiler_options=engine.compiler_options()).lower(*args).compile()
        check_memory(engine.needs(program))
        return program

    def _put(self, values: PyTree, spec: PartitionSpec) -> PyTree:
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, values)
        return jax.device_put(values, NamedSharding(self.mesh, spec))

    @property
    def room(self) -> int:
        """How many points `run` takes at once."""
        return self.devices * self.groups * self.batch

    def run(
        self, words: np.ndarray, bound: np.ndarray, combination: np.ndarray, seed: np.ndarray, rounds: Sequence[int]
    ) -> Iterator[tuple]:
        """Runs n <= room points through all rounds.

        Args:
          words, bound: [n, ...] key data, of the seeds and of the rounds.
          combination, seed: [n] int32, rows of what the program was made with.
          rounds: which to report, ascending.

        Yields: at each of them (infos of that round, counts since the last look, params), leaves [n, ...].
        """
        count = len(seed)
        active = -(-count // (self.devices * self.batch))
        device, row = np.divmod(np.arange(count), active * self.batch)
        place = device * self.groups * self.batch + row

        def dealt(x: np.ndarray) -> np.ndarray:
            rows = np.broadcast_to(x[:1], (self.room, *x.shape[1:])).copy()
            rows[place] = x
            return rows.reshape(self.devices * self.groups, self.batch, *x.shape[1:])

        points = self._put(tuple(map(dealt, (words, bound, combination, seed))), self._split)
        state = self._start(points, np.int32(active))
        done = 0
        for round in rounds:
            state, *seen = self._advance(points, np.int32(active), state, np.int32(done), np.int32(round - done))
            done = round
            yield jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:])[place], tuple(seen))


def _key_shape(impl: str) -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape
