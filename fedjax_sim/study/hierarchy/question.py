"""This study measures what edge servers under a cloud cost: fixed points, accuracy and traffic against edge rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fedjax_sim import validate
from fedjax_sim.study.findings import Findings, rows_of
from fedjax_sim.study.hierarchy.claims import hierarchy_claims
from fedjax_sim.study.hierarchy.digits import digits_rows
from fedjax_sim.study.hierarchy.figure import hierarchy_figure
from fedjax_sim.study.hierarchy.quadratics import quadratic_rows
from fedjax_sim.study.quadratic_settings import LARGEST_CURVATURE, quadratic_clients
from fedjax_sim.validate import Integer, NonNegativeInt, Number, PositiveInt

QUESTION = "What do edge servers under a cloud cost, and what do they save?"


@validate.named_arguments
def hierarchy(
    *,
    num_clients: Annotated[int, Integer(2)] = 24,
    dimension: Annotated[int, Integer(1, 40)] = 2,
    num_edges: int = 4,
    heterogeneity: Annotated[float, Number(0, 10000.0)] = 2.0,
    edge_rounds: Sequence[int] = (1, 2, 5, 20),
    num_steps: Annotated[int, Integer(1, 200)] = 5,
    step_size: float = 0.1,
    model_clients: NonNegativeInt = 100,
    model_rounds: PositiveInt = 20,
    num_runs: Annotated[int, Integer(2)] = 4,
    seed: NonNegativeInt = 0,
) -> Findings:
    """What do edges under a cloud cost? Measures fixed points, accuracy and cloud traffic against edge rounds.

    Clients with quadratic risks and different Hessians all take part, so nothing is random. An edge has clients whose
    optima are alike, or a mixture. Then softmax regression on digits is compared with flat FedAvg, which has no edges.

    Args:
      num_clients: N of the quadratics.
      dimension: d of the quadratics.
      num_edges: G, which divides N.
      heterogeneity: spread of the quadratics' optima.
      edge_rounds: kappa, edge rounds in each cloud round; rising, 1 among them.
      num_steps: K local steps in an edge round, of the quadratics.
      step_size: eta, of the quadratics.
      model_clients: N of the digits; 0 leaves them out.
      model_rounds: cloud rounds on the digits.
      num_runs: partitions of the digits among clients.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_hierarchy.py::test_predictions_hold). A
    prediction for another number of edge rounds does not (::test_it_can_tell_another_number_of_edge_rounds).

    References: Liu, Zhang, Song and Letaief 2020 (HierFAVG).
    """
    validate.integer("num_edges", num_edges, 1, num_clients)
    if num_clients % num_edges:
        validate.fail("num_edges", f"a divisor of {num_clients} clients", num_edges)
    validate.sequence("edge_rounds", edge_rounds)
    for kappa in edge_rounds:
        validate.integer("edge_rounds", kappa, 1, 1000)
    # One edge round is flat FedAvg, which the claims compare the others with.
    if list(edge_rounds) != sorted(set(edge_rounds)) or edge_rounds[0] != 1:
        validate.fail("edge_rounds", "rising numbers from 1", list(edge_rounds))
    # Very small steps would take more rounds than are run.
    validate.in_range(
        "step_size", step_size, 0.005, 1 / LARGEST_CURVATURE, hint=f"Curvatures go up to {LARGEST_CURVATURE:g}."
    )
    if model_clients:
        validate.integer("model_clients", model_clients, num_edges)
    problem = quadratic_clients(num_clients, dimension, heterogeneity, seed)
    comparisons = list(quadratic_rows(problem, num_edges, edge_rounds, num_steps, step_size))
    if model_clients:
        comparisons += digits_rows(
            model_clients, num_edges, edge_rounds, num_rounds=model_rounds, num_runs=num_runs, seed=seed
        )
    options = {
        "num_clients": num_clients, "dimension": dimension, "num_edges": num_edges, "heterogeneity": heterogeneity,
        "edge_rounds": list(edge_rounds), "num_steps": num_steps, "step_size": step_size,
        "model_clients": model_clients, "model_rounds": model_rounds, "num_runs": num_runs, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="hierarchy",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(hierarchy_claims(rows, options)),
        figure=partial(hierarchy_figure, rows, options),
        options=options,
    )
