"""Reconstruction by optimisation: a search for examples with which a client would send the message (DLG).

As in `inversion`, attacks take a `View`. The attack simulates a client itself, with its local steps unrolled.
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


class Rebuilt(NamedTuple):
    """A `Rebuilt` is the result of a reconstruction: for each message, the restart with the lowest objective."""

    guess: PyTree  # leaves [m, ...], the rebuilt examples
    objective: Array  # [m], with the regulariser; infinite if every restart diverged


@validate.named_arguments
def local_steps(
    loss_fn: Callable, learning_rate: Positive, *, num_steps: Steps = 1, batch_size: PositiveInt | None = None
) -> Callable:
    """Simulates the update of a client of plain SGD, by local steps unrolled from the broadcast model.

    The server has set the clients' options, so an attacker knows them.

    Args:
      loss_fn: (params, examples, key) -> losses [n], or a dict that holds "loss" [n].
      learning_rate: of the clients' steps.
      num_steps: of the clients' local work.
      batch_size: of the clients' steps; None = all examples at each step. Batches are taken in the order of the guess,
        since an attacker does not know the clients' order.

    Returns: predict(broadcast, guess, known) -> update, where the examples are `guess | known`, dicts of leaves
    [n, ...].

    Guarantees: the update is that of `client.local_sgd` without shuffling, up to rounding
    (tests/adversary/test_inversion.py::test_simulated_client).

    References: Dimitrov et al. 2022, section 3.
    """
    validate.loss_function(loss_fn)
    optimizer = optax.sgd(learning_rate)

    def predict(broadcast: PyTree, guess: PyTree, known: PyTree) -> PyTree:
        examples = guess | known
        n = jax.tree.leaves(examples)[0].shape[0]
        size = n if batch_size is None else min(batch_size, n)
        num_batches = -(-n // size)

        def mean_loss(params, batch):
            return per_example(loss_fn(params, batch, None))["loss"].mean()

        params = broadcast
        state = optimizer.init(broadcast)
        for step in range(num_steps):
            first = step % num_batches * size
            batch = jax.tree.map(lambda x, first=first: x[first : first + size], examples)
            updates, state = optimizer.update(jax.grad(mean_loss)(params, batch), state, params)
            params = optax.apply_updates(params, updates)
        return jax.tree.map(jnp.subtract, params, broadcast)

    return predict


def squared_distance(predicted: PyTree, message: PyTree) -> Array:
    """Computes |predicted - message|^2 (Zhu, Liu and Han 2019, equation 4)."""
    squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), predicted, message)
    return jnp.asarray(sum(jax.tree.leaves(squares)))


def cosine_distance(predicted: PyTree, message: PyTree) -> Array:
    """Computes 1 - cos(predicted, message) (Geiping et al. 2020, equation 4).

    It does not depend on lengths, so a clip of the message has no effect.
    """
    product = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, predicted, message)))
    squares = (sum(jnp.sum(x**2) for x in jax.tree.leaves(update)) for update in (predicted, message))
    return 1 - product / jnp.sqrt(jnp.maximum(math.prod(squares), 1e-30))


@validate.named_arguments
def total_variation(weight: NonNegative, shape: Sequence[int] | None = None, *, of: str = "x") -> Callable:
    """Makes a regulariser: weight x the mean difference of neighbouring pixels (Geiping et al. 2020, equation 4).

    Args:
      weight: >= 0.
      shape: (height, width), or (height, width, channels), of images that are stored flat; None = images have this
        shape.
      of: the name of the images [n, height, width, ...] in the guess.

    Returns: (guess) -> [].
    """

    def regularizer(guess):
        x = guess[of] if shape is None else guess[of].reshape(-1, *shape)
        return weight * sum(jnp.abs(jnp.diff(x, axis=axis)).mean() for axis in (1, 2))

    return regularizer


@validate.named_arguments
def squared_norm(weight: NonNegative, *, of: str = "x") -> Callable:
    """Makes a regulariser: weight x the mean square of the guess.

    Args:
      weight: >= 0.
      of: the name of the array in the guess.

    Returns: (guess) -> [].
    """
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
    """Rebuilds the examples behind each message, by gradient descent on the distance from the message.

    The descent for all messages and restarts is one compiled program.

    Args:
      key: random key; restarts begin at guesses drawn from it.
      view: what the attacker holds.
      predict: (broadcast, guess, known) -> the message of a client with these examples; see `local_steps`.
      start: (key) -> a first guess, a dict of float arrays [n, ...]. Labels that are not known may be guessed too, as
        logits that the loss accepts (Zhu, Liu and Han 2019).
      known: leaves [m, ...], what the attacker knows of each message's examples, such as {"y": labels [m, n]}; None =
        nothing.
      objective: (predicted, message) -> [] distance: `squared_distance` or `cosine_distance`.
      regularizer: (guess) -> []: `total_variation` or `squared_norm`; None = no regulariser.
      num_steps: of the descent.
      optimizer: of the descent; None = `optax.adam(0.1)`.
      num_restarts: for each message, all under one vmap.

    Returns: a `Rebuilt`; the order of examples within a message has no meaning.

    Guarantees:
      - on a linear model with a sigmoid the squared error is below 1e-6, and the objective is zero at the true examples
        (tests/adversary/test_inversion.py::test_optimisation)
      - the restart with the lowest objective is returned (::test_best_restart)
      - the attack works through several local steps (::test_unrolled_steps)

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
    descent = _Descent(
        predict=predict,
        start=start,
        objective=objective,
        regularizer=regularizer,
        num_steps=num_steps,
        optimizer=optimizer,
        num_restarts=num_restarts,
    )
    return _descend(key, view, known, descent)


