"""What a wing adds to the slots of a cohort, such as models of its own from which clients start: `Extension`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedjax_sim.types import Array, PyTree


def _from_the_broadcast(broadcast: PyTree, shared: PyTree, row: PyTree) -> PyTree:
    return broadcast


def _in_full(update: PyTree, row: PyTree) -> PyTree:
    return update


class Extension(NamedTuple):
    """Records that a wing adds to the slots of a cohort, and functions that say what clients do with them.

    `collect` hands the records to the clients and calls the functions; it does not know what the records mean. A field
    that is left out is what an ordinary round does. `round.bases` has an extension.
    """

    rows: PyTree = None  # leaves [m, ...]; each client sees the row of its slot
    shared: PyTree = None  # what all clients of the round see
    # [m] int32, the server's rounds before each slot was sent its model; None = all rounds so far
    versions: Array | None = None
    # (broadcast, `shared`, a slot's row) -> the model that its client starts from
    start: Callable = _from_the_broadcast
    # (update, a slot's row) -> the update that goes into its transform
    scaled: Callable = _in_full
    # (the aggregator's carry) -> `shared`, for an aggregator whose carry holds it and changes it (`collect.in_turn`);
    # None = it is the same for all clients
    renewed: Callable | None = None
