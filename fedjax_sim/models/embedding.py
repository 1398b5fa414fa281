"""A model's embedding of its inputs: what one of its layers puts out."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_sim.models.cuts import cut
from fedjax_sim.models.model import Model
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import fail


def with_embedding(model: Model, layer: str | None) -> Callable:
    """Makes the function that computes a model's outputs and its embeddings in one pass.

    Args:
      model: with layers (`models.sequential`), two at least.
      layer: whose output, flattened for each row, is the embedding; None = the last layer but one. Errors call it
        `embedding`.

    Returns: (params, x [n, ...]) -> (outputs, embeddings [n, size]).

    Raises: ValueError for a model without layers or with one layer, and for a layer that is the last or does not exist.

    Guarantees: outputs have the bits of the model's (tests/models/test_sequential.py::
    test_every_cut_gives_the_same_bits).
    """
    names = [each.name for each in getattr(model, "layers", ())]
    if layer is None and len(names) == 1:
        fail("model", "one with a layer before the last one, whose output is the embedding", names)
    halves = cut(model, names[-2] if layer is None and names else layer or "", name="embedding")

    def embedded(params: PyTree, x: PyTree) -> tuple[PyTree, Array]:
        crossing = []

        def move(x, source, target, name):
            crossing.append(x)
            return x

        outputs = halves.apply(params, x, move)
        return outputs, crossing[0].reshape(crossing[0].shape[0], -1)

    return embedded
