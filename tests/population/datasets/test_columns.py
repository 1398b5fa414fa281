"""Columns of others: missing is one thing, identities are no numbers, and what nobody asked for stops nothing."""

from __future__ import annotations

import datetime
import decimal

import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population import partitioners
from fedjax_sim.population.datasets.columns import coded, identities, read_column
from tests.refusals import refused

pandas = pytest.importorskip("pandas", reason="the extra `data` is not installed")
pyarrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")

ROWS = 24
# A column whose third row is missing, in every container and dtype that has a word for it.
NUMBERS = [1, 2, None, 3] * 6
TEXTS = ["b", "a", None, "c"] * 6
MASK = np.array([value is None for value in NUMBERS])


def filled(values, absent):
    return [absent if value is None else value for value in values]


OF_NUMBERS = {
    "list with None": NUMBERS,
    "list with NaN": filled(NUMBERS, float("nan")),
    "list with NA": filled(NUMBERS, pandas.NA),
    "list with NaT": filled(NUMBERS, pandas.NaT),
    "list with Decimal's NaN": filled(NUMBERS, decimal.Decimal("nan")),
    "float64": np.array(filled(NUMBERS, np.nan)),
    "float32": np.array(filled(NUMBERS, np.nan), np.float32),
    "object": np.array(NUMBERS, object),
    "masked integers": np.ma.array(filled(NUMBERS, 7), mask=MASK),
    "masked floats": np.ma.array(filled(NUMBERS, 7.0), mask=MASK),
    "Int64": pandas.Series(NUMBERS, dtype="Int64"),
    "Float64": pandas.Series(NUMBERS, dtype="Float64"),
    "int64[pyarrow]": pandas.Series(NUMBERS, dtype="int64[pyarrow]"),
    "category": pandas.Series(NUMBERS).astype("category"),
    "Arrow": pyarrow.chunked_array([NUMBERS]),
    "Arrow of floats": pyarrow.chunked_array([filled(NUMBERS, None)], type=pyarrow.float64()),
    "code": filled(NUMBERS, -1),
    "texts of a code": [str(x) for x in filled(NUMBERS, -1)],
    "texts": [str(x) for x in filled(NUMBERS, "")],
    "texts with NaN": [str(x) for x in filled(NUMBERS, "NaN")],
}
OF_TEXTS = {
    "list with None": TEXTS,
    "list with NaN": filled(TEXTS, float("nan")),
    "list with NA": filled(TEXTS, pandas.NA),
    "array of texts": np.array(filled(TEXTS, float("nan"))),  # NumPy writes "nan"
    "masked": np.ma.array(filled(TEXTS, "x"), mask=MASK),
    "str": pandas.Series(TEXTS),
    "string": pandas.Series(TEXTS, dtype="string"),
    "string[pyarrow]": pandas.Series(TEXTS, dtype="string[pyarrow]"),
    "category": pandas.Series(TEXTS, dtype="category"),
    "astype(str)": pandas.Series(TEXTS, dtype="string").astype(object).map(str),  # pandas writes "<NA>"
    "Arrow": pyarrow.chunked_array([TEXTS]),
    "Arrow's dictionary": pyarrow.chunked_array([TEXTS]).dictionary_encode(),
    "code": filled(TEXTS, "?"),
    "empty": filled(TEXTS, ""),
}
SPELLINGS = [("numbers", name) for name in OF_NUMBERS] + [("texts", name) for name in OF_TEXTS]
CODES = ["nan", "-1", "?"]


def plain(values):
    """The column as texts, as a file has it."""
    return [str(x) for x in filled(values, "")]


def read(column, role, **options):
    """Reads a table in which the column has this role."""
    table = {"u": ["a", "b"] * 12, "x": np.arange(ROWS) / 2, "y": [0, 1, 1] * 8, role: column}
    options = {"client": "u", "label": "y", "standardise": False, "missing": CODES, "features": ["x"]} | options
    return population.from_table(table, test=table, **options)


