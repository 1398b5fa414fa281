"""FedAMP against NumPy, its limit, and who attracts whom."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, sampling
from fedjax_sim.algorithms.personal.fedamp import _mixtures
from tests.algorithms.personal import problem as p
from tests.refusals import refused

SGD = optax.sgd(p.RATE)
SHARE, WIDTH, PULL, COHORT = 0.6, 0.5, 0.4, 3


def amp(sampler=None, **options):
    sampler = sampling.cyclic(p.NUM_CLIENTS, COHORT) if sampler is None else sampler
    given = {"share": SHARE, "width": WIDTH, "coefficient": PULL}
    return algorithms.fedamp(p.loss_fn, sampler, SGD, **p.OPTIONS | given | options)


def mixtures(models, has_trained):
    found = []
    for i, own in enumerate(models):
        mixed = own.copy()
        for j, other in enumerate(models):
            if j != i and has_trained[j]:
                weight = SHARE / (len(models) - 1) * np.exp(-((own - other) ** 2).sum() / WIDTH)
                mixed += weight * (other - own)
        found.append(mixed)
    return np.stack(found)


def oracle():
    """[N, 3] models and mixtures after all rounds."""
    models = np.stack([p.START] * p.NUM_CLIENTS)
    sent, has_trained = models.copy(), np.zeros(p.NUM_CLIENTS, bool)
    for round in range(p.ROUNDS - 1):
        for i in [(COHORT * round + k) % p.NUM_CLIENTS for k in range(COHORT)]:
            local = sent[i]
            for _ in range(p.STEPS):
                local = local - p.RATE * (p.gradient(local, p.rows()[i]) + PULL * (local - sent[i]))
            models[i], has_trained[i] = local, True
        sent = mixtures(models, has_trained)
    return models, sent


def test_matches_numpy():
    """Two rounds of three of five clients. Catches a mixture with itself, a pull to the own last model, the mixture of
    another client, and weights by rows."""
    algorithm = amp()
    state, info = p.trained(algorithm, p.ROUNDS - 1)
    models, sent = oracle()
    np.testing.assert_allclose(p.own_models(algorithm, state), models, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(p.vector(state.server.mixtures), sent, rtol=1e-4, atol=1e-5)
    assert info["uplink_bytes"].total() == info["downlink_bytes"].total() == COHORT * 12
    np.testing.assert_allclose(p.vector(algorithm.params(state)), models[0], rtol=1e-4, atol=1e-5)


def test_who_never_trained_attracts_nobody():
    """In the first round of one client. Catches start models that pull, and a newcomer without a mixture."""
    algorithm = amp(sampling.cyclic(p.NUM_CLIENTS, 1))
    state, _ = p.trained(algorithm, 1)
    models, sent = p.vector(state.server.models), p.vector(state.server.mixtures)
    np.testing.assert_array_equal(sent[0], models[0])
    np.testing.assert_array_equal(models[1:], np.float32([p.START] * 4))
    assert (np.abs(sent[1:] - models[1:]).max(1) > 1e-4).all()
    assert np.asarray(algorithm.evaluated.has_trained(state, jnp.arange(5))).tolist() == [True] + [False] * 4


@pytest.mark.full
def test_without_a_share_it_is_local_training():
    """Up to rounding, on minibatches: an update is added to the mixture again. Catches others' rows in a model."""
    options = p.OPTIONS | {"batch_size": 2}
    alone = algorithms.local(p.loss_fn, sampling.cyclic(p.NUM_CLIENTS, COHORT), SGD, **options)
    mixed = amp(share=0.0, coefficient=0.0, batch_size=2)
    one, other = (p.own_models(made, p.trained(made)[0]) for made in (mixed, alone))
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_groups_far_apart():
    """Two groups at distance 100 with width 1; inside, equal models. Catches a mean over all, and a mixture of equal
    models that moves."""
    models = jnp.array([[0.0], [100.0], [0.0], [100.0], [0.1]])
    found = _mixtures({"w": models}, jnp.ones(5, bool), 1.0, 1.0)["w"]
    near = np.exp(-0.01) / 4 * 0.1
    np.testing.assert_allclose(found, [[near], [100], [near], [100], [0.1 - 2 * near]], rtol=1e-6)


def test_what_is_refused():
    with refused("sampler", rule="replacement"):
        amp(sampling.with_replacement(p.NUM_CLIENTS, 2))
    with refused("share", rule="1"):
        amp(share=1.5)
    with refused("width", rule="> 0"):
        amp(width=0.0)
