"""The claim of randomised response."""

import numpy as np
import pytest

from fedjax_sim.privacy import label_claim


@pytest.mark.parametrize("classes", [2, 7])
def test_profile(classes):
    """The divergence of the two laws, output by output. Catches a kept share of another number of classes."""
    for epsilon in (0.3, 2.0):
        claim = label_claim(epsilon, classes)
        kept = np.exp(epsilon) / (np.exp(epsilon) + classes - 1)
        p, q = (np.full(classes, (1 - kept) / (classes - 1)) for _ in range(2))
        p[0] = q[1] = kept
        for e in (0.0, 0.1, epsilon / 2, epsilon, 3.0):
            expected = np.maximum(p - np.exp(e) * q, 0).sum()
            np.testing.assert_allclose(claim.profile(np.array([e]))[0], expected, atol=1e-12)
        assert claim.epsilon(1e-12) == pytest.approx(epsilon, abs=0.01)
        assert claim.advantage == pytest.approx(p[0] - q[0])
    with pytest.raises(ValueError, match="num_classes"):
        label_claim(1.0, 1)
