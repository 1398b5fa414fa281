"""Tunes the clients' step size and proximal weight by gradient descent through the rounds.

    python experiments/hypergradient.py

Each step trains a digits model for 20 rounds and moves both hyper-parameters, on a logarithmic scale, against the
derivative of the held-out loss at the end. Cohorts and minibatches stay the same, so the loss falls smoothly.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.instruments import hypergradient


def main(num_rounds: int = 20, num_steps: int = 8) -> list[float]:
    """The held-out losses on the way."""
    data = population.digits(num_clients=200, alpha=0.3)
    model = models.linear(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params, _ = model.init(jax.random.key(0))

    def make(learning_rate, coefficient):
        sampler = sampling.uniform(200, 20)
        return algorithms.fedprox(
            loss_fn, sampler, optax.sgd(learning_rate), coefficient=coefficient, num_steps=5, batch_size=10
        )

    def held_out(params):
        return loss_fn(params, data.test, jax.random.key(1))["loss"].mean()

    values, losses = {"learning_rate": 0.02, "coefficient": 1.0}, []
    for _ in range(num_steps):
        loss, slope = hypergradient(
            jax.random.key(2), make, values, params, data.train, num_rounds=num_rounds, loss=held_out
        )
        losses.append(loss)
        print(f"loss {loss:.4f}  " + "  ".join(f"{name} {value:.4f}" for name, value in values.items()))
        for name, value in values.items():  # the sign decides where, halves and doubles how far
            values[name] = value * float(jnp.exp(-jnp.clip(2 * value * slope[name], -0.7, 0.7)))
    return losses


if __name__ == "__main__":
    main()
