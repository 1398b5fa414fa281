"""Transfer: models of which clients train a part."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import InvalidType, algorithms, population, sampling, tree
from fedjax_sim.models import cnn, freeze, from_fn, lora, mlp, softmax_cross_entropy, squared_error, supervised
from tests.refusals import refused

KEY = jax.random.key(0)


@pytest.mark.default_rows("mlp")
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mlp(input_shape=(4,), num_outputs=3, hidden=(5,)), (6, 4)),
        (cnn(input_shape=(8, 8, 1), num_outputs=3, channels=(2, 2)), (6, 8, 8, 1)),
    ],
    ids=["mlp", "cnn"],
)
def test_it_is_the_model(model, shape):
    """Catches leaves that are swapped or drawn from another key, and a gradient with a term missing."""
    part = freeze(model, trained=["output"])
    whole, _ = jax.jit(model.init)(KEY)
    params, state = jax.jit(part.init)(KEY)
    x, y = jax.random.normal(KEY, shape), jnp.arange(6) % 3
    outputs = [jax.jit(lambda p, s, of=of: of.apply(p, s, x, None, False)[0]) for of in (model, part)]
    np.testing.assert_array_equal(outputs[0](whole, ()), outputs[1](params, state))

    @jax.jit
    def gradients_of(state, *starts):
        losses = [supervised(model, softmax_cross_entropy)]
        losses.append(supervised(part, softmax_cross_entropy, frozen_state=state))
        return [
            jax.grad(lambda at, loss=loss: loss(at, {"x": x, "y": y}, None)["loss"].mean())(at)
            for loss, at in zip(losses, starts, strict=True)
        ]

    gradients = gradients_of(state, whole, params)
    assert set(gradients[1]) == {"output"}
    for name, found in gradients[1]["output"].items():
        np.testing.assert_allclose(found, gradients[0]["output"][name], rtol=1e-6)


def test_frozen_leaves_stay_and_are_in_no_message():
    """Catches frozen leaves that are broadcast, sent, counted as bytes or changed."""
    part = freeze(mlp(input_shape=(4,), num_outputs=3, hidden=(5,)), trained=["output", "hidden_0/bias"])
    params, state = jax.jit(part.init)(KEY)
    rows = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    clients = population.stored({"x": rows[0], "y": rows[1, :, :3]}, np.arange(7))
    loss_fn = supervised(part, squared_error, frozen_state=state)
    algorithm = algorithms.fedavg(loss_fn, sampling.full(6), optax.sgd(0.5), num_steps=2, batch_size=1)
    before = tree.sha256_of(state).hexdigest()
    last, info = jax.jit(algorithm.step)(KEY, algorithm.init(KEY, params, clients), clients)
    assert jax.tree.map(jnp.shape, algorithm.params(last)) == jax.tree.map(jnp.shape, params)
    assert tree.sha256_of(state).hexdigest() == before
    assert info["uplink_bytes"].total() == 6 * tree.num_bytes(params)
    pair = jax.device_get((algorithm.params(last), params))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), *pair)))


def task(num_rows, seed):
    """Rows of 50 features, whose label depends on 4 directions; the map from these to the label differs by seed."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 50)).astype(np.float32)
    directions = np.random.default_rng(99).normal(size=(50, 4)) / np.sqrt(50)
    return {"x": x, "y": np.argmax(np.tanh(3 * x @ directions) @ rng.normal(size=(4, 5)), 1).astype(np.int32)}


@pytest.mark.full
def test_transfer():
    """A8: 20 examples of a new task at 4 clients, whose labels depend on the same directions as the source's.

    The loss on unseen rows is lower, paired over 20 draws of the examples, p < 0.01.

    Catches a body that is drawn anew, and one that is trained along.
    """
    source, target = task(4000, 1), task(1000, 2)
    model = mlp(input_shape=(50,), num_outputs=5, hidden=(32,))
    whole_loss = supervised(model, softmax_cross_entropy)
    large = algorithms.fedavg(whole_loss, sampling.full(10), optax.sgd(0.2), num_steps=20, batch_size=20)
    clients = population.stored(source, np.arange(0, 4001, 400))
    pretrained = trained(large, model.init(KEY)[0], clients, 100)
    part = freeze(model, trained=["output"])
    drawn, state = part.init(jax.random.key(1))
    frozen = state | {"frozen": {"hidden_0": pretrained["hidden_0"]}}
    few = sampling.full(4), optax.sgd(0.2)
    ways = {
        "transferred": (supervised(part, softmax_cross_entropy, frozen_state=frozen), drawn),
        "from scratch": (whole_loss, model.init(jax.random.key(1))[0]),
    }
    losses = {}
    for name, (loss_fn, params) in ways.items():
        algorithm = algorithms.fedavg(loss_fn, *few, num_steps=5, batch_size=5)

        @jax.jit
        def loss_after_training(clients, others, algorithm=algorithm, params=params, loss_fn=loss_fn):
            return loss_fn(trained(algorithm, params, clients, 40), others, None)["loss"].mean()

        losses[name] = [loss_after_training(*split(target, seed)) for seed in range(20)]
    gained = np.subtract(losses["from scratch"], losses["transferred"])
    assert stats.ttest_1samp(gained, 0, alternative="greater").pvalue < 0.01


def split(examples, seed):
    """Four clients of five rows, and all other rows."""
    order = np.random.default_rng(seed).permutation(len(examples["y"]))
    few, others = ({name: x[rows] for name, x in examples.items()} for rows in (order[:20], order[20:]))
    return population.stored(few, [0, 5, 10, 15, 20]), others


def trained(algorithm, params, clients, num_rounds):
    """The model after so many rounds."""

    def step(index, state):
        return algorithm.step(jax.random.fold_in(KEY, index), state, clients)[0]

    return algorithm.params(jax.lax.fori_loop(0, num_rounds, step, algorithm.init(KEY, params, clients)))


def test_error_texts():
    """Catches a path that chooses nothing, and a model of which all or nothing is trained."""
    model = mlp(input_shape=(4,), num_outputs=3, hidden=(5,))
    with refused("trained", value="outputs", hint="'output'"):
        freeze(model, trained=["outputs"])
    with refused("trained", value="output", hint="['output']", kind=InvalidType):
        freeze(model, trained="output")
    with refused("trained", rule="at least one"):
        freeze(model, trained=[])
    with refused("trained", rule="frozen"):
        freeze(model, trained=["hidden_0", "output"])
    with refused("model", rule="nested dicts", kind=InvalidType):
        freeze(from_fn(lambda key: jnp.zeros(3), lambda params, x: x), trained=["output"])
    with pytest.raises(TypeError, match="model: expected a Model"):
        freeze(None, trained=["output"])
    assert lora(model, rank=1, trained=["output"]).init(KEY)[1]["frozen"].keys() == {"hidden_0"}
