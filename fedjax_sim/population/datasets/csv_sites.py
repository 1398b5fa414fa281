"""This module reads sites that hold tables of numbers. Each client is one file."""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.population.datasets.column_uses import category, identifier_in_words, quantity_columns
from fedjax_sim.population.datasets.quantities import (
    classes_learned,
    fills_of,
    imputed,
    missing_in_words,
    quantities,
    scale_of,
    units_of,
)
from fedjax_sim.population.federated_data import (
    FederatedData,
    TableColumn,
    existing_path,
    files_of,
    from_sites,
    standardiser,
)
from fedjax_sim.population.splits import site_splits, split_learned
from fedjax_sim.types import ColumnFills, FolderPath, Scale
from fedjax_sim.validate import Integer, NonNegativeInt

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal"),
    "num",
)
HEART_QUANTITIES = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")  # real numbers, which are standardised
ANSWERS = ("sex", "fbs", "exang")  # 0 or 1
# Categories and their values. Each value becomes one column.
CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
MISSING_MARKS = ("?", "-9")  # by the documentation of the data set
SOMETIMES_MISSING = ("trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca")  # each has an indicator column


def _hospital(path: pathlib.Path) -> np.ndarray:
    """Reads the table of a hospital, [n, 14] float64, with NaN where a value is missing.

    Args:
      path: a CSV file without a header. Its columns are `COLUMNS`; the last of them, the diagnosis 0 to 4, is never
        missing.

    Raises: ValueError that names file and line, for another number of columns, a cell that is no number, a category or
      an answer that does not exist, and a file without a patient.
    """
    table = []
    for line, cells in text_files.table_rows(path.name, existing_path("directory", str(path), folder=False)):
        place = f"{path.name}:{line}"
        if len(cells) != len(COLUMNS):
            validate.fail(place, f"{len(COLUMNS)} columns", len(cells))
        numbers = [text_files.number(place, cell, MISSING_MARKS) for cell in cells]
        row = dict(zip(COLUMNS, numbers, strict=True))
        allowed_values = {**CATEGORIES, **dict.fromkeys(ANSWERS, (0, 1)), "num": (0, 1, 2, 3, 4)}
        for column, values in allowed_values.items():
            if not (row[column] in values or (column != "num" and math.isnan(row[column]))):
                validate.fail(f"{place} {column}", f"one of {values}", row[column])
        # No living patient has a cholesterol or a blood pressure of 0, so 0 stands for a missing value.
        for column in ("chol", "trestbps"):
            row[column] = row[column] or math.nan
        table.append(list(row.values()))
    if not table:
        validate.fail(str(path.name), "at least one patient", "an empty file")
    return np.array(table)


