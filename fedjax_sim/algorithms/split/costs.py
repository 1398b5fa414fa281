"""The costs of split learning: operations by party, bytes, time and utilisation of a step.

Everything is counted from the traced program and the links; nothing is run. Parties work one after the other. So a step
of split learning takes the sum of their times and of the messages between them. In federated learning m clients work at
once, and take as long as the slowest of them.
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


class StepTime(NamedTuple):
    """The time of one training step or one request, in seconds."""

    seconds: float  # from the first layer to the last message
    busy: tuple[float, ...]  # the part of it in which each party computes
    on_the_way: float  # the part of it in which messages are under way

    @property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the time in which each party computes; in the other part it waits."""
        return tuple(seconds / self.seconds if self.seconds > 0 else 1.0 for seconds in self.busy)


class SplitCosts(NamedTuple):
    """The costs of a batch."""

    batch_size: int
    num_values: tuple[int, ...]  # number of parameters that each party holds
    training_flops: tuple[int, ...]  # operations of a training step, by party: forward, loss and backward
    inference_flops: tuple[int, ...]  # operations of the outputs alone, by party
    crossed: tuple[Crossing, ...]  # bits for one example; all examples of a batch cross in one message
    output_bits: int  # of an example's output, on its way back to party 0; 0 where party 0 computes it

    def messages(self, *, training: bool = True) -> tuple[tuple[int, int, int], ...]:
        """Returns (source, target, bits) of every message of a training step or of a request.

        Labels come first, then activations forward, then gradients backward.
        """
        n = self.batch_size
        forward = [(x.source, x.target, n * x.there + x.batch) for x in self.crossed if x.kind != "labels"]
        if not training:
            last_party = forward[-1][1]
            outputs = [(last_party, 0, n * self.output_bits)] if self.output_bits else []
            return (*forward, *outputs)
        labels = [(x.source, x.target, n * x.there + x.batch) for x in self.crossed if x.kind == "labels"]
        backward = [(x.target, x.source, n * x.back + x.batch) for x in self.crossed if x.back]
        return (*labels, *forward, *reversed(backward))

    def time(
        self, speeds: Sequence[float], *, bandwidth: float, latency: float = 0.0, training: bool = True
    ) -> StepTime:
        """The time of a training step, or of a request.

        Args:
          speeds: flops/s of each party, > 0.
          bandwidth: bytes/s of every link, > 0.
          latency: seconds of every message, >= 0. Labels go with the activations, and cost no latency of their own.
          training: True for a training step, False for a request.

        Raises: ValueError for another number of speeds than of parties, and for numbers out of range.

        Guarantees: with one client and a server, the client is busy t_c / (t_c + t_s + 2 latency) of the time; m equal
        clients in a relay take m times as long as one, where those of a federation take as long as one
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
        messages = self.messages(training=training)
        # Labels go with the activations, in one message.
        num_with_latency = len(messages) - sum(x.kind == "labels" for x in self.crossed if training)
        on_the_way = sum(bits / 8 for *_, bits in messages) / bandwidth + num_with_latency * latency
        return StepTime(sum(busy) + on_the_way, busy, on_the_way)


def split_costs(split: Split, params: PyTree, examples: PyTree) -> SplitCosts:
    """Counts the costs of a step on a batch.

    Args:
      split: of `split_loss`.
      params: of the whole model; arrays or specs.
      examples: a batch {"x": [n, ...], "y": [n, ...]}; arrays or specs.

    Returns: `SplitCosts`. Operations are those of each party's own program, which takes what the party has and receives
    and returns what it sends. They include the distance correlation of `decorrelation`, but not the transforms of links
    and the steps of optimisers.

    Guarantees: operations are those counted by hand for a toy model
    (tests/algorithms/split/test_costs.py::test_operations_by_hand), and for distance correlations
    (::test_no_peek_is_not_for_nothing); bytes are those that a round counts
    (tests/algorithms/split/test_client.py::test_bytes_are_those_of_the_arrays).

    References: Vepakomma et al. 2018, table 1, counts operations at the client as well.

    >>> from fedjax_sim import models
    >>> from fedjax_sim.algorithms import split_loss
    >>> toy = models.mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))
    >>> batch = {"x": jax.numpy.ones((32, 10)), "y": jax.numpy.ones(32)}
    >>> costs = split_costs(split_loss(toy, models.squared_error, "hidden_0"), toy.init(jax.random.key(0))[0], batch)
    >>> costs.num_values, [bits // 32 for *_, bits in costs.messages()]
    ((220, 331), [32, 640, 640])
    """
    validate.part("split", split, Split)
    n = jax.tree.leaves(examples)[0].shape[0]
    params = jax.eval_shape(lambda x: x, params)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), examples)
    parties = range(split.cut.num_parties)
    training, inference = (
        tuple(_flops(split, party, params, examples, train) for party in parties) for train in (True, False)
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), examples)
    outputs = jax.eval_shape(lambda p, x: split.cut.model.apply(p, (), x, None, False)[0], params, batch["x"])
    output_bits = 0 if split.cut.last == 0 else 8 * tree.num_bytes(outputs) // n
    num_values = tuple(tree.num_values(part) for part in split.cut.split(params))
    return SplitCosts(
        batch_size=n,
        num_values=num_values,
        training_flops=training,
        inference_flops=inference,
        crossed=crossings(split, params, example),
        output_bits=output_bits,
    )


def _flops(split: Split, party: int, params: PyTree, examples: PyTree, training: bool) -> int:
    """Returns the operations of one party.

    They are counted in a program whose arguments are all activations that cross, and whose results are those that the
    party sends. What other parties compute has no effect on these results, so it is not in the program.

    Args:
      split: the loss.
      party: in [0, P).
      params: of the whole model; arrays or specs.
      examples: a batch {"x": [n, ...], "y": [n, ...]}; arrays or specs.
      training: True: forward, loss and backward of the batch. False: the outputs alone.
    """
    received: list = []

    def shapes(params, x):
        def move(x, source, target, name):
            received.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
            return x

        return split.cut.apply(params, x, move)

    jax.eval_shape(shapes, params, examples["x"])  # fills `received`; nothing is computed

    def forward(params, arrived, examples):
        arrivals = iter(arrived)
        sent = []

        def move(x, source, target, name):
            arrival = next(arrivals)
            sent.extend([x] * (source == party))
            return arrival

        outputs = split.cut.apply(params, examples["x"], move)
        if training and split.decorrelation and party == 0:
            smashed = jnp.concatenate([x.reshape(x.shape[0], -1) for x in sent], axis=1)
            sent.append(distance_correlation(examples["x"], smashed))
        if split.cut.last != party:
            return sent
        if not training:
            return [*sent, outputs]
        values = split.loss(outputs, examples["y"])
        return [*sent, (values["loss"] if isinstance(values, dict) else values).mean()]

    def forward_and_backward(params, arrived, examples, gradients):
        sent, pull_back = jax.vjp(lambda p, a: forward(p, a, examples), params, arrived)
        params_gradient, arrived_gradients = pull_back(gradients)
        leaves = jax.tree.leaves((params_gradient, arrived_gradients))
        # Integers, such as token ids, have gradients of the dtype float0, which no program returns.
        return sent, [x for x in leaves if x.dtype != jax.dtypes.float0]

    arguments = (params, received, examples)
    if not training:
        return engine.flops(jax.make_jaxpr(forward)(*arguments))
    return engine.flops(jax.make_jaxpr(forward_and_backward)(*arguments, jax.eval_shape(forward, *arguments)))
