"""flax.linen and flax.nnx modules as models."""

import equinox
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_sim import InvalidType
from fedjax_sim.models import from_equinox, from_linen, from_nnx, softmax_cross_entropy, supervised
from tests.refusals import refused

KEY = jax.random.key(0)
X = jnp.ones((2, 4))


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(32)(x))


class LinenDeterministic(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=False):
        return nn.Dropout(0.5)(nn.Dense(32)(x), deterministic=deterministic)


class HoldsRngs(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.dense(x))


class TakesRngs(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 32, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs=None):
        return self.dropout(self.layers[0](x), rngs=rngs)


class Statistics(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


class EquinoxDropout(equinox.Module):
    dense: equinox.nn.Linear
    dropout: equinox.nn.Dropout

    def __init__(self, key):
        self.dense = equinox.nn.Linear(4, 32, key=key)
        self.dropout = equinox.nn.Dropout(0.5)

    def __call__(self, x, key=None):
        return self.dropout(self.dense(x), key=key)


DROPOUT = {
    "equinox": lambda: from_equinox(EquinoxDropout),
    "linen_train": lambda: from_linen(LinenDropout(), X),
    "linen_deterministic": lambda: from_linen(LinenDeterministic(), X),
    "nnx_holds_rngs": lambda: from_nnx(lambda rngs: HoldsRngs(rngs)),
    "nnx_takes_rngs": lambda: from_nnx(lambda rngs: TakesRngs(rngs)),
}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_follows_the_key_of_each_client(name):
    """Catches one mask for all clients, a mask frozen into the program, dropout in evaluation, and the trace-level
    error of generators that a module holds, inside jit(vmap(grad))."""
    model = DROPOUT[name]()
    params, state = jax.jit(model.init)(KEY)
    nodes = (params, *params.values())
    assert state == () and all(type(node) is dict or isinstance(node, jax.Array) for node in nodes)
    loss_fn = supervised(model, lambda out, y: jnp.square(out - y[:, None]).mean(axis=1))
    examples = {"x": X, "y": jnp.full(2, 10.0)}

    @jax.jit
    def gradients(params, keys):
        return jax.vmap(jax.grad(lambda p, k: loss_fn(p, examples, k)["loss"].mean()), (None, 0))(params, keys)

    g = jax.tree.leaves(gradients(params, jax.random.split(KEY, 3)))[0]
    again = jax.tree.leaves(gradients(params, jax.random.split(KEY, 3)))[0]
    np.testing.assert_array_equal(g, again)
    assert not np.allclose(g[0], g[1]) and not np.allclose(g[1], g[2])
    apply = jax.jit(model.apply, static_argnums=4)
    masks = np.asarray(jax.vmap(lambda k: apply(params, state, X, k, True)[0])(jax.random.split(KEY, 64))) != 0
    assert abs(masks.mean() - 0.5) < 0.05  # 4,096 coins: 6 standard errors
    quiet = apply(params, state, X, None, False)[0]
    assert (quiet != 0).all()
    np.testing.assert_array_equal(quiet, apply(params, state, X, jax.random.key(7), False)[0])
    with pytest.raises(TypeError, match="key: expected a key when train=True"):
        model.apply(params, state, X, None, True)


class LinenStatistics(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        self.sow("intermediates", "x", x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("build", [lambda: from_linen(LinenStatistics(), X), lambda: from_nnx(lambda r: Statistics(r))])
def test_batch_statistics_are_returned_as_state(build):
    """Catches statistics that are dropped, updated in evaluation, or mixed with sown values and generators."""
    model = build()
    params, state = jax.jit(model.init)(KEY)
    x = jax.random.normal(KEY, (8, 4)) + 3
    apply = jax.jit(model.apply, static_argnums=4)
    _, trained = apply(params, state, x, KEY, True)
    assert jax.tree.structure(trained) == jax.tree.structure(state)
    means = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trained) if "mean" in jax.tree_util.keystr(path)
    ]
    np.testing.assert_allclose(means[0], 0.5 * x.mean(0), rtol=1e-5)
    assert len(jax.tree.leaves(state)) == 2
    out, kept = apply(params, trained, x, None, False)
    jax.tree.map(np.testing.assert_array_equal, kept, trained)
    variances = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trained) if "var" in jax.tree_util.keystr(path)
    ]
    np.testing.assert_allclose(out, (x - means[0][None]) / np.sqrt(variances[0][None] + 1e-5), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="without state"):
        supervised(model, softmax_cross_entropy)


