"""Labels from gradients at the cut, and examples from smashed data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import network, transform
from fedjax_sim.adversary import inversion_error, invert_smashed, labels_by_direction, labels_of_logits
from fedjax_sim.algorithms import split_loss
from fedjax_sim.algorithms.split.loss import split_transcript
from fedjax_sim.models import mlp, softmax_cross_entropy

KEY = jax.random.key(0)
N, CLASSES = 600, 4
X = jax.random.normal(jax.random.key(1), (N, 6))
Y = jnp.arange(N) % CLASSES
LOGITS = 3 * jax.random.normal(jax.random.key(2), (N, CLASSES))


def at_the_logits(noise=None):
    made = network.link(backward=noise)
    run = lambda tap: softmax_cross_entropy(tap(made, KEY, LOGITS, 0, 1, name="loss"), Y)["loss"].sum()  # noqa: E731
    return jax.jit(lambda: network.transcript(run).seen_by(0)[0].value)()


def test_labels_at_the_logits():
    """Every label, one example at a time. Catches a sign, and the largest entry for the negative one."""
    gradients = at_the_logits()
    assert (labels_of_logits(gradients) == Y).all() and ((gradients < 0).sum(1) == 1).all()


def test_noise_hides_labels():
    """Noise of 30 times the clip: right guesses are a binomial's of 1/4 within 6 deviations; without noise all are."""
    guesses = labels_of_logits(at_the_logits(transform.local_gaussian(1.0, 30.0)))
    assert abs(float((guesses == Y).sum()) - N / 4) < 6 * np.sqrt(N * 3 / 16)
    little = labels_of_logits(at_the_logits(transform.local_gaussian(1.0, 0.01)))
    assert (little == Y).mean() > 0.9


def test_labels_through_the_middle():
    """The middle of a U sees no label, and finds most of them from one known example of each class.

    Catches the claim that a U-shaped cut alone hides labels; noise on the gradients does: chance within 6 deviations.
    """
    model = mlp(input_shape=(6,), num_outputs=CLASSES, hidden=(16, 16))
    params = model.init(KEY)[0]
    found = []
    for noise in (None, transform.local_gaussian(0.001, 100.0)):
        cut = split_loss(
            model, softmax_cross_entropy, ("hidden_0", "hidden_1"), u_shaped=True, link=network.link(backward=noise)
        )

        @jax.jit
        def guessed(params, cut=cut):
            seen = split_transcript(cut, params, {"x": X, "y": Y}, KEY).seen_by(1)
            (gradient,) = (m.value for m in seen if m.kind == "gradients")
            return labels_by_direction(gradient[CLASSES:], gradient[:CLASSES], Y[:CLASSES])

        found.append(float((np.asarray(guessed(params)) == np.asarray(Y)[CLASSES:]).mean()))
    assert found[0] > 0.8
    assert abs(found[1] - 0.25) < 6 * np.sqrt(3 / 16 / N)


@pytest.mark.full
def test_inversion():
    """Catches a decoder without its mean, and errors that are not relative to the mean."""
    square = jax.random.normal(jax.random.key(3), (6, 6))
    smashed = X @ square + 2
    known, rest = slice(0, 100), slice(100, N)
    guess = invert_smashed(smashed[rest], smashed[known], X[known], ridge=1e-7)
    assert inversion_error(guess, X[rest]) < 1e-3
    nothing = jax.random.normal(jax.random.key(4), smashed.shape)
    blind = invert_smashed(nothing[rest], nothing[known], X[known], ridge=10.0)
    assert 0.95 < inversion_error(blind, X[rest]) < 1.1
    noisy = smashed + 5 * nothing
    errors = [inversion_error(invert_smashed(s[rest], s[known], X[known]), X[rest]) for s in (smashed, noisy, nothing)]
    assert errors[0] < errors[1] < errors[2]
    images = invert_smashed(smashed[:3], smashed[known], X[known].reshape(100, 2, 3))
    assert images.shape == (3, 2, 3)


def test_what_is_refused():
    """Catches pairs that do not match."""
    for call, words in (
        (lambda: labels_of_logits(X[0]), "gradients"),
        (lambda: labels_by_direction(X, X[:2], Y[:3]), "known"),
        (lambda: invert_smashed(X, X[:5], X[:4]), "known"),
        (lambda: invert_smashed(X, X[:5], X[:5], ridge=0.0), "ridge"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
