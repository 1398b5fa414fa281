"""Sequences of layers: the built-in networks are some, and a cut changes no bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType
from fedjax_sim.models import (
    blocks,
    branches,
    cnn,
    cut,
    gcn,
    gru,
    layer,
    layers,
    linear,
    lstm,
    mlp,
    sequential,
    transformer,
)
from fedjax_sim.prng import stream
from tests.refusals import refused

KEY = jax.random.key(0)


def branching():
    """10 -> 8, then a residual block, two branches, a norm and 3 outputs."""
    left = [blocks.fully_connected("one", 8, 4), blocks.fully_connected("two", 4, 5)]
    return sequential(
        [
            blocks.fully_connected("first", 10, 8),
            blocks.residual("block", [blocks.fully_connected("inner", 8, 8)]),
            blocks.two_branch("fork", left, [blocks.fully_connected("one", 8, 3)]),
            blocks.layer_norm("norm", 8),
            blocks.fully_connected("output", 8, 3, activation="none"),
        ]
    )


def test_built_in_networks_are_sequences():
    """Catches a built-in network that changed: its program is the one of the layers written out, to the letter."""

    def by_hand(params, x):
        x = jax.nn.relu(layers.dense(params["hidden_0"], x.reshape(x.shape[0], 12)))
        return layers.dense(params["output"], jax.nn.relu(layers.dense(params["hidden_1"], x)))

    def convolutions(params, x):
        x = x.reshape(x.shape[0], 12).reshape(x.shape[0], 4, 3, 1)
        x = jax.nn.relu(layers.max_pool(layers.convolution(params["conv_0"], x)))
        return layers.dense(params["output"], x.reshape(x.shape[0], -1))

    x = jnp.ones((2, 4, 3))
    for model, other in (
        (mlp(input_shape=(4, 3), num_outputs=3, hidden=(7, 6)), by_hand),
        (cnn(input_shape=(4, 3), num_outputs=3, channels=(2,)), convolutions),
    ):
        params, _ = jax.eval_shape(model.init, KEY)
        texts = [
            jax.jit(jax.value_and_grad(lambda p, f=f: f(p, x).sum())).lower(params).as_text()
            for f in (lambda p, x, model=model: model.apply(p, (), x, None, False)[0], other)
        ]
        assert texts[0] == texts[1]
    drawn = layers.init_dense(stream(KEY, "hidden_1"), 7, 6, relu=True)["kernel"]
    made = mlp(input_shape=(4, 3), num_outputs=3, hidden=(7, 6)).init(KEY)[0]["hidden_1"]["kernel"]
    assert (made == drawn).all()
    found = [linear(input_shape=(2,), num_outputs=3), gru(num_outputs=5), lstm(num_outputs=5, num_layers=2)]
    found.append(transformer(num_outputs=5))
    assert [[one.name for one in model.layers] for model in found] == [
        ["output"],
        ["embedding", "layer_0", "output"],
        ["embedding", "layer_0", "layer_1", "output"],
        ["embedding", "block_0", "block_1", "norm", "output"],
    ]


CUTS = [
    "first",
    ("first", "block"),
    ("first", "block", "fork", "norm"),
    {"first": 0, "block": 0, "fork": 1, "norm": 1, "output": 1, "block/body": 1},
    {"first": 0, "block": 0, "fork/left": 1, "fork/right": 2, "fork": 3, "norm": 3, "output": 0},
    {"first": 0, "block": 1, "fork": 0, "fork/left/two": 2, "norm": 2, "output": 0},
]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("at", CUTS, ids=range(len(CUTS)))
def test_every_cut_gives_the_same_bits(at):
    """Catches a layer that runs twice or not at all, a branch that gets another's input, and a message that is lost."""
    model, x = branching(), jax.random.normal(jax.random.key(1), (6, 10))
    params, made, sent = jax.jit(model.init)(KEY)[0], cut(model, at), []

    def move(x, source, target, name):
        assert source != target and {source, target} <= set(range(made.num_parties))
        sent.append((source, target, name))
        return x * 1

    def whole(params):
        return model.apply(params, (), x, None, False)[0]

    def parted(params):
        return made.apply(made.join(made.split(params)), x, move)

    def values(f, params, g):
        out, gradient = jax.vjp(f, params)
        return out, gradient(g)

    g = jax.random.normal(jax.random.key(2), (6, 3))
    expected, got = (jax.jit(values, static_argnums=0)(f, params, g) for f in (whole, parted))
    assert sent
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_are_shared_out():
    """Catches a parameter that two parties hold, or none."""
    model = branching()
    params, made = jax.eval_shape(model.init, KEY)[0], cut(model, CUTS[4])
    parts = made.split(params)
    assert sum(len(jax.tree.leaves(part)) for part in parts) == len(jax.tree.leaves(params))
    assert [sorted(part) for part in parts] == [["block", "first", "output"], ["fork"], ["fork"], ["norm"]]
    assert list(parts[1]["fork"]) == ["left"] and list(parts[2]["fork"]) == ["right"]
    assert jax.tree.structure(made.join(parts)) == jax.tree.structure(params)
    parts = cut(toy(), "hidden_0").split(jax.eval_shape(toy().init, KEY)[0])
    sizes = [sum(x.size for x in jax.tree.leaves(part)) for part in parts]
    assert sizes == [220, 331]


