"""FedLC, FedRS and FedNTD: FedAvg whose clients do not unlearn the classes that they lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.client.labels import EXCLUDED, rows_of_classes
from fedjax_sim.models import Model, softmax_cross_entropy, supervised
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientData, ClientUpdate, PyTree, Sampler
from fedjax_sim.validate import NonNegative, Positive, Share, named_arguments


@named_arguments
def fedlc(
    model: Model,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    calibration: NonNegative = 1.0,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedLC: each client trains on logits that are lower for the classes of which it has few rows.

    The loss of a row is log sum_c exp(z_c - m_c) - (z_y - m_y), with m_c = calibration n_c^(-1/4), where the client has
    n_c rows of class c. A class without rows has m_c = infinity: it is left out of the sum, so that its output
    does not move. A client with one class alone moves nothing. Predictions are those of the logits themselves.

    Args:
      model: a classifier without state, one logit a class.
      sampler, optimizer, aggregator: as in `fedavg`.
      calibration: tau in the paper, >= 0; 0 is FedAvg, also for classes without rows.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform, downlink, nonfinite, plan, mesh: as in `federated`. Numbers of rows of classes stay at the client.

    Returns: an Algorithm. The info's `local_loss` is the loss that is trained; `local_task_loss` and `local_accuracy`
    are those of the logits themselves.

    Raises: ValueError for targets that are no integer classes, and for a model with one output.

    Guarantees: calibration 0 is FedAvg bit for bit
    (tests/algorithms/server/test_label_skew.py::test_limits_are_fedavg); models match NumPy, with classes that a
    client lacks (::test_matches_numpy); padding is of no class (::test_padding_is_of_no_class). No record-level epsilon
    covers it: a loss that depends on all rows has no gradient of one row.

    References: Zhang et al. 2022 (FedLC); the sum runs over all classes, as in a softmax.
    """

    def calibrated(logits: Array, rows: Array) -> Array:
        margins = calibration / jnp.sqrt(jnp.sqrt(jnp.maximum(rows, 1)))
        # A traced 0 is FedAvg too.
        return logits - jnp.where((rows > 0) | (jnp.asarray(calibration) == 0), margins, EXCLUDED)[None]

    is_known = not isinstance(calibration, Tracer)
    change = None if is_known and calibration == 0 else calibrated
    return _on_changed_logits(change, model, sampler, optimizer, aggregator=aggregator, options=dict(options))


