"""The server's step against the papers' recurrences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import server

UPDATES = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
START = np.array([1.0, -2.0, 0.5, 0.0], np.float32)


def path(rule: optax.GradientTransformation):
    """Parameters after each of the updates."""
    made = server.optimizer(rule)
    apply = jax.jit(made.apply)
    state, seen = made.init({"w": jnp.array(START)}), []
    for update in UPDATES:
        state = apply(jax.random.key(0), {"w": jnp.array(update)}, state)
        seen.append(np.asarray(made.params(state)["w"], np.float64))
    return np.array(seen)


@pytest.mark.optimised
def test_sgd_of_rate_one_is_fedavg():
    """Bit for bit. Catches a pseudo-gradient of the wrong sign."""
    made = server.optimizer(optax.sgd(1.0))
    state = made.apply(jax.random.key(0), {"w": jnp.array(UPDATES[0])}, made.init({"w": jnp.array(START)}))
    assert np.asarray(made.params(state)["w"]).tobytes() == (START + UPDATES[0]).tobytes()
    assert np.asarray(made.broadcast(state)["w"]).tobytes() == (START + UPDATES[0]).tobytes()


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_matches_its_recurrence(nesterov):
    """v <- m v + Delta; w <- w + rate v (Nesterov: rate (Delta + m v)). Catches (1 - m) Delta."""
    seen = path(optax.sgd(0.5, momentum=0.9, nesterov=nesterov))
    w, v = START.astype(np.float64), np.zeros(4)
    for row, update in zip(seen, UPDATES.astype(np.float64), strict=True):
        v = 0.9 * v + update
        w = w + 0.5 * (update + 0.9 * v if nesterov else v)
        np.testing.assert_allclose(row, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["adagrad", "adam", "yogi"])
def test_adaptive_rules_match_the_paper(rule):
    """Algorithm 2 of Reddi et al. 2021 in float64. Catches bias correction, an epsilon under the root, v_0 = 0."""
    rate, first, second, tau = 0.1, 0.0 if rule == "adagrad" else 0.9, 0.99, 1e-3
    seen = path(server.adaptive(rule, rate, first_decay=first, second_decay=second, adaptivity=tau))
    x, m, v = START.astype(np.float64), np.zeros(4), np.full(4, tau**2)
    for row, delta in zip(seen, UPDATES.astype(np.float64), strict=True):
        m = first * m + (1 - first) * delta
        if rule == "adagrad":
            v = v + delta**2
        elif rule == "yogi":
            v = v - (1 - second) * delta**2 * np.sign(v - delta**2)
        else:
            v = second * v + (1 - second) * delta**2
        x = x + rate * m / (np.sqrt(v) + tau)
        np.testing.assert_allclose(row, x, rtol=1e-5, atol=1e-6)
    optaxs = {"adagrad": optax.adagrad(rate), "adam": optax.adam(rate, b2=0.99), "yogi": optax.yogi(rate, b2=0.99)}
    assert np.abs(path(optaxs[rule]) - seen).max() > 1e-3  # as the docstring says, they differ


def test_replacement_takes_the_aggregate():
    """Catches a model that is added to the old one; the model keeps its dtype."""
    made = server.replacement()
    new = made.apply(jax.random.key(0), {"w": jnp.array([3.0])}, made.init({"w": jnp.array([1.0], jnp.bfloat16)}))
    assert made.params(new)["w"].tolist() == [3.0] and made.params(new)["w"].dtype == jnp.bfloat16


def test_rescaled_multiplies_direction_by_steps():
    """Catches steps that are ignored."""
    made = server.rescaled(server.optimizer(optax.sgd(1.0)))
    state = made.apply(
        jax.random.key(0), {"direction": jnp.array([2.0]), "steps": jnp.float32(3)}, made.init(jnp.array([1.0]))
    )
    assert made.params(state).tolist() == [7.0]


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"rule": "adm"}, "rule: .*Did you mean 'adam'"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"first_decay": 1.0}, "first_decay"),
        ({"second_decay": -0.1}, "second_decay"),
        ({"adaptivity": 0.0}, "adaptivity"),
    ],
)
def test_wrong_numbers(kwargs, name):
    """Catches decays of one, rates of zero."""
    good = {"rule": "adam", "learning_rate": 0.1}
    with pytest.raises(ValueError, match=f"^{name}"):
        server.adaptive(**(good | kwargs))
