"""Model replacement: the message of an attacker that wants its own model to become the global model."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.adversary.kinds import Alone
from fedjax_sim.validate import Positive, PositiveInt


@validate.named_arguments
def model_replacement(cohort_weight: Positive, server_rate: Positive = 1.0, num_attackers: PositiveInt = 1) -> Alone:
    """Scales the attacker's own update so that its model replaces the global model.

    The factor is W / (server_rate x own weight x num_attackers). The replacement works under a weighted mean if the
    other clients' updates are small, such as near convergence. What the attacker trains on is part of its data:
    `population.backdoor`.

    Args:
      cohort_weight: W, positive: the sum of the weights of a cohort's messages, including those of attackers. With
        `weighting = "uniform"`, or under a rule that ignores weights, W is the number m of messages, if each weighs 1.
      server_rate: positive, the learning rate of the server's step.
      num_attackers: the attackers in each cohort, who share the boost.

    Guarantees:
      - if all other clients send zeros, the global model is the attacker's to 1e-6
        (tests/adversary/test_backdoor.py::test_the_attackers_model_replaces_the_global)
      - a bound of C on the norms of messages bounds its shift by C / m (::test_a_norm_bound_bounds_the_shift)

    References: Bagdasaryan et al. 2020, section 3.2, equation 3.

    >>> import jax, jax.numpy as jnp
    >>> model_replacement(10.0, server_rate=0.5).send(jax.random.key(0), jnp.array([1.0, 2.0]), 1.0)[0].tolist()
    [20.0, 40.0]
    """
    boost = cohort_weight / (server_rate * num_attackers)
    validate.positive("cohort_weight / (server_rate x num_attackers)", boost)
    return Alone(
        lambda key, update, weight: (
            tree.scaled(update, jnp.float32(boost) / jnp.float32(weight)),
            weight,
        )
    )
