"""Stored, Indexed, Generated and Grouped populations against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import population as field
from fedjax_sim.types import ClientData, Population

OFFSETS = np.array([0, 3, 3, 7, 8, 12])  # client 1 holds nothing
ROWS = {"x": np.arange(24, dtype=np.float32).reshape(12, 2), "y": np.arange(12, dtype=np.uint8)}


@pytest.fixture(scope="module")
def ragged():
    return field.stored(ROWS, OFFSETS)


@jax.jit
def read(population, ids):
    return jax.vmap(population.client)(ids)


def assert_same_clients(a, b, ids):
    a, b = read(a, ids), read(b, ids)
    np.testing.assert_array_equal(a.mask, b.mask)
    for x, y in zip(jax.tree.leaves(a.examples), jax.tree.leaves(b.examples), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x)[np.asarray(a.mask)], np.asarray(y)[np.asarray(a.mask)])


def test_ragged_client_matches_numpy(ragged):
    """Catches an offset off by one, a mask of the wrong length, and rows out of order."""
    data = read(ragged, jnp.array([4, 1, 0, 2, 3, 4]))
    for slot, i in enumerate([4, 1, 0, 2, 3, 4]):
        own = np.asarray(data.mask[slot])
        assert own.tolist() == [r < OFFSETS[i + 1] - OFFSETS[i] for r in range(4)]
        for name, x in data.examples.items():
            np.testing.assert_array_equal(np.asarray(x[slot])[own], ROWS[name][OFFSETS[i] : OFFSETS[i + 1]])
    assert isinstance(ragged, Population) and ragged.size == 5 and ragged.max_examples == 4
    np.testing.assert_array_equal(ragged.sizes, np.diff(OFFSETS))
    assert data.examples["y"].dtype == jnp.uint8  # images stay bytes


def everybody(ragged):
    table = field.indexed(ROWS, (np.arange(12), OFFSETS))
    made = field.generated(5, lambda p, id: ClientData({"x": p + id}, jnp.ones(2, bool)), jnp.zeros(2))
    return [ragged, table, made, field.grouped(ragged, [0, 1, 0, 1, 0])]


def test_an_unknown_id_is_nobody(ragged):
    """Catches JAX's silent clamping: id N (or -1) must not return another client's data."""
    for population in everybody(ragged):
        outside = jnp.array([population.size, -1, 2**31 - 1])
        assert not read(population, outside).mask.any(), type(population)


def test_garbage_in_padding_is_masked():
    """Catches a mask that is too long: rows of other clients hold NaN here."""
    x = np.ones((4, 1), np.float32)
    population = field.stored({"x": x}, [0, 1, 4])
    poisoned = jnp.array([[1.0], [jnp.nan], [jnp.nan], [jnp.nan]])
    data = field.Stored({"x": poisoned}, population.offsets, 3, 2).client(jnp.int32(0))
    assert data.mask.tolist() == [True, False, False] and bool(jnp.isnan(data.examples["x"][1:]).any())
    assert float(jnp.where(data.mask[:, None], data.examples["x"], 0).sum()) == 1


def test_stored_copies_what_it_is_given():
    """Catches device_put's aliasing of a writable NumPy buffer on CPU."""
    x = np.zeros((1024, 16), np.float32)
    population = field.stored({"x": x}, [0, 1024])
    x[:] = 7
    assert not population.examples["x"].any()


def test_from_clients_equals_stored(ragged):
    clients = [jax.tree.map(lambda x, i=i: x[OFFSETS[i] : OFFSETS[i + 1]], ROWS) for i in range(5)]
    assert_same_clients(field.from_clients(clients), ragged, jnp.arange(5))


def test_indexed_equals_stored_of_gathered_rows():
    """Catches indices applied before offsets, and a table row clipped away."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 12, 12)
    population = field.indexed(ROWS, field.Partition(indices, OFFSETS))
    assert_same_clients(population, field.stored({k: v[indices] for k, v in ROWS.items()}, OFFSETS), jnp.arange(5))


def _draw(parameters, id):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(0), id), (3,)) + parameters
    return ClientData({"x": x}, jnp.arange(3) <= id % 3)


def test_generated_billion_clients():
    """Catches anything that allocates per client: N = 10^9 must read its last client at once."""
    population = field.generated(10**9, _draw, jnp.float32(1))
    ids = jnp.array([0, 7, 10**9 - 1])
    assert population.max_examples == 3 and read(population, ids).mask.sum(axis=1).tolist() == [1, 2, 1]
    assert len(jax.tree.leaves(population)) == 1  # parameters are data, the rest is static
    with pytest.raises(ValueError, match="size: expected an integer"):
        _ = population.sizes
    assert field.generated(4, _draw, jnp.float32(0)).sizes.tolist() == [1, 2, 3, 1]


def test_a_population_is_an_argument_not_a_constant(ragged):
    """Catches arrays baked into the program: another population of the same shape must not compile again."""
    traces = []

    @jax.jit
    def first(population):
        traces.append(1)
        return population.client(jnp.int32(0)).examples["x"]

    other = field.stored({**ROWS, "x": ROWS["x"] + 1}, OFFSETS)
    np.testing.assert_array_equal(first(ragged) + 1, first(other))
    assert len(traces) == 1


def test_pooled_is_the_concatenation(ragged):
    """Catches padding that leaks into the centralised view."""
    for population in (ragged, field.indexed(ROWS, (np.arange(12), OFFSETS))):
        data = field.pooled(population)
        assert data.mask.all() and data.mask.shape == (12,)
        jax.tree.map(np.testing.assert_array_equal, data.examples, ROWS)
    with pytest.raises(MemoryError, match="Raise limit_bytes"):
        field.pooled(ragged, limit_bytes=10)


GROUPS = np.array([1, 0, 1, 2, 1])


def test_grouped_loses_and_duplicates_nothing(ragged):
    """Catches a member in two groups, a lost one, and one taken from the next group's row."""
    groups = field.grouped(ragged, GROUPS)
    assert groups.size == 3 and groups.group_size == 3 and groups.counts.tolist() == [1, 3, 1]
    seen = []
    for g in range(3):
        group = groups.group(g)
        assert isinstance(group, Population) and group.size == 3
        members = read(group, jnp.arange(3))
        mine = np.flatnonzero(g == GROUPS)
        sizes = np.pad(np.diff(OFFSETS)[mine], (0, 3 - len(mine)))
        assert members.mask.sum(axis=1).tolist() == sizes.tolist() == group.sizes.tolist()
        together = read(groups, jnp.array([g]))
        rows = np.asarray(together.examples["y"])[np.asarray(together.mask)]
        np.testing.assert_array_equal(rows, np.concatenate([np.arange(OFFSETS[i], OFFSETS[i + 1]) for i in mine]))
        seen += rows.tolist()
    assert sorted(seen) == list(range(12))
    assert groups.sizes.tolist() == [0, 11, 1]
    assert sorted(field.pooled(groups).examples["y"].tolist()) == list(range(12))


