"""Reads columns of tables that others made: numbers, texts or arrays, what is missing in them, and whom they name.

A column is read when it is asked for, so that columns which nobody asked for stop nothing. Numbers are measured, and
identities are told apart: '007' and '7' are two identities and one number.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files

MOST_EXACT = 1 << 53  # integers above it are not all floats
MAX_DIGITS = 4000  # digits: Python refuses to convert more than 4,300
DEEPEST = 16  # axes of an array in a row
INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.0+)?")  # texts that are integers; 007 is none


class NotUnderstood(Exception):
    """The values of a column are neither numbers nor texts nor arrays; the message says what they are."""


class Column(NamedTuple):
    """The values of a column."""

    values: np.ndarray  # [rows, ...]: numbers, or [rows] texts (of dtype object); any value where one is missing
    is_missing: np.ndarray  # [rows] bool
    class_names: tuple[str, ...] | None = None  # all classes that there are, if the source states them

    @property
    def is_text(self) -> bool:
        """Whether the values are texts."""
        return self.values.dtype == object


class Identities(NamedTuple):
    """Whom or what the rows of a column name."""

    codes: np.ndarray  # [rows] int64, the number of the row's name; -1 where none is
    names: tuple[str, ...]  # distinct; integers in the order of numbers, all others in the order of texts
    integers: tuple[int, ...] | None  # the names as integers, if all of them are

    @property
    def are_measured(self) -> bool:
        """Whether the names are numbers, and some have a fraction, as measured quantities have."""
        numbers = [validate.decimal(name) for name in self.names]
        return self.integers is None and all(map(math.isfinite, numbers)) and any(x % 1 for x in numbers)


def read_column(values: Any, class_names: Sequence[str] | None = None) -> Column:
    """Reads a column of a frame, of an Arrow table, or any sequence.

    Missing is what says so: None, NaN, NaT, NA of pandas, nulls of Arrow, masks of NumPy, and a text that is empty or
    that such a value becomes when it is written (`text_files.says_missing`).

    Args:
      values: the column; a number, a text or an array of numbers in each row.
      class_names: what the integers 0, 1, ... of the column mean, as a `ClassLabel` of Hugging Face's states. The
        column is then read as texts. None: the values mean themselves.

    Raises: `NotUnderstood` for values of another kind.

    Guarantees: the same values are read alike from every container and of every dtype
    (tests/population/datasets/test_columns.py::test_missing_is_one_thing). Integers keep all of their digits
    (::test_identities_keep_their_digits).
    """
    column = _read(values)
    if class_names is None:
        return column
    is_named = ~column.is_missing
    if column.values.dtype.kind not in "iu":
        raise NotUnderstood(f"{column.values.dtype} in place of numbers of {len(class_names)} classes")
    wrong = is_named & ((column.values < -1) | (column.values >= len(class_names)))
    if wrong.any():
        raise NotUnderstood(f"the class {column.values[wrong][0]} where there are {len(class_names)}")
    is_named &= column.values >= 0  # Hugging Face's data sets have -1 where a row has no class
    names = np.array(["", *class_names], object)
    return Column(names[np.where(is_named, column.values + 1, 0)], ~is_named, tuple(class_names))


def of_texts(texts: Sequence[str]) -> Column:
    """Returns a column of texts, such as those of a file."""
    is_missing = {text: text_files.says_missing(text) for text in set(texts)}
    return Column(np.array(texts, object), np.array([is_missing[text] for text in texts], bool))


def _read(values: Any) -> Column:
    """Reads a column without names of classes.

    Args:
      values: as in `read_column`: an array of NumPy, masked or not, a column of a frame or of an Arrow table, or a
        sequence.

    Returns: `Column`. Numbers of NumPy keep their dtype.

    Raises: `NotUnderstood` for dates, durations, complex numbers, bytes, and what `_of_objects` refuses.
    """
    if isinstance(values, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(values)
        column = _read(np.asarray(values.data))
        return column._replace(is_missing=column.is_missing | mask.reshape(len(mask), -1).any(axis=1))
    dtype = getattr(values, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "biuf":
        array = np.asarray(values)
        is_missing = np.isnan(array) if array.ndim == 1 and dtype.kind == "f" else np.zeros(len(array), bool)
        return Column(array, is_missing)
    if isinstance(dtype, np.dtype) and dtype.kind in "mMcSV":
        raise NotUnderstood(
            {"M": "dates", "m": "durations", "c": "complex numbers", "S": "bytes"}.get(dtype.kind, str(dtype))
        )
    # The objects of a column have all of their digits. Conversions to arrays make floats of integers beside a null.
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(values, method):
            arrays = np.asarray(values) if method == "to_pylist" else np.zeros(0)
            # The rows of an Arrow column of lists are arrays already, and objects of their numbers would take long.
            if arrays.dtype == object and len(arrays) and isinstance(arrays[0], np.ndarray):
                return _of_objects(list(arrays))
            return _of_objects(getattr(values, method)())
    return _of_objects(list(values))


def _of_objects(objects: list) -> Column:
    """Reads a column of Python's or NumPy's objects.

    Args:
      objects: one for each row.

    Returns: `Column`, whose values have the kind of the objects that are not missing: bool; int64 for integers; float64
      for real numbers; [rows, ...] numbers for arrays of one shape; and texts for everything else, such as texts beside
      numbers, or integers that the array could not hold exactly.

    Raises: `NotUnderstood` for arrays beside missing rows, arrays of different shapes, complex numbers, bytes, and
      objects that are neither numbers nor texts nor arrays.
    """
    is_missing = np.array([_says_missing(value) for value in objects], bool)
    kinds = {type(value) for value, missing in zip(objects, is_missing, strict=True) if not missing}
    if kinds and not any(issubclass(kind, (str, bytes, numbers.Number)) for kind in kinds):
        if is_missing.any():
            raise NotUnderstood(f"{kinds.pop().__name__} in some rows, and nothing in row {int(is_missing.argmax())}")
        return Column(_stacked([_dense(value) for value in objects]), is_missing)
    wrong = [kind for kind in kinds if not issubclass(kind, (str, numbers.Number)) or issubclass(kind, complex)]
    if wrong:
        raise NotUnderstood(f"values of type {min(kind.__name__ for kind in wrong)}")
    if all(issubclass(kind, (bool, np.bool_)) for kind in kinds) and kinds:
        return Column(
            np.array([not m and bool(value) for value, m in zip(objects, is_missing, strict=True)]), is_missing
        )
    present = [value for value, missing in zip(objects, is_missing, strict=True) if not missing]
    if kinds and all(issubclass(kind, numbers.Real) for kind in kinds):
        are_integers = all(issubclass(kind, numbers.Integral) for kind in kinds)
        limit = 1 << 63 if are_integers else MOST_EXACT
        # Integers that the array could not hold stay texts, which have all of their digits.
        if not any(isinstance(value, numbers.Integral) and not -limit <= int(value) < limit for value in present):
            filled = [0 if missing else value for value, missing in zip(objects, is_missing, strict=True)]
            return Column(np.array(filled, np.int64 if are_integers else np.float64), is_missing)
    return of_texts(["" if missing else str(value) for value, missing in zip(objects, is_missing, strict=True)])


def _says_missing(value: Any) -> bool:
    """Returns whether an object stands for a missing value: None, or what does not equal itself, as NaN, NaT and NA."""
    if value is None or value is np.ma.masked:
        return True
    if isinstance(value, int | Sized):  # texts, lists, arrays
        return False
    try:
        return not bool(value == value)
    except (ArithmeticError, TypeError):  # NA of pandas equals nothing, and is neither true nor false
        return True


def _dense(value: Any, depth: int = 0) -> np.ndarray:
    """Returns an array of numbers, also of arrays of arrays, as Parquet has them."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise NotUnderstood("arrays whose rows have different lengths") from None
    if array.dtype.kind in "biuf":
        return array
    if array.dtype != object or array.ndim == 0 or depth == DEEPEST:
        raise NotUnderstood(f"values of type {type(value).__name__}" if array.ndim == 0 else f"arrays of {array.dtype}")
    if any(isinstance(part, (str, bytes, type(None))) or np.ndim(part) == 0 for part in array):
        raise NotUnderstood("arrays with something else than numbers in them")
    return _stacked([_dense(part, depth + 1) for part in array])


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """Returns arrays of one shape as one array."""
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise NotUnderstood(f"arrays of different shapes, such as {shapes[0]} and {shapes[1]}")
    return np.stack(arrays)