@pytest.mark.parametrize("kind, name", SPELLINGS)
def test_missing_is_one_thing(kind, name, tmp_path):
    """Every spelling, in every role, is as the column of a file with empty cells. Catches NA that is a class or a
    client, a code that is a number, a mask that is forgotten, and a null after which integers are floats."""
    column = (OF_NUMBERS if kind == "numbers" else OF_TEXTS)[name]
    values = NUMBERS if kind == "numbers" else TEXTS
    for role, words in (("u", "row 2 u: expected a client id"), ("y", "row 2 y: expected a label")):
        with pytest.raises(ValueError, match=words):
            read(column, role)
    found, wanted = (read(x, "c", features=["x", "c"], categories=["c"]) for x in (column, plain(values)))
    np.testing.assert_array_equal(found.test["x"], wanted.test["x"])
    assert found.test["x"].shape == (ROWS, 5)  # x, and one column for none, and for each of three values
    distinct = sorted({str(value) for value in values if value is not None})
    for absent in ("", "?"):
        stated = read(column, "c", features=["x", "c"], categories={"c": [absent, *distinct]})
        np.testing.assert_array_equal(stated.test["x"], wanted.test["x"])
    if kind == "numbers":
        found, wanted = (read(x, "q", features=["q"]) for x in (column, plain(values)))
        np.testing.assert_array_equal(found.test["x"], wanted.test["x"])
        np.testing.assert_array_equal(found.test["x"][:4], [[1, 0], [2, 0], [2, 1], [3, 0]])
        if "code" not in name:
            with pytest.raises(ValueError, match="row 2 q: expected a finite number"):
                read(column, "q", features=["q"], missing=[])
        with pytest.raises(ValueError, match="row 2 y: expected a label"):
            read(column, "y", task="regression")


def test_missing_truths():
    """Catches NA of a truth that is False."""
    column = read_column(pandas.Series([True, None, False], dtype="boolean"))
    assert column.is_missing.tolist() == [False, True, False] and identities(column).codes.tolist() == [1, -1, 0]


def test_a_code_of_integers_moves_no_class():
    """Catches -1 that becomes class 0, while all others move up."""
    with pytest.raises(ValueError, match="row 0 y: expected a label"):
        read([-1, 0, 1, 2] * 6, "y")
    column = coded(read_column(np.array([2**60 + 1, 2**60, 5])), [str(2**60), "5.0"])
    assert column.is_missing.tolist() == [False, True, True]


