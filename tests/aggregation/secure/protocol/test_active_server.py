"""Secure aggregation against a server that lies: about keys, and about who uploaded; what it costs to catch it."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from fedjax_sim.aggregation import modular_sum, secure_sum
from fedjax_sim.aggregation.secure.cost import secure_sum_cost
from fedjax_sim.aggregation.secure.masks import Stages, circle
from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.protocol.parties import Asked, Client, Inconsistent, Known, Refused, Signed
from fedjax_sim.aggregation.secure.protocol.protocol import client_down_bytes, client_up_bytes, run_secure_sum
from fedjax_sim.aggregation.secure.ring import Ring
from tests.refusals import refused

pytest.importorskip("cryptography", reason="the extra `secagg` is not installed")
RING = Ring(32)


def cohort(number, threshold, trusting=False, around=None):
    """Clients who have all uploaded, each with a share of all secrets (or its neighbours'), and their public keys."""
    keeps, around = around is None, around or {u: [v for v in range(number) if v != u] for u in range(number)}
    known = None if trusting else Known(around, {})
    clients = [
        Client(u, RING, threshold, keeps_share=keeps, seed=bytes([u + 1]) * 32, known=known) for u in range(number)
    ]
    if known:
        known.identities.update({u: client.identity for u, client in enumerate(clients)})
    keys = {u: client.advertise() for u, client in enumerate(clients)}
    sealed = {u: clients[u].share({v: keys[v] for v in around[u]}) for u in keys}
    for u, client in enumerate(clients):
        client.upload({v: sealed[v][u] for v in around[u]}, np.zeros(1, np.int64))
    return clients, keys


def told(number, *left):
    """What the server asks for if it says that all but these uploaded."""
    return Asked(frozenset(range(number)) - set(left), frozenset(left))


def answers(clients, lies, colluding):
    """(holders who hand out a share of each client's seed, of its key, what those who answered were told) where the
    server tells client u `lies[u]`. The last clients collude: they sign whatever helps, and hand out all shares."""
    honest, number = range(len(clients) - colluding), len(clients)
    seeds, keys, heard = np.full(number, colluding), np.full(number, colluding), set()
    words = {}
    for u in honest:
        clients[u]._asked = None
        try:
            words[u] = Signed(lies[u], clients[u].sign(lies[u])) if clients[u].known else None
        except Refused:  # too few uploads, at the largest threshold
            continue
    for u in honest:
        bought = (
            {}
            if clients[u].known is None
            else {
                v: Signed(lies[u], crypto.sign(clients[v]._signing, "asked", lies[u].written(v)))
                for v in range(len(honest), number)
            }
        )
        try:
            found = clients[u].answer(lies[u], words | bought)
        except Inconsistent:
            continue
        seeds[list(found.seeds)] += 1
        keys[list(found.keys)] += 1
        heard.add(lies[u])
    return seeds, keys, heard


@pytest.mark.default_rows(4)
@pytest.mark.parametrize("trusting", [False, True], ids=["signed", "trusting"])
@pytest.mark.parametrize("number, colluding", [(4, 0), (5, 0), (5, 1), (6, 1), (5, 2)])
def test_lies_about_one_client(number, colluding, trusting):
    """Every way to tell honest clients that client 0 uploaded, or left, all thresholds: both of its secrets, which
    unmask its message, if and only if 2 t <= m + c. Catches a client that answers both, and a bound that is not tight.
    """
    for threshold in range(2, number - colluding + 1):
        clients, _ = cohort(number, threshold, trusting)
        broken = False
        for others in itertools.product((True, False), repeat=number - colluding - 1):
            lies = [told(number) if here else told(number, 0) for here in (True, *others)]
            seeds, keys, _ = answers(clients, lies, colluding)
            broken |= seeds[0] >= threshold and keys[0] >= threshold
        assert broken == (2 * threshold <= number + colluding), (threshold, broken)


@pytest.mark.full
@pytest.mark.parametrize("number, threshold, colluding", [(4, 3, 0), (5, 4, 1)])
def test_lies_about_many_clients(number, threshold, colluding):
    """Each honest client is told that all uploaded, or all but another one: every combination. All who answer were told
    the same. Catches words that are not compared, and those of other clients that pass for a majority."""
    clients, _ = cohort(number, threshold)
    stories = [[told(number), *(told(number, v) for v in range(number) if v != u)] for u in range(number - colluding)]
    number_told = {len(answers(clients, lies, colluding)[2]) for lies in itertools.product(*stories)}
    assert number_told == {0, 1}


def test_lies_leave_a_sum_of_few():
    """Five clients, t = 3, each told that at most two left: where they trust the server, it opens the keys of three and
    the seeds of two, whose sum it learns. Signed words stop it."""
    lies = [told(5, *left) for left in ((1, 2), (0, 2), (0, 1), (0, 2), (1,))]
    seeds, keys, _ = answers(cohort(5, 3, trusting=True)[0], lies, 0)
    assert (seeds >= 3).tolist() == [False, False, False, True, True] and (keys[:3] >= 3).all()
    seeds, keys, heard = answers(cohort(5, 3)[0], lies, 0)
    assert not seeds.any() and not keys.any() and not heard


def test_words_are_checked():
    """Catches a signature of somebody else, on something else, by a client that holds no share, and its own counted
    twice."""
    clients, _ = cohort(4, 3)
    asked = told(4)
    words = {u: Signed(asked, clients[u].sign(asked)) for u in range(4)}
    assert set(clients[1].answer(asked, words).seeds) == {0, 1, 2, 3}
    forged = {
        "another's": {0: words[0], 2: words[3]},
        "on something else": {0: words[0], 2: Signed(asked, clients[2]._signing.sign(b"asked\0other"))},
        "its own": {0: words[0], 1: words[1]},
        "another purpose": {0: words[0], 2: Signed(asked, crypto.sign(clients[2]._signing, "keys", asked.written(2)))},
        "none": {},
    }
    for name, some in forged.items():
        with pytest.raises(Inconsistent, match="signed what this one was told, 3 are"):
            clients[1].answer(asked, some)
        assert name
    with pytest.raises(Refused, match="has answered another request before"):
        clients[1].sign(told(4, 0))
    with pytest.raises(Refused, match="opens no sum of 2 messages"):
        cohort(4, 3)[0][1].sign(Asked(frozenset([0, 1]), frozenset([2, 3])))


def test_only_holders_count():
    """On a circle of 8 with 4 neighbours, client 4 holds no share of client 0. Catches colluding strangers whose word
    counts for it."""
    around = {u: [(u + d) % 8 for d in (-2, -1, 1, 2)] for u in range(8)}
    clients, _ = cohort(8, 3, around=around)
    asked = {u: Asked(frozenset(around[u]), frozenset()) for u in range(8)}
    words = {u: Signed(asked[u], clients[u].sign(asked[u])) for u in range(8)}
    assert 0 in clients[1].answer(asked[1], words).seeds
    lying = Asked(frozenset({*around[4], 0}), frozenset())
    strangers = {4: Signed(lying, crypto.sign(clients[4]._signing, "asked", lying.written(4)))}
    with pytest.raises(Inconsistent, match="of client 0: 2 of its holders"):
        clients[1].answer(asked[1], {u: words[u] for u in (0, 2, 3, 5)} | strangers)


def test_the_servers_own_keys_are_refused():
    """Catches a server in the middle, who would read every share and take off every mask."""
    clients, keys = cohort(4, 3)
    own = Client(9, RING, 3, keeps_share=True, seed=bytes(32), known=Known({9: []}, {})).advertise()
    swapped = keys[1]._replace(masking=own.masking)
    for wrong in (own, swapped, keys[2], keys[1]._replace(signature=b"")):
        with pytest.raises(Refused, match="client 0 takes no keys of client 1"):
            clients[0].share({1: wrong, 2: keys[2]})


def test_a_client_with_too_few_others_stays_silent():
    """A server that says that everybody else left would get a message under one mask, whose seed it may ask for."""
    clients, _ = cohort(4, 3)
    with pytest.raises(Refused, match="among 1 others: too few hold its shares"):
        clients[0].upload({1: b""}, np.zeros(1, np.int64))


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("neighbours", [None, 4])
def test_an_honest_server_gets_the_same(neighbours):
    """Sums and aborts of a run without signatures, for clients that leave anywhere; too low a threshold is refused."""
    outcomes = set()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        number, messages = 9, rng.integers(-(2**30), 2**30, (9, 3))
        threshold = 5 if neighbours is None else 3
        left = rng.choice(5, number, p=[0.05, 0.08, 0.1, 0.1, 0.67])
        steps, graph = Stages(left > 1, left > 2, left > 3), circle(jax.random.key(seed), number, neighbours)
        options = {"graph": graph, "stages": steps, "advertised": left > 0, "seed": seed}
        plain, signed = (run_secure_sum(messages, RING, threshold, signed=x, **options) for x in (False, True))
        assert signed.aborted == plain.aborted
        np.testing.assert_array_equal(signed.sum, plain.sum)
        outcomes.add(plain.aborted)
    assert outcomes == {False, True}
    with refused("threshold", rule="more than half"):
        run_secure_sum(messages, RING, 2, graph=graph, signed=True)


@pytest.mark.parametrize("neighbours", [None, 6])
def test_bytes(neighbours):
    """The formula of `secure_sum_cost` is what a run sends more: catches a signature without its bytes."""
    number, size = 15, 7
    graph, messages = circle(jax.random.key(0), number, neighbours), np.ones((number, size), int)
    threshold, others = (8, 14) if neighbours is None else (4, 6)
    runs = [run_secure_sum(messages, RING, threshold, graph=graph, signed=x, seed=0) for x in (False, True)]
    costs = [secure_sum_cost(number, size, 32, neighbours=neighbours, signed=x) for x in (False, True)]
    more = [runs[1].client_bytes.sum(1) - runs[0].client_bytes.sum(1)]
    more += [runs[1].server_bytes.sum(1) - runs[0].server_bytes.sum(1)]
    assert (more[0] == (costs[1].client_up_bits - costs[0].client_up_bits) // 8).all() and more[0][0] == 128
    assert (more[1] == (costs[1].client_down_bits - costs[0].client_down_bits) // 8).all()
    assert (runs[1].client_bytes.sum(1) == client_up_bytes(others, neighbours is None, size, RING, True)).all()
    assert (runs[1].server_bytes.sum(1) == client_down_bytes(number, neighbours, True)).all()
    assert costs[1].server_bits - costs[0].server_bits == 8 * number * (more[0][0] + more[1][0])


def test_the_simulated_one_counts_them():
    """Catches a threshold that a lying server could meet twice, and messages without the signatures' bytes."""
    spec = jax.ShapeDtypeStruct((5,), np.int32)
    plain, signed = (secure_sum(modular_sum(1.0), 6, signed=x).facts.wire(spec, None, 10) for x in (False, True))
    assert signed.bits - plain.bits == 8 * 128
    for options in ({"threshold": 5}, {"threshold": 2, "neighbours": 4}):
        with refused("threshold", rule="more than half"):
            secure_sum(modular_sum(1.0), signed=True, **options).init(spec, 10)
