"""Clients with poisoned rows, against NumPy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from fedjax_sim import algorithms, engine, population, run, sampling
from fedjax_sim.config.build import Builder, build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.population.describe import describe, digest
from fedjax_sim.population.poisoned.poisoning import chosen_clients, chosen_rows
from fedjax_sim.population.protocol import check_population
from fedjax_sim.population.splits import ratio_of
from fedjax_sim.validate import as_written
from tests.refusals import refused

SIZES = np.array([3, 0, 9, 1, 5, 70, 8, 2])
OFFSETS = np.concatenate([[0], np.cumsum(SIZES)])
TOTAL, LABELS = int(OFFSETS[-1]), 5
RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.standard_normal((TOTAL, 2)).astype(np.float32),
    "y": RNG.integers(0, LABELS, TOTAL).astype(np.int32),
}
IDS = [2, 5, 6]


def data(train=None):
    train = population.stored(ROWS, OFFSETS) if train is None else train
    return population.FederatedData(
        train=train, test=ROWS, held_out=None, input_shape=(2,), num_outputs=LABELS, task="classification", name="toy"
    )


client_of = jax.jit(lambda people, id: people.client(id))


def valid(people, id):
    """A client's examples without padding, as NumPy."""
    one = jax.device_get(client_of(people, np.int32(id)))
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(one.mask)], one.examples)


def rows_of(id):
    return {name: leaf[OFFSETS[id] : OFFSETS[id + 1]] for name, leaf in ROWS.items()}


def test_only_the_chosen_change():
    """Catches a neighbour that is poisoned too (a search that is off by one), features or test rows that change, and
    sizes or masks that do."""
    made = population.label_flip(data(), clients=IDS)
    check_population(made.train)
    assert made.test is ROWS and made.train.poisoned_ids.tolist() == IDS
    assert made.train.sizes.tolist() == SIZES.tolist()
    for id, size in enumerate(SIZES):
        found, clean = valid(made.train, id), rows_of(id)
        wanted = LABELS - 1 - clean["y"] if id in IDS else clean["y"]
        np.testing.assert_array_equal(found["y"], wanted)
        np.testing.assert_array_equal(found["x"], clean["x"])
        assert int(made.train.count(jnp.int32(id))) == size
    assert describe(made)["poisons"] == ["label flip at 3 of 8 clients"]
    everybody = population.label_flip(data(), share=1.0)
    assert all((valid(everybody.train, id)["y"] == LABELS - 1 - rows_of(id)["y"]).all() for id in range(len(SIZES)))


def test_labels_against_numpy():
    """Catches a map that is applied twice or to other labels, and rows that are not the share that was asked for."""
    to = [1, 1, 4, 0, 2]
    made = population.label_flip(data(), clients=IDS, to=to, rows=0.5)
    for id in IDS:
        found, clean = valid(made.train, id)["y"], rows_of(id)["y"]
        moved = found != clean
        np.testing.assert_array_equal(found[moved], np.asarray(to)[clean[moved]])
        others = clean != np.asarray(to)[clean]  # where a change can be seen
        assert moved.sum() <= (len(clean) + 1) // 2 and moved.sum() >= len(clean) // 2 - (~others).sum()
    assert any((valid(made.train, id)["y"] != rows_of(id)["y"]).any() for id in IDS)
    two = population.stored({**ROWS, "y": ROWS["y"] % 2}, OFFSETS)
    binary = data(two)._replace(task="binary", num_outputs=1)
    np.testing.assert_array_equal(
        valid(population.label_flip(binary, clients=[2]).train, 2)["y"], 1 - rows_of(2)["y"] % 2
    )


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 1.0])
def test_exact_count(share):
    """Catches a coin flip for each row or client, padding that is counted, and a choice that depends on the arrays'
    length, on where padding stands, or on the client's neighbours."""
    choose = jax.jit(chosen_rows)
    for n, key in ((1, 0), (7, 1), (257, 3)):
        key = jax.random.key(key)
        whole = np.asarray(choose(key, np.ones(n, bool), ratio_of("share", share)))
        assert whole.sum() in (math.floor(as_written(share) * n), math.ceil(as_written(share) * n))
        gaps = np.zeros(2 * n + 3, bool)
        gaps[1 : 2 * n : 2] = True
        found = np.asarray(choose(key, gaps, ratio_of("share", share)))
        np.testing.assert_array_equal(found[gaps], whole)
        assert not found[~gaps].any()
    many = population.mean_estimation(num_clients=1_000)
    made = population.label_offset(many, offset=1.0, share=share)
    assert made.poisons == (f"targets off by 1 at {round(1000 * share):,} of 1,000 clients",)
    labels = jax.jit(lambda people, ids: jax.vmap(people.client)(ids).examples["y"])
    clean, found = (np.asarray(labels(x.train, np.arange(1_000))) for x in (many, made))
    assert (found != clean).sum() == round(1000 * share)


