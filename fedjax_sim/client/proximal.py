"""FedProx's local solver."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from fedjax_sim import validate
from fedjax_sim.client.local_sgd import _client, local_training, minibatch_steps
from fedjax_sim.types import ClientUpdate

__all__ = ["proximal"]


def proximal(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    coefficient: float,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "examples",
    straggler_share: float = 0.0,
) -> ClientUpdate:
    """Local training on f_i(w) + (coefficient / 2) |w - w_t|^2; the convention has the 1/2.

    Args:
      coefficient: lambda >= 0 (mu in the paper); texts that leave out the 1/2 mean half of it. May be traced.
      Others as in `local_sgd`.

    Guarantees: coefficient 0 gives `local_sgd` bit for bit (tests/client/test_proximal.py::test_zero_is_local_sgd);
    many steps reach the closed-form minimiser on quadratics (::test_reaches_the_closed_form).

    References: Li et al. 2020 (FedProx), equation 2; section 5.2 for `straggler_share`.
    """
    validate.in_range("coefficient", coefficient, 0)
    validate.one_of("weighting", weighting, ("examples", "uniform"))
    train = local_training(
        loss_fn,
        optimizer,
        num_steps=num_steps,
        num_epochs=num_epochs,
        batch_size=batch_size,
        straggler_share=straggler_share,
    )

    def correction(broadcast):
        def correct(gradients, params):
            return jax.tree.map(lambda g, w, start: g + coefficient * (w - start), gradients, params, broadcast)

        return correct

    return _client(train, correction, weighting, minibatch_steps(num_steps, num_epochs, batch_size))
