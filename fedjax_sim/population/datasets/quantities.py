"""Columns of measured quantities: missing values are imputed and told, and scales are made alike.

All statistics are those of training rows, so that test rows stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedjax_sim.population.federated_data import standardiser

__all__ = ["MOST_LISTED", "imputed", "listed", "medians_of", "missing_in_words", "quantities"]

MOST_LISTED = 10  # names that a note lists


def medians_of(values: np.ndarray) -> np.ndarray:
    """Returns the median of each column, [columns], without NaN. A column of NaN alone has 0."""
    columns = [column[~np.isnan(column)] for column in values.T]
    return np.array([np.median(column) if len(column) else 0.0 for column in columns])


def imputed(values: np.ndarray, medians: np.ndarray) -> np.ndarray:
    """Returns the values [n, columns], with the column's median instead of NaN."""
    return np.where(np.isnan(values), medians, values)


def listed(names: Sequence[str]) -> str:
    """Returns names as a text, with the first ten of many."""
    return ", ".join(names[:MOST_LISTED]) + (", ..." if len(names) > MOST_LISTED else "")


def missing_in_words(names: Sequence[str], values: np.ndarray) -> tuple[str, ...]:
    """Returns a note on the missing values of columns [n, columns], which have NaN; none if no value is missing.

    >>> missing_in_words(["age", "height"], np.array([[1.0, np.nan], [np.nan, np.nan]]))
    ('missing values, the median of training rows in their place: 1 of age, 2 of height',)
    """
    counts = np.isnan(values).sum(axis=0)
    found = [f"{count:,} of {name}" for name, count in zip(names, counts, strict=True) if count]
    return (f"missing values, the median of training rows in their place: {listed(found)}",) if found else ()


def quantities(train: np.ndarray, standardise: bool) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that makes features of quantities, [n, columns] with NaN for missing ones.

    A missing value becomes the median of the training rows. Behind the columns stands an indicator, 0 or 1, for each
    column of which a training row lacks its value.

    Args:
      train: the training rows, [n, columns].
      standardise: whether columns are brought to mean 0 and standard deviation 1 of the training rows.

    >>> quantities(np.array([[1.0, np.nan], [3.0, 4.0]]), True)(np.array([[5.0, np.nan]])).tolist()
    [[3.0, 0.0, 1.0]]
    """
    columns_with_missing = np.flatnonzero(np.isnan(train).any(axis=0))
    medians = medians_of(train)
    mean, deviation = standardiser(imputed(train, medians)) if standardise else (0.0, 1.0)

    def prepared(values: np.ndarray) -> np.ndarray:
        indicators = np.isnan(values[:, columns_with_missing])
        return np.concatenate([(imputed(values, medians) - mean) / deviation, indicators], axis=1)

    return prepared
