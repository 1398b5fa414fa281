"""The mixture of Gaussians against its stated distribution."""

import jax
import numpy as np
from scipy import stats

from fedjax_sim.population import mixture


def test_rows_follow_the_stated_mixture():
    """Zipf's shares by a chi-square test, which fails by chance in one run of 10^6, and normal features around centers.

    Faults: shares of exponent 0 or 2, a spread that is a variance, labels of other rows.
    """
    data = mixture(num_clients=4000, num_components=6, dimension=3, examples_per_client=5, spread=0.2, exponent=1.0)
    clients = jax.jit(jax.vmap(data.train.client))(np.arange(4000, dtype=np.int32))
    x, y = (np.asarray(clients.examples[name]).reshape(20_000, -1) for name in ("x", "y"))
    y = y.reshape(-1)
    weights = 1 / np.arange(1, 7)
    expected = 20_000 * weights / weights.sum()
    assert stats.chisquare(np.bincount(y, minlength=6), expected).pvalue > 1e-6
    residuals = (x - np.asarray(data.train.parameters["centers"])[y]).reshape(-1) / 0.2
    assert stats.kstest(residuals, "norm").pvalue > 1e-6
    assert clients.mask.all() and data.num_outputs == 6
    test = (data.test["x"] - np.asarray(data.train.parameters["centers"])[data.test["y"]]).reshape(-1) / 0.2
    assert stats.kstest(test, "norm").pvalue > 1e-6
