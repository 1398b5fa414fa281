"""Reads the public names of a subpackage, with their arguments, from its source without importing it.

An argument's annotation says what the argument takes: a value that TOML can express, another part, or a table with a
name. Reading sources takes milliseconds, while importing a subpackage imports JAX.

The words of this module:

    part      what a subpackage publishes under a name, such as `clip` of "transform"; most parts are factories
    origin    the dotted name of a part's definition, such as "fedjax_sim.transform.clip.clip"
    noun      the type of a part, such as "UpdateTransform", which the factory `clip` returns
    kind      the values that an option takes, such as `Literal["vector", "leaf"]` for `per` of `clip`; see `_kind`
    passed    the name of a value that `config.build` passes, and no config sets, such as "loss_fn"; see `_from_data`

Functions that read a syntax tree get its nodes: `ast.expr` for an annotation or a default, which is None if the source
has none.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

from fedjax_sim.config.lazy_parts import Read
from fedjax_sim.config.value_kinds import COLUMN_FILLS, COLUMN_VALUES, FILE, FOLDER, SCALE, integer_kind, number_kind
from fedjax_sim.files.regular_files import content_of

REQUIRED = "required"
NO_FUNCTION = "not a function"  # stands in `Part.others` for what is none
INT32_MAX = 2**31 - 1
PACKAGE = Path(__file__).parents[1]
# Table of a config -> its subpackage, and the type that the factories of its parts return.
TABLES = {
    "data": ("population", "FederatedData"),
    "model": ("models", "Model"),
    "augmentation": ("models.augmentations", "Augmentation"),
    "devices": ("network", "Devices"),
    "sampler": ("sampling", "Sampler"),
    "algorithm": ("algorithms", "Algorithm"),
    "client_optimizer": ("client.optimizers", "GradientTransformation"),
    "transform": ("transform", "UpdateTransform"),
    "downlink": ("transform", "UpdateTransform"),
    "aggregator": ("aggregation", "Aggregator"),
}
# Type of an option that is a table with a name -> the subpackage whose factories return this type.
INSIDE = {
    "Alone": "adversary",
    "Attackers": "adversary",
    "Availability": "network",
    "Distribution": "network",
    "Graph": "network",
    "Hazard": "network",
    "Link": "network",
    "Mixing": "network",
    "Omniscient": "adversary",
    "Partitioner": "population.partitioners",
    "ScoreMetric": "metrics",
    "StalenessWeight": "server.staleness",
    "Together": "adversary",
    "Trigger": "population",
}
# Type of a part that has a table -> its subpackage.
NOUNS = {noun: where for where, noun in TABLES.values()}
# Annotation -> the kind of its values.
KINDS_BY_NAME = {"bool": bool, "float": float, "int": int, "str": str, "FilePath": FILE, "FolderPath": FOLDER}
KINDS_BY_NAME |= {"Scale": SCALE, "ColumnFills": COLUMN_FILLS, "ColumnValues": COLUMN_VALUES}


# Statements that define a name with a docstring.
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Named(NamedTuple):
    """The kind of an option that is a table: it holds a `name`, and the options of the factory of that name."""

    types: tuple[str, ...]  # of `INSIDE` or `NOUNS`, sorted; the factory returns one of them
    optional: bool = False  # whether the option may be None
    number: bool = False  # whether a number may stand for the table


SCORE_METRIC = Named(("ScoreMetric",))  # what `run.metrics` names


class Option(NamedTuple):
    """An argument of a factory that a config may set."""

    kind: Any  # a type, a union of types or list[type], as `config.value_kinds.converted_to_kind` takes it; or `Named`
    default: Any  # REQUIRED if there is none


class Argument(NamedTuple):
    """An argument of a factory that takes another part."""

    noun: str  # that part's type, such as "Sampler"
    required: bool  # whether it has no default


class Part(NamedTuple):
    """A public name of a subpackage; a factory unless `others` says that it is not a function."""

    subpackage: str
    name: str
    meaning: str  # the first line of its docstring
    returns: str  # the annotation of its result, or ""
    options: dict[str, Option]  # arguments that TOML can express
    parts: dict[str, Argument]  # arguments that take other parts, by their annotation
    values: dict[str, str]  # arguments that no config sets: the name of what `config.build` passes (`FromData`)
    others: dict[str, str]  # required arguments that neither TOML nor other parts can give: their annotations, or ""
    module: str  # the module that defines it


@cache
def parts(subpackage: str) -> Mapping[str, Part]:
    """Returns every public name of a subpackage, sorted by name. A name's source is read when the name is looked up.

    Args:
      subpackage: a subpackage such as "sampling", or a module such as "client.optimizers".

    Raises: FileNotFoundError for a subpackage that does not exist.

    >>> parts("sampling")["uniform"].options
    {'cohort_size': Option(kind=<class 'int'>, default='required')}
    """
    return _parts_of(subpackage, public_names(f"fedjax_sim.{subpackage}"))


@cache
def parts_of_module(module: str) -> Mapping[str, Part]:
    """Returns every public function of a module outside of this package, which is not imported.

    The packages around the module are imported, since Python finds the module through them.

    Args:
      module: its dotted name, such as "my_package.rules".

    Raises: ModuleNotFoundError for a module that is not there, or whose source is not.
    """
    return _parts_of(module, _public_names(module, (ast.FunctionDef,)))


@cache
def public_names(module: str) -> Mapping[str, str]:
    """Returns the public names of a module, sorted, each with the dotted name of its definition.

    A name without an underscore is public if the module defines it as a function or a class, or publishes the name of
    another module by `from x import a as a`. If a module has a literal `__all__`, the public names are those in it.

    Args:
      module: its dotted name. It is not imported.

    >>> public_names("fedjax_sim.sampling")["uniform"]
    'fedjax_sim.sampling.uniform.uniform'
    """
    return _public_names(module, (ast.FunctionDef, ast.ClassDef))


def _public_names(module: str, definitions: tuple[type[ast.stmt], ...]) -> dict[str, str]:
    """Returns the public names of a module, as `public_names` does, where statements of these types define names.

    `from x import a as a` publishes a name of another module: type checkers read this form as a re-export. `from x
    import a` is for the module's own use.

    Args:
      module: its dotted name. It is parsed, and not imported.
      definitions: types of statements, `ast.FunctionDef` and perhaps `ast.ClassDef`. Only statements on the level of
        the module count.

    Returns: public name -> dotted name of its definition, sorted by name.
    """
    # Imported name -> the dotted name of its definition. All others are defined in the module itself.
    origins: dict[str, str] = {}
    published: set[str] = set()
    declared: list[str] | None = None  # a literal `__all__`
    for node in _module(module).body:
        if isinstance(node, ast.ImportFrom):
            source = _imported_module(module, node)
            origins |= {alias.asname or alias.name: f"{source}.{alias.name}" for alias in node.names}
            published |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, definitions):
            name = getattr(node, "name", "_")
            published |= {name} if not name.startswith("_") else set()
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if getattr(target, "id", "") == "__all__":
                declared = ast.literal_eval(node.value)
    public = published if declared is None else declared
    return {name: origins.get(name, f"{module}.{name}") for name in sorted(public)}


def _parts_of(subpackage: str, origins: Mapping[str, str]) -> Mapping[str, Part]:
    """Returns public names as parts, each of which is read when it is looked up.

    Args:
      subpackage: the name that the parts get as their subpackage.
      origins: public name -> dotted name of its definition, as from `public_names`.
    """

    def read(name: str) -> Part:
        module, _, original = origins[name].rpartition(".")
        return _part(subpackage, name, module, original)

    return Read(list(origins), read)


def docstring(part: Part) -> str:
    """Returns the whole docstring of a part; an empty text if its name stands for another function.

    >>> docstring(parts("sampling")["uniform"]).splitlines()[0] == parts("sampling")["uniform"].meaning
    True
    """
    nodes = [node for node in _module(part.module).body if isinstance(node, DEFINITIONS) and node.name == part.name]
    return (ast.get_docstring(nodes[0]) or "") if nodes else ""


@cache
def _parse(path: Path) -> ast.Module:
    """Parses a file of Python source, once; SyntaxError if it is none."""
    try:
        return ast.parse(content_of(path))
    except (MemoryError, RecursionError) as error:  # Python's parser raises either
        raise SyntaxError(f"{path}: too many expressions inside one another") from error


def _module(name: str) -> ast.Module:
    """Parses the module of this dotted name."""
    return _parse(_source_of(name))


def _source_of(name: str) -> Path:
    """Returns the source file of the module of this dotted name; that of a package is its `__init__.py`.

    Raises: ModuleNotFoundError for a module of another package that is not there, or has no source.
    """
    package, *inner = name.split(".")
    if package != "fedjax_sim":
        spec = importlib.util.find_spec(name)
        if spec is None or not (spec.origin or "").endswith(".py"):
            raise ModuleNotFoundError(f"no module with source code is named {name!r}")
        return Path(spec.origin or "")
    path = PACKAGE.joinpath(*inner)
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def _imported_module(module: str, node: ast.ImportFrom) -> str:
    """Returns the dotted name of the module from which a statement of `module` imports, without leading dots."""
    if not node.level:
        return node.module or ""
    # The first dot stands for the package that holds the module, or for the module itself if it is a package.
    package = module if _source_of(module).name == "__init__.py" else module.rpartition(".")[0]
    return importlib.util.resolve_name("." * node.level + (node.module or ""), package)


def _part(subpackage: str, name: str, module: str, original: str) -> Part:
    """Returns the part that a subpackage publishes under `name`, and that `module` defines as `original`.

    If `module` is a package with a module `original.py`, the part is this module, and no function. Otherwise the part
    is what the first of these statements in `module` defines:

        original = other     the part that `other` is
        def original(...)    a factory, whose arguments are read
        class original       no function

    Args:
      subpackage: such as "sampling", or a module such as "client.optimizers".
      name: the public name.
      module: the dotted name of the module with the definition.
      original: the name of the definition in `module`, which may differ from `name`.

    Returns: `Part`. Without a definition of this name, it is no function, and its meaning is "".
    """
    source = _source_of(module)
    no_function = Part(
        subpackage=subpackage,
        name=name,
        meaning="",
        returns="",
        options={},
        parts={},
        values={},
        others={NO_FUNCTION: ""},
        module=module,
    )
    inner_source = source.with_name(f"{original}.py")
    if source.name == "__init__.py" and inner_source.is_file():  # a module that is re-exported
        doc = ast.get_docstring(_parse(inner_source)) or ""
        return no_function._replace(meaning=doc.split("\n")[0])
    for node in _module(module).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == original:
            # A name of the module may stand for another, such as `average = mean`.
            if isinstance(node.value, ast.Name):
                return _part(subpackage, name, module, node.value.id)
        if not isinstance(node, DEFINITIONS) or node.name != original:
            continue
        part = no_function._replace(meaning=(ast.get_docstring(node) or "").split("\n")[0])
        return _signature(part, node) if isinstance(node, ast.FunctionDef) else part
    return no_function


def _arguments(module: str, node: ast.FunctionDef) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Yields the name of each argument of a function, its annotation, and its default (None for a required one).

    Args:
      module: the dotted name of the module in which the names of the annotations are to be understood.
      node: the function's definition. The options of `**options: Unpack[Shared]` are yielded one by one.
    """
    arguments = node.args
    positional = arguments.posonlyargs + arguments.args
    # Python stores the defaults of the last positional arguments alone.
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(positional, defaults, strict=True):
        yield argument.arg, argument.annotation, default
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield argument.arg, argument.annotation, default
    # `**options: Unpack[Shared]` declares the options of the TypedDict `Shared`.
    match arguments.kwarg and arguments.kwarg.annotation:
        case ast.Subscript(ast.Name("Unpack"), ast.Name(shared)):
            yield from _shared_options(module, shared)
        case _:
            pass  # none, or `**given: Any`, which no config can state


