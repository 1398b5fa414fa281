"""This module measures FedBuff and FedAsync on quadratics under a fixed delay: factors per step, floors, stale errors.

With clients of equal speed every gradient is equally stale, so models follow linear recursions with one delay, and all
of these quantities have closed forms.
"""

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
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.staleness.gradients import WEIGHTS, gradient_fedbuff, noisy_loss, weigh_of
from fedjax_sim.types import Array, Devices

DIMENSION = 8  # of the models under equal delays; curvature 1 in each direction
MIXING = 0.6  # FedAsync's mixing rate alpha
STEP = 0.3  # FedAsync's local step times alpha, and the step of FedBuff beside it
# The sizes of models that are used: squares of larger ones overflow, and their runs stop.
LEAST, MOST = 1e-25, 1e15
FLOAT32_ERROR = 1e-5  # how far float32 may move a factor
CURVATURES = np.linspace(0.1, 1.0, DIMENSION)  # curvatures where stale gradients are measured


class _Lane(NamedTuple):
    """The numbers of a run, in a program that makes many runs side by side.

    Fields:
      step: the server's step, or FedAsync's local step.
      noise: standard deviation of a gradient's coordinates.
      weights: an index in WEIGHTS.
      start: each coordinate of the first model.
      curvatures: [d] eigenvalues of the clients' Hessian.
    """

    step: float
    noise: float = 0.0
    weights: int = 0
    start: float = 0.0
    curvatures: Sequence[float] = (1.0,) * DIMENSION


def floor_step(delays: Sequence[int]) -> float:
    """Returns half of the limit at the longest delay, which is stable at every delay: floors are compared at one step.

    Args:
      delays: tau, in versions.
    """
    return theory.delayed_step_limit(max(delays)) / 2


def _equal(size: int) -> Devices:
    """Makes devices that all take the same time."""
    return network.heterogeneous(size, speed=1e6, bandwidth_down=1e6, bandwidth_up=1e6)


def _paths(make: Callable, key: Array, lanes: Sequence[_Lane], clients: int, steps: int) -> np.ndarray:
    """Runs all lanes as one program and returns their models, [lanes, steps + 1, d] float64.

    Args:
      make: (step, noise, index of weights) -> algorithm, called with traced numbers.
      key: the random key of all runs.
      lanes: the runs.
      clients: N.
      steps: steps of each run.
    """

    def single_run(key, numbers, data):
        step, noise, index, start = numbers
        algorithm = make(step, noise, index)
        state = algorithm.init(key, {"w": start}, data)

        def advance(state, t):
            state, _ = algorithm.step(jax.random.fold_in(key, t), state, data)
            return state, algorithm.params(state)["w"]

        return jnp.concatenate([start[None], jax.lax.scan(advance, state, jnp.arange(steps))[1]])

    centers = np.zeros((clients, DIMENSION))
    # Lanes with equal curvatures share a population.
    populations = {
        curvatures: population.quadratic_population([np.diag(curvatures)] * clients, centers)
        for curvatures in dict.fromkeys(tuple(lane.curvatures) for lane in lanes)
    }
    data = jax.tree.map(lambda *x: jnp.stack(x), *(populations[tuple(lane.curvatures)] for lane in lanes))
    step_and_noise = [jnp.asarray([lane[i] for lane in lanes], jnp.float32) for i in (0, 1)]
    index = jnp.asarray([lane.weights for lane in lanes], jnp.int32)
    starts = jnp.asarray([[lane.start] * DIMENSION for lane in lanes], jnp.float32)
    keys = jax.random.split(key, len(lanes))
    models = kept_results.call(jax.jit(jax.vmap(single_run)), keys, (*step_and_noise, index, starts), data)
    return np.asarray(models, np.float64)


