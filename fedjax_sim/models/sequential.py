"""Models as sequences of named layers; `models.cuts` shares them out among parties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from fedjax_sim.models.model import Model, from_fn
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, function

__all__ = ["Layer", "Places", "branches", "layer", "run_layers", "sequential"]

Places = Mapping[str, int]  # path of a layer -> the party that holds it


class Layer(NamedTuple):
    """One step of a model: `init(key)` makes its entries of the model's parameters, `apply(entries, x)` its output.

    A layer with branches has no `apply`: each branch takes the layer's input, and `join` makes the output of theirs.
    """

    name: str
    init: Callable  # (key) -> dict with `keys`
    apply: Callable | None  # (dict with `keys`, x) -> out
    keys: tuple[str, ...]  # names of its entries; () without parameters
    branches: tuple[tuple[str, tuple[Layer, ...]], ...] = ()  # pairs of a name and its layers
    join: Callable | None = None  # (outputs of the branches, a list in their order) -> out


def layer(name: str, init: Callable | None, apply: Callable) -> Layer:
    """A layer from functions of its own parameters.

    Args:
      name: without "/"; its parameters stand under it in the model's.
      init: (key) -> params, any pytree; None for a layer without parameters.
      apply: (params, x) -> out, on a batch [n, ...]; (x) -> out without parameters.

    >>> import jax.numpy as jnp
    >>> half = layer("half", None, lambda x: x / 2)
    >>> half.apply({}, jnp.ones(2)).tolist()
    [0.5, 0.5]
    """
    if not isinstance(name, str) or not name or "/" in name:
        fail("name", "a word without '/'", name)
    for argument, value in (("init", init), ("apply", apply)):
        if not callable(value) and (argument, value) != ("init", None):
            fail(argument, "a function", value, error=TypeError)
    if init is None:
        return Layer(name, lambda key: {}, lambda entries, x: apply(x), ())
    return Layer(name, lambda key: {name: init(key)}, lambda entries, x: apply(entries.get(name), x), (name,))


def branches(name: str, parts: Mapping[str, Sequence[Layer]], join: Callable) -> Layer:
    """A layer whose branches all take its input.

    Args:
      name: its parameters are {name: {branch: {layer: ...}}}.
      parts: branch -> its layers; none: the branch hands its input on.
      join: (list of the branches' outputs) -> out, such as `sum`.

    Guarantees: a cut that gives branches to different parties changes no bit of the output
    (tests/models/test_sequential.py::test_every_cut_gives_the_same_bits).

    >>> import jax.numpy as jnp
    >>> both = branches("both", {"left": [layer("half", None, lambda x: x / 2)], "right": []}, sum)
    >>> model = sequential([both])
    >>> model.apply({}, (), jnp.ones(2), None, False)[0].tolist()
    [1.5, 1.5]
    """
    function("join", join, "outputs")
    pairs = tuple((key, _named(f"{name}/{key}", value)) for key, value in parts.items())
    if not pairs:
        fail("parts", "at least one branch", parts)

    def init(key: Array) -> dict:
        made = {part: _made(layers, stream(stream(key, name), part)) for part, layers in pairs}
        return {name: {part: entries for part, entries in made.items() if entries}}

    keys = (name,) if any(one.keys for _, layers in pairs for one in layers) else ()
    if not keys:
        return Layer(name, lambda key: {}, None, (), pairs, join)
    return Layer(name, init, None, keys, pairs, join)


def _named(where: str, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    layers = tuple(layers)
    for i, one in enumerate(layers):
        if not isinstance(one, Layer):
            fail(f"{where}[{i}]", "a Layer", one, "Make it by models.layer(name, init, apply).", TypeError)
    for what, names in (("name", [x.name for x in layers]), ("parameters", [key for x in layers for key in x.keys])):
        again = sorted({name for name in names if names.count(name) > 1})
        if again:
            fail(where, f"layers of which no two have the same {what}", again, "Rename one.")
    return layers


def _made(layers: tuple[Layer, ...], key: Array) -> dict:
    params = {}
    for one in layers:
        params |= one.init(stream(key, one.name))
    return params


def sequential(layers: Sequence[Layer]) -> Model:
    """A model of layers, one after the other; `Model.layers` has them, so it can be cut.

    Args:
      layers: with distinct names; layer "a" draws its parameters from the key's stream "a".

    Returns: a stateless `Model`; its parameters are the layers' entries in one dict.

    Raises: ValueError for two layers of one name, or without layers.

    Guarantees: `linear`, `mlp`, `cnn`, `gru` and `lstm` are sequences, each the program that its layers written one
    after the other make (tests/models/test_sequential.py::test_built_in_networks_are_sequences).

    >>> import jax, jax.numpy as jnp
    >>> double = layer("double", lambda key: jnp.full(2, 2.0), lambda w, x: w[None] * x)
    >>> model = sequential([double, layer("sum", None, lambda x: x.sum(1))])
    >>> params, state = model.init(jax.random.key(0))
    >>> model.apply(params, state, jnp.ones((3, 2)), None, False)[0].tolist()
    [4.0, 4.0, 4.0]
    """
    layers = _named("layers", layers)
    if not layers:
        fail("layers", "at least one layer", layers)

    def apply(params: PyTree, x: Array) -> Array:
        return run_layers(layers, params, x, None, "", _stay)[0]

    return from_fn(jax.jit(lambda key: _made(layers, key)), apply)._replace(layers=layers)


def _stay(x: PyTree, source: int | None, target: int | None, name: str) -> PyTree:
    return x


def run_layers(layers, params, x, holder, path, move, places: Places | None = None) -> tuple[PyTree, int | None]:
    """(output of the layers, the party that has it): `move(x, source, target, name)` brings what a party needs.

    Args:
      layers, params: of a model, or of a branch, whose layers' names begin with `path`.
      x, holder: a batch, and the party that has it.
      places: path of every layer -> its party; None: nobody's.
    """
    for one in layers:
        here = f"{path}{one.name}"
        target = None if places is None else places[here]
        if one.branches:
            entries, outs = params.get(one.name, {}), []
            for part, inner in one.branches:
                out, last = run_layers(inner, entries.get(part, {}), x, holder, f"{here}/{part}/", move, places)
                outs.append(move(out, last, target, f"{here}/{part}"))
            x = one.join(outs)
        else:
            x = move(x, holder, target, here)
            x = one.apply(_entries(one, here, params), x)
        holder = target
    return x, holder


def _entries(one: Layer, path: str, params: PyTree) -> PyTree:
    """The entries of a layer."""
    there = sorted(params) if isinstance(params, Mapping) else type(params).__name__
    if not isinstance(params, Mapping) or not set(one.keys) <= set(params):
        fail("params", f"a dict with {list(one.keys)}, of the layer {path!r}", there, "model.init(key)[0] makes them.")
    return {key: params[key] for key in one.keys}