def toy():
    return mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))


def test_cuts_that_cannot_be():
    """Catches parties without layers, examples that would be sent, layers that are not there, and their order."""
    model = branching()
    for at, words in (
        ("frist", "first"),
        ("output", "Nothing would follow"),
        (("block", "first"), "in the model's order"),
        ((), "one layer or more"),
        ({"first": 0}, "'block'"),
        ({"first": 0, "block": 0, "fork": 2, "norm": 2, "output": 2}, r"\[1\]"),
        ({"first": 1, "block": 0, "fork": 0, "norm": 0, "output": 0}, "examples"),
        ({"first": 0, "blocks": 0}, "block"),
    ):
        with pytest.raises(ValueError, match=words):
            cut(model, at)
    with pytest.raises(ValueError, match="two cuts"):
        cut(model, "first", u_shaped=True)
    assert cut(model, ("first", "norm"), u_shaped=True).last == 0
    with pytest.raises(ValueError, match="layers"):
        cut(model._replace(layers=()), "first")
    for at in (None, 3):
        with refused("where", rule="names of layers", kind=InvalidType):
            cut(model, at, name="where")
    with refused("u_shaped", value="no", kind=InvalidType):
        cut(model, ("first", "norm"), u_shaped="no")
    with refused("model", value=["graph_0", "output"], hint="graph network"):
        cut(gcn(3, 2), "graph_0")
    with pytest.raises(TypeError, match="join: expected a function"):
        branches("fork", {"left": []}, 3)
    params = jax.eval_shape(model.init, KEY)[0]
    for path, wrong in (("first", {}), ("first", None), ("fork", {**params, "fork": {}})):
        with refused("params", rule=f"layer '{path}"):
            jax.eval_shape(lambda wrong: model.apply(wrong, (), jnp.ones((2, 10)), None, False), wrong)
    with pytest.raises(ValueError, match="Rename"):
        sequential([layer("a", None, jnp.abs), layer("a", None, jnp.abs)])
    with pytest.raises(ValueError, match="branch"):
        branches("none", {}, sum)
    joined = branches("fork", {"left": []}, sum)
    for by_hand in (layer("a", None, jnp.abs)._replace(apply=None), joined._replace(join=None)):
        with refused("layers[0]", rule="`apply`"):
            sequential([by_hand])


def test_messages_of_branches():
    """Every party's needs, by hand. Catches a branch whose output reaches the join without being sent."""
    sent, model = [], branching()

    def move(x, source, target, name):
        sent.append((source, target, name, x.shape[1]))
        return x

    params = jax.eval_shape(model.init, KEY)[0]
    jax.eval_shape(lambda params: cut(model, CUTS[4]).apply(params, jnp.ones((2, 10)), move), params)
    assert sent == [
        (0, 1, "fork/left/one", 8),
        (1, 3, "fork/left", 5),
        (0, 2, "fork/right/one", 8),
        (2, 3, "fork/right", 3),
        (3, 0, "output", 8),
    ]
