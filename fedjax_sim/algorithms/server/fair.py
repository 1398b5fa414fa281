"""q-FedAvg and TERM: clients with larger losses count more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.client.losses import loss_and_metrics
from fedjax_sim.prng import stream
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.types import Algorithm, Array, ClientUpdate, Mean, PyTree, Sampler
from fedjax_sim.validate import Finite, LossFn, NonNegative, named_arguments

LEAST_LOSS = 1e-10  # below it a loss counts as this: a power of 0 has no derivative


class FairOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` but the weighting, and how a round is computed."""


@named_arguments
def qfedavg(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    exponent: NonNegative = 1.0,
    **options: Unpack[FairOptions],
) -> Algorithm:
    """Makes q-FedAvg, which minimises sum_i F_i^(q + 1) / (q + 1): the larger a client's loss, the more it counts.

    With L = 1 / rate, the update u_i of a client's local training and its loss F_i at the broadcast, the clients send
    L F_i^q u_i and h_i = q F_i^(q - 1) |L u_i|^2 + L F_i^q. The server moves by the ratio of their sums.

    Args:
      loss_fn, sampler: as in `fedavg`. A client whose mean loss is negative counts as one whose message is not finite.
      optimizer: the clients' optimizer, plain SGD such as `optax.sgd(0.1)`: L is the inverse of its rate.
      exponent: q >= 0. 0 is FedAvg with equal weights; large values approach the worst client's loss alone.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`. Clients count alike, as in the paper.
      nonfinite, plan, mesh: as in `federated`.

    Guarantees: exponent 0 is FedAvg with uniform weights up to rounding, and models match NumPy
    (tests/algorithms/server/test_fair.py::test_none_of_it_is_fedavg, ::test_matches_numpy).

    References: Li, Sanjabi, Beirami, Smith 2020 (q-FFL), algorithm 2.
    """
    inverse_rate = 1.0 / client.plain_sgd_rate("qfedavg", optimizer)

    def scaled(update: PyTree, loss: Array) -> tuple[Array, Array]:
        # A negative loss has no power: the client's message is then not finite, and is dropped and counted.
        loss = jnp.where(loss < 0, jnp.nan, jnp.maximum(loss, LEAST_LOSS))
        power = loss**exponent
        squared_norm = optax.tree.norm(update, squared=True) * inverse_rate**2
        curvature = exponent * loss ** (exponent - 1.0) * squared_norm + inverse_rate * power
        return inverse_rate * power, curvature

    return _by_ratio(loss_fn, sampler, optimizer, scaled, options)


@named_arguments
def term(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    tilt: Finite = 1.0,
    **options: Unpack[FairOptions],
) -> Algorithm:
    """Makes TERM over clients, which minimises log(mean_i exp(t F_i)) / t: weights grow with exp(t F_i).

    Where t F_i is above 88, its exponential is no float32: that client counts as one whose message is not finite, and
    `dropped_clients` counts it. Take a smaller t.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`.
      tilt: t. 0 is FedAvg with equal weights; a positive one favours clients with large losses, a negative one those
        with small ones.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`. Clients count alike but for the tilt, as in
        the paper.
      nonfinite, plan, mesh: as in `federated`.

    Guarantees: tilt 0 is FedAvg with uniform weights up to rounding, and models match NumPy
    (tests/algorithms/server/test_fair.py::test_none_of_it_is_fedavg, ::test_matches_numpy).

    References: Li, Beirami, Sanjabi, Smith 2021 (TERM), algorithm 3.
    """

    def scaled(update: PyTree, loss: Array) -> tuple[Array, Array]:
        weight = jnp.exp(tilt * loss)
        return weight, weight

    return _by_ratio(loss_fn, sampler, optimizer, scaled, options)


def _by_ratio(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    scaled: Callable[[PyTree, Array], tuple[Array, Array]],
    options: Any,
) -> Algorithm:
    """Makes an algorithm whose server moves by a ratio of sums over clients.

    Args:
      loss_fn: (params, examples, key) -> losses [b].
      sampler: of the cohort.
      optimizer: of the clients' local steps.
      options: shared ones of recipes with local work; the weighting is uniform.
      scaled: (update, loss at the broadcast) -> (factor of the update in the numerator, term of the denominator).
    """
    work, round_options = client.local_work({**options, "weighting": "uniform"})
    train = local_training(loss_fn, optimizer, work)

    def apply(key, broadcast, state, data):
        loss, _ = loss_and_metrics(loss_fn, broadcast, data.examples, data.mask, stream(key, "fair"))
        training = train(key, broadcast, data, uncorrected(broadcast))
        update = tree.subtract(training.params, broadcast)
        factor, term = scaled(update, loss)
        numerator = jax.tree.map(lambda u: factor.astype(u.dtype) * u, update)
        report = training.report({"numerator": numerator, "denominator": term}, by_examples=False)
        return report._replace(metrics=report.metrics | {"broadcast_loss": Mean(loss, jnp.float32(1))}), state

    step = _ratio_server(server.optimizer(optax.sgd(1.0)))
    local = ClientUpdate(lambda broadcast: (), apply, facts_of(work, optimizer))
    return federated(sampler, local, aggregation.mean(), step, **round_options)


def _ratio_server(inner: Any) -> Any:
    """Makes a server that moves by numerator / denominator; it stays where the denominator is 0."""

    def apply(key, aggregate, state):
        below = aggregate["denominator"]
        inverse = jnp.where(below > 0, 1 / jnp.where(below > 0, below, 1), 0)
        return inner.apply(key, jax.tree.map(lambda x: x * inverse.astype(x.dtype), aggregate["numerator"]), state)

    def takes(params):
        return {"numerator": inner.expects(params), "denominator": jax.ShapeDtypeStruct((), jnp.float32)}

    return inner._replace(apply=apply, takes=takes, moved=None)
