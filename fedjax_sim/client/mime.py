"""Mime's clients: the gradient of all examples, and local steps that mimic a centralised optimiser."""

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

__all__ = ["full_gradient", "mime"]


@validate.named_arguments
def full_gradient(loss_fn: Callable, *, weighting: Literal["examples", "uniform"] = "examples") -> ClientUpdate:
    """No training: the update is the gradient of the client's mean loss at the server's model, over all its examples.

    It counts as one step, which a client with partial work completes too.

    Args:
      weighting: the weight that the client reports, "examples" or "uniform", as in `local_sgd`.

    Guarantees: minus the update of one full-batch step of rate 1
    (tests/oracles/test_mime.py::test_full_gradient_is_a_step).

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim.types import ClientData
    >>> data = ClientData(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([True, True, False]))
    >>> one = full_gradient(lambda w, x, key: (w - x) ** 2 / 2)
    >>> float(one.apply(jax.random.key(0), jnp.zeros(()), (), data)[0].update)
    -2.0
    """
    check_own(loss_fn)

    def apply(key, broadcast, state, data):
        key = stream(key, "loss")
        gradient, metrics = full_gradient_at(loss_fn, broadcast, data, key)
        weight = own_weight(loss_fn, broadcast, data, key)
        present = data.mask.any()
        return Report(gradient, jnp.where(present, weight if weighting == "examples" else 1.0, 0.0), metrics), state

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
    """Local steps y <- y - rate U(g, s) with the server's statistics s of its optimiser, which stay as they are.

    Mime corrects each minibatch's gradient by c, the cohort's mean gradient at the server's model x:
    g = g_i(y) - g_i(x) + c on one batch and one key. MimeLite (`lite`) takes g = g_i(y).

    Args:
      learning_rate: positive; may be traced.
      direction: (gradients, statistics) -> U, shaped like the model.
      work: `client.work(...)`; the paper's weighting is "uniform".
      lite: no correction; the update then also holds the gradient of all examples at x, which with Mime the server has
        from its first pass.

    Returns: a stateless ClientUpdate for a broadcast {"params": x, "statistics": s, "control": c}, without "control"
    for `lite`. Its update is y - x, for `lite` {"params": y - x, "gradient": the gradient of all examples at x}.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_mime.py::test_matches_the_paper).

    References: Karimireddy et al. 2021 (Mime), algorithm 1.
    """
    train, by_examples = local_training(loss_fn, optax.sgd(learning_rate), work), work.weighs_examples()

    def apply(key, broadcast, state, data):
        start, statistics = broadcast["params"], broadcast["statistics"]

        def plain(gradients, params):
            return direction(gradients, statistics)

        def corrected(gradients, params, there):
            shifted = jax.tree.map(lambda g, before, c: g - before + c, gradients, there, broadcast["control"])
            return direction(shifted, statistics)

        done = train(key, start, data, plain) if lite else train(key, start, data, corrected, at=start)
        update = tree.subtract(done.params, start)
        if lite:
            gradient, _ = full_gradient_at(loss_fn, start, data, stream(key, "gradient"))
            update = {"params": update, "gradient": gradient}
        return done.report(update, by_examples), state

    steps = None if lite else work.minibatch_steps()  # lite reads all examples at once
    return ClientUpdate(lambda broadcast: (), apply, work.facts()._replace(num_steps=steps))