def _shared_options(module: str, name: str) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """Yields the options of a TypedDict, those of its bases first.

    An option is written as `name: Annotated[type, Default(value)]`, or with a range as `name: Annotated[type, range,
    Default(value)]`. It is yielded as (name, `type` or `Annotated[type, range]`, value).

    Args:
      module: the dotted name of a module that defines or imports the TypedDict.
      name: of the TypedDict.

    Raises: TypeError for an option in another form, which a config would not see.
    """
    for node in _module(module).body:
        # A class that is imported is read where it is defined.
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name in (alias.asname, alias.name):
                    yield from _shared_options(_imported_module(module, node), alias.name)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                match base:
                    case ast.Name(inherited) if inherited != "TypedDict":
                        yield from _shared_options(module, inherited)
                    case ast.Attribute(ast.Name(subpackage), inherited):
                        yield from _shared_options(f"fedjax_sim.{subpackage}", inherited)
                    case _:
                        pass  # `TypedDict` itself
            for option in node.body:
                match option:
                    # `kind` may be several expressions, such as a type and its range: all but the default.
                    case ast.AnnAssign(ast.Name(key), ast.Subscript(head, ast.Tuple([*kind, ast.Call(_, [default])]))):
                        yield key, kind[0] if len(kind) == 1 else ast.Subscript(head, ast.Tuple(kind)), default
                    case ast.AnnAssign():
                        raise TypeError(f"{module}: {ast.unparse(option)} is no Annotated[kind, Default(value)]")
                    case _:
                        pass  # the docstring