def concatenated_rows(first: Column, second: Column) -> Column:
    """Returns the rows of both columns. A column in which all is missing takes the kind of the other.

    Args:
      first, second: two columns of one name, whose rows follow one another.

    Raises: `NotUnderstood` for numbers in one and texts in the other, and for arrays of different shapes.
    """
    if first.is_missing.all() or second.is_missing.all():
        shape = (second if first.is_missing.all() else first).values
        first, second = (
            column._replace(
                values=np.full((len(column.values), *shape.shape[1:]), "" if shape.dtype == object else 0, shape.dtype)
            )
            if column.is_missing.all()
            else column
            for column in (first, second)
        )
    if first.is_text != second.is_text or first.values.shape[1:] != second.values.shape[1:]:
        raise NotUnderstood(
            " and ".join(f"{column.values.dtype} {column.values.shape[1:]}" for column in (first, second))
        )
    if first.class_names != second.class_names:
        raise NotUnderstood(f"the classes {first.class_names} and {second.class_names}")
    values = np.concatenate([first.values, second.values])
    # NumPy makes floats of integers beside floats, and of signed integers beside unsigned ones.
    if values.dtype.kind == "f" and values.ndim == 1 and any(map(_has_large_integers, (first, second))):
        texts = [_text(value) for column in (first, second) for value in column.values.tolist()]
        values = np.array(texts, object)
    return Column(values, np.concatenate([first.is_missing, second.is_missing]), first.class_names)