class _Descent(NamedTuple):
    """The functions and options of a descent; static, so their values must be hashable."""

    predict: Callable  # (broadcast, guess, known) -> message
    start: Callable  # (key) -> a first guess
    objective: Callable  # (predicted, message) -> [] distance
    regularizer: Callable | None  # (guess) -> []; None = no regulariser
    num_steps: int
    optimizer: optax.GradientTransformation
    num_restarts: int  # for each message


@partial(jax.jit, static_argnums=3)
def _descend(key: Array, view: View, known: PyTree, descent: _Descent) -> Rebuilt:
    """Does the work of `invert_by_optimization` after its checks, compiled once for each set of functions and options.

    With x the guess, k what is known, g the message and w the broadcast, the descent is on
    objective(predict(w, x, k), g) + regularizer(x), once for each message and restart.

    Args:
      key: of all restarts.
      view: what the attacker holds, m messages.
      known: leaves [m, ...], or {}.
      descent: the functions and options.

    Returns: leaves [m, ...], for each message the restart with the lowest final objective.
    """
    predict, start, objective, regularizer, num_steps, optimizer, num_restarts = descent

    def descend_once(key, message, known):
        def total_objective(guess):
            distance = objective(predict(view.broadcast, guess, known), message)
            return distance if regularizer is None else distance + regularizer(guess)

        def step(_, carry):
            guess, state = carry
            updates, state = optimizer.update(jax.grad(total_objective)(guess), state, guess)
            return optax.apply_updates(guess, updates), state

        guess = start(key)
        guess, _ = jax.lax.fori_loop(0, num_steps, step, (guess, optimizer.init(guess)))
        final_objective = total_objective(guess)
        return guess, jnp.where(jnp.isfinite(final_objective), final_objective, jnp.inf)

    def best_of_restarts(key, message, known):
        restart_keys = jax.random.split(key, num_restarts)
        guesses, objectives = jax.vmap(descend_once, (0, None, None))(restart_keys, message, known)
        best = objectives.argmin()
        return Rebuilt(jax.tree.map(lambda x: x[best], guesses), objectives[best])

    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(view.weights.shape[0]))
    return jax.vmap(best_of_restarts)(keys, view.messages, known)
