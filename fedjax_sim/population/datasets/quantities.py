"""Columns of measured quantities: missing values are imputed and told, and scales are made alike.

The numbers for this are either constants that the user states, or statistics of the training rows of all clients, so
that test rows stay unseen. Statistics are recorded as learnt, see `types.Learned`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import standardiser
from fedjax_sim.types import ColumnFills, Learned, Scale, Units

MOST_LISTED = 10  # names that a note lists


def medians_of(values: np.ndarray) -> np.ndarray:
    """Returns the median of each column, [columns], without NaN. A column of NaN alone has 0."""
    columns = [column[~np.isnan(column)] for column in values.T]
    return np.array([np.median(column) if len(column) else 0.0 for column in columns])


def imputed(values: np.ndarray, medians: np.ndarray) -> np.ndarray:
    """Returns the values [n, columns], with the column's median instead of NaN."""
    return np.where(np.isnan(values), medians, values)


def names_in_words(names: Sequence[str]) -> str:
    """Returns names as a text, with the first ten of many."""
    return ", ".join(names[:MOST_LISTED]) + (", ..." if len(names) > MOST_LISTED else "")


def missing_in_words(names: Sequence[str], values: np.ndarray, fill: ColumnFills | None = None) -> tuple[str, ...]:
    """Returns a note on the missing values of columns [n, columns], which have NaN; none if no value is missing.

    >>> missing_in_words(["age", "height"], np.array([[1.0, np.nan], [np.nan, np.nan]]))
    ('missing values, the median of training rows in their place: 1 of age, 2 of height',)
    """
    counts = np.isnan(values).sum(axis=0)
    missing_counts = [f"{count:,} of {name}" for name, count in zip(names, counts, strict=True) if count]
    place = "the median of training rows" if fill is None else "the number in `fill`"
    return (f"missing values, {place} in their place: {names_in_words(missing_counts)}",) if missing_counts else ()


class Quantities(NamedTuple):
    """How features are made of quantities."""

    prepared: Callable[[np.ndarray], np.ndarray]  # [n, columns] with NaN for missing ones -> [n, features]
    learned: tuple[Learned, ...]
    feature_names: tuple[str, ...]
    units: Units | None  # of the features


def units_of(mean: np.ndarray | float, deviation: np.ndarray | float, width: int, more: int = 0) -> Units | None:
    """Returns the own units of `width` features, and of `more` features behind them that are in their own units.

    >>> units_of(np.array([50.0]), np.array([10.0]), 1, more=1), units_of(0.0, 1.0, 1)
    (Units(offsets=(50.0, 0.0), factors=(10.0, 1.0)), None)
    """
    if np.ndim(mean) == 0:
        return None
    offsets = np.broadcast_to(np.asarray(mean, np.float64), (width,)).tolist()
    factors = np.broadcast_to(np.asarray(deviation, np.float64), (width,)).tolist()
    return Units((*offsets, *[0.0] * more), (*factors, *[1.0] * more))


