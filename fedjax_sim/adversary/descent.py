"""Examples rebuilt by optimisation: those whose simulated client would have sent the message (DLG and its successors).

As in `inversion`, attacks take a `View`. A client is simulated by the attack itself, its local steps unrolled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import validate
from fedjax_sim.adversary.curious import View
from fedjax_sim.models import per_example
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import NonNegative, Positive, PositiveInt, Steps

__all__ = [
    "Rebuilt",
    "cosine_distance",
    "invert_by_optimization",
    "local_steps",
    "squared_distance",
    "squared_norm",
    "total_variation",
]


class Rebuilt(NamedTuple):
    """What an optimisation found: for each message, the restart with the lowest objective."""

    guess: PyTree  # leaves [m, ...]
    objective: Array  # [m], the regulariser included; infinite where every restart diverged


@validate.named_arguments
def local_steps(
    loss_fn: Callable, learning_rate: Positive, *, num_steps: Steps = 1, batch_size: PositiveInt | None = None
) -> Callable:
    """What a client of plain SGD sends, as an attacker simulates it: local steps unrolled from the broadcast model.

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict that holds "loss" [n].
      learning_rate, num_steps, batch_size: of the clients' local work, which the server has set. Batches follow one
        another in the order of the guess (None: all examples at each step): nobody knows the clients' own order.

    Returns: predict(broadcast, guess, known) -> update; the examples are `guess | known`, dicts of leaves [n, ...].

    Guarantees: the update of `client.local_sgd` (tests/adversary/test_inversion.py::test_simulated_client).

    References: Dimitrov et al. 2022, section 3.
    """
    validate.loss_function(loss_fn)
    optimizer = optax.sgd(learning_rate)

    def predict(broadcast: PyTree, guess: PyTree, known: PyTree) -> PyTree:
        examples = guess | known
        n = jax.tree.leaves(examples)[0].shape[0]
        size = n if batch_size is None else min(batch_size, n)
        batches = -(-n // size)

        def mean_loss(params, batch):
            return per_example(loss_fn(params, batch, None))["loss"].mean()

        params, state = broadcast, optimizer.init(broadcast)
        for step in range(num_steps):
            low = step % batches * size
            batch = jax.tree.map(lambda x, low=low: x[low : low + size], examples)
            updates, state = optimizer.update(jax.grad(mean_loss)(params, batch), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(jnp.subtract, params, broadcast)

    return predict


def squared_distance(predicted: PyTree, message: PyTree) -> Array:
    """|predicted - message|^2 (Zhu, Liu and Han 2019, equation 4)."""
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), predicted, message)))


def cosine_distance(predicted: PyTree, message: PyTree) -> Array:
    """1 - cos(predicted, message), which does not see lengths, so neither clips (Geiping et al. 2020, equation 4)."""
    product = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, predicted, message)))
    squares = (sum(jnp.sum(x**2) for x in jax.tree.leaves(one)) for one in (predicted, message))
    return 1 - product / jnp.sqrt(jnp.maximum(math.prod(squares), 1e-30))


@validate.named_arguments
def total_variation(weight: NonNegative, shape: Sequence[int] | None = None, *, of: str = "x") -> Callable:
    """A regulariser: weight x the mean difference of neighbouring pixels (Geiping et al. 2020, equation 4).

    Args:
      weight: >= 0.
      shape: (height, width), or with channels, of images that are stored flat.
      of: the name of the images [n, height, width, ...] in the guess.
    """

    def regularizer(guess):
        x = guess[of] if shape is None else guess[of].reshape(-1, *shape)
        return weight * sum(jnp.abs(jnp.diff(x, axis=axis)).mean() for axis in (1, 2))

    return regularizer


@validate.named_arguments
def squared_norm(weight: NonNegative, *, of: str = "x") -> Callable:
    """A regulariser: weight x the mean square of the guess."""
    return lambda guess: weight * jnp.mean(guess[of] ** 2)


@validate.named_arguments
def invert_by_optimization(
    key: Array,
    view: View,
    predict: Callable,
    start: Callable,
    known: PyTree | None = None,
    *,
    objective: Callable = squared_distance,
    regularizer: Callable | None = None,
    num_steps: PositiveInt = 1000,
    optimizer: optax.GradientTransformation | None = None,
    num_restarts: PositiveInt = 4,
) -> Rebuilt:
    """Examples that would have made each message: gradient descent on the distance from it, one compiled program.

    Args:
      key: decides where restarts begin.
      view: what the attacker holds.
      predict: (broadcast, guess, known) -> the message of a client with these examples; see `local_steps`.
      start: (key) -> a first guess, a dict of float arrays [n, ...]. Labels that nobody recovered may be guessed too,
        as logits that the loss understands (Zhu, Liu and Han 2019).
      known: leaves [m, ...] of what the attacker knows of each message's examples, such as {"y": labels [m, n]}.
      objective: (predicted, message) -> [] distance: `squared_distance`, `cosine_distance`.
      regularizer: (guess) -> []: `total_variation`, `squared_norm`; None for none.
      num_steps: of descent. optimizer: `optax.adam(0.1)` by default.
      num_restarts: for each message, all under one vmap.

    Returns: `Rebuilt`; the order of examples within a message means nothing.

    Guarantees: squared error below 1e-6 on a linear model with a sigmoid, and zero objective at the truth
    (tests/adversary/test_inversion.py::test_optimisation); the best of its restarts
    (::test_best_restart); through several local steps (::test_unrolled_steps).

    References: Zhu, Liu and Han 2019 (DLG), algorithm 1; Geiping et al. 2020, section 4.
    """
    validate.part("view", view, View)
    for name, value, arguments in (
        ("predict", predict, "broadcast, guess, known"),
        ("start", start, "key"),
        ("objective", objective, "predicted, message"),
        *([] if regularizer is None else [("regularizer", regularizer, "guess")]),
    ):
        validate.function(name, value, arguments)
    optimizer = optax.adam(0.1) if optimizer is None else optimizer
    validate.optax_transformation("optimizer", optimizer)
    known = {} if known is None else known
    return _descend(key, view, known, predict, start, objective, regularizer, num_steps, optimizer, num_restarts)


@partial(jax.jit, static_argnums=tuple(range(3, 10)))
def _descend(key, view, known, predict, start, objective, regularizer, num_steps, optimizer, num_restarts) -> Rebuilt:
    def one(key, message, known):
        def value(guess):
            found = objective(predict(view.broadcast, guess, known), message)
            return found if regularizer is None else found + regularizer(guess)

        def step(_, carry):
            guess, state = carry
            updates, state = optimizer.update(jax.grad(value)(guess), state, guess)
            return optax.apply_updates(guess, updates), state

        guess = start(key)
        guess, _ = jax.lax.fori_loop(0, num_steps, step, (guess, optimizer.init(guess)))
        found = value(guess)
        return guess, jnp.where(jnp.isfinite(found), found, jnp.inf)

    def best(key, message, known):
        guesses, values = jax.vmap(one, (0, None, None))(jax.random.split(key, num_restarts), message, known)
        at = values.argmin()
        return Rebuilt(jax.tree.map(lambda x: x[at], guesses), values[at])

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(view.weights.shape[0]))
    return jax.vmap(best)(keys, view.messages, known)
