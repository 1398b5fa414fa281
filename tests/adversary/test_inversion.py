"""Examples rebuilt from messages: exact where they can be, provably not elsewhere, and then by optimisation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, client, models
from fedjax_sim.adversary import View
from fedjax_sim.types import ClientData
from tests.refusals import refused

RNG = np.random.default_rng(1)
KEY = jax.random.key(2)
X, DELTA = np.array([0.3, -1.2, 2.0, 0.5]), np.array([0.7, 0.0, -0.4])
X2, DELTA2 = np.array([1.0, 0.0, -1.0, 2.0]), np.array([0.1, 0.5, 0.2])


def view_of(messages, broadcast=()):
    """A view of one message."""
    return View(broadcast, jax.tree.map(lambda x: jnp.asarray(x)[None], messages), jnp.ones(1), jnp.zeros(1, jnp.int32))


def layer(inputs, deltas, rate=1.0):
    """The update of an affine layer that saw these inputs [n, in] with these derivatives [n, out]."""
    inputs, deltas = np.atleast_2d(inputs), np.atleast_2d(deltas)
    return {"kernel": -rate * inputs.T @ deltas, "bias": -rate * deltas.sum(0)}


def network(hidden, num_outputs=5, features=12):
    model = models.mlp(input_shape=(features,), num_outputs=num_outputs, hidden=hidden)
    return model.init(KEY)[0], models.supervised(model, models.softmax_cross_entropy)


@functools.partial(jax.jit, static_argnums=1, static_argnames=("rate", "num_steps", "batch_size", "shuffle"))
def sent_by(params, loss_fn, examples, *, rate=0.3, **options):
    """A client's update, by the package's own local SGD."""
    options = {"num_steps": 1} | options
    work = client.local_sgd(loss_fn, optax.sgd(rate), client.work(**options))
    data = ClientData(examples, jnp.ones(len(examples["y"]), bool))
    return work.apply(KEY, params, (), data)[0].update


def drawn(n, features=12, classes=5):
    x = RNG.normal(size=(n, features)).astype(np.float32)
    return {"x": x, "y": np.asarray(RNG.integers(0, classes, n), np.int32)}


# ---- in closed form


@pytest.mark.parametrize("path", ["dens", "dense.kernel", "dense.kernel.x", "dense.bias.x"])
@pytest.mark.parametrize(
    "attack", [adversary.affine_rows, adversary.invert_affine, adversary.gradient_rank, adversary.recover_labels]
)
def test_a_path_that_is_no_layer_is_named(attack, path):
    """Catches NumPy's error about an array whose names are to be listed."""
    two_messages = jax.tree.map(lambda x: jnp.stack([x, x]), {"dense": layer(X, DELTA)})
    with refused("layer", value=path, rule="affine layer"):
        attack(View((), two_messages, jnp.ones(2), jnp.arange(2)), path)


def test_golden_example():
    """J1: x from one output of three, of which one is silent. Catches a division by that one, a transposed kernel."""
    found = adversary.invert_affine(view_of(layer(X, DELTA, rate=0.25)))
    np.testing.assert_allclose(found[0], X, rtol=1e-6)
    rows = np.asarray(adversary.affine_rows(view_of(layer(X, DELTA))))[0]
    np.testing.assert_allclose(rows[[0, 2]], [X, X], rtol=1e-6)
    assert np.isnan(rows[1]).all()
    assert np.isnan(adversary.invert_affine(view_of(layer(X, np.zeros(3))))).all()


def test_mixtures():
    """J3 in float64. Catches rows that are divided by another output's bias."""
    with jax.enable_x64(True):
        rows = adversary.affine_rows(view_of(layer([X, X2], [DELTA, DELTA2])))
        np.testing.assert_allclose(rows[0, 0], [0.3875, -1.05, 1.625, 0.6875], rtol=0, atol=1e-9)
        np.testing.assert_allclose(rows[0, 1], X2, rtol=0, atol=1e-9)  # where only one example reaches the output


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("hidden", [(), (16,), (16, 8, 8)])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_one_example_is_exact(hidden, num_steps):
    """J1 in nets of any depth, also after several steps on one example, and clipped.

    Catches an attack that trusts an output that barely moved; claims that local steps alone protect anybody.
    """
    params, loss_fn = network(hidden)
    name, output = ("hidden_0", "output") if hidden else ("output", "output")
    for seed in range(5):
        one = drawn(1)
        update = jax.tree.map(lambda x: 0.01 * x, sent_by(params, loss_fn, one, num_steps=num_steps))
        view = view_of(update, params)
        found = adversary.invert_affine(view, name)
        np.testing.assert_allclose(found, one["x"], rtol=1e-5, atol=1e-5, err_msg=str(seed))
        assert adversary.gradient_rank(view, name).tolist() == [1]
        assert adversary.recover_labels(view, output).tolist() == [one["y"].tolist()]


