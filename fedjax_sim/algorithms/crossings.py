"""What crosses between the parties of split learning: the bits of an example, and of a batch, by direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from fedjax_sim.algorithms.split import Split
from fedjax_sim.network import Link
from fedjax_sim.network.link import Tap, wires
from fedjax_sim.types import PyTree

__all__ = ["Crossing", "client_bits", "crossings"]


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

    Guarantees: the arrays of a transcript, counted (tests/algorithms/test_split_client.py::
    test_bytes_are_those_of_the_arrays), each message in whole bytes (::test_messages_are_whole_bytes); labels that go
    with activations cost no nonce of their own
    (tests/algorithms/test_split.py::test_labels_are_encrypted_as_the_rest_is).
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


def client_bits(crossed: Sequence[Crossing], *, training: bool = True) -> dict[str, tuple[int, int]]:
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
