"""Cuts of models between parties, along depth or by branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fedjax_sim.models.model import Model
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.models.sequential import Layer, Places, run_layers
from fedjax_sim.types import PyTree
from fedjax_sim.validate import fail, integer, nearest, truth

__all__ = ["Cut", "cut"]


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

        return run_layers(self.model.layers, params, x, 0, "", across, self.places)[0]


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


def cut(model: Model, at: str | Sequence[str] | Places, *, u_shaped: bool = False, name: str = "at") -> Cut:
    """Shares a model's layers out among parties.

    Args:
      model: one with `layers`.
      at: names of layers, in their order: the model is cut after each, and party p holds what is between cut p - 1 and
        cut p. Or a dict from paths to parties: "block" places a layer and all inside it, "block/left" one branch of it,
        the longest path counts; every layer must be placed.
      u_shaped: the last part is party 0's as well, who then computes the output.
      name: what errors call `at`.

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
    layers = getattr(model, "layers", ())
    if not layers or not all(isinstance(one, Layer) for one in layers):
        hint = "Build it by models.sequential, or take linear, mlp, cnn, gru or lstm."
        if layers:
            hint = "A graph network's parties exchange nodes too: take algorithms.split_gnn or hierarchical_split_gnn."
        shown = [getattr(one, "name", one) for one in layers] or type(model).__name__
        fail("model", "one with layers along which it can be cut", shown, hint)
    truth("u_shaped", u_shaped)
    placed = isinstance(at, Mapping)
    if not placed and not isinstance(at, (str, Sequence)):
        fail(name, f"names of layers, such as {model.layers[0].name!r}, or who holds which", at, error=TypeError)
    if placed and u_shaped:
        fail("u_shaped", "False with a dict, which places the last layer itself", u_shaped)
    places = _chosen(model.layers, at, name) if placed else _along(model.layers, at, u_shaped, name)
    num_parties = 1 + max(places.values())
    missing = sorted(set(range(num_parties)) - set(places.values()))
    if missing or num_parties < 2:
        fail(name, "layers for every party, two at least", at, f"Without layers: {missing or [1]}.")
    for path in _first(model.layers):
        if places[path] != 0:
            fail(name, "the first layers with party 0, who has the examples", {path: places[path]})
    return Cut(model, num_parties, places, places[model.layers[-1].name])


def _along(layers: tuple[Layer, ...], at: str | Sequence[str], u_shaped: bool, name: str) -> dict[str, int]:
    names, at = [one.name for one in layers], (at,) if isinstance(at, str) else tuple(at)
    for one in at:
        if one not in names[:-1]:
            hint = "Nothing would follow the cut." if one == names[-1] else nearest(str(one), names[:-1])
            fail(name, f"layers among {names[:-1]}", one, hint)
    order = [names.index(one) for one in at]
    if not order or sorted(set(order)) != order:
        fail(name, "one layer or more, each once, in the model's order", at)
    if u_shaped and len(order) < 2:
        fail(name, "two cuts or more with u_shaped=True", at, "The last part comes back to party 0.")
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


def _chosen(layers: tuple[Layer, ...], at: Places, name: str) -> dict[str, int]:
    known = [path for one in layers for path in _all(one)]
    folders = {"/".join(path.split("/")[:i]) for path in known for i in range(1, path.count("/") + 2)}
    for path, party in at.items():
        if path not in folders:
            fail(name, f"paths among {sorted(folders)}", path, nearest(str(path), folders))
        integer(f"{name}[{path!r}]", party, 0)

    def place(path: str) -> int:
        above = [folder for folder in at if path == folder or path.startswith(folder + "/")]
        if not above:
            fail(name, "a party for every layer", dict(at), f"{path!r} has none.")
        return at[max(above, key=len)]

    return {path: place(path) for path in known}
