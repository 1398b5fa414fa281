"""IFCA: several shared models, of which each client trains the one that fits its own rows best."""

from __future__ import annotations

import math
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import aggregation, client, server, tree, validate
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.client.losses import loss_and_metrics
from fedjax_sim.prng import stream
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.transform import identity
from fedjax_sim.transform.chain import plain_wire
from fedjax_sim.types import Algorithm, ClientUpdate, Mean, ParamsKind, PyTree, Sampler, ServerUpdate, UpdateTransform
from fedjax_sim.validate import Integer, LossFn, NonNegative, NonNegativeInt, named_arguments


class IFCAOptions(client.LocalOptions, ExecutionOptions, total=False):
    """The options of `client.work`, and how a round is computed."""


@named_arguments
def ifca(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    num_clusters: Annotated[int, Integer(1, 1000)] = 4,
    spread: NonNegative = 0.1,
    start_seed: NonNegativeInt = 0,
    **options: Unpack[IFCAOptions],
) -> Algorithm:
    """Makes IFCA: the server holds several models, and each client trains the one with the lowest loss on its rows.

    Every client receives all models, and sends the update of one, with its number. A model moves by the mean update of
    the clients that chose it, and stays where nobody did.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`. There is no other aggregator: a model's mean update is a ratio of two
        means, which a median, say, would make another number of.
      num_clusters: models of the server.
      spread: how far the models are apart before training: beside the first one, each has Gaussian noise on every leaf.
        Its deviation is `spread` times the leaf's root mean square. For a leaf of zeros it is `spread` / sqrt(n), the
        scale of initialisers, where n is the number of inputs: the product of all axes but the last. Biases of 0 stay
        0, unless the model has vectors alone, for which n is 1. Equal models would all be trained alike, so several
        models need a spread above 0.
      start_seed: of that noise.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. A model's mean update is by examples;
        the paper takes the plain mean of the clients that chose it, "uniform".
      nonfinite, plan, mesh: as in `federated`.

    Returns: an Algorithm. A client's own model is the one that it chose last; a client that has not trained yet has the
    first. `params` is the first model.

    Raises: ValueError for a spread of 0 between several models, and in `init` for one that rounding loses, so that two
    models are equal.

    Guarantees: models differ before training, also around 0 (tests/algorithms/personal/test_spread.py::
    test_models_around_zero_differ), and equal ones are refused (::test_equal_models_are_refused); one cluster is FedAvg
    up to rounding (tests/algorithms/personal/test_limits.py::test_without_anything_personal_it_is_fedavg); a message
    counts the bytes of one model (::test_ifca_counts_one_model_up_and_all_down); models match NumPy
    (tests/algorithms/personal/test_numpy.py::test_ifca_matches_numpy).

    References: Ghosh, Chung, Yin, Ramchandran 2020 (IFCA), algorithm 1, option II.
    """
    check_spread(num_clusters, spread)
    work, round_options = client.local_work(options)
    train = local_training(loss_fn, optimizer, work)

    def apply(key, broadcast, chosen_before, data):
        def loss_of(model):
            return loss_and_metrics(loss_fn, model, data.examples, data.mask, stream(key, "choice"))[0]

        chosen = jnp.argmin(jax.lax.map(loss_of, broadcast)).astype(jnp.int32)
        start = jax.tree.map(lambda models: models[chosen], broadcast)
        training = train(key, start, data, uncorrected(start))
        update = tree.subtract(training.params, start)
        is_chosen = jnp.arange(num_clusters) == chosen
        spread_out = jax.tree.map(
            lambda u: jnp.where(is_chosen.reshape(-1, *(1 for _ in u.shape)), u, jnp.zeros((), u.dtype)), update
        )
        message = {"update": spread_out, "chosen": is_chosen.astype(jnp.float32)}
        has_changed = Mean((chosen != chosen_before).astype(jnp.float32), jnp.float32(1))
        report = training.report(message, work.weighs_examples())
        return report._replace(metrics=report.metrics | {"changed_cluster": has_changed}), chosen

    def model_of(broadcast, chosen, has_trained):
        return jax.tree.map(lambda models: models[jnp.where(has_trained, chosen, 0)], broadcast)

    def start(params: PyTree) -> PyTree:
        return perturbed_models(jax.random.key(start_seed), params, num_clusters, spread)

    step = clustered(server.optimizer(optax.sgd(1.0)), start)
    local = ClientUpdate(lambda broadcast: jnp.int32(0), apply, facts_of(work, optimizer))
    round_options["transform"] = _one_of(num_clusters)
    made = with_own_models(sampler, local, aggregation.mean(), step, model_of, **round_options)

    def models(state):
        return step.broadcast(state.server), jnp.int32(num_clusters)

    return made._replace(evaluated=made.evaluated._replace(models=models))


