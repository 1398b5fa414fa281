"""linear, mlp and cnn as whole models."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine, tree
from fedjax_sim.models import cnn, gru, linear, logistic, lstm, mlp, softmax_cross_entropy, supervised, transformer

KEY = jax.random.key(0)
IMAGE = {"input_shape": (9, 8, 2), "num_outputs": 3}
SMALL_CNN = cnn(**IMAGE, channels=(4, 5), hidden=(6,))


@functools.cache
def applied(model):
    return jax.jit(lambda params, x: model.apply(params, (), x, None, False)[0])


@functools.cache
def parameters(model):
    return jax.jit(model.init)(KEY)[0]


def dimension(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, KEY)[0]))


def test_parameter_counts():
    """Catches a missing bias, a wrong flattened size and a wrong order of layers: counts are the papers' own."""
    assert dimension(mlp(input_shape=(60,), num_outputs=10)) == 60 * 128 + 128 + 1290
    assert dimension(mlp(input_shape=(28, 28), num_outputs=10, hidden=(200, 200))) == 199_210
    assert (
        dimension(cnn(input_shape=(28, 28), num_outputs=10, channels=(32, 64), kernel_size=5, hidden=(512,)))
        == 1_663_370
    )
    leaf = cnn(input_shape=(28, 28, 1), num_outputs=62, channels=(32, 64), kernel_size=5, hidden=(2048,))
    assert dimension(leaf) == 6_603_710  # LEAF's FEMNIST network
    benchmark = {"channels": (32, 64), "padding": "VALID", "pool_every": 2, "hidden": (128,)}
    assert dimension(cnn(input_shape=(28, 28), num_outputs=62, **benchmark)) == 1_206_590  # EMNIST of Reddi et al.
    assert dimension(cnn(input_shape=(32, 32, 3), num_outputs=10, **benchmark)) == 1_626_442  # pfl-research's CIFAR-10
    assert (
        dimension(cnn(input_shape=(9, 8, 2), num_outputs=3)) == 9 * 2 * 16 + 16 + 9 * 16 * 32 + 32 + 2 * 2 * 32 * 3 + 3
    )
    assert dimension(linear(input_shape=(28, 28), num_outputs=62)) == 48_670
    assert logistic is linear
    assert all((leaf == 0).all() for leaf in linear(input_shape=(3,), num_outputs=2).init(KEY)[0].values())


class LinenNetwork(nn.Module):
    channels: tuple
    hidden: tuple
    num_outputs: int
    padding: str = "SAME"
    pool_every: int = 1

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate(self.channels):
            x = nn.relu(nn.Conv(width, (3, 3), padding=self.padding, name=f"conv_{i}")(x))
            if (i + 1) % self.pool_every == 0:
                x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden):
            x = nn.relu(nn.Dense(width, name=f"hidden_{i}")(x))
        return nn.Dense(self.num_outputs, name="output")(x)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("kind", ["mlp", "cnn", "cnn of pairs"])
def test_mlp_and_cnn_equal_linen(kind):
    """Catches layers out of order, a missing ReLU, an activation on the output, a permuted flattening, a lost pool."""
    pairs = {"padding": "VALID", "pool_every": 2}
    model, channels, options = {
        "mlp": (mlp(**IMAGE, hidden=(6,)), (), {}),
        "cnn": (SMALL_CNN, (4, 5), {}),
        "cnn of pairs": (cnn(**IMAGE, channels=(4, 5), hidden=(6,), **pairs), (4, 5), pairs),
    }[kind]
    params = jax.tree.map(lambda a: a + 0.1, parameters(model))
    x = jax.random.normal(KEY, (4, 9, 8, 2))

    def values(apply):
        def scalar(params):
            out = apply(params)
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

        return jax.jit(jax.value_and_grad(scalar, has_aux=True))(params)

    oracle = LinenNetwork(channels, (6,), 3, **options)
    expected = values(lambda params: oracle.apply({"params": params}, x))
    got = values(lambda params: model.apply(params, (), x, None, False)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


MODELS = {
    "linear": (linear(**IMAGE), (9, 8, 2)),
    "mlp": (mlp(**IMAGE), (9, 8, 2)),
    "cnn": (SMALL_CNN, (9, 8, 2)),
    "gru": (gru(num_outputs=5, hidden=4), (6,)),
    "lstm": (lstm(num_outputs=5, hidden=4), (6,)),
    "transformer": (transformer(num_outputs=5, features=8, num_blocks=1), (6,)),
}


def inputs(shape, *lead):
    if len(shape) == 1:
        return jax.random.randint(KEY, (*lead, *shape), -1, 5)
    return jax.random.normal(KEY, (*lead, *shape))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", MODELS)
def test_clients_with_own_weights_equal_a_loop(name):
    """Catches a layer that is wrong, or mixes clients, once weights carry a client axis (values and gradients)."""
    model, shape = MODELS[name]
    params = jax.tree.map(
        lambda a: (a[None] + 0.1) * jnp.array([1.0, -0.5, 2.0]).reshape(-1, *[1] * a.ndim), parameters(model)
    )
    x = inputs(shape, 3, 2)

    def scalar(params, x):
        out, state = model.apply(params, (), x, KEY, True)
        assert state == ()
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    one = jax.jit(jax.value_and_grad(scalar, has_aux=True))
    together = jax.jit(jax.vmap(jax.value_and_grad(scalar, has_aux=True)))(params, x)
    for i in range(3):
        alone = one(tree.take_rows(params, i), x[i])
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=2e-5), together, alone)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["mlp", "cnn", "gru"])
def test_examples_do_not_mix(name):
    """Catches statistics over the batch: another row, NaN even, must not change this row's output."""
    model, shape = MODELS[name]
    params = parameters(model)
    x = inputs(shape, 2)
    other = x.at[1].set(99 if x.dtype == jnp.int32 else jnp.nan)
    apply = functools.partial(applied(model), params)
    np.testing.assert_array_equal(apply(x)[0], apply(other)[0])
    assert np.isnan(apply(other)[1]).any()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["mlp", "cnn", "gru", "lstm", "transformer"])