def test_who_is_uniform():
    """Each of 20 clients is in a share of 0.2 a fifth of the time: over 2,000 seeds the chi-square of 20 counts (19
    degrees, variance of a count 320) passes 50.8 with chance 1e-4. A client never chosen adds 400 x 400 / 320."""
    data = population.mean_estimation(num_clients=20)
    counts = np.zeros(20)
    for seed in range(2_000):
        counts[chosen_clients(data.train.size, None, 0.2, seed)] += 1
    assert counts.sum() == 8_000
    assert ((counts - 400) ** 2 / (2_000 * 0.2 * 0.8)).sum() * 19 / 20 < stats.chi2.isf(1e-4, 19)


def test_random_labels_are_uniform():
    """Catches the right label (unless asked for), and one that is drawn more often: chi-square over the shifts y' - y
    of 4,000 rows, which fails by chance once in 10^4; a label left out of four adds 1,000."""
    rows = {"x": np.zeros((4_000, 2), np.float32), "y": RNG.integers(0, LABELS, 4_000).astype(np.int32)}
    whole = data(population.stored(rows, [0, 2_000, 4_000]))
    for keep, first in ((False, 1), (True, 0)):
        made = population.random_labels(whole, share=1.0, keep=keep)
        drawn = np.concatenate([valid(made.train, id)["y"] for id in range(2)])
        counts = np.bincount((drawn - rows["y"]) % LABELS, minlength=LABELS)
        assert counts[:first].sum() == 0
        assert stats.chisquare(counts[first:]).pvalue > 1e-4
        shifts = ((drawn - rows["y"]) % LABELS).reshape(2, -1)
        assert (shifts[0] != shifts[1]).mean() > 0.5  # each client's own draws
        again = population.random_labels(whole, share=1.0, keep=keep)
        np.testing.assert_array_equal(valid(again.train, 1)["y"], valid(made.train, 1)["y"])


def test_any_population(tmp_path):
    """The same poisoned rows from memory, a shared table, the disk, groups and size classes. Catches a wrapper that
    knows one kind of population, and draws that depend on padding."""
    order = RNG.permutation(TOTAL)
    table = {name: leaf[order] for name, leaf in ROWS.items()}
    population.write_store(tmp_path / "store", ROWS, OFFSETS)
    kinds = {
        "indexed": population.indexed(table, (np.argsort(order), OFFSETS)),
        "host": population.host_store(tmp_path / "store"),
        "capped": population.stored(ROWS, OFFSETS),
    }
    poison = {"clients": IDS, "rows": 0.5, "seed": 3}
    wanted = population.random_labels(data(), **poison).train
    for name, inner in kinds.items():
        made = population.random_labels(data(inner), **poison).train
        assert made.capacities == inner.capacities == (64, 70)
        read = jax.jit(lambda people, ids: jax.vmap(people.client)(ids))
        people = made.capped(64) if name == "capped" else made
        got = jax.device_get(read(people, people.announce(jnp.arange(len(SIZES)))))
        assert got.mask.shape[1] == (64 if name == "capped" else 70)
        for id in range(len(SIZES)):
            if SIZES[id] <= 64 or name != "capped":
                mask = np.asarray(got.mask[id])
                for leaf, values in valid(wanted, id).items():
                    np.testing.assert_array_equal(np.asarray(got.examples[leaf][id])[mask], values)
    outside = jax.device_get(client_of(wanted, np.int32(len(SIZES))))
    assert not outside.mask.any()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("poison", [population.label_flip, population.random_labels])
