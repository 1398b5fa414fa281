"""What split learning costs, beside federated learning: operations by party, bytes, time and utilisation of a step.

Everything is counted from the traced program and the links; nothing is run. Parties work one after the other: a step
of split learning takes the sum of their times and of the messages between them, where m clients of a federation work at
once and take the longest of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.algorithms.split.loss import Split
from fedjax_sim.algorithms.split.traffic import Crossing, crossings
from fedjax_sim.models import distance_correlation
from fedjax_sim.types import PyTree

__all__ = ["SplitCosts", "StepTime", "split_costs"]


class StepTime(NamedTuple):
    """The time of one step or one request, in seconds."""

    seconds: float  # from the first layer to the last message
    busy: tuple[float, ...]  # of it, each party computes so long
    on_the_way: float  # of it, messages are under way

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the time in which each party computes; the others wait."""
        return tuple(one / self.seconds if self.seconds > 0 else 1.0 for one in self.busy)


class SplitCosts(NamedTuple):
    """The costs of a batch."""

    batch_size: int
    num_values: tuple[int, ...]  # parameters that each party holds
    training_flops: tuple[int, ...]  # of a step, by party: forward, loss and backward
    inference_flops: tuple[int, ...]  # of the outputs, by party
    crossed: tuple[Crossing, ...]  # bits of an example; all examples of a batch cross in one message
    output_bits: int  # of an example's output, on its way back to party 0; 0 where it is made there

    def messages(self, *, training: bool = True) -> tuple[tuple[int, int, int], ...]:
        """(source, target, bits) of every message of a step, or of a request: forward, then back."""
        there = [(x.source, x.target, self.batch_size * x.there + x.batch) for x in self.crossed if x.kind != "labels"]
        if not training:
            last = [(there[-1][1], 0, self.batch_size * self.output_bits)] if self.output_bits else []
            return (*there, *last)
        labels = [(x.source, x.target, self.batch_size * x.there + x.batch) for x in self.crossed if x.kind == "labels"]
        back = [(x.target, x.source, self.batch_size * x.back + x.batch) for x in self.crossed if x.back]
        return (*labels, *there, *reversed(back))

    def time(
        self, speeds: Sequence[float], *, bandwidth: float, latency: float = 0.0, training: bool = True
    ) -> StepTime:
        """The time of a step of training, or of a request.

        Args:
          speeds: flops/s of each party, > 0.
          bandwidth: bytes/s of every link, > 0. latency: seconds of every message, >= 0. Labels go with the
            activations, and cost no latency of their own.

        Raises: ValueError for another number of speeds, and for numbers out of range.

        Guarantees: one client and a server are busy t_c / (t_c + t_s + 2 latency) of the time, and m equal clients in a
        relay take m times as long as one, where those of a federation take as long as one
        (tests/algorithms/split/test_costs.py::test_times_by_hand, ::test_in_sequence_and_in_parallel).

        References: Vepakomma et al. 2018, section 3.
        """
        validate.sequence("speeds", speeds)
        if len(speeds) != len(self.num_values):
            validate.fail("speeds", f"one for each of {len(self.num_values)} parties", list(speeds))
        for i, speed in enumerate(speeds):
            validate.positive(f"speeds[{i}]", speed, wide=True)
        validate.positive("bandwidth", bandwidth, wide=True)
        validate.in_range("latency", latency, 0)
        flops = self.training_flops if training else self.inference_flops
        busy = tuple(number / speed for number, speed in zip(flops, speeds, strict=True))
        sent = self.messages(training=training)
        alone = len(sent) - sum(x.kind == "labels" for x in self.crossed if training)
        way = sum(bits / 8 for *_, bits in sent) / bandwidth + alone * latency
        return StepTime(sum(busy) + way, busy, way)


def split_costs(split: Split, params: PyTree, examples: PyTree) -> SplitCosts:
    """The costs of a step on a batch.

    Args:
      split: of `split_loss`.
      params: of the whole model; arrays or specs.
      examples: a batch {"x": [n, ...], "y": [n, ...]}; arrays or specs.

    Returns: `SplitCosts`. Operations are those of each party's own program, from what it has and receives to what it
    sends, with the distance correlation of `decorrelation`; links' transforms and optimisers' steps are not in them.

    Guarantees: operations of the toy's parties by hand (tests/algorithms/split/test_costs.py::test_operations_by_hand),
    and of distance correlations (::test_no_peek_is_not_for_nothing); bytes are those that a round counts
    (tests/algorithms/split/test_client.py::test_bytes_are_those_of_the_arrays).

    References: Vepakomma et al. 2018, table 1, counts operations at the client as well.

    >>> from fedjax_sim import models
    >>> from fedjax_sim.algorithms import split_loss
    >>> toy = models.mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))
    >>> batch = {"x": jax.numpy.ones((32, 10)), "y": jax.numpy.ones(32)}
    >>> found = split_costs(split_loss(toy, models.squared_error, "hidden_0"), toy.init(jax.random.key(0))[0], batch)
    >>> found.num_values, [bits // 32 for *_, bits in found.messages()]
    ((220, 331), [32, 640, 640])
    """
    validate.part("split", split, Split)
    n = jax.tree.leaves(examples)[0].shape[0]
    params = jax.eval_shape(lambda x: x, params)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
    parties = range(split.cut.num_parties)
    training, inference = (
        tuple(_flops(split, party, params, examples, train) for party in parties) for train in (True, False)
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), examples)
    out = jax.eval_shape(lambda p, x: split.cut.model.apply(p, (), x, None, False)[0], params, batch["x"])
    output_bits = 0 if split.cut.last == 0 else 8 * tree.num_bytes(out) // n
    values = tuple(tree.num_values(part) for part in split.cut.split(params))
    return SplitCosts(n, values, training, inference, crossings(split, params, one), output_bits)


def _flops(split: Split, party: int, params: PyTree, examples: PyTree, training: bool) -> int:
    """Operations of one party: its program with what it receives as arguments, so that nobody else's is in it."""
    received: list = []

    def shapes(params, x):
        def move(x, source, target, name):
            received.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
            return x

        return split.cut.apply(params, x, move)

    jax.eval_shape(shapes, params, examples["x"])

    def own(params, arrived, examples):
        place, sent = iter(arrived), []

        def move(x, source, target, name):
            there = next(place)
            sent.extend([x] * (source == party))
            return there

        out = split.cut.apply(params, examples["x"], move)
        if training and split.decorrelation and party == 0:
            smashed = jnp.concatenate([x.reshape(x.shape[0], -1) for x in sent], axis=1)
            sent.append(distance_correlation(examples["x"], smashed))
        if split.cut.last != party:
            return sent
        if not training:
            return [*sent, out]
        values = split.loss(out, examples["y"])
        return [*sent, (values["loss"] if isinstance(values, dict) else values).mean()]

    def both(params, arrived, examples, gradients):
        sent, pull = jax.vjp(lambda p, a: own(p, a, examples), params, arrived)
        back, inner = pull(gradients)
        return sent, [x for x in jax.tree.leaves((back, inner)) if x.dtype != jax.dtypes.float0]

    given = (params, received, examples)
    if not training:
        return engine.flops(jax.make_jaxpr(own)(*given))
    return engine.flops(jax.make_jaxpr(both)(*given, jax.eval_shape(own, *given)))
