"""Makes functions check their arguments: the decorator `named_arguments`."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

from fedjax_sim.validate.annotations import Checked, Choice, Default, Integer, Number, Truth
from fedjax_sim.validate.errors import InvalidType, fail, nearest

P = ParamSpec("P")  # two assignments, since mypy would take a tuple's for Any
R = TypeVar("R")


def _checks(annotation: Any) -> tuple[list[Any], bool]:
    """Returns the checks that an annotation asks for, and whether None is a value too."""
    kinds = typing.get_args(annotation)
    if typing.get_origin(annotation) is Annotated:
        checks, optional = _checks(kinds[0])
        return [x for x in kinds[1:] if isinstance(x, (Number, Integer, Checked))] + checks, optional
    if typing.get_origin(annotation) is Literal:
        return [Choice(kinds)], None in kinds
    if annotation is bool:
        return [Truth()], False
    if typing.get_origin(annotation) in (Union, types.UnionType) and NoneType in kinds:
        others = [kind for kind in kinds if kind is not NoneType]
        return _checks(others[0])[0] if len(others) == 1 else [], True
    return [], False


def _expanded(function: Callable) -> inspect.Signature:
    """Returns the signature of a function, with the options of `**options: Unpack[Options]` listed one by one.

    Args:
      function: whose last parameter may be such `**options`. Each entry of its TypedDict is annotated with its kind,
        one `Default`, and any other extras.

    Returns: the signature, where each option is a keyword-only parameter with its default. Extras other than the
      default stay in its annotation.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    last = parameters[-1] if parameters else None
    if last is None or last.kind is not last.VAR_KEYWORD or last.annotation is last.empty:
        return signature
    unpacked = _evaluated(function, {"options": last.annotation})["options"]
    if typing.get_origin(unpacked) is typing.Unpack:
        parameters.pop()
        (shared,) = typing.get_args(unpacked)
        for name, annotation in typing.get_type_hints(shared, include_extras=True).items():
            kind, *extras = typing.get_args(annotation)
            (default,) = (extra.value for extra in extras if isinstance(extra, Default))
            # Extras besides the default, such as a range, stay in the annotation.
            for extra in extras:
                kind = kind if isinstance(extra, Default) else Annotated[kind, extra]
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return signature.replace(parameters=parameters)


def _evaluated(function: Callable, annotations: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a function's annotations, which `from __future__ import annotations` keeps as texts."""

    def annotated() -> None: ...

    annotated.__annotations__ = annotations
    return typing.get_type_hints(annotated, inspect.unwrap(function).__globals__, include_extras=True)


def _rules(function: Callable, signature: inspect.Signature) -> dict[str, tuple[list[Any], bool]]:
    """Returns the checks of each argument that has some, and whether None is a value of the argument."""
    annotations = {x.name: x.annotation for x in signature.parameters.values() if x.annotation is not x.empty}
    rules = {name: _checks(kind) for name, kind in _evaluated(function, annotations).items()}
    return {name: rule for name, rule in rules.items() if rule[0]}


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function: arguments that it does not take, or that it lacks, raise a TypeError that names them.

    Options that several functions share are written once, in a TypedDict, each `Annotated` with its `Default`. A
    function takes them as `**options: Unpack[Options]`; `help`, `inspect` and the errors then show every option. Ranges
    and choices in annotations are checked: `Literal`, and `Annotated` with `Number`, `Integer` or `Checked`.

    Args:
      function: of arguments by position or by name; its annotations are read at the first call.

    >>> from fedjax_sim.validate import Positive, PositiveInt
    >>> @named_arguments
    ... def half(x: float, *, of: float): return x / of
    >>> half(3.0, off=1.0)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidType: half: expected one of its arguments, got 'off'. Did you mean 'of'?
    >>> half(3.0, 2.0)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidType: half: expected at most 1 arguments without a name (x), got 2. Write their names: of=...
    >>> half(3.0)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidType: half: expected its argument of, got nothing. It has no default.
    >>> class Batches(typing.TypedDict, total=False):
    ...     batch_size: Annotated[Literal[8, 16], Default(8)]
    >>> @named_arguments
    ... def train(rate: float, **options: typing.Unpack[Batches]): return options
    >>> list(inspect.signature(train).parameters.values())[1].default
    8
    >>> train(0.1, batch_size=0)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidArgument: batch_size: expected one of 8, 16, got 0.
    """
    signature = _expanded(function)
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    # Annotations are evaluated at the first call: their names may be defined below the function.
    rules = functools.cache(lambda: _rules(function, signature))
    names = list(signature.parameters)
    positional_names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keyword_names = [name for name in names if name not in positional_names]
    required_names = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name in options:
            if name not in names and not takes_all:
                hint = nearest(name, names) or f"They are {', '.join(names)}."
                if name == "learning_rate" and "optimizer" in names:
                    hint = "It is the optimizer's: optimizer=optax.sgd(0.1), say."
                fail(function.__name__, "one of its arguments", name, hint, TypeError)
        if len(args) > len(positional_names):
            rule = f"at most {len(positional_names)} arguments without a name ({', '.join(positional_names)})"
            hint = f"Write their names: {', '.join(f'{name}=...' for name in keyword_names)}" if keyword_names else ""
            fail(function.__name__, rule, len(args), hint, TypeError)
        values = dict(zip(positional_names, args, strict=False)) | options
        for name in required_names:
            if name not in values:
                words = f"{function.__name__}: expected its argument {name}, got nothing. It has no default."
                raise InvalidType(words)
        for name in positional_names[: len(args)]:
            if name in options:
                fail(function.__name__, f"one value of {name}", "two", "Leave out its name, or its place.", TypeError)
        for name, (checks, optional) in rules().items():
            if name in values and not (optional and values[name] is None):
                for check in checks:
                    check.check(name, values[name])
        return function(*args, **options)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked
