"""This module simulates clients that leave during their training, with a part of their work done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.network.distributions import Distribution, as_distribution, unit_draws
from fedjax_sim.prng import stream
from fedjax_sim.types import Array
from fedjax_sim.validate import Number


class Hazard(NamedTuple):
    """The law of when clients leave, in seconds of computing since the start of their training in a round.

    Guarantees: With more work, the share that is done is not larger (tests/laws/test_network.py::test_hazards).
    """

    leaves_after: Callable  # (key, ids [c]) -> [c] float32 seconds, > 0; a function of the round's key and the id

    def done(self, key: Array, ids: Array, seconds: Array) -> Array:
        """Computes the share of their work that clients have done when they leave, [c] float32 in [0, 1].

        The share is 1 for clients that do all of their work.

        Args:
          key: of the round.
          ids: [c] int32.
          seconds: [] or [c], the duration of all their work.

        Guarantees: The share has its law, and depends on the client and not on its slot
        (tests/network/test_hazards.py::test_memoryless, ::test_a_client_leaves_once).
        """
        leave_seconds = self.leaves_after(key, ids)
        return jnp.where(leave_seconds < seconds, leave_seconds / jnp.maximum(seconds, 1e-30), 1.0).astype(jnp.float32)


def memoryless(mean_seconds: Distribution | float, *, seed: int = 0) -> Hazard:
    """Makes a hazard under which the probability to leave in the next second does not depend on the work done so far.

    A client stays through t seconds of work with probability exp(-t / mean).

    Args:
      mean_seconds: the mean time of computing until a client leaves, above 0: a number, or a distribution over clients.
      seed: of the draws from that distribution.

    Guarantees: Clients follow this law (tests/network/test_hazards.py::test_memoryless).

    >>> bool((memoryless(100.0).leaves_after(jax.random.key(0), jnp.arange(3)) > 0).all())
    True
    """
    return _leaving("mean_seconds", mean_seconds, 1.0, seed)


@validate.named_arguments
def weibull(scale_seconds: Distribution | float, shape: Annotated[float, Number(0.1, 100)], *, seed: int = 0) -> Hazard:
    """Makes a hazard under which clients leave mostly early (shape < 1), or mostly after long work (shape > 1).

    A client stays through t seconds of work with probability exp(-(t / scale)^shape).

    Args:
      scale_seconds: of computing, above 0: a number, or a distribution over clients.
      shape: in [0.1, 100]; 1 is `memoryless`.
      seed: of the draws from that distribution.

    Guarantees: Clients follow this law (tests/network/test_hazards.py::test_weibull).

    References: Weibull 1951.

    >>> bool((weibull(100.0, 2.0).leaves_after(jax.random.key(0), jnp.arange(3)) > 0).all())
    True
    """
    return _leaving("scale_seconds", scale_seconds, shape, seed)


def _leaving(name: str, scale: Distribution | float, shape: float, seed: int) -> Hazard:
    """Makes a Weibull hazard: client i stays through t seconds with probability exp(-(t / scale_i)^shape).

    It leaves after scale_i (-log u)^(1 / shape) seconds, where u is uniform in (0, 1), drawn for each client and round.

    Args:
      name: of the scale's argument, for errors.
      scale: seconds of computing, above 0: a number, or a distribution over clients.
      shape: > 0. With 1 the chance to leave in the next second does not depend on the time so far.
      seed: >= 0, of the clients' scales, which are the same in all rounds.

    Raises: ValueError for a scale that may be 0, and for a seed below 0.
    """
    scale = as_distribution(name, scale)
    if not scale.least > 0:
        validate.fail(name, "a distribution above 0", scale.least)
    validate.integer("seed", seed, 0)

    clients_key = stream(jax.random.key(seed), "hazard of clients")

    def leaves_after(key: Array, ids: Array) -> Array:
        client_scale = scale.draw(clients_key, ids)
        # -log(u) is exponential, and its power 1 / shape is Weibull.
        exponential_draws = -jnp.log(unit_draws(stream(key, "hazard"), ids))
        # A draw may round to 0 seconds, but a client that has not begun has not left.
        return jnp.maximum(
            client_scale * (exponential_draws if shape == 1 else exponential_draws ** (1 / shape)), validate.SMALLEST
        )

    return Hazard(leaves_after)
