"""FedBuff whose updates are noisy gradients of quadratics, and the weights by staleness that are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from fedjax_sim import algorithms, population
from fedjax_sim.prng import normal
from fedjax_sim.server.staleness import constant, hinge, polynomial
from fedjax_sim.types import Algorithm, Array, Devices

__all__ = ["WEIGHTS", "gradient_fedbuff", "noisy_loss", "weigh_of"]

WEIGHTS = {  # factors of an update by its staleness
    "constant": constant(),
    "polynomial 0.5": polynomial(0.5),
    "polynomial 1": polynomial(1.0),
    "hinge": hinge(1.0, 4),
}


def noisy_loss(noise: Array) -> Callable:
    """A gradient's coordinates have independent normal errors of standard deviation `noise`."""

    def loss(params, examples, key):
        tilt = noise * normal(key, params["w"].shape)
        return {"loss": population.quadratic_loss(params, examples)["loss"] + tilt @ params["w"]}

    return loss


def weigh_of(index: Array) -> Callable:
    """The weight of this index in `WEIGHTS`, which may be traced."""
    return lambda gaps: jnp.stack([one(gaps) for one in WEIGHTS.values()])[index]


def gradient_fedbuff(devices: Devices, step: Array, noise: Array, index: Array, **options: Any) -> Algorithm:
    """FedBuff whose updates are gradients: the server's rate is the step."""
    return algorithms.fedbuff(
        noisy_loss(noise), devices, optax.sgd(1.0), population_size=devices.population_size, staleness=weigh_of(index),
        server_optimizer=optax.sgd(step), num_steps=1, mesh=None, **options,
    )  # fmt: skip
