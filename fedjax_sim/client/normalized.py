"""FedNova's client: it divides its update by the effective number of its local steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array, ClientUpdate
from fedjax_sim.validate import ShareBelowOne


def effective_steps(num_steps: Array, momentum: float = 0.0, shrinkage: float = 0.0) -> Array:
    """The effective number of local steps |a_i|_1: the sum of the weights of all gradients in a client's update.

    For plain SGD this is K. For heavy-ball momentum rho it is (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho). For a
    proximal term with shrinkage = learning rate x coefficient it is (1 - (1 - shrinkage)^K) / shrinkage.

    Args:
      num_steps: [] K.
      momentum: rho in [0, 1).
      shrinkage: in [0, 1).

    Returns: [] float32.

    >>> float(effective_steps(3.0)), round(float(effective_steps(2.0, momentum=0.5)), 3)
    (3.0, 2.5)
    """
    if momentum:
        # The closed form loses digits as momentum nears 1, so its recurrence is run instead: each gradient enters the
        # velocity with weight 1, and each step moves the model by the velocity.
        def one_step(_, sums):
            velocity = momentum * sums[0] + 1
            return velocity, sums[1] + velocity

        return jax.lax.fori_loop(0, jnp.asarray(num_steps, jnp.int32), one_step, (jnp.float32(0), jnp.float32(0)))[1]
    if shrinkage:
        return -jnp.expm1(num_steps * jnp.log1p(-shrinkage)) / shrinkage
    return jnp.asarray(num_steps, jnp.float32)


@validate.named_arguments
def normalized(client: ClientUpdate, *, momentum: ShareBelowOne = 0.0, shrinkage: ShareBelowOne = 0.0) -> ClientUpdate:
    """Makes a client divide its update by its effective steps, and send that number too.

    The server needs both: compose with `server.rescaled`.

    Args:
      client: reports the metric `local_steps`, and trains with SGD of a constant rate.
      momentum: of the client's heavy-ball SGD, in [0, 1).
      shrinkage: learning rate x proximal coefficient, in [0, 1); not together with momentum.

    Returns: a ClientUpdate whose update is {"direction": update / steps, "steps": [] float32}.

    Raises: ValueError for options out of range, and, when traced, for a client that does not report its steps.

    Guarantees: with equal work for all clients FedNova is FedAvg; with unequal work its fixed point is that of equal
    work, where FedAvg's is biased (tests/oracles/test_fednova.py).

    References: Wang et al. 2020 (FedNova), equation 4 and section 4.
    """
    validate.part("client", client, ClientUpdate)
    if momentum and shrinkage:
        validate.fail("momentum, shrinkage", "at most one of the two above 0", (momentum, shrinkage))

    def apply(key, broadcast, state, data):
        report, state = client.apply(key, broadcast, state, data)
        if "local_steps" not in report.metrics:
            hint = "Take client.local_sgd; a client of your own reports the Mean `local_steps`."
            validate.fail("client", "one that reports `local_steps`", sorted(report.metrics), hint)
        steps = effective_steps(report.metrics["local_steps"].total, momentum, shrinkage)
        direction = jax.tree.map(lambda x: x / jnp.maximum(steps, 1), report.update)
        return report._replace(update={"direction": direction, "steps": steps}), state

    # The server multiplies direction and steps, so a factor on both would enter twice.
    return client._replace(apply=apply).stating(scalable=False)
