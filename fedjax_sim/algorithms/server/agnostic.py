"""AFL (agnostic federated learning): clients' weights rise with their losses, for the worst mixture of clients."""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.client.losses import loss_and_metrics
from fedjax_sim.prng import stream
from fedjax_sim.round.compatibility import check_everyone
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientUpdate, Metric, Round, Sampler
from fedjax_sim.validate import LossFn, NonNegative, named_arguments


class AgnosticOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` but the weighting, and how a round is computed."""


@named_arguments
def agnostic(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    weight_learning_rate: NonNegative = 0.1,
    **options: Unpack[AgnosticOptions],
) -> Algorithm:
    """Makes AFL, which minimises the loss of the worst mixture of clients: max over lambda of sum_i lambda_i F_i.

    The server holds a weight lambda_i for each client, at first 1 / N. In a round every client trains from the
    broadcast, and sends its update and its loss F_i at the broadcast, over all of its rows. The model moves by the mean
    of the updates with the weights lambda. Then lambda <- the point of the simplex nearest to lambda + rate F.

    Args:
      loss_fn, optimizer: as in `fedavg`. The paper's clients take one step; more are FedAvg's.
      sampler: one that draws all clients in every round, such as `sampling.full`. The losses of clients
        that do not report count as 0: their weights fall as others' rise, and count for nothing in the mean.
      weight_learning_rate: gamma_lambda in the paper, >= 0. 0 is FedAvg with equal weights.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`. Only lambda weighs clients, as in the paper.
      nonfinite, plan, mesh: as in `federated`. There is no transform, downlink or other aggregator: the server reads
        each client's loss as it is, and no epsilon covers it.

    Returns: an Algorithm. Its info has `largest_weight`, the largest lambda_i after the round. `state.aggregator` is
    lambda, [N].

    Raises: ValueError for a sampler that draws fewer clients.

    Guarantees: rate 0 is FedAvg with uniform weights up to rounding, and models and weights match NumPy
    (tests/algorithms/server/test_agnostic.py::test_without_a_rate_it_is_fedavg, ::test_matches_numpy); the projection
    is the nearest point (::test_nearest_point_of_the_simplex).

    References: Mohri, Sivek, Suresh 2019 (AFL), algorithm 1; Duchi et al. 2008, figure 1, for the projection.
    """
    check_everyone(sampler, "A client's weight follows from its loss in every round.")
    work, round_options = client.local_work({**options, "weighting": "uniform"})
    train = local_training(loss_fn, optimizer, work)

    def apply(key, broadcast, state, data):
        loss, _ = loss_and_metrics(loss_fn, broadcast, data.examples, data.mask, stream(key, "agnostic"))
        training = train(key, broadcast, data, uncorrected(broadcast))
        message = {"update": tree.subtract(training.params, broadcast), "loss": loss.astype(jnp.float32)}
        return training.report(message, by_examples=False), state

    local = ClientUpdate(lambda broadcast: (), apply, facts_of(work, optimizer))
    rule = _worst_mixture(sampler.design.population_size, weight_learning_rate)
    # An edge would have weights of its own for its group: `moved` is left out, so that it refuses.
    step = server.optimizer(optax.sgd(1.0))._replace(moved=None)
    return federated(sampler, local, rule, step, **round_options)


def on_simplex(values: Array) -> Array:
    """Returns the point nearest to `values` [n] whose entries are at least 0 and add up to 1.

    It is max(values - c, 0) for the one c that makes the sum 1, which a sort finds in O(n log n).

    Args:
      values: [n] floats, n >= 1.

    >>> on_simplex(jnp.array([0.5, 1.0, -2.0])).tolist()
    [0.25, 0.75, 0.0]
    """
    # The point is the same for values that are all shifted, and near 0 a sum in float32 does not lose the 1.
    values = values - values.max()
    falling = jnp.sort(values)[::-1]
    count = jnp.arange(1, len(values) + 1, dtype=values.dtype)
    thresholds = (jnp.cumsum(falling) - 1) / count
    num_positive = (falling > thresholds).sum(dtype=jnp.int32)
    return jnp.maximum(values - thresholds[num_positive - 1], 0)


def _worst_mixture(population_size: int, rate: float) -> Aggregator:
    """Makes the mean of updates by weights that are the aggregator's state, and rise with the clients' losses.

    The aggregate is sum_i lambda_i u_i / sum_i lambda_i over the clients whose messages arrived. Then lambda <- the
    point of the simplex nearest to lambda + gamma F, where F_i is the loss of client i, and 0 without a message.

    Args:
      population_size: N. The state lambda is [N] float32, at first 1 / N each.
      rate: gamma, at least 0.

    Returns: an Aggregator of messages {"update": as the model, "loss": [] float32}.
    """
    mean = aggregation.mean()

    def start(update_spec):
        return jnp.full(population_size, 1 / population_size, jnp.float32)

    def risen(key, losses, weights, ids, round: Round):
        place = jnp.where(weights > 0, ids, population_size)  # outside for rows without a message
        mixture = on_simplex(round.state.at[place].add(rate * losses, mode="drop"))
        return mixture.max(), mixture

    rise = aggregation.gather(risen, start=start)

    def init(update_spec, num_slots):
        return mean.init(update_spec["update"], num_slots), rise.init(update_spec["loss"], num_slots)

    def accumulate(key, round, carry, received):
        sums, losses = carry
        weights = jnp.where(received.weights > 0, round.state[received.ids], 0)
        weighted = received._replace(updates=received.updates["update"], weights=weights)
        losses = rise.accumulate(key, round, losses, received._replace(updates=received.updates["loss"]))
        return mean.accumulate(key, round, sums, weighted), losses

    def finalize(key, round, carry):
        update, metrics = mean.finalize(key, round, carry[0])
        largest, _, mixture = rise.finalize(key, round, carry[1])
        return update, metrics | {"largest_weight": largest}, mixture

    described = Metric("largest_weight", "largest weight of a client", "share", "last")
    return Aggregator(init, accumulate, finalize, start=start).stating(weighted=False, metrics=(described,))
