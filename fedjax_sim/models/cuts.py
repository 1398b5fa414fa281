"""This module cuts models between parties, along depth or by branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fedjax_sim.models.model import Model
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.models.sequential import Layer, Places, run_layers
from fedjax_sim.types import PyTree
from fedjax_sim.validate import fail, integer, nearest, truth


class Cut(NamedTuple):
    """A `Cut` is a model whose layers are held by parties 0, 1, ..., P - 1. Party 0 has the examples."""

    model: Model
    num_parties: int
    places: Places  # path of every layer -> its party. A layer with branches belongs to the party of its join.
    last: int  # the party that computes the output

    def split(self, params: PyTree) -> tuple[PyTree, ...]:
        """Returns the parameters of each party, as nested dicts.

        Guarantees: every leaf is in one part, and `join` is the inverse
        (tests/models/test_sequential.py::test_parameters_are_shared_out).
        """
        paths = _party_of_params(self.model.layers, self.places)
        remaining_params = params
        parts = []
        for party in range(self.num_parties):
            party_paths = [path for path, place in paths.items() if place == party]
            party_params, remaining_params = partition(remaining_params, party_paths)
            parts.append(party_params)
        return tuple(parts)

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """Joins the parameters of all parties to those of the whole model."""
        params: PyTree = {}
        for part in parts:
            params = combine(params, part)
        return params

    def apply(self, params: PyTree, x: PyTree, move: Callable) -> PyTree:
        """Computes the model's output at party `last`.

        Args:
          params: of the whole model.
          x: a batch, at party 0.
          move: (x, source, target, name) -> what the target receives. It is called once for each message, that is if
            source and target differ. `name` is the path of the layer that receives the message.
        """

        def across(x, source, target, name):
            return x if source == target else move(x, source, target, name)

        return run_layers(self.model.layers, params, x, holder=0, path="", move=across, places=self.places)[0]


def _party_of_params(layers: Sequence[Layer], places: Places, prefix: str = "", where: str = "") -> dict[str, int]:
    """Maps the path of each layer's parameters to the party that holds the layer."""
    party_of_path: dict[str, int] = {}
    for layer in layers:
        layer_path = f"{where}{layer.name}"
        for branch, inner_layers in layer.branches:
            party_of_path |= _party_of_params(
                inner_layers, places, f"{prefix}{layer.name}/{branch}/", f"{layer_path}/{branch}/"
            )
        if not layer.branches:
            party_of_path |= {f"{prefix}{key}": places[layer_path] for key in layer.keys}
    return party_of_path


def cut(model: Model, at: str | Sequence[str] | Places, *, u_shaped: bool = False, name: str = "at") -> Cut:
    """Divides the layers of a model among parties.

    Args:
      model: a model with `layers`.
      at: where the model is cut, in one of two forms.
        Names of layers, in their order: the model is cut after each of them, and party p holds the layers between cut
        p - 1 and cut p.
        A dict from paths to parties: "block" places a layer and everything inside it, "block/left" one branch of the
        layer. If several paths match a layer, the longest counts. Every layer must be placed.
      u_shaped: whether party 0 also holds the last part, and so computes the output.
      name: the name of `at` in error messages.

    Returns: the `Cut`.

    Raises: ValueError for a model without layers, a layer that does not exist, and a cut that leaves a party without
    layers. ValueError also if party 0 does not hold the first layers, because examples would then be sent.

    Guarantees: for every cut, along depth or by branch, outputs and gradients have the same bits as those of the model
    (tests/models/test_sequential.py::test_every_cut_gives_the_same_bits).

    References: Gupta and Raskar 2018; Vepakomma et al. 2018, figure 2 (U-shaped).

    >>> from fedjax_sim.models import mlp
    >>> split_model = cut(mlp(input_shape=(4,), num_outputs=2, hidden=(3, 3)), "hidden_0")
    >>> dict(split_model.places)
    {'hidden_0': 0, 'hidden_1': 1, 'output': 1}
    """
    layers = getattr(model, "layers", ())
    if not layers or not all(isinstance(layer, Layer) for layer in layers):
        hint = "Build it by models.sequential, or take linear, mlp, cnn, gru, lstm or transformer."
        if layers:
            hint = "A graph network's parties exchange nodes too: take algorithms.split_gnn or hierarchical_split_gnn."
        shown = [getattr(layer, "name", layer) for layer in layers] or type(model).__name__
        fail("model", "one with layers along which it can be cut", shown, hint)
    truth("u_shaped", u_shaped)
    is_by_path = isinstance(at, Mapping)
    if not is_by_path and not isinstance(at, (str, Sequence)):
        fail(name, f"names of layers, such as {model.layers[0].name!r}, or who holds which", at, error=TypeError)
    if is_by_path and u_shaped:
        fail("u_shaped", "False with a dict, which places the last layer itself", u_shaped)
    places = (
        _places_by_path(model.layers, at, name) if is_by_path else _places_by_depth(model.layers, at, u_shaped, name)
    )
    num_parties = 1 + max(places.values())
    # Parties are numbered without gaps, so the largest number tells how many there are.
    parties_without_layers = sorted(set(range(num_parties)) - set(places.values()))
    if parties_without_layers or num_parties < 2:
        hint = f"Without layers: {parties_without_layers or [1]}."
        fail(name, "layers for every party, two at least", at, hint)
    # A layer that reads the examples at another party would need the examples there.
    for path in _input_layer_paths(model.layers):
        if places[path] != 0:
            fail(name, "the first layers with party 0, who has the examples", {path: places[path]})
    return Cut(model, num_parties, places, places[model.layers[-1].name])


