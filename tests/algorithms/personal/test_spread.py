"""Models of IFCA and FedEM before training: apart around any start, and refused where they are equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.algorithms.personal.ifca import perturbed_models
from tests.algorithms.personal import problem as p
from tests.refusals import refused

SGD, FULL = optax.sgd(p.RATE), sampling.full(p.NUM_CLIENTS)
MODEL = models.from_fn(lambda key: p.start(), lambda w, x: x @ w["body"]["w"] + w["output"]["b"])


def made(name, **options):
    if name == "ifca":
        return algorithms.ifca(p.loss_fn, FULL, SGD, **p.OPTIONS, **options)
    loss = models.squared_error
    return algorithms.fedem(MODEL, loss, FULL, SGD, task="regression", **p.OPTIONS, **options)


@pytest.mark.full
def test_models_around_zero_differ():
    """A leaf of zeros is spread by the scale of initialisers, and any other one by its own size.

    Ten thousand draws have a deviation within 3 % of their own, which is four standard errors. Catches a spread of 0
    around 0, one that forgets the number of inputs, and noise on biases, which stay 0 beside kernels.
    """
    kernels = {"kernel": jnp.zeros((25, 400)), "bias": jnp.zeros(10_000), "two": jnp.full(9999, -2.0)}
    vectors = {"vector": jnp.zeros(10_000), "one": jnp.zeros(())}
    expected_scales = {"kernel": 0.1 / 5, "bias": 0.0, "two": 0.2, "vector": 0.1}
    for start in (kernels, vectors):
        found = perturbed_models(jax.random.key(0), start, 2, 0.1)
        for name, x in start.items():
            np.testing.assert_array_equal(found[name][0], x)
            if name in expected_scales:
                np.testing.assert_allclose(np.std(found[name][1] - x), expected_scales[name], rtol=0.03)
    assert found["one"][1] != 0


@pytest.mark.full
def test_fedem_tells_groups_apart_from_a_start_at_zero():
    """Clients with the slopes 1 and -1, and a linear model, which starts at 0: each client's mixture is its own slope.

    Equal components would leave the mean slope, 0.
    """
    rng = np.random.default_rng(0)
    slopes = np.array([1.0, -1.0, 1.0, -1.0])
    x = rng.normal(size=(4, 20, 1)).astype(np.float32)
    people = population.from_clients([{"x": x[i], "y": (slopes[i] * x[i]).astype(np.float32)} for i in range(4)])
    model = models.linear(input_shape=(1,), num_outputs=1)
    algorithm = algorithms.fedem(
        model, lambda outputs, y: {"loss": 25 * (outputs[:, 0] - y[:, 0]) ** 2}, sampling.full(4), optax.sgd(0.005),
        task="regression", num_components=2, num_steps=5,
    )  # fmt: skip
    state, step = algorithm.init(jax.random.key(0), model.init(jax.random.key(0))[0], people), jax.jit(algorithm.step)
    for round in range(20):
        state, _ = step(jax.random.key(round), state, people)
    own = algorithm.evaluated.personal(state, jnp.arange(4))
    found = (own["weights"] * own["components"]["kernel"][:, :, 0, 0]).sum(1)
    np.testing.assert_allclose(found, slopes, atol=0.05)


@pytest.mark.parametrize("name", ["fedem", "ifca"])
def test_equal_models_are_refused(name):
    """A spread of 0 when the algorithm is made, and a spread that float32 rounds away before the first round."""
    with refused("spread", value=0.0, rule="more than 0"):
        made(name, spread=0.0)
    with refused("spread", value=1e-12, rule="different models", hint="Rounding"):
        made(name, spread=1e-12).init(jax.random.key(0), p.start(), p.population())
    number = {"ifca": {"num_clusters": 1}, "fedem": {"num_components": 1}}[name]
    made(name, spread=0.0, **number).init(jax.random.key(0), p.start(), p.population())
