"""`federated` is invite, collect and close over its parts, and refuses parts of which it cannot be made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, population, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.round import close, collect, invite
from fedjax_sim.types import Count
from fedjax_sim.validate import InvalidType
from tests.laws import problems as p
from tests.refusals import refused
from tests.round.stars import KEY, local, star

STEP = server.optimizer(optax.sgd(1.0))


@pytest.mark.full
def test_a_round_is_its_three_steps():
    """Two rounds, bit for bit, with a sampler that goes on from where it stopped. It guards `step` alone, which is
    written here once more; other tests look at what the three steps compute. Faults: a sampler's state that is lost, a
    step with another key, info that is not that of the round."""
    made = star(sampling.cyclic(p.NUM_CLIENTS, 4), transform=transform.quantize(8))
    parts = made.parts

    @jax.jit
    def both(state, other, people):
        cohort, sampler_state = invite(parts, KEY, other)
        gathered = collect(parts, KEY, cohort, other, people)
        steps = close(parts, KEY, cohort, gathered, other._replace(sampler=sampler_state))
        return made.step(KEY, state, people), steps

    state = other = made.init(KEY, jnp.array(p.START), p.ragged())
    for _ in range(2):
        before = state
        (state, info), (other, other_info) = both(state, other, p.ragged())
        assert jax.tree.structure((state, info)) == jax.tree.structure((other, other_info))
        for x, y in zip(jax.tree.leaves((state, info)), jax.tree.leaves((other, other_info)), strict=True):
            np.testing.assert_array_equal(x, y)
        assert int(state.sampler.position) == int(before.sampler.position) + 4
        assert not np.array_equal(made.params(before), made.params(state))


def test_a_round_by_hand():
    """Quadratic clients f_i(w) = c_i (w - a_i)^2 / 2, one step of rate r from w, weights by examples (one each): the
    model moves by -r mean_i c_i (w - a_i). Faults: a sum for a mean, bytes of one client, a norm of another change."""
    curvatures, centers, rate = np.array([1.0, 2.0, 0.5, 4.0]), np.array([0.0, 1.0, -3.0, 2.0]), 0.25
    people = population.quadratic_population(curvatures, centers)
    work = client.local_sgd(population.quadratic_loss, optax.sgd(rate), client.work(num_steps=1))
    made = federated(sampling.full(4), work, aggregation.mean(), STEP, mesh=None)
    state = made.init(KEY, {"w": jnp.full(1, 3.0)}, people)
    after, info = jax.jit(made.step)(KEY, state, people)
    change = -rate * (curvatures * (3 - centers)).mean()
    np.testing.assert_allclose(made.params(after)["w"], 3 + change, rtol=1e-6)
    np.testing.assert_allclose(info["update_norm"], abs(change), rtol=1e-6)
    assert (int(info["clients_invited"]), int(info["clients_reported"]), int(info["skipped_rounds"])) == (4, 4, 0)
    counts = {name: x.total() for name, x in info.items() if isinstance(x, Count)}
    assert counts == {"uplink_bytes": 4 * 4, "downlink_bytes": 4 * 4}  # a float32 each way


def test_what_it_is_made_of():
    """Catches parts in one another's places, a stop that reveals what noise hides, and parts that an accountant or an
    edge would not find."""
    sampler, rule = sampling.full(p.NUM_CLIENTS), aggregation.mean()
    with refused("client", value="Aggregator", rule="a ClientUpdate", kind=InvalidType):
        federated(sampler, rule, local(), STEP)
    noise = transform.chain(transform.clip(1.0), transform.gaussian_mechanism(1.0, 1.0))
    fixed = aggregation.fixed_mean(float(p.NUM_CLIENTS))
    uniform = local(weighting="uniform")
    with refused("nonfinite", value="error", rule="beside noise"):
        federated(sampler, uniform, fixed, STEP, noise, nonfinite="error")
    parts = federated(sampler, uniform, fixed, STEP, noise, nonfinite="drop").parts
    assert parts.complete and parts.transform is noise and parts.aggregator is fixed and parts.sampler is sampler
