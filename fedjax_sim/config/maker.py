"""Making the parts that a config's tables name, and collecting what their factories refuse."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from fedjax_sim.config import registry
from fedjax_sim.config.document import Config, ConfigError
from fedjax_sim.config.signatures import Part
from fedjax_sim.transform import chain
from fedjax_sim.types import Devices

__all__ = ["Maker"]


class Maker:
    """Makes parts by the names and options in a config's tables; what a factory refuses is added to `problems`.

    Args:
      config: as `config.load` returns it.
    """

    def __init__(self, config: Config):
        self.tables = config.resolved()
        self.parts = {
            name: registry.table(name)[self.tables[name]["name"]]
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

    def wrapped(self, table: str, **given: Any) -> Any:
        """The part that a table names, inside the wrappers that the table holds, in the order of the file.

        Arguments and result as for `make`.
        """
        made, wrappers = self.make(table, **given), registry.wrappers(table)
        for name, options in self.tables.get(table, {}).items():
            if made is not None and name in wrappers and isinstance(options, dict):
                inner = {registry.takes(wrappers[name], table): made}
                made = self._made(wrappers[name], f"{table}.{name}", options, given | inner)
        return made

    def chain(self, table: str, population_size: int, path: str = "", given: dict | None = None) -> Any:
        """The transforms that a table of `registry.CHAINS` holds, chained in the order of the file; None without any.

        Args:
          path, given: of an inner table, for a wrapper's own transforms; by default the whole table.
        """
        path, given = path or table, self.tables.get(table, {}) if given is None else given
        choices, members = registry.table(table) | registry.wrappers(table), []
        for name, options in given.items():
            part, here = choices[name], f"{path}.{name}"
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
        options, problems = {key: value for key, value in options.items() if key in kinds}, len(self.problems)
        for key, value in options.items():
            if isinstance(value, dict):
                here, known = f"{path}.{key}", given.get("inside", given)
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
        taken = part.parts.keys() | part.values | part.options.keys()

        def call():
            known = {key: value for key, value in given.items() if key in taken}
            lazy = {key: known[key]() for key in ("num_examples", "total_weight", "weights") if key in known}
            return _factory(part)(**options | known | lazy)

        return self.attempt(path, part.options, call)

    def attempt(self, path: str, options: Any, call: Callable) -> Any:
        """What `call` returns; or None, and a problem, if it raises an error about its arguments.

        Args:
          path: of the part in the config, such as "sampler.with_dropout".
          options: names of the part's options, which `path` is put before.

        Raises: TypeError, ValueError as `call` does where the text is not that of a check: a bug, not a wrong config.
        """
        try:
            return call()
        except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
            words = str(error)
            if not isinstance(error, (ImportError, MemoryError, OSError)) and not (
                ": expected " in words or path == "data"
            ):
                raise
            name = re.match(r"\w*", words)[0]
            other = name == path or (path == "algorithm" and name in registry.TABLES)  # it names the wrong part itself
            self.problems.append(words if other else f"{path}.{words}" if name in options else f"{path}: {words}")
            return None


def _factory(part: Part) -> Callable:
    return getattr(importlib.import_module(part.module), part.name)
