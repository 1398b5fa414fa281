"""This module has two industrial federations with poisoned reports: sensors to calibrate, and control loops to tune.

The effect of the poison has a closed form. All clients have the same inputs, with mean 0 and the identity as
covariance, and the noise of their targets cancels in pairs. So a linear model, trained on the squared error and
aggregated by the mean, learns the clients' average target exactly. If f of m clients are poisoned, the model moves by
f / m times the error of their targets. One full-batch step of learning rate 1/2 reaches this model from any start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

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

ArrayT = TypeVar("ArrayT", Array, np.ndarray)
# Of a plant: the mean and the standard deviation over the operating points.
STIFFNESS = (1.25, 0.4)
FRICTION = (0.25, 0.1)
FEATURE_LEVELS = np.arange(-2, 3) / np.sqrt(2)  # the values of each feature, with mean 0 and variance 1


def _federation(
    x: np.ndarray,
    y: np.ndarray,
    test: tuple[np.ndarray, np.ndarray],
    *,
    name: str,
    measure: Callable,
    clients: int,
    noise: float,
    seed: int,
) -> FederatedData:
    """Builds a data set whose clients all hold the inputs x [n, k], and the targets y [n] plus noise of their own.

    Clients 0 and 1, 2 and 3, ... have the same noise with opposite signs, and an unpaired last client has none. So the
    noise cancels in the mean over clients, up to the rounding of targets to float32.

    Args:
      x, y: of one client, without noise.
      test: x and y of the test set.
      name, measure: see `FederatedData`.
      clients: their number.
      noise: standard deviation.
      seed: of the noise.
    """
    # One draw for each pair of clients, then both signs, interleaved.
    draws = noise * generator(name, seed).standard_normal(((clients + 1) // 2, len(y)))
    errors = np.stack([draws, -draws], 1).reshape(-1, len(y))[:clients]
    if clients % 2:
        errors[-1] = 0
    examples = {"x": np.tile(x, (clients, 1)), "y": (y[None] + errors).reshape(-1, 1)}
    examples = {leaf: value.astype(np.float32) for leaf, value in examples.items()}
    train = stored(examples, np.arange(clients + 1) * len(y), learned=())
    central_test = {"x": test[0].astype(np.float32), "y": test[1].astype(np.float32)[:, None]}
    return FederatedData(
        train=train,
        test=central_test,
        held_out=None,
        input_shape=x.shape[1:],
        num_outputs=1,
        task="regression",
        name=name,
        measure=measure,
    )


def _check(num_clients: int, num_poisoned: int, noise: float) -> None:
    """Refuses options out of range that both data sets have."""
    validate.integer("num_clients", num_clients)
    validate.integer("num_poisoned", num_poisoned, 0, num_clients)
    validate.in_range("noise", noise, 0)


def _bias(outputs: Array, examples: PyTree) -> dict[str, Array]:
    """Measures the signed error of each output."""
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
    """Sensors learn one calibration curve, y = gain x, from readings at the same reference points.

    Poisoned sensors report readings that are off by a constant. An evaluation reports `test_bias`, the mean signed
    error of the model on the test set. If messages are aggregated by the mean, a linear model has the bias
    num_poisoned / num_clients x offset. If they are aggregated by the median, its bias is about 0.

    Args:
      num_clients: m.
      num_poisoned: f in [0, m]. The poisoned clients are chosen by the seed, and their targets are off by `offset`.
      offset: in the unit of y.
      gain: slope of the true curve.
      noise: standard deviation of an honest reading.
      examples_per_client: the number of reference points, at least 2.
      seed: of the noise and of the choice of poisoned clients.

    Returns: `FederatedData` of the task "regression", with x [n, 1] standardised raw readings and y [n, 1]. The test
      set is the true curve without noise.

    Guarantees: for f = 2, m = 10 and offset 5, the bias is 1 under the mean and about 0 under the median
      (tests/population/datasets/test_industrial.py::test_bias_of_mean_and_median).

    >>> data = sensor_calibration()
    >>> data.train.size, data.poisons
    (10, ('targets off by 5 at 2 of 10 clients',))
    """
    _check(num_clients, num_poisoned, noise)
    points = np.linspace(-1, 1, examples_per_client)
    points /= np.sqrt(np.mean(points**2))  # variance 1
    test_points = np.linspace(-1.5, 1.5, 101)
    test = test_points[:, None], gain * test_points
    data = _federation(
        points[:, None],
        gain * points,
        test,
        name="sensor_calibration",
        measure=_bias,
        clients=num_clients,
        noise=noise,
        seed=seed,
    )
    if not num_poisoned:
        return data
    return label_offset(data, offset=offset, share=num_poisoned / num_clients, seed=seed)


def overshoot(damping_ratio: Array) -> Array:
    """Computes how far the step response of a second-order loop passes its set point: exp(-pi zeta / sqrt(1 - zeta^2)).

    Args:
      damping_ratio: zeta, of any shape.

    Returns: the overshoot as a share of the step, in [0, 1]. It is 0 for zeta >= 1. It is 1 for zeta <= 0, where the
      loop oscillates for ever or is unstable.

    Guarantees: it equals the peak of a simulated response
    (tests/population/datasets/test_industrial.py::test_overshoot_is_the_peak).

    References: Ogata 2010, section 5-3.

    >>> [round(float(overshoot(zeta)), 4) for zeta in (0.2, 0.5, 0.7, 1.2, -0.1)]
    [0.5266, 0.163, 0.046, 0.0, 1.0]
    """
    zeta = jnp.asarray(damping_ratio)
    # The formula is finite for zeta in [0, 1) only. Clipping keeps the branch that is not selected finite as well.
    clipped = jnp.clip(zeta, 0, 1 - 1e-6)
    return jnp.where(zeta >= 1, 0.0, jnp.exp(-jnp.pi * clipped / jnp.sqrt((1 - clipped) * (1 + clipped))))


def _plant(x: ArrayT) -> tuple[ArrayT, ArrayT]:
    """Returns sqrt(inertia x position gain) and the viscous friction of standardised features [..., 2]."""
    stiffness = STIFFNESS[0] + STIFFNESS[1] * x[..., 0]
    friction = FRICTION[0] + FRICTION[1] * x[..., 1]
    return stiffness, friction


def _loop(outputs: Array, examples: PyTree) -> dict[str, Array]:
    """Measures the control loops whose velocity gains are the model's outputs."""
    stiffness, friction = _plant(examples["x"])
    zeta = (friction + outputs[:, 0]) / (2 * stiffness)
    return {"damping_ratio": zeta, "overshoot": overshoot(zeta), "unstable": (zeta <= 0).astype(jnp.float32)}


