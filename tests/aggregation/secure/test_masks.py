"""Masks of secure aggregation: they cancel, they hide, and holders of shares are those of the graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim.aggregation import modular_sum, real_secure_sum, secure_sum
from fedjax_sim.aggregation.secure.masks import Stages, circle, is_aborted, masked, secrets
from fedjax_sim.aggregation.secure.protocol.protocol import run_secure_sum
from fedjax_sim.aggregation.secure.ring import Ring
from fedjax_sim.types import Cohort, Round
from tests.refusals import refused

RINGS = [Ring(8), Ring(32), Ring(45), Ring(31, prime=True)]


def total(ring, x):
    """The ring's sum of elements [m, words, ...]."""
    return jnp.stack(ring.total(tuple(jnp.moveaxis(x, 1, 0))))


@pytest.mark.default_rows("9", "5")
@pytest.mark.parametrize(("size", "neighbours"), [(7, None), (9, 4), (5, 4), (8, 2)])
def test_holders_are_counted(size, neighbours):
    """Against the edges themselves. Catches windows off by one, and edges that only one of the two knows."""
    graph = circle(jax.random.key(size), size, neighbours)
    slots = jnp.arange(size)
    edges = np.zeros((size, size), int)
    for distance in graph.distances:
        edges[np.arange(size), np.asarray(graph.others(slots, jnp.int32(distance)))] += 1
    assert (edges == edges.T).all() and edges.max() == 1
    assert (edges.sum(1) == (size if neighbours is None else neighbours)).all()
    assert np.diag(edges).all() == (neighbours is None)
    flags = np.random.default_rng(0).random((50, size)) < 0.5
    found = jax.vmap(graph.holders)(jnp.asarray(flags))
    assert (np.asarray(found) == flags @ edges).all()


@pytest.mark.full
def test_empty_slots_are_not_on_the_circle():
    """Each invited client holds the shares of the same clients as on the circle of the invited alone; counts too.

    Catches neighbours that are empty slots, and windows that run past the last invited slot.
    """
    ids = np.random.default_rng(0).permutation(40)[:13].astype(np.int32)
    for seed, number in ((0, 5), (1, 8), (2, 13)):
        here = np.sort(np.random.default_rng(seed).permutation(13)[:number])
        invited = jnp.zeros(13, bool).at[here].set(True)
        whole = circle(jax.random.key(seed), 13, 4, Round(Cohort(jnp.asarray(ids), invited, invited)))
        few = Cohort(jnp.asarray(ids[here]), *[jnp.ones(number, bool)] * 2)
        alone = circle(jax.random.key(seed), number, 4, Round(few))
        around = [ids[whole.others(here, jnp.int32(x))] for x in whole.distances]
        expected = [ids[here][alone.others(np.arange(number), jnp.int32(x))] for x in alone.distances]
        np.testing.assert_array_equal(around, expected)
        flags = np.random.default_rng(9).random((20, number)) < 0.5
        spread = np.zeros((20, 13), bool)
        spread[:, here] = flags
        found = jax.vmap(whole.holders)(jnp.asarray(spread))[:, here]
        np.testing.assert_array_equal(found, jax.vmap(alone.holders)(jnp.asarray(flags)))
        assert not whole.too_small and not alone.too_small
    for number in range(5):
        invited = jnp.arange(13) < number
        graph = circle(jax.random.key(0), 13, 4, Round(Cohort(jnp.asarray(ids), invited, invited)))
        assert graph.too_small


def test_random_circles_differ():
    """Catches neighbours that are always the next slots."""
    first, second = (circle(jax.random.key(seed), 30, 2).order.tolist() for seed in (0, 1))
    assert first != second and sorted(first) == list(range(30))
    graph = circle(jax.random.key(0), 3001, 4)
    assert sorted(graph.order.tolist()) == list(range(3001))
    assert (graph.order[graph.place] == jnp.arange(3001)).all()
    steps = np.diff(np.asarray(graph.order))  # of a random order: |i - j| of two slots is m / 3 on average
    assert abs(np.abs(steps).mean() / 3001 - 1 / 3) < 4.5 * np.sqrt(1 / 18 / 3000)


