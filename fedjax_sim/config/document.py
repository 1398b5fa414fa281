"""A run as a TOML file: every value is checked, every default filled in, all errors reported at once with their paths.

A config is checked here, without JAX; `config.build` then makes the parts, which check their options themselves. Beside
`seed` there are the tables `[data]`, `[model]`, `[devices]`, `[sampler]`, `[algorithm]`, `[client_optimizer]`,
`[transform]`, `[downlink]`, `[aggregator]` and `[run]`. Each part has a `name` from the registry and the options of its
factory; a wrapper of the sampler is a table inside it, such as `[sampler.with_dropout]`. Wrappers go around each other
in the order of the file, and an order that is refused is answered with one that works. The transforms of messages are
tables inside `[transform]`, in their order: `[transform.quantize]`, then `[transform.gaussian_mechanism]`; what a
wrapper wraps is a table inside its own, `[transform.error_feedback.top_k]`. Those of the broadcast are tables inside
`[downlink]`. A part that is another's option is a table with a name: in `[aggregator.corrupted]`,
`attack = {name = "alie"}`; `[algorithm.edge_sampler]` has a name too. Several transforms there are tables without one,
`[algorithm.edge_transform.quantize]`. Every part that takes devices gets those of `[devices]`; clients under edges have
as many of the same kind, or `[algorithm.edge_devices]`. TOML has no null: "none" stands for it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from fedjax_sim.config import files, registry
from fedjax_sim.config.hints import suggestion
from fedjax_sim.config.signatures import REQUIRED, Named, Option, Part
from fedjax_sim.config.toml import ConfigError, config_file, override, places_set, read_document, unset, written
from fedjax_sim.config.value_kinds import (
    Words,
    converted_to_kind,
    integer_kind,
    nearest_word,
    number_kind,
    problem,
    rule,
)

__all__ = ["Config", "ConfigError", "check_options", "default_tables", "load", "resolve"]

INT32_MAX = 2**31 - 1
COUNT = integer_kind(1, INT32_MAX)
LANES = integer_kind(1, 1 << 16)
SEED = integer_kind(0, INT32_MAX)
RUN = {
    "rounds": Option(COUNT, 100),
    "evaluate_every": Option(COUNT, 10),
    "checkpoint_every": Option(COUNT | None, None),  # none: as evaluate_every
    "keep_checkpoints": Option(COUNT, 2),
    "devices": Option(Literal["all"] | COUNT, "all"),
    "plan": Option(Literal["auto", "trial"], "auto"),  # trial: the fastest lanes of a short timed trial
    "lanes": Option(LANES | None, None),  # clients vmapped at once; none: fitted to the cache
    "chunk": Option(LANES | None, None),  # messages summed at once
    "nonfinite": Option(Literal["drop", "error"], "drop"),
    # at which epsilon is stated where a part has noise; none: N^-1.1
    "delta": Option(number_kind(0, 1, open_low=True, open_high=True) | None, None),
    "evaluate_train": Option(Literal["all"] | COUNT | None, None),  # clients whose training objective is evaluated
    # clients of the variance budget at each evaluation
    "variance_probe": Option(integer_kind(2, INT32_MAX) | None, None),
    "client_memory": Option(Literal["auto", "device", "disk"], "auto"),  # auto: disk where the devices are too small
    "progress": Option(bool, True),
}
# Options that change no bit of a round.
NO_RESULT = tuple("rounds checkpoint_every keep_checkpoints devices client_memory progress".split())
NO_RESULT += ("evaluate_train", "variance_probe")
DEFAULT_PART = {
    "data": "digits",
    "model": "mlp",
    "sampler": "uniform",
    "algorithm": "fedavg",
    "client_optimizer": "sgd",
    "aggregator": "mean",
}
MAIN_JOB = {("sampler", "cohort_size"): 1000, ("algorithm", "num_steps"): 5, ("algorithm", "batch_size"): 10}
SEEDED = ("data", "devices")  # tables whose parts take the config's seed, unless they have their own
OWN = ("data", "model", "algorithm")  # tables of every config; which others there are depends on the algorithm


@dataclasses.dataclass(frozen=True)
class Config:
    """A checked config; made by `load`."""

    tables: Mapping[str, Any]

    def resolved(self) -> dict[str, Any]:
        """A copy of all tables with every default filled in. Data, their wrappers, and devices without a seed of their
        own use the config's."""
        return copy.deepcopy(dict(self.tables))

    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with its checkpoint: all options but those that change no bit of a round.

        A file counts by its content, in "files", and not by its path. The digest of the data belongs beside it.

        Raises: ConfigError for a file that cannot be read.

        Guarantees: tests/laws/test_files.py::test_identity_is_content.
        """
        contents, problems = files.contents(self.tables)
        if problems:
            raise ConfigError(problems)
        tables = files.without_paths(self.tables)
        tables["run"] = {key: value for key, value in tables["run"].items() if key not in NO_RESULT}
        return tables | {"order": list(_inner(tables))} | ({"files": contents} if contents else {})

    def planned(self, plan: Any) -> Config:
        """This config with the lanes and chunk that were chosen for it, which are part of a result's identity."""
        tables = self.resolved()
        tables["run"] |= plan._asdict()
        return Config(tables)

    def to_toml(self, folder: str | Path = ".") -> str:
        """TOML that loads back to this config from a file in `folder`, to which relative paths are relative there.

        Guarantees: tests/config/test_document.py::test_toml_round_trip.
        """
        return written(files.rebased(self.tables, ".", folder))