def test_groups_can_be_vmapped(ragged):
    """Catches a group whose shape depends on its id."""
    groups = field.grouped(ragged, GROUPS)

    @jax.jit
    def total(groups):
        def one(g):
            group = groups.group(g)
            data = jax.vmap(group.client)(jnp.arange(group.size))
            return jnp.where(data.mask, data.examples["y"].astype(jnp.int32), 0).sum()

        return jax.vmap(one)(jnp.arange(groups.size))

    assert total(groups).tolist() == [0, sum(range(12)) - 7, 7]  # client 3 holds row 7


NAN = {"x": np.array([1.0, np.nan])}
BAD = [
    (lambda: field.stored({"x": np.zeros(3), "y": np.zeros(2)}, [0, 3]), "leaves of one length"),
    (lambda: field.stored(NAN, [0, 2]), r"examples\['x'\]: expected finite features"),
    (lambda: field.stored({"x": np.zeros(3)}, [0, 2, 1, 3]), "a fall after client 1"),
    (lambda: field.stored({"x": np.zeros(3)}, [0, 2]), "positions from 0 to 3, got '0 to 2'"),
    (lambda: field.stored({"x": np.zeros(3)}, [0]), r"N \+ 1 >= 2 positions"),
    (lambda: field.stored({"x": np.zeros(3)}, [0.0, 3.0]), "1-D integer array"),
    (lambda: field.stored({"x": np.zeros((0, 2))}, [0, 0]), "an example at least"),
    (lambda: field.stored({}, [0, 1]), "a pytree of arrays"),
    (lambda: field.stored({"x": np.float32(1)}, [0, 1]), "first axis counts examples"),
    (lambda: field.stored({"y": np.array([2**40])}, [0, 1]), "integers that fit int32"),
    (lambda: field.stored({"x": np.array([1e300])}, [0, 1]), "values that fit float32"),
    (lambda: field.stored({"x": np.array(["a"])}, [0, 1]), "an array of bool, integer or float"),
    (lambda: field.from_clients([]), "a client at least"),
    (lambda: field.from_clients([{"x": np.zeros(1)}, {"z": np.zeros(1)}]), r"clients\[1\]: expected the structure"),
    (
        lambda: field.from_clients([{"x": np.zeros((1, 2))}, {"x": np.zeros((1, 3))}]),
        r"clients\[1\]: expected examples",
    ),
    (lambda: field.indexed(ROWS, (np.array([12]), np.array([0, 1]))), r"rows in \[0, 12\)"),
    (lambda: field.indexed(ROWS, (np.array([-1]), np.array([0, 1]))), r"rows in \[0, 12\)"),
    (lambda: field.generated(0, _draw, 0.0), "size: expected an integer"),
    (lambda: field.generated(True, _draw, 0.0), "size: expected an integer"),
    (lambda: field.generated(2**31, _draw, 0.0), "size: expected an integer"),
    (lambda: field.generated(3, lambda p, i: i), "ClientData"),
    (lambda: field.generated(3, lambda p, i: p["a"]), "a traceable"),
    (lambda: field.generated(3, lambda p, i: ClientData(jnp.ones(2), jnp.ones(3, bool))), "leaves of 3 rows"),
    (lambda: field.grouped(field.stored(ROWS, OFFSETS), [0, 1]), "5 integers, one per client"),
    (lambda: field.grouped(field.stored(ROWS, OFFSETS), [0, 0, 2, 2, 2]), "none in group 1"),
    (lambda: field.grouped(field.stored(ROWS, OFFSETS), [0, 0, -1, 0, 0]), "groups in"),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_bad_input_is_refused(build, message):
    """Catches wrong data on which clients would train without an error."""
    with pytest.raises((ValueError, TypeError), match=message):
        build()
