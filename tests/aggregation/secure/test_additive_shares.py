"""Additive shares over several servers: exact sums, and views that know nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import aggregation, transform
from fedjax_sim.aggregation import additive_shares, modular_sum
from fedjax_sim.aggregation.secure.additive_shares import shares_of
from fedjax_sim.aggregation.secure.modular import ring_of
from fedjax_sim.types import Cohort, Received, Round
from tests.laws import problems as p

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
SUMS = {
    "9 bits": modular_sum(1.0, modulus_bits=9),
    "32 bits": modular_sum(1.0),
    "40 bits": modular_sum(1.0, modulus_bits=40),
    "64 bits": modular_sum(1.0, modulus_bits=64),
    "prime": modular_sum(1.0, prime=True),
}


def received(messages, there):
    slots = jnp.arange(len(there), dtype=jnp.int32)
    return Received(jax.tree.map(jnp.asarray, messages), jnp.asarray(there, jnp.float32), slots, slots)


def aggregate(made, messages, there, key=KEY, chunks=2):
    """(aggregate, metrics) of messages in chunks; weights that are not 1."""
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.int32), messages)
    everyone = received(messages, np.asarray(there) * 2.5)
    round = Round(Cohort(everyone.slots, everyone.slots >= 0, jnp.asarray(there)))

    @jax.jit
    def run(everyone):
        carry = made.init(spec, len(there))
        for part in np.array_split(np.arange(len(there)), chunks):
            carry = made.accumulate(key, round, carry, jax.tree.map(lambda x, part=part: x[part], everyone))
        return made.finalize(key, round, carry)

    return run(everyone)


def rings_and_servers():
    """Every ring with three servers and 40 bits with any number by default, the others by `-m full`."""
    for name in SUMS:
        for servers in (2, 3, 4):
            yield pytest.param(name, servers, marks=() if servers == 3 or name == "40 bits" else pytest.mark.full)


@pytest.mark.default_rows("64 bits")
@pytest.mark.parametrize("name, num_servers", list(rings_and_servers()))
def test_the_sum_is_exact(name, num_servers):
    """Bits equal the plain modular sum's for every absent set of four clients, shares drawn or not.

    Catches a carry lost between words, lanes of one server taken for another's, and an absent client's shares.
    """
    plain = SUMS[name]
    big = 2 ** (8 if name == "9 bits" else 30)
    messages = {"a": RNG.integers(-big, big, (4, 2, 2)).astype(np.int32), "b": np.int32([big - 1, 1, -big, 5])}
    drawn, not_drawn = (additive_shares(plain, num_servers, masks=masks) for masks in (True, False))
    spec = {"a": jax.ShapeDtypeStruct((2, 2), jnp.int32), "b": jax.ShapeDtypeStruct((), jnp.int32)}
    sets = jnp.array([[i >> k & 1 for k in range(4)] for i in range(16)], bool)

    @jax.jit
    @jax.vmap
    def each(there):
        some = received(messages, there)
        round = Round(Cohort(some.slots, there, there))

        def total(made):
            carry = made.init(spec, 4)
            for part in (slice(0, 3), slice(3, 4)):
                carry = made.accumulate(KEY, round, carry, jax.tree.map(lambda x, part=part: x[part], some))
            return made.finalize(KEY, round, carry)

        return total(plain), total(drawn), total(not_drawn)

    expected, *found = each(sets)
    assert len(np.unique(expected[0]["a"], axis=0)) > 8
    for update, metrics in found:
        jax.tree.map(np.testing.assert_array_equal, update, expected[0])
        np.testing.assert_array_equal(metrics["total_weight"], sets.sum(1))
        assert not metrics["aborted_rounds"].any() and not metrics["secure_dropouts"].any()


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("name", SUMS)
def test_shares_add_up(name):
    """In Python's integers: each share in the ring, their sum the message. Catches a share past the modulus."""
    ring = ring_of(SUMS[name])
    messages = np.int32([[5, -7, 0], [2**30, -(2**30), 1]])
    made = jax.jit(lambda slots, messages: shares_of(ring, KEY, 3, slots, messages))
    shares = np.asarray(made(np.arange(2), messages), np.uint64).astype(object)
    numbers = sum(shares[:, :, i] << 32 * i for i in range(ring.words))
    assert (numbers < ring.modulus).all()
    assert ((numbers.sum(1) - messages) % ring.modulus == 0).all()


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("honest_server", [0, 1, 2])
@pytest.mark.parametrize("name", ["9 bits", "64 bits", "prime"])
def test_views_are_uniform(name, honest_server):
    """Chi-square of what two of three servers see together, on 4 x 4 cells of the top two bits of each, and of the
    lowest byte; all messages alike, p > 1e-5 each. Catches a share that is the message, or the same share twice.
    """
    made = additive_shares(SUMS[name], 3, honest_server=honest_server)
    messages = np.full((64, 256), 17, np.int32)
    seen, weights = jax.jit(made.view)(KEY, None, received(messages, np.ones(64)))
    bits = SUMS[name].facts.modulus.bit_length() - (SUMS[name].facts.modulus % 2 == 0)
    words = (bits + 31) // 32
    assert seen.shape == (64, 2, words, 256) and seen.dtype == jnp.uint32 and weights.tolist() == [1] * 64
    top = np.asarray(seen[:, :, -1]) >> np.uint32((bits - 1) % 32 - 1)
    low = np.asarray(seen[:, :, 0]) & np.uint32(0xFF)
    for cells, count in ((top[:, 0] * 4 + top[:, 1], 16), (low[:, 0], 256), (low[:, 1], 256), (low.sum(1) % 256, 256)):
        assert stats.chisquare(np.bincount(cells.ravel(), minlength=count)).pvalue > 1e-5