def scale_of(
    standardise: bool | Scale | None, names: Sequence[str], statistics: Callable[[], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray | float, np.ndarray | float, tuple[Learned, ...]]:
    """Returns mean and standard deviation of each column, and the record that they were learnt.

    Args:
      standardise: True or None for `statistics`, False for no change, or {"mean": [d], "deviation": [d]}.
      names: the names of the d columns.
      statistics: computes (mean [d], deviation [d]) of the training rows.

    Raises: ValueError or TypeError that names `standardise`, for constants that do not fit the columns.

    >>> scale_of({"mean": [50], "deviation": [10]}, ["age"], tuple)
    (array([50.]), array([10.]), ())
    """
    if standardise is None or standardise is True:
        effect = "shift and rescale these inputs of every other client, without a bound"
        instead = "standardise = {mean = [...], deviation = [...]}, or false"
        return *statistics(), (Learned("mean and standard deviation", tuple(names), effect, instead, is_scale=True),)
    if standardise is False:
        return 0.0, 1.0, ()
    rule = "true, false, or a table {mean = [...], deviation = [...]}"
    if not isinstance(standardise, Mapping) or set(standardise) != {"mean", "deviation"}:
        shown = sorted(map(str, standardise)) if isinstance(standardise, Mapping) else standardise
        validate.fail("standardise", rule, shown, error=TypeError)
    constants = {}
    for name, numbers in standardise.items():
        validate.sequence(f"standardise.{name}", numbers)
        constants[name] = np.array([_number(f"standardise.{name}", number) for number in numbers])
        if len(numbers) != len(names):
            rule = f"{len(names)} numbers, one for each of {names_in_words(names)}"
            validate.fail(f"standardise.{name}", rule, len(numbers))
    for name, deviation in zip(names, constants["deviation"], strict=True):
        if not deviation > 0:
            validate.fail("standardise.deviation", "numbers > 0", float(deviation), f"It is that of {name}.")
    return constants["mean"], constants["deviation"], ()


def _number(where: str, value: object) -> float:
    """Returns a stated constant as a float; it must be a finite number."""
    validate.in_range(where, value)
    return float(value)  # type: ignore[arg-type]


def fills_of(
    fill: ColumnFills | None, names: Sequence[str], train: np.ndarray, may_be_missing: bool
) -> tuple[np.ndarray, np.ndarray, tuple[Learned, ...]]:
    """Returns what stands for a missing value, for which columns an indicator tells that one is missing, and a record.

    Args:
      fill: column -> number, for the columns in which values may be missing. None for the medians of training rows,
        with an indicator for each column in which a training row lacks its value.
      names: of the d columns.
      train: the training rows [n, d], with NaN for missing values.
      may_be_missing: whether missing values are allowed at all. False: nothing is learnt from rows without one.

    Returns: (numbers [d], which are NaN where nothing is stated, the columns with an indicator, the record).
    """
    if fill is None:
        with_indicator = np.flatnonzero(np.isnan(train).any(axis=0))
        learned: tuple[Learned, ...] = ()
        if may_be_missing or len(with_indicator):
            what = "the numbers in the place of missing values, and which columns have an indicator of them,"
            effect = "change these inputs of every other client, and their number"
            learned = (Learned(what, tuple(names), effect, "fill = {COLUMN = NUMBER, ...}"),)
        return medians_of(train), with_indicator, learned
    if not isinstance(fill, Mapping):
        validate.fail("fill", "a table with a number for each column", fill, error=TypeError)
    for name in fill:
        validate.one_of("fill", name, list(names), hint="It is no column of numbers among the features.")
    stated = {name: _number(f"fill.{name}", number) for name, number in fill.items()}
    numbers = np.array([stated.get(name, np.nan) for name in names])
    return numbers, np.flatnonzero(~np.isnan(numbers)), ()


def classes_learned(instead: str) -> tuple[Learned, ...]:
    """Returns the record that the classes are those of all rows; `instead` is the option that states them."""
    effect = "change the number and the order of every other client's classes"
    return (Learned("the classes", ("the labels",), effect, instead),)


def quantities(
    train: np.ndarray,
    names: Sequence[str],
    *,
    standardise: bool | Scale | None = None,
    fill: ColumnFills | None = None,
    may_be_missing: bool = True,
) -> Quantities:
    """Returns how features are made of quantities, [n, columns] with NaN for missing ones.

    A missing value becomes what is stated in `fill`, or the median of the training rows. Behind the columns stands an
    indicator, 0 or 1, for each column in `fill`, or for each of which a training row lacks its value.

    Args:
      train: the training rows, [n, columns].
      names: of the columns.
      standardise, fill, may_be_missing: as in `scale_of` and `fills_of`.

    Raises: ValueError for constants that do not fit the columns, and, from the function, for a value that is missing in
      a column that `fill` leaves out.

    >>> made = quantities(np.array([[1.0, np.nan], [3.0, 4.0]]), ["a", "b"])
    >>> made.prepared(np.array([[5.0, np.nan]])).tolist(), len(made.learned), made.feature_names
    ([[3.0, 0.0, 1.0]], 2, ('a', 'b', 'b is missing'))
    >>> constants = {"standardise": {"mean": [2, 4], "deviation": [1, 1]}, "fill": {"b": 4.0}}
    >>> made = quantities(np.array([[1.0, np.nan], [3.0, 4.0]]), ["a", "b"], **constants)
    >>> made.prepared(np.array([[5.0, np.nan]])).tolist(), made.learned
    ([[3.0, 0.0, 1.0]], ())
    """
    fills, with_indicator, learned = fills_of(fill, names, train, may_be_missing)
    mean, deviation, learned_scale = scale_of(standardise, names, lambda: standardiser(imputed(train, fills)))

    def prepared(values: np.ndarray) -> np.ndarray:
        indicators = np.isnan(values[:, with_indicator])
        filled = imputed(values, fills)
        if np.isnan(filled).any():
            name = names[int(np.argmax(np.isnan(filled).any(axis=0)))]
            validate.fail("fill", f"a number for {name}, which has missing values", sorted(fill or ()))
        return np.concatenate([(filled - mean) / deviation, indicators], axis=1)

    indicators = [f"{names[i]} is missing" for i in with_indicator]
    units = units_of(mean, deviation, len(names), len(indicators))
    return Quantities(prepared, (*learned_scale, *learned), (*names, *indicators), units)
