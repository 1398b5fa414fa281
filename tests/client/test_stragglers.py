"""Partial work: whom it meets, how much gets done, and that nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client
from fedjax_sim.prng import below, client_key, stream
from tests.laws import laws
from tests.laws import problems as p
from tests.oracles import paper

EPOCHS, SHARE = 4, 0.6
WORK = {"num_epochs": EPOCHS, "batch_size": p.BATCH}


def local(**options):
    return client.local_sgd(p.linear_loss, optax.sgd(p.RATE), **WORK, **options)


def test_law_of_partial_work():
    """100,000 rounds of a client with three batches an epoch: chi-square over E = 1..4, and the share as a chance.

    Accepts the true law with an error of 1e-6 a side and rejects a share 5 % off. Catches work drawn from 0 or up to
    E - 1, steps in place of epochs, a draw that all rounds share.
    """
    data = p.ragged().client(jnp.int32(0))
    work = local(straggler_share=SHARE)

    @jax.jit
    def steps(keys):
        return jax.vmap(lambda key: work.apply(key, jnp.array(p.START), (), data)[0].metrics["local_steps"].total)(keys)

    number = 100_000
    taken = np.asarray(steps(jax.random.split(jax.random.key(5), number)))
    assert set(taken.tolist()) == {3.0, 6.0, 9.0, 12.0}
    counts = np.array([(taken == 3 * k).sum() for k in range(1, EPOCHS + 1)])

    def chi_square(share):
        expected = number * np.array([share / EPOCHS] * (EPOCHS - 1) + [1 - share + share / EPOCHS])
        return ((counts - expected) ** 2 / expected).sum()

    limit = 30.66  # chi-square with 3 degrees of freedom: 1e-6
    assert chi_square(SHARE) < limit
    assert chi_square(1.05 * SHARE) > limit and chi_square(0.95 * SHARE) > limit


def steps_of(key, id):
    """What the library drew for client `id` in the round of `key`, in epochs."""
    key = client_key(stream(key, "client"), id)
    who, amount = jax.random.split(stream(key, "straggler"))
    part = 1 + int(below(amount, EPOCHS))
    return part if float(jax.random.uniform(who)) < SHARE else EPOCHS


class Paper:
    """FedProx or FedNova in float64, each client with as many epochs as it was drawn."""

    def __init__(self, coefficient=0.0, normalized=False):
        self.coefficient, self.normalized, self.w = coefficient, normalized, p.START.astype(float)

    def round(self, key, cohort):
        updates, steps = [], []
        for id in cohort:
            w, chosen = self.w.copy(), list(paper.batches(key, id, steps_of(key, id)))
            for rows in chosen:
                w = w - p.RATE * (paper.gradient(w, id, rows) + self.coefficient * (w - self.w))
            updates.append((w - self.w) / (len(chosen) if self.normalized else 1))
            steps.append(len(chosen))
        shares = p.SIZES[cohort]
        scale = np.average(steps, weights=shares) if self.normalized else 1
        self.w = self.w + scale * np.average(updates, axis=0, weights=shares)

    def state(self):
        return [self.w]


@pytest.mark.parametrize("name", ["fedprox", "fednova"])
def test_partial_work_is_kept(name):
    """The same batches, stopped earlier. Catches FedNova normalising by the steps that were planned."""

    def make(sampler, **run):
        if name == "fedprox":
            options = {"optimizer": optax.sgd(p.RATE), "coefficient": 0.5}
        else:
            options = {"learning_rate": p.RATE}
        return getattr(algorithms, name)(p.linear_loss, sampler, **options, straggler_share=SHARE, **WORK, **run)

    transcribed = Paper(0.5) if name == "fedprox" else Paper(normalized=True)
    paper.check(transcribed, p.Federation(make=make), lambda algorithm, state: [algorithm.params(state)], lost=(1,))


def test_steps_too():
    """With `num_steps` the unit is a step, in a short loop that would else be written out; nobody late: the same model.

    Catches steps that are written out and so cannot stop.
    """
    data, start = p.ragged().client(jnp.int32(2)), jnp.array(p.START)

    def applied(share, num_steps):
        work = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), num_steps=num_steps, straggler_share=share)
        return jax.jit(lambda key: work.apply(key, start, (), data)[0])

    whole, swept, late = applied(0.0, 3), applied(jnp.float32(0), 3), applied(1.0, 3)
    fixed = {k: applied(0.0, k) for k in (1, 2)} | {3: whole}
    np.testing.assert_allclose(swept(jax.random.key(0)).update, whole(jax.random.key(0)).update, rtol=1e-6)
    seen = set()
    for seed in range(12):
        report = late(jax.random.key(seed))
        steps = int(report.metrics["local_steps"].total)
        seen.add(steps)
        np.testing.assert_allclose(report.update, fixed[steps](jax.random.key(seed)).update, rtol=1e-5)
    assert seen == {1, 2, 3}


@pytest.mark.optimised
def test_draws_belong_to_the_client():
    """Catches draws by slot: the same bits in any order of the cohort."""

    def make(sampler, **run):
        return algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), straggler_share=SHARE, **WORK, **run)

    laws.order_is_irrelevant(p.Federation(make=make))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True])
def test_wrong_share(share):
    """Catches a percentage where a share is meant."""
    with pytest.raises((TypeError, ValueError), match="straggler_share: expected a number in"):
        local(straggler_share=share)
