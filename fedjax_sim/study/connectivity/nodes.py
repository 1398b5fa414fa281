"""Nodes that hold vectors: how their distance decays, the rounds until they agree, and the floor of D-PSGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, network, population, theory
from fedjax_sim.network import Mixing
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.types import Algorithm, Array, ClientData, Population

__all__ = [
    "AGREED",
    "DECAYING",
    "DEGREE",
    "DPSGD_STEP_SIZE",
    "LEAST",
    "NOISE",
    "SMALL",
    "agreement",
    "decay",
    "eigenvalues_of",
    "floors",
]

DEGREE = 8  # of the random graph
AGREED = 1e-3  # of the mean squared distance at the start, at which nodes count as agreed
DECAYING = ("ring", "torus", "exponential", "random")
SMALL = ("path", "ring", "torus", "hypercube", "complete")
DPSGD_STEP_SIZE, NOISE = 0.1, 1.0  # of D-PSGD, on (x - c_i)^2 / 2
FLOOR_ROUNDS = 80  # (1 - STEP_SIZE)^(2 FLOOR_ROUNDS) is negligible beside a floor
LEAST = 1e-8  # of the squared distance at the start: below it float32 rounds


def _loss(params, examples, key):
    return ((params["w"][None] - examples["center"]) ** 2).sum(-1) / 2


def _noisy_loss(params, examples, key):
    """Its gradient has a normal error of standard deviation NOISE."""
    noise = NOISE * jax.random.normal(key, params["w"].shape)
    return _loss(params, examples, key) + (noise * params["w"]).sum()


def _row(centers: Array, id: Array) -> ClientData:
    return ClientData({"center": centers[id][None]}, jnp.ones(1, bool))


def _people(centers: np.ndarray) -> Population:
    return population.generated(len(centers), _row, jnp.asarray(centers, jnp.float32))


def eigenvalues_of(name: str, size: int) -> tuple[np.ndarray, str]:
    """The eigenvalues (or moduli) of the mixing matrix of a graph, [N], and what they are, one of `findings.KINDS`."""
    if name == "exponential":
        return theory.exponential_spectrum(size), "exact"
    if name == "random":
        return (1 + theory.regular_spectrum(size, DEGREE)) / (1 + DEGREE), "estimate"
    if name == "path":
        return np.linalg.eigvalsh(network.matrix_of(network.metropolis(network.path(size))).toarray()), "exact"
    degree = getattr(network, name)(size).in_degrees.max()
    return 1 - theory.laplacian_spectrum(name, size) / (1 + degree), "exact"


def _mixing(name: str, size: int, seed: int) -> Mixing:
    """Equal weights on a regular graph; Metropolis ones on a path."""
    if name == "exponential":
        return network.neighbour_mean(network.exponential(size))
    graph = network.k_regular(size, DEGREE, seed=seed) if name == "random" else getattr(network, name)(size)
    return network.metropolis(graph)


def _consensus(mixing: Mixing) -> Algorithm:
    """Each node starts from its own vector: one step of rate 1 towards it."""
    return algorithms.consensus(_loss, mixing, optax.sgd(1.0), num_steps=1, mesh=None)


def _advance(made: Algorithm, key: Array) -> Callable:
    """(state, people, rounds so far, rounds to come) -> state, as one program."""

    def go(state, people, first, count):
        def one(i, state):
            return made.step(jax.random.fold_in(key, first + i), state, people)[0]

        return jax.lax.fori_loop(0, count, one, state)

    return jax.jit(go)


def decay(key: Array, name: str, size: int, dimension: int, marks: list[int], seed: int) -> Iterator[Comparison]:
    """The nodes' mean squared distance from their mean after some rounds, for independent coordinates."""
    mixing, (values, kind) = _mixing(name, size, seed), eigenvalues_of(name, size)
    made, people = _consensus(mixing), _people(np.random.default_rng([seed, size]).normal(size=(size, dimension)))
    state = made.init(key, {"w": jnp.zeros(dimension)}, people)
    go, before, ids = _advance(made, key), 0, jnp.arange(size, dtype=jnp.int32)
    for mark in marks:
        predicted = float(theory.consensus_error(values, mark))
        if predicted < LEAST:
            return
        state, before = go(state, people, before, mark - before), mark
        models = np.asarray(made.evaluated.personal(state, ids)["w"], np.float64)
        conditions = {"part": "decay", "graph": name, "nodes": size, "rounds": mark}
        squares = ((models - models.mean(0)) ** 2).mean(0)
        yield measured(conditions, "squared distance", squares, predicted, kind=kind, resolution=1e-5 * predicted)