def _signature(part: Part, node: ast.FunctionDef) -> Part:
    """Returns the part with what its factory's arguments and result are annotated with.

    Each argument enters the first field that fits:

        `values`     what `config.build` passes
        `options`    an optional part whose argument is named as no table of a config: a table with a name
        `parts`      another part
        `options`    a value that TOML can express
        `others`     anything else, if it is required; an optional argument of this sort is left out

    Args:
      part: with its subpackage, name, meaning and module.
      node: the factory's definition.
    """
    options: dict[str, Option] = {}
    parts: dict[str, Argument] = {}
    values: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, annotation, default in _arguments(part.module, node):
        kind = _kind(annotation)
        noun = _noun(annotation)
        passed = _from_data(annotation)
        is_required = default is None
        if passed is not None:
            values[name] = passed
        elif noun is not None and not is_required and name not in TABLES:
            # An optional part whose argument is named as no table: the option itself is a table with a name.
            options[name] = Option(Named((noun,), True), None)
        elif noun is not None:
            parts[name] = Argument(noun, is_required)
        elif kind is not None:
            try:
                options[name] = Option(kind, REQUIRED if default is None else _literal(default))
            except (KeyError, ValueError) as error:
                found = ast.unparse(default or ast.Constant(None))
                words = f"{node.name}: expected a default that is written out for its argument {name}, got {found}."
                raise ValueError(f"{words} The module is read before it runs: write the value itself.") from error
        elif is_required:
            others[name] = ast.unparse(annotation) if annotation else ""
    # `*args` and `**kwargs` take what no config can name. The options of `Unpack` were read above.
    if node.args.vararg:
        others[f"*{node.args.vararg.arg}"] = ""
    if node.args.kwarg and not ast.unparse(node.args.kwarg.annotation or ast.Constant(None)).startswith("Unpack["):
        others[f"**{node.args.kwarg.arg}"] = ""
    returns = ast.unparse(node.returns) if node.returns else ""
    return part._replace(returns=returns, options=options, parts=parts, values=values, others=others)