def test_half_precision_parameters_and_integer_images(name):
    """Catches a float32 constant that promotes bfloat16, and uint8 pixels that wrap instead of being cast."""
    model, shape = MODELS[name]
    params = parameters(model)
    x = inputs(shape, 2) if len(shape) == 1 else jnp.full((2, *shape), 200, jnp.uint8)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert jax.eval_shape(applied(model), half, x).dtype == jnp.bfloat16
    if len(shape) == 3:
        np.testing.assert_array_equal(applied(model)(params, x), applied(model)(params, x.astype(jnp.float32)))


def test_methods_of_cnn_agree():
    """Catches a lowering that does not reach the layer."""
    native, im2col = (cnn(**IMAGE, channels=(4, 5), hidden=(6,), method=method) for method in ("native", "im2col"))
    params = parameters(native)
    x = inputs((9, 8, 2), 2)
    out = [applied(m) for m in (native, im2col)]
    np.testing.assert_allclose(out[0](params, x), out[1](params, x), atol=1e-5)
    assert "convolution" in out[0].lower(params, x).as_text() and "convolution" not in out[1].lower(params, x).as_text()


def test_initialisation_needs_the_key_and_layers_differ():
    """Catches a fixed seed, and one key shared by layers of equal shape."""
    model = mlp(input_shape=(4,), num_outputs=4, hidden=(4, 4))
    a, b = (model.init(jax.random.key(seed))[0] for seed in (0, 1))
    assert not np.allclose(a["hidden_0"]["kernel"], b["hidden_0"]["kernel"])
    assert not np.allclose(a["hidden_0"]["kernel"], a["hidden_1"]["kernel"])


def test_one_step_lowers_the_loss_and_gradients_are_finite_at_huge_inputs():
    """Catches a wrong sign anywhere between loss and layer, and an overflow that spoils the gradient."""
    model = mlp(input_shape=(4,), num_outputs=3, hidden=(8,))
    loss_fn = supervised(model, softmax_cross_entropy)
    params = parameters(model)
    examples = {"x": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), "y": np.arange(6) % 3}
    step = jax.jit(jax.value_and_grad(lambda p, e: loss_fn(p, e, KEY)["loss"].mean()))
    before, g = step(params, examples)
    after, _ = step(jax.tree.map(lambda p, g: p - np.float32(0.1) * g, *jax.device_get((params, g))), examples)
    assert after < before
    _, g = step(params, {**examples, "x": examples["x"] * np.float32(1e30)})
    assert jax.jit(engine.all_finite)(g)


FLAT = "image shape"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cnn(input_shape=(64,), num_outputs=2),
            rf"input_shape: expected the shape of an image, got \(64,\).*{FLAT}",
        ),
        (lambda: cnn(input_shape=64, num_outputs=2), f"input_shape: expected a tuple of integers.*{FLAT}"),
        (lambda: cnn(input_shape=(2, 8), num_outputs=2), "channels: expected few enough convolutions and 2 x 2 pools"),
        (lambda: cnn(input_shape=(4, 8), num_outputs=2, padding="VALID"), "few enough convolutions and 2 x 2 pools"),
        (lambda: cnn(input_shape=(8, 8), num_outputs=2, pool_every=3), "pool_every: expected a divisor of the 2 conv"),
        (lambda: cnn(input_shape=(8, 8), num_outputs=2, padding="valid"), "padding: expected one of 'SAME', 'VALID'"),
        (lambda: cnn(input_shape=(8, 8), num_outputs=2, kernel_size=2.5), "kernel_size: expected an integer"),
        (lambda: cnn(input_shape=(8, 8), num_outputs=2, method="gemm"), "method: expected one of"),
        (lambda: mlp(input_shape=(4,), num_outputs=True), "num_outputs: expected an integer"),
        (lambda: mlp(input_shape=(4,), num_outputs=2, hidden=(128, 0)), r"hidden\[1\]: expected an integer in \[1,"),
        (lambda: mlp(input_shape=(4,), num_outputs=2, hidden=float("nan")), "hidden: expected a tuple"),
        (lambda: linear(input_shape=(-4,), num_outputs=2), r"input_shape\[0\]: expected an integer"),
        (
            lambda: MODELS["mlp"][0].apply(MODELS["mlp"][0].init(KEY)[0], (), jnp.zeros((2, 9, 8)), None, False),
            r"x: expected shape \[n, 9, 8, 2\]",
        ),
    ],
)
def test_error_texts(call, message):
    """Catches bad options that would surface as a shape error inside a compiled round."""
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.full
def test_import_is_light():
    """Catches flax imported, or a backend initialised, by importing the subpackage."""
    code = (
        "import sys, fedjax_sim.models, jax._src.xla_bridge as b;sys.exit('flax' in sys.modules or bool(b._backends))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
