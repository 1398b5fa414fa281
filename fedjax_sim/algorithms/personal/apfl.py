"""APFL: each client's model is a mixture of the shared model and one that it trains for the mixture."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, ClientUpdate, PyTree, Sampler
from fedjax_sim.validate import LossFn, Share, named_arguments

__all__ = ["apfl", "mixture"]


def mixture(own: PyTree, shared: PyTree, share: float) -> PyTree:
    """Returns share * own + (1 - share) * shared, leaf by leaf; for a share of 0 or 1 the bits of one of the two."""
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
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes APFL: a client's model is share * v + (1 - share) * w, of its own v and the shared w.

    At each local step both are trained on the same minibatch: w by its own gradient, and v by the gradient of the
    mixture's loss with respect to v, which is `share` times the gradient at the mixture.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`. The optimizer trains w and v as one pytree {"shared",
        "own"}.
      share: alpha in the paper, in [0, 1], the same for all clients. 0 is FedAvg, 1 is local training.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`.
      Others as in `federated`.

    Returns: an Algorithm whose `params` is the shared model. A client that has not trained yet has the shared model.

    Guarantees: share 0 is FedAvg up to rounding (tests/algorithms/personal/test_limits.py::
    test_without_anything_personal_it_is_fedavg), and models match NumPy
    (tests/algorithms/personal/test_numpy.py::test_matches_numpy).

    References: Deng, Kamani, Mahdavi 2020 (APFL), algorithm 1, with a constant alpha.
    """
    work, round_options = client.local_work(options)

    def loss_of_both(models, examples, key):
        # The shared model is a constant of the mixture: v alone is trained for it.
        mixed = mixture(models["own"], jax.lax.stop_gradient(models["shared"]), share)
        shared_values = _by_name(loss_fn(models["shared"], examples, key))
        mixed_values = _by_name(loss_fn(mixed, examples, key))
        losses = {"loss": shared_values["loss"] + mixed_values["loss"]}
        weights = {"weight": shared_values["weight"]} if "weight" in shared_values else {}
        values = {f"shared_{name}": value for name, value in shared_values.items() if name != "weight"}
        values |= {f"own_{name}": value for name, value in mixed_values.items() if name != "weight"}
        return losses | weights | values

    train = local_training(loss_of_both, optimizer, work)

    def apply(key, broadcast, own, data):
        models = {"shared": broadcast, "own": own}
        training = train(key, models, data, uncorrected(models))
        new_own = tree.where(training.num_examples > 0, training.params["own"], own)
        report = training.report(tree.subtract(training.params["shared"], broadcast), work.weighs_examples())
        named = {name.replace("local_shared_", "local_").replace("local_own_", "own_"): value
                 for name, value in report.metrics.items() if name != "local_loss"}  # fmt: skip
        return report._replace(metrics=named), new_own

    def model_of(broadcast, own, has_trained):
        return tree.where(has_trained, mixture(own, broadcast, share), broadcast)

    rule = aggregation.mean() if aggregator is None else aggregator
    local = ClientUpdate(lambda broadcast: broadcast, apply, facts_of(work, optimizer))
    return with_own_models(sampler, local, rule, server.optimizer(optax.sgd(1.0)), model_of, **round_options)


def _by_name(values: PyTree) -> dict[str, jnp.ndarray]:
    """Returns what a loss returned as values by name."""
    return dict(values) if isinstance(values, dict) else {"loss": values}
