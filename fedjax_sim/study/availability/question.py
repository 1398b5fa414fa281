"""This study measures the bias and variance of FedAvg when the availability of clients depends on their data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fedjax_sim import validate
from fedjax_sim.study.availability.claims import availability_claims
from fedjax_sim.study.availability.clients import QuadraticFedAvg, day_rows, persistence_rows, rate_rows
from fedjax_sim.study.availability.figure import availability_figure
from fedjax_sim.study.findings import FEW, Findings, least_runs, rows_of
from fedjax_sim.validate import Integer, NonNegativeInt, Number

QUESTION = "What does it cost when who is there depends on the data?"
SLOWER = 10  # of the second step size of training around the clock


@validate.named_arguments
def availability(
    *,
    num_clients: int = 10,
    dimension: Annotated[int, Integer(1, 8)] = 4,
    correlations: Sequence[float] = (0.0, 0.5, 1.0),
    stays: Sequence[float] = (2.0, 8.0, 24.0),
    num_looks: int = 800,
    zone_clients: Annotated[int, Integer(24, 100000)] = 240,
    share: float = 0.25,
    num_steps: Annotated[int, Integer(1, 100)] = 5,
    step_size: Annotated[float, Number(0.02, 0.9)] = 0.2,
    seed: NonNegativeInt = 0,
) -> Findings:
    """What does it cost when availability depends on the data? Measures FedAvg's bias, and the cost of its correction.

    Clients have risks f_i = |w - a_i|^2 / 2. Rounds take simulated time, and all available clients take part. The study
    has three kinds of availability. In the first, a client is available in each round with a probability of its own,
    which may be correlated with a_i. In the second, clients stay and leave for several rounds, independently of a_i.
    In the third, clients are available at night, and a_i depends on their time zone.

    Args:
      num_clients: N, at most 12, since predictions are sums over all sets of clients.
      dimension: d.
      correlations: correlations of clients' rates with the first coordinate of a_i, in [0, 1].
      stays: mean rounds of a presence and of an absence, at least 2.
      num_looks: models of a long run, far apart in time, behind each mean.
      zone_clients: N of the clients with time zones.
      share: the share of the day in which a client with a time zone is available.
      num_steps: K.
      step_size: eta, in (0, 1).
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_availability.py::test_predictions_hold).
    Predictions of other models of availability do not (::test_it_can_tell_other_laws). The closed forms agree with a
    simulation in NumPy (::test_laws).

    References: Bonawitz et al. 2019, section 2.2 (clients of the same hour are alike); Eichner et al. 2019 (data that
    follow the day); Horvitz and Thompson 1952.
    """
    # Predictions are sums over 2^N sets of clients, so N is small. The optima are made orthogonal to the constant
    # vector and to the rates, which takes two clients more than dimensions.
    validate.integer("num_clients", num_clients, dimension + 2, 12, hint="Two more than dimensions.")
    for name, values, low, high in (("correlations", correlations, 0, 1), ("stays", stays, 2, 200)):
        validate.sequence(name, values)
        for i, value in enumerate(values):
            validate.in_range(f"{name}[{i}]", value, low, high)
    validate.integer("num_looks", num_looks, least_runs(dimension), 100_000, hint=FEW)
    # Rounds are an hour apart: a shorter window could lie between two rounds.
    validate.in_range("share", share, 1 / 24, 1, open_high=True)
    work = QuadraticFedAvg(num_steps, step_size)
    comparisons = list(rate_rows(work, num_clients, dimension, correlations, num_looks=num_looks, seed=seed))
    comparisons += persistence_rows(work, num_clients, dimension, stays, num_looks=num_looks, seed=seed)
    # Small steps average over many hours, and so over all time zones.
    slower_work = QuadraticFedAvg(num_steps, step_size / SLOWER)
    comparisons += day_rows(work, zone_clients, share, seed)
    comparisons += day_rows(slower_work, zone_clients, share, seed)
    options = {
        "num_clients": num_clients, "dimension": dimension, "correlations": list(correlations), "stays": list(stays),
        "num_looks": num_looks, "zone_clients": zone_clients, "share": share, "num_steps": num_steps,
        "step_size": step_size, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="availability",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(availability_claims(rows, options)),
        figure=partial(availability_figure, rows, options),
        options=options,
    )
