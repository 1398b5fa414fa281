"""Records of what was learnt from several clients' rows are kept by the populations inside of all wrappers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from fedjax_sim.types import Learned, Population


def with_records_changed(
    population: Population, change: Callable[[tuple[Learned, ...] | None], tuple[Learned, ...] | None]
) -> Population:
    """Returns the population with another record, wherever in it one is kept."""

    def changed(part: Any) -> Any:
        return dataclasses.replace(part, learned=change(part.learned)) if _keeps_record(part) else part

    return jax.tree.map(changed, population, is_leaf=_keeps_record)


def with_record(population: Population, record: Learned) -> Population:
    """Returns the population with one more record; one that states nothing (None) still states nothing."""
    return with_records_changed(population, lambda records: None if records is None else (*records, record))


def _keeps_record(part: Any) -> bool:
    """Returns whether a part of a population keeps a record itself, rather than by what is inside of it."""
    return dataclasses.is_dataclass(part) and any(field.name == "learned" for field in dataclasses.fields(part))
