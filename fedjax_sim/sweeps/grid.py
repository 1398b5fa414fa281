"""Makes the points of a sweep from its arguments: combinations of values, and seeds."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_sim import validate

MAX_POINTS = 1_000_000
OWN = ("seed", "round")  # columns that every row has
VALUE_TYPES = (bool, int, float, str, type(None))


def combinations_of(grid: Mapping[str, Iterable] | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the combinations of a grid: the product of its axes, or the points that a list names.

    Args:
      grid: values by name; or a list of points, each with a value for every name.

    Raises: ValueError or TypeError for names that rows use already, for equal values, and for values of other kinds.

    Guarantees: wrong grids are refused (tests/sweeps/test_sweep.py::test_wrong_input).

    >>> combinations_of({"rate": [0.1, 0.2], "steps": [1]})
    [{'rate': 0.1, 'steps': 1}, {'rate': 0.2, 'steps': 1}]
    >>> combinations_of([{"rate": 0.1, "steps": 4}, {"rate": 0.4, "steps": 1}])[1]
    {'rate': 0.4, 'steps': 1}
    """
    hint = "Give a dict of names and their values, or a list of dicts, a point each."
    if isinstance(grid, Mapping):
        axes = {_name(name): _values(_name(name), values) for name, values in grid.items()}
        if math.prod(map(len, axes.values())) > MAX_POINTS:
            validate.fail("grid", f"at most {MAX_POINTS} combinations", math.prod(map(len, axes.values())))
        return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    if isinstance(grid, str) or not isinstance(grid, Iterable):
        validate.fail("grid", "values for each name", grid, hint, TypeError)
    points = list(grid)
    if not points:
        validate.fail("grid", "a point at least", points, hint)
    for i, point in enumerate(points):
        if not isinstance(point, Mapping):
            validate.fail(f"grid[{i}]", "a dict of names and values", point, hint, TypeError)
        if set(point) != set(points[0]):
            first, found = (sorted(names, key=str) for names in (points[0], point))  # a wrong name may be no text
            validate.fail(f"grid[{i}]", f"the names of the first point, {first}", found)
    combinations = [
        {_name(name): _value(f"grid[{i}].{name}", point[name]) for name in points[0]} for i, point in enumerate(points)
    ]
    _distinct("grid", [tuple(point.values()) for point in combinations], [*map(str, combinations)])
    # Equal values, such as 1 and 1.0, must be spelled alike in all points.
    for name in points[0]:
        spellings = [value for _, value in dict.fromkeys((type(point[name]), point[name]) for point in combinations)]
        _distinct(f"grid.{name}", spellings, spellings)
    return combinations


def seeds_of(seeds: int | Sequence[int]) -> list[int]:
    """Returns the seeds 0..S-1 for a number S, or the seeds of a list.

    Args:
      seeds: S in [1, `MAX_POINTS`], or distinct integers >= 0, at least one.

    >>> seeds_of(3), seeds_of([7, 5])
    ([0, 1, 2], [7, 5])
    """
    if (
        isinstance(seeds, (bool, np.bool_))
        or not isinstance(seeds, (int, np.integer, Iterable))
        or isinstance(seeds, str)
    ):
        validate.fail("seeds", "a number of seeds, or a list of them", seeds, error=TypeError)
    if isinstance(seeds, (int, np.integer)):
        validate.integer("seeds", seeds, 1, MAX_POINTS)
        return list(range(int(seeds)))
    seed_list = list(seeds)
    if not seed_list:
        validate.fail("seeds", "a seed at least", seed_list)
    for i, seed in enumerate(seed_list):
        validate.integer(f"seeds[{i}]", seed, 0)
    seed_list = [int(seed) for seed in seed_list]
    _distinct("seeds", seed_list, seed_list)
    return seed_list


def check_arguments(make: Callable, point: Mapping[str, Any]) -> None:
    """Refuses names that `make` does not take, and a grid that leaves out a name that `make` needs.

    Args:
      make: the function that is called with the values of a point.
      point: any point of the grid.

    Raises: ValueError for a name that `make` does not take, and for a grid without a name that `make` needs.
    """
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        # Some built-in functions have no signature.
        return
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    keyword_names = [name for name, parameter in parameters.items() if parameter.kind in keyword_kinds]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in point:
        if name not in keyword_names and not takes_all:
            rule = (
                "one of the names that make takes, " + ", ".join(keyword_names)
                if keyword_names
                else "no name: make takes none"
            )
            validate.fail("grid", rule, name, validate.nearest(name, keyword_names))
    missing = [
        name for name in keyword_names if parameters[name].default is inspect.Parameter.empty and name not in point
    ]
    if missing:
        validate.fail("grid", f"values for {', '.join(missing)}, which make needs", sorted(point))


def _name(name: Any) -> str:
    """Returns a name of the grid, after checking it."""
    if not isinstance(name, str) or not name:
        validate.fail("grid", "names as text", name, error=TypeError)
    if name in OWN:
        validate.fail("grid", "names that rows do not use", name, "Seeds are given as seeds=." * (name == "seed"))
    return name


def _values(name: str, values: Any) -> list:
    """Returns the values of an axis as plain Python values, after checking them."""
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        validate.fail(f"grid.{name}", "a list of values", values, "One value? Put it into a list.", TypeError)
    if isinstance(values, (np.ndarray, jax.Array)) and values.ndim != 1:
        validate.fail(f"grid.{name}", "values along one axis", f"shape {values.shape}")
    plain_values = [_value(f"grid.{name}[{i}]", value) for i, value in enumerate(values)]
    if not plain_values:
        validate.fail(f"grid.{name}", "a value at least", plain_values)
    _distinct(f"grid.{name}", plain_values, plain_values)
    return plain_values


def _value(name: str, value: Any) -> Any:
    """Returns a plain Python value; numbers of arrays become Python numbers."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and np.ndim(value) == 0:
        value = np.asarray(value).item()
    if type(value) not in VALUE_TYPES:
        validate.fail(name, "a number, a truth value, a text or None", value, "Choose by name inside make.", TypeError)
    if isinstance(value, float) and not math.isfinite(value):
        validate.fail(name, "a finite number", value)
    return value


def _distinct(name: str, values: list, shown: list) -> None:
    """Refuses values that compare equal, as 1, 1.0 and True do: rows are found by their values."""
    seen = set()
    for value, word in zip(values, shown, strict=True):
        if value in seen:
            validate.fail(name, "each once", word, "It occurs twice. For more trials give more seeds.")
        seen.add(value)
