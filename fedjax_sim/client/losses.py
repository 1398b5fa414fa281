"""Computes a client's mean loss, its gradient and its weight, over examples of which some are padding."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Array, ClientData, Mean, PyTree


def check_own(loss_fn: Callable) -> None:
    """Raises an error unless a client can compute the loss function by itself.

    Args:
      loss_fn: as in `client.local_sgd`.

    Raises: TypeError if it is not a function. ValueError for a loss whose attribute `helped` says that other parties
    compute parts of it: messages between the parties would not be counted, and a clock would price all work at the
    client.

    Guarantees: FedAvg, FedProx, SCAFFOLD, `full_gradient` and `private_sgd` refuse the losses of `split_loss` and
    `vertical_loss` (tests/algorithms/split/test_client.py::test_a_loss_of_several_parties_is_no_clients_own).
    """
    validate.loss_function(loss_fn)
    if getattr(loss_fn, "helped", False):
        hint = (
            "Nobody would count what crosses: take algorithms.split_client, splitfed or vertical, by plain local steps."
        )
        validate.fail("loss_fn", "one that the client computes by itself", "one of several parties", hint)


def loss_and_metrics(loss_fn: Callable, params: PyTree, examples: PyTree, mask: Array, key: Array | None):
    """Computes the mean loss over the examples where `mask` is True, and all metrics of the loss.

    Metrics are named `local_<metric>`, because the models differ. Each client's model moves away from the server's
    during training, so the mean of such losses over a round is not the objective at any model.

    Args:
      loss_fn: (params, examples, key) -> losses [b], or a dict of per-example values [b]. The dict holds "loss" and, if
        examples count unequally, "weight". It must not hold "steps", a name that solvers use. key None means
        evaluation.
      params: the model.
      examples: leaves [b, ...]; rows where the mask is False are replaced by zeros before the loss sees them.
      mask: [b] bool; True = a real example.
      key: for losses with dropout or other draws; None: without draws.

    Returns: ([] mean loss, dict of `Mean` by name). The loss is 0 without examples.
    """
    # Padding may hold NaN, and a NaN times a gradient of zero is NaN: zeros take its place before the loss.
    values = loss_fn(params, tree.where(mask, examples, tree.zeros_like(examples)), key)
    values = dict(values) if isinstance(values, dict) else {"loss": values}
    if "loss" not in values or any(jnp.shape(x) != mask.shape for x in values.values()):
        shapes = {name: jnp.shape(x) for name, x in values.items()}
        validate.fail("loss_fn", f"one 'loss' per example, shape {mask.shape}", shapes, "Do not average over examples.")
    if "steps" in values:
        validate.fail("loss_fn", "names other than 'steps', which are the solver's", sorted(values), "Rename it.")
    weights = jnp.where(mask, values.pop("weight", 1.0), 0.0).astype(jnp.float32)
    total_weight = weights.sum()
    # Padding has weight 0, and its values are replaced too: 0 times NaN would be NaN.
    means = {f"local_{name}": Mean((jnp.where(mask, x, 0) * weights).sum(), total_weight) for name, x in values.items()}
    loss = means["local_loss"]
    return loss.total / jnp.where(loss.weight > 0, loss.weight, 1), means


def own_weight(loss_fn: Callable, params: PyTree, data: ClientData, key: Array) -> Array:
    """Sums the weights of a client's own examples.

    An example weighs 1, unless the loss returns a "weight" for each example.
    """
    examples = tree.where(data.mask, data.examples, tree.zeros_like(data.examples))
    value_shapes = jax.eval_shape(loss_fn, params, examples, key)
    if not isinstance(value_shapes, dict) or "weight" not in value_shapes:
        return data.mask.sum(dtype=jnp.float32)
    weights = loss_fn(params, examples, None)["weight"]  # the compiler removes what only the loss needs
    return jnp.where(data.mask, weights, 0).sum(dtype=jnp.float32)


def full_gradient_at(loss_fn: Callable, params: PyTree, data: ClientData, key: Array | None):
    """Computes the gradient of the mean loss over all of a client's examples, in one batch.

    Args:
      loss_fn, key: as in `loss_and_metrics`.
      params: the model at which the gradient is taken.
      data: the client's examples and their mask.

    Returns: (gradient, metrics as `loss_and_metrics` returns them). The gradient is zero without examples.

    Raises: TypeError for parameters that are no floating-point numbers.
    """
    validate.floating_parameters(params)
    return jax.grad(lambda p: loss_and_metrics(loss_fn, p, data.examples, data.mask, key), has_aux=True)(params)
