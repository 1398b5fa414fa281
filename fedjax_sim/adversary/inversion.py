"""Examples and labels rebuilt from what clients send: in closed form behind an affine layer, or by optimisation.

Every attack takes a `View`, and nothing of the data. A message is an update, u = -(learning rate) x gradient after one
step of SGD, so its sign is minus the gradient's. Attacks return a row for each message; where nothing arrived
(weight 0) a row means nothing.
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

__all__ = [
    "Rebuilt",
    "affine_rows",
    "cosine_distance",
    "gradient_rank",
    "invert_affine",
    "invert_by_optimization",
    "local_steps",
    "recover_labels",
    "squared_distance",
    "squared_norm",
    "total_variation",
]


# ---- in closed form


def _layer(view: View, layer: str) -> tuple[Array, Array]:
    """(kernel [m, in, out], bias [m, out]) of an affine layer's part of the messages."""
    validate.part("view", view, View)
    found = view.messages
    for name in filter(None, layer.split(".")):
        if not isinstance(found, dict) or name not in found:
            validate.fail("layer", "the path of an affine layer", layer, f"There is {sorted(found)}.")
        found = found[name]
    if not (isinstance(found, dict) and {"kernel", "bias"} <= set(found) and found["kernel"].ndim == 3):
        hint = 'It holds a "kernel" [in, out] and a "bias" [out].'
        validate.fail("layer", "an affine layer that has a bias", layer, hint)
    return found["kernel"], found["bias"]


def affine_rows(view: View, layer: str = "") -> Array:
    """Every output's quotient (kernel's update) / (bias' update): the layer's inputs, mixed.

    With delta_ij the derivative of example i's loss at output j, output j gives sum_i delta_ij x_i / sum_i delta_ij,
    whatever the learning rate. That is x itself if one example was used, or where one alone reaches the output: behind
    a ReLU, some examples of a batch are often laid bare.

    Args:
      view: what the attacker holds.
      layer: path of the layer in the model's parameters, such as "hidden_0"; "" if the model is the layer.

    Returns: [m, out, in]; NaN where the bias did not move.

    Guarantees: the mixture of two examples (tests/adversary/test_inversion.py::test_mixtures).
    """
    kernel, bias = _layer(view, layer)
    moved = bias != 0
    rows = jnp.swapaxes(kernel, 1, 2) / jnp.where(moved, bias, 1)[..., None]
    return jnp.where(moved[..., None], rows, jnp.nan)


def invert_affine(view: View, layer: str = "") -> Array:
    """The input of an affine layer, from its part of each message: the row of `affine_rows` whose bias moved most.

    Exact, up to rounding, if a single example was used: at one step or at all local steps of SGD, whatever their number
    and rate, clipped or not, in a net of any depth behind the layer. Where more examples reach that output, in a batch
    or over local steps, the result is a mixture: different batches then send the same message, and no attack on this
    layer alone can tell them apart. After steps of Adam, say, an update is no gradient, and nothing is exact.

    Args:
      view, layer: as in `affine_rows`; for examples themselves, the model's first layer.

    Returns: [m, in]; NaN where no bias moved.

    Guarantees: exact to 1e-5 for one example, also after several local steps, and a mixture for two
    (tests/adversary/test_inversion.py::test_one_example_is_exact, ::test_two_examples_are_never_exact).

    References: Phong et al. 2018, section 3; Geiping et al. 2020, proposition 3.1.

    >>> import jax.numpy as jnp
    >>> x, delta = jnp.array([0.5, -2.0]), jnp.array([0.25, 0.0, -0.5])
    >>> sent = {"kernel": -0.1 * jnp.outer(x, delta)[None], "bias": -0.1 * delta[None]}
    >>> invert_affine(View((), sent, jnp.ones(1), jnp.zeros(1, jnp.int32))).tolist()
    [[0.5, -2.0]]
    """
    at = jnp.abs(_layer(view, layer)[1]).argmax(-1)
    return jnp.take_along_axis(affine_rows(view, layer), at[:, None, None], axis=1)[:, 0]


