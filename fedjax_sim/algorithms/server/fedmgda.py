"""FedMGDA+: the server moves in the direction of the smallest mixture of the clients' normalised updates."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server
from fedjax_sim.client.local_sgd import local_sgd
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import FederatedOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, Metric, Sampler
from fedjax_sim.validate import LossFn, Positive, PositiveInt, Share, named_arguments


class FedMGDAOptions(client.LocalSteps, FederatedOptions, total=False):
    """The options of `client.work` but the weighting, and those of `federated`."""


@named_arguments
def fedmgda(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    epsilon: Share = 1.0,
    server_learning_rate: Positive = 1.0,
    solver_steps: PositiveInt = 500,
    **options: Unpack[FedMGDAOptions],
) -> Algorithm:
    """Makes FedMGDA+, whose step raises no client's loss to first order, as far as updates stand for gradients.

    With u_i the update of a client divided by its norm, the server moves by d = sum_i lambda_i u_i, where lambda is the
    point of the simplex within epsilon of the uniform weights, entry by entry, at which |d| is smallest. With epsilon 1
    every client has <d, u_i> >= |d|^2. A client whose update is 0 then stops the model.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`.
      epsilon: in [0, 1]. 0 is the mean of the normalised updates, 1 is FedMGDA.
      server_learning_rate: eta in the paper. Updates are normalised, so |d| is at most 1.
      solver_steps: exact steps along two entries of lambda at a time, of O(m) operations each. The info says how far
        the result is from the optimum.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`. Clients count alike but for lambda, as in the
        paper.
      transform, downlink, nonfinite, plan, mesh: as in `federated`. There is no other aggregator. Noise of a
        transform at the server is refused, for one client moves d without bound.

    Returns: an Algorithm that holds all m messages. Its info has `duality_gap`, which bounds |d|^2 - its minimum.

    Guarantees: epsilon 0 is FedAvg of the normalised updates, and models match NumPy (tests/algorithms/server/
    test_fedmgda.py::test_epsilon_zero_is_the_mean_of_directions, ::test_matches_numpy); the weights are optimal up to
    the gap, which is at least the distance to the exact optimum (::test_gap_bounds_the_distance_to_the_optimum); no
    client loses to first order (::test_nobody_loses).

    References: Hu, Shaloudegi, Zhang, Yu 2022 (FedMGDA+), algorithm 1; Desideri 2012; Platt 1998 for the two entries.
    """
    work, round_options = client.local_work({**options, "weighting": "uniform"})
    step = server.optimizer(optax.sgd(server_learning_rate))
    rule = _min_norm(epsilon, solver_steps)
    return federated(sampler, local_sgd(loss_fn, optimizer, work), rule, step, **round_options)


def _min_norm(epsilon: float, solver_steps: int) -> Aggregator:
    """Makes the aggregator of normalised messages by `least_mixture`.

    The aggregate is d = sum_i lambda_i u_i / |u_i| over the n messages that arrived. Here lambda minimises |d|^2 over
    the simplex with |lambda_i - 1 / n| <= epsilon. It follows from the products <u_i, u_j> / (|u_i| |u_j|) alone, which
    are [m, m].

    Args:
      epsilon: in [0, 1].
      solver_steps: exact steps along two entries of lambda, at least 1.
    """

    def rule(key, updates, weights, ids):
        leaves = [x.reshape(x.shape[0], -1).astype(jnp.float32) for x in jax.tree.leaves(updates)]
        norms = jnp.sqrt(sum(jnp.square(x).sum(1) for x in leaves))
        inverse = 1 / jnp.where(norms > 0, norms, 1)
        directions = [x * inverse[:, None] for x in leaves]
        products = jnp.asarray(sum(x @ x.T for x in directions))
        mixture, gap = least_mixture(products, weights > 0, epsilon, solver_steps)
        shares = mixture * inverse

        def mixed(x):
            return (shares.astype(x.dtype) @ x.reshape(x.shape[0], -1)).reshape(x.shape[1:])

        return {"update": jax.tree.map(mixed, updates), "gap": gap}

    gathered = aggregation.gather(rule, weighted=False)

    def finalize(key, round, carry):
        update_and_gap, metrics = gathered.finalize(key, round, carry)
        return update_and_gap["update"], metrics | {"duality_gap": update_and_gap["gap"]}

    described = Metric("duality_gap", "bound on |d|^2 above its minimum", "", "max")
    return gathered._replace(finalize=finalize).stating(metrics=(described,))


def least_mixture(products: Array, arrived: Array, epsilon: float, solver_steps: int) -> tuple[Array, Array]:
    """Minimises |sum_i lambda_i u_i|^2 over lambda on the simplex with |lambda_i - 1 / n| <= epsilon.

    Each step moves weight from the entry of largest derivative to that of smallest, as far as is best (Platt's
    sequential minimal optimisation). The steps stop by themselves at the optimum.

    Args:
      products: [m, m], of u_i and u_j.
      arrived: [m] bool, n of which are True; lambda is 0 elsewhere.
      epsilon: >= 0.
      solver_steps: how many steps.

    Returns: (lambda [m], gap [], at least the difference from the minimum up to rounding). The gap is
    <derivative, lambda - s>, where s is the point of the set with the smallest <derivative, s>.
    """
    num_arrived = jnp.maximum(arrived.sum(dtype=jnp.float32), 1)
    uniform = jnp.where(arrived, 1 / num_arrived, 0)
    low = jnp.where(arrived, jnp.maximum(uniform - epsilon, 0), 0)
    high = jnp.where(arrived, jnp.minimum(uniform + epsilon, 1), 0)

    def step(_, carry):
        mixture, half_derivative = carry
        source = jnp.argmax(jnp.where(mixture > low, half_derivative, -jnp.inf))
        target = jnp.argmin(jnp.where(mixture < high, half_derivative, jnp.inf))
        slope = half_derivative[source] - half_derivative[target]
        curvature = products[source, source] + products[target, target] - 2 * products[source, target]
        most = jnp.minimum(mixture[source] - low[source], high[target] - mixture[target])
        best = jnp.where(curvature > 0, slope / jnp.where(curvature > 0, curvature, 1), most)
        is_better = (slope > 0) & (most > 0)
        moved = jnp.where(is_better, jnp.clip(best, 0, jnp.maximum(most, 0)), 0)
        # Bounds are met exactly, so that an entry at a bound is not chosen again.
        at_low, at_high = (moved == mixture[source] - low[source]), (moved == high[target] - mixture[target])
        lower = jnp.where(at_low & is_better, low[source], mixture[source] - moved)
        mixture = mixture.at[source].set(lower)
        higher = jnp.where(at_high & is_better, high[target], mixture[target] + moved)
        mixture = mixture.at[target].set(higher)
        return mixture, half_derivative + moved * (products[target] - products[source])

    mixture, _ = jax.lax.fori_loop(0, solver_steps, step, (uniform, products @ uniform))
    derivative = 2 * products @ mixture
    # The best point fills entries up to their bounds, those of the smallest derivatives first.
    order = jnp.argsort(jnp.where(arrived, derivative, jnp.inf))
    room = (high - low)[order]
    left = 1 - low.sum() - (jnp.cumsum(room) - room)
    best = low[order] + jnp.clip(left, 0, room)
    return mixture, jnp.maximum((derivative * mixture).sum() - (derivative[order] * best).sum(), 0)
