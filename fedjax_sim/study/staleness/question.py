"""This study measures what staleness costs asynchronous servers: stability, noise, and bias towards fast clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import jax

from fedjax_sim import validate
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, rows_of
from fedjax_sim.study.staleness.claims import staleness_claims
from fedjax_sim.study.staleness.delays import DIMENSION, equal_delays, floor_step
from fedjax_sim.study.staleness.figure import staleness_figure
from fedjax_sim.study.staleness.gradients import WEIGHTS
from fedjax_sim.study.staleness.speeds import buffers, speeds
from fedjax_sim.validate import Integer, NonNegativeInt, Number

QUESTION = "What does it cost that the model changes while clients train on older versions of it?"


@validate.named_arguments
def staleness(
    *,
    delays: Sequence[int] = (0, 1, 3, 10),
    weights: Sequence[str] = ("constant", "polynomial 0.5", "polynomial 1", "hinge"),
    noise: Annotated[float, Number(0.01, 100)] = 1.0,
    concurrency: Annotated[int, Integer(2, 64)] = 8,
    buffer_sizes: Sequence[int] = (1, 2, 8),
    num_runs: int = 250,
    speed_runs: Annotated[int, Integer(250)] = 2000,
    seed: NonNegativeInt = 0,
) -> Findings:
    """What does staleness cost? Measures stability, noise and bias by speed, for FedBuff and FedAsync on quadratics.

    The study has three parts:

    - Clients have equal speed, so every gradient is equally stale. Steps just below and just above the stability limit
      are run, and the error floor under noise and the error of a stale gradient are measured. FedAsync is compared with
      FedBuff at one step, and weights by staleness are compared with constant weights.
    - Fast and slow clients have different optima. The study measures how much each half counts under each weight.
    - Buffers have several sizes. Staleness, in versions, is compared with delay, in seconds.

    Args:
      delays: tau in versions, at most 12. FedAsync is measured at the middle and the longest delay, weights at the
        longest.
      weights: some of "constant", "polynomial 0.5", "polynomial 1", "hinge"; the first one is "constant".
      noise: standard deviation of a gradient's coordinates.
      concurrency: C clients in flight in the second and third part; even.
      buffer_sizes: K, at most C.
      num_runs: independent runs behind each floor and each time.
      speed_runs: independent runs behind each mean model of the second part.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_staleness.py::test_predictions_hold).
    Predictions for another delay, or for weights that are ignored, do not (::test_it_can_tell_another_delay).

    References: Xie, Koyejo and Gupta 2019 (FedAsync); Nguyen et al. 2022 (FedBuff); Koloskova, Stich and Jaggi 2022.
    """
    for name, values in (("delays", delays), ("weights", weights), ("buffer_sizes", buffer_sizes)):
        validate.sequence(name, values)
    for value in delays:
        validate.integer("delays", value, 0, 12)
    for value in weights:
        validate.one_of("weights", value, tuple(WEIGHTS))
    # Constant weights are the reference that the others are compared with.
    if weights[0] != "constant" or len(set(weights)) != len(weights):
        validate.fail("weights", "different names, 'constant' first", list(weights))
    if concurrency % 2:
        validate.fail("concurrency", "an even number", concurrency, "Half of the clients are slow.")
    for value in buffer_sizes:
        validate.integer("buffer_sizes", value, 1, concurrency)
    validate.integer("num_runs", num_runs, least_runs(DIMENSION), hint=FEW)
    key = jax.random.key(seed)
    comparisons = list[Comparison]()
    delays = sorted(set(delays))
    for delay in delays:
        is_longest = delay == delays[-1]
        is_middle = delay == delays[len(delays) // 2]
        comparisons += equal_delays(
            stream(key, f"delay {delay}"),
            delay,
            floor_step=floor_step(delays),
            noise=noise,
            num_runs=num_runs,
            weights=weights if is_longest else weights[:1],
            mixing=is_longest or is_middle,
        )
    comparisons += speeds(stream(key, "speeds"), concurrency, weights, speed_runs)
    comparisons += buffers(stream(key, "buffers"), concurrency, sorted(set(buffer_sizes)), num_runs)
    options = {
        "delays": delays, "weights": list(weights), "noise": noise, "concurrency": concurrency,
        "buffer_sizes": list(buffer_sizes), "num_runs": num_runs, "speed_runs": speed_runs, "seed": seed,
    }  # fmt: skip
    rows = rows_of(comparisons)
    return Findings(
        name="staleness",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(staleness_claims(rows, options)),
        figure=partial(staleness_figure, rows, options),
        options=options,
    )
