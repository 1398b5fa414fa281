"""Partial work: which clients, how much they complete, and that nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, client, sampling
from fedjax_sim.prng import client_key, stream
from fedjax_sim.types import ClientData
from tests.laws import laws, problems as p
from tests.oracles import paper
from tests.refusals import refused

EPOCHS, SHARE = 4, 0.6
WORK = {"num_epochs": EPOCHS, "batch_size": p.BATCH}


def local(**options):
    return client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(**(options or WORK)))


def applied(work, share=None, seed=0, id=0):
    """The report of one client that completes this share of its work."""
    data = p.ragged().client(jnp.int32(id))
    data = ClientData(data.examples, data.mask, None if share is None else jnp.asarray(share))
    return work.apply(jax.random.key(seed), jnp.array(p.START), (), data)[0]


@pytest.mark.parametrize("share, steps", [(1e-9, 1), (1 / 12, 1), (0.5, 6), (0.51, 7), (1.0, 12), (5, 5), (99, 12)])
def test_shares_and_numbers_of_steps(share, steps):
    """A client of three batches an epoch. Catches shares of epochs, work rounded down to none, more than is planned."""
    assert int(applied(local(), share).metrics["local_steps"].total) == steps


def test_no_stragglers():
    """Catches a full share of the work that differs from no share given."""
    for work in (local(), local(num_steps=3)):
        np.testing.assert_allclose(applied(work, 1.0).update, applied(work).update, rtol=1e-6)


def test_who_cannot_stop_is_refused():
    """Catches a sampler's stragglers who do all of their work, unnoticed."""
    sampler = sampling.with_stragglers(sampling.full(p.NUM_CLIENTS), 0.5)
    work = {"clip_norm": 1.0, "noise_multiplier": 0.0, "num_steps": 2, "batch_size": 2, "num_examples": p.ROWS}
    made = algorithms.record_private_fedavg(p.linear_loss, sampler, optax.sgd(0.1), **work)
    state = made.init(jax.random.key(0), jnp.array(p.START), p.ragged())
    with pytest.raises(ValueError, match="client: expected one that can stop early"):
        jax.eval_shape(made.step, jax.random.key(0), state, p.ragged())
    too_many = sampling.with_local_steps(sampling.full(p.NUM_CLIENTS), [1, 9])
    made = algorithms.fedavg(p.linear_loss, too_many, optax.sgd(0.1), num_steps=8)
    with refused("steps", value=9, rule="8 local steps"):
        made.init(jax.random.key(0), jnp.array(p.START), p.ragged())


def drawn(key, id, what):
    """What the library drew for client `id` in the round of `key`, in [0, 1): "who" straggles, and its "part"."""
    key = stream(stream(key, "sampling"), f"straggler {what}")
    return (int(jax.random.bits(client_key(key, id), (), jnp.uint32)) >> 8) / 2**24


def steps_of(key, id):
    """The steps of client `id` in the round of `key`: all, or a straggler's share."""
    most = EPOCHS * -(-int(p.SIZES[id]) // p.BATCH)
    return int(np.ceil((drawn(key, id, "part") + 2**-24) * most)) if drawn(key, id, "who") < SHARE else most


class Paper:
    """FedProx or FedNova in float64, each client with as many steps as it was drawn."""

    def __init__(self, coefficient=0.0, normalized=False):
        self.coefficient, self.normalized, self.w = coefficient, normalized, p.START.astype(float)

    def round(self, key, cohort):
        updates, steps = [], []
        for id in cohort:
            w, chosen = self.w.copy(), list(paper.batches(key, id, EPOCHS))[: steps_of(key, id)]
            for rows in chosen:
                w = w - p.RATE * (paper.gradient(w, id, rows) + self.coefficient * (w - self.w))
            updates.append((w - self.w) / (len(chosen) if self.normalized else 1))
            steps.append(len(chosen))
        shares = p.SIZES[cohort]
        scale = np.average(steps, weights=shares) if self.normalized else 1
        self.w = self.w + scale * np.average(updates, axis=0, weights=shares)

    def state(self):
        return [self.w]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["fedprox", "fednova"])
