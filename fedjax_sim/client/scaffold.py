"""SCAFFOLD's local solver: SGD whose gradients are corrected by control variates."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.client.local_sgd import local_training
from fedjax_sim.client.losses import full_gradient_at
from fedjax_sim.client.work import LocalWork
from fedjax_sim.prng import stream
from fedjax_sim.types import ClientUpdate
from fedjax_sim.validate import Positive


@validate.named_arguments
def scaffold(loss_fn: Callable, learning_rate: Positive, work: LocalWork, *, option: int = 2) -> ClientUpdate:
    """Makes SCAFFOLD's client, which corrects its gradients by c - c_i, the server's control variate minus its own.

    The client takes K steps y <- y - rate (g_i(y) - c_i + c) from the server's model x. Then it renews its control
    variate. With option 1, c_i+ is the gradient of its mean loss at x. With option 2, c_i+ = c_i - c + (x - y) /
    (K rate): this is the mean of the local steps' gradients and needs no further pass. K is the number of steps
    actually taken.

    Args:
      loss_fn: as in `local_sgd`.
      learning_rate: the clients' constant rate, positive; may be traced. Option 2 holds for plain SGD only, so no other
        optimiser can be chosen.
      work: `client.work(...)`; the paper's weighting is "uniform". Take "examples" to minimise the example-weighted
        loss; see `server.control_variates`.
      option: 1 or 2, the paper's I and II.

    Returns: a ClientUpdate for a broadcast {"params": x, "control": c}, as `server.control_variates` sends it. Its
    state is c_i, shaped like the model and zero at first; its update is {"params": y - x, "control": c_i+ - c_i}.

    Guarantees: matches a NumPy transcription of the paper for both options, with partial participation and unequal
    clients (tests/oracles/test_scaffold.py::test_matches_the_paper); a client without examples keeps its c_i
    (tests/oracles/test_scaffold.py::test_without_examples_nothing_moves).

    References: Karimireddy et al. 2020 (SCAFFOLD), algorithm 1, equations 3 and 4.
    """
    validate.integer("option", option, 1, 2, hint="1 and 2 are the paper's I and II.")
    train = local_training(loss_fn, optax.sgd(learning_rate), work)
    by_examples = work.weighs_examples()

    def apply(key, broadcast, own_control, data):
        start = broadcast["params"]
        server_control = broadcast["control"]
        shift = tree.subtract(server_control, own_control)
        training = train(key, start, data, lambda gradients, params: jax.tree.map(jnp.add, gradients, shift))
        update = tree.subtract(training.params, start)
        if option == 1:
            new_control = full_gradient_at(loss_fn, start, data, stream(key, "control"))[0]
        else:
            # c_i - c + (x - y) / (K rate), where shift = c - c_i and update = y - x.
            path_length = jnp.maximum(training.num_steps, 1).astype(float) * learning_rate  # K rate
            new_control = jax.tree.map(lambda s, u: -s - u / path_length.astype(u.dtype), shift, update)
        message = {"params": update, "control": tree.subtract(new_control, own_control)}
        # Without examples `new_control` is not c_i. The report then weighs 0, and a round keeps the old state of a
        # client whose report weighs 0.
        return training.report(message, by_examples), new_control

    def init(broadcast):
        return tree.zeros_like(broadcast["params"])

    num_steps = work.minibatch_steps() if option == 2 else None  # option 1 reads all examples at once
    return ClientUpdate(init, apply, work.facts()._replace(num_steps=num_steps))
