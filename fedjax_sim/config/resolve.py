"""Resolves the tables of a document, the second of three passes: which parts they name, and the value of each option.

Every value is checked, defaults are filled in, and all problems are reported at once. Nothing here imports JAX.

Tables. Beside `seed` there are `[data]`, `[model]`, `[augmentation]`, `[devices]`, `[sampler]`, `[algorithm]`,
`[client_optimizer]`, `[transform]`, `[downlink]`, `[aggregator]` and `[run]`. A table has the `name` of a part from the
registry, and the options of that part's factory.

Wrappers. A wrapper of the sampler is a table inside it, such as `[sampler.with_dropout]`. Wrappers go around each other
in the order of the file. If that order is refused, the error names an order that works.

Transforms. The transforms of messages are tables inside `[transform]`, applied in their order: `[transform.quantize]`,
then `[transform.gaussian_mechanism]`. A transform inside a wrapper is a table inside the wrapper's table,
`[transform.error_feedback.top_k]`. The transforms of the broadcast are tables inside `[downlink]`.

Augmentations. Random changes of the inputs in local steps are tables inside `[augmentation]`, applied in their order:
`[augmentation.random_crop]`, then `[augmentation.horizontal_flip]`.

Parts as options. An option that is a part is a table with a name: in `[aggregator.corrupted]`,
`attack = {name = "alie"}`; `[algorithm.edge_sampler]` has a name too. If such an option holds several transforms, they
are tables without a name, `[algorithm.edge_transform.quantize]`.

Devices. Every part that takes devices gets the devices of `[devices]`. Clients under edges have as many devices of the
same kind, or those of `[algorithm.edge_devices]`.

TOML has no null: the text "none" stands for it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedjax_sim.config import registry
from fedjax_sim.config.hints import suggestion
from fedjax_sim.config.lazy_parts import union
from fedjax_sim.config.run_options import RUN
from fedjax_sim.config.signatures import INT32_MAX, REQUIRED, SCORE_METRIC, Named, Option, Part
from fedjax_sim.config.value_kinds import (
    Words,
    converted_to_kind,
    integer_kind,
    nearest_word,
    problem,
    rule,
)

SEED = integer_kind(0, INT32_MAX)
DEFAULT_PART = {
    "data": "digits",
    "model": "mlp",
    "sampler": "uniform",
    "algorithm": "fedavg",
    "client_optimizer": "sgd",
    "aggregator": "mean",
}
# Defaults of configs alone, for options whose default in Python is None or missing.
MAIN_JOB = {("sampler", "cohort_size"): 1000, ("algorithm", "num_steps"): 5, ("algorithm", "batch_size"): 10}
# Tables whose parts take the config's seed, unless they have their own.
SEEDED = ("data", "devices")


class _Problems(list[str]):
    """Error messages, with the document that they are about: its algorithm decides which hints are true."""

    def __init__(self, document: Mapping[str, Any]):
        super().__init__()
        self.document = document


def default_tables(document: Mapping[str, Any] | None = None) -> dict[str, dict[str, Option]]:
    """Returns the options of [run], and the options of each table's default part.

    Args:
      document: a config whose parts replace the default ones. Tables that its algorithm does not take are left out.

    >>> "rounds" in default_tables()["run"], "learning_rate" in default_tables()["client_optimizer"]
    (True, True)
    >>> "aggregator" in default_tables({"algorithm": {"name": "dpsgd"}})
    False
    """
    parts = {table: _named_part(table, document or {}) for table in DEFAULT_PART}
    algorithm = parts["algorithm"]
    tables = {table for table in parts if registry.has_table(algorithm, table)}
    return {"run": RUN} | {table: part.options for table, part in parts.items() if table in tables}


def _named_part(table: str, document: Mapping[str, Any]) -> Part:
    """Returns the part that a document names in a table; the default part if the document names no known part."""
    choices = registry.parts_of_table(table)
    stated = document.get(table)
    name = stated.get("name") if isinstance(stated, dict) else None
    return choices[name if isinstance(name, str) and name in choices else DEFAULT_PART[table]]


def resolve(document: dict, problems: list[str]) -> dict[str, Any]:
    """Returns the document with defaults filled in; problems are added to the list."""
    problems_here = _Problems(document)
    tables = _resolved(document, problems_here)
    # Without its modules, the names of a config are unknown: what else is wrong would be said of the wrong parts.
    problems += _unadmitted(document) or problems_here
    return tables


def _unadmitted(document: Mapping[str, Any]) -> list[str]:
    """Returns a problem for each module that a document names and `--with` does not."""
    run_given = document.get("run")
    modules = run_given.get("modules") if isinstance(run_given, dict) else None
    return [
        problem(
            "run.modules",
            "modules that --with names",
            module,
            f"It has parts of this config. If you trust its code, add --with {module}.",
        )
        for module in (modules if isinstance(modules, list) else [])
        if module not in registry.admitted_modules()
    ]


def _resolved(document: dict, problems: _Problems) -> dict[str, Any]:
    """Does the work of `resolve`, with problems that know their document.

    Args:
      document: the tables as the file and the overrides state them.
      problems: error messages so far; what is wrong here is added.

    Returns: the tables in their order: "seed", those of `registry.TABLES` that this config has, "run". A value that was
      refused is None in its table.
    """
    known_tables = ("seed", *registry.TABLES, "run")
    problems += [_unknown(key, key, known_tables, problems) for key in document if key not in known_tables]
    tables: dict[str, Any] = {"seed": converted_to_kind("seed", SEED, document.get("seed", 0), problems)}
    tables |= _tables_of_parts(document, problems)
    tables |= _devices(document, tables, problems)
    tables = {name: tables[name] for name in known_tables if name in tables}
    tables["run"] = run = check_options("run", RUN, document.get("run", {}), problems)
    problems += _problems_of_rule(run.get("stop_when"))
    if metrics := run.get("metrics"):  # without any, the sources of no metric are read
        problems += _problems_of_metrics(metrics)
    run["modules"] = registry.admitted_modules() or None
    # The default cohort of a small population is the whole population.
    cohort_size = tables.get("sampler", {}).get("cohort_size")
    num_clients = tables.get("data", {}).get("num_clients")
    # A size is there only if the document has a table for the sampler, or none: anything else was refused above.
    if isinstance(num_clients, int) and isinstance(cohort_size, int):
        if "cohort_size" not in document.get("sampler", {}):
            tables["sampler"]["cohort_size"] = min(cohort_size, max(num_clients, 1))
    problems += _problems_of_work(document.get("algorithm", {}), tables.get("algorithm", {}))
    if run.get("chunk") is not None and run.get("lanes") is None:
        problems.append(problem("run.chunk", "run.lanes beside it", run["chunk"], "A chunk is made of whole lanes."))
    return tables


def _tables_of_parts(document: dict, problems: _Problems) -> dict[str, Any]:
    """Returns the tables that name parts, but for the devices, with defaults filled in.

    Args:
      document: the tables as the file and the overrides state them.
      problems: error messages so far; what is wrong here is added.
    """
    tables: dict[str, Any] = {}
    algorithm = None
    others = [table for table in registry.TABLES if table not in ("algorithm", "devices")]
    # The algorithm comes before the other tables, since it decides which of them there are.
    for table in ("algorithm", *others):
        table_given = document.get(table, {})
        if algorithm is not None and not registry.has_table(algorithm, table):
            if table in document:
                hint = f"Leave it out: --unset {table}. Its options: fedjax-sim list {algorithm.name}."
                problems.append(problem(table, f"no such table with {algorithm.name}", table_given, hint))
            continue
        if table in registry.CHAINS:
            if members := _members(table, table, table_given, problems):
                tables[table] = members
            continue
        part, tables[table] = _part(table, table_given, problems)
        algorithm = part if table == "algorithm" else algorithm
    return tables


def _problems_of_work(stated: dict, resolved: dict) -> list[str]:
    """Returns a problem for an algorithm whose local work is stated twice, in steps and in epochs, or not at all.

    Args:
      stated: the algorithm's table as the document has it.
      resolved: the table with defaults filled in.
    """
    amounts = ("num_steps", "num_epochs")
    if not set(amounts) <= resolved.keys():
        return []
    work = tuple(resolved[name] for name in amounts)
    # A value that was refused stands as None, and has its problem already.
    given = [stated.get(name, "none") for name in amounts]
    any_refused = any(x is None and y not in (None, "none") for x, y in zip(work, given, strict=True))
    if any_refused or (work[0] is None) != (work[1] is None):
        return []
    return [problem("algorithm.num_steps, algorithm.num_epochs", "exactly one of the two", work)]


def _problems_of_rule(stop_when: str | None) -> list[str]:
    """Returns a problem for a `run.stop_when` in a wrong form."""
    if stop_when is None:
        return []
    from fedjax_sim.running.stopping import StopWhen  # imports JAX, which few configs need so early

    try:
        StopWhen(stop_when)
    except ValueError as error:
        return [f"run.{error}"]
    return []


def _problems_of_metrics(names: Sequence[str]) -> list[str]:
    """Returns a problem for each name in `run.metrics` that is no metric, and for one that comes twice."""
    known = registry.named(SCORE_METRIC)
    unknown = [name for name in names if name not in known]
    rule = "names of " + ", ".join(known)
    found = [
        problem("run.metrics", rule, name, registry.why_left_out(name) or nearest_word(name, known)) for name in unknown
    ]
    twice = len(set(names)) < len(names)
    return found + [problem("run.metrics", "each metric once", [*names])] * twice


def _devices(document: dict, tables: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Returns the table of devices, as {"devices": table}, or {} without devices.

    The table is needed where a part takes devices and has no default for them. It is refused if no part takes devices.

    Args:
      document: the tables as the file and the overrides state them.
      tables: the other tables, with defaults filled in.
      problems: error messages so far; what is wrong here is added.
    """
    members = [part for name in tables if name in registry.TABLES for part in registry.named_in(name, tables[name])]
    takers = [(part.name, argument) for part in members if (argument := registry.takes(part, "devices"))]
    needing = [
        part.name
        for part in members
        if any(argument.noun == "Devices" and argument.required for argument in part.parts.values())
    ]
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
    """Returns the names of the parts that take devices."""
    return [name for name, part in parts.items() if registry.takes(part, "devices")]


