"""Real secure aggregation inside of a round: bit for bit the simulated one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import transform
from fedjax_sim.aggregation import modular_sum, real_secure_sum, secure_sum
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.round import observe
from fedjax_sim.types import Cohort, Received, Round
from tests.laws import problems as p
from tests.refusals import refused

pytest.importorskip("cryptography", reason="the extra `secagg` is not installed")
RNG = np.random.default_rng(0)
LEFT = [0.05, 0.1, 0.15, 0.1]


def round_of(made, messages, weights):
    """key -> ((update, metrics), view) of a round in two chunks; slot 0 is empty."""
    slots = jnp.arange(len(weights), dtype=jnp.int32)
    everyone = Received(messages, jnp.asarray(weights), slots, slots)
    round = Round(Cohort(slots, slots > 0, slots > 0))
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), messages)

    @jax.jit
    def run(key):
        carry = made.init(spec, len(weights))
        for part in (slice(0, 4), slice(4, None)):
            carry = made.accumulate(key, round, carry, jax.tree.map(lambda x, part=part: x[part], everyone))
        return made.finalize(key, round, carry), made.view(key, round, everyone)

    return run


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 5},
        {"threshold": 3, "neighbours": 4, "min_messages": 3, "dropout": [0.03] * 4},
        {"threshold": 6, "signed": True},
        {"threshold": 4, "neighbours": 6, "signed": True, "dropout": [0.02] * 4},
    ],
)
@pytest.mark.parametrize(
    "ring",
    [{"modulus_bits": 64}, *(pytest.param(x, marks=pytest.mark.full) for x in ({"modulus_bits": 20}, {"prime": True}))],
    ids=lambda ring: str(*ring.values()),
)
def test_bits_of_the_simulated_one(ring, options):
    """Sums, aborts, dropouts of 9 clients who leave at every step, an empty slot, and a client whose message did not
    come. Catches stages drawn otherwise, rows of another slot, and words in the wrong order.
    """
    plain = modular_sum(None, **ring)
    messages = {"a": RNG.integers(-(2**30), 2**30, (10, 2, 2)), "b": RNG.integers(-9, 9, (10, 3))}
    messages = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), messages)
    weights = np.float32([0, 1, 2, 0, 1, 1, 5, 1, 1, 1])
    made = [make(plain, **{"dropout": LEFT} | options) for make in (secure_sum, real_secure_sum)]
    simulated, real = (round_of(one, messages, weights) for one in made)
    aborts = []
    for seed in range(6):
        (expected, numbers), (_, seen) = jax.device_get(simulated(jax.random.key(seed)))
        (found, metrics), (masked, weights_seen) = jax.device_get(real(jax.random.key(seed)))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        sent = metrics.pop("protocol_bytes").total()
        assert str(metrics) == str(numbers) and sent > 1000
        np.testing.assert_array_equal(seen, weights_seen)
        words = 2 if ring == {"modulus_bits": 64} else 1
        assert masked["a"].shape == (10, words, 2, 2) and not masked["b"][np.asarray(seen) == 0].any()
        aborts.append(bool(metrics["aborted_rounds"]))
    assert set(aborts) == {False, True}


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("make", [secure_sum, real_secure_sum])
def test_a_circle_of_too_few_is_aborted(make):
    """Four invited of five slots, four neighbours each. Catches a client that is its neighbour's neighbour twice."""
    run = round_of(make(modular_sum(1.0), 3, neighbours=4), jnp.ones((5, 3), jnp.int32), np.float32([0, 1, 1, 1, 1]))
    (found, metrics), _ = run(jax.random.key(0))
    assert np.isnan(found).all() and int(metrics["aborted_rounds"]) == 1


@pytest.mark.full
def test_bytes_of_those_who_leave():
    """All advertise keys and leave: they are sent each other's, and that is all. Catches a step taken for another."""
    made = real_secure_sum(modular_sum(1.0), 2, dropout=[0, 1.0, 0, 0])
    (found, metrics), _ = round_of(made, jnp.ones((6, 3), jnp.int32), np.float32([0, 1, 1, 1, 1, 1]))(jax.random.key(0))
    assert np.isnan(found).all() and metrics["protocol_bytes"].total() == 5 * 64 + 5 * 4 * 64