BIG = [2**60 + 1, 2**60 + 2, 2**60 + 3]
IDENTITIES = {
    "big integers": (BIG, [str(x) for x in BIG]),
    "bigger than any dtype": ([2**70 + x for x in range(3)], [str(2**70 + x) for x in range(3)]),
    "beside a null": ([*BIG[:2], None, BIG[2]], [str(x) for x in BIG]),
    "Int64": (pandas.Series([*BIG, None], dtype="Int64"), [str(x) for x in BIG]),
    "Arrow": (pyarrow.chunked_array([[*BIG, None]]), [str(x) for x in BIG]),
    "uint64": (np.array([2**64 - 1, 2**64 - 2, 0], np.uint64), ["0", str(2**64 - 2), str(2**64 - 1)]),
    "padded": (["007", "7", "07"], ["007", "07", "7"]),
    "padded alone": (["007", "010", "012"], ["007", "010", "012"]),
    "texts of integers": (["10", "9", "-2"], ["-2", "9", "10"]),
    "signed": (["+1", "-1", "0"], ["-1", "0", "1"]),
    "floats of integers": (np.array([10.0, 9.0, 2.0]), ["2", "9", "10"]),
    "texts of floats": (["10.0", "9.0", "2.0"], ["2", "9", "10"]),
    "exponents": (["1e2", "100", "1E2"], ["100", "1E2", "1e2"]),
    "decimals": ([decimal.Decimal(2), decimal.Decimal(10), decimal.Decimal(3)], ["2", "3", "10"]),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_keep_their_digits(name):
    """Catches integers that pass through floats, texts that are one as numbers, and an order of nothing."""
    values, names = IDENTITIES[name]
    known = identities(read_column(values))
    assert list(known.names) == names
    present = [value for value in (values.tolist() if hasattr(values, "tolist") else values) if value is not None]
    if not isinstance(values, (pandas.Series, pyarrow.ChunkedArray)):
        assert len(set(known.codes.tolist()) - {-1}) == len(present) == 3
    # As labels and as clients of a table.
    values = [value for value in present if value is not pandas.NA and value is not None] if name != "Arrow" else BIG
    table = {"u": list(values) * 4, "x": np.arange(12.0), "y": list(values) * 4}
    data = population.from_table(table, test=table, client="u", label="y")
    assert data.label_names == tuple(names) and data.num_outputs == 3 and data.client_names == tuple(names)


@pytest.mark.parametrize("others", [[0.0, 1.0, 2.0], np.array([2**63 + 5, 7, 8], np.uint64)])
def test_identities_of_two_tables(others):
    """Catches integers that are floats because of the dtype of the test rows."""
    train = {"u": BIG, "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}
    data = population.from_table(train, test=train | {"u": others}, client="u", label="y", task="binary")
    assert data.client_names == tuple(map(str, BIG))
    assert set(data.held_out_names) == {str(int(id)) for id in others}


def test_numbers_that_name_nobody():
    """Catches a measured quantity that is a client or a class, and floats that lack the digits of their integers."""
    for role, what in (("u", "a client id"), ("y", "a label")):
        with refused(f"source row 1 {role}", value=0.5, rule=what):
            read(np.array([0.0, 0.5] * 12), role)
        with refused(f"source row 0 {role}", rule=what, hint="last digits"):
            read(np.array([2.0**60, 1.0] * 12), role)
        with refused(f"source row 0 {role}", rule=what, hint="last digits"):
            read(np.array([2.0**24 + 2, 1.0] * 12, np.float32), role)
        with refused(f"source row 0 {role}", value=np.inf, rule=what):
            read(np.array([np.inf, 1.0] * 12), role)
    for alone in (3.0, "ab", None, {"a": 1}):
        with refused("source", rule="one length"):
            population.from_table({"u": alone, "y": alone}, client="u", label="y")
    with refused("label", value="0, 0.5"):
        read(["0", "0.5"] * 12, "y")


def test_a_file_has_the_clients_of_a_frame(tmp_path):
    """Catches ids of a file in the order of texts, 10 before 9, beside a frame's in the order of numbers."""
    frame = pandas.DataFrame({"u": [10, 9, 2] * 4, "x": np.arange(12.0), "y": [0, 1] * 6})
    frame.to_csv(tmp_path / "a.csv", index=False)
    options = {"client": "u", "label": "y", "task": "binary", "seed": 1}
    found, wanted = population.table(file=tmp_path / "a.csv", **options), population.from_table(frame, **options)
    assert found.client_names == wanted.client_names == ("2", "9", "10")
    for id in range(3):
        np.testing.assert_array_equal(found.train.client(id).examples["x"], wanted.train.client(id).examples["x"])


def test_classes_of_hugging_face():
    """Catches names that are dropped, a split without its last class that has one output fewer, classes in the order of
    their names, and -1, the sign of a row without a class, as a class."""
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    features = datasets.Features({
        "x": datasets.Value("float32"),
        "y": datasets.ClassLabel(names=["zebra", "ant", "bee"]),
        "who": datasets.ClassLabel(names=["lab", "home"]),
    })  # fmt: skip
    rows = {"x": np.arange(8.0).tolist(), "y": [0, 1] * 4, "who": [0, 0, 1, 1] * 2}
    source = datasets.Dataset.from_dict(rows, features=features)
    data = population.from_table(source, test=source, client="who", label="y", features=["x"])
    assert data.num_outputs == 3 and data.label_names == ("zebra", "ant", "bee")
    assert data.test["y"].tolist() == rows["y"] and data.client_names == ("home", "lab")
    with refused("label", rule="2 classes") as raised:
        population.from_table(source, client="who", label="y", features=["x"], task="binary")
    assert raised.value.value.startswith("3 stated with the column")
    with refused("source row 0 who", value="lab", hint="categories"):
        population.from_table(source, partition=partitioners.iid(num_clients=2), label="y")
    absent = datasets.Dataset.from_dict(rows | {"y": [0, -1] * 4}, features=features)
    with pytest.raises(ValueError, match="source row 1 y: expected a label"):
        population.from_table(absent, client="who", label="y", features=["x"])
    splits = datasets.DatasetDict(train=source, later=source)
    with refused("source", value="DatasetDict of 2 tables", hint="train, later"):
        population.from_table(splits, client="who", label="y")


STRANGE = {
    "date": [datetime.date(2024, 1, 1)] * ROWS,
    "moment": np.array(["2024-01-01"] * ROWS, "datetime64[D]"),
    "frame's moment": pandas.Series(pandas.Timestamp("2024-01-01"), index=range(ROWS)),
    "dict": [{"a": 1}] * ROWS,
    "bytes": [b"a"] * ROWS,
    "complex": np.zeros(ROWS, complex),
    "ragged": [[1, 2], [1]] * 12,
    "deep": [[["a"]]] * ROWS,
    "holes": [[1.0], None] * 12,
    "set": [{1}] * ROWS,
}


def test_columns_that_nobody_asked_for():
    """Catches a column that stops the reading of others, one that is left out without a word, and a refusal that names
    one strange column only."""
    table = {
        "u": ["a", "b"] * 12,
        "x": np.arange(ROWS) / 2,
        "price": [decimal.Decimal("1.50")] * ROWS,
        "y": [0, 1] * 12,
    }
    options = {"client": "u", "label": "y", "task": "binary", "standardise": False}
    data = population.from_table(table | STRANGE, features=["x", "price"], **options)
    assert data.input_shape == (2,) and (data.test["x"][:, 1] == 1.5).all()
    assert {column.name for column in data.table_columns if column.use == "not used"} == set(STRANGE)
    with pytest.raises(TypeError) as refusal:
        population.from_table(table | STRANGE, **options)
    words = str(refusal.value)
    for name, what in {"date": "type date", "dict": "type dict", "ragged": "different", "moment": "dates"}.items():
        assert f"{name!r} has " in words and what in words
    assert words.endswith('Name those to read: features = ["x", "price"].') and all(name in words for name in STRANGE)
    for role in ("client", "label"):
        with refused(f"{role} 'dict'", value="values of type dict"):
            population.from_table(table | STRANGE, **options | {role: "dict", "features": ["x"]})


def test_missing_ids_and_rows_elsewhere(tmp_path):
    """Catches a client "nan" of a list, masked rows that are numbers, and a missing target that is trained on."""
    for absent in (None, float("nan"), pandas.NA, ""):
        with pytest.raises(ValueError, match=r"groups\[1\]: expected an id"):
            population.by_group(["a", absent, "b"])
    with pytest.raises(ValueError, match=r"groups\[1\]: expected an id"):
        population.by_group(np.ma.array([1, 2, 3], mask=[0, 1, 0]))
    assert population.by_group([2**70, 5, 2**70]).sizes.tolist() == [2, 1]
    assert population.by_group(pandas.Series(["b", "a", "b"], dtype="category")).sizes.tolist() == [1, 2]
    masked = np.ma.array(np.ones((2, 1)), mask=[[0], [1]])
    site = {"x": masked, "y": [0, 1]}
    with refused("train['a'].x", value="a mask", rule="missing"):
        population.from_sites({"a": site}, {"a": site}, task="binary", num_outputs=1, name="masked")
    for label, task, words in (
        ("-9", "regression", "a.csv:3 y: expected a label, got 'none'"),
        ("007", "classification", "a.csv:3 y: expected a number of a class, without leading zeros, got '007'"),
    ):
        (tmp_path / "a.csv").write_text(f"x,y\n1,2\n2,{label}\n3,1\n4,1\n")
        with pytest.raises(ValueError, match=words):
            population.csv_sites(directory=tmp_path, label="y", task=task, missing=["-9"])


def test_all_columns_of_words_are_told():
    table = {"u": ["a", "b"] * 12, "x": ["?"] * ROWS, "town": ["Ghent"] * ROWS, "y": [0, 1] * 12}
    with refused("features", value="2 without", hint="categories") as raised:
        population.from_table(table, client="u", label="y", task="binary")
    assert all(words in raised.value.hint for words in ("row 0 x: ", "row 0 town: ", "'Ghent'"))


def test_nested_lists_of_parquet(tmp_path):
    """Catches arrays of arrays, as pandas reads them from Parquet, that are taken for rows of different shapes."""
    images = np.arange(ROWS * 6.0).reshape(ROWS, 2, 3)
    frame = pandas.DataFrame({"image": list(map(np.ndarray.tolist, images)), "y": [0, 1] * 12, "u": ["a", "b"] * 12})
    frame.to_parquet(tmp_path / "a.parquet")
    again = pandas.read_parquet(tmp_path / "a.parquet")
    arrow = pyarrow.Table.from_pandas(frame)
    for source in (again, arrow, frame):
        data = population.from_table(source, test=source, client="u", label="y", task="binary")
        np.testing.assert_array_equal(data.test["x"], images)
