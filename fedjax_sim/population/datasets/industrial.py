"""Two industrial federations under poisoned reports, with closed forms: sensors to calibrate and loops to tune.

All clients have the same inputs, with mean 0 and covariance the identity, and their targets' noise cancels in pairs. So
a linear model under squared error and the mean learns the clients' average target exactly, and f poisoned clients of m
move it by f / m of what they lie; one full-batch step of learning rate 1/2 from anywhere suffices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.partition import generator
from fedjax_sim.population.poisoned.labels import label_offset
from fedjax_sim.population.poisoned.poisoning import poisoned
from fedjax_sim.population.population import stored
from fedjax_sim.types import Array, ClientData, PyTree
from fedjax_sim.validate import Finite, Integer, Positive

__all__ = ["controller_tuning", "overshoot", "sensor_calibration"]

STIFFNESS, FRICTION = (1.25, 0.4), (0.25, 0.1)  # of a plant: middle, and deviation over the operating points
LEVELS = np.arange(-2, 3) / np.sqrt(2)  # of each feature: mean 0, variance 1


def _federation(
    x: np.ndarray, y: np.ndarray, test: tuple, name: str, measure: Callable, clients: int, noise: float, seed: int
) -> FederatedData:
    """Clients who all hold inputs x [n, k] and targets y [n] plus noise, which clients 2k and 2k + 1 have with opposite
    signs, and an unpaired last one has not."""
    draws = noise * generator(name, seed).standard_normal(((clients + 1) // 2, len(y)))
    errors = np.stack([draws, -draws], 1).reshape(-1, len(y))[:clients]
    if clients % 2:
        errors[-1] = 0
    examples = {"x": np.tile(x, (clients, 1)), "y": (y[None] + errors).reshape(-1, 1)}
    examples = {leaf: value.astype(np.float32) for leaf, value in examples.items()}
    train = stored(examples, np.arange(clients + 1) * len(y))
    central = {"x": test[0].astype(np.float32), "y": test[1].astype(np.float32)[:, None]}
    return FederatedData(train, central, None, x.shape[1:], 1, "regression", name=name, measure=measure)


def _check(num_clients: int, num_poisoned: int, noise: float) -> None:
    validate.integer("num_clients", num_clients)
    validate.integer("num_poisoned", num_poisoned, 0, num_clients)
    validate.in_range("noise", noise, 0)


def _bias(outputs: Array, examples: PyTree) -> dict[str, Array]:
    return {"bias": (outputs - examples["y"])[:, 0]}


@validate.named_arguments
def sensor_calibration(
    *,
    num_clients: int = 10,
    num_poisoned: int = 2,
    offset: float = 5.0,
    gain: Finite = 2.0,
    noise: float = 0.1,
    examples_per_client: Annotated[int, Integer(2)] = 20,
    seed: int = 0,
) -> FederatedData:
    """Sensors learn one calibration curve, y = gain x, from readings at the same reference points; some are off.

    A linear model's mean signed error on the test set, `test_bias`, is num_poisoned / num_clients x offset under the
    mean of all clients, and about 0 under their median.

    Args:
      num_clients: m. num_poisoned: f in [0, m], chosen by the seed; their targets are off by `offset`.
      offset: in the unit of y.
      gain: slope of the true curve.
      noise: standard deviation of an honest reading.
      examples_per_client: at least 2 reference points.
      seed: decides noise and who is poisoned.

    Returns: `FederatedData` of the task "regression", x [n, 1] standardised raw readings, y [n, 1]; the test set is the
      true curve without noise.

    Guarantees: f = 2, m = 10, offset 5: bias 1 under the mean, about 0 under the median
      (tests/population/datasets/test_industrial.py::test_bias_of_mean_and_median).

    >>> data = sensor_calibration()
    >>> data.train.size, data.poisons
    (10, ('targets off by 5 at 2 of 10 clients',))
    """
    _check(num_clients, num_poisoned, noise)
    points = np.linspace(-1, 1, examples_per_client)
    points /= np.sqrt(np.mean(points**2))
    curve = np.linspace(-1.5, 1.5, 101)
    test = curve[:, None], gain * curve
    about = {"name": "sensor_calibration", "measure": _bias, "clients": num_clients, "noise": noise, "seed": seed}
    data = _federation(points[:, None], gain * points, test, **about)
    if not num_poisoned:
        return data
    return label_offset(data, offset=offset, share=num_poisoned / num_clients, seed=seed)


def overshoot(damping_ratio: Array) -> Array:
    """How far a second-order loop's step response passes its set point: exp(-pi zeta / sqrt(1 - zeta^2)).

    Args:
      damping_ratio: zeta, of any shape.

    Returns: a share of the step, in [0, 1]: 0 from zeta = 1 on; 1 up to zeta = 0, where the loop oscillates for
      ever, or ever more.

    Guarantees: the peak of a simulated response
    (tests/population/datasets/test_industrial.py::test_overshoot_is_the_peak).

    References: Ogata 2010, section 5-3.

    >>> [round(float(overshoot(zeta)), 4) for zeta in (0.2, 0.5, 0.7, 1.2, -0.1)]
    [0.5266, 0.163, 0.046, 0.0, 1.0]
    """
    zeta = jnp.asarray(damping_ratio)
    inside = jnp.clip(zeta, 0, 1 - 1e-6)
    return jnp.where(zeta >= 1, 0.0, jnp.exp(-jnp.pi * inside / jnp.sqrt((1 - inside) * (1 + inside))))


def _plant(x: Array) -> tuple[Array, Array]:
    """sqrt(inertia x position gain), and viscous friction, of standardised features [..., 2]."""
    return STIFFNESS[0] + STIFFNESS[1] * x[..., 0], FRICTION[0] + FRICTION[1] * x[..., 1]


def _loop(outputs: Array, examples: PyTree) -> dict[str, Array]:
    stiffness, friction = _plant(examples["x"])
    zeta = (friction + outputs[:, 0]) / (2 * stiffness)
    return {"damping_ratio": zeta, "overshoot": overshoot(zeta), "unstable": (zeta <= 0).astype(jnp.float32)}


def _retuned(change: Array, key: Array, data: ClientData) -> PyTree:
    stiffness, _ = _plant(data.examples["x"])
    y = data.examples["y"]
    return {**data.examples, "y": y + (2 * change * stiffness)[:, None].astype(y.dtype)}


@validate.named_arguments
def controller_tuning(
    *,
    num_clients: int = 10,
    num_poisoned: int = 2,
    damping_ratio: Positive = 0.7,
    poisoned_damping: float = -1.8,
    noise: float = 0.05,
    seed: int = 0,
) -> FederatedData:
    """Sites learn one rule for a controller's velocity gain; poisoned sites report tunings that make loops unstable.

    A plant J theta'' + c theta' = u under u = P (r - theta) - D theta' has the damping ratio
    zeta = (c + D) / (2 sqrt(J P)). Each site reports its tuned gain D at 25 operating points, as a function of
    sqrt(J P) and c. The rule is linear, and everybody uses the one that is learned: under the mean its damping ratio is
    zeta - f / m (zeta - zeta'), at every plant, under the median zeta.

    Args:
      num_clients: m. num_poisoned: f in [0, m], chosen by the seed.
      damping_ratio: zeta > 0 of honest tunings.
      poisoned_damping: zeta' of those that poisoned sites report; the loop is unstable up to 0.
      noise: standard deviation of an honest gain.
      seed: decides noise and who is poisoned.

    Returns: `FederatedData` of the task "regression", x [n, 2] standardised sqrt(J P) and c, y [n, 1] the gain D. An
      evaluation tells `test_damping_ratio`, `test_overshoot` (see `overshoot`) and `test_unstable`, the share of
      unstable loops, at plants under the learned rule.

    Guarantees: from 4.60 % of overshoot to 52.66 % everywhere by two of ten sites, under the mean
      (tests/population/datasets/test_industrial.py::test_overshoot_gets_worse_everywhere).

    >>> data = controller_tuning()
    >>> data.input_shape, data.poisons
    ((2,), ('tuned to a damping ratio of -1.8 at 2 of 10 clients',))
    """
    _check(num_clients, num_poisoned, noise)
    validate.in_range("poisoned_damping", poisoned_damping, high=damping_ratio)

    def tuned(levels):
        x = np.stack(np.meshgrid(levels, levels), -1).reshape(-1, 2)
        stiffness, friction = _plant(x)
        return x, 2 * damping_ratio * stiffness - friction

    test = tuned(np.linspace(LEVELS[0], LEVELS[-1], 20))
    about = {"name": "controller_tuning", "measure": _loop, "clients": num_clients, "noise": noise, "seed": seed}
    data = _federation(*tuned(LEVELS), test, **about)
    if not num_poisoned:
        return data
    change = Partial(_retuned, jnp.float32(poisoned_damping - damping_ratio))
    words = f"tuned to a damping ratio of {poisoned_damping:g}"
    return poisoned(data, change, words, share=num_poisoned / num_clients, seed=seed)
