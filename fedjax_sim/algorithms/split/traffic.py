"""What crosses between the parties of one model: the bits of an example and of a batch, and how often they cross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.algorithms.split.loss import Split
from fedjax_sim.client import LocalWork
from fedjax_sim.network import Link
from fedjax_sim.network.link import Tap, wires
from fedjax_sim.round.costs import words_of
from fedjax_sim.types import Array, ClientData, Count, PyTree

__all__ = ["Crossing", "bits_by_direction", "crossings", "product", "visits", "word_pair_sum"]


class Crossing(NamedTuple):
    """What crosses between two parties for one example, and its way back; each message in whole bytes."""

    source: int
    target: int
    name: str
    kind: str  # "activations" or "labels"
    there: int  # bits
    back: int  # bits of its gradient; 0 of labels
    batch: int  # bits of a batch beside, each way; 0 of labels that go with activations


def crossings(split: Split, params: PyTree, example: PyTree) -> tuple[Crossing, ...]:
    """All that crosses in a training step, for one example.

    Args:
      params: arrays or specs. example: {"x": ..., "y": ...} of one example, without the batch axis; arrays or specs.

    Guarantees: the arrays of a transcript, counted (tests/algorithms/split/test_client.py::
    test_bytes_are_those_of_the_arrays), each message in whole bytes (::test_messages_are_whole_bytes); labels that go
    with activations cost no nonce of their own
    (tests/algorithms/split/test_loss.py::test_labels_are_encrypted_as_the_rest_is).
    """
    tap = Tap()
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), example)
    jax.eval_shape(lambda p, e: split.through(tap, p, e, None), params, batch)
    found, ways = [], {(x.source, x.target) for x in tap.messages if x.kind != "labels"}
    for message, (link, _) in zip(tap.messages, tap.sources, strict=True):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message.value)
        labels = message.kind == "labels"
        there, back = (_whole(wire.bits) for wire in wires(Link() if labels else link, one))
        beside = 0 if labels and (message.source, message.target) in ways else _whole(link.batch_bits)
        bits = (there, 0 if labels else back, beside)
        found.append(Crossing(message.source, message.target, message.name, message.kind, *bits))
    return tuple(found)


def _whole(bits: int) -> int:
    """The bits of so many whole bytes as hold them."""
    return 8 * -(-bits // 8)


def bits_by_direction(crossed: Sequence[Crossing], *, training: bool = True) -> dict[str, tuple[int, int]]:
    """{"up", "down", "other"}: (bits of an example, bits of a batch) from party 0, to it, and among the others.

    Without training there are neither labels nor gradients.
    """
    total = {"up": [0, 0], "down": [0, 0], "other": [0, 0]}
    for one in crossed:
        if one.kind == "labels" and not training:
            continue
        ways = [(one.source, one.target, one.there)] + [(one.target, one.source, one.back)] * (
            training and one.back > 0
        )
        for source, target, bits in ways:
            where = "up" if source == 0 else "down" if target == 0 else "other"
            total[where][0] += bits
            total[where][1] += one.batch
    return {where: (bits[0], bits[1]) for where, bits in total.items()}


def visits(work: LocalWork, data: ClientData) -> tuple[Array, Array]:
    """(examples that the batches hold, each as often as it is visited; steps), [2] uint32 words each."""
    rows = data.mask.shape[0]
    size = rows if work.batch_size is None else min(work.batch_size, rows)
    number = data.mask.sum(dtype=jnp.int32)
    per_epoch = jnp.maximum(-(-number // size), 1)
    steps = jnp.where(number > 0, jnp.asarray(work.own_steps(per_epoch, data.work), jnp.int32), 0)
    epochs, rest = jax.lax.div(steps, per_epoch), jax.lax.rem(steps, per_epoch)
    visited = word_pair_sum(product(number, _words(epochs)), _words(jnp.minimum(rest * size, number)))
    return visited, _words(steps)


def _words(number: Array) -> Array:
    return jnp.stack([jnp.zeros_like(number), number]).astype(jnp.uint32)


def product(number: Array, words: Array) -> Array:
    """number * words modulo 2^64; number is [], words and the result are [2] uint32, high and low."""
    return words_of(Count(number, words))


def word_pair_sum(a: Array, b: Array) -> Array:
    """a + b modulo 2^64, [2] uint32 words each."""
    low = a[1] + b[1]
    return jnp.stack([a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low])
