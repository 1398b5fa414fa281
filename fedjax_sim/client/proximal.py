"""FedProx's local solver."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from fedjax_sim import validate
from fedjax_sim.client.local_sgd import stateless_client, uncorrected
from fedjax_sim.client.work import LocalWork
from fedjax_sim.types import ClientUpdate
from fedjax_sim.validate import NonNegative

__all__ = ["proximal", "proximal_term"]


def proximal(
    loss_fn: Callable, optimizer: optax.GradientTransformation, coefficient: float, work: LocalWork
) -> ClientUpdate:
    """Local training on f_i(w) + (coefficient / 2) |w - w_t|^2; the convention has the 1/2.

    Args:
      coefficient: lambda >= 0 (mu in the paper); where a text has no factor 1/2, pass twice its value. May be traced.
      Others as in `local_sgd`.

    Guarantees: coefficient 0 gives `local_sgd` bit for bit (tests/client/test_proximal.py::test_zero_is_local_sgd);
    many steps reach the closed-form minimiser on quadratics (::test_reaches_the_closed_form).

    References: Li et al. 2020 (FedProx), equation 2; its stragglers (section 5.2) are `sampling.with_stragglers`.
    """
    return stateless_client(loss_fn, optimizer, work, proximal_term(coefficient))


@validate.named_arguments
def proximal_term(coefficient: NonNegative) -> Callable:
    """broadcast -> ((gradients, params) -> gradients of the risk and the term); for a known 0 it is not computed.

    Args:
      coefficient: as in `proximal`.
    """

    def correction(broadcast):
        def correct(gradients, params):
            return jax.tree.map(lambda g, w, start: g + coefficient * (w - start), gradients, params, broadcast)

        return correct

    known = not isinstance(coefficient, jax.core.Tracer)
    return uncorrected if known and coefficient == 0 else correction
