"""Messages of a few numbers: the largest ones, random ones, those above a threshold, whole blocks.

Each transform chooses entries of the update, taken as one vector (scope "vector") or leaf by leaf (scope "leaf"), and
sends them as they are; the others arrive as zero. An update that is not finite stays so, even if its NaN is not sent.
With d entries to choose from, k of them sent:

    top_k        the k largest magnitudes       |x - T x|^2 <= (1 - k/d) |x|^2    biased
    random_k     k at random, times d/k         E |R x - x|^2 = (d/k - 1) |x|^2   unbiased
    threshold    those of at least a magnitude  |x - H x|^2 < d value^2           biased
    block_k      the k blocks of largest norm   (1 - k/blocks) |x|^2 at most      biased
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
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

__all__ = ["block_k", "random_k", "threshold", "top_k"]

SEED_BITS = 64  # of the seed from which both ends draw the same positions


def _deterministic(choose: Callable, scope: str, wire: Callable) -> UpdateTransform:
    """A member whose choice needs no key."""

    def message(key, update):
        update = engine.computed_once(update, key)  # read twice, to choose entries and to send them
        return kept(update, masks_of(choose, scope, None, update))

    def error(update):
        return squared(update, masks_of(choose, scope, None, update))

    return stateless(message, wire=wire, nonexpansive=True, squared_error=error, exact_error=True)


def top_k(share: float | None = None, *, count: int | None = None, scope: str = "vector") -> UpdateTransform:
    """The k entries of largest magnitude, as they are; among equal ones those of lowest index.

    Args:
      share: of the entries, in (0, 1], rounded up: k = ceil(share d). Or
      count: k >= 1 itself, exactly one of the two; a leaf of fewer entries is sent whole.
      scope: "vector" chooses over the whole update, "leaf" in each leaf (k of each).

    Returns: a transform that sends k numbers with k ceil(log2 d) bits of indices (as a set: ceil(log2 C(d, k))).

    Raises: ValueError, TypeError for a share or count out of range, or both; for a count above the update's d (when its
    shape is known).

    Guarantees: exactly k entries unchanged, whatever the ties, and the errors of four numbers by hand
    (tests/transform/test_sparsify.py::test_largest_entries_survive_unchanged, test_errors_by_hand); error at most
    (1 - k/d) |x|^2 (test_contraction); exact bits (test_wire_is_counted_exactly). Biased: wrap it in `error_feedback`
    where that matters (tests/transform/test_feedback.py::test_feedback_converges_where_the_bare_compressor_stalls).

    References: Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018, definition 2.1.

    >>> import jax, jax.numpy as jnp
    >>> top_k(count=2).on_client(jax.random.key(0), jnp.array([3.0, -1.0, 0.5, 2.0]), (), ())[0].tolist()
    [3.0, 0.0, 0.0, 2.0]
    """
    number = amount(share, count, scope, "entries")

    def wire(update_spec, sent):
        chosen = [(size, number(size)) for size in numbers_of_entries(update_spec, scope)]
        return indexed_wire(update_spec, sent, sum(k for _, k in chosen), chosen)

    return _deterministic(lambda key, x: largest_mask(x, number(x.size)), scope, wire)


@validate.named_arguments
def random_k(
    share: float | None = None, *, count: int | None = None, scaled: bool = True, scope: str = "vector"
) -> UpdateTransform:
    """k entries chosen at random, anew for each client and round, times d/k.

    Args:
      share, count, scope: as for `top_k`.
      scaled: times d/k, which makes it unbiased. False sends entries as they are: biased, but a contraction, which is
        what `error_feedback` needs (it refuses the scaled form of half of the entries or fewer).

    Returns: a transform that sends k numbers and a seed of 64 bits, from which both ends derive the k positions.

    Raises: as `top_k`.

    Guarantees: every entry is sent with probability k/d and every pair with k (k - 1) / (d (d - 1))
    (tests/transform/test_sparsify.py::test_random_positions_are_uniform); unbiased, of variance (d/k - 1) |x|^2, or
    with error (1 - k/d) |x|^2 unscaled (test_random_k_is_unbiased_with_its_variance); clients choose independently
    (test_clients_choose_independently).

    References: Stich, Cordonnier and Jaggi 2018, definition 2.1; Konecny et al. 2016, section 3 (random mask).

    >>> import numpy as np
    >>> float(random_k(count=2).squared_error(np.array([3.0, -1.0, 0.5, 2.0])))
    14.25
    """
    number = amount(share, count, scope, "entries")

    def message(key, update):
        masks = masks_of(lambda key, x: random_mask(key, x.size, number(x.size)), scope, key, update)
        if not scaled:
            return kept(update, masks)
        check_floats(update)
        leaves, structure = jax.tree.flatten(update)
        sizes = numbers_of_entries(update, scope) * (len(leaves) if scope == "vector" else 1)
        gains = structure.unflatten([size / max(number(size), 1) if size else 1.0 for size in sizes])

        def longer(x, gain):  # float32 at least: rounded to bfloat16, the product would have another mean
            return x.astype(tree.at_least_float32(x.dtype)) * gain

        return kept(jax.tree.map(longer, update, gains), masks)

    def error(update):
        parts = [update] if scope == "vector" else jax.tree.leaves(update)
        total = 0.0
        for part, size in zip(parts, numbers_of_entries(update, scope), strict=True):
            if size:
                total = total + squared(part) * (size / number(size) - 1 if scaled else 1 - number(size) / size)
        return total

    def wire(update_spec, sent):
        values = sum(number(size) for size in numbers_of_entries(update_spec, scope))
        sent = payload(update_spec, sent, values)
        return sent._replace(side_bits=sent.side_bits + SEED_BITS)

    facts = {"unbiased": scaled, "exact_error": True}
    return stateless(message, wire=wire, nonexpansive=not scaled, squared_error=error, **facts)


@validate.named_arguments
def threshold(value: Positive) -> UpdateTransform:
    """The entries of at least a given magnitude, as they are; how many these are depends on the update.

    Args:
      value: > 0, in the update's own unit.

    Returns: a transform whose wire counts the worst case: all d numbers, and a bit for each that tells whether it is
    sent. The number that is really sent, a mean over the round's clients, is its metric `sent_values`.

    Raises: ValueError, TypeError for a value that is not positive and finite.

    Guarantees: entries at the threshold are sent, smaller ones are not, and the metric counts them
    (tests/transform/test_sparsify.py::test_threshold_sends_and_counts).

    References: Strom 2015; Dutta et al. 2020 (on hard thresholds as compressors of absolute error).

    >>> import jax, jax.numpy as jnp
    >>> threshold(1.0).on_client(jax.random.key(0), jnp.array([3.0, -1.0, 0.5]), (), ())[0].tolist()
    [3.0, -1.0, 0.0]
    """

    def wire(update_spec, sent):
        bitmap = tree.num_values(update_spec)
        return sent._replace(side_bits=sent.side_bits + bitmap, coded_bits=None)

    bare = _deterministic(lambda key, x: jnp.abs(x) >= value, "leaf", wire)

    def on_client(key, update, state, memory):
        update, memory, _ = bare.on_client(key, update, state, memory)
        sent = sum((jnp.count_nonzero(x).astype(jnp.float32) for x in jax.tree.leaves(update)), jnp.zeros(()))
        return update, memory, {"sent_values": Mean(sent, jnp.ones(()))}

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        sent = measured["sent_values"]
        return aggregate, state, {"sent_values": sent.total / jnp.maximum(sent.weight, 1)}

    return bare._replace(on_client=on_client, on_server=on_server)


@validate.named_arguments
def block_k(
    share: float | None = None, *, count: int | None = None, block_size: PositiveInt = 64, scope: str = "vector"
) -> UpdateTransform:
    """The k blocks of consecutive entries whose norm is largest, as they are; among equal ones the first.

    Indices cost a block_size-th of those of `top_k`, and whole blocks are moved faster.

    Args:
      share: of the blocks, in (0, 1], rounded up. Or count: k >= 1 blocks; exactly one of the two.
      block_size: entries of a block; the last one of an update (or leaf) may be shorter.
      scope: "vector" cuts the whole update into blocks, "leaf" each leaf.

    Returns: a transform that sends at most k block_size numbers and k ceil(log2 blocks) bits of indices.

    Raises: as `top_k`.

    Guarantees: blocks of largest norm survive unchanged, from 1e-38 to 1e30
    (tests/transform/test_sparsify.py::test_blocks_of_largest_norm_survive); with blocks of one entry it is `top_k`
    (test_blocks_of_one_are_top_k); error at most (1 - k/blocks) |x|^2 for full blocks (test_contraction).

    References: Vogels, Karimireddy and Jaggi 2019, section 4.2 (random block); Gray, Radford and Kingma 2017.

    >>> import jax, jax.numpy as jnp
    >>> one = block_k(count=1, block_size=2)
    >>> one.on_client(jax.random.key(0), jnp.array([3.0, 0.0, 2.5, -2.5]), (), ())[0].tolist()
    [0.0, 0.0, 2.5, -2.5]
    """
    number = amount(share, count, scope, "blocks")

    def blocks(size):
        return -(-size // block_size)

    def choose(key, x):
        rows = jnp.concatenate([x, jnp.zeros(-x.size % block_size, x.dtype)]).reshape(-1, block_size)
        rows = rows * (1 / jnp.maximum(jnp.abs(x).max(), 2.0**-126))  # squares then stay in range
        norms = engine.rounded_here(rows * rows, x).sum(1)
        chosen = largest_mask(norms, number(norms.size))
        return jnp.broadcast_to(chosen[:, None], rows.shape).reshape(-1)[: x.size]

    def wire(update_spec, sent):
        sizes = numbers_of_entries(update_spec, scope)
        chosen = [(blocks(size), number(blocks(size))) for size in sizes]
        values = sum(min(k * block_size, size) for (_, k), size in zip(chosen, sizes, strict=True))
        return indexed_wire(update_spec, sent, values, chosen)

    return _deterministic(choose, scope, wire)