def _from_data(node: ast.expr | None) -> str | None:
    """Returns what `config.build` passes for an argument annotated with `FromData`; None for other annotations.

    `LossFn` and others in `validate.annotations` are names for such annotations.

    Args:
      node: the annotation; None where there is none.
    """
    match node:
        case ast.Name(alias):
            return _passed().get(alias)
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple(members)):
            for member in members:
                match member:
                    case ast.Call(ast.Name("FromData"), [ast.Constant(str(name))]):
                        return name
                    case _:
                        pass  # the type, or another check
            return None
        case _:
            return None


@cache
def _passed() -> dict[str, str]:
    """Returns name -> what `config.build` passes, for the names of annotations with `FromData` in `validate`.

    >>> _passed()["LossFn"]
    'loss_fn'
    """
    assignments = [node for node in _module("fedjax_sim.validate.annotations").body if isinstance(node, ast.Assign)]
    passed_values = {ast.unparse(node.targets[0]): _from_data(node.value) for node in assignments}
    return {alias: name for alias, name in passed_values.items() if name is not None}


def _noun(node: ast.expr | None) -> str | None:
    """Returns the type of part in an annotation such as `Sampler` or `Sampler | None`; None for other annotations."""
    match node:
        case ast.BinOp(left, ast.BitOr(), ast.Constant(None)):
            return _noun(left)
        case ast.Attribute(attr=name) | ast.Name(name) if name in NOUNS:
            return name
        case _:
            return None


