"""This module runs quadratic clients under edge servers to their fixed point and counts the cloud rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, population, sampling, theory
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.quadratic_settings import QuadraticProblem

GROUPINGS = ("alike", "mixed")
CLOSE = 0.01  # the share of the distance from the start to the fixed point that is left when rounds are counted
MOST_ROUNDS = 5000  # places for models; no run has more cloud rounds


def groupings(problem: QuadraticProblem, num_edges: int) -> dict[str, np.ndarray]:
    """Assigns clients to edges in two ways.

    Clients are ranked by the first coordinate of their optima. Under "alike" an edge has clients with neighbouring
    ranks. Under "mixed" ranks are dealt to the edges in turn, so each edge has clients of every kind.

    Args:
      problem: the clients.
      num_edges: G.

    Returns: for each way the edge of each client, [N].
    """
    rank = np.argsort(np.argsort(problem.centers[:, 0]))
    return {"alike": rank * num_edges // len(rank), "mixed": rank % num_edges}


def estimated_rounds(contraction: float) -> float:
    """Returns the cloud rounds until `CLOSE` of the way is left, if all directions contract like the slowest one.

    Args:
      contraction: of a cloud round, in [0, 1); it may underflow to zero.
    """
    return math.log(CLOSE) / math.log(max(contraction, 1e-300))


def quadratic_rows(
    problem: QuadraticProblem, num_edges: int, edge_rounds: Sequence[int], num_steps: int, step_size: float
) -> Iterator[Comparison]:
    """Measures the distance of the fixed point to the optimum, and the cloud rounds until 1 % of the way is left.

    Args:
      problem: the clients.
      num_edges: G.
      edge_rounds: kappa, edge rounds in a cloud round.
      num_steps: K local steps in an edge round.
      step_size: eta.

    Yields: for each kappa and grouping two comparisons: the distance, and the rounds.
    """
    size, dimension = problem.centers.shape
    work = {"num_steps": num_steps, "step_size": step_size}
    clients = problem.clients()
    start = problem.start
    for kappa in edge_rounds:
        algorithm = algorithms.hierarchical_fedavg(
            population.quadratic_loss, sampling.full(num_edges), optax.sgd(step_size), num_steps=num_steps,
            edge_rounds=kappa, group_size=-(-size // num_edges), mesh=None,
        )  # fmt: skip

        @jax.jit
        def path(people, rounds, algorithm=algorithm):
            """Returns the models after each cloud round, [MOST_ROUNDS, d]; rows from `rounds` on are zero.

            The number of rounds is traced, so that runs of different lengths share the program.
            """
            state = algorithm.init(jax.random.key(0), {"w": jnp.asarray(start, jnp.float32)}, people)

            def cloud_round(t, carry):
                state, models = carry
                state, _ = algorithm.step(jax.random.key(0), state, people)
                return state, models.at[t].set(algorithm.params(state)["w"])

            return jax.lax.fori_loop(0, rounds, cloud_round, (state, jnp.zeros((MOST_ROUNDS, dimension))))[1]

        for name, edges in groupings(problem, num_edges).items():
            fixed_point = theory.hierarchy_fixed_point(*problem, edges, edge_rounds=kappa, **work)
            contraction = theory.hierarchy_contraction(*problem, edges, edge_rounds=kappa, **work)
            # Enough rounds to shorten the distance to the fixed point by 1e-8.
            rounds = min(MOST_ROUNDS, math.ceil(math.log(1e-8) / math.log(max(contraction, 1e-3))))
            padded_models = kept_results.call(path, population.grouped(clients, edges), rounds)
            models = np.asarray(padded_models, np.float64)[:rounds]
            conditions: dict[str, Any] = {"part": "fixed point", "groups": name, "edge_rounds": kappa}
            distance = np.linalg.norm(models[-1] - problem.optimum)
            predicted_distance = float(np.linalg.norm(fixed_point - problem.optimum))
            yield measured(conditions, "distance to the optimum", distance, predicted_distance, resolution=2e-5)
            share_left = np.linalg.norm(models - fixed_point, axis=1) / np.linalg.norm(start - fixed_point)
            num_rounds = 1 + int(np.argmax(share_left <= CLOSE))
            conditions |= {"part": "speed", "cloud_bytes": num_rounds * num_edges * 4 * dimension}  # float32, uplink
            quantity = "cloud rounds until 1 % of the way is left"
            yield measured(conditions, quantity, num_rounds, estimated_rounds(contraction), kind="estimate")
