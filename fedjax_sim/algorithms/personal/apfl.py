"""APFL: each client's model is a mixture of the shared model and one that it trains for the mixture."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientUpdate, Mean, Metric, PyTree, Sampler
from fedjax_sim.validate import LossFn, NonNegative, Share, named_arguments

OWN_SHARE = Metric("own_share", "share of their own in clients' models", "share", "last")


def interpolation(own: PyTree, shared: PyTree, share: float | Array) -> PyTree:
    """Returns share * own + (1 - share) * shared, leaf by leaf; for a number 0 or 1 the bits of one of the two."""
    if isinstance(share, jax.Array):
        return jax.tree.map(lambda v, w: share.astype(v.dtype) * v + (1 - share).astype(v.dtype) * w, own, shared)
    if share in (0.0, 1.0):
        return own if share else shared
    return jax.tree.map(lambda v, w: share * v + (1 - share) * w, own, shared)


@named_arguments
def apfl(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    share: Share = 0.5,
    share_learning_rate: NonNegative = 0.0,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes APFL: a client's model is share * v + (1 - share) * w, of its own v and the shared w.

    At each local step both are trained on the same minibatch: w by its own gradient, and v by the gradient of the
    mixture's loss with respect to v, which is `share` times the gradient at the mixture.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`. The optimizer trains w and v as one pytree {"shared",
        "own"}.
      share: alpha in the paper, in [0, 1]. 0 is FedAvg, 1 is local training.
      share_learning_rate: 0: all clients keep this share. Else each client learns a share of its own, which starts at
        `share`. In each round, with the first minibatch, it takes the step
        share <- share - share_learning_rate <grad f(share * v + (1 - share) * w), v - w>, cut to [0, 1].
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The mean of the shared models is by
        examples; the paper takes the plain mean, "uniform".
      Others as in `federated`.

    Returns: an Algorithm whose `params` is the shared model. A client that has not trained yet has the shared model.
    Where shares are learnt, the info has `own_share`, the mean of the round's clients after their rounds.

    Guarantees: share 0 is FedAvg up to rounding (tests/algorithms/personal/test_limits.py::
    test_without_anything_personal_it_is_fedavg), and models match NumPy
    (tests/algorithms/personal/test_numpy.py::test_matches_numpy).

    References: Deng, Kamani, Mahdavi 2020 (APFL), algorithm 1; the step of alpha once in a round, as in the authors'
    code, without that code's further term 0.02 alpha.
    """
    work, round_options = client.local_work(options)
    learns = isinstance(share_learning_rate, Tracer) or share_learning_rate > 0

    def loss_of_both(models, examples, key):
        # The shared model is a constant of the mixture: v, and a share that is learnt, are trained for it.
        mixed = interpolation(models["own"], jax.lax.stop_gradient(models["shared"]), models.get("share", share))
        shared_values = _by_name(loss_fn(models["shared"], examples, key))
        mixed_values = _by_name(loss_fn(mixed, examples, key))
        losses = {"loss": shared_values["loss"] + mixed_values["loss"]}
        weights = {"weight": shared_values["weight"]} if "weight" in shared_values else {}
        values = {f"shared_{name}": value for name, value in shared_values.items() if name != "weight"}
        values |= {f"own_{name}": value for name, value in mixed_values.items() if name != "weight"}
        return losses | weights | values

    both = _with_share(optimizer, share_learning_rate) if learns else optimizer
    train = local_training(loss_of_both, both, work)

    def init(broadcast):
        return {"own": broadcast} | ({"share": jnp.float32(share)} if learns else {})

    def apply(key, broadcast, kept, data):
        models = {"shared": broadcast} | kept
        training = train(key, models, data, uncorrected(models))
        new_kept = {name: training.params[name] for name in kept}
        report = training.report(tree.subtract(training.params["shared"], broadcast), work.weighs_examples())
        named = {name.replace("local_shared_", "local_").replace("local_own_", "own_"): value
                 for name, value in report.metrics.items() if name != "local_loss"}  # fmt: skip
        if learns:
            named[OWN_SHARE.name] = Mean(new_kept["share"], jnp.float32(1))
        return report._replace(metrics=named), new_kept

    def model_of(broadcast, kept, has_trained):
        return tree.where(has_trained, interpolation(kept["own"], broadcast, kept.get("share", share)), broadcast)

    rule = aggregation.mean() if aggregator is None else aggregator
    facts = facts_of(work, optimizer)._replace(metrics=(OWN_SHARE,) if learns else ())
    local = ClientUpdate(init, apply, facts)
    return with_own_models(sampler, local, rule, server.optimizer(optax.sgd(1.0)), model_of, **round_options)


def _with_share(optimizer: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
    """Makes the optimiser of {"shared", "own", "share"}, which moves the share by gradient descent, at the first step.

    Args:
      optimizer: of {"shared", "own"}.
      rate: of the share.
    """

    def models_of(values: PyTree) -> PyTree:
        return {"shared": values["shared"], "own": values["own"]}

    def init(params):
        return optimizer.init(models_of(params)), jnp.bool_(True)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        inner_state, is_first = state
        model_updates, inner_state = optimizer.update(models_of(updates), inner_state, models_of(params), **extra)
        moved = jnp.clip(params["share"] - rate * updates["share"], 0, 1)
        step = jnp.where(is_first, moved - params["share"], 0)
        return models_of(model_updates) | {"share": step}, (inner_state, jnp.bool_(False))

    # The type says whether a rate falls over rounds.
    return type(optimizer)(init, update)


def _by_name(values: PyTree) -> dict[str, jnp.ndarray]:
    """Returns what a loss returned as values by name."""
    return dict(values) if isinstance(values, dict) else {"loss": values}
