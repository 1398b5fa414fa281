"""This module reads one table whose rows belong to many clients: a CSV file, a data frame, or columns by name."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.population.datasets.column_uses import category, identifier_in_words, quantity_columns
from fedjax_sim.population.datasets.columns import (
    Column,
    Identities,
    NotUnderstood,
    coded,
    concatenated_rows,
    identities,
    of_texts,
    own_name,
    read_column,
)
from fedjax_sim.population.datasets.quantities import classes_learned, missing_in_words, names_in_words, quantities
from fedjax_sim.population.federated_data import (
    SCALED_BYTES,
    FederatedData,
    TableColumn,
    are_bytes,
    cast_examples,
    existing_path,
)
from fedjax_sim.population.partition import Partition, by_group, from_owner
from fedjax_sim.population.partitioners import Partitioner
from fedjax_sim.population.population import indexed, stored
from fedjax_sim.population.splits import client_split, own_split, split_learned, stratified_split
from fedjax_sim.types import ColumnFills, ColumnValues, FilePath, Learned, Population, Scale, Units
from fedjax_sim.validate import Default, Integer, NonNegativeInt, OpenShare

TEST_FRACTION = 0.25  # where neither a share nor a table of test rows is given
MOST_TOLD = 10  # columns whose errors are told at once
WITHOUT_IT = 'Choose the features without it: features = ["...", "..."].'
MOST_CATEGORY_BYTES = 1 << 33  # of the columns of one category, as float32
WORDS_HINT = "A column of words is a category: name it in categories, or choose the columns with features."


class TableOptions(TypedDict, total=False):
    """Options that say what the columns of a table are; `from_table` describes each."""

    client: Annotated[str | None, Default(None)]
    partition: Annotated[Partitioner | None, Default(None)]
    task: Annotated[Literal["binary", "classification", "regression"], Default("classification")]
    features: Annotated[Sequence[str], Default(())]
    categories: Annotated[Sequence[str] | ColumnValues, Default(())]
    num_classes: Annotated[Annotated[int, Integer(2)] | None, Default(None)]
    classes: Annotated[Sequence[str] | None, Default(None)]
    standardise: Annotated[bool | Scale | None, Default(None)]
    missing: Annotated[Sequence[str], Default(())]
    fill: Annotated[ColumnFills | None, Default(None)]
    test_fraction: Annotated[OpenShare | None, Default(None)]
    split: Annotated[Literal["together", "by_client"], Default("together")]
    seed: Annotated[NonNegativeInt, Default(0)]


class _Meaning(NamedTuple):
    """The values of `TableOptions`, and the label column."""

    label: str
    client: str | None = None
    partition: Partitioner | None = None
    task: str = "classification"
    features: Sequence[str] = ()
    categories: Sequence[str] | ColumnValues = ()
    num_classes: int | None = None
    classes: Sequence[str] | None = None
    standardise: bool | Scale | None = None
    missing: Sequence[str] = ()
    fill: ColumnFills | None = None
    test_fraction: float | None = None
    split: Literal["together", "by_client"] = "together"
    seed: int = 0


class _Prepared(NamedTuple):
    """The features of all rows, and how they were made."""

    x: np.ndarray  # [rows, ...]
    columns: tuple[TableColumn, ...]  # with their preparation
    notes: tuple[str, ...]  # what was changed, in words
    warnings: tuple[str, ...] = ()
    learned: tuple[Learned, ...] = ()
    names: tuple[str, ...] | None = None  # of the features
    units: Units | None = None


class _Table(NamedTuple):
    """The columns of a table, which have equal length, and where each row is, for error messages."""

    columns: dict[str, Callable[[], Column]]  # read when they are asked for: other columns stop nothing
    num_rows: int
    place: Callable[[int], str]  # row -> such as "patients.csv:2"
    hint: str = ""  # what may be wrong if a column is missing


@validate.named_arguments
def from_table(source: Any, *, label: str, test: Any = None, **options: Unpack[TableOptions]) -> FederatedData:
    """Makes federated data of one table: a row is an example, and a column or a partitioner says whose it is.

    Args:
      source: columns by name: a data frame of pandas or polars, a table of Arrow, a split of Hugging Face `datasets`,
        or a dict of arrays. A column holds a number or a text in each row. A sole feature column may hold an array in
        each row, such as an image; bytes are divided by 255, and other numbers stay as they are. Columns that are no
        feature, label or client are not read, and may hold anything.
      label: name of the label column.
      test: a table like `source` whose rows are the test rows. None splits the rows of `source`.
      client: name of the column of client ids. Each distinct id of `source` is a client, in sorted order of the ids,
        which are the `client_names`: integers, or texts. Texts are integers if each is the only text of its integer,
        without leading zeros, as they are in a file; "007" and "7" are two texts.
      partition: assigns training rows to simulated clients instead, such as
        `population.partitioners.dirichlet(num_clients=100, alpha=0.3)`. Exactly one of `client` and `partition` is
        given.
      task: "classification", "binary" or "regression". Labels of the first two may be texts or integers, as ids.
        Integers 0, ..., C - 1 stay as they are. Otherwise class k is the k-th label in sorted order, and `label_names`
        and `notes` say so. A `ClassLabel` of Hugging Face keeps its classes, their order and names, also those without
        a row.
      features: names of the feature columns. Empty for all but `label` and `client`. In x come the quantities in this
        order, then their indicators (see `missing`), then the columns of the categories.
      categories: names of those feature columns whose values are categories, texts or numbers. Each value that a
        training row has becomes one column, 0 or 1, in sorted order. With a table, {smokes = ["no", "yes"]}, the stated
        values are the columns, in that order. A value without a column, such as one that only test rows have, is 0 in
        all, and `warnings` names it.
      num_classes: C, for the task "classification" alone. None for the labels that are there.
      classes: the labels in the order of the classes, such as ["low", "top"]. No row may have another label. None for
        the labels that are there.
      standardise: whether quantities, which are the features that are no categories, are standardised by mean and
        standard deviation of the pooled training rows. That is a convenience of the simulation: a real federation
        would need a protocol for it, and no noise hides it. {mean = [...], deviation = [...]} are constants in the
        order of the quantities. None standardises too; but beside an algorithm that answers about the data, a config
        then keeps them in their own units.
      missing: texts that stand for a missing value in every column, such as ["?", "-9"], where -9 also matches numbers.
        Missing without a code are None, NaN, NaT, NA of pandas, nulls of Arrow, masks of NumPy, and empty texts. An id
        or a label must not be missing, and a missing category is a value of its own. A missing quantity is replaced by
        the median of the training rows, and an indicator column behind the quantities tells where; those without a code
        are refused unless "nan" says that they are expected.
      fill: a number for each column in which quantities may be missing, which stands for them: {age = 54}. Each of
        these columns has an indicator. None for the medians.
      test_fraction: share of the rows that become test rows, of each label unless the task is "regression". With
        `client` it is also the share of each client's rows and of each label of a client, which is rounded up or down
        at random: every row is a test row with this probability. None for 0.25, and where `test` is given, beside which
        a share is refused.
      split: with `client`, "together" draws the test rows of all clients together, so that their number is the share of
        all rows. "by_client" draws each client's own from its id and the seed, whatever other clients there are, as
        noise needs it; labels then have their share on average.
      seed: of the split.

    Beside noise, whatever is learnt from the rows of all clients must be stated in its place (`standardise`, `fill`,
    `categories`, and `classes` or `num_classes`), since one client could change it: see `FederatedData.learned`.

    Returns: `FederatedData` with x [n, features] float32. With `client`, held-out client i has the test rows of the
      i-th id that has any. With `partition` there are no held-out clients.

    Raises: ValueError or TypeError that names column and row, for a value that is not a finite number, an id or a label
      that is missing, unknown names, columns of different lengths, and labels that do not fit the task.

    Guarantees: every row is in exactly one of training and test, and with its own id
    (tests/population/datasets/test_table.py::test_rows_keep_their_clients). Statistics and categories are those of
    training rows (::test_statistics_come_from_training_rows). A CSV file, a frame, an Arrow table and a dict of the
    same columns give the same data (::test_the_same_table_in_many_forms). Every spelling of a missing value is one
    (tests/population/datasets/test_columns.py::test_missing_is_one_thing), ids and labels keep all of their digits
    (::test_identities_keep_their_digits), and columns that are not asked for stop nothing
    (::test_columns_that_nobody_asked_for).

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
      client, partition, task, features, categories, num_classes, classes, standardise, missing, fill, test_fraction,
        split, seed: as in `from_table`.

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
    """Reads the columns of a CSV file.

    Args:
      argument: the name of `file` in error messages: "file" or "test_file".
      file: a text file with a header and at least one row.
      delimiter, comment: as in `table`.

    Returns: `_Table`, whose columns are texts, and whose places are such as "patients.csv:2", with the number of the
      line in the file.

    Raises: ValueError for columns without a name or with equal names, and for lines of different lengths.
    """
    path = existing_path(argument, file, folder=False)
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
    texts = {
        name: functools.cache(functools.partial(of_texts, cells)) for name, cells in zip(header, columns, strict=True)
    }
    hint = text_files.one_column(header, delimiter)
    return _Table(texts, len(lines), lambda row: f"{path.name}:{lines[row]}", hint)