@pytest.mark.full
@pytest.mark.parametrize("neighbours", [None, 4])
@pytest.mark.parametrize("ring", RINGS)
def test_masks_of_pairs_cancel(ring, neighbours):
    """Messages of zero: the sum is that of the own masks, whoever shared. Catches a pair whose two masks differ, one
    counted twice (T18), and one with a client that is not there."""
    key, slots = jax.random.key(1), jnp.arange(7)
    graph, zeros = circle(key, 7, neighbours), jnp.zeros((7, 3), jnp.int32)
    send = jax.jit(lambda shared: masked(ring, key, graph, {"w": zeros}, shared=shared, slots=slots)["w"])
    own = send(jnp.zeros(7, bool))  # nobody to share with: own masks alone
    for there in (range(7), (0, 2, 3, 4, 6)):
        here = jnp.array(list(there))
        found = send(jnp.zeros(7, bool).at[here].set(True))
        assert (total(ring, found[here]) == total(ring, own[here])).all()
        assert not (found[here] == own[here]).all()


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("ring", RINGS)
def test_masked_messages_are_uniform(ring):
    """Chi-square over 16 cells, 6,000 rounds of a constant message, one false alarm in 10^5; and no correlation between
    two clients (16 cells of pairs). Catches a mask that a message shines through, and masks used twice."""
    message = jnp.full((3, 1), 3, jnp.int32)

    @jax.jit
    @jax.vmap
    def view(key):
        graph = circle(key, 3, None)
        return masked(ring, key, graph, message, shared=jnp.ones(3, bool), slots=jnp.arange(3))[:, :, 0]

    seen = np.asarray(view(jax.random.split(jax.random.key(5), 6000))).astype(object)
    numbers = sum(seen[..., i] << 32 * i for i in range(ring.words))
    cells = (numbers * 16 // ring.modulus).astype(int)
    for u in range(3):
        counts = np.bincount(cells[:, u], minlength=16)
        assert ((counts - 375) ** 2 / 375).sum() < 55
    pairs = np.bincount(cells[:, 0] // 4 * 4 + cells[:, 1] // 4, minlength=16)
    assert ((pairs - 375) ** 2 / 375).sum() < 55


@pytest.mark.full
def test_equal_sums_look_alike():
    """All that the server holds when nobody leaves: masked messages less the own masks that it may open, in a ring of
    four elements. The 16 pairs that the sum allows are equally likely under two inputs with that sum, and no other
    triple is seen. Chi-square, one false alarm in 10^5 each. Catches masks of pairs that do not hide one message from
    another."""
    ring = Ring(2)
    for messages in ([0, 0, 3], [1, 1, 1]):

        @jax.jit
        @jax.vmap
        def view(key, messages=messages):
            numbers = jnp.array(messages, jnp.int32)[:, None]
            graph, slots = circle(key, 3, None), jnp.arange(3)
            sent = masked(ring, key, graph, numbers, shared=jnp.ones(3, bool), slots=slots)
            own = masked(ring, key, graph, jnp.zeros_like(numbers), shared=jnp.zeros(3, bool), slots=slots)
            return (sent - own)[:, 0, 0] & 3

        seen = np.asarray(view(jax.random.split(jax.random.key(11), 8000))).astype(int)
        assert (seen.sum(1) % 4 == 3).all()
        counts = np.bincount(seen[:, 0] * 4 + seen[:, 1], minlength=16)
        assert ((counts - 500) ** 2 / 500).sum() < 55


def test_secrets_are_in_the_field():
    """Catches the exponent 0, with which all agree on the seed 1."""
    own, exponents = (np.asarray(x) for x in secrets(jax.random.key(0), 5000))
    assert own.max() < 2**31 - 1 and exponents.min() >= 1 and exponents.max() < 2**31 - 2
    assert len(set(own.tolist()) | set(exponents.tolist())) > 9990


def sums_that_open(graph, stages: Stages) -> int:
    """The dimension of what the server can take all masks off: combinations of masked messages that hold no mask which
    it does not know. It knows the own masks of those who uploaded, and each mask of a pair in which one left after it
    shared; the masks of pairs that both uploaded stay closed."""
    uploaded = np.flatnonzero(stages.uploaded)
    pairs = {
        tuple(sorted((int(u), int(graph.others(u, jnp.int32(distance))))))
        for u in uploaded
        for distance in graph.distances
    }
    closed = [pair for pair in sorted(pairs) if pair[0] != pair[1] and stages.uploaded[list(pair)].all()]
    masks = np.zeros((len(closed), len(stages.uploaded)))
    for row, (u, v) in zip(masks, closed, strict=True):
        row[u], row[v] = 1, -1
    return len(uploaded) - int(np.linalg.matrix_rank(masks[:, uploaded])) if closed else len(uploaded)


@pytest.mark.full
@pytest.mark.parametrize("neighbours", [2, 4, pytest.param(6, marks=pytest.mark.full)])
def test_the_server_can_open_one_sum_only(neighbours):
    """By rank, over random ways to leave and over two arcs that leave: where the round opens, one sum does.

    Catches a threshold of half of the neighbours or less, with which clients that leave cut the circle into parts: it
    is refused, and some of the same draws open several sums.
    """
    size, draws, half = 16, 2_000, neighbours // 2
    graph = circle(jax.random.key(neighbours), size, neighbours)
    rng = np.random.default_rng(neighbours)
    last = rng.choice(5, (draws, size), p=[0.05, 0.05, 0.2, 0.05, 0.65])
    last[-1] = 4  # with two neighbours a round opens where nobody leaves
    for row in last[: draws // 2]:
        first = rng.integers(0, size, 2)
        row[:] = 4
        row[np.asarray(graph.order)[np.add.outer(first, np.arange(half)) % size]] = 2
    opens = jax.jit(jax.vmap(lambda x, t: ~is_aborted(graph, Stages(x > 1, x > 2, x > 3), t, 1), in_axes=(0, None)))
    parts = {}
    for threshold in range(half, neighbours + 1):
        opened = last[np.asarray(opens(last, threshold))][:60]
        parts[threshold] = [sums_that_open(graph, Stages(x > 1, x > 2, x > 3)) for x in opened]
    assert parts[half + 1] and all(set(parts[threshold]) <= {1} for threshold in range(half + 1, neighbours + 1))
    assert max(parts[half]) > 1
    for make in (secure_sum, real_secure_sum):
        with refused("threshold", value=half, rule=f"half of the {neighbours} neighbours"):
            make(modular_sum(1.0), half, neighbours=neighbours)
    with refused("threshold", value=half, rule=f"half of the {neighbours} neighbours"):
        run_secure_sum(np.ones((size, 1), int), Ring(20), half, graph=graph, seed=0)
