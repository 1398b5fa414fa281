"""pFedMe: clients solve a proximal problem on each minibatch, and share the centre of it."""

from __future__ import annotations

from typing import Unpack

import jax
import optax

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.client.losses import full_gradient_at, loss_and_metrics
from fedjax_sim.prng import stream
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientData, ClientUpdate, PyTree, Sampler
from fedjax_sim.validate import LossFn, Positive, PositiveInt, Share, named_arguments


@named_arguments
def pfedme(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    coefficient: Positive = 15.0,
    inner_steps: PositiveInt = 5,
    inner_learning_rate: Positive = 0.01,
    server_share: Share = 1.0,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes pFedMe: the shared model w is trained on the Moreau envelopes of the clients' losses.

    For a minibatch, a client's own model is theta, after `inner_steps` gradient steps on
    f(theta) + coefficient / 2 |theta - w|^2 that start at w. The gradient for w is coefficient (w - theta).

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`. The optimizer trains w; the paper's is SGD with rate eta.
      coefficient: lambda in the paper, positive.
      inner_steps: K in the paper.
      inner_learning_rate: of the inner steps.
      server_share: beta in the paper, in [0, 1]: the server moves by this share of the mean update.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`; R in the paper is `num_steps`.
        The mean is by examples; the paper takes the plain mean, "uniform".
      Others as in `federated`.

    Returns: an Algorithm whose `params` is w. A client's own model is theta on all of its rows, solved at the end of
    its last round from its local w; the paper's is that of the last minibatch. A client that has not trained yet has w.

    Guarantees: models match NumPy (tests/algorithms/personal/test_numpy.py::test_matches_numpy).

    References: T. Dinh, Tran, Nguyen 2020 (pFedMe), algorithm 1.
    """
    work, round_options = client.local_work(options)

    def own_model(params: PyTree, data: ClientData, key: Array | None) -> PyTree:
        """Approximates argmin over theta of f(theta) + coefficient / 2 |theta - params|^2."""

        def step(_, theta):
            gradients, _ = full_gradient_at(loss_fn, theta, data, key)
            return jax.tree.map(
                lambda t, g, w: t - inner_learning_rate * (g + coefficient * (t - w)), theta, gradients, params
            )

        return jax.lax.fori_loop(0, inner_steps, step, params)

    def envelope_gradient(loss_fn, params, batch, key):
        theta = own_model(params, batch, key)
        _, means = loss_and_metrics(loss_fn, theta, batch.examples, batch.mask, key)
        return jax.tree.map(lambda w, t: coefficient * (w - t), params, theta), means

    train = local_training(loss_fn, optimizer, work, envelope_gradient)

    def apply(key, broadcast, own, data):
        training = train(key, broadcast, data, uncorrected(broadcast))
        # On all rows, also where the client completed a part of its local work: the inner steps do not read `work`.
        theta = own_model(training.params, data, stream(key, "own model"))
        update = tree.subtract(training.params, broadcast)
        return training.report(update, work.weighs_examples()), theta

    def model_of(broadcast, own, has_trained):
        return tree.where(has_trained, own, broadcast)

    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(server_share))
    local = ClientUpdate(lambda broadcast: broadcast, apply, facts_of(work, optimizer))
    return with_own_models(sampler, local, rule, step, model_of, **round_options)