def _columns_of(argument: str, source: Any) -> _Table:
    """Returns the columns of a frame, an Arrow table, a split of Hugging Face's or a dict.

    Args:
      argument: the name of `source` in error messages: "source" or "test".
      source: as in `from_table`. No column is read here.

    Returns: `_Table`, whose places are such as "source row 3", counted from 0.

    Raises: ValueError for what has no columns, for several tables at once, for columns whose names are equal as texts,
      for columns of different lengths, and for none or without rows.
    """
    # Arrow and Hugging Face call them column_names, pandas and polars columns; a dict has its keys.
    names = getattr(source, "column_names", None)
    names = names if isinstance(names, list) else getattr(source, "columns", source)
    if isinstance(source, (str, np.ndarray)) or not (isinstance(source, Mapping) or names is not source):
        hint = "A CSV file is read by population.table(file=...); arrays go into a dict: {'x': x, 'y': y}."
        validate.fail(argument, "columns by name: a dict, a data frame or an Arrow table", type(source).__name__, hint)
    if isinstance(source, Mapping) and source and all(_is_table(value) for value in source.values()):
        splits = list(map(str, source))
        hint = f"Take one of the splits {names_in_words(splits)}, say {argument} = splits[{splits[0]!r}]"
        hint += f", and test = splits[{splits[1]!r}]." if len(splits) > 1 else "."
        validate.fail(argument, "one table", f"{type(source).__name__} of {len(splits)} tables", hint)
    columns = {str(name): source[name] for name in names}
    if len(columns) != len(names):
        validate.fail(argument, "columns of distinct names", list(map(str, names)))
    lengths = {name: _length(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1 or max(lengths.values()) < 1:
        validate.fail(argument, "columns of one length, with at least one row", lengths)
    # Hugging Face's data sets say which classes the numbers of a column stand for.
    facts = getattr(source, "features", None)
    facts = facts if isinstance(facts, Mapping) else {}

    def reader(name: str, values: Any) -> Callable[[], Column]:
        class_names = getattr(facts.get(name), "names", None)
        return functools.cache(lambda: read_column(values, class_names))

    readers = {name: reader(name, values) for name, values in columns.items()}
    return _Table(readers, max(lengths.values()), lambda row: f"{argument} row {row}")


def _is_table(value: Any) -> bool:
    """Returns whether a value has columns of its own."""
    return hasattr(value, "column_names") or hasattr(value, "columns")


def _length(values: Any) -> int:
    """Returns the number of rows of a column; one value alone is no row."""
    try:
        return 0 if isinstance(values, (str, bytes, Mapping)) else len(values)
    except TypeError:
        return 0


def _check_meaning(meaning: _Meaning, has_test: bool) -> None:
    """Refuses options that contradict each other.

    Args:
      meaning: the options.
      has_test: whether there is a table of test rows.

    Raises: ValueError that names the option.
    """
    if (meaning.client is None) == (meaning.partition is None):
        hint = "client = 'user_id' takes the clients of a column; a partitioner makes them up."
        validate.fail("client", "either client or partition", "neither" if meaning.client is None else "both", hint)
    if has_test and meaning.test_fraction is not None:
        validate.fail(
            "test_fraction", "none beside a table of test rows", meaning.test_fraction, "No row is split off."
        )
    if meaning.classes is not None and (meaning.task == "regression" or meaning.num_classes is not None):
        other = f"task = {meaning.task!r}" if meaning.num_classes is None else "num_classes"
        validate.fail("classes", f"none beside {other}", list(meaning.classes))
    if meaning.num_classes is not None and meaning.task != "classification":
        validate.fail("num_classes", f"none with task = {meaning.task!r}", meaning.num_classes)
    if meaning.split == "by_client" and (meaning.client is None or has_test):
        other = "a partition" if meaning.client is None else "a table of test rows"
        validate.fail("split", f'"together" beside {other}', meaning.split, "No client has rows to split.")


def _federated(train: _Table, test: _Table | None, name: str, meaning: _Meaning) -> FederatedData:
    """Makes the data set of the columns of a table, and of a table of test rows if there is one.

    Args:
      train: the table whose rows become training rows, and test rows if there is no other table.
      test: a table with the columns that are used, whose rows are the test rows; None splits the rows of `train`.
      name: of the data set.
      meaning: which columns are used, and how.

    Raises: ValueError or TypeError for options that contradict each other, and as `from_table` says.
    """
    client = meaning.client
    partition = meaning.partition
    _check_meaning(meaning, has_test=test is not None)
    feature_names = _feature_names(train, meaning)
    ids = None if client is None else _ids(train, client, meaning)
    if test is None:
        table = train
        is_test = _test_rows(train, ids, meaning)
    else:
        table = _joined(train, test, [meaning.label, *feature_names, *([] if client is None else [client])])
        is_test = np.arange(table.num_rows) >= train.num_rows
        ids = None if client is None else _ids(table, client, meaning)
    for part, rows in (("training", ~is_test), ("test", is_test)):
        if not rows.any():
            hint = f"There are {len(is_test):,} rows."
            validate.fail("test_fraction", f"a share that leaves {part} rows", _test_share(meaning), hint)
    prepared = _features(table, feature_names, ~is_test, meaning)
    x, notes, learned = prepared.x, prepared.notes, prepared.learned
    y, num_outputs, label_names = _labels(table, meaning)
    # Labels 0 to C - 1 with a stated C are as they were written, and a source may state its classes. Other classes come
    # from the labels of all rows.
    is_numbered = label_names is None and (meaning.task == "binary" or meaning.num_classes is not None)
    is_stated = meaning.classes is not None or _named(table, meaning.label, "label").class_names is not None
    if meaning.task != "regression" and not is_numbered and not is_stated:
        learned += classes_learned('classes = ["...", "..."], or num_classes = C for labels 0 to C - 1')
    if ids is not None and test is None:
        learned += split_learned(meaning.split)
    if label_names is not None:
        notes = (*notes, f"labels, in the order of the classes: {names_in_words(label_names)}")
    training, testing = (
        cast_examples(where, {"x": x[rows], "y": y[rows]}, meaning.task, num_outputs)
        for where, rows in (("train", ~is_test), ("test", is_test))
    )
    if SCALED_BYTES in notes:
        training["x"], testing["x"] = training["x"] / np.float32(255), testing["x"] / np.float32(255)
    held_out = client_names = held_out_names = None
    if ids is not None:
        # A client whose rows the split made test rows stays in the population, without rows. In a table of test rows
        # alone, ids that never train are held-out clients and no others.
        codes = ids.codes
        distinct = np.unique(codes if test is None else codes[~is_test])
        owner = np.asarray(np.searchsorted(distinct, codes[~is_test]))
        population: Population = _stored(training, from_owner(owner, len(distinct)), learned)
        held_out = _stored(testing, by_group(codes[is_test]))
        client_names, held_out_names = (
            tuple(ids.names[code] for code in some_codes) for some_codes in (distinct, np.unique(codes[is_test]))
        )
    else:
        assert partition is not None, "checked above"
        population = indexed(training, partition.divide(training["y"]), learned=learned)
    shape = training["x"].shape[1:]
    return FederatedData(
        train=population,
        test=testing,
        held_out=held_out,
        input_shape=shape,
        num_outputs=num_outputs,
        task=meaning.task,
        label_names=label_names,
        name=name,
        notes=tuple(notes),
        client_names=client_names,
        held_out_names=held_out_names,
        table_columns=_columns(train, prepared.columns, meaning),
        feature_names=prepared.names,
        units=prepared.units,
        warnings=prepared.warnings,
    )


def _columns(table: _Table, features: tuple[TableColumn, ...], meaning: _Meaning) -> tuple[TableColumn, ...]:
    """Returns what became of each column: the features in the order of x, and the others."""
    known = (*features, TableColumn(meaning.label, "label"))
    if meaning.client is not None:
        known += (TableColumn(meaning.client, "client id"),)
    names = {column.name for column in known}
    return known + tuple(TableColumn(name, "not used") for name in table.columns if name not in names)


def _stored(
    rows: dict[str, np.ndarray], partition: Partition, learned: tuple[Learned, ...] | None = None
) -> Population:
    examples = {leaf: values[partition.indices] for leaf, values in rows.items()}
    return stored(examples, partition.offsets, learned=learned)


def _joined(train: _Table, test: _Table, names: Sequence[str]) -> _Table:
    """Returns the named columns of both tables, the rows of `train` first.

    Args:
      train, test: the tables.
      names: of the columns to join. They are read here.

    Returns: `_Table`. The place of a row is that in its own table.

    Raises: ValueError for a column that one of the tables lacks, and for columns of different kinds, such as numbers in
      one and texts in the other.
    """
    columns = {}
    for name in names:
        first, second = _named(train, name, "columns"), _named(test, name, "test")
        try:
            both = concatenated_rows(first, second)
        except NotUnderstood as error:
            validate.fail(f"test[{name!r}]", "values as those of the training table", str(error))
        columns[name] = lambda both=both: both

    def place(row: int) -> str:
        return train.place(row) if row < train.num_rows else test.place(row - train.num_rows)

    return _Table(columns, train.num_rows + test.num_rows, place)


def _named(table: _Table, name: str, argument: str) -> Column:
    """Returns a column by its name."""
    validate.one_of(argument, name, list(table.columns), hint=table.hint)
    try:
        return table.columns[name]()
    except NotUnderstood as error:
        validate.fail(f"{argument} {name!r}", "a number, a text, or an array of one shape in each row", str(error))
        raise


def _feature_names(table: _Table, meaning: _Meaning) -> list[str]:
    """Returns the names of the feature columns: those of `features`, or all but the label and the client ids.

    Args:
      table: whose feature columns are read here, so that all that cannot be read are told at once.
      meaning: which columns are used, and how.

    Raises: ValueError for a name that no column has, that is listed twice, or that is the label or the client; for a
      category that is no feature; and if no feature is left. TypeError for anything but lists of texts, and for columns
      that are no numbers, texts or arrays.
    """
    taken = {meaning.label: "label"} | ({} if meaning.client is None else {meaning.client: "client"})
    validate.one_of("label", meaning.label, list(table.columns), hint=table.hint)
    for argument, chosen in (("features", meaning.features), ("categories", meaning.categories)):
        if isinstance(chosen, str) or not all(isinstance(name, str) for name in chosen):
            validate.fail(argument, "a list of names of columns", chosen, error=TypeError)
        for name in chosen:
            validate.one_of(argument, name, list(table.columns), hint=table.hint)
            if name in taken:
                validate.fail(argument, f"no {taken[name]} column", name, "It would tell the answer or the client.")
        if len(set(chosen)) != len(chosen):
            validate.fail(argument, "each column once", list(chosen))
    names = list(meaning.features) or [name for name in table.columns if name not in taken]
    if not names:
        validate.fail("features", "at least one feature column", list(table.columns), table.hint)
    for name in meaning.categories:
        validate.one_of("categories", name, names, hint="It is not among the features.")
    _check_understood(table, names, bool(meaning.features))
    return names


def _check_understood(table: _Table, names: Sequence[str], are_named: bool) -> None:
    """Refuses feature columns that are no numbers, texts or arrays, all of them at once."""
    problems = {}
    for name in names:
        try:
            table.columns[name]()
        except NotUnderstood as error:
            problems[name] = str(error)
    if problems:
        others = json.dumps([name for name in names if name not in problems], ensure_ascii=False)
        found = "; ".join(f"{name!r} has {what}" for name, what in problems.items())
        hint = f"{found}. " + ("Convert them, or leave them out" if are_named else "Name those to read")
        rule = "columns with a number, a text, or an array of one shape in each row"
        validate.fail("features", rule, list(problems), f"{hint}: features = {others}.", TypeError)


def _ids(table: _Table, client: str, meaning: _Meaning) -> Identities:
    """Returns the client ids; no id may be missing."""
    column = _one_value(table, client, "client", meaning)
    if column.is_missing.any():
        where = f"{table.place(int(np.argmax(column.is_missing)))} {client}"
        validate.fail(where, "a client id", "none", "Drop the row, or give it an id.")
    _check_identities(table, client, column, "a client id")
    return identities(column)


def _one_value(table: _Table, name: str, argument: str, meaning: _Meaning) -> Column:
    """Returns a column with one value in each row, in which the codes of missing values are missing."""
    column = _named(table, name, argument)
    if column.values.ndim != 1:
        hint = "One-hot labels: values.argmax(1)." if argument == "label" else ""
        validate.fail(argument, f"one {argument} in each row", f"shape {column.values.shape}", hint)
    return coded(column, text_files.check_missing(meaning.missing))


def _check_identities(table: _Table, name: str, column: Column, what: str, hint: str = "") -> None:
    """Refuses numbers that tell nobody apart: with a fraction, or floats so large that they lack digits."""
    if column.values.dtype.kind != "f":
        return
    most_exact = 2 ** (np.finfo(column.values.dtype).nmant + 1)  # integers above it are not all floats of this dtype
    with np.errstate(invalid="ignore"):
        is_wrong = (column.values % 1 != 0) | (np.abs(column.values) > most_exact)
    is_wrong &= ~column.is_missing
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        value = float(column.values[row])
        if most_exact < abs(value) < np.inf:
            hint = "A float lacks the last digits of so large a number: keep it as an integer or as a text."
        validate.fail(f"{table.place(row)} {name}", f"{what} that is an integer or a text", value, hint)


def _test_rows(table: _Table, ids: Identities | None, meaning: _Meaning) -> np.ndarray:
    """Draws which rows are test rows, [rows] bool: a share of each label, at each client if there are ids.

    Args:
      table: whose label column is read, unless the task is "regression", whose rows have no labels to balance.
      ids: of the clients, one for each row; None if a partitioner makes the clients up.
      meaning: with the share, the seed, and how clients' rows are split. With "by_client" labels have no share of their
        own: each client draws from its name and the seed alone.
    """
    num_rows = table.num_rows
    labels = np.zeros(num_rows)
    if meaning.task != "regression":
        labels = identities(_one_value(table, meaning.label, "label", meaning)).codes
    rng = np.random.default_rng(meaning.seed)
    if ids is not None and meaning.split == "by_client":
        is_test = np.zeros(num_rows, bool)
        partition = by_group(ids.codes)
        for rows in np.split(partition.indices, partition.offsets[1:-1]):
            client = own_name(ids.names[ids.codes[rows[0]]])
            is_test[rows] = own_split(len(rows), client, _test_share(meaning), meaning.seed)
        return is_test
    if ids is not None:
        return client_split(labels, ids.codes, _test_share(meaning), rng)
    return np.isin(np.arange(num_rows), stratified_split(labels, _test_share(meaning), rng)[1])


def _test_share(meaning: _Meaning) -> float:
    """Returns the share of test rows."""
    return TEST_FRACTION if meaning.test_fraction is None else meaning.test_fraction


def _quantity(table: _Table, name: str, missing: Sequence[str]) -> np.ndarray:
    """Returns the numbers of a column, [rows] float64, with NaN where one is missing.

    Args:
      table: with the column.
      name: of the column, of numbers or of texts.
      missing: texts that stand for a missing value, as `text_files.check_missing` returns them. A value that is missing
        without a code, such as NaN, is refused unless one of the texts says so, such as "nan".

    Raises: ValueError that names column and row, for a value that is neither finite nor missing.
    """
    column = _named(table, name, "features")
    values = column.values
    if not column.is_text:
        numbers = np.where(coded(column, missing).is_missing, np.nan, values.astype(np.float64))
        is_wrong = np.isinf(numbers)
        if not text_files.is_code("", missing):  # a value that is missing without a code was not expected
            is_wrong |= column.is_missing
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            codes = json.dumps([*missing, "nan"], ensure_ascii=False)
            hint = f"If NaN stands for a missing value, say so: missing = {codes}."
            if np.isinf(numbers[row]):
                hint = "It is not finite: correct it, or drop the row."
            validate.fail(f"{table.place(row)} {name}", "a finite number", float(numbers[row]), hint)
        return numbers
    texts = values.tolist()
    if not missing and "_" not in (in_one := "".join(texts)) and in_one.isascii():
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


def _quantities(table: _Table, names: Sequence[str], missing: Sequence[str]) -> list[np.ndarray]:
    """Returns the numbers of columns, each [rows] float64 as `_quantity` reads it, in the order of the names.

    Args:
      table: with the columns.
      names: of the columns.
      missing: as in `_quantity`.

    Raises: ValueError for columns with something else than numbers; the first `MOST_TOLD` are told at once.
    """
    columns = []
    problems = []
    for name in names:
        try:
            columns.append(_quantity(table, name, missing))
        except validate.InvalidArgument as error:
            problems.append(error)
    if len(problems) > 1:
        found = " ".join(map(str, problems[:MOST_TOLD]))
        more = f" and {len(problems) - MOST_TOLD:,} more." if len(problems) > MOST_TOLD else ""
        rule = f"numbers in each of {len(names):,} columns that are no categories"
        validate.fail("features", rule, f"{len(problems):,} without", f"{found}{more}")
    for error in problems:
        raise error
    return columns


def _array_feature(table: _Table, names: Sequence[str], name: str, column: Column) -> _Prepared:
    """Returns the features of a table whose sole feature column has an array in each row.

    Args:
      table: says where a row is, for errors.
      names: of all feature columns, of which there must be no other.
      name: of the column.
      column: [rows, ...] numbers, of which none may be missing.

    Raises: ValueError for other feature columns, and for a row in which something is missing.
    """
    if len(names) > 1:
        others = [other for other in names if other != name]
        hint = f"features = [{name!r}] chooses it."
        validate.fail("features", f"no other column beside the arrays of {name!r}", others, hint)
    if column.is_missing.any():
        row = int(np.argmax(column.is_missing))
        validate.fail(f"{table.place(row)} {name}", "an array in which nothing is missing", "a mask")
    notes = (SCALED_BYTES,) if are_bytes({name: column.values}) else ()
    preparation = "divided by 255" if notes else "as it is"
    return _Prepared(column.values, (TableColumn(name, "feature", preparation),), notes)


def _features(table: _Table, names: Sequence[str], is_training: np.ndarray, meaning: _Meaning) -> _Prepared:
    """Returns the features of all rows, and what was done to make them.

    Args:
      table: with the rows of training and test.
      names: of the feature columns, in the order in which they are stated.
      is_training: [rows] bool. Medians, means, deviations and the values of categories are those of these rows, unless
        they are stated.
      meaning: which columns are categories, and what is stated.

    Returns: `_Prepared`. Its x is [rows, features]: first the quantities and their indicators, then a column of 0 and 1
      for each value of each category. A sole column of arrays is x itself, [rows, ...], in its own dtype.

    Raises: ValueError that names column and row, as `from_table` says.
    """
    read = {name: table.columns[name]() for name in names}
    arrays = [name for name in names if read[name].values.ndim > 1]
    if arrays:
        return _array_feature(table, names, arrays[0], read[arrays[0]])
    missing = text_files.check_missing(meaning.missing)
    quantity_names = [name for name in names if name not in meaning.categories]
    blocks = []
    notes: tuple[str, ...] = ()
    learned: tuple[Learned, ...] = ()
    feature_names: tuple[str, ...] = ()
    units: Units | None = None
    features: tuple[TableColumn, ...] = ()
    warnings: tuple[str, ...] = ()
    if quantity_names:
        values = np.stack(_quantities(table, quantity_names, missing), axis=1)
        for name, quantity in zip(quantity_names, values.T, strict=True):
            as_category = f"If it numbers categories: categories = [{json.dumps(name, ensure_ascii=False)}]."
            warnings += identifier_in_words(name, quantity, WITHOUT_IT, as_category)
        notes = missing_in_words(quantity_names, values, meaning.fill)
        is_scaled = True if meaning.standardise is None else meaning.standardise
        features = quantity_columns(quantity_names, values, is_training, is_scaled, meaning.fill)
        constants = {"standardise": meaning.standardise, "fill": meaning.fill, "may_be_missing": bool(missing)}
        made = quantities(values[is_training], quantity_names, **constants)
        feature_names, units, learned = made.feature_names, made.units, made.learned
        blocks.append(made.prepared(values))
    for name in meaning.categories:
        known = identities(coded(read[name], missing))
        codes, categories, values = _category_codes(name, known, is_training, meaning)
        hint = f"{name} has {len(categories):,} values, which would become as many columns: leave it out of categories."
        validate.fits_in_memory("categories", 4 * len(codes) * len(categories), MOST_CATEGORY_BYTES, hint=hint)
        blocks.append(codes[:, None] == categories[None])
        features += (category(name, len(categories)),)
        feature_names += tuple(f"{name} = {value}" for value in values)
        warnings += identifier_in_words(name, known.codes.astype(object), WITHOUT_IT)
        has_none = ~np.isin(codes, categories)
        if has_none.any():
            found = names_in_words([_value_of(code, known) for code in np.unique(known.codes[has_none])])
            rows_in_words = f"{has_none.sum():,} rows with {found}"
            warnings += (f"{name}: {rows_in_words} have 0 in all of its columns: no column has the value",)
    if meaning.categories and not isinstance(meaning.categories, Mapping):
        effect = "add inputs to every other client, and take inputs from it"
        instead = 'categories = {COLUMN = ["...", "..."], ...}'
        learned += (Learned("the values of categories", tuple(meaning.categories), effect, instead),)
    if units is not None:
        num_others = len(feature_names) - len(units.factors)
        units = Units(units.offsets + (0.0,) * num_others, units.factors + (1.0,) * num_others)
    x = np.concatenate(blocks, axis=1)
    return _Prepared(
        x=x,
        columns=features,
        notes=notes,
        warnings=warnings,
        learned=learned,
        names=feature_names,
        units=units,
    )


def _category_codes(
    name: str, known: Identities, is_training: np.ndarray, meaning: _Meaning
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns the code of each row, and code and value of each column: the stated ones, or those of training rows.

    A row with none of the stated values has a code of no column. A stated code of missing values, or an empty text, is
    the column of the rows without a value.

    Args:
      name: of the category's column.
      known: the values of all rows, with code -1 for a missing one.
      is_training: [rows] bool.
      meaning: with the categories; a mapping states their values.

    Returns: the code of each row [rows], in [-1, number of values); the codes of the columns [K]; and their K values. A
      row has 1 in the column of its code. Without stated values -1 is a column too, called "missing", if a training row
      has no value.

    Raises: ValueError for stated values that are none or repeat.
    """
    if not isinstance(meaning.categories, Mapping):
        codes = np.unique(known.codes[is_training])
        return known.codes, codes, [_value_of(code, known) for code in codes]
    stated = [own_name(value) for value in meaning.categories[name]]
    if not stated or len(set(stated)) != len(stated):
        validate.fail(f"categories.{name}", "a list of distinct values", list(meaning.categories[name]))
    # Each value is compared by itself: how other rows write theirs changes no row.
    place = {value: i for i, value in enumerate(stated)}
    missing = text_files.check_missing(meaning.missing)
    says_missing = [text_files.says_missing(value) or text_files.is_code(value, missing) for value in stated]
    of_missing = says_missing.index(True) if any(says_missing) else -1
    places = np.array([*(place.get(own_name(value), -1) for value in known.names), of_missing])
    return places[known.codes], np.arange(len(stated)), stated


def _value_of(code: int, known: Identities) -> str:
    """Returns the value of a category that has a code, as features are named by it."""
    return "missing" if code < 0 else known.names[code]


def _labels(table: _Table, meaning: _Meaning) -> tuple[np.ndarray, int, tuple[str, ...] | None]:
    """Returns the targets of all rows, and what they mean.

    Args:
      table: with the label column.
      meaning: with the task, and the number or the names of the classes where they are stated.

    Returns: y [rows], float64 targets of "regression" or integer classes of the other tasks; the number of outputs, 1
      for "binary" and "regression", else C; and the names of the classes, None for numbers that are 0, ..., C - 1
      already, and for "regression".

    Raises: ValueError that names column and row for a missing label, and for labels that do not fit the task.
    """
    label = meaning.label
    column = _one_value(table, label, "label", meaning)
    if column.is_missing.any():
        where = f"{table.place(int(np.argmax(column.is_missing)))} {label}"
        validate.fail(where, "a label", "none", "Drop the row: nothing can be learned from it.")
    if meaning.task == "regression":
        return _quantity(table, label, ()), 1, None
    hint = "A measured quantity needs task = 'regression'."
    _check_identities(table, label, column, "a label", hint)
    known = identities(column)
    if known.are_measured:
        validate.fail("label", "labels that are integers or texts", names_in_words(known.names), hint)
    if meaning.classes is not None:
        return _stated_classes(known, tuple(own_name(label) for label in meaning.classes), meaning)
    if column.class_names is not None:
        return _stated_classes(known, column.class_names, meaning)
    classes, y = known.names, known.codes
    num_classes = 2 if meaning.task == "binary" else meaning.num_classes
    num_outputs = 1 if meaning.task == "binary" else num_classes or len(classes)
    if known.integers is not None and 0 <= known.integers[0] and known.integers[-1] < (num_classes or len(classes)):
        return np.array(known.integers)[y], num_outputs, None
    if num_classes not in (None, len(classes)):
        found = f"{len(classes)}: {names_in_words(classes)}"
        validate.fail("label", f"{num_classes} distinct labels, or 0 to {num_classes - 1}", found)
    return y, num_outputs, classes


def _stated_classes(
    known: Identities, classes: tuple[str, ...], meaning: _Meaning
) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """Returns y [rows], the number of outputs and the classes, which the option `classes` or the source states.

    Classes without a row are classes too. No row may have another label.

    Args:
      known: the labels of all rows, of which none is missing.
      classes: the names in the order of the classes, as the option or the source states them.
      meaning: with the task and its number of classes.

    Returns: y [rows] integers in [0, C), the number of outputs (1 for "binary", else C), and the C names.

    Raises: ValueError for another number of classes than the task has, classes that repeat, and another label.
    """
    num_classes = 2 if meaning.task == "binary" else meaning.num_classes
    if num_classes not in (None, len(classes)):
        validate.fail(
            "label", f"{num_classes} classes", f"{len(classes)} stated with the column: {names_in_words(classes)}"
        )
    if len({own_name(label) for label in classes}) != len(classes):
        validate.fail("classes", "distinct labels", names_in_words(classes))
    # Each label is compared by itself: how other rows write theirs changes no row.
    place = {own_name(label): i for i, label in enumerate(classes)}
    others = [name for name in known.names if own_name(name) not in place]
    if others:
        validate.fail("label", f"one of the classes {names_in_words(classes)} in each row", names_in_words(others))
    y = np.array([place[own_name(name)] for name in known.names])[known.codes]
    return y, 1 if meaning.task == "binary" else len(classes), classes