def test_too_few_rows_are_refused(poison, tmp_path):
    """Clients of 9 and 8 rows at most. A share of 1 / 32,768 of them is no row at either, by their keys, and 1 / 8 is.
    Catches attackers without poison, on the disk too; one of several with a row is enough."""
    small = [id for id in IDS if 0 < SIZES[id] <= 64]
    population.write_store(tmp_path / "store", ROWS, OFFSETS)
    for inner in (None, population.host_store(tmp_path / "store")):
        whole = data() if inner is None else data(inner)
        with refused("rows", rule="poisoned clients'"):
            poison(whole, clients=small, rows=2**-15)
        poison(whole, clients=small, rows=1 / 8)
        poison(whole, share=0.0, rows=2**-15)


def loss(params, examples, key):
    return (examples["x"] @ params - examples["y"]) ** 2


@pytest.mark.full
def test_unequal_clients_train_alike():
    """Bits of a run over a wrapper are those of the population with the poisoned rows written out, on one device and on
    two. Catches padding that reaches a gradient, and clients that are packed by other sizes than their own."""
    wrapped = population.label_flip(data(), clients=IDS).train
    written = {**ROWS, "y": np.concatenate([valid(wrapped, id)["y"] for id in range(len(SIZES))])}
    found = []
    for people, devices in ((wrapped, 1), (wrapped, 2), (population.stored(written, OFFSETS), 1)):
        work = {"num_epochs": 1, "batch_size": 4, "mesh": engine.device_mesh(devices)}
        algorithm = algorithms.fedavg(loss, sampling.full(len(SIZES)), optax.sgd(0.05), **work)
        state, _ = run(jax.random.key(0), algorithm, jnp.zeros(2), people, 3)
        found.append(np.asarray(algorithm.params(state)).tobytes())
    assert found[0] == found[1] == found[2]


def test_others_have_another_digest(tmp_path):
    """Catches a run that goes on with other attackers, another map, share of rows, seed or trigger unnoticed."""
    made = [
        data(),
        population.label_flip(data(), clients=[2]),
        population.label_flip(data(), clients=[3]),
        population.label_flip(data(), clients=[2], to=[1, 0, 2, 3, 4]),
        population.label_flip(data(), clients=[2], rows=0.5),
        population.label_flip(data(), clients=[2], seed=1),
        *(population.backdoor(data(), target=1, trigger=population.tag(0, v), clients=[2]) for v in (3.0, 4.0)),
        population.backdoor(data(), target=2, trigger=population.tag(0, 3.0), clients=[2]),
        population.backdoor(data(), target=2, trigger=population.tag(1, 3.0), clients=[2]),
        *(
            population.poisoned(
                data(), lambda key, d, f=f: {**d.examples, "y": f * d.examples["y"]}, f"y times {f}", clients=[2]
            )
            for f in (0, 2)
        ),
    ]
    assert len({digest(x) for x in made}) == len(made)
    for number, folder in enumerate("ab"):
        population.write_store(tmp_path / folder, {**ROWS, "x": ROWS["x"] + number}, OFFSETS)
        stored = data(population.host_store(tmp_path / folder))
        made.append(population.label_flip(stored, clients=[2]))
    assert len({digest(x) for x in made}) == len(made)


def test_weak_types_are_no_other_shape():
    """Catches the refusal of a change that selects among Python's numbers."""
    made = population.poisoned(
        data(), lambda key, d: {**d.examples, "x": jnp.where(d.examples["x"] > 0, 1.0, 0.0)}, "signs", clients=[2]
    )
    assert set(np.unique(valid(made.train, 2)["x"])) <= {0.0, 1.0}