def _retuned(change: Array, key: Array, data: ClientData) -> PyTree:
    """Returns the examples with gains that change every loop's damping ratio by `change`."""
    stiffness, _ = _plant(data.examples["x"])
    # zeta = (c + D) / (2 stiffness), so a change of zeta by d changes the gain D by 2 d stiffness.
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
    """Sites learn one rule for the velocity gain of a controller. Poisoned sites report gains that make loops unstable.

    The plant is J theta'' + c theta' = u, and the controller u = P (r - theta) - D theta'. Together they have the
    damping ratio zeta = (c + D) / (2 sqrt(J P)). Each site reports its tuned gain D at 25 operating points, as a
    function of sqrt(J P) and c. This function is linear, and all sites use the rule that they learn together.

    If messages are aggregated by the mean, the learned rule has the damping ratio zeta - f / m (zeta - zeta') at every
    plant. If they are aggregated by the median, it has zeta.

    Args:
      num_clients: m.
      num_poisoned: f in [0, m]. The poisoned clients are chosen by the seed.
      damping_ratio: zeta > 0 of honest reports.
      poisoned_damping: zeta' of the reports of poisoned sites. A loop is unstable for zeta' <= 0.
      noise: standard deviation of an honest gain.
      seed: of the noise and of the choice of poisoned clients.

    Returns: `FederatedData` of the task "regression", with x [n, 2] standardised sqrt(J P) and c, and y [n, 1] the gain
      D. An evaluation reports `test_damping_ratio`, `test_overshoot` (see `overshoot`) and `test_unstable`, the share
      of unstable loops, for plants under the learned rule.

    Guarantees: under the mean, two of ten sites raise the overshoot from 4.60 % to 52.66 % at every plant
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

    test = tuned(np.linspace(FEATURE_LEVELS[0], FEATURE_LEVELS[-1], 20))
    x, y = tuned(FEATURE_LEVELS)
    data = _federation(x, y, test, name="controller_tuning", measure=_loop, clients=num_clients, noise=noise, seed=seed)
    if not num_poisoned:
        return data
    change = Partial(_retuned, jnp.float32(poisoned_damping - damping_ratio))
    words = f"tuned to a damping ratio of {poisoned_damping:g}"
    return poisoned(data, change, words, share=num_poisoned / num_clients, seed=seed)
