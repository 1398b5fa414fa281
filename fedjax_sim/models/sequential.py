"""This module builds models as sequences of named layers. `models.cuts` divides such a model among parties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fedjax_sim.models.model import Model, compiled_init, from_fn
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, function

Places = Mapping[str, int]  # path of a layer -> the party that holds it


class Layer(NamedTuple):
    """A layer is one step of a model.

    `init(key)` draws the layer's entries in the dict of the model's parameters. `apply(entries, x)` computes the
    layer's output. A layer with branches has no `apply`. Each branch takes the layer's input, and `join` combines the
    outputs of the branches.
    """

    name: str
    init: Callable  # (key) -> dict with `keys`
    apply: Callable | None  # (dict with `keys`, x) -> out
    keys: tuple[str, ...]  # names of the layer's entries, () for a layer without parameters
    branches: tuple[tuple[str, tuple[Layer, ...]], ...] = ()  # pairs of a branch's name and its layers
    join: Callable | None = None  # (list of the branches' outputs, in their order) -> out


def layer(name: str, init: Callable | None, apply: Callable) -> Layer:
    """Makes a layer from functions of the layer's parameters.

    Args:
      name: a word without "/". The layer's parameters have this key in the parameters of the model.
      init: (key) -> params, any pytree. None for a layer without parameters.
      apply: (params, x) -> out, on a batch [n, ...]. For a layer without parameters (x) -> out.

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
    """Makes a layer of several branches, which all take the layer's input.

    Args:
      name: of the layer, whose parameters are {name: {branch: {layer: ...}}}.
      parts: name of a branch -> its layers. A branch without layers returns its input.
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
    pairs = tuple((branch, _checked_layers(f"{name}/{branch}", layers)) for branch, layers in parts.items())
    if not pairs:
        fail("parts", "at least one branch", parts)

    # Keys depend on names, so a layer's parameters stay the same if branches are added or reordered.
    def init(key: Array) -> dict:
        entries_of_branch = {
            branch: _init_layers(layers, stream(stream(key, name), branch)) for branch, layers in pairs
        }
        return {name: {branch: entries for branch, entries in entries_of_branch.items() if entries}}

    # If no layer inside has parameters, the model's dict has no entry for this one.
    keys = (name,) if any(layer.keys for _, layers in pairs for layer in layers) else ()
    if not keys:
        return Layer(name, lambda key: {}, None, keys=(), branches=pairs, join=join)
    return Layer(name, init, None, keys=keys, branches=pairs, join=join)


def _checked_layers(where: str, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Returns the layers as a tuple; refuses one that computes nothing, and two with a name or parameters in common.

    Args:
      where: the argument's name, for the error.
      layers: as the user gave them.
    """
    layers = tuple(layers)
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            fail(f"{where}[{i}]", "a Layer", layer, "Make it by models.layer(name, init, apply).", TypeError)
        computes_output = layer.apply if not layer.branches else layer.join
        if computes_output is None:
            hint = "Make it by models.layer, or by models.branches."
            fail(f"{where}[{i}]", "a Layer with `apply`, or with branches and a `join`", layer, hint)
    layer_names = [layer.name for layer in layers]
    parameter_names = [key for layer in layers for key in layer.keys]
    for what, names in (("name", layer_names), ("parameters", parameter_names)):
        repeated_names = sorted({name for name in names if names.count(name) > 1})
        if repeated_names:
            fail(where, f"layers of which no two have the same {what}", repeated_names, "Rename one.")
    return layers


def _init_layers(layers: tuple[Layer, ...], key: Array) -> dict:
    """Draws the parameters of all layers. The key of a layer depends on its name, not on its position."""
    params = {}
    for layer in layers:
        params |= layer.init(stream(key, layer.name))
    return params


def sequential(layers: Sequence[Layer]) -> Model:
    """Makes a model that runs layers one after the other. `Model.layers` holds them, so the model can be cut.

    Args:
      layers: with distinct names. Layer "a" draws its parameters from the key's stream "a".

    Returns: a stateless `Model`, whose parameters are the entries of all layers in one dict.

    Raises: ValueError for two layers of the same name, and if there is no layer.

    Guarantees: `linear`, `mlp`, `cnn`, `gru`, `lstm` and `transformer` are sequences. An MLP and a CNN compile to the
    same program as their layers written one after the other
    (tests/models/test_sequential.py::test_built_in_networks_are_sequences).

    >>> import jax, jax.numpy as jnp
    >>> double = layer("double", lambda key: jnp.full(2, 2.0), lambda w, x: w[None] * x)
    >>> model = sequential([double, layer("sum", None, lambda x: x.sum(1))])
    >>> params, state = model.init(jax.random.key(0))
    >>> model.apply(params, state, jnp.ones((3, 2)), None, False)[0].tolist()
    [4.0, 4.0, 4.0]
    """
    layers = _checked_layers("layers", layers)
    if not layers:
        fail("layers", "at least one layer", layers)

    def apply(params: PyTree, x: Array) -> Array:
        return run_layers(layers, params, x, holder=None, path="", move=_no_move)[0]

    return from_fn(compiled_init(lambda key: _init_layers(layers, key)), apply)._replace(layers=layers)


def _no_move(x: PyTree, source: int | None, target: int | None, name: str) -> PyTree:
    """Moves nothing, for a model without parties."""
    return x


def run_layers(
    layers: Sequence[Layer],
    params: PyTree,
    x: PyTree,
    *,
    holder: int | None,
    path: str,
    move: Callable,
    places: Places | None = None,
) -> tuple[PyTree, int | None]:
    """Runs layers that may belong to several parties.

    Args:
      layers: of a model, or of a branch.
      params: of these layers.
      x: a batch, the input of the first layer.
      holder: the party that has x; None for a model without parties.
      path: the prefix of the layers' names, "" for a model.
      move: (x, source, target, name) -> what the target receives. It is called before each layer that takes x, and for
        the output of each branch, also if source and target are the same party.
      places: path of every layer -> its party. None for a model without parties.

    Returns: the output of the last layer, and the party that has it.
    """
    for layer in layers:
        layer_path = f"{path}{layer.name}"
        target = None if places is None else places[layer_path]
        if layer.branches:
            entries = params.get(layer.name, {})
            outputs = []
            # Each branch starts from x at its holder. Its output is brought to the party that joins the branches.
            for branch, inner_layers in layer.branches:
                branch_path = f"{layer_path}/{branch}"
                output, last_holder = run_layers(
                    inner_layers,
                    entries.get(branch, {}),
                    x,
                    holder=holder,
                    path=f"{branch_path}/",
                    move=move,
                    places=places,
                )
                outputs.append(move(output, last_holder, target, branch_path))
            assert layer.join is not None, "`_checked_layers` refuses branches without a join"
            x = layer.join(outputs)
        else:
            x = move(x, holder, target, layer_path)
            assert layer.apply is not None, "`_checked_layers` refuses a layer that computes nothing"
            x = layer.apply(_entries(layer, layer_path, params), x)
        holder = target  # the party that ran this layer has its output
    return x, holder


def _entries(layer: Layer, path: str, params: PyTree) -> PyTree:
    """Returns the entries of a layer in the parameters `params`."""
    shown = sorted(params) if isinstance(params, Mapping) else type(params).__name__
    if not isinstance(params, Mapping) or not set(layer.keys) <= set(params):
        rule = f"a dict with {list(layer.keys)}, of the layer {path!r}"
        fail("params", rule, shown, "model.init(key)[0] makes them.")
    return {key: params[key] for key in layer.keys}
