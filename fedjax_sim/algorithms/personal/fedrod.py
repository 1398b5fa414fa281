"""FedRoD: a shared model trained for all classes alike, and each client's own head beside the shared one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.labels import EXCLUDED, rows_of_classes
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.models import Model, combine, partition, softmax_cross_entropy, supervised
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientUpdate, PyTree, Sampler
from fedjax_sim.validate import NonNegative, named_arguments


@named_arguments
def fedrod(
    model: Model,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    own: Sequence[str] = ("output",),
    exponent: NonNegative = 1.0,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedRoD: a shared model by the balanced softmax, and a head of its own for each client.

    At each local step two losses are computed on one minibatch. The shared model w takes the gradient of the balanced
    softmax, log sum_c n_c^exponent exp(z_c) - log(n_y^exponent exp(z_y)), where the client has n_c rows of class c;
    classes without rows are left out of the sum. The client's own head v takes the gradient of the cross entropy of the
    sum of both heads, of which w is a constant. w is sent and averaged, and v stays at the client.

    Args:
      model: a classifier without state, one logit a class.
      sampler, aggregator: as in `fedavg`.
      optimizer: trains w and v as one pytree {"shared", "own"}.
      own: paths of the head in the parameters (`models.partition`); by default "output", the last layer of
        `models.mlp`, `cnn`, `gru`, `lstm` and `transformer`. v is added to these parameters, which for
        an affine layer, as the paper's, adds v's logits to those of w.
      exponent: of the balanced softmax, 1 in the paper; 0 trains w as FedAvg does.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`. The mean is by examples; the paper
        weighs by rows too.
      transform, downlink, nonfinite, plan, mesh: as in `federated`. Numbers of rows of classes stay at the client.

    v is 0 until a client trains, so that its first model is the shared one; the paper draws it. Its second variant, in
    which a network makes the heads from numbers of rows, is not here.

    Returns: an Algorithm whose `params` is w, the paper's generic model. The info's `local_*` are those of w, where
    `local_loss` is the balanced softmax, and `own_*` those of the sum of both heads.

    Raises: ValueError for a path that the parameters lack, for targets that are no integer classes, and for a model
      with one output.

    Guarantees: models match NumPy (tests/algorithms/personal/test_fedrod.py::test_matches_numpy); with exponent 0 the
    shared model is FedAvg's bit for bit (::test_shared_model_is_fedavgs); bytes are FedAvg's (::test_matches_numpy). No
    record-level epsilon covers it: a loss that depends on all rows has no gradient of one row.

    References: Chen and Chao 2022 (FedRoD), with a linear own head.
    """
    work, round_options = client.local_work(options)
    own = tuple(own)
    plain = supervised(model, softmax_cross_entropy)

    def both_losses(rows: Array) -> Callable:
        shift = jnp.where(rows > 0, exponent * jnp.log(jnp.maximum(rows, 1)), -EXCLUDED)[None]

        def balanced(logits, y):
            wide = logits.astype(tree.at_least_float32(logits.dtype))
            return softmax_cross_entropy(logits, y) | {"loss": softmax_cross_entropy(wide + shift, y)["loss"]}

        is_off = not isinstance(exponent, Tracer) and exponent == 0
        generic = plain if is_off else supervised(model, balanced)

        def loss_fn(models, examples, key):
            shared_values = generic(models["shared"], examples, key)
            constant = jax.lax.stop_gradient(models["shared"])
            own_values = plain(_with_head(constant, models["own"], own), examples, key)
            values = {f"shared_{name}": value for name, value in shared_values.items()}
            values |= {f"own_{name}": value for name, value in own_values.items()}
            return values | {"loss": shared_values["loss"] + own_values["loss"]}

        return loss_fn

    local_training(plain, optimizer, work)  # checks them before a round is traced

    def apply(key, broadcast, head, data):
        train = local_training(both_losses(rows_of_classes(model, broadcast, data)), optimizer, work)
        models = {"shared": broadcast, "own": head}
        training = train(key, models, data, uncorrected(models))
        report = training.report(tree.subtract(training.params["shared"], broadcast), work.weighs_examples())
        named = {name.replace("local_shared_", "local_").replace("local_own_", "own_"): value
                 for name, value in report.metrics.items() if name != "local_loss"}  # fmt: skip
        new_head = tree.where(training.num_examples > 0, training.params["own"], head)
        return report._replace(metrics=named), new_head

    def init(broadcast):
        return tree.zeros_like(partition(broadcast, own)[0])

    rule = aggregation.mean() if aggregator is None else aggregator
    local = ClientUpdate(init, apply, facts_of(work, optimizer))
    step = server.optimizer(optax.sgd(1.0))
    return with_own_models(
        sampler, local, rule, step, lambda shared, head, _: _with_head(shared, head, own), **round_options
    )


def _with_head(shared: PyTree, head: PyTree, own: Sequence[str]) -> PyTree:
    """Returns the shared model with a client's own head added to the parameters at the paths `own`."""
    shared_head, body = partition(shared, own)
    return combine(jax.tree.map(jnp.add, shared_head, head), body)
