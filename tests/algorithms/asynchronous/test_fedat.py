"""FedAT: against an event loop in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, population, sampling
from fedjax_sim.network import Hazard
from fedjax_sim.prng import stream
from fedjax_sim.sampling.permutation import permute
from tests.algorithms.asynchronous import test_arrivals as events
from tests.algorithms.asynchronous.test_asynchronous import SIZE, clients, equally_fast, local, quadratic, run
from tests.laws import problems as p
from tests.laws.laws import check_equal_bits
from tests.refusals import refused

TIERS, SLOTS = 3, 2


def test_fedat_is_the_event_loop():
    """Catches a tier that trains from another model than it was sent, counts that are not mirrored, a tier's slowest
    client that is not waited for, clients of another tier."""
    made = quadratic(algorithms.fedat, num_tiers=TIERS, clients_per_tier=SLOTS)
    found, infos, _ = run(made, {"w": jnp.zeros(1)}, clients(), 14)
    order = sorted(range(SIZE), key=lambda id: (events.ticks(np.array(id)), id))
    groups, counts = np.array(order).reshape(TIERS, -1), np.zeros(TIERS, int)

    places = jax.jit(lambda key: permute(key, jnp.arange(SLOTS), SIZE // TIERS))

    def drawn(key, tier):
        return groups[tier][np.asarray(places(stream(key, "cohort")))]

    w, models, now = 0.0, np.zeros(TIERS), 0
    rounds = {q: (0.0, drawn(stream(events.KEY, f"tier {q}"), q), 0) for q in range(TIERS)}
    due = {q: max(events.ticks(rounds[q][1])) for q in range(TIERS)}
    tiers, joules = [], sum(events.ticks(ids).sum() for _, ids, _ in rounds.values())
    for t, model in enumerate(found):
        tier = min(due, key=lambda q: (due[q], q))
        now, (base, ids, version) = due[tier], rounds[tier]
        models[tier] = base + np.mean([local(base, id) for id in ids])
        counts[tier] += 1
        w = (counts[::-1] / counts.sum() * models).sum()
        np.testing.assert_allclose(model["w"], w, rtol=2e-5, atol=1e-6)
        assert infos[t]["tier"] == tier and infos[t]["staleness"] == t - version
        np.testing.assert_allclose(infos[t]["simulated_seconds"], now / 10, rtol=1e-6)
        ids = drawn(stream(events.keyed(t), "arrivals"), tier)
        assert infos[t]["joules"] == joules + events.ticks(ids).sum()
        joules = 0
        rounds[tier], due[tier] = (w, ids, t + 1), now + max(events.ticks(ids))
        tiers.append(tier)
    assert set(tiers) == {0, 1, 2} and infos[0]["clients_invited"] == 8


@pytest.mark.full
def test_a_tier_does_without_clients_who_leave():
    """A third of the clients leave after two ticks of their work. Catches updates of clients who are gone, a tier that
    waits for a message that never comes, and clients who leave and are not counted."""
    hazard = Hazard(lambda key, ids: jnp.where(ids % 3 == 0, 0.2, 1e6))
    made = quadratic(algorithms.fedat, num_tiers=TIERS, clients_per_tier=SLOTS, hazard=hazard)
    _, infos, _ = run(made, {"w": jnp.zeros(1)}, clients(), 14)
    groups = np.array(sorted(range(SIZE), key=lambda id: (events.ticks(np.array(id)), id))).reshape(TIERS, -1)

    def begun(key, tier, now):
        ids = groups[tier][np.asarray(permute(stream(key, "cohort"), jnp.arange(SLOTS), SIZE // TIERS))]
        took = events.ticks(ids)
        leaves = (ids % 3 == 0) & (took > 2)
        return now + max(np.where(leaves, 2, took)), leaves.sum()

    rounds, lost = {q: begun(stream(events.KEY, f"tier {q}"), q, 0) for q in range(TIERS)}, 0
    for t, info in enumerate(infos):
        tier = min(rounds, key=lambda q: (rounds[q][0], q))
        now, leaving = rounds[tier]
        assert (info["tier"], info["arrivals"], info["interrupted"]) == (tier, SLOTS - leaving, leaving)
        np.testing.assert_allclose(info["simulated_seconds"], now / 10, rtol=1e-6)
        rounds[tier], lost = begun(stream(events.keyed(t), "arrivals"), tier, now), lost + leaving
    assert 3 < lost < 14 * SLOTS


@pytest.mark.optimised
@pytest.mark.full
def test_one_tier_is_synchronous():
    """One tier of everybody is FedAvg by examples, bit for bit."""
    work = {"num_steps": 3, "batch_size": 2, "plan": p.PLAN, "mesh": None}
    size, start = p.NUM_CLIENTS, jnp.array(p.START)
    plain = algorithms.fedavg(p.linear_loss, sampling.full(size), optax.sgd(p.RATE), **work)
    made = algorithms.fedat(
        p.linear_loss,
        equally_fast(size),
        optax.sgd(p.RATE),
        population_size=size,
        num_tiers=1,
        clients_per_tier=size,
        **work,
    )
    expected, found = (run(one, start, p.ragged(), 3)[0] for one in (plain, made))
    check_equal_bits(expected, found, "models")


@pytest.mark.full
def test_a_tier_without_clients_waits():
    """Nobody of a tier is there: a minute passes, and its round is skipped. Catches a tier that is never asked again,
    tiers of unequal sizes, and work for the absent."""
    devices = events.devices(SIZE - 1, events.nobody_early)
    options = {"num_tiers": 4, "clients_per_tier": 3, "num_steps": 2, "mesh": None, "population_size": SIZE - 1}
    data = population.quadratic_population(np.ones(SIZE - 1), np.arange(SIZE - 1.0))
    made = algorithms.fedat(population.quadratic_loss, devices, optax.sgd(0.1), **options)
    _, infos, state = run(made, {"w": jnp.zeros(1)}, data, 16)
    assert [int(info["skipped_rounds"]) for info in infos] == [1] * 8 + [0] * 8
    assert sorted(np.asarray(state.order).tolist()) == list(range(SIZE - 1))
    assert jax.tree.leaves(state.rounds.there)[0].all()


def test_weights_of_a_sampler():
    """Catches weights by the chances of a draw from tiers of equal size, all of whom are there."""
    rule = aggregation.horvitz_thompson(sampling.uniform(SIZE // TIERS, SLOTS).design, SIZE / TIERS)
    with refused("aggregator", rule="as they come"):
        quadratic(algorithms.fedat, num_tiers=TIERS, clients_per_tier=SLOTS, aggregator=rule)


@pytest.mark.parametrize(
    "wrong, words", [({"num_tiers": 0}, "num_tiers: expected"), ({"clients_per_tier": 9}, "clients_per_tier: expected")]
)
def test_wrong_options(wrong, words):
    with pytest.raises(ValueError, match=words):
        quadratic(algorithms.fedat, **{"num_tiers": TIERS, "clients_per_tier": SLOTS} | wrong)
