"""What clients do to their messages, and rounds of them replayed as a server holds them."""

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
from fedjax_sim.types import Aggregator, Algorithm, Array, Population, PyTree, UpdateTransform

__all__ = [
    "HIDDEN",
    "LEARNING_RATE",
    "NUM_SHOWN",
    "SIDE",
    "Defence",
    "Digits",
    "Seen",
    "allowed_advantage",
    "defences",
    "multiplier",
    "replayed",
]

LEARNING_RATE, HIDDEN, NUM_SHOWN, SIDE = 0.1, 32, 8, 8
SUM_BITS, SUM_RANGE = 16, 1.0  # of the integers that a secure sum adds


def _messages(key: Array, algorithm: Algorithm, state: PyTree, people: Population) -> View:
    return adversary.each_message(jax.jit(partial(observe, algorithm))(key, state, people))


def _masked(key: Array, algorithm: Algorithm, state: PyTree, people: Population) -> View:
    seen = jax.jit(partial(observe, algorithm))(key, state, people)
    return adversary.masked_messages(seen, SUM_RANGE / (2 ** (SUM_BITS - 1) - 1))


def _released(key: Array, algorithm: Algorithm, state: PyTree, people: Population) -> View:
    after, _ = jax.jit(algorithm.step)(key, state, people)
    return adversary.released_model(algorithm.params(state), algorithm.params(after))


@dataclasses.dataclass(frozen=True)
class Defence:
    """A point of the study."""

    part: str
    name: str
    transform: UpdateTransform = dataclasses.field(default_factory=transform.identity)
    batch_size: int = 1
    num_steps: int = 1
    view: Callable = _messages  # (key, algorithm, state, population) -> View: what the attacker holds
    summed: Aggregator | None = None  # None divides by the number of clients
    epsilon: float | None = None  # of one message, or of the sum, for a replaced client
    allowed: float | None = None  # the advantage that noise allows whoever holds this view
    exact: bool = False  # one example's input comes out up to rounding
    label_chance: float | None = None  # that a recovered label is right, where theory knows it
    blind: bool = False  # nothing of the data is in the view


@dataclasses.dataclass(frozen=True)
class Digits:
    """The digits, the model that clients train, and the attacker's own examples."""

    x: np.ndarray  # [rows, 64] in [0, 1]
    y: np.ndarray
    own: Mapping[str, np.ndarray]  # of the attacker
    shown: np.ndarray  # [8] rows, one of each of eight digits
    params: PyTree
    loss_fn: Callable

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Rows of scikit-learn's digits and an untrained MLP with 32 hidden units."""
        data = population.digits(num_clients=1, held_out_clients=0, seed=seed)
        rows = cast(population.Indexed, data.train).table
        x, y = np.asarray(rows["x"]), np.asarray(rows["y"])
        model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(HIDDEN,))
        loss_fn = models.supervised(model, models.softmax_cross_entropy)
        shown = np.array([np.flatnonzero(y == label)[0] for label in range(NUM_SHOWN)])
        return cls(x, y, data.test, shown, model.init(jax.random.key(seed))[0], loss_fn)

    def dealt(self, num_clients: int, batch_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(rows of each client [m, B], a row [m] that it does not hold); the shown ones go to the first clients."""
        rng = np.random.default_rng([seed, batch_size])
        pool = np.setdiff1d(np.arange(len(self.x)), self.shown)
        drawn = np.stack([rng.permutation(pool)[: batch_size + 1] for _ in range(num_clients)])
        mine, others = np.ascontiguousarray(drawn[:, :-1]), drawn[:, -1]
        mine.reshape(-1)[:NUM_SHOWN] = self.shown
        return mine, others


@dataclasses.dataclass(frozen=True)
class Seen:
    """A round as the attacker holds it, and, to judge the attack, what was true."""

    view: View
    mine: np.ndarray  # [m, B] rows of the clients, in the order of the view's messages
    others: np.ndarray  # [m]


def replayed(defence: Defence, digits: Digits, num_clients: int, seed: int) -> Seen:
    """One round in which everybody takes part, as whoever holds the defence's view sees it."""
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
    order = ids if len(ids) == num_clients else np.arange(num_clients)
    return Seen(view, mine[order], others[order])


def defences(options: Mapping[str, Any]) -> Iterator[Defence]:
    """The points of the study, in the order in which they are shown."""
    clip_norm, m = options["clip_norm"], options["num_clients"]
    for size in options["batch_sizes"]:
        chance = 1.0 if size == 1 else None
        yield Defence("batch size", f"batch of {size}", batch_size=size, exact=size == 1, label_chance=chance)
    yield Defence("defence", "batch of 8, 5 local steps", batch_size=8, num_steps=5)
    yield Defence("defence", f"clipping to {clip_norm:g}", transform.clip(clip_norm), exact=True, label_chance=1.0)
    for bits in options["bits"]:
        yield Defence("defence", f"quantisation, {bits} bits", transform.quantize(bits))
    for share in options["shares"]:
        yield Defence("defence", f"top-k, {100 * share:g} %", transform.top_k(share))
    noise = [(epsilon, multiplier(epsilon, options)) for epsilon in options["epsilons"]]
    epsilon, strongest = noise[0]
    central = transform.gaussian_mechanism(clip_norm, strongest)
    shares = transform.distributed_gaussian(clip_norm, strongest, m)
    yield Defence("defence", f"central noise, epsilon {epsilon:g}: the server", central, exact=True, label_chance=1.0)
    yield Defence("defence", f"shares of noise, epsilon {epsilon:g} of the sum", shares)
    for each, z in reversed(noise):
        yield Defence("local noise", f"local noise, epsilon {each:g}", transform.local_gaussian(clip_norm, z),
                      epsilon=each, allowed=allowed_advantage(z))  # fmt: skip
    yield Defence("defence", f"central noise, epsilon {epsilon:g}: the released model", central, view=_released,
                  epsilon=epsilon, allowed=allowed_advantage(strongest))  # fmt: skip
    integers, half = transform.quantize(SUM_BITS, range=SUM_RANGE, integers=True), min(20, (m - 1) // 2 * 2) // 2
    added = aggregation.secure_sum(aggregation.modular_sum(m), half + 1, neighbours=2 * half)
    yield Defence("defence", "secure sum: a masked message", integers, view=_masked, summed=added, label_chance=0.1,
                  blind=True)  # fmt: skip
    yield Defence("defence", f"secure sum: the sum of {m:,}", integers, view=_released, summed=added)


def multiplier(epsilon: float, options: Mapping[str, Any]) -> float:
    """z of local noise, in clip norms, that hides which of all messages was sent."""
    sizes = {"population_size": options["num_clients"], "cohort_size": options["num_clients"]}
    found = privacy.calibrate(epsilon, options["delta"], 1, **sizes, scheme="full", place="local")
    return found.noise_multiplier


def allowed_advantage(z: float) -> float:
    """The most that an attack on noise of z clip norms may gain: a replaced client moves its message by up to two."""
    return privacy.gaussian_claim(z / 2).advantage
