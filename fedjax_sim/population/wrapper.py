"""This module holds the base class of populations that wrap another one without changing the number of examples."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from fedjax_sim.population.protocol import count_of, sizes_of
from fedjax_sim.types import Array, CheapReads, Learned, Population, learned_from


class Around(CheapReads):
    """A dataclass that inherits from `Around` passes sizes and counts through from its field `inner`, a population.

    The dataclass defines `client` itself. Each client must have as many examples as in `inner`.

    Guarantees: poisoned clients have the same rows from memory, a shared table, the disk and size classes, and the
    capacities of the inner population (tests/population/poisoned/test_poisoning.py::test_any_population); clients with
    private labels have the inner sizes and counts (tests/population/test_private_labels.py::test_padding).
    """

    # Of every dataclass: `dataclasses.replace` takes classes with these fields.
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]
    inner: Population

    @property
    def sizes(self) -> Array:
        """[N] int32 examples per client."""
        return sizes_of(self.inner)

    # A field of a protocol is read only, but Python's types have no word for it.
    @property
    def capacities(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size classes of the inner population, () if it has none."""
        return self.inner.capacities if isinstance(self.inner, CheapReads) else ()

    @property
    def learned(self) -> tuple[Learned, ...] | None:
        """What was learnt from several clients' rows to prepare the inner population's inputs, see `types.Learned`."""
        return learned_from(self.inner)

    def capped(self, rows: int) -> Self:
        """Returns the same clients in arrays of `rows` rows, if the inner population has size classes."""
        if not isinstance(self.inner, CheapReads):
            return self
        return dataclasses.replace(self, inner=self.inner.capped(rows))

    def count(self, id: Array) -> Array:
        """Returns the number of examples of client `id`."""
        return count_of(self.inner, id)

    def announce(self, ids: Array) -> Array:
        """Returns `ids`, after the inner population was asked to read these clients ahead from its storage."""
        return self.inner.announce(ids) if isinstance(self.inner, CheapReads) else ids
