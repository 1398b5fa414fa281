"""This module measures nodes that hold vectors: decay of distances, rounds until agreement, and floors of D-PSGD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, network, population, theory
from fedjax_sim.network import Mixing
from fedjax_sim.prng import stream
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.types import Algorithm, Array, ClientData, Population

DEGREE = 8  # of the random graph
AGREED = 1e-3  # the share of the squared distance at the start at which nodes count as agreed
DECAYING = ("ring", "torus", "exponential", "random")  # graphs of `decay`
SMALL = ("path", "ring", "torus", "hypercube", "complete")  # graphs of `agreement` and `floors`
# Step size and gradient noise of D-PSGD, on risks (x - c_i)^2 / 2.
DPSGD_STEP_SIZE, NOISE = 0.1, 1.0
FLOOR_ROUNDS = 80  # (1 - DPSGD_STEP_SIZE)^(2 FLOOR_ROUNDS) is negligible beside a floor
LEAST = 1e-8  # the share of the squared distance at the start below which rounding in float32 dominates


def _loss(params, examples, key):
    """Returns |w - c|^2 / 2 for each example."""
    return ((params["w"][None] - examples["center"]) ** 2).sum(-1) / 2


def _noisy_loss(params, examples, key):
    """Returns a loss whose gradient has a normal error of standard deviation NOISE."""
    noise = NOISE * jax.random.normal(key, params["w"].shape)
    return _loss(params, examples, key) + (noise * params["w"]).sum()


def _row(centers: Array, id: Array) -> ClientData:
    """Returns the data of a node: one example, its vector."""
    return ClientData({"center": centers[id][None]}, jnp.ones(1, bool))


def _people(centers: np.ndarray) -> Population:
    """Makes nodes that hold the vectors `centers`, [N, d]."""
    return population.generated(len(centers), _row, jnp.asarray(centers, jnp.float32))


def eigenvalues_of(name: str, size: int) -> tuple[np.ndarray, Literal["exact", "estimate"]]:
    """Returns the eigenvalues of the mixing matrix of a graph, or their moduli where they are complex.

    Args:
      name: the graph's name, an entry of `DECAYING` or `SMALL`.
      size: N.

    Returns: (eigenvalues [N], whether they are exact or an estimate, as an entry of `findings.PREDICTION_KINDS`).
    """
    if name == "exponential":
        return theory.exponential_spectrum(size), "exact"
    if name == "random":
        return (1 + theory.regular_spectrum(size, DEGREE)) / (1 + DEGREE), "estimate"
    if name == "path":
        return np.linalg.eigvalsh(network.matrix_of(network.metropolis(network.path(size))).toarray()), "exact"
    degree = getattr(network, name)(size).in_degrees.max()
    return 1 - theory.laplacian_spectrum(name, size) / (1 + degree), "exact"


def _mixing(name: str, size: int, seed: int) -> Mixing:
    """Makes the mixing matrix: equal weights on the exponential graph, and Metropolis weights on the others."""
    if name == "exponential":
        return network.neighbour_mean(network.exponential(size))
    graph = network.k_regular(size, DEGREE, seed=seed) if name == "random" else getattr(network, name)(size)
    return network.metropolis(graph)


def _consensus(mixing: Mixing) -> Algorithm:
    """Makes the algorithm in which nodes start from their own vectors and then only mix.

    A local step of size 1 on the risk |w - c|^2 / 2 leads to the node's vector c.
    """
    return algorithms.consensus(_loss, mixing, optax.sgd(1.0), num_steps=1, mesh=None)


def _advance(algorithm: Algorithm, key: Array) -> jax.stages.Wrapped:
    """Makes a function (state, people, rounds so far, rounds to come) -> state, as one program.

    Both numbers of rounds are traced, so the program is compiled once.
    """

    def advance(state, people, first, count):
        def step(i, state):
            return algorithm.step(jax.random.fold_in(key, first + i), state, people)[0]

        return jax.lax.fori_loop(0, count, step, state)

    return jax.jit(advance)


def decay(key: Array, name: str, size: int, dimension: int, *, marks: list[int], seed: int) -> Iterator[Comparison]:
    """Measures the nodes' mean squared distance from their mean after several numbers of rounds.

    Args:
      key: the random key of the run.
      name: the graph's name.
      size: N.
      dimension: independent coordinates, which are the samples of the distance.
      marks: numbers of rounds, rising.
      seed: decides the nodes' vectors and a random graph.

    Yields: for each of the marks the squared distance, up to the first whose prediction is below `LEAST`.
    """
    mixing = _mixing(name, size, seed)
    eigenvalues, kind = eigenvalues_of(name, size)
    algorithm = _consensus(mixing)
    people = _people(np.random.default_rng([seed, size]).normal(size=(size, dimension)))
    state = algorithm.init(key, {"w": jnp.zeros(dimension)}, people)
    personal = algorithm.evaluated.personal
    assert personal is not None, "nodes have models of their own"
    advance = _advance(algorithm, key)
    rounds_so_far = 0
    ids = jnp.arange(size, dtype=jnp.int32)
    for rounds in marks:
        predicted = float(theory.consensus_error(eigenvalues, rounds))
        if predicted < LEAST:
            return
        state = kept_results.call(advance, state, people, rounds_so_far, rounds - rounds_so_far)
        rounds_so_far = rounds
        models = np.asarray(personal(state, ids)["w"], np.float64)
        conditions = {"part": "decay", "graph": name, "nodes": size, "rounds": rounds}
        squares = ((models - models.mean(0)) ** 2).mean(0)
        yield measured(conditions, "squared distance", squares, predicted, kind=kind, resolution=1e-5 * predicted)


def agreement(key: Array, name: str, size: int, dimension: int, seed: int) -> Iterator[Comparison]:
    """Compares with theory the rounds until nodes that only average agree, and the bytes that all nodes send by then.

    Nodes agree when their squared distance is at most AGREED times that of the start. Bytes are counted for each number
    of the model.

    Args:
      key: the random key of the run.
      name: the graph's name.
      size: N.
      dimension: d of the nodes' vectors.
      seed: decides the nodes' vectors and a random graph.

    Yields: two comparisons: the rounds, and the bytes.
    """
    mixing = _mixing(name, size, seed)
    eigenvalues, _ = eigenvalues_of(name, size)
    algorithm = _consensus(mixing)
    people = _people(np.random.default_rng([seed, size]).normal(size=(size, dimension)))
    predicted = theory.mixing_rounds(eigenvalues, AGREED)
    state = algorithm.init(key, {"w": jnp.zeros(dimension)}, people)
    num_rounds = 2 * predicted + 2  # with room for a prediction that is too small

    def run(state, people):
        def step(state, t):
            state, info = algorithm.step(jax.random.fold_in(key, t), state, people)
            return state, (info["consensus_distance"] ** 2, info["uplink_bytes"].number)

        return jax.lax.scan(step, state, jnp.arange(num_rounds))[1]

    squares, messages = jax.device_get(kept_results.call(jax.jit(run), state, people))
    squares_at_start = float(theory.consensus_error(eigenvalues, 0)) * dimension
    # The appended zero counts a run that never agrees as one round more than it has.
    rounds = 1 + int(np.flatnonzero(np.append(squares, 0) <= AGREED * squares_at_start)[0])
    gap = 1 - float(np.sort(np.abs(eigenvalues))[-2])
    conditions = {"part": "agreement", "graph": name, "nodes": size, "gap": gap}
    conditions["edges"] = mixing.graph.num_edges
    # Random starts differ in their share of the slowest mode, which moves the number of rounds by a few per cent.
    slack = 1 + 0.05 * predicted
    yield measured(conditions, "rounds", rounds, predicted, resolution=slack)
    bytes_per_round = 4.0 * int(messages[0])  # float32
    yield measured(
        conditions,
        "bytes",
        rounds * bytes_per_round,
        predicted * bytes_per_round,
        resolution=slack * bytes_per_round,
    )


def floors(key: Array, size: int, num_runs: int) -> Iterator[Comparison]:
    """Measures the nodes' mean squared distance from the optimum at the floor of D-PSGD, for several graphs.

    Args:
      key: the random key of all runs.
      size: N, a power of 4.
      num_runs: independent runs on each graph.

    Yields: for each of the graphs `SMALL` the squared distance.
    """
    # Optima that vary like the slowest mode of a ring, so that a ring averages them as slowly as possible.
    centers = np.cos(2 * np.pi * np.arange(size) / size)[:, None] * np.sqrt(2)
    people = _people(centers)
    ids = jnp.arange(size, dtype=jnp.int32)
    for name in SMALL:
        mixing = network.metropolis(getattr(network, name)(size))
        eigenvalues, eigenvectors = np.linalg.eigh(network.matrix_of(mixing).toarray())
        algorithm = algorithms.dpsgd(_noisy_loss, mixing, optax.sgd(DPSGD_STEP_SIZE), num_steps=1, mesh=None)
        state = algorithm.init(key, {"w": jnp.zeros(1)}, people)

        personal = algorithm.evaluated.personal
        assert personal is not None, "nodes have models of their own"

        def final_squared_distance(key, state, people, algorithm=algorithm, personal=personal):
            state = _advance(algorithm, key)(state, people, 0, FLOOR_ROUNDS)
            # The common optimum is zero, the mean of the centers.
            return (personal(state, ids)["w"] ** 2).mean()

        keys = jax.random.split(stream(key, f"floor {name}"), num_runs)
        over_keys = jax.jit(jax.vmap(final_squared_distance, in_axes=(0, None, None)))
        squares = kept_results.call(over_keys, keys, state, people)
        rates = {"learning_rate": DPSGD_STEP_SIZE, "curvature": 1.0, "noise": NOISE}
        floor = theory.dpsgd_floor(eigenvalues, eigenvectors, centers[:, 0], **rates)
        gap = 1 - float(np.sort(np.abs(eigenvalues))[-2])
        conditions = {"part": "floor", "graph": name, "nodes": size, "gap": gap}
        conditions |= {"of_mean": floor.mean, "of_optima": floor.heterogeneity}
        yield measured(conditions, "squared distance", squares, floor.total)
