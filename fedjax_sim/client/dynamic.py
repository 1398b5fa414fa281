"""FedDyn's local solver."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.client.local_sgd import local_training, minibatch_steps
from fedjax_sim.types import ClientUpdate, Mean, Report

__all__ = ["dynamic"]


def dynamic(
    loss_fn: Callable,
    optimizer: optax.GradientTransformation,
    coefficient: float,
    *,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "uniform",
    straggler_share: float = 0.0,
) -> ClientUpdate:
    """Local training on f_i(w) - <h_i, w> + (coefficient / 2) |w - w_t|^2, then h_i <- h_i - coefficient (w_i - w_t).

    Solved exactly, that makes h_i the client's gradient at its own last model w_i, as the paper writes it. Any number
    of local steps is allowed here, as in the paper's experiments; h_i is then what the steps made of it.

    Args:
      optimizer: any optax transformation, its state afresh each round.
      coefficient: alpha > 0; may be traced.
      weighting: the weight that the client reports: "uniform" (1, the paper's), or "examples", for the minimum of the
        example-weighted loss.
      Others as in `local_sgd`.

    Returns: a ClientUpdate for `server.dynamic`. Its state is h_i, shaped like the model and zero at first; its update
    is w_i - w_t.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_feddyn.py::test_matches_the_paper); a
    client without examples keeps its h_i (::test_without_examples_nothing_moves).

    References: Acar et al. 2021 (FedDyn), algorithm 1.

    >>> import jax, jax.numpy as jnp, optax
    >>> from fedjax_sim.types import ClientData
    >>> client = dynamic(lambda w, x, key: (w - x) ** 2 / 2, optax.sgd(0.5), 1.0, num_steps=50)
    >>> data = ClientData(jnp.array([2.0]), jnp.array([True]))
    >>> report, own = client.apply(jax.random.key(0), jnp.zeros(()), jnp.zeros(()), data)
    >>> float(report.update), float(own)  # the gradient of the loss at the new model
    (1.0, -1.0)
    """
    validate.positive("coefficient", coefficient)
    validate.one_of("weighting", weighting, ("examples", "uniform"))
    train = local_training(
        loss_fn,
        optimizer,
        num_steps=num_steps,
        num_epochs=num_epochs,
        batch_size=batch_size,
        straggler_share=straggler_share,
    )

    def apply(key, broadcast, own, data):
        def correct(gradients, params):
            def leaf(g, h, w, start):
                return g - h + coefficient * (w - start)

            return jax.tree.map(leaf, gradients, own, params, broadcast)

        done = train(key, broadcast, data, correct)
        present = done.num_examples > 0
        update = tree.subtract(done.params, broadcast)
        new = tree.where(present, jax.tree.map(lambda h, u: h - coefficient * u, own, update), own)
        steps = Mean(done.num_steps.astype(jnp.float32), present.astype(jnp.float32))
        weight = jnp.where(present, done.weight if weighting == "examples" else 1.0, 0.0)
        return Report(update, weight, done.metrics | {"local_steps": steps}), new

    steps = minibatch_steps(num_steps, num_epochs, batch_size)
    return ClientUpdate(tree.zeros_like, apply, steps, uniform_weights=weighting == "uniform")
