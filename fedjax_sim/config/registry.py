"""The registry of all parts that a config can name, read from the subpackages' sources without importing them.

Every factory named in a subpackage's `__all__` is registered; its options are the arguments whose annotations TOML can
express, and an argument annotated as a part (a `Sampler`, an `Aggregator`, ...) takes what the config's table of that
part makes. Nothing here imports JAX, so that wrong configs are refused, and `fedjax-sim list` prints, without delay.

Guarantees: every public factory is found
(tests/config/test_document.py::test_registry_holds_what_the_subpackages_publish), and every one that a config can name
can be built (::test_every_part_builds).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from fedjax_sim.config.signatures import INSIDE, NOUNS, REQUIRED, TABLES, Named, Option, Part, parts
from fedjax_sim.config.value_kinds import FILE, FOLDER

__all__ = [
    "CHAINS",
    "REQUIRED",
    "SUBPACKAGES",
    "TABLES",
    "Named",
    "chained",
    "inside_options",
    "insides",
    "is_path",
    "named",
    "named_in",
    "parts",
    "parts_of_table",
    "shown",
    "takes",
    "wrappers",
]

SUBPACKAGES = (
    "population",
    "models",
    "network",
    "sampling",
    "client",
    "client.optimizers",
    "transform",
    "aggregation",
    "server",
    "server.staleness",
    "adversary",
    "algorithms",
)
CHAINS = ("transform", "downlink")  # tables that hold any number of parts, as inner tables, applied in their order
WRAPPED = ("data", "sampler", "aggregator", *CHAINS)  # tables whose parts may be wrapped by others of the same kind
WRAPPERS = "adversary"  # the subpackage that has wrappers too, of any table


def shown(default: Any) -> str:
    """A default as text, for `fedjax-sim list`.

    >>> shown(REQUIRED), shown(None), shown([1.5])
    ('(required)', 'none', '[1.5]')
    """
    return "(required)" if default is REQUIRED else "none" if default is None else json.dumps(default)


@cache
def parts_of_table(name: str) -> dict[str, Part]:
    """The parts that a config's table may name: factories whose arguments TOML and other parts can give.

    Args:
      name: of the table, one of `TABLES`.

    Returns: parts by name, without wrappers.

    Raises: KeyError for another table.

    >>> {"fixed_mean", "horvitz_thompson", "keep_old"} <= parts_of_table("aggregator").keys()
    True
    """
    return {key: part for key, part in _factories(*TABLES[name]).items() if not _wraps(part, name)}


@cache
def wrappers(name: str) -> dict[str, Part]:
    """The wrappers of a table: factories that take a part of it and return another one, such as `with_dropout`.

    Args:
      name: of the table; those that are not in `WRAPPED` have none.

    Returns: parts by name.

    >>> {"with_dropout", "with_clock"} <= wrappers("sampler").keys()
    True
    """
    if name not in WRAPPED:
        return {}
    here, noun = TABLES[name]
    found = _factories(here, noun) | _factories(WRAPPERS, noun)
    return {key: part for key, part in found.items() if _wraps(part, name)}


def named_in(name: str, options: Mapping[str, Any]) -> list[Part]:
    """The part that a table names and the wrappers that it holds; without what is not known.

    >>> [part.name for part in named_in("sampler", {"name": "uniform", "cohort_size": 3, "with_dropout": {}})]
    ['uniform', 'with_dropout']
    """
    choices = parts_of_table(name)
    wraps = wrappers(name)
    return [choices[key] for key in [options.get("name")] if key in choices] + [
        wraps[key] for key in options if key in wraps
    ]


@cache
def insides(subpackage: str) -> dict[str, Part]:
    """All factories of a subpackage that options of other parts may name."""
    return named(Named(tuple(name for name, where in INSIDE.items() if where == subpackage)))


@cache
def named(kind: Named) -> dict[str, Part]:
    """The factories that an option of this kind may name.

    A part that a table of the config could name as well is left out where it needs more than the number of clients: the
    law of the sampler, say, is that of the config's own table.

    >>> sorted(named(Named(("Attackers",))))
    ['clients', 'poisoned', 'share_of_clients']
    >>> "poisson" in named(Named(("Sampler",))), "weighted" in named(Named(("Sampler",)))
    (True, False)
    """
    where = INSIDE | NOUNS
    found = {key: part for name in kind.types for key, part in parts(where[name]).items() if not part.others}
    found = {key: part for key, part in sorted(found.items()) if part.returns.split(".")[-1] in kind.types}
    known = {"population_size"} if NOUNS.keys() & set(kind.types) else None
    return {key: part for key, part in found.items() if known is None or set(part.values.values()) <= known}


def chained(kind: Named, given: Any) -> str | None:
    """The table of `CHAINS` whose members an option holds, where it is a table of tables without a name.

    >>> chained(Named(("UpdateTransform",)), {"clip": {}, "quantize": {}}), chained(Named(("Sampler",)), {"full": {}})
    ('transform', None)
    """
    members = isinstance(given, Mapping) and "name" not in given and any(isinstance(x, Mapping) for x in given.values())
    return next((table for table in CHAINS if members and kind.types == (TABLES[table][1],)), None)


def inside_options(part: Part) -> dict[str, Option]:
    """The options of a part that is an option itself: what it wraps is a table inside its own.

    >>> inside_options(parts("sampling")["with_dropout"])["sampler"].kind.types
    ('Sampler',)
    """
    inner = {key: (Named((one.noun,), not one.required), one.required) for key, one in part.parts.items()}
    return part.options | {key: Option(kind, REQUIRED if needed else None) for key, (kind, needed) in inner.items()}


def is_path(option: Option) -> bool:
    """Whether an option names a file or a folder on whose content a run depends (`types.FilePath`, `FolderPath`).

    >>> options = parts_of_table("data")["leaf"].options
    >>> is_path(options["directory"]), is_path(options["task"])
    (True, False)
    """
    return any(kind in (option.kind, *get_args(option.kind)) for kind in (FILE, FOLDER))


def takes(part: Part, name: str) -> str | None:
    """The argument of a factory that takes the part of the table `name`; None if it takes none.

    It is the argument with the table's name and type, else a required one of that type.

    >>> algorithms = parts_of_table("algorithm")
    >>> takes(algorithms["fedavg"], "client_optimizer"), takes(algorithms["scaffold"], "aggregator")
    ('optimizer', None)
    """
    fitting = {key: argument for key, argument in part.parts.items() if argument.noun == TABLES[name][1]}
    if name in fitting:
        return name
    return next((key for key, argument in fitting.items() if argument.required and key not in TABLES), None)


def _wraps(part: Part, name: str) -> bool:
    return any(argument.noun == TABLES[name][1] and argument.required for argument in part.parts.values())


def _factories(subpackage: str, noun: str) -> dict[str, Part]:
    found = {
        name: part
        for name, part in parts(subpackage).items()
        if not part.others and part.returns.split(".")[-1] == noun
    }
    if subpackage == "models":
        meaning = "The parameter is a point in R^d, for quadratic clients."
        found["point"] = Part(subpackage, "point", meaning, noun, {}, {}, {}, frozenset(), "fedjax_sim.config.build")
    return found
