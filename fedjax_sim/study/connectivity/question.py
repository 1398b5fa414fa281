"""This study measures how fast nodes without a server agree, what it costs, and how far apart gradients keep them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import jax

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.study.connectivity.claims import connectivity_claims
from fedjax_sim.study.connectivity.figure import connectivity_figure
from fedjax_sim.study.connectivity.nodes import DECAYING, SMALL, agreement, decay, floors
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, rows_of
from fedjax_sim.validate import Integer, NonNegativeInt

QUESTION = "How well must nodes without a server be connected?"


@validate.named_arguments
def connectivity(
    *,
    num_nodes: Annotated[int, Integer(16, 1000000)] = 10_000,
    rounds: Sequence[int] = (1, 2, 5, 10, 20, 50, 100, 200),
    dimension: Annotated[int, Integer(8, 10000)] = 64,
    few_nodes: Annotated[int, Integer(4, 1024)] = 64,
    num_runs: int = 2000,
    seed: NonNegativeInt = 0,
) -> Findings:
    """How well must nodes be connected? Measures decay of distances, rounds and bytes to agreement, floors of D-PSGD.

    In the first part nodes hold independent normal vectors and average them with their neighbours, without gradients:
    on a ring, a torus, the exponential graph and a random graph of degree 8. The other parts have fewer nodes, on
    graphs from a path to the complete graph. They measure rounds and bytes until nodes agree, and the error floor of
    D-PSGD on noisy quadratics with different optima.

    Args:
      num_nodes: N of the first part, a product of two integers of at least 2.
      rounds: numbers of rounds after which the distance is measured.
      dimension: d of the vectors, which is the number of independent samples behind each measured distance.
      few_nodes: N of the other parts, a power of 4.
      num_runs: independent runs behind each floor.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every exact prediction lies in its interval (tests/study/test_connectivity.py::test_predictions_hold).
    A rate that is computed from the second eigenvalue alone does not (::test_it_can_tell_a_wrong_rate).

    References: Boyd, Ghosh, Prabhakar and Shah 2006; Lian et al. 2017; Ying et al. 2021.
    """
    validate.sequence("rounds", rounds)
    for value in rounds:
        validate.integer("rounds", value, 1, 100_000)
    # A power of two with an odd number of bits is a power of 4.
    if few_nodes & (few_nodes - 1) or few_nodes.bit_length() % 2 == 0:
        validate.fail("few_nodes", "a power of 4", few_nodes, "It has a hypercube and a square torus.")
    validate.integer("num_runs", num_runs, least_runs(1), hint=FEW)
    key = jax.random.key(seed)
    measured_rounds = sorted(set(rounds))
    comparisons: list[Comparison] = []
    for name in DECAYING:
        comparisons += decay(stream(key, f"decay {name}"), name, num_nodes, dimension, marks=measured_rounds, seed=seed)
    for name in SMALL:
        comparisons += agreement(stream(key, f"agreement {name}"), name, few_nodes, dimension, seed)
    comparisons += floors(key, few_nodes, num_runs)
    options = {
        "num_nodes": num_nodes, "rounds": list(rounds), "dimension": dimension, "few_nodes": few_nodes,
        "num_runs": num_runs, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="connectivity",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(connectivity_claims(rows, options)),
        figure=partial(connectivity_figure, rows, options),
        options=options,
    )