@validate.named_arguments
def heart_disease(
    *,
    directory: FolderPath,
    standardise: bool | Scale | None = None,
    fill: ColumnFills | None = None,
    test_fraction: float = 0.25,
    split: Literal["together", "by_client"] = "together",
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Reads the UCI Heart Disease data of four hospitals, which are the clients. The task is to predict the disease.

    There are 920 patients, and the label is whether the diagnosis is above 0. The 29 features are

    - six quantities (age, trestbps, chol, thalach, oldpeak, ca),
    - three answers (sex, fbs, exang),
    - four categories (cp, restecg, slope, thal), one-hot in 13 columns,
    - seven indicators of a missing value.

    "?" and -9 stand for missing values, and so does 0 for chol and trestbps. A missing quantity or answer is replaced
    by the median of the pooled training rows (0 if all are missing), and its indicator is 1. A missing category has
    zeros in all its columns. Quantities are then standardised by mean and standard deviation of the pooled training
    rows. That is a convenience of the simulation: a real federation would need a protocol for it.

    Args:
      directory: a folder with processed.cleveland.data, .hungarian, .switzerland and .va, as UCI publishes them.
      standardise: as in `csv_sites`, for the six quantities.
      fill: a number for each quantity and each answer, in the place of missing values; None for the medians.
      test_fraction: share of each hospital's patients, per diagnosis, that is its test part.
      split: as in `csv_sites`.
      seed: of the split.

    Returns: `FederatedData`. Clients are the hospitals in the order above, and held-out clients are their test parts.

    Raises: ValueError that names file and line, for a wrong number of columns, a cell that is not a number, and an
      unknown category.

    Guarantees: every patient is in exactly one part, and statistics come from training rows alone
    (tests/population/datasets/test_csv_sites.py::test_heart_disease_statistics_come_from_training_rows).

    References: Janosi, Steinbrunn, Pfisterer, Detrano, Heart Disease, UCI, 1988; Ogier du Terrail et al., FLamby, 2022.
    """
    folder = existing_path("directory", directory)
    tables = [_hospital(folder / f"processed.{name}.data") for name in HOSPITALS]
    labels = {name: table[:, -1] > 0 for name, table in zip(HOSPITALS, tables, strict=True)}
    splits = list(site_splits(labels, test_fraction, seed, split).values())
    # Medians, means and deviations come from these rows, the training rows of all hospitals.
    pooled = np.concatenate([table[rows] for table, (rows, _) in zip(tables, splits, strict=True)])
    index = {column: COLUMNS.index(column) for column in COLUMNS}
    imputed_columns = [index[column] for column in HEART_QUANTITIES + ANSWERS]
    fills, _, learned = fills_of(fill, HEART_QUANTITIES + ANSWERS, pooled[:, imputed_columns], True)
    if np.isnan(fills).any():
        validate.fail("fill", f"a number for each of {', '.join(HEART_QUANTITIES + ANSWERS)}", sorted(fill or ()))
    mean, deviation, learned_scale = scale_of(
        standardise,
        HEART_QUANTITIES,
        lambda: standardiser(imputed(pooled[:, imputed_columns], fills)[:, : len(HEART_QUANTITIES)]),
    )

    def features(table: np.ndarray) -> np.ndarray:
        values = imputed(table[:, imputed_columns], fills)
        values[:, : len(HEART_QUANTITIES)] = (values[:, : len(HEART_QUANTITIES)] - mean) / deviation
        # NaN equals no value, so a missing category has zeros in all its columns.
        one_hot = [table[:, index[column], None] == np.array(options) for column, options in CATEGORIES.items()]
        missing = np.isnan(table[:, [index[column] for column in SOMETIMES_MISSING]])
        return np.concatenate([values, *one_hot, missing], axis=1)

    train, test = (
        {
            name: {"x": features(table[split[part]]), "y": (table[split[part], -1] > 0).astype(np.int32)}
            for name, table, split in zip(HOSPITALS, tables, splits, strict=True)
        }
        for part in (0, 1)
    )
    names = ("absent", "present")
    about = {
        "label_names": names,
        "name": "heart_disease",
        "learned": (*learned_scale, *learned, *split_learned(split)),
    }
    data = from_sites(train, test, task="binary", num_outputs=1, **about)
    values = np.concatenate(tables)[:, imputed_columns]
    is_training = np.concatenate(
        [np.isin(np.arange(len(t)), rows) for t, (rows, _) in zip(tables, splits, strict=True)]
    )
    measured, answers = slice(len(HEART_QUANTITIES)), slice(len(HEART_QUANTITIES), None)
    columns = quantity_columns(HEART_QUANTITIES, values[:, measured], is_training, standardise is None or standardise)
    columns += quantity_columns(ANSWERS, values[:, answers], is_training, False)
    columns += tuple(category(name, len(options)) for name, options in CATEGORIES.items())
    missing = missing_in_words(HEART_QUANTITIES + ANSWERS, values, fill)
    feature_names = [*HEART_QUANTITIES, *ANSWERS]
    feature_names += [f"{name} = {value}" for name, options in CATEGORIES.items() for value in options]
    feature_names += [f"{name} is missing" for name in SOMETIMES_MISSING]
    return data._replace(
        notes=missing,
        feature_names=tuple(feature_names),
        units=units_of(mean, deviation, len(HEART_QUANTITIES), len(feature_names) - len(HEART_QUANTITIES)),
        table_columns=(*columns, TableColumn("num", "label")),
    )


@validate.named_arguments
def csv_sites(
    *,
    directory: FolderPath,
    label: str,
    task: Literal["binary", "classification", "regression"] = "classification",
    num_classes: Annotated[int, Integer(2)] | None = None,
    standardise: bool | Scale | None = None,
    delimiter: str = "auto",
    comment: str | None = None,
    missing: Sequence[str] = (),
    fill: ColumnFills | None = None,
    test_fraction: float = 0.25,
    split: Literal["together", "by_client"] = "together",
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Reads a folder with one numeric CSV file per site. Each site is a client, and all files have the same header.

    Args:
      directory: a folder with files *.csv. Clients are in the order of the sorted file names. Empty lines are skipped.
        An entry that only looks like a site (a broken link, a folder, .CSV, .csv.gz) is refused. Other files are
        ignored.
      label: name of the label column. All other columns are features, in the order of the header.
      task: "classification" (labels 0, ..., C - 1), "binary" (0 or 1) or "regression".
      num_classes: C. None for the largest label + 1.
      standardise: whether features are standardised by mean and standard deviation of the pooled training rows. That is
        a convenience of the simulation, and no noise hides it: one client changes the inputs of all others. Beside
        noise, state constants that are known without the rows, {mean = [...], deviation = [...]} in the order of the
        features, or false. None standardises too; but beside an algorithm that answers about the data, a config then
        keeps them in their own units.
      delimiter: the text between values: one character, "space", or "auto". "auto" takes comma, semicolon or tab,
        whichever is in the header.
      comment: lines that begin with this text are skipped. None skips no line.
      missing: texts that stand for a missing value, such as ["?", "-9"]. A number matches however it is written, so
        "-9" also matches "-9.0", and "" matches "nan" too. A label must not be missing. A missing feature is replaced
        by the median of the pooled training rows (0 if all are missing). Each column with missing values among these
        rows also gets an indicator column behind all features, which is 1 where the value is missing and 0 elsewhere.
      fill: a number for each column in which features may be missing, which stands for them: {age = 54}. Each of these
        columns has an indicator. None for the medians.
      test_fraction: share of each site's rows that is its test part. Unless the task is "regression", it is a share of
        the rows of each label. Shares are rounded up or down at random: every row is a test row with this probability.
      split: "together" draws the test rows of all sites together, so that their number is the share of all rows.
        "by_client" draws each site's own from its name and the seed, whatever other sites there are, as noise needs it;
        labels then have their share on average.
      seed: of the split.

    Returns: `FederatedData`. Held-out client i is the test part of site i, and is left out if that has no row.

    Raises: ValueError that names file and line, for a cell that is not a finite number, a missing label, and for
      numbers of columns or headers that differ.

    Guarantees: no row of two sites is lost, the label is no feature, and training features are standardised over all
    sites together (tests/population/datasets/test_csv_sites.py::test_csv_sites). Semicolons, tabs, byte order marks and
    comments give the same data (::test_csv_sites_in_other_styles). Medians are those of training rows
    (::test_missing_features).
    """
    folder = existing_path("directory", directory)
    if not (comment is None or (isinstance(comment, str) and comment.strip())):
        validate.fail("comment", "the text with which lines of comments begin, or none", comment)
    codes = text_files.check_missing(missing)
    header, tables = _sites(
        folder, label, delimiter=delimiter, comment=comment, missing=codes, are_classes=task != "regression"
    )
    label_column = header.index(label)
    labels = {
        site: np.zeros(len(table)) if task == "regression" else table[:, label_column] for site, table in tables.items()
    }
    splits = site_splits(labels, test_fraction, seed, split)
    features = {site: np.delete(table, label_column, axis=1) for site, table in tables.items()}
    # Statistics come from training rows alone.
    pooled = np.concatenate([features[site][rows] for site, (rows, _) in splits.items()])
    feature_names = header[:label_column] + header[label_column + 1 :]
    may_be_missing = bool(missing)
    made = quantities(pooled, feature_names, standardise=standardise, fill=fill, may_be_missing=may_be_missing)

    def examples(site: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": made.prepared(features[site][rows]), "y": tables[site][rows, label_column]}

    train, test = ({site: examples(site, splits[site][part]) for site in tables} for part in (0, 1))
    num_outputs = 1
    learned = made.learned
    if task == "classification":
        # The largest label counts outputs, so a measured quantity, such as 1e9, must not be taken for a label.
        largest = max(float(table[:, label_column].max()) for table in tables.values())
        if num_classes is None and not (0 <= largest < 1_000_000):
            validate.fail("label", "labels in 0..C-1", largest, "Set num_classes, or task = 'regression'.")
        num_outputs = num_classes or int(largest) + 1
        if num_classes is None:
            learned += classes_learned("num_classes = C")
    name = pathlib.Path(directory).name
    learned += split_learned(split)
    data = from_sites(train, test, task=task, num_outputs=num_outputs, name=name, learned=learned)
    values = np.concatenate(list(features.values()))
    is_training = np.concatenate([np.isin(np.arange(len(features[site])), rows) for site, (rows, _) in splits.items()])
    remedy = "Take the column out of the files, or read one table with population.table(features=...)."
    warnings = [identifier_in_words(name, values[:, i], remedy) for i, name in enumerate(feature_names)]
    return data._replace(
        notes=missing_in_words(feature_names, values, fill),
        feature_names=made.feature_names,
        units=made.units,
        table_columns=(
            *quantity_columns(feature_names, values, is_training, standardise is None or standardise, fill),
            TableColumn(label, "label"),
        ),
        warnings=tuple(warning for warnings_of_column in warnings for warning in warnings_of_column),
    )


def _sites(
    folder: pathlib.Path,
    label: str,
    *,
    delimiter: str,
    comment: str | None,
    missing: Sequence[str],
    are_classes: bool,
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Reads the tables of all sites, which must have one header.

    Args:
      folder: has one file NAME.csv for each site.
      label: name of the label column.
      delimiter, comment: as in `csv_sites`.
      missing: texts that stand for a missing feature. A label must not be missing.
      are_classes: whether the labels are numbers of classes. A label such as 007 is then refused.

    Returns: the header; and site -> its table [n, columns] float64, with NaN for missing features. Sites are in the
      order of their names, columns in the order of the header, with the label among them.

    Raises: ValueError that names file and line, as `csv_sites` says.
    """
    paths = files_of(folder, ".csv", "a site's table as a file")
    header: list[str] = []
    tables = {}
    hint = "A table with a column of ids, or with words, is read by population.table."
    for path in paths:
        comments = [] if comment is None else [comment]
        rows = list(text_files.table_rows(path.name, path, delimiter=delimiter, comments=comments))
        if len(rows) < 2:
            validate.fail(path.name, "a header and at least one row", f"{len(rows)} lines")
        first_line, columns = rows[0]
        header = header or columns
        if len(set(columns)) != len(columns) or not all(columns):
            validate.fail(f"{path.name}:{first_line}", "distinct, named columns", columns)
        if columns != header:
            validate.fail(f"{path.name}:{first_line}", f"the header of {paths[0].name}, {header}", columns)
        validate.one_of("label", label, header, hint=text_files.one_column(header, delimiter))
        if len(header) < 2:
            validate.fail("directory", "at least one feature column", header, text_files.one_column(header, delimiter))
        for line, cells in rows[1:]:
            if len(cells) != len(header):
                validate.fail(f"{path.name}:{line}", f"{len(header)} columns", len(cells))
        values = np.array(
            [
                [text_files.number(f"{path.name}:{line}", cell, missing, hint) for cell in cells]
                for line, cells in rows[1:]
            ]
        )
        for (line, cells), target in zip(rows[1:], values[:, header.index(label)], strict=True):
            place = f"{path.name}:{line} {label}"
            if np.isnan(target):
                validate.fail(place, "a label", "none", "Drop the row: nothing can be learned from it.")
            if are_classes and re.match(r"[+-]?0[0-9]", text := cells[header.index(label)]):
                validate.fail(place, "a number of a class, without leading zeros", text, hint)
        tables[path.stem] = values
    return header, tables
