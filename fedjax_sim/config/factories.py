"""Makes the parts that a config's tables name, and collects what their factories refuse."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from fedjax_sim import validate
from fedjax_sim.config import registry
from fedjax_sim.config.document import Config, ConfigError
from fedjax_sim.config.lazy_parts import union
from fedjax_sim.config.signatures import Named, Part
from fedjax_sim.transform import chain
from fedjax_sim.types import Devices
from fedjax_sim.validate import InvalidArgument

# If the order of the file does not work, at most 5! = 120 orders of a table's wrappers are tried.
MOST_REORDERED = 5


class Maker:
    """Makes parts by the names and options in a config's tables, and adds every refusal of a factory to `problems`.

    Args:
      config: as `config.load` returns it.
    """

    def __init__(self, config: Config):
        self.config = config
        self.tables = config.resolved()
        self.parts = {
            name: registry.parts_of_table(name)[self.tables[name]["name"]]
            for name in registry.TABLES
            if name in self.tables and name not in registry.CHAINS
        }
        self.problems: list[str] = []
        self.devices: Devices | None = None  # given to every part whose factory takes devices

    def stop(self) -> None:
        """Raises ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(self.problems)

    def make(self, table: str, **given: Any) -> Any:
        """Makes the part that a table of the config names, with the options from that table.

        Args:
          table: the table's name, such as "sampler".
          given: arguments that do not come from the table. The factory gets those that it takes. `num_examples`,
            `total_weight` and `weights` are functions, called only if the factory takes them. `inside` holds the
            arguments for parts inside the part, where they differ. All parts inside except samplers are made for its
            `all_clients` clients.

        Returns: the part; None for an absent table; None, with a new problem, if the factory refuses its arguments.
        """
        return self._made(self.parts[table], table, self.tables[table], given) if table in self.parts else None

    def named(self, kind: Named, name: str, path: str) -> Any:
        """Makes a part that a list of names holds, with the defaults of its options.

        Args:
          kind: of the part.
          name: of one of `registry.named(kind)`.
          path: of the list in the config, such as "run.metrics".

        Returns: the part; None, with a new problem, if the factory refuses.
        """
        return self._made(registry.named(kind)[name], path, {}, {}, inside=True)

    def wrapped(
        self,
        table: str,
        goes_last: Callable[[Any], bool] = lambda part: False,
        outermost: Callable | None = None,
        **given: Any,
    ) -> Any:
        """Makes the part that a table names, inside the wrappers that the table holds, in the order of the file.

        If a wrapper refuses that order, the problem names an order that works, if there is one.

        Args:
          table, given: as for `make`.
          goes_last: tells whether a part accepts no further wrapper around it; the wrapper that returns such a part
            goes last.
          outermost: the factory of a wrapper that goes around all others, wherever its table stands; None for none.

        Returns: as `make`.
        """
        plain = self.make(table, **given)
        wrappers = registry.wrappers(table)
        num_problems_before = len(self.problems)
        table_items = self.tables.get(table, {}).items()
        names = [name for name, options in table_items if name in wrappers and isinstance(options, dict)]
        around_all = [name for name in names if outermost is not None and wrappers[name].module == outermost.__module__]
        names = [name for name in names if name not in around_all]
        part = plain
        names_that_go_last = []
        for name in names:
            outer = None if part is None else self._around(table, name, part, given)
            if outer is not None and name != names[-1] and goes_last(outer) and not goes_last(part):
                names_that_go_last.append(name)
            else:
                part = outer
        for name in names_that_go_last + around_all:
            part = None if part is None else self._around(table, name, part, given)
        if plain is not None and part is None and 1 < len(names) <= MOST_REORDERED:
            order = self._order(table, plain, names, given)
            if order is not None:
                words = ", ".join(f"[{table}.{name}]" for name in order)
                # The first problem since the start is the refusal that the order explains.
                self.problems[num_problems_before] += f" In this order they work: {words}."
        return part

    def _around(self, table: str, name: str, inner: Any, given: dict[str, Any]) -> Any:
        """Makes a wrapper of a table around a part; returns None, with a new problem, if the wrapper refuses."""
        wrapper = registry.wrappers(table)[name]
        argument = registry.takes(wrapper, table)
        assert argument is not None, "`registry.wrappers` has parts alone that take a part of the table"
        return self._made(wrapper, f"{table}.{name}", self.tables[table][name], given | {argument: inner})

    def _order(self, table: str, inner: Any, names: list[str], given: dict[str, Any]) -> list[str] | None:
        """Returns the first order, by the file's, in which all these wrappers go around a part; None without any."""
        for name in names:
            num_problems_before = len(self.problems)
            outer = self._around(table, name, inner, given)
            # This is only a trial: its refusals are not the user's.
            del self.problems[num_problems_before:]
            others = [other for other in names if other != name]
            order = None if outer is None else self._order(table, outer, others, given) if others else []
            if order is not None:
                return [name, *order]
        return None

    def chain(self, table: str, population_size: int, path: str = "", given: dict | None = None) -> Any:
        """Makes the transforms that a table holds, chained in the order of the file.

        Args:
          table: the table's name, "transform" or "downlink".
          population_size: N, the number of clients.
          path, given: the path and the content of an inner table, for a wrapper's own transforms; by default the whole
            table.

        Returns: the transform; None if the table holds none, or if a factory refuses its arguments.
        """
        members = self.members(table, population_size, path, given)
        if not members:
            return None
        return members[0] if len(members) == 1 else self.attempt(table, {}, lambda: chain(*members))

    def members(self, table: str, population_size: int, path: str = "", given: dict | None = None) -> list | None:
        """Makes the parts that a table of `registry.CHAINS` holds, in the order of the file.

        Args:
          table: the table's name.
          population_size, path, given: as in `chain`.

        Returns: the parts, [] without any; None if a factory refuses its arguments.
        """
        path = path or table
        options_by_name = self.tables.get(table, {}) if given is None else given
        choices = union(registry.parts_of_table(table), registry.wrappers(table))
        members = []
        for name, options in options_by_name.items():
            part = choices[name]
            member_path = f"{path}.{name}"
            arguments: dict[str, Any] = {"population_size": population_size}
            argument = registry.takes(part, "transform") or "transform"
            if inner_transforms := {key: value for key, value in options.items() if isinstance(value, dict)}:
                arguments[argument] = self.chain(table, population_size, member_path, inner_transforms)
            inner_refused = bool(inner_transforms) and arguments[argument] is None
            members.append(None if inner_refused else self._made(part, member_path, options, arguments))
        return None if None in members else members

    def _made(self, part: Part, path: str, options: dict[str, Any], given: dict[str, Any], inside: bool = False) -> Any:
        """Calls a part's factory with its options, and with those of the `given` arguments that it takes.

        Args:
          part: the part, from the registry.
          path: its path in the config.
          options: its options as the config has them; tables among them are parts, which are made here.
          given: as in `make`.
          inside: whether the part is an option of another part.
        """
        known_options = registry.inside_options(part) if inside else part.options
        options = {key: value for key, value in options.items() if key in known_options}
        num_problems_before = len(self.problems)
        for key, value in options.items():
            if isinstance(value, dict) and isinstance(known_options[key].kind, Named):
                option_path = f"{path}.{key}"
                given_inside = given.get("inside", given)
                if table := registry.chained(known_options[key].kind, value):
                    options[key] = self.chain(table, given_inside.get("population_size"), option_path, value)
                    continue
                inner_part = registry.named(known_options[key].kind)[value["name"]]
                # A sampler inside draws positions within a group; every other part inside knows all clients.
                if inner_part.returns != "Sampler" and "all_clients" in given_inside:
                    given_inside = given_inside | {"population_size": given_inside["all_clients"]}
                options[key] = self._made(inner_part, option_path, value, given_inside, True)
        if len(self.problems) > num_problems_before:
            return None
        if "seed" in part.options:
            options.setdefault("seed", self.tables["seed"])
        given = given | {key: self.devices for key, argument in part.parts.items() if argument.noun == "Devices"}
        given |= {key: given[name] for key, name in part.values.items() if name in given}
        taken_names = part.parts.keys() | part.values.keys() | part.options.keys()

        def call():
            arguments = {key: value for key, value in given.items() if key in taken_names}
            for key, argument in part.parts.items():
                if argument.required and key not in options | arguments:
                    hint = f"No table of a config gives one to {part.name} here: make it inside, or give it a default."
                    validate.fail(key, f"a part of the type {argument.noun}", None, hint)
            # These three are functions, since counting examples reads the whole population.
            counts = {key: arguments[key]() for key in ("num_examples", "total_weight", "weights") if key in arguments}
            return _factory(part)(**options | arguments | counts)

        tables = {argument: table for table in registry.TABLES if (argument := registry.takes(part, table))}
        return self.attempt(path, part.options, call, tables)

    def attempt(self, path: str, options: Any, call: Callable, tables: Mapping[str, str] | None = None) -> Any:
        """Returns what `call` returns; None, with a new problem, if it raises an error about its arguments.

        Args:
          path: the path of the part in the config, such as "sampler.with_dropout".
          options: the names of the part's options. An error about an option gets the path before the option's name.
          call: makes the part.
          tables: the tables of those arguments that are other parts, such as "client_optimizer" for `optimizer`; None
            for none.

        Raises: TypeError, ValueError as `call` does, if they are no `InvalidArgument`: they show a bug and not a wrong
        config.
        """
        try:
            return call()
        except (ImportError, MemoryError, OSError, TypeError, ValueError) as error:
            words = str(error)
            is_refusal = isinstance(error, (ImportError, MemoryError, OSError, InvalidArgument))
            # Whatever goes wrong while data are read is a problem of the data.
            if not is_refusal and path != "data":
                raise
            # A refusal starts with the argument's name, which a user of configs knows as an option or as a table.
            name = re.split(r"\W", words, maxsplit=1)[0]
            if tables and name in tables:
                name, words = tables[name], tables[name] + words.removeprefix(name)
            # An algorithm may refuse another part, whose table then stands alone as the path.
            names_its_table = name == path or (path == "algorithm" and name in registry.TABLES)
            self.problems.append(
                words if names_its_table else f"{path}.{words}" if name in options else f"{path}: {words}"
            )
            return None


def _factory(part: Part) -> Callable:
    """Imports a part's module and returns its factory."""
    return getattr(importlib.import_module(part.module), part.name)