class _Problems(list[str]):
    """The problems of a document, whose algorithm decides which hints are true."""

    def __init__(self, document: Mapping[str, Any]):
        super().__init__()
        self.document = document


def default_tables(document: Mapping[str, Any] | None = None) -> dict[str, Mapping[str, Option]]:
    """The options of [run], and those of each table's default part.

    Args:
      document: names other parts; tables that its algorithm does not take are left out.

    >>> "rounds" in default_tables()["run"], "learning_rate" in default_tables()["client_optimizer"]
    (True, True)
    >>> "aggregator" in default_tables({"algorithm": {"name": "dpsgd"}})
    False
    """
    parts = {table: _named_part(table, document or {}) for table in DEFAULT_PART}
    taken = {table for table in parts if table in OWN or registry.takes(parts["algorithm"], table) is not None}
    return {"run": RUN} | {table: part.options for table, part in parts.items() if table in taken}


def _named_part(table: str, document: Mapping[str, Any]) -> Part:
    """The part that a document names in a table; the default one where it names none that there is."""
    choices = registry.parts_of_table(table)
    given = document.get(table)
    name = given.get("name") if isinstance(given, dict) else None
    return choices[name if isinstance(name, str) and name in choices else DEFAULT_PART[table]]


def _inner(tables: Mapping[str, Any], path: str = "") -> Iterable[str]:
    """Paths of the tables inside tables, in their order, which matters but is ignored when dicts are compared."""
    for key, value in tables.items():
        if isinstance(value, dict):
            if path:
                yield f"{path}{key}"
            yield from _inner(value, f"{path}{key}.")


def load(path: str | Path | None = None, overrides: Iterable[str] = (), without: Iterable[str] = ()) -> Config:
    """Reads and checks a config file, or the default run without one.

    Args:
      path: a TOML file, or the name of an example, such as "quickstart" or "sweeps/step_sizes"; None for the default:
        100,000 clients over the digits, FedAvg with an MLP. Relative paths in it are relative to the file's folder.
      overrides: `table.option=value`, the value as in TOML; text needs no quotes. Relative paths are relative to the
        current folder, as are those of the config that is returned.
      without: tables and options of the file that are left out, such as "downlink" or "sampler.with_dropout".

    Raises: ConfigError with every problem as `path.to.field: expected RULE, got VALUE. HINT`.

    Guarantees: JAX is not imported (tests/config/test_document.py::test_wrong_configs_need_no_jax); all problems are
    reported at once (::test_every_problem_at_once); examples are found by name
    (tests/test_package.py::test_examples_have_names); relative paths lead where the file means, from any folder
    (tests/config/test_files.py::test_paths_are_relative_to_their_file).

    >>> config = load(None, ["sampler.cohort_size=50", "algorithm.name=fedprox"])
    >>> config.resolved()["algorithm"]["coefficient"], config.resolved()["sampler"]
    (0.1, {'name': 'uniform', 'cohort_size': 50})
    """
    overrides = list(overrides)
    document = {} if path is None else read_document(path)
    problems = [*unset(document, without), *override(document, overrides)]
    tables = resolve(document, problems)
    if problems:
        raise ConfigError(problems)
    folder = "." if path is None else config_file(path).parent
    return Config(files.rebased(tables, folder, but=places_set(overrides)))


def resolve(document: dict, problems: list[str]) -> dict[str, Any]:
    """The document with defaults filled in; problems are added to the list."""
    problems_here = _Problems(document)
    tables = _resolved(document, problems_here)
    problems += problems_here
    return tables


