"""Models as sequences of named layers, and cuts of them between parties, along depth or by branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from fedjax_sim.models.model import Model, from_fn
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail, integer, nearest

__all__ = ["Cut", "Layer", "branches", "cut", "layer", "sequential"]

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
        return _run(layers, params, x, None, "", _stay)[0]

    return from_fn(jax.jit(lambda key: _made(layers, key)), apply)._replace(layers=layers)


def _stay(x: PyTree, source: int | None, target: int | None, name: str) -> PyTree:
    return x


def _run(layers, params, x, holder, path, move, places: Places | None = None) -> tuple[PyTree, int | None]:
    """(output of the layers, the party that has it): `move(x, source, target, name)` brings what a party needs."""
    for one in layers:
        here = f"{path}{one.name}"
        target = None if places is None else places[here]
        if one.branches:
            entries, outs = params.get(one.name, {}), []
            for part, inner in one.branches:
                out, last = _run(inner, entries.get(part, {}), x, holder, f"{here}/{part}/", move, places)
                outs.append(move(out, last, target, f"{here}/{part}"))
            x = one.join(outs)
        else:
            x = move(x, holder, target, here)
            x = one.apply({key: params[key] for key in one.keys if key in params}, x)
        holder = target
    return x, holder


class Cut(NamedTuple):
    """A model whose layers are held by parties 0, 1, ..., P - 1; party 0 has the examples."""

    model: Model
    num_parties: int
    places: Places  # path of every layer -> its party; of one with branches, that of its join
    last: int  # the party that computes the output

    def split(self, params: PyTree) -> tuple[PyTree, ...]:
        """The parameters of each party, as nested dicts.

        Guarantees: every leaf is in one part, and `join` is the inverse
        (tests/models/test_sequential.py::test_parameters_are_shared_out).
        """
        paths, rest, parts = _paths(self.model.layers, self.places), params, []
        for party in range(self.num_parties):
            own, rest = partition(rest, [path for path, place in paths.items() if place == party])
            parts.append(own)
        return tuple(parts)

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """The whole model's parameters, from those of all parties; in the model's order of names."""
        whole: PyTree = {}
        for part in parts:
            whole = combine(whole, part)
        return whole

    def apply(self, params: PyTree, x: PyTree, move: Callable) -> PyTree:
        """The model's output at party `last`.

        Args:
          params: of the whole model.
          x: a batch, at party 0.
          move: (x, source, target, name) -> what the target receives; called once for each message, when source and
            target differ. `name` is the path of the layer that wants it.
        """

        def across(x, source, target, name):
            return x if source == target else move(x, source, target, name)

        return _run(self.model.layers, params, x, 0, "", across, self.places)[0]


def _paths(layers: Sequence[Layer], places: Places, prefix: str = "", where: str = "") -> dict[str, int]:
    """Path of each layer's parameters -> its party."""
    found: dict[str, int] = {}
    for one in layers:
        here = f"{where}{one.name}"
        for part, inner in one.branches:
            found |= _paths(inner, places, f"{prefix}{one.name}/{part}/", f"{here}/{part}/")
        if not one.branches:
            found |= {f"{prefix}{key}": places[here] for key in one.keys}
    return found


def cut(model: Model, at: str | Sequence[str] | Places, *, u_shaped: bool = False) -> Cut:
    """Shares a model's layers out among parties.

    Args:
      model: one with `layers`.
      at: names of layers, in their order: the model is cut after each, and party p holds what is between cut p - 1 and
        cut p. Or a dict from paths to parties: "block" places a layer and all inside it, "block/left" one branch of it,
        the longest path counts; every layer must be placed.
      u_shaped: the last part is party 0's as well, who then computes the output.

    Returns: the `Cut`.

    Raises: ValueError for a model without layers, a layer that is not there, a cut that leaves a party without layers,
    and where examples would be sent: the first layers must be party 0's.

    Guarantees: whatever the cut, along depth or by branch, outputs and gradients have the model's bits
    (tests/models/test_sequential.py::test_every_cut_gives_the_same_bits).

    References: Gupta and Raskar 2018; Vepakomma et al. 2018, figure 2 (U-shaped).

    >>> from fedjax_sim.models import mlp
    >>> made = cut(mlp(input_shape=(4,), num_outputs=2, hidden=(3, 3)), "hidden_0")
    >>> dict(made.places)
    {'hidden_0': 0, 'hidden_1': 1, 'output': 1}
    """
    if not getattr(model, "layers", ()) or not all(isinstance(one, Layer) for one in model.layers):
        hint = "Build it by models.sequential, or take linear, mlp, cnn, gru or lstm."
        fail("model", "one with layers along which it can be cut", model, hint)
    placed = isinstance(at, Mapping)
    if placed and u_shaped:
        fail("u_shaped", "False with a dict, which places the last layer itself", u_shaped)
    places = _chosen(model.layers, at) if placed else _along(model.layers, at, u_shaped)
    num_parties = 1 + max(places.values())
    missing = sorted(set(range(num_parties)) - set(places.values()))
    if missing or num_parties < 2:
        fail("at", "layers for every party, two at least", at, f"Without layers: {missing or [1]}.")
    for path in _first(model.layers):
        if places[path] != 0:
            fail("at", "the first layers with party 0, who has the examples", {path: places[path]})
    return Cut(model, num_parties, places, places[model.layers[-1].name])


def _along(layers: tuple[Layer, ...], at: str | Sequence[str], u_shaped: bool) -> dict[str, int]:
    names, at = [one.name for one in layers], (at,) if isinstance(at, str) else tuple(at)
    for name in at:
        if name not in names[:-1]:
            hint = "Nothing would follow the cut." if name == names[-1] else nearest(name, names[:-1])
            fail("at", f"layers among {names[:-1]}", name, hint)
    order = [names.index(name) for name in at]
    if not order or sorted(set(order)) != order:
        fail("at", "one layer or more, each once, in the model's order", at)
    if u_shaped and len(order) < 2:
        fail("at", "two cuts or more with u_shaped=True", at, "The last part comes back to party 0.")
    parties = [sum(i > place for place in order) for i in range(len(names))]
    if u_shaped:
        parties = [0 if party == len(order) else party for party in parties]
    found: dict[str, int] = {}
    for one, party in zip(layers, parties, strict=True):
        found |= dict.fromkeys(_all(one), party)
    return found


def _all(one: Layer, where: str = "") -> list[str]:
    inner = [x for part, layers in one.branches for y in layers for x in _all(y, f"{where}{one.name}/{part}/")]
    return [f"{where}{one.name}", *inner]


def _first(layers: Sequence[Layer], where: str = "") -> list[str]:
    one = layers[0]
    inner = [x for part, inner in one.branches if inner for x in _first(inner, f"{where}{one.name}/{part}/")]
    empty = not one.branches or any(not inner for _, inner in one.branches)
    return inner + [f"{where}{one.name}"] * empty


def _chosen(layers: tuple[Layer, ...], at: Places) -> dict[str, int]:
    known = [path for one in layers for path in _all(one)]
    folders = {"/".join(path.split("/")[:i]) for path in known for i in range(1, path.count("/") + 2)}
    for path, party in at.items():
        if path not in folders:
            fail("at", f"paths among {sorted(folders)}", path, nearest(path, folders))
        integer(f"at[{path!r}]", party, 0)

    def place(path: str) -> int:
        above = [folder for folder in at if path == folder or path.startswith(folder + "/")]
        if not above:
            fail("at", "a party for every layer", dict(at), f"{path!r} has none.")
        return at[max(above, key=len)]

    return {path: place(path) for path in known}
