"""FlexLoRA: clients train adapters of low rank, and the server averages their products in place of their factors."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, tree, validate
from fedjax_sim.aggregation import rows
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, Metric, PyTree, Round, Sampler
from fedjax_sim.validate import LossFn, named_arguments

PRODUCT_ERROR = Metric("product_error", "of the mean product, left out by the rank", "share", "last")


class FlexLoRAOptions(client.LocalOptions, MessageOptions, total=False):
    """The options of `client.work` and `federated`, but no `downlink`: clients would start from other products."""


@named_arguments
def flexlora(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    **options: Unpack[FlexLoRAOptions],
) -> Algorithm:
    """Makes FlexLoRA: FedAvg of adapters, whose new A B is the mean of the clients' A_i B_i, cut to the rank.

    FedAvg of adapters takes the mean of the A_i times the mean of the B_i. This is not the mean of the A_i B_i, from
    which it differs by the mean of (A_i - mean A)(B_i - mean B). Here the server adds up the products and takes their
    singular value decomposition P S Q^T. The new A is the first r columns of P, which are orthonormal, and the new B
    the first r rows of S Q^T. No other A B of rank r is nearer to the mean. All other trained leaves move by their mean
    update.

    Args:
      loss_fn: of a model with adapters (`models.lora`), in which A and B are trained.
      sampler, optimizer: as in `fedavg`.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The mean is by examples, as in the
        paper.
      transform, nonfinite, plan, mesh: as in `federated`. There is no other aggregator or server optimizer, because a
        difference of factors of two decompositions is no direction. Noise of a transform at the server is refused, for
        one client moves the factors without bound.

    Returns: an Algorithm that holds all m messages. Clients send A_i and B_i and no product, so bytes are those of
    FedAvg. The info has `product_error`, the share of the mean product, in the Frobenius norm over all matrices, that
    the cut to the rank leaves out.

    Raises: ValueError in `init` for parameters without a pair {"a": A, "b": B}.

    Guarantees: models match NumPy (tests/algorithms/server/test_flexlora.py::test_matches_numpy); a rank of the smaller
    side loses nothing, and otherwise the error is the smallest one (::test_the_nearest_product); bytes are those of
    FedAvg (::test_bytes_are_of_factors).

    References: Bai, Chen, Qian, Li, Li 2024 (FlexLoRA), algorithm 1, with one rank for all clients.
    """
    work, round_options = client.local_work(options)
    inner = server.optimizer(optax.sgd(1.0))

    def init(params: PyTree) -> PyTree:
        if not any(map(_is_pair, jax.tree.leaves(params, is_leaf=_is_pair))):
            hint = "Adapt it ([model.lora]). With freeze_a the mean of the B is exact: take fedavg."
            validate.fail("model", "one with pairs of factors A and B that are both trained", "none", hint)
        return inner.init(params)

    # Edges would send factors of their own decompositions to a cloud: `moved` is left out, so that they refuse.
    step = inner._replace(init=init, moved=None)
    return federated(sampler, client.local_sgd(loss_fn, optimizer, work), _mean_of_products(), step, **round_options)


def _mean_of_products() -> Aggregator:
    """Makes the aggregator of updates of adapters, which reads the broadcast adapters that clients started from."""

    def rule(key, updates, weights, ids, round: Round):
        total = weights.sum()
        shares = weights / jnp.where(total > 0, total, 1)
        squares = []  # of each adapted matrix: (left out, all)

        def moved(before: PyTree, update: PyTree) -> PyTree:
            if not _is_pair(before):
                return rows.weighted_mean(update, weights)
            wide = tree.at_least_float32(before["a"].dtype)
            a, b = (before[name][None].astype(wide) + update[name].astype(wide) for name in ("a", "b"))
            new, singular_values = nearest_product(a, b, shares.astype(wide))
            rank = new["a"].shape[1]
            squares.append([jnp.square(part).sum() for part in (singular_values[rank:], singular_values)])
            # Without a message the adapters stay as they are.
            return jax.tree.map(lambda x, y: jnp.where(total > 0, x - y.astype(wide), 0), new, before)

        update = jax.tree.map(moved, round.broadcast, updates, is_leaf=_is_pair)
        left_out, whole = (sum(parts) for parts in zip(*squares, strict=True))
        error = jnp.sqrt(left_out / jnp.where(whole > 0, whole, 1))
        return {"update": update, "error": error.astype(jnp.float32)}, ()

    gathered = aggregation.gather(rule, start=lambda update_spec: ())

    def finalize(key, round, carry):
        update_and_error, metrics, state = gathered.finalize(key, round, carry)
        return update_and_error["update"], metrics | {PRODUCT_ERROR.name: update_and_error["error"]}, state

    return gathered._replace(finalize=finalize).stating(metrics=(PRODUCT_ERROR,))


def nearest_product(a: Array, b: Array, shares: Array) -> tuple[dict[str, Array], Array]:
    """Finds the product A B of rank r that is nearest to sum_i shares_i A_i B_i.

    The factors of the sum, [A_1 ... A_m] and [B_1; ...; B_m], are decomposed one by one (QR), so that only the product
    of their small triangles needs a singular value decomposition.

    Args:
      a: [m, num_inputs, r].
      b: [m, r, num_outputs].
      shares: [m], at least 0.

    Returns: ({"a": [num_inputs, r] with orthonormal columns, "b": [r, num_outputs]}, singular values of the sum).
    """
    num_messages, num_inputs, rank = a.shape
    left = (shares[:, None, None] * a).transpose(1, 0, 2).reshape(num_inputs, num_messages * rank)
    right = b.reshape(num_messages * rank, -1)
    with jax.default_matmul_precision("highest"):
        left_basis, left_factor = jnp.linalg.qr(left)
        right_basis, right_factor = jnp.linalg.qr(right.T)
        inner, singular_values, outer = jnp.linalg.svd(left_factor @ right_factor.T, full_matrices=False)
        new_a = left_basis @ inner[:, :rank]
        new_b = singular_values[:rank, None] * (outer[:rank] @ right_basis.T)
    return {"a": new_a, "b": new_b}, singular_values


def _is_pair(node: Any) -> bool:
    """Returns whether a node of the parameters is a pair of factors {"a": [n, r], "b": [r, k]}."""
    if not isinstance(node, dict) or node.keys() != {"a", "b"}:
        return False
    shapes: list[tuple[int, ...]] = [getattr(node[name], "shape", ()) for name in ("a", "b")]
    return [len(shape) for shape in shapes] == [2, 2] and shapes[0][1] == shapes[1][0]
