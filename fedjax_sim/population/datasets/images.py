"""This module draws synthetic images of any size: noisy copies of class prototypes, with a few classes per client."""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.population import generated
from fedjax_sim.population.seeds import generated_client_key, seed_words
from fedjax_sim.prng import below, stream
from fedjax_sim.types import Array, ClientData
from fedjax_sim.validate import Integer, NonNegative, NonNegativeInt, PositiveInt

PROTOTYPE_SIDE = 7  # a prototype is a square of PROTOTYPE_SIDE x PROTOTYPE_SIDE random levels, enlarged


@validate.named_arguments
def synthetic_images(
    *,
    num_clients: PositiveInt = 1_000_000,
    side: Annotated[int, Integer(1, 4096)] = 28,
    num_classes: Annotated[int, Integer(2, 65536)] = 10,
    classes_per_client: int = 2,
    examples_per_client: PositiveInt = 20,
    noise: NonNegative = 0.5,
    test_examples: PositiveInt = 1_000,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Draws images as class prototypes with Gaussian noise. Each client has images of a few classes only.

    A client is a pure function of its id, so 10^9 clients take no memory. With 28 x 28 pixels and 10 classes a linear
    model has the 7,850 parameters of logistic regression on MNIST.

    Args:
      num_clients: N, up to 2^31 - 1.
      side: number of pixels along each side.
      num_classes: 2 or more.
      classes_per_client: number of different classes of a client, 1 to num_classes. They are drawn uniformly for each
        client, and the class of each image is drawn uniformly from them.
      examples_per_client: n.
      noise: standard deviation >= 0 of a pixel, before pixels are clipped to [0, 1].
      test_examples: number of test rows. Counts of classes among them differ by one at most.
      seed: of all draws.

    Returns: `FederatedData` with x [n, side, side] in [0, 1], one channel.

    Guarantees: pixels, class counts and noise follow this distribution
    (tests/population/datasets/test_images.py::test_images_follow_their_law), and models of images take them
    (::test_models_of_images_take_them).

    >>> data = synthetic_images(num_clients=1_000_000_000, side=4, examples_per_client=3)
    >>> jax.jit(data.train.client)(np.int32(999_999_999)).examples["x"].shape, data.input_shape, data.num_outputs
    ((3, 4, 4), (4, 4), 10)
    """
    validate.integer("classes_per_client", classes_per_client, 1, num_classes)
    rng = np.random.default_rng([seed, 0])
    cells = np.arange(side) * PROTOTYPE_SIDE // side  # the cell of the grid in which each pixel lies
    # Each prototype is a coarse random pattern, enlarged to the size of an image.
    prototypes = rng.uniform(size=(num_classes, PROTOTYPE_SIDE, PROTOTYPE_SIDE))[:, cells][:, :, cells]
    parameters = {
        "prototypes": prototypes.astype(np.float32),
        "noise": np.float32(noise),
        "mask": np.ones(examples_per_client, bool),
        "own": np.arange(classes_per_client, dtype=np.int32),
        "seed": seed_words(seed, 1),
    }
    y = np.arange(test_examples, dtype=np.int32) % num_classes
    x = np.clip(prototypes[y] + noise * rng.normal(size=(test_examples, side, side)), 0, 1).astype(np.float32)
    train = generated(num_clients, _image_client, parameters, learned=())
    test = {"x": x, "y": y}
    return FederatedData(
        train=train,
        test=test,
        held_out=None,
        input_shape=(side, side),
        num_outputs=num_classes,
        task="classification",
        name="synthetic_images",
    )


def _image_client(parameters: Any, id: Array) -> ClientData:
    """Generates a client of `synthetic_images`."""
    key = generated_client_key(parameters, id)
    mask = jnp.asarray(parameters["mask"])
    prototypes = jnp.asarray(parameters["prototypes"])
    # The parameter "own" carries the number of classes per client as its shape, for a shape is static.
    classes = jax.random.permutation(stream(key, "classes"), prototypes.shape[0])[: parameters["own"].shape[0]]
    y = classes[below(stream(key, "labels"), classes.shape[0], mask.shape)].astype(jnp.int32)
    noise = jax.random.normal(stream(key, "noise"), (*mask.shape, *prototypes.shape[1:]))
    return ClientData({"x": jnp.clip(prototypes[y] + parameters["noise"] * noise, 0, 1), "y": y}, mask)
