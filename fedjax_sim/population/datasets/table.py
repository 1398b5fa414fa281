"""This module reads one table whose rows belong to many clients: a CSV file, a data frame, or columns by name."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from fedjax_sim import text_files, validate
from fedjax_sim.population.datasets.column_uses import category, identifier_in_words, quantity_columns
from fedjax_sim.population.datasets.quantities import listed, missing_in_words, quantities
from fedjax_sim.population.federated_data import (
    SCALED_BYTES,
    FederatedData,
    TableColumn,
    are_bytes,
    check_examples,
    existing,
)
from fedjax_sim.population.partition import Partition, by_group, from_owner
from fedjax_sim.population.partitioners import Partitioner
from fedjax_sim.population.population import indexed, stored
from fedjax_sim.population.splits import client_split, stratified_split
from fedjax_sim.types import FilePath, Population
from fedjax_sim.validate import Default, Integer, NonNegativeInt, OpenShare

__all__ = ["TableOptions", "from_table", "table"]

TEST_FRACTION = 0.25  # where neither a share nor a table of test rows is given
WORDS_HINT = "A column of words is a category: name it in categories, or choose the columns with features."


class TableOptions(TypedDict, total=False):
    """Options that say what the columns of a table are; `from_table` describes each."""

    client: Annotated[str | None, Default(None)]
    partition: Annotated[Partitioner | None, Default(None)]
    task: Annotated[Literal["binary", "classification", "regression"], Default("classification")]
    features: Annotated[Sequence[str], Default(())]
    categories: Annotated[Sequence[str], Default(())]
    num_classes: Annotated[Annotated[int, Integer(2)] | None, Default(None)]
    standardise: Annotated[bool, Default(True)]
    missing: Annotated[Sequence[str], Default(())]
    test_fraction: Annotated[OpenShare | None, Default(None)]
    seed: Annotated[NonNegativeInt, Default(0)]


class _Meaning(NamedTuple):
    """The values of `TableOptions`, and the label column."""

    label: str
    client: str | None = None
    partition: Partitioner | None = None
    task: str = "classification"
    features: Sequence[str] = ()
    categories: Sequence[str] = ()
    num_classes: int | None = None
    standardise: bool = True
    missing: Sequence[str] = ()
    test_fraction: float | None = None
    seed: int = 0


class _Table(NamedTuple):
    """The columns of a table as arrays of equal length, and where each row is, for error messages."""

    columns: dict[str, np.ndarray]  # numbers, or texts (of dtype object)
    place: Callable[[int], str]  # row -> such as "patients.csv:2"
    hint: str = ""  # what may be wrong if a column is missing


@validate.named_arguments
def from_table(source: Any, *, label: str, test: Any = None, **options: Unpack[TableOptions]) -> FederatedData:
    """Makes federated data of one table: a row is an example, and a column or a partitioner says whose it is.

    Args:
      source: columns by name: a data frame of pandas or polars, a table of Arrow, a split of Hugging Face `datasets`,
        or a dict of arrays. A column holds a number or a text in each row. A sole feature column may hold an array in
        each row, such as an image; bytes are divided by 255, and other numbers stay as they are.
      label: name of the label column.
      test: a table like `source` whose rows are the test rows. None splits the rows of `source`.
      client: name of the column of client ids. Each distinct id of `source` is a client, in sorted order of the ids,
        which are the `client_names`.
      partition: assigns training rows to simulated clients instead, such as
        `population.partitioners.dirichlet(num_clients=100, alpha=0.3)`. Exactly one of `client` and `partition` is
        given.
      task: "classification", "binary" or "regression". Labels of the first two may be texts or integers. Integers
        0, ..., C - 1 stay as they are. Otherwise class k is the k-th label in sorted order, and `label_names` and
        `notes` say so.
      features: names of the feature columns, in the order of x. Empty for all but `label` and `client`.
      categories: names of those feature columns whose values are categories, texts or numbers. Each value that a
        training row has becomes one column, 0 or 1, in sorted order. A value that only test rows have is 0 in all.
      num_classes: C, for the task "classification" alone. None for the labels that are there.
      standardise: whether quantities, which are the features that are no categories, are standardised by mean and
        standard deviation of the pooled training rows. That is a convenience of the simulation: a real federation
        would need a protocol for it.
      missing: texts that stand for a missing quantity, such as ["?", "-9"], or "nan" for NaN in a column of numbers. A
        missing quantity is replaced by the median of the training rows, and an indicator column behind all features
        tells where. A missing category is a value of its own.
      test_fraction: share of the rows that become test rows, of each label unless the task is "regression". With
        `client` it is also the share of each client's rows and of each label of a client, which is rounded up or down
        at random: every row is a test row with this probability. None for 0.25, and where `test` is given, beside which
        a share is refused.
      seed: of the split.

    Returns: `FederatedData` with x [n, features] float32. With `client`, held-out client i has the test rows of the
      i-th id that has any. With `partition` there are no held-out clients.

    Raises: ValueError or TypeError that names column and row, for a value that is not a finite number, an id or a label
      that is missing, unknown names, columns of different lengths, and labels that do not fit the task.

    Guarantees: every row is in exactly one of training and test, and with its own id
    (tests/population/datasets/test_table.py::test_rows_keep_their_clients). Statistics and categories are those of
    training rows (::test_statistics_come_from_training_rows). A CSV file, a frame, an Arrow table and a dict of the
    same columns give the same data (::test_the_same_table_in_many_forms).

    >>> columns = {"who": ["b", "a", "a", "b"], "height": [1.0, 2.0, 3.0, 4.0], "grade": ["low", "low", "top", "top"]}
    >>> data = from_table(columns, client="who", label="grade", task="binary", test=columns)
    >>> data.train.size, data.input_shape, data.label_names
    (2, (1,), ('low', 'top'))
    """
    train = _columns_of("source", source)
    return _federated(train, None if test is None else _columns_of("test", test), "table", _Meaning(label, **options))


@validate.named_arguments
def table(
    *,
    file: FilePath,
    label: str,
    test_file: FilePath | None = None,
    delimiter: str = "auto",
    comment: str | None = None,
    **options: Unpack[TableOptions],
) -> FederatedData:
    """Reads one CSV file whose rows belong to many clients, by a column of ids or by a partitioner.

    Args:
      file: a text file with a header. Empty lines are skipped.
      label: name of the label column.
      test_file: a file with the same columns whose rows are the test rows. None splits the rows of `file`.
      delimiter: the text between values: one character, "space", or "auto". "auto" takes comma, semicolon or tab,
        whichever is in the header.
      comment: lines that begin with this text are skipped. None skips no line.
      client, partition, task, features, categories, num_classes, standardise, missing, test_fraction, seed: as in
        `from_table`.

    Returns: `FederatedData` as `from_table` does.

    Raises: ValueError that names file and line, for lines of different lengths and whatever `from_table` refuses.

    Guarantees: those of `from_table`; a refusal names the line in the file
    (tests/population/datasets/test_table.py::test_refusals_name_their_place).
    """
    if not (comment is None or (isinstance(comment, str) and comment.strip())):
        validate.fail("comment", "the text with which lines of comments begin, or none", comment)
    train = _columns_in("file", file, delimiter, comment)
    test = None if test_file is None else _columns_in("test_file", test_file, delimiter, comment)
    return _federated(train, test, pathlib.Path(file).stem, _Meaning(label, **options))


def _columns_in(argument: str, file: FilePath, delimiter: str, comment: str | None) -> _Table:
    """Reads the columns of a CSV file."""
    path = existing(argument, file, folder=False)
    rows = list(text_files.table_rows(path.name, path, delimiter=delimiter, comments=[comment] if comment else []))
    if len(rows) < 2:
        validate.fail(path.name, "a header and at least one row", f"{len(rows)} lines")
    (first_line, header), *body = rows
    if len(set(header)) != len(header) or not all(header):
        validate.fail(f"{path.name}:{first_line}", "distinct, named columns", header)
    for line, cells in body:
        if len(cells) != len(header):
            validate.fail(f"{path.name}:{line}", f"{len(header)} columns", len(cells))
    lines = [line for line, _ in body]
    columns = zip(*(cells for _, cells in body), strict=True)
    arrays = {name: np.array(cells, object) for name, cells in zip(header, columns, strict=True)}
    return _Table(arrays, lambda row: f"{path.name}:{lines[row]}", text_files.one_column(header, delimiter))


def _columns_of(argument: str, source: Any) -> _Table:
    """Returns the columns of a frame, an Arrow table, a split of Hugging Face's or a dict."""
    # Arrow and Hugging Face call them column_names, pandas and polars columns; a dict has its keys.
    names = getattr(source, "column_names", getattr(source, "columns", source))
    if isinstance(source, (str, np.ndarray)) or not (isinstance(source, Mapping) or names is not source):
        hint = "A CSV file is read by population.table(file=...); arrays go into a dict: {'x': x, 'y': y}."
        validate.fail(argument, "columns by name: a dict, a data frame or an Arrow table", type(source).__name__, hint)
    columns = {str(name): _column(f"{argument}[{name!r}]", source[name]) for name in names}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or not max(lengths.values()):
        validate.fail(argument, "columns of one length, with at least one row", lengths)
    return _Table(columns, lambda row: f"{argument} row {row}")


