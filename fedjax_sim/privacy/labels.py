"""This module states the privacy claim of randomised response on labels."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.privacy.claim import Claim
from fedjax_sim.text.bounds import shown_up
from fedjax_sim.validate import Integer, Number


@validate.named_arguments
def label_claim(
    epsilon: Annotated[float, Number(0, 20, open_low=True)], num_classes: Annotated[int, Integer(2)]
) -> Claim:
    """Makes the claim of `population.with_private_labels`, which hides the label of one example.

    Neighbouring data sets differ in that label.

    Randomised response reports the true label with probability p = e^eps / (e^eps + K - 1), and each other label with q
    = p e^-eps. So delta(e) = max(0, p - e^e q). The claim holds for everything that is computed from the reported
    labels. It does not cover features.

    Args:
      epsilon: in (0, 20].
      num_classes: K >= 2.

    Returns: `Claim`. `.epsilon(0.0)` is epsilon, and `.advantage` is the most that any test gains, p - q.

    Guarantees: The profile equals the divergence of the two laws, summed over the labels
    (tests/privacy/test_labels.py::test_profile).

    References: Kairouz, Bonawitz and Ramage 2016, section 3 (k-ary randomised response).

    >>> round(label_claim(1.0, 2).advantage, 4)
    0.4621
    """
    true_label_rate = 1 / (1 + (num_classes - 1) * math.exp(-epsilon))

    def profile(epsilons: np.ndarray) -> np.ndarray:
        # p - e^e q, written with expm1 so that nothing cancels near e = epsilon.
        return np.maximum(true_label_rate * -np.expm1(np.asarray(epsilons, np.float64) - epsilon), 0)

    return Claim(profile, f"labels by randomised response, epsilon {shown_up(epsilon, 6)}, {num_classes} classes")
