"""Clients that start from models of their own, such as earlier broadcasts, in place of the server's broadcast."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from fedjax_sim import tree
from fedjax_sim.round.extension import Extension
from fedjax_sim.types import Array, PyTree


class Bases(NamedTuple):
    """The models from which the clients of a cohort start, where these are not the server's current broadcast."""

    models: PyTree  # leaves [V, ...], such as earlier broadcasts, or copies that clients train in turn
    row: Array  # [m] int32, of `models`, that each slot was sent
    factors: Array | None = None  # [m] float32 by which each slot's update is multiplied, before its transform; None: 1
    # [m] int32, the server's rounds before each slot was sent its model; None = all rounds so far
    versions: Array | None = None
    # (the aggregator's carry) -> models, for an aggregator whose carry holds the models and changes them (`in_turn`)
    kept: Callable | None = None


class _Base(NamedTuple):
    """The row of one slot."""

    row: Array  # [] int32, of the models
    factor: Array | None  # [] float32; None = 1


def starting_from(bases: Bases) -> Extension:
    """Returns the extension of a cohort whose clients start from these models.

    Aggregators see the broadcast all the same.

    Args:
      bases: the models, and which of them each slot was sent.

    Returns: `Extension`, for `collect`.

    Guarantees: each client starts from its own model, and its update is multiplied by its own factor
    (tests/round/test_bases.py::test_own_models_and_factors); asynchronous servers are those of an event loop
    (tests/algorithms/asynchronous/test_asynchronous.py::test_fedbuff_is_the_event_loop).
    """
    rows = _Base(bases.row, bases.factors)
    return Extension(
        rows=rows, shared=bases.models, versions=bases.versions, start=_own_model, scaled=_by_factor, renewed=bases.kept
    )


def _own_model(broadcast: PyTree, models: PyTree, base: _Base) -> PyTree:
    return jax.tree.map(lambda x: x[base.row], models)


def _by_factor(update: PyTree, base: _Base) -> PyTree:
    if base.factor is None:
        return update
    # Once: the search for its largest number would scale it anew, ten times as slowly.
    return jax.lax.optimization_barrier(tree.scaled(update, base.factor))
