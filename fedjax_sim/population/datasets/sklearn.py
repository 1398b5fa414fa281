"""This module divides real data among clients. The data come with scikit-learn, so nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population import partition as schemes
from fedjax_sim.population.datasets.quantities import scale_of, units_of
from fedjax_sim.population.federated_data import FederatedData, cast_examples, standardiser
from fedjax_sim.population.population import indexed
from fedjax_sim.population.splits import stratified_split
from fedjax_sim.types import Learned, Population, Scale
from fedjax_sim.validate import NonNegativeInt, PositiveInt

MEASUREMENTS = (
    "radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity", "concave points", "symmetry",
    "fractal dimension",
)  # fmt: skip
SUMMARIES = ("mean {}", "{} error", "worst {}")
PARTITIONS = ("dirichlet", "iid", "shards")


def _packaged_table(name: str) -> Path | None:
    """Returns the path of a table in scikit-learn's package, or None where this version keeps it elsewhere.

    The file is read directly, since importing scikit-learn would take longer than building a whole data set.
    """
    sklearn_spec = importlib.util.find_spec("sklearn")
    if sklearn_spec is None or sklearn_spec.origin is None:
        return None
    table = Path(sklearn_spec.origin).parent / "datasets" / "data" / name
    return table if table.is_file() else None


def _digits(test_fraction: float, rng: np.random.Generator, flat: bool = True) -> tuple[dict, dict]:
    """Returns training and test rows of the 1,797 handwritten 8 x 8 digits, with pixels in [0, 1]."""
    if (table := _packaged_table("digits.csv.gz")) is not None:
        rows = np.loadtxt(table, delimiter=",", dtype=np.int32)
        x, y = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)  # pixels are 0 to 16 in the file
    y = y.astype(np.int32)
    x = x if flat else x.reshape(-1, 8, 8)
    return split_rows({"x": x, "y": y}, test_fraction, rng, task="classification", num_outputs=10)


def _tumours() -> dict:
    """Returns {"x": float64 [569, 30], "y": 0 (malignant) or 1 (benign)} of the breast cancer table."""
    if (table := _packaged_table("breast_cancer.csv")) is not None:
        rows = np.loadtxt(table, delimiter=",", skiprows=1)  # the first line counts the rows and names the labels
        x, y = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_breast_cancer

        x, y = load_breast_cancer(return_X_y=True)
    return {"x": x, "y": y.astype(np.int64)}


def split_rows(
    rows: dict,
    test_fraction: float,
    rng: np.random.Generator,
    *,
    task: str,
    num_outputs: int,
    test: dict | None = None,
) -> tuple[dict, dict]:
    """Checks rows and splits them into training and test rows.

    Args:
      rows: {"x", "y"}.
      test_fraction: share of the rows that goes to the test set. The same share is taken of the rows of each label, but
        not for the task "regression", which has no labels.
      rng: draws the test rows.
      task, num_outputs: see `FederatedData`.
      test: {"x", "y"}, test rows that exist already. Then `rows` are not split. None: there are none yet.

    Returns: (training rows, test rows), each {"x", "y"} with the dtypes that `cast_examples` gives them.

    Raises: ValueError for rows that do not fit the task, and for a share that leaves one of the sets empty.
    """
    train = cast_examples("rows", rows, task, num_outputs)
    if test is not None:
        return train, cast_examples("test rows", test, task, num_outputs)
    labels = np.zeros(len(train["y"])) if task == "regression" else train["y"]  # one label: no stratification
    parts = stratified_split(labels, test_fraction, rng)
    train, test = ({leaf: value[part] for leaf, value in train.items()} for part in parts)
    # A small share of few rows may be rounded to none.
    for name, part in (("training", train), ("test", test)):
        if not len(part["y"]):
            validate.fail("test_fraction", f"a share that leaves {name} rows", test_fraction)
    return train, test


@validate.named_arguments
def digits(
    *,
    num_clients: PositiveInt = 100_000,
    alpha: float = 0.3,
    min_examples: int = 20,
    max_examples: int = 60,
    test_fraction: float = 0.2,
    held_out_clients: NonNegativeInt = 200,
    flat: bool = True,
    seed: int = 0,
) -> FederatedData:
    """Builds a population of any size from handwritten digits. Clients draw their rows, so they may share rows.

    The label shares of each client are drawn from a Dirichlet distribution, see `dirichlet_draws`.

    Args:
      num_clients: N. It may be larger than the number of rows, since a client only holds indices of rows.
      alpha: > 0, concentration of the symmetric Dirichlet distribution of a client's label shares. A small alpha gives
        skewed labels.
      min_examples, max_examples: n_i, the number of examples of a client, is uniform in this range.
      test_fraction: share of every class that is kept out of all training clients.
      held_out_clients: clients that draw from the test rows in the same way. 0 for none.
      flat: True gives x as vectors [n, 64], False as images [n, 8, 8], which a convolutional network needs.
      seed: of all draws.

    Returns: `FederatedData` with x [n, 64] or [n, 8, 8] in [0, 1], and y in 0, ..., 9.

    Guarantees: no test row is in a training client, sizes stay in range, and label shares follow Dirichlet(alpha)
    (tests/population/datasets/test_sklearn.py::test_digits_clients).

    References: Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI, 1998; Hsu, Qi, Brown, 2019.

    >>> data = digits(num_clients=100)
    >>> data.train.size, data.input_shape, data.num_outputs
    (100, (64,), 10)
    """
    train, test = _digits(test_fraction, _split_generator(seed), flat)

    def draw(rows: dict, size: int, purpose: int) -> Population:
        options = {"alpha": alpha, "min_examples": min_examples, "max_examples": max_examples}
        draws = schemes.dirichlet_draws(rows["y"], size, **options, seed=_seed(seed, purpose))
        return indexed(rows, draws, learned=())

    population = draw(train, num_clients, 1)
    held_out = draw(test, held_out_clients, 2) if held_out_clients else None
    names = tuple("0123456789")
    return FederatedData(
        train=population,
        test=test,
        held_out=held_out,
        input_shape=train["x"].shape[1:],
        num_outputs=10,
        task="classification",
        label_names=names,
        name="digits",
    )


def _split_generator(seed: int) -> np.random.Generator:
    """Returns the generator that splits rows into training and test rows."""
    validate.integer("seed", seed, 0)
    return np.random.default_rng(seed)


def _seed(seed: int, purpose: int) -> int:
    """Returns the seed for one purpose (1 = training clients, 2 = held-out clients), independent of the others."""
    return int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0] >> 1)


@validate.named_arguments
def partitioned(
    data: tuple[dict, dict],
    *,
    num_clients: int,
    partition: str,
    alpha: float,
    shards_per_client: int,
    held_out_clients: NonNegativeInt,
    seed: int,
    learned: tuple[Learned, ...],
    **about: Any,
) -> FederatedData:
    """Divides training rows among clients, and test rows among held-out clients in the same way.

    Every row belongs to exactly one client.

    Args:
      data: training rows and test rows, {"x", "y"} each.
      num_clients, partition, alpha, shards_per_client, held_out_clients, seed: as in `digits_partition`.
      learned: what was learnt from the rows, see `types.Learned`.
      about: further fields of `FederatedData`.
    """
    validate.one_of("partition", partition, PARTITIONS)
    train, test = data

    def divided(rows: dict, size: int, purpose: int) -> Population:
        y = rows["y"]
        options = {"seed": _seed(seed, purpose)}
        if partition == "iid":
            return indexed(rows, schemes.iid(len(y), size, **options), learned=learned)
        if partition == "shards":
            division = schemes.shards(y, size, shards_per_client=shards_per_client, **options)
            return indexed(rows, division, learned=learned)
        return indexed(rows, schemes.dirichlet(y, size, alpha=alpha, **options), learned=learned)

    population = divided(train, num_clients, 1)
    held_out = divided(test, held_out_clients, 2) if held_out_clients else None
    return FederatedData(population, test, held_out, train["x"].shape[1:], **about)


def digits_partition(
    *,
    num_clients: int = 100,
    partition: str = "dirichlet",
    alpha: float = 0.3,
    shards_per_client: int = 2,
    test_fraction: float = 0.2,
    held_out_clients: int = 10,
    seed: int = 0,
) -> FederatedData:
    """Divides handwritten digits among clients, such that every training row belongs to exactly one client.

    Args:
      num_clients: N.
      partition: "dirichlet" (clients have skewed label shares), "iid", or "shards" (clients have a few labels each).
        See the partitioners of these names.
      alpha: > 0, concentration for "dirichlet".
      shards_per_client: for "shards".
      test_fraction: share of every class that is kept for the test set.
      held_out_clients: the test rows are divided among them in the same way. 0 for none.
      seed: of the split and the partition.

    Returns: `FederatedData` with x [n, 64] in [0, 1], and y in 0, ..., 9.

    Guarantees: with held-out clients, every row of the digits belongs to one training client or one held-out client, in
    each of the three partitions (tests/population/datasets/test_sklearn.py::test_partitions_hold_every_row_once).

    >>> digits_partition(num_clients=10, partition="iid").train.size
    10
    """
    return partitioned(
        _digits(test_fraction, _split_generator(seed)),
        num_clients=num_clients,
        partition=partition,
        alpha=alpha,
        shards_per_client=shards_per_client,
        held_out_clients=held_out_clients,
        seed=seed,
        learned=(),
        num_outputs=10,
        task="classification",
        label_names=tuple("0123456789"),
        name="digits_partition",
    )


@validate.named_arguments
def breast_cancer(
    *,
    standardise: bool | Scale | None = None,
    num_clients: int = 10,
    partition: str = "dirichlet",
    alpha: float = 1.0,
    shards_per_client: int = 2,
    test_fraction: float = 0.2,
    held_out_clients: int = 5,
    seed: int = 0,
) -> FederatedData:
    """Divides the Wisconsin breast cancer data among clients. The task is to predict whether a tumour is benign.

    There are 569 tumours with 30 measurements. Features are standardised by mean and standard deviation of the pooled
    training rows. That is a convenience of the simulation: a real federation would need a protocol for it.

    Args:
      standardise: False keeps the measurements as they are, as None does in a config beside an algorithm that answers
        about the data. {"mean": [...], "deviation": [...]}, with 30 numbers each, are constants that are known without
        the rows; noise needs these or False.
      num_clients, partition, alpha, shards_per_client, test_fraction, held_out_clients, seed: as in `digits_partition`.

    Returns: `FederatedData` with x [n, 30], and y 0 (malignant) or 1 (benign).

    Guarantees: the pooled training features have mean 0 and standard deviation 1 up to rounding
    (tests/population/datasets/test_sklearn.py::test_breast_cancer_is_standardised).

    References: Street, Wolberg, Mangasarian, Nuclear feature extraction for breast tumor diagnosis, 1993.

    >>> data = breast_cancer(num_clients=5)
    >>> data.task, data.label_names
    ('binary', ('malignant', 'benign'))
    """
    train, test = split_rows(_tumours(), test_fraction, _split_generator(seed), task="binary", num_outputs=1)
    # Statistics are those of the training rows alone, so that test rows stay unseen.
    names = [summary.format(measurement) for summary in SUMMARIES for measurement in MEASUREMENTS]
    mean, deviation, learned = scale_of(standardise, names, lambda: standardiser(train["x"].astype(np.float64)))
    train, test = ({"x": ((part["x"] - mean) / deviation).astype(np.float32), "y": part["y"]} for part in (train, test))
    return partitioned(
        (train, test),
        num_clients=num_clients,
        partition=partition,
        alpha=alpha,
        shards_per_client=shards_per_client,
        held_out_clients=held_out_clients,
        seed=seed,
        learned=learned,
        feature_names=tuple(names),
        units=units_of(mean, deviation, len(names)),
        num_outputs=1,
        task="binary",
        label_names=("malignant", "benign"),
        name="breast_cancer",
    )
