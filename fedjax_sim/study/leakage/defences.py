"""This module defines the defences of clients, and replays a round to get the attacker's view under each defence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import jax
import numpy as np
import optax

from fedjax_sim import adversary, aggregation, client, models, population, privacy, sampling, server, transform
from fedjax_sim.adversary import View
from fedjax_sim.algorithms import federated
from fedjax_sim.prng import stream
from fedjax_sim.round.round import observe
from fedjax_sim.running import kept_results
from fedjax_sim.types import Aggregator, Algorithm, Array, Population, PyTree, UpdateTransform

LEARNING_RATE = 0.1
HIDDEN = 32  # units of the MLP
NUM_SHOWN = 8  # digits in the figure
SIDE = 8  # pixels of a digit's side
# Bits and range of the integers that a secure sum adds.
SUM_BITS = 16
SUM_RANGE = 1.0


def _messages(key: Array, algorithm: Algorithm, state: PyTree, people: Population) -> View:
    """Returns the view of a server that reads every message."""
    return adversary.each_message(kept_results.call(jax.jit(partial(observe, algorithm)), key, state, people))


def _masked(key: Array, algorithm: Algorithm, state: PyTree, people: Population) -> View:
    """Returns the view of a server that sees messages under the masks of a secure sum."""
    observed = kept_results.call(jax.jit(partial(observe, algorithm)), key, state, people)
    integer_step = SUM_RANGE / (2 ** (SUM_BITS - 1) - 1)
    return adversary.masked_messages(observed, integer_step)


def _released(key: Array, algorithm: Algorithm, state: PyTree, people: Population) -> View:
    """Returns the view of somebody who sees the model before and after the round."""
    after, _ = kept_results.call(jax.jit(algorithm.step), key, state, people)
    return adversary.released_model(algorithm.params(state), algorithm.params(after))


@dataclasses.dataclass(frozen=True)
class Defence:
    """A point of the study: local training, what is done to messages, and what the attacker sees of them.

    Fields:
      part: the part of the study.
      name: the name in tables and figures.
      transform: what each client does to its update.
      batch_size: B examples of each client.
      num_steps: local steps.
      view: (key, algorithm, state, population) -> View, what the attacker holds.
      summed: the aggregator; None divides the sum by the number of clients.
      epsilon: the epsilon of a message, or of the sum, for a replaced client; None without noise.
      allowed: the largest advantage that the noise allows to an attacker with this view.
      exact: says whether the input of a single example can be rebuilt up to rounding.
      label_chance: the probability that a recovered label is right, where theory gives it.
      blind: says whether the view holds no information on the data.
    """

    part: str
    name: str
    transform: UpdateTransform = dataclasses.field(default_factory=transform.identity)
    batch_size: int = 1
    num_steps: int = 1
    view: Callable = _messages
    summed: Aggregator | None = None
    epsilon: float | None = None
    allowed: float | None = None
    exact: bool = False
    label_chance: float | None = None
    blind: bool = False


@dataclasses.dataclass(frozen=True)
class Digits:
    """The digits, the model that clients train, and the attacker's own examples.

    Fields:
      x: [rows, 64] pixels in [0, 1].
      y: [rows] labels.
      own: examples that the attacker has for itself, "x" and "y".
      shown: [8] rows of the digits in the figure, with the labels 0 to 7.
      params: the untrained model.
      loss_fn: the training loss.
    """

    x: np.ndarray
    y: np.ndarray
    own: Mapping[str, np.ndarray]
    shown: np.ndarray
    params: PyTree
    loss_fn: Callable

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Loads scikit-learn's digits and makes an untrained MLP with 32 hidden units.

        Args:
          seed: decides the model and which examples the attacker has.
        """
        data = population.digits(num_clients=1, held_out_clients=0, seed=seed)
        rows = cast(population.Indexed, data.train).table
        x, y = np.asarray(rows["x"]), np.asarray(rows["y"])
        model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(HIDDEN,))
        loss_fn = models.supervised(model, models.softmax_cross_entropy)
        shown = np.array([np.flatnonzero(y == label)[0] for label in range(NUM_SHOWN)])
        return cls(x=x, y=y, own=data.test, shown=shown, params=model.init(jax.random.key(seed))[0], loss_fn=loss_fn)

    def dealt(self, num_clients: int, batch_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Deals rows of the digits to clients; the digits of the figure go to the first clients.

        Args:
          num_clients: m.
          batch_size: B.
          seed: decides who holds which rows.

        Returns: (rows of each client [m, B], a row for each client that it does not hold [m]).
        """
        rng = np.random.default_rng([seed, batch_size])
        pool = np.setdiff1d(np.arange(len(self.x)), self.shown)
        drawn = np.stack([rng.permutation(pool)[: batch_size + 1] for _ in range(num_clients)])
        mine = np.ascontiguousarray(drawn[:, :-1])  # a copy, so that the reshape below is a view to write through
        others = drawn[:, -1]
        mine.reshape(-1)[:NUM_SHOWN] = self.shown
        return mine, others


@dataclasses.dataclass(frozen=True)
class Seen:
    """A round as the attacker sees it, and the truth by which attacks are judged.

    Fields:
      view: what the attacker holds.
      mine: [m, B] the rows of each client, in the order of the view's messages.
      others: [m] for each client a row that it does not hold, in the same order.
    """

    view: View
    mine: np.ndarray
    others: np.ndarray


def replayed(defence: Defence, digits: Digits, num_clients: int, seed: int) -> Seen:
    """Replays one round in which everybody takes part, and returns the view of the defence's attacker.

    Args:
      defence: what clients do to their messages, and what the attacker sees.
      digits: examples and model.
      num_clients: m.
      seed: decides the clients' data and all random numbers of the round.
    """
    mine, others = digits.dealt(num_clients, defence.batch_size, seed)
    offsets = np.arange(num_clients + 1) * defence.batch_size
    people = population.indexed({"x": digits.x, "y": digits.y}, population.Partition(mine.reshape(-1), offsets))
    local = client.work(num_steps=defence.num_steps, weighting="uniform")
    algorithm = federated(
        sampling.full(num_clients),
        client.local_sgd(digits.loss_fn, optax.sgd(LEARNING_RATE), local),
        defence.summed or aggregation.fixed_mean(num_clients),
        server.optimizer(optax.sgd(1.0)),
        transform=defence.transform,
        mesh=None,
    )
    key = jax.random.key(seed)
    state = algorithm.init(key, digits.params, people)
    view = defence.view(stream(key, defence.name), algorithm, state, people)
    ids = np.asarray(view.ids)
    # A view of the sum or of the model has a single entry, and no order of clients.
    order = ids if len(ids) == num_clients else np.arange(num_clients)
    return Seen(view, mine[order], others[order])


def defences(options: Mapping[str, Any]) -> Iterator[Defence]:
    """Makes the points of the study, in the order of the figure.

    Args:
      options: the study's options.

    Yields: a point for each batch size and each defence.
    """
    clip_norm = options["clip_norm"]
    m = options["num_clients"]
    for size in options["batch_sizes"]:
        chance = 1.0 if size == 1 else None
        yield Defence("batch size", f"batch of {size}", batch_size=size, exact=size == 1, label_chance=chance)
    yield Defence("defence", "batch of 8, 5 local steps", batch_size=8, num_steps=5)
    yield Defence("defence", f"clipping to {clip_norm:g}", transform.clip(clip_norm), exact=True, label_chance=1.0)
    for bits in options["bits"]:
        yield Defence("defence", f"quantisation, {bits} bits", transform.quantize(bits))
    for share in options["shares"]:
        yield Defence("defence", f"top-k, {100 * share:g} %", transform.top_k(share))
    multipliers = [(epsilon, multiplier(epsilon, options)) for epsilon in options["epsilons"]]
    # The smallest epsilon, with the most noise, is the one of central noise.
    smallest_epsilon, strongest = multipliers[0]
    central_noise = transform.gaussian_mechanism(clip_norm, strongest)
    noise_shares = transform.distributed_gaussian(clip_norm, strongest, m)
    # Central noise is added after the server has read the messages, so the server sees digits exactly.
    yield Defence("defence", f"central noise, epsilon {smallest_epsilon:g}: the server", central_noise, exact=True,
                  label_chance=1.0)  # fmt: skip
    yield Defence("defence", f"shares of noise, epsilon {smallest_epsilon:g} of the sum", noise_shares)
    for epsilon, z in reversed(multipliers):
        yield Defence("local noise", f"local noise, epsilon {epsilon:g}", transform.local_gaussian(clip_norm, z),
                      epsilon=epsilon, allowed=allowed_advantage(z))  # fmt: skip
    yield Defence("defence", f"central noise, epsilon {smallest_epsilon:g}: the released model", central_noise,
                  view=_released, epsilon=smallest_epsilon, allowed=allowed_advantage(strongest))  # fmt: skip
    integers = transform.quantize(SUM_BITS, range=SUM_RANGE, integers=True)
    # Each client shares masks with an even number of neighbours, 20 where there are so many.
    half_of_neighbours = min(20, (m - 1) // 2 * 2) // 2
    secure_sum = aggregation.secure_sum(
        aggregation.modular_sum(m), half_of_neighbours + 1, neighbours=2 * half_of_neighbours
    )
    # A masked message is uniform, so a guessed label is one of ten.
    yield Defence("defence", "secure sum: a masked message", integers, view=_masked, summed=secure_sum,
                  label_chance=0.1, blind=True)  # fmt: skip
    yield Defence("defence", f"secure sum: the sum of {m:,}", integers, view=_released, summed=secure_sum)


def multiplier(epsilon: float, options: Mapping[str, Any]) -> float:
    """Returns the noise multiplier z with which one message is (epsilon, delta)-private under local noise.

    Args:
      epsilon: the epsilon under which a client's data are replaced.
      options: the study's options; `delta` and `num_clients` are used.
    """
    sizes = {"population_size": options["num_clients"], "cohort_size": options["num_clients"]}
    calibration = privacy.calibrate(epsilon, options["delta"], 1, **sizes, scheme="full", place="local")
    return calibration.noise_multiplier


def allowed_advantage(z: float) -> float:
    """Returns the largest advantage of any attack on a message with noise of standard deviation z clip norms.

    Args:
      z: the noise multiplier.
    """
    # A replaced client moves its message by up to two clip norms.
    return privacy.gaussian_claim(z / 2).advantage
