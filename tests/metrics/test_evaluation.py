"""Evaluation pools over examples, whatever the clients' sizes and the padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import metrics
from fedjax_sim.population import from_clients

SIZES = (3, 1, 7, 0, 5)


def loss_fn(params, examples, key):
    assert key is None  # evaluation
    error = examples["x"] @ params - examples["y"]
    return {"loss": error**2, "accuracy": (jnp.abs(error) < 1).astype(jnp.float32)}


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(n, 4)).astype(np.float32), "y": rng.normal(size=n).astype(np.float32)} for n in SIZES
    ]


PARAMS = jnp.array([0.5, -1.0, 2.0, 0.1])


def test_matches_a_loop_over_clients(clients):
    """Fault: a padded row, or a client's last batch, counted in a mean."""
    record = metrics.evaluation(loss_fn, held_out=from_clients(clients))(PARAMS)
    losses = [((c["x"].astype(float) @ np.asarray(PARAMS, float)) - c["y"]) ** 2 for c in clients]
    np.testing.assert_allclose(record["held_out_loss"], np.concatenate(losses).mean(), rtol=1e-6)
    own = [x.mean() for x in losses if len(x)]
    np.testing.assert_allclose(
        record["held_out_loss_quantiles"], np.quantile(own, metrics.evaluation.__globals__["QUANTILES"]), rtol=1e-6
    )


def test_pooled_is_the_weighted_mean_of_clients(clients):
    """Inventory B1; fault: an unweighted mean over clients, or over batches (more than one batch here)."""
    many = clients * 60
    together = jax.tree.map(lambda *x: np.concatenate(x), *many)
    record = metrics.evaluation(loss_fn, test=together, held_out=from_clients(many))(PARAMS)
    np.testing.assert_allclose(record["test_loss"], record["held_out_loss"], rtol=1e-6)
    np.testing.assert_allclose(record["test_accuracy"], record["held_out_accuracy"], rtol=1e-6)
    unweighted = np.mean([np.mean((c["x"] @ np.asarray(PARAMS) - c["y"]) ** 2) for c in clients if len(c["y"])])
    assert abs(record["test_loss"] - unweighted) > 1e-2


def test_per_example_weights_pool_over_tokens():
    """Fault: sequences of unequal length counted as equal."""

    def sequences(params, examples, key):
        return {"loss": examples["mean"], "weight": examples["tokens"]}

    examples = {"mean": np.float32([1.0, 5.0]), "tokens": np.float32([3.0, 1.0])}
    assert metrics.evaluation(sequences, test=examples)(())["test_loss"] == 2.0
