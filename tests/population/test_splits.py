"""Shares of rows: every splitter's test rows have the labels of its rows, however few rows clients have.

A rounding in one way favours clients, or labels, by their number of rows. Bounds of 5 standard errors fail by chance
once in 10^6.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population.datasets import leaf_tff
from fedjax_sim.population.splits import (
    client_split,
    counts_of_clients,
    own_split,
    ratio_of,
    rounded_at_random,
    stratified_split,
)
from tests.refusals import refused

SHARE = 0.25
# Clients of 12 rows, half of them of a label that is theirs alone, and clients of 1 to 3 rows of labels "a" and "b".
OWNERS = np.concatenate([np.repeat(np.arange(80), 12), np.repeat(np.arange(80, 1880), np.tile([1, 2, 3], 600))])
NUM_BIG = 80 * 12
LABELS = np.array(
    [f"own {i // 12}" if i % 12 < 6 else "common" for i in range(NUM_BIG)]
    # The only row of a small client is of label "a"; of two, one is; of three, the first is.
    + ["a", "a", "b", "a", "b", "b"] * 600
)
IS_OWN = np.char.startswith(LABELS, "own")


def of_a_table():
    columns = {"row": np.arange(len(LABELS), dtype=float), "who": OWNERS, "y": LABELS.astype(object)}
    return (
        population.from_table(
            columns, client="who", label="y", features=["row"], standardise=False, test_fraction=SHARE, seed=2
        )
        .test["x"][:, 0]
        .astype(int)
    )


def of_sites(tmp_path):
    for id in np.unique(OWNERS):
        rows = np.flatnonzero(OWNERS == id)
        # Numbers in place of labels: of its own label 0, of the common one and of "a" 1, of "b" 2.
        cells = [f"{row},{0 if IS_OWN[row] else 2 if LABELS[row] == 'b' else 1}" for row in rows]
        (tmp_path / f"{id:05d}.csv").write_text("\n".join(["row,y", *cells]))
    options = {"label": "y", "standardise": False, "test_fraction": SHARE, "seed": 2}
    return population.csv_sites(directory=tmp_path, **options).test["x"][:, 0].astype(int)


def of_own_test_rows():
    offsets = np.concatenate([[0], np.cumsum(np.bincount(OWNERS))])
    rows = {"x": np.arange(len(LABELS), dtype=np.float32)[:, None], "y": np.zeros(len(LABELS), np.int32)}
    data = population.FederatedData(
        train=population.stored(rows, offsets),
        test=rows,
        held_out=None,
        input_shape=(1,),
        num_outputs=2,
        task="classification",
    )
    kept = population.with_local_test(data, fraction=SHARE, seed=2).local_test
    return np.asarray(population.pooled(kept).examples["x"])[:, 0].astype(int)


def of_hdf5(tmp_path):
    h5py = pytest.importorskip("h5py", reason="the extra `hdf5` is not installed")
    with h5py.File(tmp_path / "clients.h5", "w") as file:
        for id in np.unique(OWNERS):
            rows = np.flatnonzero(OWNERS == id)
            file[f"examples/{id:05d}/x"] = rows[:, None].astype(np.float32)
            file[f"examples/{id:05d}/y"] = np.zeros(len(rows), np.int32)
    options = {"features": "x", "label": "y", "num_classes": 2, "test_fraction": SHARE, "seed": 2}
    return leaf_tff.tff_hdf5(path=tmp_path / "clients.h5", **options).test["x"][:, 0].astype(int)


def of_poison():
    offsets = np.concatenate([[0], np.cumsum(np.bincount(OWNERS))])
    rows = {"x": np.arange(len(LABELS), dtype=np.float32)[:, None], "y": np.zeros(len(LABELS), np.int32)}
    data = population.FederatedData(
        train=population.stored(rows, offsets),
        test=rows,
        held_out=None,
        input_shape=(1,),
        num_outputs=2,
        task="classification",
    )
    flipped = population.pooled(population.label_flip(data, share=1.0, rows=SHARE, seed=2).train).examples
    return np.asarray(flipped["x"])[np.asarray(flipped["y"]) == 1, 0].astype(int)


SPLITTERS = {
    "table": of_a_table,
    "sites": of_sites,
    "local test": of_own_test_rows,
    "hdf5": of_hdf5,
    "poison": of_poison,
}
TOTAL_IS_EXACT = ("table", "sites", "hdf5")


@pytest.mark.default_rows("table", "sites", "local test", "poison")
@pytest.mark.parametrize("name", SPLITTERS)
def test_test_rows_have_the_labels_of_rows(name, tmp_path):
    """Each row is a test row with the probability asked, by size of client and by label. The number of test rows among
    n independent rows has the standard deviation sqrt(n 3/16), and no splitter's rows are more variable."""
    splitter = SPLITTERS[name]
    rows = splitter(tmp_path) if splitter.__code__.co_argcount else splitter()
    assert len(set(rows.tolist())) == len(rows)
    is_test = np.isin(np.arange(len(LABELS)), rows)
    if name in TOTAL_IS_EXACT:
        assert is_test.sum() == round(SHARE * len(LABELS))
    sizes = np.bincount(OWNERS)[OWNERS]
    groups = {f"clients of {size}": sizes == size for size in (1, 2, 3, 12)}
    groups |= {f"label {label}": LABELS == label for label in ("common", "a", "b")} | {"own labels": IS_OWN}
    groups |= {"b of three": (LABELS == "b") & (sizes == 3), "a of three": (LABELS == "a") & (sizes == 3)}
    for group, rows_of_group in groups.items():
        num_rows = rows_of_group.sum()
        bound = 5 * np.sqrt(num_rows * SHARE * (1 - SHARE))
        assert abs(is_test[rows_of_group].sum() - SHARE * num_rows) < bound, group


