"""SCAFFOLD's local solver; its trajectories are in tests/oracles/test_scaffold.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, sampling
from fedjax_sim.types import ClientData
from tests.laws import problems as p

BROADCAST = {"params": jnp.float32(1.0), "control": jnp.float32(0.25)}


def loss(w, x, key):
    return (w - x) ** 2 / 2


@pytest.mark.parametrize("option", [1, 2])
def test_by_hand(option):
    """From 1, one example 0, rate 0.5, c = 0.25, c_i = -0.5: 1 - 0.5 (1 + 0.75) = 0.125, then -0.3125.

    Gradients met: 1 and 0.125, mean 0.5625 (option 2); at the server's model: 1 (option 1). Catches a swapped sign.
    """
    one = client.scaffold(loss, 0.5, client.work(num_steps=2, weighting="uniform"), option=option)
    report, own = one.apply(
        jax.random.key(0), BROADCAST, jnp.float32(-0.5), ClientData(jnp.zeros(1), jnp.ones(1, bool))
    )
    expected = 1.0 if option == 1 else 0.5625
    assert float(own) == expected and float(report.update["control"]) == expected + 0.5
    assert float(report.update["params"]) == -1.3125 and float(report.weight) == 1


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"optimizer": optax.sgd(0.0)}, "learning_rate: expected a finite number > 0"),
        ({"optimizer": optax.sgd(np.nan)}, "learning_rate: expected"),
        ({"option": 3}, r"option: expected an integer in \[1, 2\], got 3"),
        ({"option": True}, "option: expected an integer"),
        ({"weighting": "example"}, "weighting: expected one of"),
        ({"weighting": "examples"}, "total_weight: expected the sum of all clients' weights"),
        ({"server_learning_rate": -1}, "server_learning_rate: expected"),
        ({"num_steps": 0}, "num_steps: expected"),
    ],
)
def test_wrong_input(wrong, words):
    """Catches options that would divide by zero or minimise another objective."""
    options = {"optimizer": optax.sgd(0.1), "num_steps": 2, "weighting": "uniform"} | wrong
    with pytest.raises((TypeError, ValueError), match=words):
        algorithms.scaffold(p.linear_loss, sampling.full(4), **options)


def test_unequal_clients_are_packed():
    """Catches a solver that does not state its number of steps: every client would take those of the largest."""
    work = {"num_epochs": 2, "batch_size": 3, "weighting": "uniform"}
    made = client.scaffold(p.linear_loss, 0.1, client.work(**work), option=2)
    assert [int(made.facts.num_steps(n)) for n in (1, 3, 4)] == [2, 2, 4]
    assert (
        client.scaffold(p.linear_loss, 0.1, client.work(**work), option=1).facts.num_steps is None
    )  # it reads all examples at once
