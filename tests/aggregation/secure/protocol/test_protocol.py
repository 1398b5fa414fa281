"""Secure aggregation with real cryptography: the same integers as the plain sum and as the simulated one, or none."""

from __future__ import annotations

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import InvalidType
from fedjax_sim.aggregation.secure.cost import secure_sum_cost
from fedjax_sim.aggregation.secure.masks import Stages, circle, is_aborted, masked, unmasked
from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.protocol.parties import Asked, Client, Refused
from fedjax_sim.aggregation.secure.protocol.protocol import client_down_bytes, client_up_bytes, run_secure_sum
from fedjax_sim.aggregation.secure.ring import Ring
from tests.refusals import refused

pytest.importorskip("cryptography", reason="the extra `secagg` is not installed")
RINGS = [Ring(9), Ring(20), Ring(32), Ring(40), Ring(64), Ring(31, prime=True)]
RNG = np.random.default_rng(0)


def plain(ring, messages, uploaded):
    """The sum of those who uploaded in Python's integers, lifted."""
    q = ring.modulus
    return [(sum(int(x) for x in column) + q // 2) % q - q // 2 for column in messages[uploaded].T]


def stages(left):
    """`Stages` of clients that leave before step `left` (0 to 4; 4 = stay), and who advertises."""
    left = np.asarray(left)
    return Stages(left > 1, left > 2, left > 3), left > 0


def check(run, ring, messages, graph, steps, *, threshold, least):
    """The plain sum, or an abort in the cases of `is_aborted`."""
    aborted = bool(is_aborted(graph, Stages(*map(jnp.asarray, steps)), threshold, least))
    assert run.aborted == aborted and (run.sum is None) == aborted
    if not aborted:
        assert run.sum.tolist() == plain(ring, messages, np.asarray(steps.uploaded))
    assert not run.masked[~np.asarray(steps.uploaded)].any()
    return aborted


@pytest.mark.full
def test_every_dropout_at_every_step():
    """Four clients, each leaving before any of four steps or staying: all 625 cases of the complete graph.

    Catches a mask of a client that left and stays in the sum, an abort that is none, and a sum without enough shares.
    """
    ring, messages = Ring(32), RNG.integers(-(2**31), 2**31, (4, 2))
    graph, aborted = circle(None, 4, None), 0
    for i, left in enumerate(itertools.product(range(5), repeat=4)):
        steps, advertised = stages(left)
        run = run_secure_sum(messages, ring, 2, stages=steps, advertised=advertised, min_messages=1, seed=i)
        aborted += check(run, ring, messages, graph, steps, threshold=2, least=1)
    assert 100 < aborted < 525


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_the_sum_is_exact(ring):
    """5 and 12 clients of complete graphs and circles, in every ring; those who are left, or an abort.

    Catches signs that differ between the two ends of a pair, and shares at another point than their holder's.
    """
    outcomes = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        number, neighbours = (5, 12)[seed % 2], [None, 2, 4][seed % 3]
        threshold = int(rng.integers(1 if neighbours is None else neighbours // 2 + 1, (neighbours or number) + 1))
        messages = rng.integers(-(2**63), 2**63 - 1, (number, 3))
        graph = circle(jax.random.key(seed), number, neighbours)
        steps, advertised = stages(rng.choice(5, number, p=[0.03, 0.05, 0.07, 0.05, 0.8]))
        options = {"graph": graph, "stages": steps, "advertised": advertised, "seed": seed}
        run = run_secure_sum(messages, ring, threshold, **options)
        outcomes.add(check(run, ring, messages, graph, steps, threshold=threshold, least=threshold))
    assert outcomes == {False, True}


@pytest.mark.full
@pytest.mark.parametrize("ring, neighbours", [(Ring(20), None), (Ring(64), 6), (Ring(31, prime=True), 6)], ids=str)
def test_it_ends_as_the_simulated_one(ring, neighbours):
    """The integers of masks drawn in JAX, shared by its shares and taken off, for the same graph and stages."""
    key, messages = jax.random.key(7), RNG.integers(-(2**30), 2**30, (10, 3)).astype(np.int32)
    graph, slots = circle(key, 10, neighbours), jnp.arange(10)
    steps, _ = stages([4, 2, 4, 3, 4, 4, 4, 4, 1, 4])
    sent = masked(ring, key, graph, jnp.asarray(messages), shared=jnp.asarray(steps.shared), slots=slots)
    words = [np.asarray(sent[:, i], np.uint64).astype(object) for i in range(ring.words)]
    total = sum((x << 32 * i) * steps.uploaded[:, None] for i, x in enumerate(words)).sum(0) % ring.modulus
    sums = jnp.stack([jnp.asarray((total >> 32 * i & 0xFFFFFFFF).astype(np.uint32)) for i in range(ring.words)])
    opened = unmasked(ring, key, graph, Stages(*map(jnp.asarray, steps)), sums, threshold=4)
    number = sum(np.asarray(x, np.uint64).astype(object) << 32 * i for i, x in enumerate(opened))
    run = run_secure_sum(messages, ring, 4, graph=graph, stages=steps, seed=1)
    assert [int(x) % ring.modulus for x in run.sum] == list(number)
    assert run.sum.tolist() == plain(ring, messages, steps.uploaded)


@pytest.mark.slow
def test_hundreds_of_clients():
    """200 on a circle with 30 neighbours, and 120 with each other; a tenth leave at each step."""
    for number, neighbours, threshold in ((200, 30, 16), (120, None, 60)):
        messages = RNG.integers(-(2**40), 2**40, (number, 1000))
        graph = circle(jax.random.key(0), number, neighbours)
        steps, advertised = stages(RNG.choice(5, number, p=[0.03, 0.05, 0.06, 0.06, 0.8]))
        run = run_secure_sum(messages, Ring(64), threshold, graph=graph, stages=steps, advertised=advertised)
        assert not check(run, Ring(64), messages, graph, steps, threshold=threshold, least=threshold)


def test_an_abort_holds_no_number():
    """Too few messages: nothing is asked. Too few answers: no sum. Catches a partial sum."""
    messages = np.full((5, 2), 7)
    steps, _ = stages([4, 4, 4, 2, 2])
    run = run_secure_sum(messages, Ring(32), 2, stages=steps, min_messages=4, seed=0)
    assert run.sum is None and run.aborted and not run.server_bytes[:, 3].any() and not run.client_bytes[:, 3].any()
    steps, _ = stages([4, 3, 3, 3, 3])
    run = run_secure_sum(messages, Ring(32), 2, stages=steps, seed=0)
    assert run.sum is None and run.aborted and run.client_bytes[0, 3] > 0


def test_masked_messages_are_uniform():
    """What the server gets of equal messages: chi-square of bytes, p > 1e-5; another seed, other bits; messages apart
    by a constant are sent apart by it. Catches a message that is sent as it is.
    """
    messages = np.full((6, 4000), 3)
    run, other = (run_secure_sum(messages, Ring(32), 3, seed=seed).masked for seed in (0, 1))
    for shift in (0, 12, 24):
        for row in run >> np.uint64(shift) & np.uint64(255):
            assert stats.chisquare(np.bincount(row.astype(int), minlength=256)).pvalue > 1e-5
    assert ((run != other).mean(1) > 0.99).all()
    np.testing.assert_array_equal((run_secure_sum(messages + 5, Ring(32), 3, seed=0).masked - run) % 2**32, 5)
    assert len(np.unique(run_secure_sum(messages, Ring(32), 3).masked)) > 20_000  # of the system's randomness


def trio():
    """Three clients of a complete graph after their uploads, and what each was sealed."""
    clients = [Client(u, Ring(32), 2, keeps_share=True, seed=bytes([u]) * 32) for u in range(3)]
    keys = {u: client.advertise() for u, client in enumerate(clients)}
    sealed = {u: clients[u].share({v: keys[v] for v in keys if v != u}) for u in keys}
    for u, client in enumerate(clients):
        client.upload({v: sealed[v][u] for v in keys if v != u}, np.zeros(1, np.int64))
    return clients, keys


def test_never_both_secrets():
    """Both at once, one after the other, or its own key: refused. Catches a client whose message could be unmasked."""
    everyone, nobody = frozenset(range(3)), frozenset()
    clients, _ = trio()
    for asked, match in (
        (Asked(everyone, frozenset([2])), r"both secrets of \[2\]"),
        (Asked(frozenset([1, 2]), frozenset([0])), "its masking key stays closed"),
        (Asked(everyone | {3}, nobody), r"no shares of \[3\]"),
    ):
        with pytest.raises(Refused, match=match):
            clients[0].answer(asked)
    first = Asked(frozenset([0, 1]), frozenset([2]))
    found = clients[0].answer(first)
    assert found == clients[0].answer(first) and set(found.seeds) == {0, 1} and set(found.keys) == {2}
    with pytest.raises(Refused, match="answered another request before"):
        clients[0].answer(Asked(everyone, nobody))


def test_the_server_opens_what_is_asked_and_nothing_else():
    """Two shares of a key open the key whose public half was advertised; one opens nothing.

    Catches shares of the wrong secret.
    """
    clients, keys = trio()
    asked = Asked(frozenset([0, 1]), frozenset([2]))
    held = {u: clients[u].answer(asked).keys[2] for u in (0, 1)}
    assert crypto.public_key(crypto.private_key(crypto.opened_secret(held, 2))) == keys[2].masking
    with pytest.raises(ValueError, match="at least 2 shares"):
        crypto.opened_secret({0: held[0]}, 2)


@pytest.mark.parametrize("neighbours", [None, 6])
@pytest.mark.parametrize("ring", [Ring(20), Ring(64), Ring(31, prime=True)], ids=str)
def test_bytes(ring, neighbours):
    """Each party's bytes, against the formula of the paper with a seal of 16 bytes for a pair of shares and shares of
    33: no byte is without a cause. Catches keys that are counted once, or a message of whole words.
    """
    number, size = 9, 37
    graph = circle(jax.random.key(0), number, neighbours)
    run = run_secure_sum(np.ones((number, size), int), ring, 4, graph=graph, seed=0)
    cost = secure_sum_cost(number, size, ring.bits, neighbours=neighbours)
    others, held = (8, 9) if neighbours is None else (6, 6)
    up, down = run.client_bytes.sum(1), run.server_bytes.sum(1)
    seal = crypto.SEAL_BYTES + 2 * (crypto.SHARE_BYTES - 32)
    assert (up == client_up_bytes(others, neighbours is None, size, ring)).all()
    assert (down == client_down_bytes(number, neighbours)).all()
    assert (up == others * seal + held + -(-cost.client_up_bits // 8)).all()
    assert (down == others * seal + -(-held // 8) + cost.client_down_bits // 8).all()
    steps, advertised = stages([0, 1, 2, 3, 4, 4, 4, 4, 4])
    left = run_secure_sum(np.ones((number, size), int), ring, 2, stages=steps, advertised=advertised, seed=0)
    assert not left.aborted and ((left.client_bytes > 0).sum(1).tolist()) == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert ((left.server_bytes[:, :3] > 0).sum(1).tolist()) == [0, 1, 2, 2, 2, 2, 2, 2, 2]


def test_wrong_input_is_refused():
    """Catches floats whose fractions are lost, and clients that come back."""
    ones, ring = np.ones((4, 2), int), Ring(32)
    with refused("messages", value="float64[4, 2]", rule="int64", kind=InvalidType):
        run_secure_sum(np.ones((4, 2)), ring, 2)
    steps, _ = stages([4, 4, 4, 4])
    for match, call in {
        r"threshold: expected an integer in \[1, 4\], got 5": lambda: run_secure_sum(ones, ring, 5),
        r"threshold: expected an integer in \[1, 2\], got 3": lambda: run_secure_sum(
            ones, ring, 3, graph=circle(jax.random.key(0), 4, 2)
        ),
        "min_messages: expected": lambda: run_secure_sum(ones, ring, 2, min_messages=0),
        "seed: expected an integer": lambda: run_secure_sum(ones, ring, 2, seed=-1),
        "stages: expected flags for each of 4 clients": lambda: run_secure_sum(
            ones, ring, 2, graph=circle(jax.random.key(0), 5, 2)
        ),
        "stages: expected each step within the one before": lambda: run_secure_sum(
            ones, ring, 2, stages=steps, advertised=np.arange(4) > 0
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_without_the_extra(monkeypatch):
    """The error says what to install. Catches an ImportError from deep inside."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ImportError, match=r"cryptography: .*'fedjax_sim\[secagg\]'"):
        run_secure_sum(np.ones((4, 2), int), Ring(32), 2)
