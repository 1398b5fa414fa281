"""Mime's clients send the gradient of all their examples, or take local steps that mimic a centralised optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.client.local_sgd import local_training
from fedjax_sim.client.losses import check_own, full_gradient_at, own_weight
from fedjax_sim.client.work import LocalWork
from fedjax_sim.prng import stream
from fedjax_sim.types import ClientFacts, ClientUpdate, Report
from fedjax_sim.validate import Positive


@validate.named_arguments
def full_gradient(loss_fn: Callable, *, weighting: Literal["examples", "uniform"] = "examples") -> ClientUpdate:
    """Makes a client that does not train: it sends the gradient of its mean loss at the server's model.

    The gradient is over all of the client's examples. It counts as one step, which a client with partial work completes
    too.

    Args:
      loss_fn: as in `local_sgd`.
      weighting: the weight that the client reports, "examples" or "uniform", as in `local_sgd`.

    Guarantees: the gradient is minus the update of one full-batch step of rate 1, up to rounding
    (tests/oracles/test_mime.py::test_full_gradient_is_a_step).

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim.types import ClientData
    >>> data = ClientData(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False]))
    >>> client = full_gradient(lambda w, x, key: (w - x) ** 2 / 2)
    >>> float(client.apply(jax.random.key(0), jnp.zeros(()), (), data)[0].update)
    -2.0
    """
    check_own(loss_fn)

    def apply(key, broadcast, state, data):
        key = stream(key, "loss")
        gradient, metrics = full_gradient_at(loss_fn, broadcast, data, key)
        weight = own_weight(loss_fn, broadcast, data, key)
        has_examples = data.mask.any()
        reported_weight = jnp.where(has_examples, weight if weighting == "examples" else 1.0, 0.0)
        return Report(gradient, reported_weight, metrics), state

    facts = ClientFacts(all_steps=1, uniform_weights=weighting == "uniform")
    return ClientUpdate(lambda params: (), apply, facts)


@validate.named_arguments
def mime(
    loss_fn: Callable,
    learning_rate: Positive,
    direction: Callable,
    work: LocalWork,
    *,
    lite: bool = False,
) -> ClientUpdate:
    """Makes Mime's client: its local steps use the server's optimiser statistics s, and leave them as they are.

    A local step is y <- y - rate U(g, s). Mime corrects each minibatch's gradient by c, the cohort's mean gradient at
    the server's model x: g = g_i(y) - g_i(x) + c, on one batch and one key. MimeLite (`lite`) takes g = g_i(y).

    Args:
      loss_fn: as in `local_sgd`.
      learning_rate: positive; may be traced.
      direction: (gradients, statistics) -> U, shaped like the model.
      work: `client.work(...)`; the paper's weighting is "uniform".
      lite: True leaves the correction out. The update then also holds the gradient of all examples at x; with Mime the
        server has this gradient from a first pass over the cohort.

    Returns: a stateless ClientUpdate for a broadcast {"params": x, "statistics": s, "control": c}, without "control"
    for `lite`. Its update is y - x, for `lite` {"params": y - x, "gradient": the gradient of all examples at x}.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_mime.py::test_matches_the_paper).

    References: Karimireddy et al. 2021 (Mime), algorithm 1.
    """
    train = local_training(loss_fn, optax.sgd(learning_rate), work)
    by_examples = work.weighs_examples()

    def apply(key, broadcast, state, data):
        start = broadcast["params"]
        statistics = broadcast["statistics"]

        def mime_lite_step(gradients, params):
            return direction(gradients, statistics)

        def mime_step(gradients, params, gradients_at_start):
            # Both gradients are of one batch, so most of their minibatch noise cancels, and c has none of it.
            shifted = jax.tree.map(
                lambda g, g_start, c: g - g_start + c, gradients, gradients_at_start, broadcast["control"]
            )
            return direction(shifted, statistics)

        if lite:
            training = train(key, start, data, mime_lite_step)
        else:
            training = train(key, start, data, mime_step, at=start)
        update = tree.subtract(training.params, start)
        if lite:
            gradient, _ = full_gradient_at(loss_fn, start, data, stream(key, "gradient"))
            update = {"params": update, "gradient": gradient}
        return training.report(update, by_examples), state

    num_steps = None if lite else work.minibatch_steps()  # MimeLite reads all examples at once, for its gradient at x
    return ClientUpdate(lambda broadcast: (), apply, work.facts()._replace(num_steps=num_steps))
