"""Synthetic images: the law of pixels and labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import models
from fedjax_sim.population import synthetic_images


def test_images_follow_their_law():
    """Catches classes shared by all clients, noise of another size, clients that repeat. Error rate below 1e-6."""
    data = synthetic_images(num_clients=400, side=8, num_classes=5, examples_per_client=40, noise=0.05, seed=3)
    examples, mask = jax.device_get(jax.jit(jax.vmap(data.train.client))(np.arange(400))[:2])
    assert mask.all() and examples["x"].shape == (400, 40, 8, 8)
    assert examples["x"].min() >= 0 and examples["x"].max() <= 1
    classes = [np.unique(y) for y in examples["y"]]
    assert all(len(own) == 2 for own in classes)  # 40 draws miss one of two with chance 2e-12
    held = np.bincount(np.concatenate(classes), minlength=5)
    assert np.abs(held - 160).max() < 5 * np.sqrt(400 * 0.4 * 0.6)
    rest = examples["x"] - data.train.parameters["prototypes"][examples["y"]]
    inside = (data.train.parameters["prototypes"] > 0.3) & (data.train.parameters["prototypes"] < 0.7)
    spread = rest[inside[examples["y"]]].std()
    assert abs(spread - 0.05) < 5 * 0.05 / np.sqrt(2 * inside[examples["y"]].sum())
    assert len({x.tobytes() for x in examples["x"]}) == 400
    assert np.bincount(data.test["y"]).tolist() == [200] * 5
    again = synthetic_images(num_clients=7, side=8, num_classes=5, examples_per_client=40, noise=0.05, seed=4)
    assert (jax.jit(again.train.client)(0).examples["x"] != examples["x"][0]).any()


@pytest.mark.parametrize("factory", [models.cnn, models.linear, models.mlp])
def test_models_of_images_take_them(factory):
    """Catches images that have lost their two sides: a convolutional network refused them."""
    data = synthetic_images(num_clients=3, side=8, num_classes=5, examples_per_client=4, test_examples=6)
    model = factory(input_shape=data.input_shape, num_outputs=data.num_outputs)
    loss_fn = models.supervised(model, models.default_loss(data.task))
    params = jax.eval_shape(model.init, jax.random.key(0))[0]
    for examples, rows in ((data.test, 6), (jax.eval_shape(data.train.client, jnp.int32(0)).examples, 4)):
        assert jax.eval_shape(loss_fn, params, examples, None)["loss"].shape == (rows,)


@pytest.mark.parametrize("wrong", [{"classes_per_client": 11}, {"noise": np.nan}, {"side": 0}, {"num_classes": 1}])
def test_wrong_input(wrong):
    """Catches options that no image can have."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        synthetic_images(**wrong)
