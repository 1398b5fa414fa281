"""Lists all parts that a config can name, read from the subpackages' sources without importing them.

Every public factory of a subpackage is registered. Its options are the arguments whose annotations TOML can
express. An argument annotated as a part (a `Sampler`, an `Aggregator`, ...) takes the part that the config's table of
this kind makes. Nothing here imports JAX, so that `fedjax-sim list`, and the refusal of a wrong config, take no time.

Guarantees:
  Every public factory is found (tests/config/test_document.py::test_registry_holds_what_the_subpackages_publish).
  Every factory that a config can name can be built (tests/config/test_document.py::test_every_part_builds).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

from fedjax_sim.config.lazy_parts import Chosen, union
from fedjax_sim.config.signatures import (
    INSIDE,
    NO_FUNCTION,
    NOUNS,
    REQUIRED as REQUIRED,
    TABLES as TABLES,
    Named as Named,
    Option,
    Part,
    parts as parts,
    parts_of_module,
)
from fedjax_sim.config.value_kinds import FILE, FOLDER, ConfigError, problem

SUBPACKAGES = (
    "population",
    "population.partitioners",
    "models",
    "models.augmentations",
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
    "metrics",
)
# Tables that hold any number of parts, as tables inside them, applied in their order.
CHAINS = ("augmentation", "transform", "downlink")
# Tables whose parts may be wrapped by other parts of the same kind.
WRAPPED = ("data", "model", "sampler", "aggregator", *CHAINS)
# The subpackage that has wrappers of every table, beside the wrappers in the table's own subpackage.
WRAPPERS = "adversary"
_admitted: list[str] = []  # modules outside of the package whose functions a config may name


def admit(modules: Sequence[str]) -> None:
    """Lets configs name the public functions of these modules, in place of those admitted before.

    A config alone cannot do this, since a part's code runs when it is made. A function is a part if the annotation of
    its result is a type of `TABLES` or `INSIDE`, such as `-> Aggregator`. Modules in the current folder are found.

    Args:
      modules: dotted names, such as "my_package.rules".

    Raises: ConfigError for a module that is not there, and for a name that another part has.

    Guarantees: a config that names a module runs nothing of it unless the module is admitted
    (tests/config/test_own_parts.py::test_a_config_alone_runs_no_code).
    """
    if isinstance(modules, str):
        raise ConfigError([problem("modules", "a list of modules' names", modules, f"Write [{modules!r}].")])
    if list(modules) == _admitted:
        return
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    taken = {name: f"fedjax_sim.{subpackage}" for subpackage in SUBPACKAGES for name in parts(subpackage)}
    for module in modules:
        try:
            names = list(dict(parts_of_module(module)))  # reads all of them, so that what is wrong is told here
        except (ImportError, SyntaxError, TypeError, ValueError) as error:
            is_file = module.endswith(".py")
            dotted = module.removesuffix(".py").replace("/", ".")
            hint = f"Write the module's name, without .py: --with {dotted}." if is_file else str(error)
            raise ConfigError([problem("--with", "a module with source code", module, hint)]) from error
        for name in names:
            if name in taken:
                hint = f"{taken[name]} has a part of this name: choose another."
                raise ConfigError([problem(f"--with {module}", "names that no other part has", name, hint)])
            taken[name] = module
    _admitted[:] = modules
    for function in (parts_of_table, wrappers, insides, named):
        function.cache_clear()


def admitted_modules() -> list[str]:
    """Returns the modules that `admit` was called with."""
    return list(_admitted)


def admitted_parts() -> dict[str, Part]:
    """Returns the public functions of the admitted modules by name, with those that no config can name."""
    return {name: part for module in _admitted for name, part in parts_of_module(module).items()}


def why_left_out(name: Any) -> str:
    """Says why a config cannot name this function of an admitted module; "" for other names, and where it can.

    Args:
      name: as a config states it, of any type.

    Guarantees: the argument is named (tests/config/test_own_parts.py::test_a_part_that_is_left_out_says_why).
    """
    part = admitted_parts().get(name) if isinstance(name, str) else None
    if part is None:
        return ""
    reasons = [
        f"its argument {key} has the annotation {annotation!r}, which no config can give"
        if annotation
        else f"its argument {key} has no annotation"
        for key, annotation in part.others.items()
    ]
    if NO_FUNCTION in part.others:
        reasons = ["it is no function"]
    elif not part.returns:
        reasons.append("its result has no annotation, such as -> Model")
    return f"Your module's {name} is left out: {', and '.join(reasons)}." if reasons else ""


def given_by_data(key: str) -> bool:
    """Returns whether an option of an admitted part has the name of a value that the data give to other parts."""
    is_own = any(key in part.options for part in admitted_parts().values())
    return is_own and any(key in part.values.values() for table in TABLES for part in parts_of_table(table).values())


def default_as_text(default: Any) -> str:
    """Returns a default as text, for `fedjax-sim list`.

    >>> default_as_text(REQUIRED), default_as_text(None), default_as_text([1.5])
    ('(required)', 'none', '[1.5]')
    """
    return "(required)" if default is REQUIRED else "none" if default is None else json.dumps(default)


@cache
def parts_of_table(name: str) -> Mapping[str, Part]:
    """Returns the parts that a config's table may name: factories whose arguments TOML and other parts can give.

    A look-up reads the source of one part, and iteration those of all.

    Args:
      name: the table's name, one of `TABLES`.

    Returns: parts by name, without wrappers.

    Raises: KeyError for a name that is not in `TABLES`.

    >>> {"fixed_mean", "horvitz_thompson", "keep_old"} <= parts_of_table("aggregator").keys()
    True
    """
    return Chosen(_factories(*TABLES[name]), lambda part: not _wraps(part, name))


@cache
def wrappers(name: str) -> Mapping[str, Part]:
    """Returns the wrappers of a table: factories that take a part of it and return a part of the same kind.

    A look-up reads the source of one part, and iteration those of all.

    Args:
      name: the table's name; tables that are not in `WRAPPED` have no wrappers.

    Returns: wrappers by name, such as `with_dropout` for "sampler".

    >>> {"with_dropout", "with_clock"} <= wrappers("sampler").keys()
    True
    """
    if name not in WRAPPED:
        return {}
    subpackage, noun = TABLES[name]
    factories = union(_factories(subpackage, noun), _factories(WRAPPERS, noun))
    return Chosen(factories, lambda part: _wraps(part, name))


def studies() -> dict[str, Part]:
    """Returns the functions of `study` that return `Findings`, by name."""
    return {name: part for name, part in parts("study").items() if part.returns == "Findings"}


def named_in(name: str, options: Mapping[str, Any]) -> list[Part]:
    """Returns the part that a table names and the wrappers that it holds; unknown names are left out.

    Args:
      name: the table's name, such as "sampler".
      options: the table as the config has it.

    >>> [part.name for part in named_in("sampler", {"name": "uniform", "cohort_size": 3, "with_dropout": {}})]
    ['uniform', 'with_dropout']
    """
    choices = parts_of_table(name)
    wraps = wrappers(name)
    return [choices[key] for key in [options.get("name", "")] if key in choices] + [
        wraps[key] for key in options if key in wraps
    ]


@cache
def insides(subpackage: str) -> dict[str, Part]:
    """Returns all factories of a subpackage that options of other parts may name."""
    return named(Named(tuple(name for name, where in INSIDE.items() if where == subpackage)))


@cache
def named(kind: Named) -> dict[str, Part]:
    """Returns the factories that an option of this kind may name.

    Some parts could be named by a table of the config as well, such as samplers. These are left out if they need more
    than the number of clients, since weights, for example, belong to the config's own sampler.

    Args:
      kind: whose `types` the factories return.

    >>> sorted(named(Named(("Attackers",))))
    ['clients', 'poisoned', 'share_of_clients']
    >>> "poisson" in named(Named(("Sampler",))), "weighted" in named(Named(("Sampler",)))
    (True, False)
    """
    subpackage_of_type = INSIDE | NOUNS
    candidates = {
        key: part
        for name in kind.types
        for key, part in union(parts(subpackage_of_type[name]), admitted_parts()).items()
        if not part.others
    }
    fitting = {key: part for key, part in sorted(candidates.items()) if part.returns.split(".")[-1] in kind.types}
    known_values = {"population_size"} if NOUNS.keys() & set(kind.types) else None
    return {
        key: part for key, part in fitting.items() if known_values is None or set(part.values.values()) <= known_values
    }


def chained(kind: Named, given: Any) -> str | None:
    """Returns the table of `CHAINS` whose members an option holds; None if the option holds no chain.

    A chain is a table of tables without a name.

    >>> chained(Named(("UpdateTransform",)), {"clip": {}, "quantize": {}}), chained(Named(("Sampler",)), {"full": {}})
    ('transform', None)
    """
    is_unnamed = isinstance(given, Mapping) and "name" not in given
    holds_members = is_unnamed and any(isinstance(entry, Mapping) for entry in given.values())
    return next((table for table in CHAINS if holds_members and kind.types == (TABLES[table][1],)), None)


def inside_options(part: Part) -> dict[str, Option]:
    """Returns the options of a part that is itself an option.

    Such a part has no table of the config for the parts that it takes: each of them is a table inside its own.

    >>> inside_options(parts("sampling")["with_dropout"])["sampler"].kind.types
    ('Sampler',)
    """
    inner = {
        key: (Named((argument.noun,), not argument.required), argument.required) for key, argument in part.parts.items()
    }
    return part.options | {key: Option(kind, REQUIRED if required else None) for key, (kind, required) in inner.items()}


def is_path(option: Option) -> bool:
    """Returns whether an option names a file or folder on whose content a run depends (`types.FilePath`, `FolderPath`).

    >>> options = parts_of_table("data")["leaf"].options
    >>> is_path(options["directory"]), is_path(options["task"])
    (True, False)
    """
    return any(kind in (option.kind, *get_args(option.kind)) for kind in (FILE, FOLDER))


def takes(part: Part, name: str) -> str | None:
    """Returns the argument of a factory that takes the part of the table `name`; None if it takes no such part.

    It is the argument with the table's name and type; if there is none, it is a required argument of that type.

    Args:
      part: the factory.
      name: the table's name, such as "client_optimizer".

    >>> algorithms = parts_of_table("algorithm")
    >>> takes(algorithms["fedavg"], "client_optimizer"), takes(algorithms["scaffold"], "aggregator")
    ('optimizer', None)
    """
    arguments_of_type = {key: argument for key, argument in part.parts.items() if argument.noun == TABLES[name][1]}
    if name in arguments_of_type:
        return name
    # An argument with the name of another table of this type takes that table's part.
    names_of_type = {table for table, (_, noun) in TABLES.items() if noun == TABLES[name][1]}
    return next((x for x, argument in arguments_of_type.items() if argument.required and x not in names_of_type), None)


def has_table(algorithm: Part, name: str) -> bool:
    """Returns whether a config of this algorithm has the table `name`.

    Data and the algorithm itself have one always. A model has one if the algorithm takes a model or a loss: a federated
    statistic takes neither. Augmentations have one if the algorithm trains by a loss of parameters and examples alone,
    in which they stand; one that takes the model may compute what they would have to change as well.

    Args:
      algorithm: the part that the config's algorithm names.
      name: of the table, such as "model".

    >>> algorithms = parts_of_table("algorithm")
    >>> has_table(algorithms["fedavg"], "model"), has_table(algorithms["kmeans"], "model")
    (True, False)
    >>> has_table(algorithms["fedavg"], "augmentation"), has_table(algorithms["fedproto"], "augmentation")
    (True, False)
    """
    if name in ("data", "algorithm") or takes(algorithm, name) is not None:
        return True
    values = set(algorithm.values.values())
    if name == "augmentation":
        return "loss_fn" in values and takes(algorithm, "model") is None
    return name == "model" and not values.isdisjoint({"loss", "loss_fn"})


def _wraps(part: Part, name: str) -> bool:
    """Returns whether a factory requires a part of its own table: it is a wrapper then."""
    return any(argument.noun == TABLES[name][1] and argument.required for argument in part.parts.values())


def _factories(subpackage: str, noun: str) -> Mapping[str, Part]:
    """Returns the factories of a subpackage that return a part of the type `noun`, and that a config can call.

    Factories of admitted modules are among them.

    Args:
      subpackage: such as "sampling".
      noun: the name of a type, such as "Sampler", as the factories' results are annotated with.
    """
    public_parts = union(parts(subpackage), admitted_parts())
    if subpackage == "models":
        # No factory makes this model: quadratic clients train the point itself.
        meaning = "The parameter is a point in R^d, for quadratic clients."
        point = Part(
            subpackage=subpackage,
            name="point",
            meaning=meaning,
            returns=noun,
            options={},
            parts={},
            values={},
            others={},
            module="fedjax_sim.config.build",
        )
        public_parts = union(public_parts, {"point": point})
    return Chosen(public_parts, lambda part: not part.others and part.returns.split(".")[-1] == noun)
