"""Mappings of parts by name that read a part's source when the part is looked up.

A config names some ten of four hundred parts. To read the sources of all took a tenth of the time until a run's first
round.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

PartT = TypeVar("PartT")


class Read(Mapping[str, PartT], Generic[PartT]):
    """Parts by name, each of which is read once. The names are known beforehand.

    >>> parts = Read(["a", "b"], str.upper)
    >>> parts["a"], list(parts), "c" in parts
    ('A', ['a', 'b'], False)
    """

    def __init__(self, names: list[str], read: Callable[[str], PartT]):
        self._names = dict.fromkeys(names)
        self._read = read
        self._found: dict[str, PartT] = {}

    def __getitem__(self, name: str) -> PartT:
        if name not in self._found:
            if name not in self._names:
                raise KeyError(name)
            self._found[name] = self._read(name)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Chosen(Mapping[str, PartT], Generic[PartT]):
    """Those of some parts for which `admits` is true. A look-up asks for one part, and iteration for all of them.

    >>> list(Chosen({"a": 1, "b": 2}, lambda part: part > 1))
    ['b']
    """

    def __init__(self, parts: Mapping[str, PartT], admits: Callable[[PartT], bool]):
        self._parts = parts
        self._admits = admits

    def __getitem__(self, name: str) -> PartT:
        part = self._parts[name]
        if not self._admits(part):
            raise KeyError(name)
        return part

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._parts if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def union(*parts: Mapping[str, PartT]) -> Mapping[str, PartT]:
    """Returns the union of parts in their order; of two with the same name the later one counts, as in `a | b`.

    >>> union({"a": 1}, {"a": 2, "b": 3})["a"]
    2
    """
    return ChainMap(*reversed(parts))  # type: ignore[arg-type]  # nothing is ever set
