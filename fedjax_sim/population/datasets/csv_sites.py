"""Sites that hold tables of numbers: each client is one file."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np

from fedjax_sim import text_files, validate
from fedjax_sim.population.federated_data import (
    FederatedData,
    existing,
    files_of,
    from_sites,
    standardiser,
    stratified_split,
)
from fedjax_sim.types import FolderPath
from fedjax_sim.validate import Integer, NonNegativeInt

__all__ = ["csv_sites", "heart_disease"]

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal"),
    "num",
)
QUANTITIES = ("age", "trestbps", "chol", "thalach", "oldpeak", "ca")  # standardised
ANSWERS = ("sex", "fbs", "exang")  # 0 or 1
CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}  # one column each
MISSING = ("?", "-9")  # by the documentation of the data set
SOMETIMES_MISSING = ("trestbps", "chol", "fbs", "thalach", "exang", "oldpeak", "ca")  # an indicator column each


def _hospital(path: pathlib.Path) -> np.ndarray:
    """[n, 14] float64 with NaN where a value is missing."""
    table = []
    for line, cells in text_files.table_rows(path.name, existing("directory", str(path), folder=False)):
        place = f"{path.name}:{line}"
        if len(cells) != len(COLUMNS):
            validate.fail(place, f"{len(COLUMNS)} columns", len(cells))
        numbers = [text_files.number(place, cell, MISSING) for cell in cells]
        row = dict(zip(COLUMNS, numbers, strict=True))
        legal = {**CATEGORIES, **dict.fromkeys(ANSWERS, (0, 1)), "num": (0, 1, 2, 3, 4)}
        for column, values in legal.items():
            if not (row[column] in values or (column != "num" and math.isnan(row[column]))):
                validate.fail(f"{place} {column}", f"one of {values}", row[column])
        for column in ("chol", "trestbps"):
            row[column] = row[column] or math.nan  # no living patient's is 0: it stands for a missing value
        table.append(list(row.values()))
    if not table:
        validate.fail(str(path.name), "at least one patient", "an empty file")
    return np.array(table)


@validate.named_arguments
def heart_disease(*, directory: FolderPath, test_fraction: float = 0.25, seed: NonNegativeInt = 0) -> FederatedData:
    """UCI Heart Disease: four hospitals, four clients, 920 patients; is the diagnosis above 0?

    29 features: six quantities (age, trestbps, chol, thalach, oldpeak, ca), three answers (sex, fbs, exang), cp,
    restecg, slope and thal one-hot, and seven indicators of a missing value. "?" and -9 stand for missing values, and a
    chol or trestbps of 0. A missing quantity or answer becomes the median of the pooled training rows (0 if all are
    missing) and sets its indicator; a missing category is all zeros. Quantities are then standardised by mean and
    deviation of the pooled training rows. That is a convenience of the simulation: a real federation would need a
    protocol for it.

    Args:
      directory: holds processed.cleveland.data, .hungarian, .switzerland and .va, as UCI publishes them.
      test_fraction: share of each hospital's patients, per diagnosis, that is its test part.
      seed: decides the split.

    Returns: `FederatedData`; clients are the hospitals in the order above, held-out clients their test parts.

    Raises: ValueError that names file and line: for a wrong number of columns, a cell that is no number, an unknown
      category.

    Guarantees: every patient is in exactly one part, statistics come from training rows alone
    (tests/population/datasets/test_csv_sites.py::test_heart_disease_statistics_come_from_training_rows).

    References: Janosi, Steinbrunn, Pfisterer, Detrano, Heart Disease, UCI, 1988; Ogier du Terrail et al., FLamby, 2022.
    """
    folder = existing("directory", directory)
    rng = np.random.default_rng(seed)
    tables = [_hospital(folder / f"processed.{name}.data") for name in HOSPITALS]
    splits = [stratified_split(table[:, -1] > 0, test_fraction, rng) for table in tables]
    pooled = np.concatenate([table[rows] for table, (rows, _) in zip(tables, splits, strict=True)])
    index = {column: COLUMNS.index(column) for column in COLUMNS}
    filled = [index[column] for column in QUANTITIES + ANSWERS]
    medians = _medians(pooled[:, filled])
    mean, deviation = standardiser(_imputed(pooled[:, filled], medians)[:, : len(QUANTITIES)])

    def features(table: np.ndarray) -> np.ndarray:
        values = _imputed(table[:, filled], medians)
        values[:, : len(QUANTITIES)] = (values[:, : len(QUANTITIES)] - mean) / deviation
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
    return from_sites(train, test, task="binary", num_outputs=1, label_names=names, name="heart_disease")


@validate.named_arguments
def csv_sites(
    *,
    directory: FolderPath,
    label: str,
    task: Literal["binary", "classification", "regression"] = "classification",
    num_classes: Annotated[int, Integer(2)] | None = None,
    standardise: bool = True,
    delimiter: str = "auto",
    comment: str | None = None,
    missing: Sequence[str] = (),
    test_fraction: float = 0.25,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """A folder with one numeric CSV per site, each with the same header; site = client.

    Args:
      directory: holds *.csv; clients are in the order of the sorted file names, empty lines are skipped. An entry that
        only looks like a site (a broken link, a folder, .CSV, .csv.gz) is refused; other files are ignored.
      label: name of the label column; the others are features, in the header's order.
      task: "classification" (labels 0..C-1), "binary" (0 or 1) or "regression".
      num_classes: C; None for the largest label + 1.
      standardise: features by mean and deviation of the pooled training rows.
      delimiter: between values: one character, "space", or "auto", the one of comma, semicolon and tab in the header.
      comment: lines that begin with this text are skipped; None if all lines count.
      missing: texts that stand for a missing feature, such as ["?", "-9"]; a number stands for itself however written.
        A missing feature becomes the median of the pooled training rows (0 if all are missing), and each column that
        lacks values among them gets a column more behind all features: 1 where the value is missing, otherwise 0.
      test_fraction: share of each site's rows (of each label, unless a regression) that is its test part.
      seed: decides the split.

    Returns: `FederatedData`; held-out client i is the test part of site i, left out when it has no row.

    Raises: ValueError that names file and line: for a cell that is no finite number, a missing label, and for numbers
      of columns or headers that differ.

    Guarantees: tests/population/datasets/test_csv_sites.py::test_csv_sites; the same data with semicolons, tabs, byte
      order marks and comments (::test_csv_sites_in_other_styles); medians are of training rows
      (::test_missing_features).
    """
    folder = existing("directory", directory)
    if not (comment is None or (isinstance(comment, str) and comment.strip())):
        validate.fail("comment", "the text with which lines of comments begin, or none", comment)
    header, tables = _sites(folder, label, delimiter, comment, text_files.check_missing(missing))
    target = header.index(label)
    rng = np.random.default_rng(seed)
    splits = {
        site: stratified_split(np.zeros(len(table)) if task == "regression" else table[:, target], test_fraction, rng)
        for site, table in tables.items()
    }
    features = {site: np.delete(table, target, axis=1) for site, table in tables.items()}
    pooled = np.concatenate([features[site][rows] for site, (rows, _) in splits.items()])
    indicated = np.flatnonzero(np.isnan(pooled).any(axis=0))
    medians = _medians(pooled)
    mean, deviation = standardiser(_imputed(pooled, medians)) if standardise else (0.0, 1.0)

    def examples(site: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        found = features[site][rows]
        x = (_imputed(found, medians) - mean) / deviation
        return {"x": np.concatenate([x, np.isnan(found[:, indicated])], axis=1), "y": tables[site][rows, target]}

    train, test = ({site: examples(site, splits[site][part]) for site in tables} for part in (0, 1))
    num_outputs = 1
    if task == "classification":
        largest = max(float(table[:, target].max()) for table in tables.values())
        if num_classes is None and not (0 <= largest < 1_000_000):
            validate.fail("label", "labels in 0..C-1", largest, "Set num_classes, or task = 'regression'.")
        num_outputs = num_classes or int(largest) + 1
    return from_sites(train, test, task=task, num_outputs=num_outputs, name=pathlib.Path(directory).name)


def _medians(values: np.ndarray) -> np.ndarray:
    """[columns] of the values that are there, without NaN; 0 where there is none."""
    present = [column[~np.isnan(column)] for column in values.T]
    return np.array([np.median(column) if len(column) else 0.0 for column in present])


def _imputed(values: np.ndarray, medians: np.ndarray) -> np.ndarray:
    """[n, columns], with the column's median in place of NaN."""
    return np.where(np.isnan(values), medians, values)


def _sites(
    folder: pathlib.Path, label: str, delimiter: str, comment: str | None, missing: Sequence[str]
) -> tuple[list[str], dict[str, np.ndarray]]:
    """(the header, site -> its table [n, columns] float64 with NaN for missing features)."""
    paths = files_of(folder, ".csv", "a site's table as a file")
    header: list[str] = []
    tables = {}
    hint = "Ids and words: read the file yourself, and make clients of an id column with population.by_group."
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
        codes = [() if column == label else missing for column in header]
        tables[path.stem] = np.array(
            [
                [text_files.number(f"{path.name}:{line}", *cell, hint) for cell in zip(cells, codes, strict=True)]
                for line, cells in rows[1:]
            ]
        )
    return header, tables
