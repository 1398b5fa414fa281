"""FedDyn's local solver."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from fedjax_sim import tree, validate
from fedjax_sim.client.local_sgd import local_training
from fedjax_sim.client.optimizers import OverRounds
from fedjax_sim.client.work import LocalWork
from fedjax_sim.types import ClientUpdate
from fedjax_sim.validate import Positive

__all__ = ["dynamic"]


@validate.named_arguments
def dynamic(
    loss_fn: Callable, optimizer: optax.GradientTransformation, coefficient: Positive, work: LocalWork
) -> ClientUpdate:
    """Local training on f_i(w) - <h_i, w> + (coefficient / 2) |w - w_t|^2, then h_i <- h_i - coefficient (w_i - w_t).

    Solved exactly, that makes h_i the client's gradient at its own last model w_i, as the paper writes it. Any number
    of local steps is allowed here, as in the paper's experiments; h_i then only approximates that gradient.

    Args:
      optimizer: any optax transformation; its state is initialised in each round.
      coefficient: alpha > 0; may be traced.
      work: `client.work(...)`; the paper's weighting is "uniform", and "examples" is for the minimum of the
        example-weighted loss.

    Returns: a ClientUpdate for `server.dynamic`. Its state is h_i, shaped like the model and zero at first; its update
    is w_i - w_t.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_feddyn.py::test_matches_the_paper); a
    client without examples keeps its h_i (::test_without_examples_nothing_moves).

    References: Acar et al. 2021 (FedDyn), algorithm 1.

    >>> import jax, jax.numpy as jnp, optax
    >>> from fedjax_sim.client import work
    >>> from fedjax_sim.types import ClientData
    >>> client = dynamic(lambda w, x, key: (w - x) ** 2 / 2, optax.sgd(0.5), 1.0, work(num_steps=50))
    >>> data = ClientData(jnp.array([2.0]), jnp.array([True]))
    >>> report, own = client.apply(jax.random.key(0), jnp.zeros(()), jnp.zeros(()), data)
    >>> float(report.update), float(own)  # the gradient of the loss at the new model
    (1.0, -1.0)
    """
    train, by_examples = local_training(loss_fn, optimizer, work), work.weighs_examples()

    def apply(key, broadcast, own, data):
        def correct(gradients, params):
            def leaf(g, h, w, start):
                return g - h + coefficient * (w - start)

            return jax.tree.map(leaf, gradients, own, params, broadcast)

        done = train(key, broadcast, data, correct)
        update = tree.subtract(done.params, broadcast)
        new = tree.where(done.num_examples > 0, jax.tree.map(lambda h, u: h - coefficient * u, own, update), own)
        return done.report(update, by_examples), new

    facts = work.facts()._replace(reads_round=isinstance(optimizer, OverRounds))
    return ClientUpdate(tree.zeros_like, apply, facts)
