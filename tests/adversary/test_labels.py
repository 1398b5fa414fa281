"""Labels from the gradients that come back to a party without labels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import algorithms, models, transform
from fedjax_sim.adversary import auc, label_scores
from fedjax_sim.network.link import link

RNG = np.random.default_rng(0)
ROWS = 20_000
X = RNG.normal(size=(ROWS, 2)).astype(np.float32)
MODEL = models.vertical_linear(columns=(1, 1), num_outputs=1)


def received(y, bias=0.0, slope=0.0, **ways):
    """What party 1 gets back in a full-batch step."""
    one = {"score": {"kernel": np.full((1, 1), slope, np.float32)}}
    params = {"parties": {"party_0": one, "party_1": one}, "bias": np.full(1, bias, np.float32)}

    @jax.jit
    def step(params, y):
        seen = algorithms.vertical_transcript(
            MODEL, models.sigmoid_cross_entropy, params, {"x": X, "y": y}, link=link(**ways), key=jax.random.key(1)
        )
        (back,) = seen.seen_by(1)
        return back.value

    return np.asarray(step(params, y))


def told(y, scores):
    return auc(scores[y == 1], scores[y == 0])


def test_direction():
    """A residual's sign is the label, whatever the model."""
    y = (RNG.random(ROWS) < 0.3).astype(np.int32)
    gradients = received(y, bias=-0.7, slope=1.5)
    known = gradients[int(np.flatnonzero(y)[0])]
    assert told(y, label_scores(gradients, "direction", known)) == 1.0


def test_norm():
    """Residuals |p - 1| and |p| at p = 0.1: all labels; at p = 1/2 none. Catches a score that knows the label."""
    y = (RNG.random(ROWS) < 0.1).astype(np.int32)
    assert told(y, label_scores(received(y, bias=math.log(0.1 / 0.9)))) == 1.0
    assert told(y, label_scores(received(y))) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("noise", [0.25, 1.0, 4.0])
def test_noise(noise):
    """Residuals +-1/2 (over n) with N(0, s^2) (over n): the sign is right with Phi(1/2s), which is its AUC.

    Five standard errors at 20,000 rows are 0.018 of an AUC; s that is twice as large moves it by 0.04 to 0.2.
    """
    y = (RNG.random(ROWS) < 0.5).astype(np.int32)
    clip = 0.5 / ROWS * 1.01  # just above every residual
    noisy = received(y, backward=transform.local_gaussian(clip, noise * 2 / 1.01))
    plus = jnp.full(1, -0.5 / ROWS)  # of a row whose label is known
    expected = 0.5 * (1 + math.erf(1 / (2 * noise) / math.sqrt(2)))
    assert told(y, label_scores(noisy, "direction", plus)) == pytest.approx(expected, abs=0.018)


def test_what_is_not_known_is_refused():
    gradients = jnp.zeros((3, 2))
    assert label_scores(gradients, "direction", jnp.ones(2)).tolist() == [0, 0, 0]
    for known in (None, jnp.ones(3)):
        with pytest.raises(ValueError, match="known"):
            label_scores(gradients, "direction", known)
    with pytest.raises(ValueError, match="attack"):
        label_scores(gradients, "sign")