def _places_by_depth(layers: tuple[Layer, ...], at: str | Sequence[str], u_shaped: bool, name: str) -> dict[str, int]:
    """Maps the path of every layer to its party, for cuts after the layers named in `at`.

    The party of a layer is the number of cuts before it. All layers inside of a layer's branches have its party.

    Args:
      layers: of the model, on the outermost level.
      at: the name of one layer or of several, in the model's order. The last layer is not among them.
      u_shaped: whether the layers behind the last cut belong to party 0. There are then two cuts at least.
      name: the name of `at` in error messages.

    Returns: path -> party, in [0, number of cuts]; with `u_shaped` the largest is the number of cuts minus 1.

    Raises: ValueError for other names, and for names that repeat or stand in another order.
    """
    names = [layer.name for layer in layers]
    at = (at,) if isinstance(at, str) else tuple(at)
    for cut_layer in at:
        if cut_layer not in names[:-1]:
            hint = "Nothing would follow the cut." if cut_layer == names[-1] else nearest(str(cut_layer), names[:-1])
            fail(name, f"layers among {names[:-1]}", cut_layer, hint)
    cut_positions = [names.index(cut_layer) for cut_layer in at]
    if not cut_positions or sorted(set(cut_positions)) != cut_positions:
        fail(name, "one layer or more, each once, in the model's order", at)
    if u_shaped and len(cut_positions) < 2:
        fail(name, "two cuts or more with u_shaped=True", at, "The last part comes back to party 0.")
    # The party of a layer is the number of cuts before it.
    parties = [sum(i > position for position in cut_positions) for i in range(len(names))]
    if u_shaped:
        parties = [0 if party == len(cut_positions) else party for party in parties]
    party_of_path: dict[str, int] = {}
    for layer, party in zip(layers, parties, strict=True):
        party_of_path |= dict.fromkeys(_layer_paths(layer), party)
    return party_of_path


def _layer_paths(layer: Layer, where: str = "") -> list[str]:
    """Returns the paths of a layer and of all layers in its branches."""
    inner_paths = [
        path
        for branch, inner_layers in layer.branches
        for inner_layer in inner_layers
        for path in _layer_paths(inner_layer, f"{where}{layer.name}/{branch}/")
    ]
    return [f"{where}{layer.name}", *inner_paths]


def _input_layer_paths(layers: Sequence[Layer], where: str = "") -> list[str]:
    """Returns the paths of the layers that read the input of the first layer."""
    first_layer = layers[0]
    inner_paths = [
        path
        for branch, inner_layers in first_layer.branches
        if inner_layers
        for path in _input_layer_paths(inner_layers, f"{where}{first_layer.name}/{branch}/")
    ]
    # A layer without branches reads the input itself. So does the join, if the input passes through an empty branch.
    reads_input = not first_layer.branches or any(not inner_layers for _, inner_layers in first_layer.branches)
    return inner_paths + [f"{where}{first_layer.name}"] * reads_input


def _places_by_path(layers: tuple[Layer, ...], at: Places, name: str) -> dict[str, int]:
    """Maps the path of every layer to its party, for a dict `at` of paths of layers or branches.

    Args:
      layers: of the model, on the outermost level.
      at: path of a layer or of a branch -> its party, an integer >= 0, which counts for everything inside. If several
        paths match a layer, the longest counts.
      name: the name of `at` in error messages.

    Returns: path of each layer -> its party.

    Raises: ValueError for a path that the model lacks, a party below 0, and a layer that no path matches; TypeError for
      a party that is no integer.
    """
    layer_paths = [path for layer in layers for path in _layer_paths(layer)]
    # A branch may be named too, although it is not a layer: every prefix of a layer's path is allowed.
    allowed_paths = {"/".join(path.split("/")[:i]) for path in layer_paths for i in range(1, path.count("/") + 2)}
    for path, party in at.items():
        if path not in allowed_paths:
            fail(name, f"paths among {sorted(allowed_paths)}", path, nearest(str(path), allowed_paths))
        integer(f"{name}[{path!r}]", party, 0)

    def party_of(layer_path: str) -> int:
        matching_paths = [path for path in at if layer_path == path or layer_path.startswith(path + "/")]
        if not matching_paths:
            fail(name, "a party for every layer", dict(at), f"{layer_path!r} has none.")
        return at[max(matching_paths, key=len)]

    return {path: party_of(path) for path in layer_paths}
