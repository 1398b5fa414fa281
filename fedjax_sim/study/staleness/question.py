"""What does it cost that models change while clients train on older ones?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

import jax

from fedjax_sim import theory, validate
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs
from fedjax_sim.study.staleness.delays import DIMENSION, equal_delays
from fedjax_sim.study.staleness.figure import staleness_figure
from fedjax_sim.study.staleness.gradients import WEIGHTS
from fedjax_sim.study.staleness.reading import staleness_reading
from fedjax_sim.study.staleness.speeds import buffers, speeds
from fedjax_sim.validate import Integer, NonNegativeInt, Number

__all__ = ["staleness"]

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
    """What does staleness cost? Stability, noise, bias by speed, for FedBuff and FedAsync on quadratics.

    Clients of one speed make every gradient equally stale: steps just below and just above the limit, the floor under
    noise, how wrong a stale gradient is, FedAsync beside FedBuff at one step, and what weights by staleness change.
    Then fast and slow clients with different optima: whose optimum counts under each weight. Then buffers: staleness,
    in versions, and delay, in seconds, are two things.

    Args:
      delays: tau, versions; at most 12. FedAsync is measured at the middle and the longest, weights at the longest.
      weights: some of "constant", "polynomial 0.5", "polynomial 1", "hinge"; the first one is "constant".
      noise: standard deviation of a gradient's coordinates.
      concurrency: C clients in flight where speeds differ, and where buffers are filled; even.
      buffer_sizes: K, at most C.
      num_runs: independent runs behind each floor and each time. speed_runs: behind each mean model.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_staleness.py::test_predictions_hold), and those
    for another delay, or for weights that are ignored, do not (::test_it_can_tell_another_delay).

    References: Xie, Koyejo and Gupta 2019 (FedAsync); Nguyen et al. 2022 (FedBuff); Koloskova, Stich and Jaggi 2022.
    """
    for name, values in (("delays", delays), ("weights", weights), ("buffer_sizes", buffer_sizes)):
        validate.sequence(name, values)
    for one in delays:
        validate.integer("delays", one, 0, 12)
    for one in weights:
        validate.one_of("weights", one, tuple(WEIGHTS))
    if weights[0] != "constant" or len(set(weights)) != len(weights):
        validate.fail("weights", "different names, 'constant' first", list(weights))
    if concurrency % 2:
        validate.fail("concurrency", "an even number", concurrency, "Half of the clients are slow.")
    for one in buffer_sizes:
        validate.integer("buffer_sizes", one, 1, concurrency)
    validate.integer("num_runs", num_runs, least_runs(DIMENSION), hint=FEW)
    key, found = jax.random.key(seed), list[Comparison]()
    delays = sorted(set(delays))
    step = theory.delayed_step_limit(delays[-1]) / 2
    for delay in delays:
        last = delay == delays[-1]
        found += equal_delays(
            stream(key, f"delay {delay}"), delay, step, noise, num_runs, weights if last else weights[:1],
            last or delay == delays[len(delays) // 2],
        )  # fmt: skip
    found += speeds(stream(key, "speeds"), concurrency, weights, speed_runs)
    found += buffers(stream(key, "buffers"), concurrency, sorted(set(buffer_sizes)), num_runs)
    options = {
        "delays": delays, "weights": list(weights), "noise": noise, "concurrency": concurrency,
        "buffer_sizes": list(buffer_sizes), "num_runs": num_runs, "speed_runs": speed_runs, "seed": seed,
    }  # fmt: skip
    reading = list(staleness_reading(found, step))
    return Findings("staleness", QUESTION, found, reading, partial(staleness_figure, found, step, noise), options)