def _resolved(document: dict, problems: _Problems) -> dict[str, Any]:
    known = ("seed", *registry.TABLES, "run")
    problems += [_unknown(key, key, known, problems) for key in document if key not in known]
    tables: dict[str, Any] = {"seed": converted_to_kind("seed", SEED, document.get("seed", 0), problems)}
    algorithm = None
    others = [table for table in registry.TABLES if table not in (*OWN, "devices")]
    for table in (*OWN, *others):  # the algorithm decides which others there are
        given = document.get(table, {})
        if table not in OWN and algorithm is not None and registry.takes(algorithm, table) is None:
            if table in document:
                hint = f"Leave it out: --unset {table}. Its options: fedjax-sim list {algorithm.name}."
                problems.append(problem(table, f"no such table with {algorithm.name}", given, hint))
            continue
        if table in registry.CHAINS:
            if members := _members(table, table, given, problems):
                tables[table] = members
            continue
        part, tables[table] = _part(table, given, problems)
        algorithm = part if table == "algorithm" else algorithm
    tables |= _devices(document, tables, problems)
    tables = {name: tables[name] for name in ("seed", *registry.TABLES) if name in tables}
    tables["run"] = check_options("run", RUN, document.get("run", {}), problems)
    cohort = tables.get("sampler", {}).get("cohort_size")
    clients = tables.get("data", {}).get("num_clients")
    if isinstance(clients, int) and isinstance(cohort, int) and "cohort_size" not in document.get("sampler", {}):
        tables["sampler"]["cohort_size"] = min(cohort, max(clients, 1))
    work = tables.get("algorithm", {})
    block = tables["run"]
    if {"num_steps", "num_epochs"} <= work.keys() and (work["num_steps"] is None) == (work["num_epochs"] is None):
        got = (work["num_steps"], work["num_epochs"])
        problems.append(problem("algorithm.num_steps, algorithm.num_epochs", "exactly one of the two", got))
    if block.get("chunk") is not None and block.get("lanes") is None:
        problems.append(problem("run.chunk", "run.lanes beside it", block["chunk"], "A chunk is made of whole lanes."))
    return tables


