"""What randomised response of labels promises."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.claim import Claim
from fedjax_sim.validate import Integer, Number

__all__ = ["label_claim"]


@validate.named_arguments
def label_claim(
    epsilon: Annotated[float, Number(0, 20, open_low=True)], num_classes: Annotated[int, Integer(2)]
) -> Claim:
    """The claim of `population.with_private_labels`: one example's label, replaced by another, is hidden.

    A label told is the true one with p = e^eps / (e^eps + K - 1), each other one with q = p e^-eps, so
    delta(e) = max(0, p - e^e q). It holds for anything that is computed from the told labels, and for no features.

    Args:
      epsilon: in (0, 20].
      num_classes: K >= 2.

    Returns: `Claim`; `.epsilon(0.0)` is epsilon, `.advantage` the most that any test gains, p - q.

    Guarantees: the divergence of the two laws, summed (tests/privacy/test_labels.py::test_profile).

    References: Kairouz, Bonawitz and Ramage 2016, section 3 (k-ary randomised response).

    >>> round(label_claim(1.0, 2).advantage, 4)
    0.4621
    """
    kept = 1 / (1 + (num_classes - 1) * math.exp(-epsilon))

    def profile(epsilons: np.ndarray) -> np.ndarray:
        return np.maximum(kept * -np.expm1(np.asarray(epsilons, np.float64) - epsilon), 0)

    return Claim(profile, f"labels by randomised response, epsilon {epsilon:g}, {num_classes} classes")
