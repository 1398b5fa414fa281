"""The client of split learning trains through a cut model, and counts the bytes that cross the cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import client, validate
from fedjax_sim.algorithms.split.loss import PRESENT, Split
from fedjax_sim.algorithms.split.traffic import bits_by_direction, crossings, visits
from fedjax_sim.client import LocalWork
from fedjax_sim.network.link import noise_of
from fedjax_sim.round.counts import word_pair_product, word_pair_sum
from fedjax_sim.types import Array, ClientData, ClientUpdate, Metric, PyTree

METRICS = (
    Metric("split_up_bytes", "besides, sent up at the cut", "bytes", besides=True),  # activations, labels, gradients
    Metric("split_down_bytes", "besides, sent down at the cut", "bytes", besides=True),  # activations, gradients
    Metric("split_other_bytes", "besides, sent among the others", "bytes", besides=True),
)


@validate.named_arguments
def split_client(
    split: Split | list[Split] | tuple[Split, ...],
    optimizer: optax.GradientTransformation,
    work: LocalWork,
    *,
    tier: Callable | None = None,
) -> ClientUpdate:
    """Makes a client that trains a cut model, and counts the bytes that cross the cut.

    Under `federated` such a client is a device with its gateway. Its update is that of the whole model; `splitfed`
    sends the client's part alone.

    Args:
      split: of `split_loss`, or a sequence with a split for each tier.
      optimizer, work: as in `client.local_sgd`. Each party has this optimiser for its own parameters: a clip by the
        global norm sees the norm of one party's gradients only. With several splits the optimiser must treat each
        coordinate by itself.
      tier: (key, ClientData) -> [] integer, the index of the split with which a client trains in this round. It may
        follow from the client's data (a column that states its kind of device), or be drawn anew (a state of the
        device). None with one split.

    Returns: a ClientUpdate with counts `split_up_bytes`, `split_down_bytes` and, with three parties or more,
    `split_other_bytes`: each message of an example in whole bytes, each time that it is visited. Noise on a link is
    stated as the client's, of a mechanism that no accountant knows: such a run has no epsilon.

    Raises: ValueError for several splits without `tier`, or of different models. `federated` refuses the client with
    samplers whose rounds take time or have late clients.

    Guarantees: with plain links it is `client.local_sgd` bit for bit, whatever the tier
    (tests/algorithms/split/test_client.py::test_tiers_train_the_same_model), if the optimiser treats each coordinate by
    itself; other optimisers work as on two machines (::test_each_party_has_its_own_optimiser); partial batches and
    epochs are counted by their examples (::test_bytes_are_those_of_the_arrays), past 2^31 too
    (::test_long_work_is_counted); no clock prices it (::test_no_clock_prices_what_others_help_with), and noise has no
    epsilon (::test_noise_on_links_has_no_epsilon).

    References: Vepakomma et al. 2018, section 2; Samikwa, Di Maio and Braun 2022 (ARES), for cuts by device.
    """
    splits: tuple[Split, ...] = tuple(split) if isinstance(split, (list, tuple)) else (split,)
    if not splits:
        validate.fail("split", "a Split of split_loss, or one for each tier", split)
    for i, tier_split in enumerate(splits):
        validate.part(f"split[{i}]", tier_split, Split)
    if len(splits) > 1:
        validate.function("tier", tier, "key, data", hint="It says which of the splits a client trains with.")
    elif tier is not None:
        validate.fail("tier", "None with one split", tier)
    loss_fn = _loss_by_tier(splits)
    has_more_parties = any(x.cut.num_parties > 2 for x in splits)
    directions = ("up", "down", "other") if has_more_parties else ("up", "down")
    validate.optax_transformation("optimizer", optimizer)
    inner = client.local_sgd(loss_fn, _by_party(optimizer, splits[0]) if len(splits) == 1 else optimizer, work)

    def apply(key, broadcast, state, data):
        tier_index = jnp.zeros((), jnp.int32)
        training_data = data
        # A loss function sees examples alone, so what it needs beside them is a column of the examples.
        if any(x.decorrelation for x in splits):
            training_data = data._replace(examples={**data.examples, PRESENT: data.mask.astype(jnp.float32)})
        if tier is not None:
            tier_index = jnp.clip(jnp.asarray(tier(key, data), jnp.int32), 0, len(splits) - 1)
            tier_column = jnp.broadcast_to(tier_index, data.mask.shape)
            training_data = training_data._replace(examples={**training_data.examples, "tier": tier_column})
        report, state = inner.apply(key, broadcast, state, training_data)
        num_visits, num_steps = visits(work, data)
        bytes_by_split = [_bytes(x, broadcast, data, num_visits, num_steps) for x in splits]
        counts = {f"split_{way}_bytes": jnp.stack([x[way] for x in bytes_by_split])[tier_index] for way in directions}
        return report._replace(counts=report.counts | counts), state

    metrics = (*inner.facts.metrics, *METRICS[: len(directions)])
    noise = noise_of(link for x in splits for link in x.links.values())
    return inner._replace(apply=apply).stating(noise=noise, metrics=metrics, helped=True)


def _by_party(optimizer: optax.GradientTransformation, split: Split) -> optax.GradientTransformation:
    """Makes each party optimise its own parameters: no party sees the gradients of another party.

    Args:
      optimizer: of each party.
      split: says which parameters each of the P parties holds.

    Returns: an optimiser of the joint parameters, whose state is a tuple of P states; an `OverRounds` if `optimizer` is
    one.
    """

    def init(params):
        return tuple(optimizer.init(part) for part in split.cut.split(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        parts = zip(*map(split.cut.split, (updates, params)), state, strict=True)
        with jax.numpy_dtype_promotion("standard"):  # optax's code promotes
            results = [optimizer.update(gradient, own_state, own, **extra_args) for gradient, own, own_state in parts]
        updates_by_party, next_state = zip(*results, strict=True)
        return split.cut.join(updates_by_party), next_state

    kind = client.OverRounds if isinstance(optimizer, client.OverRounds) else optax.GradientTransformation
    return kind(init, update)


def _loss_by_tier(splits: tuple[Split, ...]) -> Callable:
    """Makes the loss of the split whose index is in the column "tier" of the examples.

    Args:
      splits: of one model, the split of each tier.

    Returns: (params, examples, key) -> dict of per-example values. The column "tier" [n] int32 has the client's index
    in [0, len(splits)) in all rows but padding, where it is 0. Without it, as in evaluations, the loss is that of the
    first split.
    """
    if len(splits) == 1:
        # `local_sgd` refuses a loss of several parties (attribute `helped`), whose messages it would not count.
        # `split_client` counts them, so a `partial` hides the attribute.
        return partial(splits[0])
    if any(x.cut.model is not splits[0].cut.model for x in splits):
        validate.fail("split", "cuts of one model", "several models", "Their parameters would differ.")
    # If no link changes anything, all splits compute the same loss, and any of them will do.
    is_plain = all(x.forward is None and x.backward is None for split in splits for x in split.links.values())
    is_plain &= not any(x.decorrelation for x in splits)

    def loss(params, examples, key):
        examples = dict(examples)
        tiers = examples.pop("tier", None)
        if is_plain or tiers is None:
            return splits[0](params, examples, key)
        # All rows have the client's tier but padding, which has tier 0.
        return jax.lax.switch(tiers.max(), [partial(x, key=key) for x in splits], params, examples)

    return loss


def _bytes(split: Split, params: PyTree, data: ClientData, visited: Array, steps: Array) -> dict[str, Array]:
    """Counts the bytes that cross in a client's work, by direction, each [2] uint32 words.

    Args:
      split: the loss.
      params: of the whole model.
      data: of the client.
      visited: [2] uint32, examples that the batches hold, each as often as it is visited.
      steps: [2] uint32, local steps.
    """
    example = {name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data.examples[name])
               for name in ("x", "y")}  # fmt: skip
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    bits = bits_by_direction(crossings(split, spec, example))
    return {
        way: word_pair_sum(
            word_pair_product(jnp.uint32(example_bits // 8), visited),
            word_pair_product(jnp.uint32(batch_bits // 8), steps),
        )
        for way, (example_bits, batch_bits) in bits.items()
    }