def _literal(node: ast.expr) -> Any:
    """Returns the value of a default, such as `0.1`, `2**34` or `(1, 2)`, as a config would hold it."""
    if isinstance(node, ast.BinOp):
        powers = {ast.Pow: lambda a, b: a**b, ast.LShift: lambda a, b: a << b, ast.Mult: lambda a, b: a * b}
        return powers[type(node.op)](_literal(node.left), _literal(node.right))
    default = ast.literal_eval(node)
    return list(default) if isinstance(default, tuple) else default


def _kind(node: ast.expr | None) -> Any:
    """Returns the kind of value that an annotation names; None where TOML cannot express it.

        annotation                                  kind
        `bool`, `float`, `FilePath`, ...            as in `KINDS_BY_NAME`
        `PositiveInt`, `OpenShare`, ...             as in `_ranges`
        `Annotated[float, Number(0, 1)]`            as in `_range`
        `Literal["a", "b"]`                         the same
        `None`                                      `NoneType`
        `A | B`                                     the union of both kinds, if both have one
        `Sequence[A]`, `list[A]`, `tuple[A, ...]`   `list` of the kind of A
        `Link`, `Link | None`, `Link | float`, ...  `Named`, for the types of `INSIDE`

    Args:
      node: the annotation; None if the argument has none.

    >>> _kind(ast.parse("Sequence[float] | None", mode="eval").body)
    list[float] | None
    >>> _kind(ast.parse("Link | None", mode="eval").body)
    Named(types=('Link',), optional=True, number=False)
    """
    alternatives = set() if node is None else set(ast.unparse(node).split(" | "))
    if alternatives & INSIDE.keys():
        types = alternatives - {"None", "float"}
        if not types <= INSIDE.keys():
            return None
        return Named(types=tuple(sorted(types)), optional="None" in alternatives, number="float" in alternatives)
    match node:
        case ast.Name(name) if name in KINDS_BY_NAME:
            return KINDS_BY_NAME[name]
        case ast.Name(name) if name in _ranges():
            return _ranges()[name]
        case ast.Subscript(ast.Name("Annotated")):
            return _range(node)
        case ast.Subscript(ast.Name("Literal"), members):
            literals = members.elts if isinstance(members, ast.Tuple) else [members]
            return Literal[tuple(map(ast.literal_eval, literals))]
        case ast.Constant(None):
            return NoneType
        case ast.BinOp(left, ast.BitOr(), right):
            left_kind = _kind(left)
            right_kind = _kind(right)
            return None if left_kind is None or right_kind is None else left_kind | right_kind
        case ast.Subscript(ast.Name("Sequence" | "list" | "tuple"), members):
            # `tuple[A, ...]` has two members, of which the first says what the values are.
            member_kind = _kind(members.elts[0] if isinstance(members, ast.Tuple) else members)
            return None if member_kind is None else list[member_kind]
        case _:
            return None


@cache
def _ranges() -> dict[str, Any]:
    """Returns name -> kind, for the ranges that `validate.annotations` has names for, such as `PositiveInt`."""
    assignments = [node for node in _module("fedjax_sim.validate.annotations").body if isinstance(node, ast.Assign)]
    kinds = {ast.unparse(node.targets[0]): _range(node.value) for node in assignments}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _range(node: ast.expr) -> Any:
    """Returns the kind of a number with a range; None for other annotations.

        `Annotated[int, Integer(low, high)]`                        an integer in [low, high]; by default [1, 2^31 - 1]
        `Annotated[float, Number(low, high, open_low=..., ...)]`    a number in [low, high]; by default any finite one

    Args:
      node: an annotation. The bounds are given by position, and `open_low` and `open_high` by name.
    """
    match node:
        case ast.Subscript(_, ast.Tuple([_, ast.Call(ast.Name("Integer"), bounds)])):
            # Bounds that are left out have the defaults of `validate.Integer`.
            low, high = [*map(_literal, bounds), *(1, INT32_MAX)[len(bounds) :]]
            return integer_kind(low, high)
        case ast.Subscript(_, ast.Tuple([_, ast.Call(ast.Name("Number"), bounds, keywords)])):
            low, high = [*map(_literal, bounds), *(-math.inf, math.inf)[len(bounds) :]]
            open_ends = {x.arg: _literal(x.value) for x in keywords if x.arg in ("open_low", "open_high")}
            return number_kind(low, high, **open_ends)
        case _:
            return None
