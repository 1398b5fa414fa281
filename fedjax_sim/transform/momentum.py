"""`client_momentum` averages each client's updates over rounds, so that honest messages differ less."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.transform.chain import as_it_comes, check_floats
from fedjax_sim.types import TransformFacts, UpdateTransform
from fedjax_sim.validate import ShareBelowOne


@validate.named_arguments
def client_momentum(decay: ShareBelowOne) -> UpdateTransform:
    """A client sends the moving mean of its updates, m <- beta m + (1 - beta) u, and keeps m for its next round.

    If updates are noisy, honest messages then differ less: by the factor sqrt((1 - beta) / (1 + beta)) for noise that
    is independent over rounds. Attackers who hide among honest messages do less harm by the same factor. Momentum does
    not help if clients differ in their data.

    Args:
      decay: beta, in [0, 1); m starts at zero, so a client's first messages are shorter.

    Returns: a transform with a memory of the update's size for each client. A client that does not report keeps its
    memory.

    Raises: ValueError for a decay out of range.

    Guarantees:
      - equals NumPy's moving mean (tests/transform/test_momentum.py::test_moving_mean)
      - attackers who hide do less harm by the factor above (::test_attackers_hide_less)

    References: Karimireddy, He and Jaggi 2021, section 5 (worker momentum).

    >>> momentum, key = client_momentum(0.5), jax.random.key(0)
    >>> memory = momentum.init_client(jnp.zeros(1))
    >>> for _ in range(2):
    ...     sent, memory, _ = momentum.on_client(key, jnp.ones(1), (), memory)
    >>> sent.tolist()
    [0.75]
    """

    def init_client(update_spec):
        check_floats(update_spec)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, tree.at_least_float32(x.dtype)), update_spec)

    def on_client(key, update, state, memory):
        moved = jax.tree.map(lambda m, u: decay * m + (1 - decay) * u.astype(m.dtype), memory, update)
        return jax.tree.map(lambda m, u: m.astype(u.dtype), moved, update), moved, {}

    return UpdateTransform(
        init=lambda update_spec: (),
        init_client=init_client,
        on_client=on_client,
        on_server=lambda key, cohort, aggregate, state, measured, sensitivity: (aggregate, state, {}),
        wire=as_it_comes,
        facts=TransformFacts(mirrored=False),
    )
