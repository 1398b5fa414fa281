"""FedAvg by DP-SGD at the clients: what it is without privacy, and what its privacy is."""

from __future__ import annotations

import dp_accounting as dp
import jax
import numpy as np
import optax
import pytest
from dp_accounting.pld import PLDAccountant

from fedjax_sim import algorithms
from fedjax_sim.running.privacy_ledger import Spending
from fedjax_sim.sampling import full, uniform
from tests.laws import problems as p
from tests.refusals import refused

EVERYBODY = np.full(p.NUM_CLIENTS, p.ROWS)  # clients of equal size: a batch of the divisor's examples


def make(sampler, *, noise_multiplier=0.0, num_steps=3, batch_size=p.ROWS, clip_norm=1e6, **options):
    return algorithms.record_private_fedavg(
        p.linear_loss,
        sampler,
        optax.sgd(p.RATE),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        num_steps=num_steps,
        batch_size=batch_size,
        num_examples=p.ROWS,
        **options,
    )


@pytest.mark.full
def test_without_privacy_it_is_fedavg():
    """Full batches, no noise, no clip. Catches a wrong divisor, rate or sign, and a server that takes another step."""
    data = p.ragged(sizes=EVERYBODY)

    def plain(sampler, **options):
        work = {"num_steps": 3, "weighting": "uniform"}
        return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), **work, **options)

    ours, theirs, clipped = (
        p.Federation(make=recipe).params(p.COHORT, data)
        for recipe in (make, plain, lambda sampler, **options: make(sampler, clip_norm=0.1, **options))
    )
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)
    assert np.abs(clipped - theirs).max() > 1e-2


@pytest.mark.parametrize("sampler", [full(p.NUM_CLIENTS), uniform(p.NUM_CLIENTS, p.SLOTS)], ids=["full", "uniform"])
def test_epsilon_by_hand(sampler):
    """dp-accounting on 4 rounds of 3 steps at q = 2/6: sampling of clients gives no amplification, as the server sees
    each message.
    Catches steps, rounds or the rate left out, a client's epsilon in place of a record's, and an amplified one."""
    algorithm = make(sampler, noise_multiplier=1.5, batch_size=2, clip_norm=1.0)
    spending = Spending(algorithm, p.START, p.ragged(), "", delta=1e-4, directory=None)
    spending.enter(0, 4)
    slots = algorithm.parts.client.facts.noise.details["max_batch_size"]
    assert slots == p.ROWS  # a plain Poisson sample
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(2 / p.ROWS, dp.GaussianDpEvent(1.5)), 3 * 4)
    by_hand = PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE).compose(event).get_epsilon(1e-4)
    assert float(spending.record(4)["epsilon"]) == pytest.approx(by_hand, rel=1e-4)
    told = spending.summary()["privacy"]
    assert told["unit"] == "record" and "for each record" in told["statement"]


def test_the_bound_of_rows_is_needed():
    """Catches a chance of one half for a record, because nobody said how many there are."""
    options = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_steps": 1, "batch_size": 1}
    with refused("num_examples", value=None, rule="most rows"):
        algorithms.record_private_fedavg(p.linear_loss, full(3), optax.sgd(0.1), **options)
    with pytest.raises(ValueError, match="num_examples: expected at least 6"):
        short = algorithms.record_private_fedavg(p.linear_loss, full(24), optax.sgd(0.1), num_examples=5, **options)
        jax.eval_shape(short.init, jax.random.key(0), p.START, p.ragged())