def clustered(inner: ServerUpdate, start) -> ServerUpdate:
    """Makes a server of several models, of which each moves by the mean update of those who chose it.

    Args:
      inner: takes the step with the mean updates, leaves [models, ...].
      start: params -> the models before training, leaves [models, ...].

    Returns: a ServerUpdate for means of messages {"update": [models, ...], "chosen": [models]}; the broadcast is all
    models, and `params` the first.
    """

    def apply(key, aggregate, state):
        shares = aggregate["chosen"]

        def mean_of_cluster(update):
            share = shares.reshape(-1, *(1 for _ in update.shape[1:])).astype(update.dtype)
            return jnp.where(share > 0, update / jnp.where(share > 0, share, 1), 0)

        return inner.apply(key, jax.tree.map(mean_of_cluster, aggregate["update"]), state)

    def takes(params):
        models = jax.eval_shape(start, params)
        (count, *_) = jax.tree.leaves(models)[0].shape
        return {"update": models, "chosen": jax.ShapeDtypeStruct((count,), jnp.float32)}

    return inner._replace(
        init=lambda params: inner.init(start(params)),
        apply=apply,
        params=lambda state: jax.tree.map(lambda models: models[0], inner.params(state)),
        takes=takes,
        moved=None,
        params_kind=ParamsKind.ONE_OF,
    )


def check_spread(count: int, spread: float) -> None:
    """Refuses a spread of 0 between several models."""
    if count > 1 and not isinstance(spread, Tracer) and spread == 0:
        hint = "Equal models are trained alike, and stay equal for ever."
        validate.fail("spread", f"more than 0 for {count} models", spread, hint)


def perturbed_models(key: jax.Array, params: PyTree, count: int, spread: float) -> PyTree:
    """Returns models around the given one, leaves [count, ...]; the first is the given one itself.

    The noise's deviation is `spread` times the root mean square of a leaf. For a leaf of zeros it is
    spread / sqrt(num_inputs), by which inputs of about 1 move an output by about `spread`. Biases of 0 stay 0, as
    initialisers leave them: where other leaves have inputs, zeros without inputs get no noise.

    Args:
      key: of the noise.
      params: leaves [...].
      count: number of models, at least 1.
      spread: >= 0, relative to a leaf.

    Raises: ValueError if two of the models are equal; not where the models are traced.
    """
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, max(len(leaves), 1))
    some_have_inputs = any(x.ndim > 1 for x in leaves)

    def around(key, x):
        size = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
        num_inputs = math.prod(x.shape[:-1])
        is_like_a_bias = some_have_inputs and x.ndim <= 1
        size_of_zeros = 0 if is_like_a_bias else 1 / math.sqrt(num_inputs)
        scale = spread * jnp.where(size > 0, size, size_of_zeros)
        noise = jax.random.normal(key, (count, *x.shape), jnp.float32).at[0].set(0.0)
        return x[None] + (scale * noise).astype(x.dtype)

    models = structure.unflatten([around(key, x) for key, x in zip(keys, leaves, strict=False)])
    if tree.has_equal_rows(models):
        hint = "Rounding to the parameters' precision loses it, and equal models stay equal: take a larger one."
        validate.fail("spread", f"one that makes {count} different models", spread, hint)
    return models


def _one_of(num_clusters: int) -> UpdateTransform:
    """Returns the identity whose messages count one model's update and the model's number."""
    plain = identity()

    def wire(update_spec, sent):
        one_model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), update_spec["update"])
        return plain_wire(one_model).with_side(max(1, math.ceil(math.log2(num_clusters))) if num_clusters > 1 else 0)

    return plain._replace(wire=wire)
