"""The client of split learning: it trains through a cut, and counts what crosses in its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import client, validate
from fedjax_sim.algorithms.split.loss import PRESENT, Split
from fedjax_sim.algorithms.split.traffic import bits_by_direction, crossings, product, visits, word_pair_sum
from fedjax_sim.client import LocalWork
from fedjax_sim.network.link import noise_of
from fedjax_sim.types import Array, ClientData, ClientUpdate, Metric, PyTree

__all__ = ["split_client"]

METRICS = (
    Metric("split_up_bytes", "besides, sent up at the cut", "bytes", besides=True),  # activations, labels, gradients
    Metric("split_down_bytes", "besides, sent down at the cut", "bytes", besides=True),  # activations, gradients
    Metric("split_other_bytes", "besides, sent among the others", "bytes", besides=True),
)


@validate.named_arguments
def split_client(
    split: Split | Sequence[Split],
    optimizer: optax.GradientTransformation,
    work: LocalWork,
    *,
    tier: Callable | None = None,
) -> ClientUpdate:
    """Local training through a cut, whose bytes are counted; under `federated` it is a device with its gateway.

    The update is that of the whole model: where only the client's part is sent on, take `splitfed`.

    Args:
      split: of `split_loss`, or one for each tier.
      optimizer, work: as in `client.local_sgd`; each party has this optimiser for its own parameters, whose norm is all
        that a clip by the global norm sees. With several splits it must treat each coordinate by itself.
      tier: (key, ClientData) -> [] integer, which of the splits a client trains with in this round: by its data (a
        column that says what its device is), or drawn anew (a state of the device).

    Returns: a ClientUpdate with counts `split_up_bytes`, `split_down_bytes` and, with three parties or more,
    `split_other_bytes`: each message of an example in whole bytes, each time that it is visited. Noise on a link is
    stated as the client's, of a mechanism that no accountant knows: such a run has no epsilon.

    Raises: ValueError for tiers without a function that tells them, or of other models; `federated` refuses it with
    samplers whose rounds take time or have late clients.

    Guarantees: `client.local_sgd` bit for bit with plain links, whatever the tier
    (tests/algorithms/split/test_client.py::test_tiers_train_the_same_model), if the optimiser treats each coordinate by
    itself, and else the optimisers of two machines (::test_each_party_has_its_own_optimiser); partial batches and
    epochs are counted by their examples (::test_bytes_are_those_of_the_arrays), past 2^31 too
    (::test_long_work_is_counted); no clock prices it (::test_no_clock_prices_what_others_help_with), and noise has no
    epsilon (::test_noise_on_links_has_no_epsilon).

    References: Vepakomma et al. 2018, section 2; Samikwa, Di Maio and Braun 2022 (ARES), for cuts by device.
    """
    splits = tuple(split) if isinstance(split, (list, tuple)) else (split,)
    if not splits:
        validate.fail("split", "a Split of split_loss, or one for each tier", split)
    for i, one in enumerate(splits):
        validate.part(f"split[{i}]", one, Split)
    if len(splits) > 1:
        validate.function("tier", tier, "key, data", hint="It says which of the splits a client trains with.")
    elif tier is not None:
        validate.fail("tier", "None with one split", tier)
    whole, more = _by_tier(splits), any(one.cut.num_parties > 2 for one in splits)
    directions = ("up", "down", "other") if more else ("up", "down")
    validate.optax_transformation("optimizer", optimizer)
    inner = client.local_sgd(whole, optimizer if len(splits) > 1 else _by_party(optimizer, splits[0]), work)

    def apply(key, broadcast, state, data):
        place = jnp.zeros((), jnp.int32)
        given = data
        if any(one.decorrelation for one in splits):
            given = data._replace(examples={**data.examples, PRESENT: data.mask.astype(jnp.float32)})
        if tier is not None:
            place = jnp.clip(jnp.asarray(tier(key, data), jnp.int32), 0, len(splits) - 1)
            rows = jnp.broadcast_to(place, data.mask.shape)
            given = given._replace(examples={**given.examples, "tier": rows})
        report, state = inner.apply(key, broadcast, state, given)
        visited = visits(work, data)
        found = [_bytes(one, broadcast, data, *visited) for one in splits]
        counts = {f"split_{way}_bytes": jnp.stack([x[way] for x in found])[place] for way in directions}
        return report._replace(counts=report.counts | counts), state

    metrics = (*inner.facts.metrics, *METRICS[: len(directions)])
    noise = noise_of(link for one in splits for link in one.links.values())
    return inner._replace(apply=apply).stating(noise=noise, metrics=metrics, helped=True)


def _by_party(optimizer: optax.GradientTransformation, split: Split) -> optax.GradientTransformation:
    """The optimiser, once for each party: nobody sees another's gradients."""

    def init(params):
        return tuple(optimizer.init(part) for part in split.cut.split(params))

    def update(gradients, states, params, **told):
        parts = zip(*map(split.cut.split, (gradients, params)), states, strict=True)
        with jax.numpy_dtype_promotion("standard"):  # optax's code promotes
            moved = [optimizer.update(gradient, state, own, **told) for gradient, own, state in parts]
        updates, states = zip(*moved, strict=True)
        return split.cut.join(updates), states

    kind = client.OverRounds if isinstance(optimizer, client.OverRounds) else optax.GradientTransformation
    return kind(init, update)


def _by_tier(splits: tuple[Split, ...]) -> Callable:
    """The loss of whichever split the column "tier" of the examples names; of any, where no link changes anything."""
    if len(splits) == 1:
        return partial(splits[0])  # which counts below, so that it need not say that others help
    if any(one.cut.model is not splits[0].cut.model for one in splits):
        validate.fail("split", "cuts of one model", "several models", "Their parameters would differ.")
    plain = all(one.forward is None and one.backward is None for each in splits for one in each.links.values())
    plain &= not any(one.decorrelation for one in splits)

    def loss(params, examples, key):
        examples = dict(examples)
        tiers = examples.pop("tier", None)
        if plain or tiers is None:
            return splits[0](params, examples, key)
        return jax.lax.switch(tiers.max(), [partial(one, key=key) for one in splits], params, examples)

    return loss


def _bytes(split: Split, params: PyTree, data: ClientData, visited: Array, steps: Array) -> dict[str, Array]:
    """[2] uint32 words of the bytes that cross in all visits and steps, by direction."""
    example = {name: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), data.examples[name])
               for name in ("x", "y")}  # fmt: skip
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    found = bits_by_direction(crossings(split, spec, example))
    return {
        way: word_pair_sum(product(jnp.uint32(bits // 8), visited), product(jnp.uint32(beside // 8), steps))
        for way, (bits, beside) in found.items()
    }