def _has_large_integers(column: Column) -> bool:
    """Returns whether a column is of integers of which some are no floats."""
    values = column.values
    return values.dtype.kind in "iu" and bool(((values > MOST_EXACT) | (values < -MOST_EXACT)).any())


def coded(column: Column, codes: Sequence[str]) -> Column:
    """Returns the column in which the codes stand for missing values too.

    Args:
      column: of numbers or texts.
      codes: texts such as "-9", which also match the numbers -9 and -9.0.
    """
    if not codes or column.values.ndim > 1:
        return column
    if column.is_text:
        texts = column.values.tolist()
        code_of = {text: text_files.is_code(text, codes) for text in set(texts)}
        is_code = np.array([code_of[text] for text in texts], bool)
    else:
        is_code = np.zeros(len(column.values), bool)
        for code in codes:
            number = int(code.partition(".")[0]) if _is_integer(code) else validate.decimal(code)
            is_code |= column.values == number
    return column._replace(is_missing=column.is_missing | is_code)


def identities(column: Column) -> Identities:
    """Tells apart the values of a column of one value in each row.

    Texts are integers if each of them is the only text of its integer, without leading zeros: of '1' and '2', and not
    of '007' and '7'. So the same ids are read from a file as from a frame.

    Args:
      column: of texts or of numbers; a missing value gets the code -1.

    >>> identities(read_column(["10", "9", None, "10"]))
    Identities(codes=array([ 1,  0, -1,  1]), names=('9', '10'), integers=(9, 10))
    >>> identities(read_column(["7", "007"])).names
    ('007', '7')
    """
    present = column.values[~column.is_missing]
    if column.is_text:
        # Not as an array of texts, whose rows are as long as the longest text.
        names = sorted(set(present.tolist()))
        place = {name: i for i, name in enumerate(names)}
        code = np.array([place[name] for name in present.tolist()], np.int64)
    else:
        keys, code = np.unique(present, return_inverse=True)
        names = [_text(key) for key in keys.tolist()]
    integers = [int(name.partition(".")[0]) for name in names] if all(map(_is_integer, names)) else None
    if integers is not None and len(set(integers)) < len(integers):
        integers = None
    if integers is not None:
        order = sorted(range(len(integers)), key=integers.__getitem__)
        integers = [integers[i] for i in order]
        names = [str(number) for number in integers]
        code = np.argsort(order)[code] if len(order) else code
    codes = np.full(len(column.values), -1)
    codes[~column.is_missing] = code
    return Identities(codes, tuple(names), None if integers is None else tuple(integers))


def own_name(value: Any) -> str:
    """Returns the name of a value by itself, whatever other values a column has: "1" for 1.0, "1.0" and "+1".

    >>> [own_name(value) for value in (1.0, "+1", "1.0", "01", "x")]
    ['1', '1', '1', '01', 'x']
    """
    name = _text(value)
    return str(int(name.partition(".")[0])) if _is_integer(name) else name


def _is_integer(name: str) -> bool:
    """Tells whether a text is an integer without leading zeros, which Python can read."""
    return INTEGER.fullmatch(name) is not None and len(name) < MAX_DIGITS


def _text(value: str | bool | int | float) -> str:
    """Returns a text as it is, and a number as a text; integers without a point."""
    if isinstance(value, (bool, np.bool_)):
        return str(int(value))
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)
