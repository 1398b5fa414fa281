"""Property inference with shadow clients: the shares it finds, beside the score without shadows, and its penalty."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, client, models
from fedjax_sim.adversary.shadow_clients import RELATIVE_PENALTIES, _ridge
from fedjax_sim.types import ClientData
from tests.adversary.test_membership import linear_loss, released
from tests.refusals import refused

DIMENSION, HELD, RATE = 30, 40, 0.1


def gradients(rng, n, having):
    """Gradients whose mean tells the property along one axis, with ten times the noise along half of that direction."""
    noise = rng.normal(size=(n, DIMENSION))
    noise[:, 1] *= 10
    mean = np.zeros(DIMENSION)
    mean[:2] = 1 if having else -1
    return (noise + mean[None]).astype(np.float32)


def clients_of(rng, shares):
    """The messages of clients with given shares of examples that have the property."""
    counts = np.round(HELD * shares).astype(int)
    rows = [np.concatenate([gradients(rng, k, True), gradients(rng, HELD - k, False)]) for k in counts]
    return np.stack([-RATE * x.mean(0) for x in rows])


def test_shares_are_estimated():
    """400 clients: errors of about .08 by the best direction, and more than twice that by any multiple of the score.

    Along the first axis a client's mean has deviation 1 / sqrt(40) and moves by 2 from share 0 to 1: .079. The score
    adds the second axis, with ten times that noise. Catches the sign, shares of the wrong side, and a missing mean.
    """
    rng = np.random.default_rng(0)
    shares = rng.integers(0, HELD + 1, 400) / HELD
    view = released(clients_of(rng, shares), DIMENSION)
    sides = [{"g": jnp.asarray(gradients(rng, 2000, having))} for having in (True, False)]
    predict = adversary.local_steps(linear_loss, RATE)
    found = adversary.property_share(view, predict, *sides, num_examples=HELD, num_shadows=400)
    error = np.sqrt(np.square(found - shares).mean())
    score = np.asarray(adversary.property_score(view, linear_loss, *sides), np.float64)
    multiple = np.polyval(np.polyfit(score, shares, 1), score)
    assert 0.07 < error < 0.1
    assert abs((found - shares).mean()) < 0.02
    assert np.sqrt(np.square(multiple - shares).mean()) > 2 * error


def test_penalty_of_the_least_error():
    """Leave-one-out errors equal those of 12 refits with an intercept. Catches leverages without the intercept."""
    rng = np.random.default_rng(1)
    rows, targets = rng.normal(size=(12, 5)), rng.normal(size=12)
    centred, wanted = rows - rows.mean(0)[None], targets - targets.mean()
    penalties = np.linalg.eigvalsh(centred @ centred.T).max() * np.array(RELATIVE_PENALTIES)

    def refitted(penalty):
        errors = []
        for left_out in range(12):
            others = np.delete(np.arange(12), left_out)
            x, y = rows[others], targets[others]
            middle = x - x.mean(0)[None]
            w = np.linalg.solve(middle.T @ middle + penalty * np.eye(5), middle.T @ (y - y.mean()))
            errors.append(targets[left_out] - y.mean() - (rows[left_out] - x.mean(0)) @ w)
        return np.square(errors).mean()

    best = penalties[np.argmin([refitted(penalty) for penalty in penalties])]
    expected = np.linalg.solve(centred @ centred.T + best * np.eye(12), wanted)
    np.testing.assert_allclose(_ridge(centred @ centred.T, wanted), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.full
def test_through_the_clients_of_a_model():
    """Clients of an MLP after five local steps: the ends of the scale are told apart. Catches updates of one step."""
    rng = np.random.default_rng(2)
    model = models.mlp(input_shape=(8,), num_outputs=2, hidden=(16,))
    params, loss_fn = model.init(jax.random.key(0))[0], models.supervised(model, models.softmax_cross_entropy)

    def examples(n, having):
        x = rng.normal(size=(n, 8)) + (2 if having else -2) * np.eye(8)[3]
        return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(x[:, 0] > 0, jnp.int32)}

    work = client.local_sgd(loss_fn, optax.sgd(0.1), client.work(num_steps=5))
    held = [examples(20, having) for having in (True, False) for _ in range(8)]
    updates = [work.apply(jax.random.key(i), params, (), ClientData(x, jnp.ones(20, bool)))[0].update
               for i, x in enumerate(held)]  # fmt: skip
    messages = jax.tree.map(lambda *rows: jnp.stack(rows), *updates)
    view = adversary.View(params, messages, jnp.ones(16), jnp.arange(16))
    predict = adversary.local_steps(loss_fn, 0.1, num_steps=5)
    found = adversary.property_share(view, predict, examples(100, True), examples(100, False), num_examples=20)
    assert found[:8].min() > found[8:].max()
    assert found[:8].mean() > 0.75 and found[8:].mean() < 0.25


def test_wrong_input():
    rng = np.random.default_rng(3)
    view = released(np.zeros((2, DIMENSION), np.float32), DIMENSION)
    side = {"g": jnp.asarray(gradients(rng, 10, True))}
    predict = adversary.local_steps(linear_loss, RATE)
    with refused("num_examples", value=11, rule="at most 10"):
        adversary.property_share(view, predict, side, side, num_examples=11)
    with refused("predict", rule="depend"):
        adversary.property_share(view, lambda at, rows, known: at, side, side, num_examples=5)
    with refused("view", rule="finite"):
        broken = view._replace(messages={"w": view.messages["w"].at[0, 0].set(jnp.nan)})
        adversary.property_share(broken, predict, side, side, num_examples=5)