def test_a_config_may_poison():
    """Catches wrappers that a config cannot name, in another order than the file's, or with a seed of their own."""
    small = ["data.name=digits", "data.num_clients=40", "sampler.cohort_size=10"]
    poison = ["data.label_flip.share=0.25", "data.random_labels.clients=[1, 2]"]
    made = Builder(load(None, [*small, *poison])).data()
    assert made.poisons == ("label flip at 10 of 40 clients", "random labels at 2 of 40 clients")
    settings = [[*small, *poison, f"seed={seed}", "data.seed=0"] for seed in (1, 2, 1)]
    seeds = [Builder(load(None, one)).data().train.inner for one in settings]
    ids = [x.poisoned_ids.tolist() for x in seeds]
    assert ids[0] == ids[2] != ids[1]
    for option, told in (
        ("share=1.5", r"data\.label_flip\.share: expected a number in \[0, 1\], got 1.5"),
        ("clients=[40]", r"data\.label_flip\.clients: expected ids in \[0, 40\)"),
        ("rows=0.5", r"data\.label_flip\.share: expected either clients or share"),
    ):
        with pytest.raises(ConfigError, match=told):
            build(load(None, [*small, f"data.label_flip.{option}"]))


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: population.label_flip(data().train, share=0.1), "data: expected a FederatedData"),
        (lambda: population.label_flip(data()), "share: expected either clients or share"),
        (lambda: population.label_flip(data(), clients=[1], share=0.1), "share: expected either clients or share"),
        (lambda: population.label_flip(data(), share=float("nan")), r"share: expected a number in \[0, 1\]"),
        (lambda: population.label_flip(data(), share=0.06), "share: expected 0, or one that poisons a client of 8"),
        (lambda: population.label_flip(data(), clients=[1, 1]), "clients: expected distinct ids"),
        (lambda: population.label_flip(data(), clients=[-1]), r"clients: expected ids in \[0, 8\)"),
        (lambda: population.label_flip(data(), clients=[]), r"clients: expected ids in \[0, 8\)"),
        (lambda: population.label_flip(data(), clients=[0.5]), r"clients: expected ids in \[0, 8\)"),
        (lambda: population.label_flip(data(), share=0.1, to=[0, 1]), "to: expected 5 labels"),
        (lambda: population.label_flip(data(), share=0.1, to=[0, 1, 2, 3, 4]), "to: expected a map that changes"),
        (lambda: population.label_flip(data(), share=0.1, to=[0, 1, 2, 3, 5]), r"to: expected an integer in \[0, 4\]"),
        (lambda: population.label_flip(data(), share=0.1, rows=0.0), r"rows: expected a number in \(0, 1\]"),
        (lambda: population.label_flip(population.mean_estimation(), share=0.1), "data: expected a task"),
        (lambda: population.random_labels(data(), share=0.1, keep=1), "keep: expected True or False"),
        (lambda: population.label_offset(data(), offset=1.0, share=0.1), 'data: expected the task "regression"'),
        (lambda: population.poisoned(data(), lambda key, d: d.mask, "x", share=0.1), "change: expected a function"),
        (
            lambda: population.label_flip(population.logistic_teacher(num_clients=2**31 - 1), share=0.5),
            r"number of poisoned clients: expected an integer in \[0, 16777216\]",
        ),
        (
            lambda: population.with_local_test(population.label_flip(data(), share=0.5)),
            "data: expected a data set that is not poisoned",
        ),
    ],
)
def test_wrong_input(call, told):
    """Catches an error from deep inside, or a plausible run of something else."""
    with pytest.raises((TypeError, ValueError), match=told):
        call()


def test_whole_targets_take_whole_offsets():
    """Catches half a unit that is cut to zero: clients that count as poisoned and are not."""
    clean = data()._replace(task="regression", num_outputs=1)
    with refused("offset", value=0.5, rule="int32"):
        population.label_offset(clean, offset=0.5, clients=[2])
    moved = population.label_offset(clean, offset=2.0, clients=[2])
    before, after = (made.train.client(jnp.int32(2)) for made in (clean, moved))
    assert np.array_equal(after.examples["y"][after.mask], before.examples["y"][before.mask] + 2)