def test_init_takes_shapes_only_and_follows_the_key():
    """Catches an example input that is baked in, and a fixed seed."""
    model = from_linen(nn.Dense(3), jax.ShapeDtypeStruct((1, 4), jnp.float32))
    other = from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    for each in (model, other):
        a, b = (each.init(jax.random.key(seed))[0]["kernel"] for seed in (0, 1))
        assert a.shape == (4, 3) and not np.allclose(a, b)
        stacked = jax.vmap(lambda key, each=each: each.init(key)[0])(jax.random.split(KEY, 2))
        assert stacked["kernel"].shape == (2, 4, 3)


def test_nnx_parameters_reach_the_module():
    """Catches a module that keeps the parameters of its construction."""
    model = from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
    params = {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.ones(3)}
    np.testing.assert_allclose(model.apply(params, (), X, None, False)[0], X @ params["kernel"] + 1)
    np.testing.assert_allclose(model.apply(jax.tree.map(jnp.zeros_like, params), (), X, None, False)[0], 0)


def test_error_texts():
    """Catches a module of the other flax handed to an adapter."""
    with refused("module", value="Linear", hint="from_nnx", kind=InvalidType):
        from_linen(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), X)
    with refused("constructor", value="Linear", rule="nnx.Rngs", kind=InvalidType):
        from_nnx(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="constructor: expected a function"):
        from_nnx(lambda rngs: 3).init(KEY)


class Counter(equinox.Module):
    count: jax.Array

    def __init__(self, key):
        self.count = jnp.zeros(3, jnp.int32)

    def __call__(self, x):
        return x


@pytest.mark.full
def test_equinox_modules_are_themselves():
    """Catches arrays that change places, a path that is lost, and an activation that is taken for a parameter."""
    make = lambda key: equinox.nn.MLP(4, 3, 8, 2, jax.nn.gelu, key=key)  # noqa: E731
    model = from_equinox(make)
    params, _ = jax.jit(model.init)(KEY)
    assert sorted(params) == [f"layers/{i}/{name}" for i in range(3) for name in ("bias", "weight")]
    module = equinox.tree_at(
        lambda m: [leaf for layer in m.layers for leaf in (layer.weight, layer.bias)],
        make(KEY),
        [params[f"layers/{i}/{name}"] for i in range(3) for name in ("weight", "bias")],
    )
    x = jax.random.normal(KEY, (5, 4))
    np.testing.assert_allclose(model.apply(params, (), x, None, False)[0], jax.vmap(module)(x), rtol=1e-6)
    loss = lambda apply: jnp.square(apply(x)).sum()  # noqa: E731
    gradient = jax.grad(lambda p: loss(lambda x: model.apply(p, (), x, KEY, True)[0]))(params)
    expected = equinox.filter_grad(lambda m: loss(jax.vmap(m)))(module)
    np.testing.assert_allclose(gradient["layers/1/weight"], expected.layers[1].weight, rtol=1e-5)


def test_what_is_no_equinox_constructor_is_refused():
    with refused("constructor", value="MLP", rule="equinox.Module", kind=InvalidType):
        from_equinox(equinox.nn.MLP(4, 3, 8, 2, key=KEY))
    with refused("constructor", value="count of int32", kind=InvalidType):
        from_equinox(Counter).init(KEY)
    with pytest.raises(TypeError, match="constructor: expected a function"):
        from_equinox(lambda key: 3).init(KEY)
