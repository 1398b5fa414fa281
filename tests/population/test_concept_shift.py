"""Concepts by cluster: exact changes, the same for a client's training and test rows, and clusters that are found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling
from fedjax_sim.population.federated_data import FederatedData
from tests.refusals import refused

CLASSES, SIZE = 3, 12


def blobs(rows=30):
    """Three classes around the corners of a triangle, with an entry that is always 1."""
    rng = np.random.default_rng(0)
    corners = 3 * np.array([[1, 0], [-0.5, 0.87], [-0.5, -0.87]])

    def client(_):
        y = rng.integers(0, CLASSES, rows).astype(np.int32)
        return {"x": (corners[y] + rng.normal(size=(rows, 2)) / 2).astype(np.float32), "y": y}

    clients = [client(i) for i in range(SIZE)]
    return FederatedData(
        train=population.from_clients(clients),
        test=clients[0],
        held_out=None,
        input_shape=(2,),
        num_outputs=CLASSES,
        task="classification",
    )


def examples(people, id):
    data = people.client(jnp.int32(id))
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(data.mask)], data.examples)


@pytest.mark.parametrize("order", ["before", "after"])
def test_labels_are_permuted(order):
    """Catches a map that is no permutation, or differs between a client's training and test rows, and a shift that
    depends on the order of the wrappers."""
    plain = population.with_local_test(blobs())
    if order == "before":
        data = population.with_local_test(population.with_permuted_labels(blobs(), num_clusters=3, seed=1))
    else:
        data = population.with_permuted_labels(plain, num_clusters=3, seed=1)
    clusters = population.clusters_of(data.train)
    np.testing.assert_array_equal(population.clusters_of(data.local_test), clusters)
    assert np.bincount(clusters).tolist() == [4, 4, 4]
    maps = {}
    for i, cluster in enumerate(clusters):
        for people, clean in ((data.train, plain.train), (data.local_test, plain.local_test)):
            found, true = examples(people, i), examples(clean, i)
            np.testing.assert_array_equal(found["x"], true["x"])
            for old, new in zip(true["y"].tolist(), found["y"].tolist(), strict=True):
                assert maps.setdefault(cluster, {}).setdefault(old, new) == new
    assert all(sorted(x.values()) == [0, 1, 2] for x in maps.values())
    assert maps[0] == {0: 0, 1: 1, 2: 2} and len({tuple(sorted(x.items())) for x in maps.values()}) == 3
    np.testing.assert_array_equal(data.test["y"], plain.test["y"])
    other = population.with_permuted_labels(plain, num_clusters=3, seed=2)
    assert (population.clusters_of(other.train) != clusters).any()
    assert population.clusters_of(plain.train) is None


@pytest.mark.parametrize("channels", [(), (3,)])
def test_images_are_turned(channels):
    rng = np.random.default_rng(1)
    clients = [{"x": rng.normal(size=(i + 1, 4, 4, *channels)).astype(np.float32), "y": np.zeros(i + 1, np.int32)}
               for i in range(9)]  # fmt: skip
    data = FederatedData(
        train=population.from_clients(clients),
        test=clients[0],
        held_out=None,
        input_shape=(4, 4, *channels),
        num_outputs=2,
        task="classification",
    )
    turned = population.with_rotated_images(data)
    clusters = population.clusters_of(turned.train)
    assert set(clusters) == {0, 1, 2, 3}
    for i, cluster in enumerate(clusters):
        np.testing.assert_array_equal(examples(turned.train, i)["x"], np.rot90(clients[i]["x"], cluster, (1, 2)))
    assert turned.train.sizes.tolist() == list(range(1, 10))


@pytest.mark.full  # the algorithms have their laws in tests/algorithms
@pytest.mark.parametrize("name", ["ifca", "clustered_by_updates"])
def test_clusters_are_found(name):
    """Softmax regression on three blobs with permuted labels: the true clusters but for their numbers, and a model for
    each that is right on its own labels. From five of ten starts IFCA gives one model to two clusters instead.
    """
    data = population.with_permuted_labels(blobs(), num_clusters=3, seed=1)
    model = models.linear(input_shape=(2,), num_outputs=CLASSES)
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    make = {
        "ifca": lambda *args: algorithms.ifca(*args, num_clusters=3, spread=1.0, start_seed=1, num_steps=5),
        "clustered_by_updates": lambda *args: algorithms.clustered_by_updates(
            *args, max_clusters=3, mean_norm=0.3, client_norm=0.5, num_steps=5
        ),
    }[name]
    algorithm = make(loss_fn, sampling.full(SIZE), optax.sgd(0.3))
    params = {"kernel": 0.3 * jax.random.normal(jax.random.key(2), (2, 3)), "bias": jnp.zeros(3)}
    state, step = jax.jit(algorithm.init)(jax.random.key(0), params, data.train), jax.jit(algorithm.step)
    for round in range(25):
        state, _ = step(jax.random.key(round), state, data.train)
    found = jax.jit(algorithm.evaluated.personal)(state, jnp.arange(SIZE))
    true = population.clusters_of(data.train)
    kernels = np.asarray(found["kernel"])
    of_cluster = [np.flatnonzero((kernels == kernels[i]).all((1, 2))) for i in range(SIZE)]
    for i in range(SIZE):
        np.testing.assert_array_equal(of_cluster[i], np.flatnonzero(true == true[i]))
        own = examples(data.train, i)
        outputs = own["x"] @ kernels[i] + np.asarray(found["bias"])[i]
        assert (outputs.argmax(1) == own["y"]).mean() > 0.95


def test_what_is_refused():
    data = blobs()
    shifted = population.with_permuted_labels(data)
    with refused("data", rule="without clusters"):
        population.with_permuted_labels(shifted)
    with refused("data", rule="not poisoned"):
        population.with_permuted_labels(population.label_flip(data, clients=[1]))
    with refused("num_clusters", value=7, rule="[2, 6]"):
        population.with_permuted_labels(data, num_clusters=7)
    with pytest.raises(ValueError, match="data: expected square images"):
        population.with_rotated_images(data)
    with pytest.raises(ValueError, match="task"):
        population.with_permuted_labels(data._replace(task="regression"))
    with pytest.raises(TypeError, match="data: expected a FederatedData"):
        population.with_rotated_images(data.train)
