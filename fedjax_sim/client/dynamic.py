"""FedDyn's local solver: training with a linear and a proximal term."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from fedjax_sim import tree, validate
from fedjax_sim.client.local_sgd import facts_of, local_training
from fedjax_sim.client.work import LocalWork
from fedjax_sim.types import ClientUpdate
from fedjax_sim.validate import Positive


@validate.named_arguments
def dynamic(
    loss_fn: Callable, optimizer: optax.GradientTransformation, coefficient: Positive, work: LocalWork
) -> ClientUpdate:
    """Makes FedDyn's client, which corrects its drift by a vector h_i that it keeps between rounds.

    The client trains from the server's model w_t on f_i(w) - <h_i, w> + (coefficient / 2) |w - w_t|^2, which gives w_i.
    Then h_i <- h_i - coefficient (w_i - w_t). If the local problem is solved exactly, h_i becomes the client's gradient
    at w_i, as in the paper. Any number of local steps is allowed here, as in the paper's experiments; h_i then only
    approximates that gradient.

    Args:
      loss_fn: as in `local_sgd`.
      optimizer: any optax transformation; its state is initialised in each round.
      coefficient: alpha > 0; may be traced.
      work: `client.work(...)`; the paper's weighting is "uniform". Take "examples" to minimise the example-weighted
        loss.

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
    train = local_training(loss_fn, optimizer, work)
    by_examples = work.weighs_examples()

    def apply(key, broadcast, drift, data):
        def correct(gradients, params):
            def leaf(g, h, w, start):
                return g - h + coefficient * (w - start)

            return jax.tree.map(leaf, gradients, drift, params, broadcast)

        training = train(key, broadcast, data, correct)
        update = tree.subtract(training.params, broadcast)
        new_drift = jax.tree.map(lambda h, u: h - coefficient * u, drift, update)
        return training.report(update, by_examples), new_drift

    return ClientUpdate(tree.zeros_like, apply, facts_of(work, optimizer))
