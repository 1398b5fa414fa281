"""FedNova's normalisation of local work."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array, ClientUpdate
from fedjax_sim.validate import ShareBelowOne

__all__ = ["effective_steps", "normalized"]


def effective_steps(num_steps: Array, momentum: float = 0.0, shrinkage: float = 0.0) -> Array:
    """|a_i|_1, the number of gradients that local work amounts to.

    Plain SGD: K. Heavy-ball momentum rho: (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho). A proximal term with
    shrinkage = step size x coefficient: (1 - (1 - shrinkage)^K) / shrinkage.

    >>> float(effective_steps(3.0)), round(float(effective_steps(2.0, momentum=0.5)), 3)
    (3.0, 2.5)
    """
    if momentum:  # by its recurrence: the closed form suffers cancellation as momentum nears 1

        def one_step(_, sums):
            velocity = momentum * sums[0] + 1
            return velocity, sums[1] + velocity

        return jax.lax.fori_loop(0, jnp.asarray(num_steps, jnp.int32), one_step, (jnp.float32(0), jnp.float32(0)))[1]
    if shrinkage:
        return -jnp.expm1(num_steps * jnp.log1p(-shrinkage)) / shrinkage
    return jnp.asarray(num_steps, jnp.float32)


@validate.named_arguments
def normalized(client: ClientUpdate, *, momentum: ShareBelowOne = 0.0, shrinkage: ShareBelowOne = 0.0) -> ClientUpdate:
    """The client's update divided by its effective steps, sent with that number; compose with `server.rescaled`.

    Args:
      client: reports the metric `local_steps`, and trains with SGD of a constant rate.
      momentum: that of its heavy-ball SGD, in [0, 1).
      shrinkage: learning rate x proximal coefficient, in [0, 1); not together with momentum.

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

    return client._replace(apply=apply).stating(scalable=False)  # direction and steps are multiplied