def _part(table: str, stated: Any, problems: list[str]) -> tuple[Part | None, dict[str, Any]]:
    """Returns the part that a table names, and the table with defaults filled in; (None, {}) for a wrong name.

    Args:
      table: its name, such as "sampler".
      stated: the table as the document has it; {} if the document has none, which stands for the default part.
      problems: error messages so far; what is wrong here is added.
    """
    if not isinstance(stated, dict):
        problems.append(problem(table, "a table", stated, f'Write {table}.name = "..." for the part alone.'))
        return None, {}
    choices = registry.parts_of_table(table)
    wrappers = registry.wrappers(table)
    name = stated.get("name", DEFAULT_PART.get(table, Words("nothing")))
    if not isinstance(name, str) or name not in choices:
        hint = registry.why_left_out(name) or nearest_word(name, choices)
        if isinstance(name, str) and name in wrappers:
            hint = f"{name} wraps a {table}: write the table [{table}.{name}]."
        problems.append(problem(f"{table}.name", "one of " + ", ".join(choices), name, hint))
        return None, {}
    # The order of the file is kept, since wrappers go around each other in this order.
    inner_tables = {key: table for key, table in stated.items() if key in wrappers}
    own_options = {key: value for key, value in stated.items() if key != "name" and key not in wrappers}
    part = choices[name]
    also = union({"name": part}, wrappers)
    resolved = {"name": name} | check_options(table, part.options, own_options, problems, also)
    for key, options in inner_tables.items():
        resolved[key] = check_options(f"{table}.{key}", wrappers[key].options, options, problems)
    return part, resolved


