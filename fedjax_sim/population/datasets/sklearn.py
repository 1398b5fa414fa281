"""Real data that comes with scikit-learn: nothing is downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_sim import validate
from fedjax_sim.population import partition as schemes
from fedjax_sim.population.federated_data import FederatedData, check_examples, standardiser, stratified_split
from fedjax_sim.population.population import indexed
from fedjax_sim.types import Population
from fedjax_sim.validate import NonNegativeInt, PositiveInt

__all__ = ["breast_cancer", "digits", "digits_partition", "partitioned", "split_rows"]


def _digits(test_fraction: float, rng: np.random.Generator, flat: bool = True) -> tuple[dict, dict]:
    """Training and test rows of the 1,797 handwritten 8 x 8 digits; pixels in [0, 1]."""
    found = importlib.util.find_spec("sklearn")
    table = found and Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if table and table.is_file():  # importing scikit-learn would take half of the time that making the data does
        rows = np.loadtxt(table, delimiter=",", dtype=np.int32)
        x, y = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    x = x if flat else x.reshape(-1, 8, 8)
    return split_rows({"x": x, "y": y}, test_fraction, rng, "classification", 10)


def split_rows(
    rows: dict, test_fraction: float, rng: np.random.Generator, task: str, num_outputs: int, test: dict | None = None
) -> tuple[dict, dict]:
    """Checked training and test rows, the latter `test` or a share of each label (of all, for a regression)."""
    train = check_examples("rows", rows, task, num_outputs)
    if test is not None:
        return train, check_examples("test rows", test, task, num_outputs)
    labels = np.zeros(len(train["y"])) if task == "regression" else train["y"]
    parts = stratified_split(labels, test_fraction, rng)
    train, test = ({leaf: value[part] for leaf, value in train.items()} for part in parts)
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
    """The digits for massive populations: every client draws its rows, with its own label shares from a Dirichlet law.

    Args:
      num_clients: N; a client is a row of indices into the training rows, so clients share rows.
      alpha: > 0, concentration of the symmetric Dirichlet law of a client's label shares; small is skewed.
      min_examples, max_examples: n_i is uniform in this range.
      test_fraction: share of every class kept out of all training clients.
      held_out_clients: clients drawn the same way over the test rows; 0 for none.
      flat: x as vectors [n, 64]; otherwise images [n, 8, 8], as a CNN wants them.
      seed: decides everything.

    Returns: `FederatedData`, x [n, 64] in [0, 1], y in 0..9.

    Guarantees: no test row is in a training client, sizes stay in range, label shares follow Dirichlet(alpha)
    (tests/population/datasets/test_sklearn.py::test_digits_clients).

    References: Alpaydin and Kaynak, Optical recognition of handwritten digits, UCI, 1998; Hsu, Qi, Brown, 2019.

    >>> data = digits(num_clients=100)
    >>> data.train.size, data.input_shape, data.num_outputs
    (100, (64,), 10)
    """
    train, test = _digits(test_fraction, _split_generator(seed), flat)

    def draw(rows: dict, size: int, purpose: int) -> Population | None:
        if not size:
            return None
        law = {"alpha": alpha, "min_examples": min_examples, "max_examples": max_examples}
        return indexed(rows, schemes.dirichlet_draws(rows["y"], size, **law, seed=_seed(seed, purpose)))

    population, held_out = draw(train, num_clients, 1), draw(test, held_out_clients, 2)
    names = tuple("0123456789")
    return FederatedData(population, test, held_out, train["x"].shape[1:], 10, "classification", names, name="digits")


def _split_generator(seed: int) -> np.random.Generator:
    validate.integer("seed", seed, 0)
    return np.random.default_rng(seed)


def _seed(seed: int, purpose: int) -> int:
    """The seed of one purpose (training or held-out clients), independent of the others."""
    return int(np.random.SeedSequence([seed, purpose]).generate_state(1)[0] >> 1)


@validate.named_arguments
def partitioned(
    data: tuple[dict, dict],
    *,
    num_clients: int,
    partition: Literal["dirichlet", "iid", "shards"],
    alpha: float,
    shards_per_client: int,
    held_out_clients: NonNegativeInt,
    seed: int,
    **about: Any,
) -> FederatedData:
    """Training rows over clients, every row in exactly one; test rows over held-out clients by the same scheme."""
    train, test = data

    def spread(rows: dict, size: int, purpose: int) -> Population | None:
        if not size:
            return None
        y, options = rows["y"], {"seed": _seed(seed, purpose)}
        if partition == "iid":
            return indexed(rows, schemes.iid(len(y), size, **options))
        if partition == "shards":
            return indexed(rows, schemes.shards(y, size, shards_per_client=shards_per_client, **options))
        return indexed(rows, schemes.dirichlet(y, size, alpha=alpha, **options))

    population, held_out = spread(train, num_clients, 1), spread(test, held_out_clients, 2)
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
    """The digits split over clients, every training row with exactly one of them.

    Args:
      num_clients: N.
      partition: "dirichlet" (label shares), "iid", or "shards" (a few labels each).
      alpha: > 0, for "dirichlet". shards_per_client: for "shards".
      test_fraction: share of every class kept for the test set.
      held_out_clients: the same scheme over the test rows; 0 for none.
      seed: decides everything.

    Returns: `FederatedData`, x [n, 64] in [0, 1], y in 0..9.

    Guarantees: tests/population/datasets/test_sklearn.py::test_partitions_hold_every_row_once.

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
        num_outputs=10,
        task="classification",
        label_names=tuple("0123456789"),
        name="digits_partition",
    )


def breast_cancer(
    *,
    num_clients: int = 10,
    partition: str = "dirichlet",
    alpha: float = 1.0,
    shards_per_client: int = 2,
    test_fraction: float = 0.2,
    held_out_clients: int = 5,
    seed: int = 0,
) -> FederatedData:
    """Wisconsin breast cancer, 569 tumours with 30 measurements: is it benign?

    Features are standardised by mean and deviation of the pooled training rows. That is a convenience of the
    simulation: a real federation would need a protocol for it.

    Args: as in `digits_partition`.

    Returns: `FederatedData`, x [n, 30], y 0 (malignant) or 1 (benign).

    Guarantees: tests/population/datasets/test_sklearn.py::test_breast_cancer_is_standardised.

    References: Street, Wolberg, Mangasarian, Nuclear feature extraction for breast tumor diagnosis, 1993.

    >>> data = breast_cancer(num_clients=5)
    >>> data.task, data.label_names
    ('binary', ('malignant', 'benign'))
    """
    from sklearn.datasets import load_breast_cancer

    source = load_breast_cancer()
    train, test = split_rows({"x": source.data, "y": source.target}, test_fraction, _split_generator(seed), "binary", 1)
    mean, deviation = standardiser(train["x"].astype(np.float64))
    train, test = ({"x": ((part["x"] - mean) / deviation).astype(np.float32), "y": part["y"]} for part in (train, test))
    return partitioned(
        (train, test),
        num_clients=num_clients,
        partition=partition,
        alpha=alpha,
        shards_per_client=shards_per_client,
        held_out_clients=held_out_clients,
        seed=seed,
        num_outputs=1,
        task="binary",
        label_names=tuple(str(name) for name in source.target_names),
        name="breast_cancer",
    )
