"""FedBuff and FedAsync on quadratics under delay: factors per step, floors, and stale gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, network, population, theory
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.staleness.gradients import WEIGHTS, gradient_fedbuff, noisy_loss, weigh_of
from fedjax_sim.types import Array, Devices

__all__ = ["DIMENSION", "MIXING", "STEP", "equal_delays", "factor_of", "stale_prediction"]

DIMENSION = 8  # of the models under equal delays; curvature 1 in each direction
MIXING, STEP = 0.6, 0.3  # FedAsync's mixing rate alpha; alpha times its local step, and FedBuff's step beside it
LEAST, MOST = 1e-25, 1e15  # of the models that are used: squares of larger ones overflow, and their runs stop
ROUNDED = 1e-5  # what float32 may move a factor by
SPREAD = np.linspace(0.1, 1.0, DIMENSION)  # curvatures where stale gradients are measured


class _Lane(NamedTuple):
    """One run of a program that runs many."""

    step: float
    noise: float = 0.0
    weights: int = 0  # index in WEIGHTS
    start: float = 0.0
    curvatures: Sequence[float] = (1.0,) * DIMENSION


def _equal(size: int) -> Devices:
    """Clients who all take the same time."""
    return network.heterogeneous(size, speed=1e6, bandwidth_down=1e6, bandwidth_up=1e6)


def _paths(make: Callable, key: Array, lanes: Sequence[_Lane], clients: int, steps: int) -> np.ndarray:
    """[lanes, steps + 1, d] float64: the models of runs side by side, as one program."""

    def one(key, step, noise, index, start, data):
        made = make(step, noise, index)
        state = made.init(key, {"w": start}, data)

        def go(state, t):
            state, _ = made.step(jax.random.fold_in(key, t), state, data)
            return state, made.params(state)["w"]

        return jnp.concatenate([start[None], jax.lax.scan(go, state, jnp.arange(steps))[1]])

    centers = np.zeros((clients, DIMENSION))
    tables = {
        curvatures: population.quadratic_population([np.diag(curvatures)] * clients, centers)
        for curvatures in dict.fromkeys(tuple(one.curvatures) for one in lanes)
    }
    data = jax.tree.map(lambda *x: jnp.stack(x), *(tables[tuple(one.curvatures)] for one in lanes))
    numbers = [jnp.asarray([one[i] for one in lanes], jnp.float32) for i in (0, 1)]
    index = jnp.asarray([one.weights for one in lanes], jnp.int32)
    starts = jnp.asarray([[one.start] * DIMENSION for one in lanes], jnp.float32)
    keys = jax.random.split(key, len(lanes))
    return np.asarray(jax.jit(jax.vmap(one))(keys, *numbers, index, starts, data), np.float64)


def factor_of(path: np.ndarray) -> float:
    """The factor per step in the long run of a number [steps] that follows a linear recursion.

    One real root: a quotient. A pair of complex ones: of w_t^2 - w_{t-1} w_{t+1}, which has no phase, the root.
    """
    size = np.abs(path)
    last = int(np.flatnonzero((size < MOST) & (size > LEAST)).max()) - 1
    times = np.array([2 * last // 3, last])
    middle, before, after = path[times], path[times - 1], path[times + 1]
    turns = middle**2 - before * after
    real = (np.abs(turns) < 1e-5 * (middle**2 + before**2 + after**2)).all()
    ratio = abs(after[1] / after[0]) if real else math.sqrt(abs(turns[1] / turns[0]))
    return float(ratio ** (1 / (times[1] - times[0])))


def equal_delays(
    key: Array, delay: int, floor_step: float, noise: float, num_runs: int, weights: Sequence[str], mixing: bool
) -> Iterator[Comparison]:
    """Clients of one speed, delay + 1 in flight: every gradient is `delay` versions old.

    Args:
      floor_step: at which noise's floor is measured, beside 3/4 of the limit.
      weights: names of WEIGHTS, the first one "constant"; others at both 1.01 of the limit and `floor_step`.
      mixing: whether FedAsync is measured too.
    """
    size, limit, names = delay + 1, theory.delayed_step_limit(delay), list(WEIGHTS)
    about = {"delay": delay, "weights": "constant", "algorithm": "fedbuff"}
    single = [({"part": "limit", "step_over_limit": share}, _Lane(share * limit, start=1.0)) for share in (0.99, 1.01)]
    single += [({"part": "same step", "step_over_limit": STEP / limit}, _Lane(STEP, start=1.0))] * mixing
    single += [({"part": "weights", "step_over_limit": 1.01, "weights": name},
                _Lane(1.01 * limit, weights=names.index(name), start=1.0)) for name in weights[1:]]  # fmt: skip
    noisy = [
        ({"part": "floor", "step_over_limit": step / limit}, _Lane(step, noise)) for step in (floor_step, 0.75 * limit)
    ]
    noisy += [({"part": "weights", "step_over_limit": floor_step / limit, "weights": name},
               _Lane(floor_step, noise, names.index(name))) for name in weights[1:]]  # fmt: skip
    stale = _Lane(floor_step, start=1.0, curvatures=tuple(SPREAD))
    lanes = [*(lane for _, lane in single), stale, *(lane for _, lane in noisy for _ in range(num_runs))]

    def make(step, noise, index):
        options = {"concurrency": size, "buffer_size": 1, "refill": "same", "max_staleness": delay + 1}
        return gradient_fedbuff(_equal(size), step, noise, index, **options)

    paths = _paths(make, stream(key, "fedbuff"), lanes, size, _steps(delay, [lane for _, lane in noisy]))
    for (conditions, lane), path in zip(single, paths, strict=False):
        predicted = theory.delayed_contraction(1.0, delay, step_size=_effective(lane, delay))
        yield measured(about | conditions, "factor per step", factor_of(path[:, 0]), predicted, resolution=ROUNDED)
    yield from _stale_gradient(about | {"part": "error"}, delay, floor_step, paths[len(single)])
    ends = (paths[len(single) + 1 :, -1] ** 2).sum(-1).reshape(len(noisy), num_runs)
    for (conditions, lane), squares in zip(noisy, ends, strict=True):
        floor = theory.delayed_floor(np.eye(DIMENSION), delay, step_size=_effective(lane, delay), noise=noise)
        yield measured(about | conditions, "squared distance", squares, floor, resolution=1e-4 * floor)
    if mixing:
        yield from _mixing(stream(key, "fedasync"), delay, noise, num_runs)


def _effective(lane: _Lane, delay: int) -> float:
    """The step times the factor of updates that are all `delay` versions old."""
    return lane.step * float(list(WEIGHTS.values())[lane.weights](np.array([delay]))[0])


def _steps(delay: int, noisy: Sequence[_Lane]) -> int:
    """Until what is left of the start's error is a 1e-5 of its square, for the slowest run."""
    slowest = max(theory.delayed_contraction(1.0, delay, step_size=_effective(lane, delay)) for lane in noisy)
    return 200 + 40 * delay + math.ceil(math.log(1e-5) / (2 * math.log(slowest)))