def agreement(key: Array, name: str, size: int, dimension: int, seed: int) -> Iterator[Comparison]:
    """Rounds until the squared distance is AGREED of what it was, and the bytes of one model number that they take."""
    mixing, (values, _) = _mixing(name, size, seed), eigenvalues_of(name, size)
    made, people = _consensus(mixing), _people(np.random.default_rng([seed, size]).normal(size=(size, dimension)))
    predicted = theory.mixing_rounds(values, AGREED)
    state, rounds = made.init(key, {"w": jnp.zeros(dimension)}, people), 2 * predicted + 2

    def run(state, people):
        def one(state, t):
            state, info = made.step(jax.random.fold_in(key, t), state, people)
            return state, (info["consensus_distance"] ** 2, info["uplink_bytes"].number)

        return jax.lax.scan(one, state, jnp.arange(rounds))[1]

    squares, messages = jax.device_get(jax.jit(run)(state, people))
    start = float(theory.consensus_error(values, 0)) * dimension
    found = 1 + int(np.flatnonzero(np.append(squares, 0) <= AGREED * start)[0])
    conditions = {"part": "agreement", "graph": name, "nodes": size, "gap": 1 - float(np.sort(np.abs(values))[-2])}
    conditions["edges"] = mixing.graph.num_edges
    slack = 1 + 0.05 * predicted  # of what random starts have in the slowest mode
    yield measured(conditions, "rounds", found, predicted, resolution=slack)
    each = 4.0 * int(messages[0])
    yield measured(conditions, "bytes", found * each, predicted * each, resolution=slack * each)


def floors(key: Array, size: int, num_runs: int) -> Iterator[Comparison]:
    """The nodes' mean squared distance from the optimum at which D-PSGD stays, for graphs of several gaps."""
    centers = np.cos(2 * np.pi * np.arange(size) / size)[:, None] * np.sqrt(2)  # what a ring evens out last
    people, ids = _people(centers), jnp.arange(size, dtype=jnp.int32)
    for name in SMALL:
        mixing = network.metropolis(getattr(network, name)(size))
        values, vectors = np.linalg.eigh(network.matrix_of(mixing).toarray())
        made = algorithms.dpsgd(_noisy_loss, mixing, optax.sgd(DPSGD_STEP_SIZE), num_steps=1, mesh=None)
        state = made.init(key, {"w": jnp.zeros(1)}, people)

        def last(key, state, people, made=made):
            state = _advance(made, key)(state, people, 0, FLOOR_ROUNDS)
            return (made.evaluated.personal(state, ids)["w"] ** 2).mean()

        keys = jax.random.split(stream(key, f"floor {name}"), num_runs)
        squares = jax.jit(jax.vmap(last, in_axes=(0, None, None)))(keys, state, people)
        rates = {"learning_rate": DPSGD_STEP_SIZE, "curvature": 1.0, "noise": NOISE}
        floor = theory.dpsgd_floor(values, vectors, centers[:, 0], **rates)
        conditions = {"part": "floor", "graph": name, "nodes": size, "gap": 1 - float(np.sort(np.abs(values))[-2])}
        conditions |= {"of_mean": floor.mean, "of_optima": floor.heterogeneity}
        yield measured(conditions, "squared distance", squares, floor.total)