@pytest.mark.full
def test_the_view_is_uniform():
    """Chi-square of the bytes of equal messages, p > 1e-5. Catches a view of the messages."""
    made = real_secure_sum(modular_sum(1.0), 2)
    _, (masked, _) = round_of(made, jnp.full((6, 3000), 7, jnp.int32), np.float32([0, 1, 1, 1, 1, 1]))(
        jax.random.key(0)
    )
    for shift in (0, 24):
        cells = (np.asarray(masked[1:, 0]) >> np.uint32(shift) & np.uint32(255)).ravel()
        assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > 1e-5


@pytest.mark.full
def test_federations_agree():
    """Two rounds of quantised FedAvg, and what the server observes of one. Catches a callback that a compiled loop
    drops, and bytes that are not of this protocol.
    """
    quantised = transform.quantize(8, range=1.0, integers=True)
    plain = modular_sum(float(p.SLOTS), modulus_bits=40)
    states, infos = {}, {}
    for make in (secure_sum, real_secure_sum):
        federation = p.Federation(transform=quantised, aggregator=make(plain, 2, neighbours=2))
        states[make], infos[make] = federation.run(np.arange(p.SLOTS))
    assert p.digest(states[secure_sum].server) == p.digest(states[real_secure_sum].server)
    values, last = p.flat(p.START).size, infos[real_secure_sum][-1]
    up = 64 + 2 * 82 + 5 * values + 2 * 33
    assert last["uplink_bytes"].total() == p.SLOTS * up
    assert last["protocol_bytes"].total() == p.SLOTS * (up + 2 * 64 + 2 * 82 + 1)
    state = states[real_secure_sum]
    observed = observe(federation.algorithm, jax.random.key(9), state, p.ragged())
    assert jax.tree.leaves(observed.messages)[0].dtype == jnp.uint32


def test_an_update_without_numbers_is_refused():
    """Catches an error about arrays that nobody handed over."""
    with refused("update", value="none"):
        real_secure_sum(modular_sum(1.0), 2).init({}, 3)


@pytest.mark.full
def test_seeds_may_be_vmapped():
    """Catches a callback that cannot be batched."""
    made = real_secure_sum(modular_sum(1.0), 2)
    slots = jnp.arange(3, dtype=jnp.int32)
    round, messages = Round(Cohort(slots, slots >= 0, slots >= 0)), jnp.arange(6, dtype=jnp.int32).reshape(3, 2)

    def one(key):
        carry = made.init(jax.ShapeDtypeStruct((2,), jnp.int32), 3)
        carry = made.accumulate(key, round, carry, Received(messages, jnp.ones(3), slots, slots))
        return made.finalize(key, round, carry)[0]

    found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 3))
    assert found.tolist() == [[6.0, 9.0]] * 3


@pytest.mark.devices
def test_several_devices_are_refused():
    """Catches a protocol that each device runs for itself."""
    quantised = transform.quantize(8, range=1.0, integers=True)
    made = real_secure_sum(modular_sum(float(p.SLOTS), modulus_bits=16), 2)
    with refused("mesh", value="2 devices"):
        p.Federation(transform=quantised, aggregator=made, mesh="all").run(np.arange(p.SLOTS))


@pytest.mark.full
def test_a_config_sets_it():
    """In place of `secure_sum`, and shares beside it. Catches options that a config cannot name."""
    small = ["data.num_clients=40", "data.held_out_clients=3", "sampler.cohort_size=10", "model.hidden=[4]"]
    small += [
        "run.devices=1",
        "algorithm.weighting=uniform",
        "aggregator.name=modular_sum",
        "aggregator.denominator=10.0",
    ]
    small += [f"transform.quantize.{text}" for text in ("bits=4", "range=1.0", "integers=true")]
    for name, options in {
        "real_secure_sum": ("threshold=6", "neighbours=8", "dropout=0.1", "min_messages=5"),
        "additive_shares": ("num_servers=3", "dropout=0.1", "min_messages=5", "masks=true"),
    }.items():
        experiment = build(load(None, [*small, *(f"aggregator.{name}.{text}" for text in options)]))
        assert experiment.algorithm.parts.aggregator.facts.least == 5