def factor_of(path: np.ndarray) -> float:
    """Measures the factor by which a number that follows a linear recursion changes in each step, in the long run.

    The factor is the modulus of the recursion's largest root. With one real root, quotients of the path give it. With a
    pair of complex roots the path oscillates, but w_t^2 - w_{t-1} w_{t+1} has no phase and changes by the factor's
    square.

    Args:
      path: [steps] the number after each step.
    """
    size = np.abs(path)
    last = int(np.flatnonzero((size < MOST) & (size > LEAST)).max()) - 1
    # The first two thirds of the path are left out, where smaller roots still matter.
    times = np.array([2 * last // 3, last])
    middle = path[times]
    before = path[times - 1]
    after = path[times + 1]
    phaseless = middle**2 - before * after
    # For one real root this combination is zero up to rounding.
    is_real = (np.abs(phaseless) < 1e-5 * (middle**2 + before**2 + after**2)).all()
    ratio = abs(after[1] / after[0]) if is_real else math.sqrt(abs(phaseless[1] / phaseless[0]))
    return float(ratio ** (1 / (times[1] - times[0])))


def equal_delays(
    key: Array, delay: int, *, floor_step: float, noise: float, num_runs: int, weights: Sequence[str], mixing: bool
) -> Iterator[Comparison]:
    """Measures FedBuff with clients of equal speed, where every gradient is `delay` versions old.

    For this, delay + 1 clients are in flight and each arrival makes a version.

    Args:
      key: the random key of all runs.
      delay: tau.
      floor_step: the step at which the floor under noise is measured, beside 3/4 of the limit.
      noise: standard deviation of a gradient's coordinates.
      num_runs: independent runs behind each floor.
      weights: names of WEIGHTS, the first one "constant". The others are measured at 1.01 of the limit and at
        `floor_step`.
      mixing: says whether FedAsync is measured too.

    Yields: factors per step without noise, the error of a stale gradient, floors under noise, and with `mixing` those
      of FedAsync.
    """
    size = delay + 1
    limit = theory.delayed_step_limit(delay)
    names = list(WEIGHTS)
    shared_conditions = {"delay": delay, "weights": "constant", "algorithm": "fedbuff"}
    # Runs without noise need no repetition. Each entry has further conditions and the numbers of the run.
    single = [({"part": "limit", "step_over_limit": share}, _Lane(share * limit, start=1.0)) for share in (0.99, 1.01)]
    single += [({"part": "same step", "step_over_limit": STEP / limit}, _Lane(STEP, start=1.0))] * mixing
    single += [({"part": "weights", "step_over_limit": 1.01, "weights": name},
                _Lane(1.01 * limit, weights=names.index(name), start=1.0)) for name in weights[1:]]  # fmt: skip
    # Runs with noise start at the optimum and are repeated.
    noisy = [
        ({"part": "floor", "step_over_limit": step / limit}, _Lane(step, noise)) for step in (floor_step, 0.75 * limit)
    ]
    noisy += [({"part": "weights", "step_over_limit": floor_step / limit, "weights": name},
               _Lane(floor_step, noise, names.index(name))) for name in weights[1:]]  # fmt: skip
    stale = _Lane(floor_step, start=1.0, curvatures=tuple(CURVATURES))
    lanes = [*(lane for _, lane in single), stale, *(lane for _, lane in noisy for _ in range(num_runs))]

    def make(step, noise, index):
        options = {"concurrency": size, "buffer_size": 1, "refill": "same", "max_staleness": delay + 1}
        return gradient_fedbuff(_equal(size), step, noise, index, **options)

    paths = _paths(make, stream(key, "fedbuff"), lanes, size, _steps(delay, [lane for _, lane in noisy]))
    for (conditions, lane), path in zip(single, paths, strict=False):
        predicted = theory.delayed_contraction(1.0, delay, step_size=_effective(lane, delay))
        yield measured(
            shared_conditions | conditions,
            "factor per step",
            factor_of(path[:, 0]),
            predicted,
            resolution=FLOAT32_ERROR,
        )
    yield from _stale_gradient(shared_conditions | {"part": "error"}, delay, floor_step, paths[len(single)])
    squared_distances = (paths[len(single) + 1 :, -1] ** 2).sum(-1).reshape(len(noisy), num_runs)
    for (conditions, lane), squares in zip(noisy, squared_distances, strict=True):
        floor = theory.delayed_floor(np.eye(DIMENSION), delay, step_size=_effective(lane, delay), noise=noise)
        yield measured(shared_conditions | conditions, "squared distance", squares, floor, resolution=1e-4 * floor)
    if mixing:
        yield from _mixing(stream(key, "fedasync"), delay, noise, num_runs)


def _effective(lane: _Lane, delay: int) -> float:
    """Returns the step times the weight of an update that is `delay` versions old."""
    return lane.step * float(list(WEIGHTS.values())[lane.weights](jnp.array([delay], jnp.int32))[0])


def _steps(delay: int, noisy: Sequence[_Lane]) -> int:
    """Returns enough steps for the variance of the slowest run to settle up to a share of about 1e-5."""
    slowest = max(theory.delayed_contraction(1.0, delay, step_size=_effective(lane, delay)) for lane in noisy)
    return 200 + 40 * delay + math.ceil(math.log(1e-5) / (2 * math.log(slowest)))


def _stale_gradient(conditions: dict[str, Any], delay: int, step: float, path: np.ndarray) -> Iterator[Comparison]:
    """Measures the error of the gradient that a server step used, and compares it with theory.

    The gradient is the difference of two models over the step. Its error is exact by theory, and at most L times the
    distance of the model from the stale version.

    Args:
      conditions: of the comparisons.
      delay: tau.
      step: the server's step size.
      path: [steps + 1, d] models, one for each version.

    Yields: the error against its exact value, and against its bound.
    """
    t = 3 * delay + 3
    used_gradient = (path[t] - path[t + 1]) / step
    fresh_gradient = CURVATURES * path[t]
    exact, bound = stale_prediction(delay, step)
    error = float(np.linalg.norm(used_gradient - fresh_gradient))
    rounding = 2.0**-22 * float(np.linalg.norm(path[t])) / step
    yield measured(conditions, "error of a stale gradient", error, exact, resolution=rounding)
    yield measured(conditions, "the same against its bound", error, bound, kind="upper bound", resolution=rounding)


def stale_prediction(delay: int, step: float) -> theory.StaleError:
    """Predicts the error of the gradient in step 3 (tau + 1), by the recursion in float64, and its bound.

    Args:
      delay: tau.
      step: the server's step size.
    """
    last = 3 * delay + 3
    models = [np.ones(DIMENSION)]
    for t in range(last):
        # The first gradients are all of the first model.
        models.append(models[-1] - step * CURVATURES * models[max(t - delay, 0)])
    return theory.stale_gradient_error(np.diag(CURVATURES), models[last] - models[last - delay])


def _mixing(key: Array, delay: int, noise: float, num_runs: int) -> Iterator[Comparison]:
    """Measures the factor per step and the floor of FedAsync, whose local step times its mixing rate is STEP.

    The recursion is w_{t+1} = (1 - alpha) w_t + alpha (w_{t-tau} - eta g), with alpha = MIXING and eta = STEP / MIXING.
    Its curvature is 1 and its optimum 0.

    Args:
      key: the random key of all runs.
      delay: tau, in versions; tau + 1 clients are in flight.
      noise: sigma, standard deviation of a coordinate of the gradient g.
      num_runs: R independent runs behind the floor.

    Yields: the factor of |w_t| per step, of one run without noise, and E |w|^2 at the floor with R samples.
    """
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
    step_over_limit = STEP / theory.delayed_step_limit(delay)
    conditions = {
        "delay": delay,
        "weights": "constant",
        "algorithm": "fedasync",
        "part": "same step",
        "step_over_limit": step_over_limit,
    }
    yield measured(conditions, "factor per step", factor_of(paths[0, :, 0]), factor, resolution=FLOAT32_ERROR)
    floor = theory.fedasync_floor(np.eye(DIMENSION), delay, **rates, noise=noise)
    squares = (paths[1:, -1] ** 2).sum(-1)
    yield measured(conditions, "squared distance", squares, floor, resolution=1e-4 * floor)
