"""FedProx's local solver: training with a proximal term."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.client.local_sgd import stateless_client, uncorrected
from fedjax_sim.client.work import LocalWork
from fedjax_sim.types import ClientUpdate
from fedjax_sim.validate import NonNegative


def proximal(
    loss_fn: Callable, optimizer: optax.GradientTransformation, coefficient: float, work: LocalWork
) -> ClientUpdate:
    """Makes FedProx's client, which trains with a penalty on the distance from the server's model.

    The client trains on f_i(w) + (coefficient / 2) |w - w_t|^2, where w_t is the broadcast.

    Args:
      loss_fn, optimizer, work: as in `local_sgd`.
      coefficient: >= 0, mu in the paper; 0 is plain local training. Where a text has no factor 1/2, pass twice its
        value. May be traced.

    Guarantees: coefficient 0 gives `local_sgd` bit for bit (tests/client/test_proximal.py::test_zero_is_local_sgd);
    many steps reach the closed-form minimiser on quadratics (::test_reaches_the_closed_form).

    References: Li et al. 2020 (FedProx), equation 2; its stragglers (section 5.2) are `sampling.with_stragglers`.
    """
    return stateless_client(loss_fn, optimizer, work, proximal_term(coefficient))


@validate.named_arguments
def proximal_term(coefficient: NonNegative) -> Callable:
    """Makes the correction of gradients by the proximal term, as `stateless_client` takes it.

    Args:
      coefficient: as in `proximal`. For a known 0 the term is not computed.

    Returns: (broadcast) -> ((gradients of the loss, params) -> gradients of loss and term).
    """

    def correction(broadcast):
        def correct(gradients, params):
            return jax.tree.map(lambda g, w, start: g + coefficient * (w - start), gradients, params, broadcast)

        return correct

    is_known = not isinstance(coefficient, Tracer)
    return uncorrected if is_known and coefficient == 0 else correction