@named_arguments
def fedrs(
    model: Model,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    absent_scale: Share = 0.5,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedRS: each client trains on a softmax in which the logits of the classes that it lacks are scaled down.

    The loss of a row is that of the logits a_c z_c, where a_c is 1 for a class of which the client has a row, and
    `absent_scale` for another one. Predictions are those of the logits themselves.

    Args:
      model: a classifier without state, one logit a class. The paper scales products of weights and features of an
        output layer without biases; here a bias is scaled with them.
      sampler, optimizer, aggregator: as in `fedavg`.
      absent_scale: alpha in the paper, in [0, 1]; 1 is FedAvg. At 0 the logits of absent classes are the constant 0.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform, downlink, nonfinite, plan, mesh: as in `federated`. Which classes a client has stays at the client,
        apart from what its update shows: at 0 the rows of the output layer that did not move are those it lacks.

    Returns, Raises: as `fedlc`.

    Guarantees: scale 1 is FedAvg bit for bit (tests/algorithms/server/test_label_skew.py::test_limits_are_fedavg);
    models match NumPy (::test_matches_numpy). No record-level epsilon covers it, as in `fedlc`.

    References: Li and Zhan 2021 (FedRS), the restricted softmax.
    """

    def restricted(logits: Array, rows: Array) -> Array:
        return logits * jnp.where(rows > 0, 1.0, absent_scale)[None]

    is_known = not isinstance(absent_scale, Tracer)
    change = None if is_known and absent_scale == 1 else restricted
    return _on_changed_logits(change, model, sampler, optimizer, aggregator=aggregator, options=dict(options))


@named_arguments
def fedntd(
    model: Model,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    coefficient: NonNegative = 1.0,
    temperature: Positive = 1.0,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedNTD: each client distils the server's model on the classes that a row is not of.

    The loss of a row is its cross entropy plus coefficient KL(q || p). Here p and q are the softmax of logits divided
    by the temperature, of the local model and of the model that the client received, over all classes but the row's
    own. A local step costs one more evaluation of the model.

    Args:
      model: a classifier without state, one logit a class, of three classes or more: with two classes one is left, and
        nothing can be distilled.
      sampler, optimizer, aggregator: as in `fedavg`.
      coefficient: beta in the paper, >= 0; 0 is FedAvg. Where a text has a factor temperature^2, multiply by it.
      temperature: tau in the paper, > 0.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform, downlink, nonfinite, plan, mesh: as in `federated`. The teacher is what the client received, after a
        `downlink`.

    Returns: an Algorithm. The info's `local_loss` is the loss that is trained, `local_task_loss` the cross entropy, and
    `local_divergence` KL(q || p).

    Raises: as `fedlc`, and for fewer than three classes.

    Guarantees: coefficient 0 is FedAvg bit for bit
    (tests/algorithms/server/test_label_skew.py::test_limits_are_fedavg); models match NumPy
    (::test_matches_numpy); the divergence and its gradient are 0 at the received model
    (::test_the_received_model_teaches_nothing_new).

    References: Lee et al. 2022 (FedNTD), the not-true distillation loss.
    """
    work, round_options = client.local_work(options)

    def loss_of(broadcast: PyTree, data: ClientData) -> Callable:
        rows_of_classes(model, broadcast, data, least=3)  # checks them

        def loss(outputs, y):
            logits, teacher = outputs
            values = softmax_cross_entropy(logits, y)
            divergence = _not_true_divergence(logits / temperature, teacher / temperature, y)
            trained = {"loss": values["loss"] + coefficient * divergence}
            return values | trained | {"task_loss": values["loss"], "divergence": divergence}

        return supervised(_beside(model, broadcast), loss)

    is_off = not isinstance(coefficient, Tracer) and coefficient == 0
    local = _on_own_loss(None if is_off else loss_of, model, optimizer, work)
    return _averaged(sampler, local, aggregator, round_options)


def _on_changed_logits(
    change: Callable | None,
    model: Model,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    aggregator: Aggregator | None,
    options: dict,
) -> Algorithm:
    """Makes FedAvg whose clients train on logits that depend on their numbers of rows.

    Args:
      change: (logits [b, C] float32, rows [C] float32 of each class) -> [b, C]; None = FedAvg.
      model, sampler, optimizer, aggregator: as in `fedlc`.
      options: of `client.work` and `federated`.
    """
    work, round_options = client.local_work(options)

    def loss_of(broadcast: PyTree, data: ClientData) -> Callable:
        rows = rows_of_classes(model, broadcast, data)

        def loss(logits, y):
            assert change is not None, "without a change the plain loss is taken"
            values = softmax_cross_entropy(logits, y)
            wide = logits.astype(tree.at_least_float32(logits.dtype))
            trained = softmax_cross_entropy(change(wide, rows), y)["loss"]
            return values | {"loss": trained, "task_loss": values["loss"]}

        return supervised(model, loss)

    local = _on_own_loss(None if change is None else loss_of, model, optimizer, work)
    return _averaged(sampler, local, aggregator, round_options)


def _on_own_loss(
    loss_of: Callable | None, model: Model, optimizer: optax.GradientTransformation, work: client.LocalWork
) -> ClientUpdate:
    """Makes the client of FedAvg on a loss that depends on what the client received and on all of its rows.

    Args:
      loss_of: (broadcast, ClientData) -> loss_fn, whose "weight" must be that of the plain loss; None = the plain one.
      model: whose plain loss is the cross entropy.
      optimizer, work: as in `client.local_sgd`.
    """
    plain = client.local_sgd(supervised(model, softmax_cross_entropy), optimizer, work)
    if loss_of is None:
        return plain

    def apply(key, broadcast, state, data):
        return client.local_sgd(loss_of(broadcast, data), optimizer, work).apply(key, broadcast, state, data)

    return plain._replace(apply=apply)


def _averaged(sampler: Sampler, local: ClientUpdate, aggregator: Aggregator | None, round_options: dict) -> Algorithm:
    rule = aggregation.mean() if aggregator is None else aggregator
    return federated(sampler, local, rule, server.optimizer(optax.sgd(1.0)), **round_options)


def _beside(model: Model, other: PyTree) -> Model:
    """Makes a model whose outputs are a pair: its own, and those of fixed parameters in evaluation mode.

    Args:
      model: without state.
      other: the fixed parameters.
    """

    def apply(params, state, x, key, train):
        outputs, _ = model.apply(params, state, x, key, train)
        fixed, _ = model.apply(other, state, x, None, False)
        return (outputs, jax.lax.stop_gradient(fixed)), state

    return Model(model.init, apply)


def _not_true_divergence(logits: Array, teacher: Array, y: Array) -> Array:
    """Returns KL(q || p) [n], of softmaxes p of `logits` and q of `teacher` over all classes but the row's own.

    Args:
      logits, teacher: [n, C], divided by the temperature.
      y: [n] integer classes.
    """
    is_true = y[:, None] == jnp.arange(logits.shape[1])[None]
    own, given = (jax.nn.log_softmax(jnp.where(is_true, -EXCLUDED, z.astype(jnp.float32))) for z in (logits, teacher))
    return (jnp.exp(given) * jnp.where(is_true, 0, given - own)).sum(1)
