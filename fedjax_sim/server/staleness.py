"""Staleness weights: factors s(gap) in (0, 1] for updates computed from a model that is `gap` versions old; s(0) =
1."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import StalenessWeight
from fedjax_sim.validate import NonNegative, NonNegativeInt, Positive


def constant() -> StalenessWeight:
    """Makes the weight by which every update counts in full: s = 1.

    References: Xie, Koyejo and Gupta 2019 (FedAsync), section 5.2.

    >>> constant()(jnp.array([0, 7])).tolist()
    [1.0, 1.0]
    """
    return lambda gaps: jnp.ones(jnp.shape(gaps), jnp.float32)


@validate.named_arguments
def polynomial(exponent: NonNegative = 0.5) -> StalenessWeight:
    """Makes the weight s = (1 + gap)^-exponent.

    Args:
      exponent: >= 0. 0.5 is FedBuff's 1 / sqrt(1 + gap); 1 is the inverse of the age 1 + gap.

    Guarantees: the values are those of the papers, and exactly 1 for fresh updates
    (tests/server/test_staleness.py::test_factors_of_the_papers).

    References: Xie, Koyejo and Gupta 2019 (FedAsync), section 5.2; Nguyen et al. 2022 (FedBuff), section 5.

    >>> polynomial(1.0)(jnp.array([0, 3])).tolist()
    [1.0, 0.25]
    """

    def weigh(gaps):
        # A power of 1 need not be rounded to exactly 1, so fresh updates have a branch of their own.
        return jnp.where(gaps > 0, (1 + jnp.asarray(gaps, jnp.float32)) ** -exponent, 1.0)

    return weigh


@validate.named_arguments
def hinge(slope: Positive = 10.0, patience: NonNegativeInt = 4) -> StalenessWeight:
    """Makes the weight that is 1 up to a gap of `patience`, and 1 / (1 + slope (gap - patience)) for larger gaps.

    Args:
      slope: a > 0 of the paper.
      patience: b >= 0 of the paper.

    Guarantees: the values are those of the paper:
    tests/server/test_staleness.py::test_factors_of_the_papers.

    References: Xie, Koyejo and Gupta 2019 (FedAsync), section 5.2, where the second branch is 1 / (a (gap - b) + 1).

    >>> hinge(1.0, 2)(jnp.array([2, 3])).tolist()
    [1.0, 0.5]
    """
    return lambda gaps: 1 / (1 + slope * jnp.maximum(jnp.asarray(gaps) - patience, 0).astype(jnp.float32))