def test_partial_work_is_kept(name):
    """The same batches, stopped earlier. Catches FedNova normalising by the steps that were planned."""

    def make(sampler, **run):
        options = {"coefficient": 0.5} if name == "fedprox" else {}
        late = sampling.with_stragglers(sampler, SHARE)
        return getattr(algorithms, name)(p.linear_loss, late, optax.sgd(p.RATE), **options, **WORK, **run)

    transcribed = Paper(0.5) if name == "fedprox" else Paper(normalized=True)
    paper.check(transcribed, p.Federation(make=make), lambda algorithm, state: [algorithm.params(state)], lost=(1,))


class Dropping(Paper):
    """FedAvg over those who finish: stragglers leave neither an update nor a weight."""

    def round(self, key, cohort):
        finishing = np.array([id for id in cohort if drawn(key, id, "who") >= SHARE], np.int32)
        if finishing.size:
            super().round(key, finishing)


@pytest.mark.full
def test_dropped_leave_a_round_of_the_others():
    """Catches stragglers who are averaged, or who leave their weight in the mean."""

    def make(sampler, **run):
        late = sampling.with_stragglers(sampler, SHARE, num_parts=EPOCHS, late="dropped")
        return algorithms.fedavg(p.linear_loss, late, optax.sgd(p.RATE), **WORK, **run)

    infos = paper.check(Dropping(), p.Federation(make=make), lambda algorithm, state: [algorithm.params(state)])
    counts = [(int(info["stragglers"]), int(info["clients_reported"])) for info in infos]
    assert all(sum(pair) == p.SLOTS for pair in counts) and len(set(counts)) > 1


@pytest.mark.full
def test_without_stragglers_all_are_fedavg():
    """The same bits. Catches a proximal term of weight 0 or a share of 1 that moves the last bit."""
    made = {
        "dropped": lambda sampler, **run: algorithms.fedavg(p.linear_loss, sampler, optax.sgd(p.RATE), **WORK, **run),
        "partial": lambda sampler, **run: algorithms.fedprox(
            p.linear_loss, sampler, optax.sgd(p.RATE), coefficient=0.0, **WORK, **run
        ),
    }

    def model(late, share):
        def make(sampler, **run):
            return made[late](sampling.with_stragglers(sampler, share, num_parts=EPOCHS, late=late), **run)

        return p.Federation(make=make).params(range(p.SLOTS))

    plain = p.Federation(make=made["dropped"]).params(range(p.SLOTS))
    for late in made:
        np.testing.assert_array_equal(model(late, 0.0), plain)
    assert (model("dropped", 0.5) != plain).any()  # so the comparison can tell


@pytest.mark.full
def test_partial_work_without_a_term_is_fedavg():
    """The same bits with stragglers too. Catches another trajectory of FedProx with weight 0."""

    def model(recipe, **options):
        def make(sampler, **run):
            late = sampling.with_stragglers(sampler, SHARE, num_parts=EPOCHS)
            return recipe(p.linear_loss, late, optax.sgd(p.RATE), **options, **WORK, **run)

        return p.Federation(make=make).params(range(p.SLOTS))

    fedavg = model(algorithms.fedavg)
    np.testing.assert_array_equal(model(algorithms.fedprox, coefficient=0.0), fedavg)
    assert (model(algorithms.fedprox, coefficient=0.5) != fedavg).any()


def test_the_same_trajectory():
    """With `num_steps`, in a short loop that would else be written out. Catches steps that cannot stop."""
    for steps in (1, 2, 3):
        stopped, fixed = applied(local(num_steps=3), steps, id=2), applied(local(num_steps=steps), id=2)
        np.testing.assert_allclose(stopped.update, fixed.update, rtol=1e-5)
        assert int(stopped.metrics["local_steps"].total) == steps


@pytest.mark.full
@pytest.mark.optimised
def test_draws_belong_to_the_client():
    """Catches draws by slot: the same bits in any order of the cohort."""

    def make(sampler, **run):
        late = sampling.with_stragglers(sampler, SHARE)
        return algorithms.fedavg(p.linear_loss, late, optax.sgd(p.RATE), **WORK, **run)

    laws.order_is_irrelevant(p.Federation(make=make))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), True])
def test_wrong_share(share):
    """Catches a percentage where a share is meant."""
    with pytest.raises((TypeError, ValueError), match="share: expected a number in"):
        sampling.with_stragglers(sampling.full(4), share)
