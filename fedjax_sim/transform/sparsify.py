"""Sparse messages: the largest entries, random entries, entries above a threshold, or whole blocks.

Each transform chooses entries of the update, taken as one vector (scope "vector") or leaf by leaf (scope "leaf"), and
sends them as they are. The other entries arrive as zero. An update that is not finite stays so, even if its NaN is not
among the sent entries. With d entries to choose from and k of them sent:

    top_k        the k largest magnitudes               |x - T x|^2 <= (1 - k/d) |x|^2    biased
    random_k     k entries at random, times d/k         E |R x - x|^2 = (d/k - 1) |x|^2   unbiased
    threshold    entries of at least a magnitude        |x - H x|^2 < d value^2           biased
    block_k      the k blocks of largest norm           (1 - k/blocks) |x|^2 at most      biased
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.transform.chain import check_floats, stateless
from fedjax_sim.transform.choice import (
    amount,
    indexed_wire,
    kept,
    largest_mask,
    masks_of,
    numbers_of_entries,
    payload,
    random_mask,
    squared,
)
from fedjax_sim.types import Mean, UpdateTransform
from fedjax_sim.validate import Positive, PositiveInt

SEED_BITS = 64  # of the seed from which both ends draw the same positions


def _deterministic(choose: Callable, scope: str, wire: Callable) -> UpdateTransform:
    """A transform that sends the entries that `choose(key, vector)` marks, whose choice needs no key."""

    def message(key, update):
        return kept(update, masks_of(choose, scope, None, update))

    def error(update):
        return squared(update, masks_of(choose, scope, None, update))

    return stateless(message, wire=wire, nonexpansive=True, squared_error=error, exact_error=True)


def top_k(
    share: float | None = None, *, count: int | None = None, scope: Literal["vector", "leaf"] = "vector"
) -> UpdateTransform:
    """Sends the k entries of largest magnitude, as they are; among equal entries those of lowest index.

    Args:
      share: of the entries, in (0, 1], rounded up: k = ceil(share d); None beside a count.
      count: k >= 1; a leaf with fewer entries is sent whole. None beside a share.
      scope: "vector" chooses from the whole update, "leaf" from each leaf (k entries of each).

    Returns: a transform that sends k numbers with k ceil(log2 d) bits of indices (as a set: ceil(log2 C(d, k)) bits).

    Raises: ValueError or TypeError unless exactly one of share and count is given, and in its range; ValueError, when
      the update's shape is known, for a count above d.

    Guarantees:
      - exactly k entries are sent unchanged, whatever the ties, with the errors of four numbers by hand
        (tests/transform/test_sparsify.py::test_largest_entries_survive_unchanged, test_errors_by_hand)
      - the error is at most (1 - k/d) |x|^2 (test_contraction)
      - bits are counted exactly (test_wire_is_counted_exactly)
      - it is biased; `error_feedback` around it converges where it stalls
        (tests/transform/test_feedback.py::test_feedback_converges_where_the_bare_compressor_stalls)

    References: Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018, definition 2.1.

    >>> import jax, jax.numpy as jnp
    >>> top_k(count=2).on_client(jax.random.key(0), jnp.array([3.0, -1.0, 0.5, 2.0]), (), ())[0].tolist()
    [3.0, 0.0, 0.0, 2.0]
    """
    num_sent = amount(share, count, scope, "entries")

    def wire(update_spec, sent):
        chosen = [(size, num_sent(size)) for size in numbers_of_entries(update_spec, scope)]
        return indexed_wire(update_spec, sent, sum(k for _, k in chosen), chosen)

    return _deterministic(lambda key, x: largest_mask(x, num_sent(x.size)), scope, wire)


@validate.named_arguments
def random_k(
    share: float | None = None,
    *,
    count: int | None = None,
    scaled: bool = True,
    scope: Literal["vector", "leaf"] = "vector",
) -> UpdateTransform:
    """Sends k entries, chosen at random for each client and round, times d/k.

    Args:
      share: of the entries, as in `top_k`.
      count: k, as in `top_k`.
      scaled: True: entries are multiplied by d/k, which makes the message unbiased. False: entries are sent as they
        are, which is biased but a contraction. `error_feedback` needs a contraction, and refuses the scaled form of
        half of the entries or fewer.
      scope: "vector" or "leaf", as in `top_k`.

    Returns: a transform that sends k numbers and a seed of 64 bits, from which both ends derive the k positions.

    Raises: as `top_k`.

    Guarantees:
      - every entry is sent with probability k/d, and every pair with probability k (k - 1) / (d (d - 1))
        (tests/transform/test_sparsify.py::test_random_positions_are_uniform)
      - the message is unbiased, with variance (d/k - 1) |x|^2; unscaled, its error is (1 - k/d) |x|^2
        (test_random_k_is_unbiased_with_its_variance)
      - clients choose independently (test_clients_choose_independently)

    References: Stich, Cordonnier and Jaggi 2018, definition 2.1; Konecny et al. 2016, section 3 (random mask).

    >>> import numpy as np
    >>> float(random_k(count=2).squared_error(np.array([3.0, -1.0, 0.5, 2.0])))
    14.25
    """
    num_sent = amount(share, count, scope, "entries")

    def message(key, update):
        masks = masks_of(lambda key, x: random_mask(key, x.size, num_sent(x.size)), scope, key, update)
        if not scaled:
            return kept(update, masks)
        check_floats(update)
        leaves, structure = jax.tree.flatten(update)
        sizes = numbers_of_entries(update, scope) * (len(leaves) if scope == "vector" else 1)  # one for each leaf
        factors = structure.unflatten([size / max(num_sent(size), 1) if size else 1.0 for size in sizes])

        def scaled_up(x, factor):
            # In float32 at least: rounded to bfloat16, the product would have another mean.
            return x.astype(tree.at_least_float32(x.dtype)) * factor

        return kept(jax.tree.map(scaled_up, update, factors), masks)

    def error(update):
        parts = [update] if scope == "vector" else jax.tree.leaves(update)
        total = 0.0
        for part, size in zip(parts, numbers_of_entries(update, scope), strict=True):
            if size:
                total = total + squared(part) * (size / num_sent(size) - 1 if scaled else 1 - num_sent(size) / size)
        return total

    def wire(update_spec, sent):
        values = sum(num_sent(size) for size in numbers_of_entries(update_spec, scope))
        sent = payload(update_spec, sent, values)
        return sent._replace(side_bits=sent.side_bits + SEED_BITS)

    facts = {"unbiased": scaled, "exact_error": True}
    return stateless(message, wire=wire, nonexpansive=not scaled, squared_error=error, **facts)


@validate.named_arguments
def threshold(value: Positive) -> UpdateTransform:
    """Sends the entries of at least a given magnitude, as they are; their number depends on the update.

    Args:
      value: the magnitude, positive, in the unit of updates.

    Returns: a transform whose wire counts the worst case: all d numbers, and a bit for each number that tells whether
    it is sent. The metric `sent_values` is the number of entries that are really sent, a mean over the round's clients.

    Raises: ValueError or TypeError for a value that is not positive and finite.

    Guarantees: entries at the threshold are sent, smaller ones are not, and the metric counts them
    (tests/transform/test_sparsify.py::test_threshold_sends_and_counts).

    References: Strom 2015; Dutta et al. 2020 (on hard thresholds as compressors of absolute error).

    >>> import jax, jax.numpy as jnp
    >>> threshold(1.0).on_client(jax.random.key(0), jnp.array([3.0, -1.0, 0.5]), (), ())[0].tolist()
    [3.0, -1.0, 0.0]
    """

    def wire(update_spec, sent):
        bitmap_bits = tree.num_values(update_spec)
        return sent._replace(side_bits=sent.side_bits + bitmap_bits, coded_bits=None)

    without_metric = _deterministic(lambda key, x: jnp.abs(x) >= value, "leaf", wire)

    def on_client(key, update, state, memory):
        message, memory, _ = without_metric.on_client(key, update, state, memory)
        num_sent = sum((jnp.count_nonzero(x).astype(jnp.float32) for x in jax.tree.leaves(message)), jnp.zeros(()))
        return message, memory, {"sent_values": Mean(num_sent, jnp.ones(()))}

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        sent_values = measured["sent_values"]
        return aggregate, state, {"sent_values": sent_values.total / jnp.maximum(sent_values.weight, 1)}

    return without_metric._replace(on_client=on_client, on_server=on_server)


@validate.named_arguments
def block_k(
    share: float | None = None,
    *,
    count: int | None = None,
    block_size: PositiveInt = 64,
    scope: Literal["vector", "leaf"] = "vector",
) -> UpdateTransform:
    """Sends the k blocks of consecutive entries with the largest norm, as they are; among equal blocks the first.

    For the same numbers, indices cost less than those of `top_k` by the factor block_size, and whole blocks are moved
    faster.

    Args:
      share: of the blocks, in (0, 1], rounded up; None beside a count.
      count: k >= 1 blocks; None beside a share.
      block_size: the entries of a block; the last block of an update (or leaf) may be shorter.
      scope: "vector" cuts the whole update into blocks, "leaf" cuts each leaf.

    Returns: a transform that sends at most k block_size numbers and k ceil(log2 blocks) bits of indices.

    Raises: as `top_k`.

    Guarantees:
      - blocks of largest norm are sent unchanged, from 1e-38 to 1e30
        (tests/transform/test_sparsify.py::test_blocks_of_largest_norm_survive)
      - with blocks of one entry it is `top_k` (test_blocks_of_one_are_top_k)
      - the error is at most (1 - k/blocks) |x|^2 for full blocks (test_contraction)

    References: Vogels, Karimireddy and Jaggi 2019, section 4.2 (random block); Gray, Radford and Kingma 2017.

    >>> import jax, jax.numpy as jnp
    >>> one_block = block_k(count=1, block_size=2)
    >>> one_block.on_client(jax.random.key(0), jnp.array([3.0, 0.0, 2.5, -2.5]), (), ())[0].tolist()
    [0.0, 0.0, 2.5, -2.5]
    """
    num_sent = amount(share, count, scope, "blocks")

    def num_blocks(size):
        return -(-size // block_size)

    def choose(key, x):
        rows = jnp.concatenate([x, jnp.zeros(-x.size % block_size, x.dtype)]).reshape(-1, block_size)
        # Divided by the largest magnitude, so that squares stay in range.
        rows = rows * (1 / jnp.maximum(jnp.abs(x).max(), 2.0**-126))
        squared_norms = (rows * rows).sum(1)
        chosen = largest_mask(squared_norms, num_sent(squared_norms.size))
        return jnp.broadcast_to(chosen[:, None], rows.shape).reshape(-1)[: x.size]

    def wire(update_spec, sent):
        sizes = numbers_of_entries(update_spec, scope)
        chosen = [(num_blocks(size), num_sent(num_blocks(size))) for size in sizes]
        values = sum(min(k * block_size, size) for (_, k), size in zip(chosen, sizes, strict=True))
        return indexed_wire(update_spec, sent, values, chosen)

    return _deterministic(choose, scope, wire)