def _column(place: str, values: Any) -> np.ndarray:
    """Returns a column as an array of numbers [rows, ...], or of texts [rows] with dtype object."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different shapes
        validate.fail(place, "a number, a text, or an array of one shape in each row", "rows of different shapes")
    if array.dtype.kind in "biuf":
        return array
    if array.dtype.kind in "UT":
        return array.astype(object)
    if array.dtype.kind != "O" or array.ndim != 1:
        validate.fail(place, "numbers or texts", str(array.dtype), error=TypeError)
    # Arrays and images in the rows become one array of numbers.
    if not any(isinstance(value, (str, int, float, type(None))) for value in array):
        try:
            return _column(place, np.stack([np.asarray(value) for value in array]))
        except ValueError:
            validate.fail(place, "an array of one shape in each row", "rows of different shapes")
    is_absent = [value is None or (isinstance(value, float) and np.isnan(value)) for value in array]
    return np.array(["" if absent else str(x) for x, absent in zip(array, is_absent, strict=True)], object)


def _federated(train: _Table, test: _Table | None, name: str, meaning: _Meaning) -> FederatedData:
    """Makes the data set of the columns of a table, and of a table of test rows if there is one."""
    client = meaning.client
    partition = meaning.partition
    if (client is None) == (partition is None):
        hint = "client = 'user_id' takes the clients of a column; a partitioner makes them up."
        validate.fail("client", "either client or partition", "neither" if client is None else "both", hint)
    if test is not None and meaning.test_fraction is not None:
        validate.fail(
            "test_fraction", "none beside a table of test rows", meaning.test_fraction, "No row is split off."
        )
    if meaning.num_classes is not None and meaning.task != "classification":
        validate.fail("num_classes", f"none with task = {meaning.task!r}", meaning.num_classes)
    feature_names = _feature_names(train, meaning)
    ids = None if client is None else _ids(train, client)
    if test is None:
        table = train
        is_test = _test_rows(train, ids, meaning)
    else:
        table = _joined(train, test, [meaning.label, *feature_names, *([] if client is None else [client])])
        is_test = np.arange(_num_rows(table)) >= _num_rows(train)
        ids = None if client is None else _ids(table, client)
    for part, rows in (("training", ~is_test), ("test", is_test)):
        if not rows.any():
            hint = f"There are {len(is_test):,} rows."
            validate.fail("test_fraction", f"a share that leaves {part} rows", _test_share(meaning), hint)
    x, notes, features, warnings = _features(table, feature_names, ~is_test, meaning)
    y, num_outputs, label_names = _labels(table, meaning)
    if label_names is not None:
        notes = (*notes, f"labels, in the order of the classes: {listed(label_names)}")
    training, testing = (
        check_examples(where, {"x": x[rows], "y": y[rows]}, meaning.task, num_outputs)
        for where, rows in (("train", ~is_test), ("test", is_test))
    )
    if SCALED_BYTES in notes:
        training["x"], testing["x"] = training["x"] / np.float32(255), testing["x"] / np.float32(255)
    held_out = client_names = held_out_names = None
    if ids is not None:
        # A client whose rows the split made test rows stays in the population, without rows. In a table of test rows
        # alone, ids that never train are held-out clients and no others.
        distinct_ids = np.unique(ids if test is None else ids[~is_test])
        owner = np.asarray(np.searchsorted(distinct_ids, ids[~is_test]))
        population: Population = _stored(training, from_owner(owner, len(distinct_ids)))
        held_out = _stored(testing, by_group(ids[is_test]))
        client_names, held_out_names = (
            tuple(map(str, some_ids.tolist())) for some_ids in (distinct_ids, np.unique(ids[is_test]))
        )
    elif partition is not None:
        population = indexed(training, partition.divide(training["y"]))
    shape = training["x"].shape[1:]
    return FederatedData(
        population,
        testing,
        held_out,
        shape,
        num_outputs,
        meaning.task,
        label_names,
        name=name,
        notes=tuple(notes),
        client_names=client_names,
        held_out_names=held_out_names,
        table_columns=_columns(train, features, meaning),
        warnings=warnings,
    )


def _columns(table: _Table, features: tuple[TableColumn, ...], meaning: _Meaning) -> tuple[TableColumn, ...]:
    """Returns what became of each column: the features in the order of x, and the others."""
    known = (*features, TableColumn(meaning.label, "label"))
    if meaning.client is not None:
        known += (TableColumn(meaning.client, "client id"),)
    names = {column.name for column in known}
    return known + tuple(TableColumn(name, "not used") for name in table.columns if name not in names)


def _remedy(name: str, is_category: bool) -> str:
    """Returns what to do about a feature that looks like an identifier."""
    remedy = 'Choose the features without it: features = ["...", "..."].'
    if is_category:
        return remedy
    return f"{remedy} If it tells categories apart: categories = [{json.dumps(name, ensure_ascii=False)}]."


def _stored(rows: dict[str, np.ndarray], partition: Partition) -> Population:
    return stored({leaf: values[partition.indices] for leaf, values in rows.items()}, partition.offsets)


def _num_rows(table: _Table) -> int:
    return len(next(iter(table.columns.values())))


def _joined(train: _Table, test: _Table, names: Sequence[str]) -> _Table:
    """Returns the named columns of both tables, the rows of `train` first."""
    num_train = _num_rows(train)
    columns = {}
    for name in names:
        first = _named(train, name, "columns")
        second = _named(test, name, "test")
        if (first.dtype == object) != (second.dtype == object) or first.shape[1:] != second.shape[1:]:
            kinds = f"{first.dtype} {first.shape[1:]} and {second.dtype} {second.shape[1:]}"
            validate.fail(f"test[{name!r}]", "values as those of the training table", kinds)
        columns[name] = np.concatenate([first, second])
    return _Table(columns, lambda row: train.place(row) if row < num_train else test.place(row - num_train))


def _named(table: _Table, name: str, argument: str) -> np.ndarray:
    """Returns a column by its name."""
    validate.one_of(argument, name, list(table.columns), hint=table.hint)
    return table.columns[name]


def _feature_names(table: _Table, meaning: _Meaning) -> list[str]:
    """Returns the names of the feature columns, in the order of x."""
    taken = {meaning.label: "label"} | ({} if meaning.client is None else {meaning.client: "client"})
    _named(table, meaning.label, "label")
    for argument, chosen in (("features", meaning.features), ("categories", meaning.categories)):
        if isinstance(chosen, str) or not all(isinstance(name, str) for name in chosen):
            validate.fail(argument, "a list of names of columns", chosen, error=TypeError)
        for name in chosen:
            _named(table, name, argument)
            if name in taken:
                validate.fail(argument, f"no {taken[name]} column", name, "It would tell the answer or the client.")
        if len(set(chosen)) != len(chosen):
            validate.fail(argument, "each column once", list(chosen))
    names = list(meaning.features) or [name for name in table.columns if name not in taken]
    if not names:
        validate.fail("features", "at least one feature column", list(table.columns), table.hint)
    for name in meaning.categories:
        validate.one_of("categories", name, names, hint="It is not among the features.")
    return names


def _ids(table: _Table, client: str) -> np.ndarray:
    """Returns the client id of each row; no id may be missing."""
    ids = _named(table, client, "client")
    is_missing = ids == "" if ids.dtype == object else ~np.isfinite(ids)
    if ids.ndim != 1 or np.any(is_missing):
        where = table.place(int(np.argmax(is_missing))) if ids.ndim == 1 else "every row"
        validate.fail(f"{where} {client}", "a client id", "none", "Drop the row, or give it an id.")
    return ids.astype(str) if ids.dtype == object else ids


def _test_rows(table: _Table, ids: np.ndarray | None, meaning: _Meaning) -> np.ndarray:
    """Draws which rows are test rows, [rows] bool: a share of each label, at each client if there are ids."""
    num_rows = _num_rows(table)
    labels = np.zeros(num_rows) if meaning.task == "regression" else _named(table, meaning.label, "label").astype(str)
    rng = np.random.default_rng(meaning.seed)
    if ids is not None:
        return client_split(labels, ids, _test_share(meaning), rng)
    return np.isin(np.arange(num_rows), stratified_split(labels, _test_share(meaning), rng)[1])


def _test_share(meaning: _Meaning) -> float:
    """Returns the share of test rows."""
    return TEST_FRACTION if meaning.test_fraction is None else meaning.test_fraction


def _quantity(table: _Table, name: str, missing: Sequence[str]) -> np.ndarray:
    """Returns the numbers of a column, [rows] float64, with NaN where one is missing."""
    values = table.columns[name]
    if values.dtype != object:
        numbers = values.astype(np.float64)
        codes = [validate.decimal(code) for code in missing]
        numbers[np.isin(numbers, codes)] = np.nan
        may_be_nan = any(code.lower() == "nan" for code in missing)
        is_wrong = np.isinf(numbers) if may_be_nan else ~np.isfinite(values)
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            codes = json.dumps([*missing, "nan"], ensure_ascii=False)
            hint = f"If NaN stands for a missing value, say so: missing = {codes}."
            if np.isinf(values[row]):
                hint = "It is not finite: correct it, or drop the row."
            validate.fail(f"{table.place(row)} {name}", "a finite number", float(values[row]), hint)
        return numbers
    texts = values.tolist()
    if not missing and "_" not in (joined := "".join(texts)) and joined.isascii():
        # Digits alone can be read at once; whatever is refused here is read again below, with its place.
        try:
            numbers = values.astype(np.float64)
        except ValueError:
            numbers = np.array([np.nan])
        if np.isfinite(numbers).all():
            return numbers
    return np.array(
        [text_files.number(f"{table.place(row)} {name}", text, missing, WORDS_HINT) for row, text in enumerate(texts)]
    )


def _features(
    table: _Table, names: Sequence[str], is_training: np.ndarray, meaning: _Meaning
) -> tuple[np.ndarray, tuple[str, ...], tuple[TableColumn, ...], tuple[str, ...]]:
    """Returns x [rows, ...], what was changed in words, the columns with their preparation, and warnings."""
    arrays = [name for name in names if table.columns[name].ndim > 1]
    if arrays and len(names) > 1:
        others = [name for name in names if name != arrays[0]]
        hint = f"features = [{arrays[0]!r}] chooses it."
        validate.fail("features", f"no other column beside the arrays of {arrays[0]!r}", others, hint)
    if arrays:
        x = table.columns[arrays[0]]
        notes = (SCALED_BYTES,) if are_bytes({arrays[0]: x}) else ()
        return x, notes, (TableColumn(arrays[0], "feature", "divided by 255" if notes else "as it is"),), ()
    missing = text_files.check_missing(meaning.missing)
    quantity_names = [name for name in names if name not in meaning.categories]
    columns = {name: _quantity(table, name, missing) for name in quantity_names}
    blocks = []
    notes: tuple[str, ...] = ()
    features: tuple[TableColumn, ...] = ()
    warnings: tuple[str, ...] = ()
    for name, quantity in columns.items():
        warnings += identifier_in_words(name, quantity, _remedy(name, False))
    if quantity_names:
        values = np.stack([columns[name] for name in quantity_names], axis=1)
        notes = missing_in_words(quantity_names, values)
        features = quantity_columns(quantity_names, values, is_training, meaning.standardise)
        blocks.append(quantities(values[is_training], meaning.standardise)(values))
    for name in meaning.categories:
        values = table.columns[name]
        categories = np.unique(values[is_training])
        blocks.append(values[:, None] == categories[None])
        features += (category(name, len(categories)),)
        warnings += identifier_in_words(name, values.astype(object), _remedy(name, True))
    return np.concatenate(blocks, axis=1), notes, features, warnings


def _labels(table: _Table, meaning: _Meaning) -> tuple[np.ndarray, int, tuple[str, ...] | None]:
    """Returns y [rows], the number of outputs, and the classes' names unless they are 0, ..., C - 1."""
    label = meaning.label
    values = _named(table, label, "label")
    if values.ndim != 1:
        validate.fail("label", "one label in each row", f"shape {values.shape}", "One-hot labels: values.argmax(1).")
    if meaning.task == "regression":
        return _quantity(table, label, ()), 1, None
    missing = text_files.check_missing(meaning.missing)
    if values.dtype == object:
        is_missing = np.isin(values.astype(str), ["", *missing])
        numbers = np.array([validate.decimal(text) for text in values])
    else:
        is_missing = ~np.isfinite(values)
        numbers = values.astype(np.float64)
    if is_missing.any():
        where = f"{table.place(int(np.argmax(is_missing)))} {label}"
        validate.fail(where, "a label", "none", "Drop the row: nothing can be learned from it.")
    if np.isfinite(numbers).all():
        is_fraction = numbers != np.floor(numbers)
        if is_fraction.any():
            row = int(np.argmax(is_fraction))
            hint = "A measured quantity needs task = 'regression'."
            validate.fail(f"{table.place(row)} {label}", "a label that is an integer or a text", numbers[row], hint)
        values = numbers.astype(np.int64)
    classes, y = np.unique(values, return_inverse=True)
    num_classes = 2 if meaning.task == "binary" else meaning.num_classes
    num_outputs = 1 if meaning.task == "binary" else num_classes or len(classes)
    if values.dtype != object and 0 <= classes[0] and classes[-1] < (num_classes or len(classes)):
        return values, num_outputs, None
    if num_classes not in (None, len(classes)):
        found = f"{len(classes)}: {listed([str(label) for label in classes])}"
        validate.fail("label", f"{num_classes} distinct labels, or 0 to {num_classes - 1}", found)
    return y, num_outputs, tuple(map(str, classes))
