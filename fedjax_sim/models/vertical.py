"""This module builds models for vertical federations, whose parties hold different columns.

Each party has a bottom model over its own columns. The party with the labels also has the top model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.models.layers import dense, init_dense
from fedjax_sim.models.model import Model
from fedjax_sim.models.sequential import Layer, branches, layer, sequential
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import FromData, NumOutputs, fail, integer, sequence

PARTIES = "parties"  # name of the first layer, which has a branch for each party


def by_party(
    columns: Annotated[Sequence[int], FromData("columns")],
    bottoms: Sequence[Sequence[Layer]],
    join: Callable,
    top: Sequence[Layer] = (),
) -> Model:
    """Builds a model whose first layer has a branch for each party, which reads the party's own columns.

    The join of the branches and all later layers are the top model.

    Args:
      columns: [P], how many columns each party has. The model takes x [n, d], the parties' columns side by side. It
        also takes P arrays [n, d_p], which need no copy.
      bottoms: the layers of each party. The first of them takes [n, d_p]. The parties send the outputs of the last.
      join: (list of the parties' outputs) -> input of the top model.
      top: layers of party 0, who holds the labels.

    Returns: a `Model` with parameters {"parties": {"party_0": ..., ...}, ...}. `algorithms.vertical` trains it.

    Raises: ValueError, TypeError for fewer than two parties, another number of bottoms, and columns below 1.

    Guarantees: an array and P arrays give the same output
    (tests/models/test_vertical.py::test_the_two_forms_of_features).

    >>> import jax
    >>> half = [layer("half", None, lambda x: x / 2)]
    >>> model = by_party((2, 1), [half, half], lambda parts: jnp.concatenate(parts, axis=1))
    >>> model.apply({}, (), jnp.ones((1, 3)), None, False)[0].tolist()
    [[0.5, 0.5, 0.5]]
    """
    columns = _checked_columns(columns)
    if not isinstance(bottoms, (list, tuple)) or len(bottoms) != len(columns):
        shown = len(bottoms) if isinstance(bottoms, (list, tuple)) else bottoms
        fail("bottoms", f"layers for each of {len(columns)} parties", shown)
    # The first layer of each branch selects the party's columns, so that no party's model sees those of others.
    spans = pairwise(np.cumsum([0, *columns]).tolist())  # first column of each party, and first column after it
    parts = {}
    for party, (span, bottom) in enumerate(zip(spans, bottoms, strict=True)):
        own_columns = layer("columns", None, partial(_party_columns, party=party, span=span, columns=columns))
        parts[f"party_{party}"] = [own_columns, *bottom]
    return sequential([branches(PARTIES, parts, join), *top])


def _party_columns(
    x: Array | tuple[Array, ...] | list[Array], *, party: int, span: tuple[int, int], columns: tuple[int, ...]
) -> Array:
    """Returns the columns [n, d_p] of a party, from one array or from an array for each party."""
    rule = f"parties with {list(columns)} columns"
    if isinstance(x, (tuple, list)):
        widths = [part.shape[-1] for part in x]
        if widths != list(columns):
            fail("x", rule, widths)
        return x[party]
    if x.ndim != 2 or x.shape[1] != sum(columns):
        fail("x", rule, x.shape)
    return x[:, slice(*span)]


def _checked_columns(columns: Sequence[int]) -> tuple[int, ...]:
    """Returns the parties' numbers of columns as a tuple, after checks."""
    hint = "A data set gets them by population.with_parties, [data.with_parties]."
    if columns is None:
        fail("columns", "how many columns each party has", None, hint)
    sequence("columns", columns, least=2)
    for number in columns:
        integer("columns", number, hint=hint)
    return tuple(int(number) for number in columns)


def vertical_linear(*, columns: Annotated[Sequence[int], FromData("columns")], num_outputs: NumOutputs) -> Model:
    """Builds linear or logistic regression over parties, with the scores sum_p X_p W_p + b.

    Each party sends its partial scores X_p W_p, [n, num_outputs], and the label holder has b. Parameters start at zero.

    Args:
      columns: as in `by_party`. A config takes them from the data.
      num_outputs: 1 for a binary logit, otherwise the number of targets or classes.

    Guarantees: the scores equal those of `linear`
    (tests/models/test_vertical.py::test_the_scores_are_those_of_one_table).

    References: Hardy et al. 2017, section 4; Yang et al. 2019, section 2.4.

    >>> params, _ = vertical_linear(columns=(2, 3), num_outputs=1).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    6
    """
    columns = _checked_columns(columns)
    integer("num_outputs", num_outputs)

    def zeros(key: Array, width: int) -> PyTree:
        return {"kernel": jnp.zeros((width, num_outputs))}

    def score(params: PyTree, x: Array) -> Array:
        return x.astype(params["kernel"].dtype) @ params["kernel"]

    # The bias is added once, after the sum. A bias in each party's score would be the same parameter P times.
    bottoms = [[layer("score", partial(zeros, width=width), score)] for width in columns]
    bias = layer("bias", lambda key: jnp.zeros(num_outputs), lambda b, x: x + b[None])
    return by_party(columns, bottoms, sum, [bias])


def vertical_mlp(
    *,
    columns: Annotated[Sequence[int], FromData("columns")],
    num_outputs: NumOutputs,
    hidden: Sequence[int] = (),
    embedding: int = 8,
    top: Sequence[int] = (16,),
) -> Model:
    """Builds a network over parties: each party embeds its columns, and the label holder reads all embeddings.

    Args:
      columns, num_outputs: as in `vertical_linear`.
      hidden: widths of the hidden ReLU layers of each party's bottom model.
      embedding: k, how many numbers a party sends for each row. No activation is applied before they are sent.
      top: widths of the hidden layers of the top model. A ReLU precedes each layer of the top.

    Guarantees: the number of parameters equals a count by hand
    (tests/models/test_vertical.py::test_parameters_of_the_network).

    References: Vepakomma et al. 2018, section 3 (vertically partitioned data).

    >>> params, _ = vertical_mlp(columns=(2, 3), num_outputs=1).init(jax.random.key(0))
    >>> sorted(params)
    ['output', 'parties', 'top_0']
    """
    columns = _checked_columns(columns)
    for name, values in (("hidden", hidden), ("top", top)):
        if not isinstance(values, (tuple, list)):
            fail(name, "widths in a list", values, error=TypeError)
        for value in values:
            integer(name, value)
    integer("num_outputs", num_outputs)
    integer("embedding", embedding)
    # Each bottom ends without a ReLU. The top applies it to the concatenated embeddings.
    bottoms = []
    for width in columns:
        widths = [width, *hidden, embedding]
        names = [*(f"hidden_{i}" for i in range(len(hidden))), "embedding"]
        bottoms.append(
            [_dense(name, *ends, relu=name != "embedding") for name, ends in zip(names, pairwise(widths), strict=True)]
        )
    widths = [embedding * len(columns), *top, num_outputs]
    names = [*(f"top_{i}" for i in range(len(top))), "output"]
    head = [_dense(name, *ends, relu=name != "output") for name, ends in zip(names, pairwise(widths), strict=True)]
    return by_party(columns, bottoms, lambda parts: jax.nn.relu(jnp.concatenate(parts, axis=1)), head)


def _dense(name: str, num_inputs: int, num_outputs: int, *, relu: bool) -> Layer:
    """Makes a dense layer, with or without a ReLU."""

    def apply(params: PyTree, x: Array) -> Array:
        out = dense(params, x)
        return jax.nn.relu(out) if relu else out

    return layer(name, partial(init_dense, num_inputs=num_inputs, num_outputs=num_outputs, relu=relu), apply)