def _devices(document: dict, tables: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The table of devices: needed where a part takes devices and has no default, refused where no part takes any."""
    members = [part for name in tables if name in registry.TABLES for part in registry.named_in(name, tables[name])]
    takers = [(part.name, argument) for part in members if (argument := registry.takes(part, "devices"))]
    needing = [part.name for part in members if any(x.noun == "Devices" and x.required for x in part.parts.values())]
    if "devices" in document and takers:
        return {"devices": _part("devices", document["devices"], problems)[1]}
    if "devices" in document:
        wrappers = [f"[sampler.{name}]" for name in _taking_devices(registry.wrappers("sampler"))]
        algorithms = ", ".join(_taking_devices(registry.parts_of_table("algorithm")))
        hint = f"Nothing in this config takes them: add {' or '.join(wrappers)}, or take the algorithm {algorithms}."
        problems.append(problem("devices", "no such table", document["devices"], hint))
    elif needing:
        names = ", ".join(registry.parts_of_table("devices"))
        hint = f"{needing[0]} needs it: write [devices] with name = one of {names}."
        problems.append(problem("devices", "a table with a name", Words("nothing"), hint))
    return {}


def _taking_devices(parts: Mapping[str, Part]) -> list[str]:
    return [name for name, part in parts.items() if registry.takes(part, "devices")]


def _part(table: str, given: Any, problems: list[str]) -> tuple[Part | None, dict[str, Any]]:
    if not isinstance(given, dict):
        problems.append(problem(table, "a table", given, f'Write {table}.name = "..." for the part alone.'))
        return None, {}
    choices = registry.parts_of_table(table)
    wraps = registry.wrappers(table)
    name = given.get("name", DEFAULT_PART.get(table, Words("nothing")))
    if not isinstance(name, str) or name not in choices:
        hint = nearest_word(name, choices)
        if isinstance(name, str) and name in wraps:
            hint = f"{name} wraps a {table}: write the table [{table}.{name}]."
        problems.append(problem(f"{table}.name", "one of " + ", ".join(choices), name, hint))
        return None, {}
    inner = {key: value for key, value in given.items() if key in wraps}  # in the order of the file
    rest = {key: value for key, value in given.items() if key != "name" and key not in wraps}
    part = choices[name]
    resolved = {"name": name} | check_options(table, part.options, rest, problems, also=("name", *wraps))
    for key, options in inner.items():
        resolved[key] = check_options(f"{table}.{key}", wraps[key].options, options, problems)
    return part, resolved


def _members(table: str, path: str, given: Any, problems: list[str]) -> dict[str, Any]:
    """The transforms in a table, in the order of the file; what a wrapper wraps is a table inside its own."""
    if not isinstance(given, dict):
        problems.append(problem(path, "a table", given, f"Write the parts as tables inside it: [{path}.NAME]."))
        return {}
    choices = registry.parts_of_table(table)
    wraps = registry.wrappers(table)
    resolved = {}
    for name, options in given.items():
        if name not in choices | wraps:
            known = [*choices, *wraps]
            hint = nearest_word(name, known) or f"Write the parts as tables: [{path}.NAME]."
            problems.append(
                problem(f"{path}.{name}", "one of " + ", ".join(known), Words("nothing of that name"), hint)
            )
            continue
        inner = {}
        if name in wraps and isinstance(options, dict):
            inner = {key: value for key, value in options.items() if isinstance(value, dict)}
            options = {key: value for key, value in options.items() if key not in inner}
            inner = _members(table, f"{path}.{name}", inner, problems)
            if not inner:
                hint = f"Write it as a table inside: [{path}.{name}.NAME]."
                problems.append(problem(f"{path}.{name}", "a transform to wrap", Words("none"), hint))
        resolved[name] = check_options(f"{path}.{name}", (choices | wraps)[name].options, options, problems) | inner
    return resolved


def check_options(
    path: str, options: dict[str, Option], given: Any, problems: list[str], also: Iterable[str] = ()
) -> dict[str, Any]:
    """The options of one table, with defaults filled in.

    Args:
      path: of the table, such as "sampler".
      options: the known options by name.
      given: the table in the document.
      problems: error messages so far; wrong values, missing and unknown options are added.
      also: other names that the table may hold.
    """
    if not isinstance(given, dict):
        problems.append(problem(path, "a table", given))
        return {}
    problems += [_unknown(f"{path}.{key}", key, [*also, *options], problems) for key in given if key not in options]
    resolved = {}
    for key, option in options.items():
        if key in given and isinstance(option.kind, Named):
            resolved[key] = _named(f"{path}.{key}", option.kind, given[key], problems)
        elif key in given:
            resolved[key] = converted_to_kind(f"{path}.{key}", option.kind, given[key], problems)
        elif (default := _default(path, key, option, given)) is not REQUIRED:
            if key != "seed" or path.partition(".")[0] not in SEEDED:
                resolved[key] = copy.copy(default)
        else:
            if isinstance(option.kind, Named):
                wanted, hint = _example(option.kind)
            else:
                wanted = rule(option.kind)
                hint = f"It has no default: write it in [{path}], or --set {path}.{key}=..."
            problems.append(problem(f"{path}.{key}", wanted, Words("nothing"), hint))
    return resolved


def _named(path: str, kind: Named, given: Any, problems: list[str]) -> dict[str, Any] | float | None:
    """The options of a part inside another one, with its name; or a number, where one will do."""
    if given == "none" and kind.optional:
        return None
    if kind.number and isinstance(given, (int, float)):
        return converted_to_kind(path, float, given, problems)
    if table := registry.chained(kind, given):
        return _members(table, path, given, problems)
    wanted, hint = _example(kind)
    if not isinstance(given, dict):
        problems.append(problem(path, wanted, given, hint))
        return None
    choices = registry.named(kind)
    name = given.get("name", Words("nothing"))
    if not isinstance(name, str) or name not in choices:
        problems.append(problem(f"{path}.name", "one of " + ", ".join(choices), name, nearest_word(name, choices)))
        return None
    options = {key: value for key, value in given.items() if key != "name"}
    return {"name": name} | check_options(
        path, registry.inside_options(choices[name]), options, problems, also=("name",)
    )


def _example(kind: Named) -> tuple[str, str]:
    """What is expected where a part is a table, and a hint."""
    choices = registry.named(kind)
    return (
        "a table with a name" + " or a number" * kind.number,
        f'Write {{name = "{next(iter(choices))}"}}, or another of {", ".join(choices)}.',
    )


def _default(path: str, key: str, option: Option, given: Mapping[str, Any]) -> Any:
    if key == "num_steps" and given.get("num_epochs", "none") not in (None, "none"):
        return None
    return MAIN_JOB.get((path, key), option.default) if option.default in (REQUIRED, None) else option.default


def _unknown(path: str, key: str, options: Iterable[str], problems: list[str]) -> str:
    options = list(options)
    document = problems.document if isinstance(problems, _Problems) else {}
    tables = default_tables(document)
    refused = {table: has for table, has in default_tables().items() if table not in tables}
    return problem(
        path,
        "one of " + ", ".join(options) if options else "no options",
        Words(f"the unknown key {key!r}"),
        suggestion(path, options, tables, refused, _named_part("algorithm", document).name),
    )
