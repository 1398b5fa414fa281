"""Per-FedAvg: a model from which one local step is the best start for every client."""

from __future__ import annotations

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.algorithms.personal.fine_tuned import fine_tuned
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.client.losses import full_gradient_at
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, ClientUpdate, ParamsKind, Sampler
from fedjax_sim.validate import LossFn, Positive, named_arguments


@named_arguments
def per_fedavg(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    step_size: Positive = 0.01,
    order: Literal["first", "hessian"] = "hessian",
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes Per-FedAvg: FedAvg on the clients' losses after one gradient step, F(w) = f(w - step_size grad f(w)).

    Each minibatch is halved: rows at even places make the step, w' = w - step_size g(w), and rows at odd places the
    gradient there, g'(w'). The gradient for w is (I - step_size H(w)) g'(w') with the Hessian H of the first half, a
    product that is the gradient of <g(w), g'(w')>; or g'(w') alone. A minibatch of one row makes no step.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`. The optimizer's rate is beta in the paper.
      step_size: alpha in the paper, of the step that each client takes for itself.
      order: "hessian" for the whole gradient, "first" without the Hessian.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The mean is by examples; the paper
        takes the plain mean, "uniform", and so minimises the mean of the clients' F.
      Others as in `federated`.

    Returns: an Algorithm that is `fine_tuned` by one step of plain SGD with `step_size` on all of a client's rows.

    Guarantees: models match NumPy, of both orders (tests/algorithms/personal/test_numpy.py::test_matches_numpy).

    References: Fallah, Mokhtari, Ozdaglar 2020 (Per-FedAvg), algorithm 1, with halves of a minibatch for D, D' and D''.
    """
    work, round_options = client.local_work(options)

    def meta_gradient(loss_fn, params, batch, key):
        is_first = jnp.arange(batch.mask.shape[0]) % 2 == 0
        first = batch._replace(mask=batch.mask & is_first)
        second = batch._replace(mask=batch.mask & ~is_first)

        def gradient_of_first(model):
            return full_gradient_at(loss_fn, model, first, key)[0]

        step = gradient_of_first(params)
        stepped = jax.tree.map(lambda w, g: w - step_size * g, params, step)
        gradients, means = full_gradient_at(loss_fn, stepped, second, key)
        if order == "first":
            return gradients, means
        _, product = jax.vjp(gradient_of_first, params)
        (hessian_times,) = product(gradients)
        return jax.tree.map(lambda g, h: g - step_size * h, gradients, hessian_times), means

    train = local_training(loss_fn, optimizer, work, meta_gradient)

    def apply(key, broadcast, state, data):
        training = train(key, broadcast, data, uncorrected(broadcast))
        return training.report(tree.subtract(training.params, broadcast), work.weighs_examples()), state

    rule = aggregation.mean() if aggregator is None else aggregator
    local = ClientUpdate(lambda broadcast: (), apply, facts_of(work, optimizer))
    step = server.optimizer(optax.sgd(1.0))._replace(params_kind=ParamsKind.START)
    made = federated(sampler, local, rule, step, **round_options)
    return fine_tuned(made, loss_fn, optax.sgd(step_size), num_steps=1)
