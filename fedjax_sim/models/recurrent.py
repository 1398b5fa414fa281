"""This module builds recurrent models of characters or words.

A model has an embedding and recurrent layers, and returns logits of the next token at every position.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fedjax_sim.models.cells import gru_layer, init_gru, init_lstm, lstm_layer
from fedjax_sim.models.layers import dense, embedding as embed, init_dense, init_embedding
from fedjax_sim.models.model import Model
from fedjax_sim.models.sequential import layer as named_layer, sequential
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import NumOutputs, fail, integer


def gru(*, num_outputs: NumOutputs, embedding: int = 8, hidden: int = 64, num_layers: int = 1) -> Model:
    """Builds a next-token model with gated recurrent units.

    Args:
      num_outputs: V, the size of the vocabulary. Inputs and outputs have the same vocabulary.
      embedding: number of features of a token.
      hidden: number of features of a recurrent state.
      num_layers: number of stacked recurrent layers.

    Returns: a stateless `Model` from tokens [n, L] (-1 = padding, embedded as zeros) to logits [n, L, V], with
    parameters {"embedding", "layer_0", ..., "output"}.

    Guarantees: the logits at a position depend on no later token and on no other sequence
    (tests/models/test_recurrent.py::test_logits_depend_on_the_past_only).

    References: Cho et al. 2014; Caldas et al. 2018 (LEAF), Shakespeare.

    >>> import jax, jax.numpy as jnp
    >>> model = gru(num_outputs=5, hidden=4)
    >>> params, state = model.init(jax.random.key(0))
    >>> model.apply(params, state, jnp.zeros((2, 3), int), None, False)[0].shape
    (2, 3, 5)
    """
    return _recurrent(
        init_gru,
        gru_layer,
        num_outputs=num_outputs,
        embedding=embedding,
        hidden=hidden,
        num_layers=num_layers,
    )


def lstm(*, num_outputs: NumOutputs, embedding: int = 8, hidden: int = 64, num_layers: int = 1) -> Model:
    """Builds a next-token model with long short-term memory.

    Args:
      num_outputs, embedding, hidden, num_layers: as in `gru`.

    Returns: a stateless `Model` from tokens [n, L] (-1 = padding, embedded as zeros) to logits [n, L, V], as `gru`.

    Guarantees: the logits at a position depend on no later token and on no other sequence
    (tests/models/test_recurrent.py::test_logits_depend_on_the_past_only). With `num_outputs=90, hidden=256,
    num_layers=2` it has the 820,522 parameters of the Shakespeare model of Reddi et al. (::test_parameter_counts).

    References: Hochreiter and Schmidhuber 1997; McMahan et al. 2017, section 3; Reddi et al. 2021, appendix.

    >>> import jax
    >>> params, _ = lstm(num_outputs=5, hidden=4, num_layers=2).init(jax.random.key(0))
    >>> sorted(params)
    ['embedding', 'layer_0', 'layer_1', 'output']
    """
    return _recurrent(
        init_lstm,
        lstm_layer,
        num_outputs=num_outputs,
        embedding=embedding,
        hidden=hidden,
        num_layers=num_layers,
    )


def _recurrent(
    init_layer: Callable, layer: Callable, *, num_outputs: int, embedding: int, hidden: int, num_layers: int
) -> Model:
    """Builds a next-token model from one kind of recurrent layer.

    Args:
      init_layer: (key, num_inputs, hidden) -> params of one layer; the last two are passed by name.
      layer: (params, x [n, L, num_inputs]) -> states [n, L, hidden].
      num_outputs, embedding, hidden, num_layers: as in `gru`. The first layer has `embedding` inputs, the others have
        `hidden`.
    """
    for name, value in (("num_outputs", num_outputs), ("embedding", embedding), ("hidden", hidden)):
        integer(name, value)
    integer("num_layers", num_layers)

    # The embedding would accept tokens of any shape, but the recurrent layers need [n, L].
    def embedded(params: PyTree, x: Array) -> Array:
        if x.ndim != 2:
            fail("x", "tokens [n, length]", x.shape)
        return embed(params, x)

    layers = [named_layer("embedding", partial(init_embedding, vocabulary=num_outputs, features=embedding), embedded)]
    for i in range(num_layers):
        sizes = {"num_inputs": hidden if i else embedding, "hidden": hidden}
        layers.append(named_layer(f"layer_{i}", partial(init_layer, **sizes), layer))
    output = named_layer("output", partial(init_dense, num_inputs=hidden, num_outputs=num_outputs), dense)
    return sequential([*layers, output])
