"""The transformer as a whole model, and its parts against NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.models import next_token_cross_entropy, supervised, transformer
from fedjax_sim.models.attention import init_attention, self_attention, with_rotary_positions
from tests.refusals import refused

KEY = jax.random.key(0)
SMALL = {"num_outputs": 5, "features": 8, "num_heads": 2, "num_blocks": 2}


def applied(model, params):
    return jax.jit(lambda x: model.apply(params, (), x, None, False)[0])


@pytest.mark.full
@pytest.mark.parametrize("positions", [None, 6])
def test_logits_depend_on_the_past_only(positions):
    """Catches a missing or shifted mask (a model that sees the token it predicts), and sequences that mix."""
    model = transformer(**SMALL, positions=positions)
    params, _ = model.init(KEY)
    x = jax.random.randint(KEY, (2, 6), 0, 5)
    apply = applied(model, params)
    before, after = apply(x), apply(x.at[0, 3].set((x[0, 3] + 1) % 5))
    np.testing.assert_array_equal(before[0, :3], after[0, :3])
    np.testing.assert_array_equal(before[1], after[1])
    assert (jnp.abs(before - after)[0, 3:].max(axis=-1) > 1e-6).all()


def norm(params, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * params["scale"] + params["bias"]


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def block(params, x, num_heads, rotary):
    """One block in NumPy, for one sequence x [L, features], position by position and head by head."""
    length, features = x.shape
    d = features // num_heads
    inputs = norm(params["attention_norm"], x)
    q, k, v = (dense(params["attention"][name], inputs) for name in ("query", "key", "value"))

    def turned(vector, position):
        if not rotary:
            return vector
        pairs = vector[: d // 2] + 1j * vector[d // 2 :]
        pairs = pairs * np.exp(1j * position * 10_000.0 ** (-2 * np.arange(d // 2) / d))
        return np.concatenate([pairs.real, pairs.imag])

    heads = np.zeros((length, features))
    for t in range(length):
        for h in range(num_heads):
            mine = slice(h * d, (h + 1) * d)
            scores = [turned(q[t, mine], t) @ turned(k[s, mine], s) / math.sqrt(d) for s in range(t + 1)]
            weights = np.exp(scores - np.max(scores))
            heads[t, mine] = weights / weights.sum() @ v[: t + 1, mine]
    x = x + dense(params["attention"]["output"], heads)
    inner = dense(params["mlp"]["hidden"], norm(params["mlp_norm"], x))
    gelu = inner / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return x + dense(params["mlp"]["output"], gelu)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("positions", [None, 7])
def test_a_block_equals_numpy(positions):
    """Catches a wrong scale of the scores, heads that are cut the other way, a norm after its part, and angles that
    turn the wrong way or with another speed.
    """
    model = transformer(num_outputs=5, features=12, num_heads=2, num_blocks=1, hidden=10, positions=positions)

    @jax.jit
    def start(key):
        # Scales and biases that start at 1 and 0 would hide that they are read.
        return jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(key, leaf.shape), model.init(key)[0])

    params = start(KEY)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.array([3, 1, 4, 1, 0, 2, 2])
    features = wide["embedding"]["table"][x] + (0 if positions is None else wide["embedding"]["positions"])
    expected = dense(wide["output"], norm(wide["norm"], block(wide["block_0"], features, 2, positions is None)))
    np.testing.assert_allclose(applied(model, params)(x[None])[0], expected, rtol=2e-5, atol=2e-5)


def test_rotary_scores_depend_on_distances():
    """Catches angles that do not grow linearly with the position, and lengths that change."""
    q, k = jax.random.normal(KEY, (2, 6))
    same = jnp.ones((1, 9, 1, 1))
    queries, keys = (np.asarray(with_rotary_positions(vector.reshape(1, 1, 1, 6) * same))[0, :, 0] for vector in (q, k))
    scores = queries @ keys.T
    for distance in range(-8, 9):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-5, atol=1e-5)
    assert np.ptp(scores[0]) > 0.1
    np.testing.assert_allclose(np.linalg.norm(queries, axis=1), np.linalg.norm(q), rtol=1e-6)


@pytest.mark.full
def test_heads_do_not_mix():
    """Catches a head that reads another's features: with equal halves, two heads are one head of half the size."""
    half = init_attention(KEY, 4)
    half = {name: {"kernel": layer["kernel"], "bias": jnp.arange(4.0) / 10} for name, layer in half.items()}
    twice = {
        name: {"kernel": jnp.kron(jnp.eye(2), layer["kernel"]), "bias": jnp.tile(layer["bias"], 2)}
        for name, layer in half.items()
    }
    x = jax.random.normal(KEY, (2, 2, 5, 4))
    both = self_attention(twice, jnp.concatenate([x[0], x[1]], axis=-1), 2)
    alone = jnp.concatenate([self_attention(half, x[0], 1), self_attention(half, x[1], 1)], axis=-1)
    np.testing.assert_allclose(both, alone, atol=1e-6)


@pytest.mark.full
def test_padded_sequences_train_without_nan():
    """Catches NaN gradients from padding, and padding at the end that changes the gradient."""
    model = transformer(**SMALL)
    params, _ = model.init(KEY)
    loss_fn = supervised(model, next_token_cross_entropy)
    x = jnp.array([[1, 2, 3, -1], [-1, -1, -1, -1]])
    y = jnp.array([[2, 3, -1, -1], [-1, -1, -1, -1]])
    g = jax.jit(jax.grad(lambda p, e: loss_fn(p, e, KEY)["loss"].sum()))
    padded, short = g(params, {"x": x, "y": y}), g(params, {"x": x[:1, :2], "y": y[:1, :2]})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), padded, short)


def test_parameter_counts():
    """Catches doubled biases and a layer that reads the wrong width."""
    model = transformer(num_outputs=90, features=64, num_heads=4, num_blocks=3)
    spec = jax.eval_shape(model.init, KEY)[0]
    of_a_block = 12 * 64**2 + 13 * 64  # 4 + 8 matrices, 4 + 4 + 1 biases, 4 vectors of norms
    assert sum(leaf.size for leaf in jax.tree.leaves(spec)) == 3 * of_a_block + 2 * 64 + 2 * 90 * 64 + 90
    learned = jax.eval_shape(transformer(**SMALL, positions=7).init, KEY)[0]
    assert learned["embedding"]["positions"].shape == (7, 8)


def test_error_texts():
    """Catches bad options at build time and inputs that are no token sequences."""
    with refused("features", value=8, rule="3 heads"):
        transformer(**SMALL | {"num_heads": 3})
    with refused("features", value=6, rule="even"):
        transformer(**SMALL | {"features": 6})
    assert transformer(**SMALL | {"features": 6, "positions": 9}).layers
    with pytest.raises(ValueError, match="num_blocks: expected an integer"):
        transformer(num_outputs=5, num_blocks=0)
    model = transformer(**SMALL, positions=3)
    params = jax.eval_shape(model.init, KEY)[0]
    for shape, words in (((1, 4), "x: expected at most 3 tokens"), ((3,), r"x: expected tokens \[n, length\]")):
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(lambda p, x: model.apply(p, (), x, None, False), params, np.zeros(shape, int))
