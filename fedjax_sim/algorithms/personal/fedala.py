"""FedALA: each client learns, weight by weight, how much of the shared model it takes into its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.algorithms.personal.own_models import own_training, with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.models import combine, partition
from fedjax_sim.prng import stream
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientUpdate, PyTree, Sampler
from fedjax_sim.validate import LossFn, NonNegative, PositiveInt, named_arguments


class AdaptedModel(NamedTuple):
    """What a client keeps."""

    model: PyTree  # its local model at the end of its last round
    weights: PyTree  # as the mixed part of the model, in [0, 1]: how much of the shared model it takes
    is_known: Array  # [] bool; there was such a round


@named_arguments
def fedala(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    own: Sequence[str] = ("output",),
    weight_steps: PositiveInt = 5,
    weight_learning_rate: NonNegative = 1.0,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedALA: a client starts its local training from a mixture of its last local model and the shared one.

    With w the shared model, v the client's local model at the end of its last round and s its weights, 1 at first, the
    client starts from m(s) = v + (w - v) s in the part `own`, entry by entry, and from w elsewhere. Before that it
    takes some steps s <- clip(s - rate gradient of f(m(s)) by s, 0, 1). The local models are averaged as in FedAvg. In
    its first round a client has no last model, and starts from w.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`.
      own: paths of the mixed part in the parameters (`models.partition`), the paper's p upper layers; by default
        "output", the last layer of `models.mlp`, `cnn`, `gru`, `lstm` and `transformer`.
      weight_steps: steps of s in a round, on minibatches of the size of the others. A client takes all of them, also
        where it completes only a part of its other work. The paper goes on to convergence in a client's second round,
        and takes one epoch over a share of its rows in later ones.
      weight_learning_rate: the rate of these steps, eta in the paper; 0 is FedAvg.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The mean is by examples, as in the
        paper.
      Others as in `federated`. A client's v is the model that it trained, before its message is clipped, compressed or
        perturbed; v and s are never sent.

    Returns: an Algorithm whose `params` is w. A client's own model is v, and before it has trained w.

    Raises: ValueError for a path that the parameters lack, and for paths that are the whole model.

    Guarantees: models match NumPy where some clients take part in a round
    (tests/algorithms/personal/test_fedala.py::test_matches_numpy); rate 0 is FedAvg bit for bit
    (::test_without_a_rate_it_is_fedavg); a round's cost has the steps of s (::test_weight_steps_are_counted); bytes are
    FedAvg's (::test_matches_numpy).

    References: Zhang et al. 2023 (FedALA), algorithm 1.
    """
    work, round_options = client.local_work(options)
    own = tuple(own)
    train = local_training(loss_fn, optimizer, work)
    adapts = isinstance(weight_learning_rate, Tracer) or weight_learning_rate > 0

    def start_of(key: Array, broadcast: PyTree, kept: AdaptedModel, data) -> tuple[PyTree, PyTree]:
        """Returns (the start of the local training, the client's new weights)."""

        def mixture(weights):
            (shared_part, rest), (last_part, _) = partition(broadcast, own), partition(kept.model, own)
            mixed = jax.tree.map(lambda v, w, s: v + (w - v) * s, last_part, shared_part, weights)
            return combine(mixed, rest)

        def loss_of_weights(weights, examples, key):
            return loss_fn(mixture(weights), examples, key)

        train_weights = own_training(loss_of_weights, _clipped_sgd(weight_learning_rate), work, weight_steps)
        trained = train_weights(stream(key, "weights"), kept.weights, data, uncorrected(kept.weights)).params
        weights = tree.where(kept.is_known, trained, kept.weights)
        return tree.where(kept.is_known, mixture(weights), broadcast), weights

    def apply(key, broadcast, kept, data):
        start, weights = start_of(key, broadcast, kept, data) if adapts else (broadcast, kept.weights)
        training = train(key, start, data, uncorrected(start))
        after = AdaptedModel(training.params, weights, jnp.bool_(True))
        report = training.report(tree.subtract(training.params, broadcast), work.weighs_examples())
        return report, tree.where(training.num_examples > 0, after, kept)

    def init(broadcast):
        weights = jax.tree.map(jnp.ones_like, partition(broadcast, own)[0])
        return AdaptedModel(broadcast, weights, jnp.bool_(False))

    def model_of(broadcast, kept, has_trained):
        return tree.where(kept.is_known, kept.model, broadcast)

    rule = aggregation.mean() if aggregator is None else aggregator
    local = ClientUpdate(init, apply, facts_of(work, optimizer))
    return with_own_models(sampler, local, rule, server.optimizer(optax.sgd(1.0)), model_of, **round_options)


def _clipped_sgd(rate: float) -> optax.GradientTransformation:
    """Makes gradient descent whose parameters stay in [0, 1]."""

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda g, s: jnp.clip(s - rate * g, 0, 1) - s, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
