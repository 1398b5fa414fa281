"""What became of the columns of a table: features and how they were prepared, label, client ids, and the others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedjax_sim.population.datasets.quantities import MOST_LISTED, names_in_words
from fedjax_sim.population.federated_data import TableColumn

FEWEST_ROWS = 10  # of a column whose distinct values make it look like an identifier
ENDS_IN_ID = re.compile(r"(^|[^A-Za-z])[iI][dD]$|[a-z](Id|ID)$")  # patient_id, patientId, ID; not acid or grid


def quantity_columns(
    names: Sequence[str],
    values: np.ndarray,
    is_training: np.ndarray,
    standardise: bool | Mapping,
    fill: Mapping | None = None,
) -> tuple[TableColumn, ...]:
    """Returns the columns of quantities with their preparation in words.

    Args:
      names: of the columns.
      values: [rows, columns], with NaN for missing ones, before their preparation.
      is_training: [rows] bool.
      standardise: whether the features are standardised, or the constants by which they are.
      fill: column -> the number for its missing values, if that is stated. These columns have an indicator. None:
        nothing is stated.
    """
    scaled = "standardised" if standardise else "as it is"
    if isinstance(standardise, Mapping):
        scaled = "standardised by stated constants"
    num_missing = np.isnan(values).sum(axis=0)
    has_indicator = np.any(np.isnan(values[is_training]), axis=0)
    if fill is not None:
        has_indicator = np.isin(names, list(fill))
    columns = []
    for name, count, indicated in zip(names, num_missing.tolist(), has_indicator, strict=True):
        filled = f", {count:,} missing values filled" if count else ""
        columns.append(TableColumn(name, "feature", scaled + filled + (", with an indicator" if indicated else "")))
    return tuple(columns)


def category(name: str, num_values: int) -> TableColumn:
    """Returns a column of categories, of which `num_values` have a feature each."""
    return TableColumn(name, "feature", f"one-hot of {num_values:,} categories")


def identifier_in_words(name: str, values: np.ndarray, remedy: str, if_repeated: str = "") -> tuple[str, ...]:
    """Returns a warning if a feature looks like an identifier; otherwise none.

    A feature looks like one if all of its values are distinct integers or categories, or if it is a quantity of
    integers whose name ends in "id".

    Args:
      name: of the column.
      values: [rows] float64 of a quantity, with NaN for missing ones; or [rows] of dtype object, categories.
      remedy: what to do about it, a sentence.
      if_repeated: a further sentence about integers that repeat, which may be numbers of categories.

    Guarantees: identifiers are told, and measurements are not
    (tests/population/datasets/test_column_uses.py::test_identifiers_are_told).
    """
    is_quantity = values.dtype != object
    values = values[~np.isnan(values)] if is_quantity else values
    if is_quantity and (values != np.floor(values)).any():
        return ()
    num_distinct = len(np.unique(values))
    kind = "integers" if is_quantity else "categories"
    if num_distinct == len(values) >= FEWEST_ROWS:
        why = f"{num_distinct:,} distinct {kind} in as many rows"
    elif is_quantity and ENDS_IN_ID.search(name):
        why = f"its name, and {num_distinct:,} distinct integers"
        remedy = f"{remedy} {if_repeated}".strip()
    else:
        return ()
    return (f"{name} looks like an identifier ({why}) and became a feature: a model learns who is who. {remedy}",)


def columns_in_words(columns: Iterable[TableColumn]) -> list[str]:
    """Returns a line for each thing that columns became, with their names; of more than ten the first ones.

    >>> columns_in_words([TableColumn("age", "feature", "standardised"), TableColumn("ill", "label")])
    ['feature, standardised: age', 'label: ill']
    """
    names: dict[tuple[str, str], list[str]] = {}
    for column in columns:
        names.setdefault((column.use, column.preparation), []).append(column.name)
    lines = []
    for (use, preparation), of_use in names.items():
        number = f" ({len(of_use):,} in all)" if len(of_use) > MOST_LISTED else ""
        lines.append(f"{use}{', ' if preparation else ''}{preparation}: {names_in_words(of_use)}{number}")
    return lines
