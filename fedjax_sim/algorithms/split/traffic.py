"""Counts messages between the parties of a model: bits for each example and each batch, and how often they cross."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.algorithms.split.loss import Split
from fedjax_sim.client import LocalWork
from fedjax_sim.network import Link
from fedjax_sim.network.link import Tap, wires
from fedjax_sim.round.counts import word_pair, word_pair_product, word_pair_sum
from fedjax_sim.types import Array, ClientData, PyTree


class Crossing(NamedTuple):
    """A message from one party to another for one example, and its gradient on the way back; both in whole bytes."""

    source: int  # the party that sends the message
    target: int  # the party that receives it
    name: str  # of the layer that receives it, or "labels"
    kind: str  # "activations" or "labels"
    there: int  # bits of the message
    back: int  # bits of its gradient; 0 for labels
    batch: int  # further bits for each batch, in each direction; 0 for labels that go with activations


def crossings(split: Split, params: PyTree, example: PyTree) -> tuple[Crossing, ...]:
    """All messages between parties in a training step, for one example.

    Args:
      split: the loss.
      params: of the whole model, arrays or specs.
      example: {"x": ..., "y": ...} of one example, without the batch axis; arrays or specs.

    Guarantees: the sizes are those of the arrays in a transcript (tests/algorithms/split/test_client.py::
    test_bytes_are_those_of_the_arrays), each message in whole bytes (::test_messages_are_whole_bytes); labels that go
    with activations cost no nonce of their own
    (tests/algorithms/split/test_loss.py::test_labels_are_encrypted_as_the_rest_is).
    """
    tap = Tap()
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), example)
    jax.eval_shape(lambda p, e: split.through(tap, p, e, None), params, batch)
    result = []
    ways_of_activations = {(x.source, x.target) for x in tap.messages if x.kind != "labels"}
    for message, (link, _) in zip(tap.messages, tap.sources, strict=True):
        value = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message.value)
        is_labels = message.kind == "labels"
        forward_bits, backward_bits = (_whole_bytes(wire.bits) for wire in wires(Link() if is_labels else link, value))
        # Labels that go with activations are in the same message, whose batch bits (a nonce, say) count once.
        goes_along = is_labels and (message.source, message.target) in ways_of_activations
        batch_bits = 0 if goes_along else _whole_bytes(link.batch_bits)
        bits = (forward_bits, 0 if is_labels else backward_bits, batch_bits)
        result.append(Crossing(message.source, message.target, message.name, message.kind, *bits))
    return tuple(result)


def _whole_bytes(bits: int) -> int:
    """Returns the number of bits, rounded up to whole bytes."""
    return 8 * -(-bits // 8)


def bits_by_direction(crossed: Sequence[Crossing], *, training: bool = True) -> dict[str, tuple[int, int]]:
    """Sums bits by direction: from party 0 ("up"), to party 0 ("down"), and among the other parties ("other").

    Args:
      crossed: of `crossings`.
      training: False counts neither labels nor gradients.

    Returns: {direction: (bits for each example, bits for each batch)}.
    """
    totals = {"up": [0, 0], "down": [0, 0], "other": [0, 0]}
    for crossing in crossed:
        if crossing.kind == "labels" and not training:
            continue
        messages = [(crossing.source, crossing.target, crossing.there)]
        if training and crossing.back > 0:
            messages.append((crossing.target, crossing.source, crossing.back))
        for source, target, bits in messages:
            direction = "up" if source == 0 else "down" if target == 0 else "other"
            totals[direction][0] += bits
            totals[direction][1] += crossing.batch
    return {direction: (bits[0], bits[1]) for direction, bits in totals.items()}


def visits(work: LocalWork, data: ClientData) -> tuple[Array, Array]:
    """Counts how often a client's local work visits an example, and its steps.

    Args:
      work: the local work.
      data: the client's examples and mask; `data.work` may shorten its work.

    Returns: (number of visits: the sum of the batches' examples; number of steps), each [2] uint32 words.
    """
    rows = data.mask.shape[0]
    size = rows if work.batch_size is None else min(work.batch_size, rows)
    num_examples = data.mask.sum(dtype=jnp.int32)
    steps_per_epoch = jnp.maximum(-(-num_examples // size), 1)
    own_steps = jnp.asarray(work.own_steps(steps_per_epoch, data.work), jnp.int32)
    num_steps = jnp.where(num_examples > 0, own_steps, 0)
    # A whole epoch visits every example once; in the last, partial epoch all batches are full but the last one.
    num_epochs = jax.lax.div(num_steps, steps_per_epoch)
    steps_left = jax.lax.rem(num_steps, steps_per_epoch)
    visits_left = jnp.minimum(steps_left * size, num_examples)
    num_visits = word_pair_sum(word_pair_product(num_examples, word_pair(num_epochs)), word_pair(visits_left))
    return num_visits, word_pair(num_steps)