def gradient_rank(view: View, layer: str = "", *, tolerance: float = 1e-4) -> Array:
    """The rank of a layer's part of each message: at most the number of examples times the number of local steps.

    Rank 1 hints at a single example, and proves none: it is also the rank where all derivatives, or all inputs, are
    parallel, as with one output. Noise and quantisation make the rank full.

    Args:
      view, layer: as in `affine_rows`.
      tolerance: in (0, 1); singular values below this share of the largest count as zero.

    Returns: [m] int32; 0 for a message of zeros.

    Guarantees: 1 for one example, k for k generic ones, and 1 for parallel ones
    (tests/adversary/test_inversion.py::test_rank).
    """
    validate.in_range("tolerance", tolerance, 0, 1, open_low=True, open_high=True)
    values = jnp.linalg.svd(_layer(view, layer)[0], compute_uv=False)
    return (values > tolerance * values[:, :1]).sum(-1, dtype=jnp.int32)


def recover_labels(
    view: View,
    layer: str = "output",
    *,
    num_examples: int = 1,
    learning_rate: float = 1.0,
    probabilities: Sequence[float] | None = None,
) -> Array:
    """The labels of the examples behind each message, from the bias before a softmax cross entropy.

    The bias' gradient is the mean of p - onehot(y), so only the labels' own entries can be negative: for one example
    they alone are. Of B examples, class c has B (mean p_c - g_c), which is rounded so that B labels come out.

    Args:
      view: what the attacker holds.
      layer: path of the affine layer that makes the logits.
      num_examples: B of one step, which the server knows.
      learning_rate: of that step; of no use with B = 1.
      probabilities: what the server takes for the mean predicted p, [classes]; None for equal ones, of a model that
        knows nothing yet.

    Returns: [m, B] int32, rising.

    Guarantees: every label for B = 1, whatever the model, and for any B where the probabilities are right
    (tests/adversary/test_inversion.py::test_labels).

    References: Zhao, Mopuri and Bilen 2020 (iDLG), section 3; Wainakh et al. 2022 (LLG), section 4.
    """
    validate.integer("num_examples", num_examples)
    validate.positive("learning_rate", learning_rate)
    bias = _layer(view, layer)[1]
    classes = bias.shape[1]
    if probabilities is None:
        expected = jnp.full(classes, 1 / classes)
    else:
        expected = jnp.asarray(probabilities)
        if expected.shape != (classes,):
            validate.fail("probabilities", f"one for each of {classes} classes", expected.shape)
    if num_examples == 1:
        return bias.argmax(-1).astype(jnp.int32)[:, None]
    counts = num_examples * (expected[None] + bias / learning_rate)

    def one_more(left, _):  # the class that is owed most
        label = left.argmax(-1)
        return left - jax.nn.one_hot(label, classes), label

    labels = jax.lax.scan(one_more, counts, length=num_examples)[1]
    return jnp.sort(labels.T, axis=1).astype(jnp.int32)


# ---- by optimisation


class Rebuilt(NamedTuple):
    """What an optimisation found: for each message, the restart with the lowest objective."""

    guess: PyTree  # leaves [m, ...]
    objective: Array  # [m], the regulariser included; infinite where every restart diverged


def local_steps(
    loss_fn: Callable, learning_rate: float, *, num_steps: int = 1, batch_size: int | None = None
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
    validate.positive("learning_rate", learning_rate)
    validate.steps("num_steps", num_steps)
    if batch_size is not None:
        validate.integer("batch_size", batch_size)
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


def total_variation(weight: float, shape: Sequence[int] | None = None, *, of: str = "x") -> Callable:
    """A regulariser: weight x the mean difference of neighbouring pixels (Geiping et al. 2020, equation 4).

    Args:
      weight: >= 0.
      shape: (height, width), or with channels, of images that are stored flat.
      of: the name of the images [n, height, width, ...] in the guess.
    """
    validate.in_range("weight", weight, 0)

    def regularizer(guess):
        x = guess[of] if shape is None else guess[of].reshape(-1, *shape)
        return weight * sum(jnp.abs(jnp.diff(x, axis=axis)).mean() for axis in (1, 2))

    return regularizer


def squared_norm(weight: float, *, of: str = "x") -> Callable:
    """A regulariser: weight x the mean square of the guess."""
    validate.in_range("weight", weight, 0)
    return lambda guess: weight * jnp.mean(guess[of] ** 2)


def invert_by_optimization(
    key: Array,
    view: View,
    predict: Callable,
    start: Callable,
    known: PyTree | None = None,
    *,
    objective: Callable = squared_distance,
    regularizer: Callable | None = None,
    num_steps: int = 1000,
    optimizer: optax.GradientTransformation | None = None,
    num_restarts: int = 4,
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
    validate.integer("num_steps", num_steps)
    validate.integer("num_restarts", num_restarts)
    optimizer = optax.adam(0.1) if optimizer is None else optimizer
    validate.optimizer("optimizer", optimizer)
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