@pytest.mark.full
def test_two_examples_are_never_exact():
    """No output gives either example where both reach it: it is off by exactly |d2 / (d1 + d2)| |x2 - x1|.

    And nothing could be: another pair of examples sends the same message of this layer. Catches an attack that is told
    which examples there are.
    """
    deltas = RNG.uniform(0.2, 1.0, (2, 6)) * np.where(np.arange(6) % 2, -1, 1)
    inputs = RNG.normal(size=(2, 9))
    view = view_of(layer(inputs, deltas))
    rows = np.asarray(adversary.affine_rows(view))[0]
    for i in (0, 1):
        off = np.abs(deltas[1 - i] / deltas.sum(0)) * np.linalg.norm(inputs[0] - inputs[1])
        np.testing.assert_allclose(np.linalg.norm(rows - inputs[i], axis=1), off, rtol=1e-4)
        assert off.min() > 0.1
    mixed = np.array([[0.7, 0.3], [0.4, 0.6]])  # rows that sum to one keep the bias' gradient
    others = layer(mixed @ inputs, np.linalg.inv(mixed).T @ deltas)
    assert np.linalg.norm(mixed @ inputs - inputs, axis=1).min() > 0.1
    for name, value in layer(inputs, deltas).items():
        np.testing.assert_allclose(others[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_several_steps_on_several_examples_mix():
    """Batches of one after one another: exact for none. Catches a guarantee for local steps that is too wide."""
    params, loss_fn = network(())  # a softmax: every example reaches every output
    examples = drawn(2)
    update = sent_by(params, loss_fn, examples, num_steps=2, batch_size=1)
    found = adversary.invert_affine(view_of(update, params), "output")
    assert np.linalg.norm(np.asarray(found) - np.asarray(examples["x"]), axis=1).min() > 0.1
    assert adversary.gradient_rank(view_of(update, params), "output").tolist() == [2]


def test_rank():
    """J2. Catches a tolerance without scale, and a rank of one sold as a proof (T22)."""
    for k in (1, 2, 5):
        inputs, deltas = RNG.normal(size=(k, 9)), RNG.normal(size=(k, 7))
        for scale in (1e-6, 1.0, 1e6):
            assert adversary.gradient_rank(view_of(layer(inputs, scale * deltas))).tolist() == [k]
    inputs = RNG.normal(size=(5, 9))
    parallel = np.outer(RNG.normal(size=5), RNG.normal(size=7))
    assert adversary.gradient_rank(view_of(layer(inputs, parallel))).tolist() == [1]
    assert adversary.gradient_rank(view_of(layer(inputs, RNG.normal(size=(5, 1))))).tolist() == [1]
    assert adversary.gradient_rank(view_of(layer(inputs, np.zeros((5, 7))))).tolist() == [0]


def test_labels():
    """J10: always for one example, and for a batch where the model's probabilities are known.

    Catches the sign of an update (the largest gradient is a wrong class), and counts without the learning rate.
    """
    params, loss_fn = network((16,))
    for _ in range(20):
        one = drawn(1)
        update = sent_by(params, loss_fn, one, rate=0.01)
        assert adversary.recover_labels(view_of(update, params), "output").tolist() == [one["y"].tolist()]
    flat = jax.tree.map(jnp.zeros_like, params)
    probabilities = jnp.array([0.5, 0.2, 0.1, 0.1, 0.1])
    biased = flat | {"output": flat["output"] | {"bias": jnp.log(probabilities)}}
    for start, known in ((flat, None), (biased, probabilities)):
        for n in (2, 7, 30):
            examples = drawn(n)
            update = sent_by(start, loss_fn, examples, rate=0.2)
            options = {"num_examples": n, "learning_rate": 0.2, "probabilities": known}
            found = adversary.recover_labels(view_of(update, start), "output", **options)
            assert found.tolist() == [sorted(examples["y"].tolist())]
    with refused("probabilities", rule="5 classes"):
        adversary.recover_labels(view_of(update, start), "output", num_examples=2, probabilities=[0.5, 0.5])


# ---- by optimisation


def sigmoid_loss(params, examples, key):
    out = jax.nn.sigmoid(examples["x"] @ params["kernel"] + params["bias"][None])
    return ((out - examples["t"]) ** 2).sum(-1)


def toy():
    """A linear model with a sigmoid, one example and what its client sends."""
    params = {"kernel": jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32), "bias": jnp.zeros(4)}
    truth = {"x": jnp.asarray(RNG.normal(size=(1, 6)), jnp.float32)}
    target = {"t": jnp.asarray(RNG.uniform(size=(1, 4)), jnp.float32)}
    predict = adversary.local_steps(sigmoid_loss, 0.5)
    return params, truth, target, predict, predict(params, truth, target)


def start(key):
    return {"x": 0.1 * jax.random.normal(key, (1, 6))}


@pytest.mark.full
def test_optimisation():
    """J4 and J5. Catches the sign u = -rate x gradient, by which an objective is no longer zero at the truth."""
    params, truth, target, predict, message = toy()
    rate = 0.5 * jax.grad(lambda p: sigmoid_loss(p, truth | target, None).mean())(params)["kernel"]
    np.testing.assert_allclose(message["kernel"], -rate, rtol=1e-5, atol=1e-7)
    known = jax.tree.map(lambda x: x[None], target)
    for objective in (adversary.squared_distance, adversary.cosine_distance):
        assert float(objective(predict(params, truth, target), message)) == pytest.approx(0, abs=1e-6)
        options = {"objective": objective, "num_steps": 1500, "optimizer": optax.adam(0.03)}
        found = adversary.invert_by_optimization(KEY, view_of(message, params), predict, start, known, **options)
        error = float(((found.guess["x"][0] - truth["x"]) ** 2).sum())
        assert error < (1e-6 if objective is adversary.squared_distance else 1e-3), objective
        assert float(found.objective[0]) < 1e-6
        none = adversary.squared_norm(0.0)
        again = adversary.invert_by_optimization(
            KEY, view_of(message, params), predict, start, known, regularizer=none, **options
        )
        np.testing.assert_allclose(again.guess["x"], found.guess["x"], atol=1e-4)
    pulled = adversary.invert_by_optimization(
        KEY, view_of(message, params), predict, start, known, regularizer=adversary.squared_norm(100.0), **options
    )
    assert float(jnp.abs(pulled.guess["x"]).max()) < 0.1 * float(jnp.abs(truth["x"]).max())


def test_regularizers():
    """Catches a total variation over the examples' axis, and of flat images."""
    stripes = jnp.tile(jnp.array([0.0, 1.0, 0.0, 1.0]), (3, 4, 1))
    assert float(adversary.total_variation(2.0)({"x": stripes})) == pytest.approx(2.0)
    assert float(adversary.total_variation(2.0, (4, 4))({"x": stripes.reshape(3, 16)})) == pytest.approx(2.0)
    assert float(adversary.total_variation(1.0)({"x": jnp.arange(3.0)[:, None, None] + jnp.zeros((3, 4, 4))})) == 0
    assert float(adversary.squared_norm(3.0)({"x": 2 * stripes})) == pytest.approx(6.0)


@pytest.mark.full
def test_best_restart():
    """Catches a restart that is picked at random, diverged ones that win, and rows that share their starts."""

    def predict(broadcast, guess, known):
        return jnp.cos(guess["a"])[0] + jnp.where(guess["a"][0] > 6, jnp.nan, 0.0)

    def anywhere(key):
        return {"a": jax.random.uniform(key, (1,), minval=-9.0, maxval=9.0)}

    view = View((), jnp.array([0.2, 0.2]), jnp.ones(2), jnp.arange(2))
    options = {"num_steps": 1, "optimizer": optax.sgd(0.0)}
    few, many = (
        adversary.invert_by_optimization(KEY, view, predict, anywhere, num_restarts=n, **options) for n in (2, 200)
    )
    assert (many.objective < 1e-3).all() and (many.objective <= few.objective).all()
    assert np.isfinite(many.guess["a"]).all() and many.guess["a"][0] != many.guess["a"][1]
    lost = adversary.invert_by_optimization(
        KEY, view, lambda broadcast, guess, known: jnp.nan * guess["a"][0], anywhere, **options
    )
    assert np.isinf(lost.objective).all()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("options", [{"num_steps": 1}, {"num_steps": 3}, {"num_steps": 4, "batch_size": 2}])
def test_simulated_client(options):
    """An attacker's client is the package's own. Catches batches that begin anew, and a sum in place of a mean."""
    params, loss_fn = network((8,))
    examples = drawn(5 if "batch_size" in options else 3)
    predict = jax.jit(adversary.local_steps(loss_fn, 0.3, **options))
    found = predict(params, {"x": examples["x"]}, {"y": examples["y"]})
    expected = sent_by(params, loss_fn, examples, shuffle=False, **options)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_unrolled_steps():
    """Two examples over three steps of a batch each, which no closed form inverts, by simulating the steps.

    Catches an optimisation against one gradient where several were taken.
    """
    rng = np.random.default_rng(5)
    params = {"kernel": jnp.asarray(rng.normal(size=(5, 8)), jnp.float32), "bias": jnp.zeros(8)}
    truth = {"x": jnp.asarray(rng.normal(size=(2, 5)), jnp.float32)}
    target = {"t": jnp.asarray(rng.uniform(size=(2, 8)), jnp.float32)}
    predict = adversary.local_steps(sigmoid_loss, 1.0, num_steps=3, batch_size=1)
    view = view_of(predict(params, truth, target), params)
    known = jax.tree.map(lambda x: x[None], target)
    errors = []
    for simulated in (predict, adversary.local_steps(sigmoid_loss, 3.0)):
        found = adversary.invert_by_optimization(
            KEY, view, simulated, lambda key: {"x": 0.1 * jax.random.normal(key, (2, 5))}, known,
            num_steps=2000, optimizer=optax.adam(0.03),
        )  # fmt: skip
        errors.append(float(((found.guess["x"][0] - truth["x"]) ** 2).sum()))
    assert errors[0] < 1e-4 < 0.01 < errors[1]