def test_views_do_not_know_the_message():
    """Servers without the last share see the same bits whatever the message; those with it see bits shifted by the
    message. Catches randomness that depends on the message.
    """
    zeros, others = np.zeros((5, 7), np.int32), RNG.integers(-99, 99, (5, 7)).astype(np.int32)
    views = {}
    for honest in (0, 2):
        made = additive_shares(modular_sum(1.0), 3, honest_server=honest)
        view = jax.jit(made.view)
        views[honest] = [view(KEY, None, received(x, np.ones(5)))[0] for x in (zeros, others)]
    np.testing.assert_array_equal(*views[2])
    apart = np.int32(np.asarray(views[0][1]) - np.asarray(views[0][0]))
    np.testing.assert_array_equal(apart[:, 1, 0], others)
    assert not apart[:, 0].any()


@pytest.mark.full
def test_clients_are_left_out():
    """A dropout of 0.3: the sum is that of those who stay, their number binomial (4.5 standard errors), shares drawn or
    not; the rest is counted. Catches a client in one server's sum and not in another's, and a draw by position.
    """
    ones = np.ones((4000, 1), np.int32)
    there = np.arange(4000) % 4 > 0
    made = [additive_shares(modular_sum(1.0), 2, dropout=0.3, masks=masks) for masks in (False, True)]
    found = [aggregate(one, ones, there, chunks=chunks) for one, chunks in zip(made, (1, 7), strict=True)]
    assert str(found[0]) == str(found[1])
    total, metrics = found[0]
    assert float(total[0]) == float(metrics["total_weight"]) == 3000 - float(metrics["secure_dropouts"])
    assert abs(float(total[0]) - 2100) < 4.5 * np.sqrt(3000 * 0.21)
    _, weights = made[0].view(KEY, None, received(ones, there))
    assert float((weights > 0).sum()) == float(total[0]) and not (np.asarray(weights)[~there]).any()


@pytest.mark.full
@pytest.mark.parametrize("masks", [False, True])
def test_too_few_messages_abort(masks):
    """Catches a partial sum, and rounds that are aborted though enough messages came."""
    messages = np.full((5, 2), 3, np.int32)
    made = additive_shares(modular_sum(1.0), 2, min_messages=3, masks=masks)
    for count in range(6):
        total, metrics = aggregate(made, messages, np.arange(5) < count)
        assert total.tolist() == [3.0 * count] * 2 if count >= 3 else np.isnan(total).all()
        assert int(metrics["aborted_rounds"]) == (count < 3)
    alone = additive_shares(modular_sum(1.0), 2, dropout=1.0, masks=masks)
    assert np.isnan(aggregate(alone, messages, np.ones(5, bool))[0]).all() and alone.facts.least == 1


@pytest.mark.full
@pytest.mark.devices
def test_a_federation():
    """Quantised FedAvg: the model of the plain modular sum, on one device and on all; bytes are S times the ring's.

    Catches facts that the wrapper drops.
    """
    quantised = transform.quantize(8, range=1.0, integers=True)
    plain = modular_sum(float(p.SLOTS), modulus_bits=16)
    made = {"plain": plain, "shares": additive_shares(plain, 3, masks=True)}
    models, sent = set(), {}
    for name, mesh in (("plain", None), ("shares", None), ("shares", "all")):
        state, infos = p.Federation(transform=quantised, aggregator=made[name], mesh=mesh).run(np.arange(p.SLOTS))
        models.add(p.digest(state.server))
        sent[name] = sum(info["uplink_bytes"].total() for info in infos)
    assert len(models) == 1
    values = p.flat(p.START).size
    assert sent["shares"] == 2 * p.SLOTS * values * 3 * 16 // 8 > sent["plain"]


def test_wrong_options_are_refused():
    """Catches shares of floats, one server, and shares of shares."""
    plain = modular_sum(1.0)
    for match, call in {
        "aggregator: expected a modular_sum, got 'a sum of numbers'": lambda: additive_shares(aggregation.mean(), 2),
        "got 'one that is secure already'": lambda: additive_shares(additive_shares(plain, 2), 2),
        r"num_servers: expected an integer in \[2, 64\], got 1": lambda: additive_shares(plain, 1),
        r"honest_server: expected an integer in \[0, 2\], got 3": lambda: additive_shares(plain, 3, honest_server=3),
        "dropout: expected": lambda: additive_shares(plain, 2, dropout=float("nan")),
        "min_messages: expected an integer": lambda: additive_shares(plain, 2, min_messages=0),
        "min_messages: expected at most the 4 slots": lambda: additive_shares(plain, 2, min_messages=5).init(
            jax.ShapeDtypeStruct((1,), jnp.int32), 4
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="masks: expected True or False"):
        additive_shares(plain, 2, masks=1)
