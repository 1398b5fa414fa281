"""Ghost norms: the clipped sum of per-example gradients of which most were never formed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import client, models
from fedjax_sim.client.clipping import _sum_of_squares, clipped_sum
from fedjax_sim.client.ghost import products
from fedjax_sim.types import ClientData
from tests.laws import cases
from tests.refusals import refused

KEY = jax.random.key(4)
CLIP = 0.5
LIMIT = 1 - 1e-5  # to which a clip norm of 1 cuts
ROWS, INPUTS, OUTPUTS = 7, 12, 3


def perceptron(params, x):
    """Two dense layers, one with its kernel on the left and without a bias."""
    hidden = jax.nn.relu(x @ params["first"] + params["bias"][None])
    return (params["second"] @ hidden.T).T


def noisy(params, x, key=None, train=False):
    """As `perceptron`, with noise from each example's own key, compiled apart."""
    x = x if key is None else x + jax.random.normal(key, x.shape)
    return jax.jit(perceptron)(params, x)


def start(key=KEY):
    first, second = (jax.random.normal(jax.random.fold_in(key, i), (6, 12)) for i in range(2))
    return {"first": first.T, "bias": jnp.full(6, 0.1), "second": second[:, :OUTPUTS].T}


def linen():
    import flax.linen as nn

    net = nn.Sequential([nn.Dense(6), nn.relu, nn.Dense(OUTPUTS)])
    return models.from_linen(net, jax.ShapeDtypeStruct((1, INPUTS), jnp.float32))


def cnn():
    net = models.cnn(input_shape=(4, 3), num_outputs=OUTPUTS, channels=(4,), hidden=(5,))
    return models.from_fn(
        lambda key: net.init(key)[0],
        lambda params, x: net.apply(params, (), x.reshape(-1, 4, 3), None, False)[0],
    )


MODELS = {  # a model, how many kernels it meets examples with in one product, and a clip norm that cuts some of them
    "perceptron": (lambda: models.from_fn(lambda key: start(), perceptron), 2, 1.0),
    "noisy": (lambda: models.from_fn(lambda key: start(), noisy), 2, 1.0),
    "mlp": (lambda: models.mlp(input_shape=(INPUTS,), num_outputs=OUTPUTS, hidden=(6, 5)), 3, 2.0),
    "linear": (lambda: models.linear(input_shape=(INPUTS,), num_outputs=OUTPUTS), 1, 1.0),
    "linen": (linen, 2, 1.0),
    "cnn": (cnn, 2, 1.0),  # its convolution's gradients are held
}