def test_every_client_has_its_share():
    """Catches a client, or a label of a client, that is off by a row, a total that is, and a seed that is ignored."""
    pairs = np.stack([OWNERS, np.unique(LABELS, return_inverse=True)[1]], axis=1)
    labels_of_clients = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    draws = [client_split(LABELS, OWNERS, SHARE, np.random.default_rng(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).any()
    for is_test in draws[1:]:
        assert is_test.sum() == round(SHARE * len(LABELS))
        for ids in (OWNERS, labels_of_clients):
            counts = np.bincount(ids[is_test], minlength=ids.max() + 1)
            assert (np.abs(counts - SHARE * np.bincount(ids)) < 1).all()
    sizes = np.array([0, 1, 5, 0, 40])
    counts = np.stack([counts_of_clients(sizes, 0.3, np.random.default_rng(seed)) for seed in range(2_000)])
    assert (counts.sum(axis=1) == 14).all() and (np.abs(counts - sizes * 14 / 46) < 1).all()
    errors = 5 * np.sqrt(1 / 4 / len(counts))
    assert (np.abs(counts.mean(axis=0) - sizes * 14 / 46) < errors).all()
    assert counts_of_clients(np.array([0, 0]), 0.3, np.random.default_rng(0)).tolist() == [0, 0]


def test_one_table():
    """Catches shares of classes that are each rounded down, a row in both parts, and ties that one class wins."""
    wins = np.zeros(4)
    for seed in range(200):
        labels = np.repeat([0, 1, 2, 3], [2, 2, 2, 90])
        train, test = stratified_split(labels, SHARE, np.random.default_rng(seed))
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(96))
        counts = np.bincount(labels[test], minlength=4)
        assert counts.sum() == 24 and (np.abs(counts - SHARE * np.bincount(labels)) < 1).all()
        wins += counts - np.floor(SHARE * np.bincount(labels))
    assert (np.abs(wins - 100) < 5 * np.sqrt(200 / 4)).all()


def test_rounded_at_random():
    """Catches whole numbers that are off by one, numbers that int32 products do not hold, and a mean that is not the
    share."""
    share = jax.jit(jax.vmap(rounded_at_random, (0, None, None)))
    keys = jax.random.split(jax.random.key(3), 4_000)
    for number, asked in ((20, 0.2), (7, 1.0), (10**9, 0.7), (0, 0.3), (2**31 - 1, 1.0)):
        assert set(share(keys[:50], jnp.int32(number), ratio_of("share", asked)).tolist()) == {round(number * asked)}
    for number, asked in ((1, 0.2), (3, 0.3), (7, 0.123)):
        drawn = np.asarray(share(keys, jnp.int32(number), ratio_of("share", asked)))
        assert set(drawn.tolist()) == {int(number * asked), int(number * asked) + 1}
        assert abs(drawn.mean() - number * asked) < 5 * np.sqrt(1 / 4 / len(keys))
    with refused("rows", rule="1 / 32,768"):
        ratio_of("rows", 1e-6)


def test_too_few_rows_for_a_share():
    """Catches a refusal that says `got None` where the share is the default one."""
    columns = {"who": ["a", "b"], "x": [1.0, 2.0], "y": [0, 1]}
    with refused("test_fraction", value=0.1, rule="test rows", hint="2 rows"):
        population.from_table(columns, client="who", label="y", task="binary", test_fraction=0.1)
    with refused("test_fraction", value=0.25, rule="test rows"):
        population.from_table({"who": ["a"], "x": [1.0], "y": [0]}, client="who", label="y", task="binary")


def test_a_client_draws_its_own_rows():
    """Catches clients of few rows that are never tested, rows that are tested more often, and draws that are shared."""
    draws = np.array([own_split(3, f"client {i}", 0.25, 7) for i in range(4000)])
    assert set(draws.sum(1)) == {0, 1}
    assert abs(draws.sum() - 3000) < 5 * np.sqrt(4000 * 0.75 * 0.25)
    assert (abs(draws.sum(0) - 1000) < 5 * np.sqrt(4000 * 0.25 * 0.75)).all()
    whole = own_split(8, "a", 0.25, 0)
    assert whole.sum() == 2 and (whole == own_split(8, "a", 0.25, 0)).all()