def _members(table: str, path: str, stated: Any, problems: list[str]) -> dict[str, Any]:
    """Returns the transforms in a table with defaults filled in, in the order of the file.

    A transform that a wrapper wraps is a table inside the wrapper's table.

    Args:
      table: of `registry.CHAINS`, such as "transform": its parts are those that may be named.
      path: where the transforms stand, such as "transform" or "transform.error_feedback".
      stated: the table at that path, as the document has it.
      problems: error messages so far; what is wrong here is added.
    """
    if not isinstance(stated, dict):
        problems.append(problem(path, "a table", stated, f"Write the parts as tables inside it: [{path}.NAME]."))
        return {}
    choices = registry.parts_of_table(table)
    wrappers = registry.wrappers(table)
    known = union(choices, wrappers)
    resolved = {}
    for name, options in stated.items():
        if name not in known:
            known_names = list(known)
            hint = (
                registry.why_left_out(name)
                or nearest_word(name, known_names)
                or f"Write the parts as tables: [{path}.NAME]."
            )
            problems.append(
                problem(f"{path}.{name}", "one of " + ", ".join(known_names), Words("nothing of that name"), hint)
            )
            continue
        inner_members = {}
        if name in wrappers and isinstance(options, dict):
            inner_members = {key: table for key, table in options.items() if isinstance(table, dict)}
            options = {key: value for key, value in options.items() if key not in inner_members}
            inner_members = _members(table, f"{path}.{name}", inner_members, problems)
            if not inner_members:
                hint = f"Write it as a table inside: [{path}.{name}.NAME]."
                problems.append(problem(f"{path}.{name}", "a transform to wrap", Words("none"), hint))
        resolved[name] = check_options(f"{path}.{name}", known[name].options, options, problems) | inner_members
    return resolved