def batch(scale=1.0, rows=ROWS):
    """Rows of growing length; the last is masked and NaN, the one before it real and infinite."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, INPUTS)) * np.geomspace(0.01, scale, rows)[:, None]
    x[-2], x[-1] = np.inf, np.nan
    y = rng.integers(0, OUTPUTS, rows)
    return ClientData({"x": jnp.array(x, jnp.float32), "y": jnp.array(y, jnp.int32)}, jnp.arange(rows) < rows - 1)


def by_hand(params, examples, labels, clip_norm):
    """The clipped sum for `perceptron` under a cross entropy, example by example in float64."""
    first, bias, second = (np.float64(params[name]) for name in ("first", "bias", "second"))
    total = {name: np.zeros(np.shape(x)) for name, x in params.items()}
    for x, y in zip(np.float64(examples), np.asarray(labels), strict=True):
        if not np.isfinite(x).all():
            continue
        hidden = np.maximum(x @ first + bias, 0)
        logits = second @ hidden
        delta = np.exp(logits - logits.max())
        delta = delta / delta.sum() - np.eye(OUTPUTS)[y]
        before = (second.T @ delta) * (hidden > 0)
        gradient = {"first": np.outer(x, before), "bias": before, "second": np.outer(delta, hidden)}
        length = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, g in gradient.items():
            total[name] += g * min(1, clip_norm / length)
    return total


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(MODELS, ["cnn", "noisy"]))
def test_sums_agree(name):
    """The sum and the metrics are those of `vmap(grad)`, and of float64 by hand, also in microbatches.

    One row is infinite, one masked and NaN. Catches a norm or a kernel transposed, a layer left out of the norm, keys
    that examples share, and a NaN times zero.
    """
    make, kernels, clip_norm = MODELS[name]
    model, data = make(), batch(scale=30.0)
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    params = model.init(KEY)[0]
    leaves, structure = jax.tree.flatten(params)
    first = jax.tree.map(lambda x: x[:1], data.examples)
    found = products(lambda p, x: loss_fn(structure.unflatten(p), x, KEY)["loss"].sum(), leaves, first)[0]
    assert len(found) == kernels

    @jax.jit
    def sums(params, data):
        ways = [("vmap", None), ("auto", None)] + [("ghost", 3)] * (name in ("noisy", "perceptron"))
        return [
            clipped_sum(loss_fn, params, data, KEY, clip_norm=clip_norm, gradients=way, microbatch_size=size)
            for way, size in ways
        ]

    (wanted, told), *others = sums(params, data)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(wanted))
    assert 0 < float(told["clipped_share"].total) < float(told["clipped_share"].weight) == ROWS - 2
    for given, said in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), given, wanted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), said, told)
        if name in ("perceptron", "noisy"):
            shifts = [jax.random.normal(jax.random.fold_in(KEY, i), (INPUTS,)) for i in range(ROWS)]
            shifts = np.asarray(shifts) * (name == "noisy")
            hand = by_hand(params, data.examples["x"] + shifts, data.examples["y"], LIMIT)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-6), given, hand)


def outer(params, examples, key):
    """A loss whose gradient is the outer product of two vectors of the example."""
    a, b = examples
    return ((a @ params) * b).sum(-1)


@pytest.mark.optimised
def test_extremes():
    """Both vectors from 1e-38 to 1e38: at most C (1 + 1e-6), as it is where it is short, C where it is long, never NaN.

    Catches the square of a vector that overflows, or underflows beside one that makes up for it, and a norm below the
    true one.
    """
    rng = np.random.default_rng(0)
    scales = 10.0 ** np.array([-45, -38, -30, -12, -3, 0, 1, 12, 18, 30, 37.5])
    a, b = (np.clip(rng.normal(size=(len(scales), 1, n)), -3, 3) for n in (4100, 34))
    pairs = [np.float32(a * scales[:, None, None]), np.float32(b * scales[:, None, None])]

    @jax.jit
    def alone(a, b, clip_norm=CLIP):
        data = ClientData((a, b), jnp.ones(1, bool))
        return clipped_sum(outer, jnp.zeros((4100, 34)), data, KEY, clip_norm=clip_norm, gradients="ghost")[0]

    for i, power in enumerate(np.log10(scales)):
        for j, other in enumerate(np.log10(scales)):
            x, y = np.float64(pairs[0][i, 0]), np.float64(pairs[1][j, 0])
            sent, before = np.float64(alone(pairs[0][i], pairs[1][j])), np.linalg.norm(x) * np.linalg.norm(y)
            length, case = np.linalg.norm(sent), (power, other)
            assert length <= CLIP * (1 + 1e-6), case
            if min(power, other) < -37:
                continue  # below the smallest float32
            if before > 1e43:
                assert length == 0, case  # an infinite gradient counts as none
            elif before > CLIP and before < 1e37:
                assert length > CLIP * (1 - 1e-4), case
                assert x @ sent @ y > (1 - 1e-5) * length * before, case
            elif before < CLIP * (1 - 1e-4) and before > 1e-28:
                np.testing.assert_allclose(sent, np.outer(x, y), rtol=2e-7, atol=1e-37)
    for value in (np.nan, np.inf, -np.inf):
        assert (np.asarray(alone(pairs[0][5], pairs[1][5] * value)) == 0).all()
        assert (np.asarray(alone(pairs[0][5] * value, pairs[1][5])) == 0).all()


@pytest.mark.optimised
def test_neighbouring_records():
    """10^4 pairs: a record removed moves the sum by at most C, a record replaced by at most 2 C; both are reached.

    Lengths over twelve orders of magnitude, NaN among them. Catches a clip of the sum, one for each layer, and a norm
    of one layer alone.
    """
    rng = np.random.default_rng(1)
    x = rng.normal(size=(10_000, 6, INPUTS)) * 10 ** rng.uniform(-6, 6, (10_000, 6, 1))
    y = rng.integers(0, OUTPUTS, (10_000, 6))
    other = np.where(rng.random((10_000, 1)) < 0.5, -x[:, 0], np.nan)
    loss_fn = models.supervised(MODELS["perceptron"][0](), models.softmax_cross_entropy)
    params = start()

    @jax.jit
    @jax.vmap
    def sums(x, y, mask):
        data = ClientData({"x": x, "y": y}, mask)
        given = clipped_sum(loss_fn, params, data, KEY, clip_norm=CLIP, gradients="ghost")[0]
        return jnp.concatenate([g.reshape(-1) for g in jax.tree.leaves(given)])

    everyone = np.ones((10_000, 6), bool)
    fewer, others, labels = everyone.copy(), x.copy(), y.copy()
    fewer[:, 0], others[:, 0], labels[:, 0] = False, other, (y[:, 0] + 1) % OUTPUTS
    cases = ((x, y, everyone), (x, y, fewer), (others, labels, everyone))
    whole, without, replaced = (np.float64(sums(np.float32(a), np.int32(b), c)) for a, b, c in cases)
    removed, swapped = (np.linalg.norm(whole - s, axis=1) / CLIP for s in (without, replaced))
    assert removed.max() <= 1 + 1e-5 and swapped.max() <= 2 + 1e-5  # rounding of a sum of six
    assert removed.max() > 0.999 and swapped.max() > 1.5


def twice(p, x):
    return (jnp.tanh(x @ p["w"]) @ p["w"]).sum()


OTHERS = {
    "tied": twice,
    "penalised": lambda p, x: (x @ p["w"]).sum() + (p["w"] ** 2).sum(),
    "met by two vectors": lambda p, x: (jnp.concatenate([x, 2 * x]) @ p["w"]).sum(),
    "in a loop": lambda p, x: jax.lax.fori_loop(0, 2, lambda i, x: x @ p["w"], x).sum(),
    "looked up": lambda p, x: p["w"][0].sum() * x.sum(),
    "squared": lambda p, x: (x * (p["w"] @ p["w"])).sum(),
    "rematerialised": lambda p, x: jax.checkpoint(lambda w: x @ w)(p["w"]).sum(),
    "stopped": lambda p, x: (x @ jax.lax.stop_gradient(p["w"])).sum() + (p["w"] * x).sum(),
}


@pytest.mark.parametrize("name", cases.rows(OTHERS, ["in a loop", "looked up", "stopped", "tied"]))
def test_what_is_no_dense_kernel(name):
    """It keeps its own gradient: the sum is that of `vmap(grad)`, and "ghost" is refused with the kernel's name.

    Catches a use that was overlooked, whose part of the gradient would be missing from norm and sum.
    """
    loss = OTHERS[name]
    params, data = {"w": jnp.eye(4) + 0.5}, ClientData(jnp.arange(8.0).reshape(2, 4) / 4, jnp.ones(2, bool))

    def total(gradients):
        given = {"clip_norm": 5.0, "gradients": gradients}
        one = lambda p, x, key: loss(p, x).reshape(1)  # noqa: E731
        return jax.jit(lambda params, data: clipped_sum(one, params, data, KEY, **given)[0]["w"])(params, data)

    np.testing.assert_allclose(total("auto"), total("vmap"), rtol=1e-6)
    with refused("gradients", value=["['w']"], rule="'ghost'"):
        total("ghost")


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("value", cases.rows([None, 1e-30, 1e-20, 1e20, 1e30], [None, 1e-30, 1e30]))
@pytest.mark.optimised
def test_constant_deltas(value):
    """A kernel whose delta the compiler knows, zero behind a frozen layer: the sum is that of `vmap(grad)`, under jit.

    Catches powers of two that are multiplied with each other before they meet the constant: examples that are dropped,
    or sent longer than the clip norm.
    """

    @jax.custom_vjp
    def meets(product):
        return product.sum(-1)

    meets.defvjp(lambda x: (x.sum(-1), None), lambda _, g: (jnp.full((1, 2), value),))

    def loss(params, x, key):
        product = x @ params["kernel"]
        met = jax.lax.stop_gradient(jnp.tanh(product)).sum(-1) if value is None else meets(product)
        return met + (x * params["bias"]).sum(-1)

    def total(params, data, gradients):
        return clipped_sum(loss, params, data, KEY, clip_norm=CLIP, gradients=gradients)

    params = {"kernel": jnp.ones((4, 2)), "bias": jnp.ones((1, 4))}
    data = ClientData(jnp.arange(1.0, 9.0).reshape(2, 4) / 4, jnp.ones(2, bool))
    ghost, plain = (jax.jit(total, static_argnums=2)(params, data, gradients) for gradients in ("auto", "vmap"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ghost, plain)
    assert ghost[1]["local_loss"].weight == 2


@pytest.mark.full
@pytest.mark.optimised
def test_no_gradient_is_held():
    """A step of `private_sgd` on a wide model takes less memory than one example's gradients would for the batch.

    Catches an option that is not handed on, and gradients formed all the same.
    """
    model = models.mlp(input_shape=(200,), num_outputs=3, hidden=(100,))
    loss_fn = models.supervised(model, models.softmax_cross_entropy)
    params = jax.eval_shape(model.init, KEY)[0]
    data = jax.eval_shape(
        lambda: ClientData({"x": jnp.zeros((64, 200)), "y": jnp.zeros(64, jnp.int32)}, jnp.ones(64, bool))
    )

    def scratch(gradients):
        options = {"num_steps": 1, "batch_size": 64, "num_examples": 64, "gradients": gradients}
        made = client.private_sgd(loss_fn, CLIP, 0.0, 0.1, **options)
        compiled = jax.jit(lambda *given: made.apply(*given)[0].update).lower(KEY, params, (), data).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    held = 64 * 200 * 100 * 4
    assert scratch("auto") < held / 4 and scratch("vmap") >= held


@pytest.mark.optimised
def test_sums_of_squares_stay_apart():
    """Every reduction in the compiled norm is over at most 32 numbers: its error does not grow with the dimension.

    Catches a compiler that makes one long sum of the nested short ones, whose rounding `SLACK` does not cover.
    """
    for size in (4096, 200_704):
        text = jax.jit(_sum_of_squares).lower(jnp.zeros(size)).compile().as_text()
        reductions = [line for line in text.splitlines() if " reduce(" in line]
        levels = 1
        while size > 32:
            size, levels = -(-size // 32), levels + 1
        assert len(reductions) == levels, text


def test_wrong_input():
    """Catches an option that is silently another."""
    with pytest.raises(ValueError, match="gradients: expected one of"):
        client.private_sgd(outer, 1.0, 0.0, 0.1, num_steps=1, batch_size=1, num_examples=1, gradients="held")
