"""What became of a table's columns is told, and so is an identifier that became a feature."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_sim import population
from fedjax_sim.command.app import app
from fedjax_sim.population.datasets.column_uses import columns_in_words, identifier_in_words

ROWS = 24
COLUMNS = {
    "hospital": ["Ghent", "Mons"] * 12,
    "patient_id": list(range(100, 100 + ROWS)),
    "age": [30.5 + i % 7 for i in range(ROWS)],
    "dose": [""] + [f"{i % 5}" for i in range(1, ROWS)],
    "city": ["a", "b", "c"] * 8,
    "ill": [0, 1, 1] * 8,
}


def test_columns_of_a_table():
    """Catches a column that is not listed, another preparation than was done, and features that were not chosen."""
    options = {"client": "hospital", "label": "ill", "categories": ["city"], "missing": [""]}
    data = population.from_table(COLUMNS, **options)
    assert columns_in_words(data.table_columns) == [
        "feature, standardised: patient_id, age",
        "feature, standardised, 1 missing values filled, with an indicator: dose",
        "feature, one-hot of 3 categories: city",
        "label: ill",
        "client id: hospital",
    ]
    assert data.input_shape == (3 + 1 + 3,)
    assert [warning.split(" ")[0] for warning in data.warnings] == ["patient_id"]
    assert data.warnings[0].endswith('features = ["...", "..."].')
    repeated = population.from_table(COLUMNS | {"patient_id": [7, 8] * 12}, **options)
    assert repeated.warnings[0].endswith('If it numbers categories: categories = ["patient_id"].')
    chosen = population.from_table(COLUMNS, **options | {"features": ["city", "age"], "standardise": False})
    assert columns_in_words(chosen.table_columns) == [
        "feature, as it is: age",
        "feature, one-hot of 3 categories: city",
        "label: ill",
        "client id: hospital",
        "not used: patient_id, dose",
    ]
    assert not chosen.warnings


@pytest.mark.parametrize("stated", [False, True])
def test_values_without_a_column_are_told(stated):
    """A value that no column has: one of test rows alone, or one that is not among the stated values."""
    options = {"client": "hospital", "label": "ill", "features": ["city"], "test": COLUMNS | {"city": ["a", "d"] * 12}}
    options["categories"] = {"city": ["b", "c", "a"]} if stated else ["city"]
    data = population.from_table(COLUMNS, **options)
    assert data.warnings == ("city: 12 rows with d have 0 in all of its columns: no column has the value",)
    assert data.test["x"].sum() == 12


def test_columns_of_sites(tmp_path):
    """Catches an identifier that is told for a table alone."""
    for k, site in enumerate(("a", "b")):
        lines = [f"{i if site == 'a' else 50},{i + 50 * k},{i / 7},{i % 2}" for i in range(12)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,record,dose,ill", *lines]))
    data = population.csv_sites(directory=str(tmp_path), label="ill", task="binary")
    assert columns_in_words(data.table_columns) == ["feature, standardised: age, record, dose", "label: ill"]
    assert [warning.split(" ")[0] for warning in data.warnings] == ["record"]


@pytest.mark.parametrize(
    ("name", "values", "is_told"),
    [
        ("record", np.arange(10.0), True),
        ("record", np.append(np.arange(10.0), np.nan), True),
        ("record", np.arange(9.0), False),  # too few to tell
        ("income", np.append(np.arange(10.0), 3), False),
        ("income", np.arange(10) + 0.5, False),
        *(
            (name, np.array([1.0, 2, 1]), True)
            for name in ("id", "ID", "patient_id", "patientId", "PatientID", "case-id")
        ),
        *((name, np.array([1.0, 2, 1]), False) for name in ("acid", "grid", "paid", "ACID", "idle")),
        ("device_id", np.array([1.5, 2, 1]), False),
        ("note", np.array([f"t{i}" for i in range(10)], object), True),
        ("case", np.arange(10).astype(object), True),
        ("store_id", np.array(["a", "b"] * 10, object), False),  # named as categories
    ],
)
def test_identifiers_are_told(name, values, is_told):
    """Catches an identifier that becomes a feature without a word, and a warning at each column of measurements."""
    assert len(identifier_in_words(name, values, "")) == is_told


def test_columns_are_shown(tmp_path):
    """Catches columns and warnings that a data set has and no command shows."""
    path = tmp_path / "patients.csv"
    rows = zip(*([str(x) for x in COLUMNS[name]] for name in COLUMNS), strict=True)
    path.write_text("\n".join([",".join(COLUMNS), *map(",".join, rows)]))
    settings = ["data.name=table", f"data.file={path}", "data.client=hospital", "data.label=ill", "data.task=binary"]
    settings += [
        'data.categories=["city"]',
        'data.missing=[""]',
        "model.name=logistic",
        "sampler.name=full",
        "run.rounds=1",
    ]
    words = [word for setting in [*settings, "algorithm.batch_size=4"] for word in ("--set", setting)]
    run = CliRunner().invoke(app, ["run", "--out", str(tmp_path / "run"), *words])
    assert run.exit_code == 0, run.output
    page = (tmp_path / "run" / "report.html").read_text()
    shown = CliRunner().invoke(app, ["data", *words[: 2 * len(settings[:7])]])
    assert shown.exit_code == 0, shown.output
    for output in (run.output, page, shown.output):
        for text in ("one-hot of 3 categories", "client id", "patient_id looks like an identifier"):
            assert text in " ".join(output.split())
    assert "Ghent, Mons" in shown.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "label: ill" in summary["data_columns"] and len(summary["data_warnings"]) == 1
