"""Momentum of clients' messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import adversary, aggregation, transform
from tests.aggregation.robust.problems import applied


def sent_by(beta, updates):
    """[T, m, d] what m clients send for updates [T, m, d]."""
    momentum, key = transform.client_momentum(beta), jax.random.key(0)
    spec = jax.ShapeDtypeStruct(updates.shape[2:], updates.dtype)

    def one(memory, update):
        message, memory, _ = jax.vmap(lambda u, m: momentum.on_client(key, u, (), m))(update, memory)
        return memory, message

    start = jax.vmap(lambda _: momentum.init_client(spec))(jnp.arange(updates.shape[1]))
    return np.asarray(jax.jit(lambda x: jax.lax.scan(one, start, x)[1])(updates))


def test_moving_mean():
    """Catches a memory that clients share, one of the update in the place of the mean, and a factor 1 / (1 - beta)."""
    x = np.random.default_rng(0).normal(size=(6, 3, 4)).astype(np.float32)
    kept, expected = np.zeros((3, 4)), []
    for update in x:
        kept = 0.7 * kept + 0.3 * update
        expected.append(kept)
    np.testing.assert_allclose(sent_by(0.7, x), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(sent_by(0.0, x), x)


@pytest.mark.full
@pytest.mark.parametrize("rule", [aggregation.median(), aggregation.trimmed_mean(2), aggregation.geometric_median()],
                         ids=["median", "trimmed mean", "geometric median"])  # fmt: skip
def test_attackers_hide_less(rule):
    """Noisy updates of one mean, two of eleven clients send ALIE's message: its harm falls with the honest messages'
    deviation, sqrt((1 - beta) / (1 + beta)). 4,000 coordinates: 4 % are more than five standard errors.

    Catches momentum that no robust rule sees, such as the server's, and attackers whose message is averaged too.
    """
    beta, m, d = 0.9, 11, 4000
    x = np.random.default_rng(1).normal(size=(60, m, d)).astype(np.float32)
    attacked = adversary.corrupted(rule, adversary.alie(1.0), adversary.clients([0, 1]))
    harm = {}
    for decay in (0.0, beta):
        messages = sent_by(decay, x)[-1]
        harm[decay] = messages[2:].mean() - applied(attacked, messages)[0].mean()
    assert harm[0.0] > 0.1
    np.testing.assert_allclose(harm[beta] / harm[0.0], np.sqrt((1 - beta) / (1 + beta)), rtol=0.04)


def test_what_is_refused():
    """Catches a decay that never forgets, and whole numbers that a moving mean would cut."""
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="decay: expected"):
            transform.client_momentum(wrong)
    with pytest.raises(TypeError, match="update: expected leaves of floats"):
        transform.client_momentum(0.5).init_client(jnp.zeros(2, jnp.int32))
