"""This module makes FedBuff with noisy gradients of quadratics as updates, and lists the weights by staleness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from fedjax_sim import algorithms, population
from fedjax_sim.prng import normal
from fedjax_sim.server.staleness import constant, hinge, polynomial
from fedjax_sim.types import Algorithm, Array, Devices

# Each function gives the factor of an update by its staleness.
WEIGHTS = {
    "constant": constant(),
    "polynomial 0.5": polynomial(0.5),
    "polynomial 1": polynomial(1.0),
    "hinge": hinge(1.0, 4),
}


def noisy_loss(noise: Array | float) -> Callable:
    """Returns a quadratic loss whose gradients have independent normal errors.

    Args:
      noise: standard deviation of each coordinate; it may be traced.
    """

    def loss(params, examples, key):
        # The gradient of noise . w is the noise.
        tilt = noise * normal(key, params["w"].shape)
        return {"loss": population.quadratic_loss(params, examples)["loss"] + tilt @ params["w"]}

    return loss


def weigh_of(index: Array) -> Callable:
    """Returns the weight with this index in `WEIGHTS`.

    Args:
      index: [] it may be traced, so that one program serves all weights.
    """
    return lambda gaps: jnp.stack([weight(gaps) for weight in WEIGHTS.values()])[index]


def gradient_fedbuff(
    devices: Devices, step: Array | float, noise: Array | float, index: Array, **options: Any
) -> Algorithm:
    """Makes FedBuff whose updates are gradients, so that the server's learning rate is the step.

    Args:
      devices: the clients' devices.
      step: the server's step size; it may be traced.
      noise: standard deviation of a gradient's coordinates; it may be traced.
      index: the weight's index in `WEIGHTS`; it may be traced.
      **options: further options of `algorithms.fedbuff`.
    """
    return algorithms.fedbuff(
        noisy_loss(noise), devices, optax.sgd(1.0), population_size=devices.population_size, staleness=weigh_of(index),
        server_optimizer=optax.sgd(step), num_steps=1, mesh=None, **options,
    )  # fmt: skip
