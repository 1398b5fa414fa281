"""FedSAM's client: local steps by the gradient at a nearby point of higher loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.client.local_sgd import local_sgd, stateless_client, uncorrected
from fedjax_sim.client.losses import full_gradient_at
from fedjax_sim.client.work import LocalWork
from fedjax_sim.types import Array, ClientData, ClientUpdate, PyTree
from fedjax_sim.validate import NonNegative


@validate.named_arguments
def sharpness_aware(
    loss_fn: Callable, optimizer: optax.GradientTransformation, radius: NonNegative, work: LocalWork
) -> ClientUpdate:
    """Makes FedSAM's client, which looks for a minimum whose neighbourhood has a low loss too.

    At each step, with g = grad f(w) of the minibatch, the optimiser sees grad f(w + radius g / |g|) of the same
    minibatch, with the same key. The norm is that of the whole gradient. A gradient of zero moves nothing. A step costs
    two gradients.

    Args:
      loss_fn, optimizer, work: as in `local_sgd`.
      radius: rho in the paper, >= 0; 0 is plain local training. May be traced.

    Returns: a stateless ClientUpdate as `local_sgd` makes it. Its metrics are those at w.

    Guarantees: radius 0 gives `local_sgd` bit for bit (tests/algorithms/server/test_fedsam.py::test_zero_is_fedavg);
    steps match NumPy (tests/client/test_sharpness_aware.py::test_matches_numpy), also where squares of gradients are no
    float32 (::test_any_scale).

    References: Foret et al. 2021 (SAM); Qu et al. 2022 (FedSAM), algorithm 1.

    >>> import jax, jax.numpy as jnp, optax
    >>> from fedjax_sim.client import work
    >>> from fedjax_sim.types import ClientData
    >>> client = sharpness_aware(lambda w, x, key: (w - x) ** 2 / 2, optax.sgd(0.5), 0.1, work(num_steps=1))
    >>> report, _ = client.apply(jax.random.key(0), jnp.float32(0), (), ClientData(jnp.ones(1), jnp.ones(1, bool)))
    >>> round(float(report.update), 5)  # the gradient -1 at 0 is -1.1 at -0.1
    0.55
    """
    if not isinstance(radius, Tracer) and radius == 0:
        return local_sgd(loss_fn, optimizer, work)

    def gradient_nearby(loss_fn: Callable, params: PyTree, batch: ClientData, key: Array):
        gradient, means = full_gradient_at(loss_fn, params, batch, key)
        # In units of its largest number no square overflows, and their sum does not vanish.
        peak = jnp.stack([jnp.abs(g).max(initial=0).astype(jnp.float32) for g in jax.tree.leaves(gradient)]).max()
        unit = jnp.where(peak > 0, peak, 1)
        direction = jax.tree.map(lambda g: g.astype(jnp.float32) / unit, gradient)
        norm = jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(direction)))
        length = radius / jnp.where(norm > 0, norm, 1)
        nearby = jax.tree.map(lambda w, x: w + (length * x).astype(w.dtype), params, direction)
        return full_gradient_at(loss_fn, nearby, batch, key)[0], means

    return stateless_client(loss_fn, optimizer, work, uncorrected, gradient_at=gradient_nearby)