def check_options(
    path: str, options: dict[str, Option], given: Any, problems: list[str], also: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns the options of one table with defaults filled in.

    Args:
      path: the path of the table, such as "sampler".
      options: the known options by name.
      given: the table as the document has it.
      problems: error messages so far; wrong values, missing and unknown options are added.
      also: other names that the table may hold, such as "name".
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
            # Without a seed of its own, a part of these tables gets the config's seed when it is made.
            if key != "seed" or path.partition(".")[0] not in SEEDED:
                resolved[key] = copy.copy(default)
        else:
            if isinstance(option.kind, Named):
                expected, hint = _example(option.kind)
            else:
                expected = rule(option.kind)
                hint = f"It has no default: write it in [{path}], or --set {path}.{key}=..."
                if registry.given_by_data(key):
                    hint += f' If the data are to give it, annotate it: Annotated[..., FromData("{key}")].'
            problems.append(problem(f"{path}.{key}", expected, Words("nothing"), hint))
    return resolved


def _named(path: str, kind: Named, stated: Any, problems: list[str]) -> dict[str, Any] | float | None:
    """Returns the table of a part inside another part, with its name and options; or a number, where one will do.

    Args:
      path: where the option stands, such as "aggregator.corrupted.attack".
      kind: the types of parts that the option may be, and whether it may be None or a number.
      stated: the option as the document has it; "none" stands for None.
      problems: error messages so far; what is wrong here is added.

    Returns: the table, with defaults filled in, or the number. None stands for "none", and for a wrong value.
    """
    if stated == "none" and kind.optional:
        return None
    if kind.number and isinstance(stated, (int, float)):
        return converted_to_kind(path, float, stated, problems)
    if table := registry.chained(kind, stated):
        return _members(table, path, stated, problems)
    expected, hint = _example(kind)
    if not isinstance(stated, dict):
        problems.append(problem(path, expected, stated, hint))
        return None
    choices = registry.named(kind)
    name = stated.get("name", Words("nothing"))
    if not isinstance(name, str) or name not in choices:
        hint = registry.why_left_out(name) or nearest_word(name, choices)
        problems.append(problem(f"{path}.name", "one of " + ", ".join(choices), name, hint))
        return None
    options = {key: value for key, value in stated.items() if key != "name"}
    return {"name": name} | check_options(
        path, registry.inside_options(choices[name]), options, problems, also=("name",)
    )


def _example(kind: Named) -> tuple[str, str]:
    """Returns the rule for an option that is a part, and a hint with an example, for an error message."""
    choices = registry.named(kind)
    return (
        "a table with a name" + " or a number" * kind.number,
        f'Write {{name = "{next(iter(choices))}"}}, or another of {", ".join(choices)}.',
    )


def _default(path: str, key: str, option: Option, stated: Mapping[str, Any]) -> Any:
    """Returns the default of an option; REQUIRED if it has none."""
    # Local work is measured in steps or in epochs: a config that states epochs has no default number of steps.
    if key == "num_steps" and stated.get("num_epochs", "none") not in (None, "none"):
        return None
    return MAIN_JOB.get((path, key), option.default) if option.default in (REQUIRED, None) else option.default


def _unknown(path: str, key: str, options: Iterable[str], problems: list[str]) -> str:
    """Returns the error message for an unknown table or option, with what may have been meant."""
    options = list(options)
    document = problems.document if isinstance(problems, _Problems) else {}
    tables = default_tables(document)
    refused_tables = {table: has for table, has in default_tables().items() if table not in tables}
    return problem(
        path,
        "one of " + ", ".join(options) if options else "no options",
        Words(f"the unknown key {key!r}"),
        suggestion(path, options, tables, refused_tables, _named_part("algorithm", document).name),
    )
