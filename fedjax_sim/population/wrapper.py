"""A population around another one, whose clients hold as many examples as inside."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax.numpy as jnp

from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.types import Array, Population

__all__ = ["Around"]


class Around:
    """What a dataclass with a field `inner`, a population, takes over from it; `client` is its own.

    Guarantees: tests/population/poisoned/test_poisoning.py and tests/population/test_private_labels.py, whose
    populations are made of it.
    """

    inner: Population

    @property
    def sizes(self) -> Array:
        """[N] int32 examples per client."""
        return sizes_of(self.inner)

    @property
    def capacities(self) -> tuple[int, ...]:
        """As the inner population's; () where it has none."""
        return getattr(self.inner, "capacities", ()) if hasattr(self.inner, "capped") else ()

    def capped(self, rows: int) -> Self:
        """The same clients in arrays of `rows` rows, where the inner population has such."""
        return dataclasses.replace(self, inner=self.inner.capped(rows))

    def count(self, id: Array) -> Array:
        """Examples of client `id`."""
        inner = self.inner
        return inner.count(id) if hasattr(inner, "count") else inner.client(id).mask.sum(dtype=jnp.int32)

    def announce(self, ids: Array) -> Array:
        """`ids`, after the inner population's storage was asked to read ahead."""
        return self.inner.announce(ids) if hasattr(self.inner, "announce") else ids
