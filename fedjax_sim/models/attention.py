"""This module builds small language models with causal self-attention.

A model has an embedding, blocks of attention and a perceptron, and returns logits of the next token at every position.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.models.blocks import layer_norm
from fedjax_sim.models.layers import dense, embedding, init_dense, init_embedding
from fedjax_sim.models.model import Model
from fedjax_sim.models.sequential import Layer, layer, sequential
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import NumOutputs, fail, integer

PROJECTIONS = ("query", "key", "value", "output")
SLOWEST = 10_000.0  # the last pair of features turns by one radian in about so many positions


def transformer(
    *,
    num_outputs: NumOutputs,
    features: int = 64,
    num_heads: int = 2,
    num_blocks: int = 2,
    hidden: int | None = None,
    positions: int | None = None,
) -> Model:
    """Builds a next-token model of the kind of GPT: a causal transformer with a norm before each part of a block.

    Args:
      num_outputs: V, the size of the vocabulary. Inputs and outputs have the same vocabulary.
      features: number of features of a token, a multiple of num_heads.
      num_heads: heads of each attention.
      num_blocks: blocks. Each adds an attention, and then a perceptron with one hidden layer and GELU.
      hidden: width of the perceptrons; by default 4 times the features.
      positions: number of learned positions, the longest sequence that the model takes. By default positions are
        rotary, which bounds no length and needs an even number of features in a head.

    Returns: a stateless `Model` from tokens [n, L] to logits [n, L, V], with parameters {"embedding", "block_0", ...,
    "norm", "output"}. The matrices of a block are "attention/query/kernel" with "key", "value" and "output" beside
    "query", and "mlp/hidden/kernel" and "mlp/output/kernel". Padding stands at the end of a sequence, as in all data
    sets of this package: no token attends to it.

    Raises: ValueError for features that are no multiple of the heads, and for rotary heads of an odd size.

    Guarantees: the logits at a position depend on no later token and on no other sequence, bit for bit
    (tests/models/test_attention.py::test_logits_depend_on_the_past_only). A block equals NumPy
    (tests/models/test_attention.py::test_a_block_equals_numpy). With rotary positions, tokens alone and their distances
    decide on a score (tests/models/test_attention.py::test_rotary_scores_depend_on_distances). Clients with weights of
    their own equal a loop (tests/models/test_feedforward.py::test_clients_with_own_weights_equal_a_loop).

    References: Vaswani et al. 2017; Radford et al. 2019 (norms before the parts); Su et al. 2021 (rotary positions).

    >>> import jax
    >>> model = transformer(num_outputs=5, features=8, num_blocks=1)
    >>> params, state = model.init(jax.random.key(0))
    >>> sorted(params), sorted(params["block_0"])
    (['block_0', 'embedding', 'norm', 'output'], ['attention', 'attention_norm', 'mlp', 'mlp_norm'])
    >>> jax.eval_shape(lambda x: model.apply(params, state, x, None, False)[0], jax.numpy.zeros((2, 3), int)).shape
    (2, 3, 5)
    """
    hidden = 4 * features if hidden is None else hidden
    sizes = {"num_outputs": num_outputs, "features": features, "num_heads": num_heads, "hidden": hidden}
    for name, value in (sizes | {"num_blocks": num_blocks}).items():
        integer(name, value)
    if positions is not None:
        integer("positions", positions)
    if features % num_heads:
        fail("features", f"a multiple of the {num_heads} heads", features)
    if positions is None and features // num_heads % 2:
        hint = "Rotary positions turn pairs of features. Take other numbers, or learned positions."
        fail("features", f"an even number for each of the {num_heads} heads", features, hint)

    blocks = [_block(f"block_{i}", features, num_heads, hidden, positions is None) for i in range(num_blocks)]
    output = layer("output", partial(init_dense, num_inputs=features, num_outputs=num_outputs), dense)
    return sequential([_embedding(num_outputs, features, positions), *blocks, layer_norm("norm", features), output])


def _embedding(vocabulary: int, features: int, positions: int | None) -> Layer:
    """Makes the layer that turns tokens into features, and adds learned positions if there are some.

    Args:
      vocabulary: V. Tokens are integers in [0, V), or -1 for padding, whose features are zeros before positions are
        added.
      features: the number of features of a token.
      positions: the largest length L; None for no learned positions, and any length.

    Returns: a layer "embedding" from tokens [n, L] to [n, L, features], with the parameters "table" [V, features] and
      "positions" [positions, features].
    """

    def init(key: Array) -> PyTree:
        params = init_embedding(key, vocabulary, features)
        if positions is not None:
            table = init_embedding(stream(key, "positions"), positions, features)["table"]
            params["positions"] = table
        return params

    def apply(params: PyTree, x: Array) -> Array:
        if x.ndim != 2:
            fail("x", "tokens [n, length]", x.shape)
        if positions is None:
            return embedding(params, x)
        if x.shape[1] > positions:
            fail("x", f"at most {positions} tokens", x.shape, "State more positions, or take rotary ones.")
        return embedding(params, x) + params["positions"][None, : x.shape[1]]

    return layer("embedding", init, apply)


def _block(name: str, features: int, num_heads: int, hidden: int, rotary: bool) -> Layer:
    """Makes a block from x to y, both [n, L, features]: h = x + attention(norm(x)) and y = h + mlp(norm(h)).

    Here mlp(v) = gelu(v W_1 + b_1) W_2 + b_2, and both norms have a scale and a bias of their own.

    Args:
      name: of the layer.
      features: the number of features of a token.
      num_heads: of the attention, a divisor of the features.
      hidden: the width of the perceptron's hidden layer.
      rotary: whether the attention turns queries and keys by their positions.
    """
    norms = {part: layer_norm(f"{part}_norm", features) for part in ("attention", "mlp")}
    attention_norm, mlp_norm = (norm.apply for norm in norms.values())
    assert attention_norm is not None and mlp_norm is not None, "only a layer with branches has no `apply`"

    def init(key: Array) -> PyTree:
        mlp = {
            "hidden": init_dense(stream(key, "hidden"), features, hidden),
            "output": init_dense(stream(key, "output"), hidden, features),
        }
        scales = {f"{part}_norm": norm.init(key)[f"{part}_norm"] for part, norm in norms.items()}
        return scales | {"attention": init_attention(stream(key, "attention"), features), "mlp": mlp}

    def apply(params: PyTree, x: Array) -> Array:
        x = x + self_attention(params["attention"], attention_norm(params, x), num_heads, rotary=rotary)
        inner = jax.nn.gelu(dense(params["mlp"]["hidden"], mlp_norm(params, x)))
        return x + dense(params["mlp"]["output"], inner)

    return layer(name, init, apply)


def init_attention(key: Array, features: int) -> PyTree:
    """Draws the parameters of `self_attention`: the dense layers "query", "key", "value" and "output"."""
    return {name: init_dense(stream(key, name), features, features) for name in PROJECTIONS}


def self_attention(params: PyTree, x: Array, num_heads: int, *, rotary: bool = True) -> Array:
    """Computes causal self-attention over x [n, L, features] with several heads.

    Head h has the features from h d to (h + 1) d of query q, key k and value v. At position t it gives the mean of the
    values v_s, s <= t, with weights softmax_s(q_t . k_s / sqrt(d)). The heads side by side pass a last dense layer.

    Args:
      params: as `init_attention` draws them.
      x: features of each token.
      num_heads: a divisor of the features.
      rotary: whether queries and keys are turned by their positions (`with_rotary_positions`).

    Returns: [n, L, features].
    """
    n, length, features = x.shape

    def heads(name: str) -> Array:
        return dense(params[name], x).reshape(n, length, num_heads, features // num_heads)

    query, key, value = heads("query"), heads("key"), heads("value")
    if rotary:
        query, key = with_rotary_positions(query), with_rotary_positions(key)
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) * (features // num_heads) ** -0.5
    is_past = np.tril(np.ones((length, length), bool))  # [query, key], with the token itself
    weights = jax.nn.softmax(jnp.where(is_past[None, None], scores, -jnp.inf), axis=-1)
    out = jnp.einsum("nhqk,nkhd->nqhd", weights, value)
    return dense(params["output"], out.reshape(n, length, features))


def with_rotary_positions(x: Array) -> Array:
    """Turns pairs of features of x [n, L, heads, d] by angles that are proportional to the position.

    Pair i, of the features i and d / 2 + i, turns by t 10000^(-2 i / d) at position t. The scalar product of two
    rotated vectors then depends on the distance of their positions alone.

    References: Su et al. 2021, section 3.2.
    """
    length, half = x.shape[1], x.shape[3] // 2
    speeds = SLOWEST ** (-np.arange(half) / half)
    angles = (np.arange(length)[:, None] * speeds[None]).reshape(1, length, 1, half)
    cos, sin = (jnp.asarray(values, x.dtype) for values in (np.cos(angles), np.sin(angles)))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
