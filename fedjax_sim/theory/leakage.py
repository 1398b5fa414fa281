"""This module states how well an adversary can infer membership, from an update or from overfitting, in closed form."""

from __future__ import annotations

import math
from typing import Annotated

from fedjax_sim import validate
from fedjax_sim.validate import Number, PositiveInt


@validate.named_arguments
def alignment_auc(dimension: PositiveInt, batch_size: PositiveInt) -> float:
    """Computes the AUC of `adversary.alignment_score` for a mean of B independent Gaussian gradients.

    It is Phi(sqrt(d / 2B)). A member has a score of d / B on average, and a non-member has 0. Both scores have a
    variance of about d / B. This is the leading order in d and B.

    Args:
      dimension: d, of isotropic gradients. Gradients of a neural network are far from isotropic: use the effective
        dimension.
      batch_size: B.

    Returns: AUC in (0.5, 1).

    Guarantees: The AUC equals that of simulated Gaussian gradients
    (tests/adversary/test_membership.py::test_alignment).

    >>> round(alignment_auc(100, 50), 4)
    0.8413
    """
    return 0.5 * math.erfc(-math.sqrt(dimension / (4 * batch_size)))


@validate.named_arguments
def overfitting_advantage(ratio: Annotated[float, Number(1)]) -> float:
    """Computes the best advantage of a threshold on Gaussian errors that spread more outside of training.

    Their standard deviation is r times as large there.

    It is erf(r u) - erf(u), with u = sqrt(ln r / (r^2 - 1)).

    Args:
      ratio: r >= 1; at 1 there is no overfitting.

    Returns: true minus false positive rate, in [0, 1).

    Guarantees: No threshold on such errors has a larger advantage
    (tests/adversary/test_membership.py::test_overfitting_advantage).

    References: Yeom et al. 2018, section 3.3.

    >>> overfitting_advantage(1.0), round(overfitting_advantage(2.0), 4)
    (0.0, 0.3227)
    """
    if ratio == 1:
        return 0.0
    u = math.sqrt(math.log(ratio) / (ratio**2 - 1))
    return math.erf(ratio * u) - math.erf(u)
