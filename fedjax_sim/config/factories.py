"""Making the parts that a config's tables name, and collecting what their factories refuse."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_sim.config import registry
from fedjax_sim.config.document import Config, ConfigError
from fedjax_sim.config.signatures import Part
from fedjax_sim.transform import chain
from fedjax_sim.types import Devices
from fedjax_sim.validate import InvalidArgument

__all__ = ["Maker"]

MOST_REORDERED = 5  # wrappers of a table whose 120 orders are tried where that of the file does not work


class Maker:
    """Makes parts by the names and options in a config's tables; what a factory refuses is added to `problems`.

    Args:
      config: as `config.load` returns it.
    """

    def __init__(self, config: Config):
        self.tables = config.resolved()
        self.parts = {
            name: registry.parts_of_table(name)[self.tables[name]["name"]]
            for name in registry.TABLES
            if name in self.tables and name not in registry.CHAINS
        }
        self.problems: list[str] = []
        self.devices: Devices | None = None  # what every part gets whose factory takes devices

    def stop(self) -> None:
        """Raises ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(self.problems)

    def make(self, table: str, **given: Any) -> Any:
        """The part that a table of the config names, with its options from there.

        Args:
          table: such as "sampler".
          given: arguments that do not come from the table; the factory gets those that it takes. `num_examples`,
            `total_weight` and `weights` are functions, called only if it takes them. `inside` are those of parts inside
            the part, where these are not the same; all but samplers inside are of its `all_clients`.

        Returns: the part; None, with a new problem, where the factory refuses, and None for an absent table.
        """
        return self._made(self.parts[table], table, self.tables[table], given) if table in self.parts else None

    def wrapped(self, table: str, goes_last: Callable[[Any], bool] = lambda made: False, **given: Any) -> Any:
        """The part that a table names, inside the wrappers that the table holds, in the order of the file.

        Where a wrapper refuses that order, the problem names one that works, if there is one.

        Args:
          table, given: as for `make`.
          goes_last: whether a part is such that no wrapper may go around it: the wrapper that makes it so goes last.

        Returns: as `make`.
        """
        plain = self.make(table, **given)
        wrappers = registry.wrappers(table)
        problems = len(self.problems)
        names = [name for name, x in self.tables.get(table, {}).items() if name in wrappers and isinstance(x, dict)]
        made = plain
        last = []
        for name in names:
            outer = None if made is None else self._around(table, name, made, given)
            if outer is not None and name != names[-1] and goes_last(outer) and not goes_last(made):
                last.append(name)
            else:
                made = outer
        for name in last:
            made = None if made is None else self._around(table, name, made, given)
        if plain is not None and made is None and 1 < len(names) <= MOST_REORDERED:
            order = self._order(table, plain, names, given)
            if order is not None:
                words = ", ".join(f"[{table}.{name}]" for name in order)
                self.problems[problems] += f" In this order they work: {words}."
        return made

    def _around(self, table: str, name: str, inner: Any, given: dict[str, Any]) -> Any:
        """A wrapper of a table around a part; None, with a new problem, where it refuses."""
        wrapper = registry.wrappers(table)[name]
        takes = {registry.takes(wrapper, table): inner}
        return self._made(wrapper, f"{table}.{name}", self.tables[table][name], given | takes)

    def _order(self, table: str, inner: Any, names: list[str], given: dict[str, Any]) -> list[str] | None:
        """The first order, by the file's, in which all these wrappers go around a part; None if there is none."""
        for name in names:
            problems = len(self.problems)
            outer = self._around(table, name, inner, given)
            del self.problems[problems:]  # only a trial
            others = [other for other in names if other != name]
            order = None if outer is None else self._order(table, outer, others, given) if others else []
            if order is not None:
                return [name, *order]
        return None

    def chain(self, table: str, population_size: int, path: str = "", given: dict | None = None) -> Any:
        """The transforms that a table of `registry.CHAINS` holds, chained in the order of the file; None without any.

        Args:
          path, given: of an inner table, for a wrapper's own transforms; by default the whole table.
        """
        path = path or table
        given = self.tables.get(table, {}) if given is None else given
        choices = registry.parts_of_table(table) | registry.wrappers(table)
        members = []
        for name, options in given.items():
            part = choices[name]
            here = f"{path}.{name}"
            known: dict[str, Any] = {"population_size": population_size}
            if inner := {key: value for key, value in options.items() if isinstance(value, dict)}:
                known["transform"] = self.chain(table, population_size, here, inner)
            members.append(None if inner and known["transform"] is None else self._made(part, here, options, known))
        if not members or None in members:
            return None
        return members[0] if len(members) == 1 else self.attempt(table, {}, lambda: chain(*members))

    def _made(self, part: Part, path: str, options: dict[str, Any], given: dict[str, Any], inside: bool = False) -> Any:
        """What a part's factory returns for its options, and those of the `given` arguments that it takes."""
        kinds = registry.inside_options(part) if inside else part.options
        options = {key: value for key, value in options.items() if key in kinds}
        problems = len(self.problems)
        for key, value in options.items():
            if isinstance(value, dict):
                here = f"{path}.{key}"
                known = given.get("inside", given)
                if table := registry.chained(kinds[key].kind, value):
                    options[key] = self.chain(table, known.get("population_size"), here, value)
                    continue
                inner = registry.named(kinds[key].kind)[value["name"]]
                if inner.returns != "Sampler" and "all_clients" in known:  # a sampler inside draws places in a group
                    known = known | {"population_size": known["all_clients"]}
                options[key] = self._made(inner, here, value, known, True)
        if len(self.problems) > problems:
            return None
        if "seed" in part.options:
            options.setdefault("seed", self.tables["seed"])
        given = given | {key: self.devices for key, argument in part.parts.items() if argument.noun == "Devices"}
        given |= {key: given[name] for key, name in part.values.items() if name in given}
        taken = part.parts.keys() | part.values.keys() | part.options.keys()

        def call():
            known = {key: value for key, value in given.items() if key in taken}
            lazy = {key: known[key]() for key in ("num_examples", "total_weight", "weights") if key in known}
            return _factory(part)(**options | known | lazy)

        tables = {argument: table for table in registry.TABLES if (argument := registry.takes(part, table))}
        return self.attempt(path, part.options, call, tables)

    def attempt(self, path: str, options: Any, call: Callable, tables: Mapping[str, str] | None = None) -> Any:
        """What `call` returns; or None, and a problem, if it raises an error about its arguments.

        Args:
          path: of the part in the config, such as "sampler.with_dropout".
          options: names of the part's options, which `path` is put before.
          tables: the tables of its arguments that are other parts, such as "client_optimizer" for `optimizer`.

        Raises: TypeError, ValueError as `call` does where they are no `InvalidArgument`: a bug, not a wrong config.
        """
        try:
            return call()
        except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
            words = str(error)
            of_a_check = isinstance(error, (ImportError, MemoryError, OSError, InvalidArgument))
            if not of_a_check and path != "data":
                raise
            name = re.match(r"\w*", words)[0]
            if tables and name in tables:
                name, words = tables[name], tables[name] + words.removeprefix(name)
            other = name == path or (path == "algorithm" and name in registry.TABLES)  # it names the wrong part itself
            self.problems.append(words if other else f"{path}.{words}" if name in options else f"{path}: {words}")
            return None


def _factory(part: Part) -> Callable:
    return getattr(importlib.import_module(part.module), part.name)