def _stale_gradient(conditions: dict[str, Any], delay: int, step: float, path: np.ndarray) -> Iterator[Comparison]:
    """The error of the gradient that a server step used, read off its models: exact, and the bound L |w - w_stale|."""
    at = 3 * delay + 3
    used, now = (path[at] - path[at + 1]) / step, SPREAD * path[at]
    exact, bound = stale_prediction(delay, step)
    found, rounding = float(np.linalg.norm(used - now)), 2.0**-22 * float(np.linalg.norm(path[at])) / step
    yield measured(conditions, "error of a stale gradient", found, exact, resolution=rounding)
    yield measured(conditions, "the same against its bound", found, bound, kind="upper bound", resolution=rounding)


def stale_prediction(delay: int, step: float) -> theory.StaleError:
    """The error of the gradient in step 3 (tau + 1), from the recursion in float64, and its bound."""
    at, models = 3 * delay + 3, [np.ones(DIMENSION)]
    for t in range(at):
        models.append(models[-1] - step * SPREAD * models[max(t - delay, 0)])
    return theory.stale_gradient_error(np.diag(SPREAD), models[at] - models[at - delay])


def _mixing(key: Array, delay: int, noise: float, num_runs: int) -> Iterator[Comparison]:
    """FedAsync, whose local step times its mixing rate is STEP: its factor per step and its floor."""
    rates = {"mixing_rate": MIXING, "step_size": STEP / MIXING}
    factor = theory.fedasync_contraction(1.0, delay, **rates)
    steps = 100 + math.ceil(math.log(LEAST) / math.log(factor))  # the second largest root is close to the largest

    def make(step, noise, index):
        size = delay + 1
        return algorithms.fedasync(
            noisy_loss(noise), _equal(size), optax.sgd(step), population_size=size, concurrency=size,
            mixing_rate=MIXING, staleness=weigh_of(index), max_staleness=delay + 1, refill="same", num_steps=1,
            mesh=None,
        )  # fmt: skip

    lanes = [_Lane(rates["step_size"], start=1.0), *[_Lane(rates["step_size"], noise)] * num_runs]
    paths = _paths(make, key, lanes, delay + 1, steps)
    share = STEP / theory.delayed_step_limit(delay)
    conditions = {
        "delay": delay,
        "weights": "constant",
        "algorithm": "fedasync",
        "part": "same step",
        "step_over_limit": share,
    }
    yield measured(conditions, "factor per step", factor_of(paths[0, :, 0]), factor, resolution=ROUNDED)
    floor = theory.fedasync_floor(np.eye(DIMENSION), delay, **rates, noise=noise)
    squares = (paths[1:, -1] ** 2).sum(-1)
    yield measured(conditions, "squared distance", squares, floor, resolution=1e-4 * floor)
