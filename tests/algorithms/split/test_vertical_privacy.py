"""What noise and clips on the links of a vertical federation do, and what they do not."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, models, population, sampling, transform
from fedjax_sim.network.link import link

RNG = np.random.default_rng(0)
ROWS = 60
X = RNG.normal(size=(ROWS, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
MODEL = models.vertical_mlp(columns=(2, 2), num_outputs=1, embedding=2, top=(4,))
START = MODEL.init(jax.random.key(0))[0]
LOSS = models.sigmoid_cross_entropy


def trained(x, rounds=1, **ways):
    made = algorithms.vertical(MODEL, LOSS, sampling.full(1), optax.sgd(0.5), num_steps=1, mesh=None, **ways)
    data = population.stored({"x": x, "y": Y}, [0, ROWS])
    state, step = made.init(jax.random.key(0), START, data), jax.jit(made.step)
    for t in range(rounds):
        state, _ = step(jax.random.fold_in(jax.random.key(1), t), state, data)
    return made.params(state)


def sent(params, x, **ways):
    """What party 0 receives of party 1."""
    seen = algorithms.vertical_transcript(
        MODEL, LOSS, params, {"x": x, "y": Y}, link=link(**ways), key=jax.random.key(5)
    )
    return np.asarray(seen.seen_by(0)[0].value)


@pytest.mark.full
def test_a_trained_bottom_carries_a_row_into_others():
    """Row 0 of party 1 is another one's: at the start only its own message changes, after a step all others do.

    So an epsilon that counts a row's own messages alone is wrong for trained bottoms.
    """
    other = X.copy()
    other[0, 2:] += 3
    changed = (sent(START, X) != sent(START, other)).any(1)
    assert changed[0] and not changed[1:].any()
    rest = (sent(trained(X), X) != sent(trained(other), other)).any(1)
    assert rest[1:].mean() > 0.9


def test_a_row_may_be_sent_in_every_round():
    """Eight rounds of half an epoch: some row is sent more than the four times that epochs say, none more than eight.

    Party 1 holds the identity matrix, so its weight r moves in a round if row r was sent. Of 60 rows, each with chance
    1/2 a round, all stay at four times or less with a chance of 0.64^60, 2e-12.
    """
    model = models.vertical_linear(columns=(1, ROWS), num_outputs=1)
    how = {"num_steps": 1, "batch_size": ROWS // 2, "mesh": None}
    made = algorithms.vertical(model, LOSS, sampling.full(1), optax.sgd(0.5), **how)
    data = population.stored({"x": np.concatenate([X[:, :1], np.eye(ROWS, dtype=np.float32)], 1), "y": Y}, [0, ROWS])
    state, step = made.init(jax.random.key(0), model.init(jax.random.key(0))[0], data), jax.jit(made.step)
    visits, before = np.zeros(ROWS, int), np.zeros(ROWS)
    for t in range(8):
        state, _ = step(jax.random.fold_in(jax.random.key(1), t), state, data)
        after = np.asarray(made.params(state)["parties"]["party_1"]["score"]["kernel"])[:, 0]
        visits, before = visits + (after != before), after
    assert visits.sum() == 8 * ROWS // 2 and 4 < visits.max() <= 8


@pytest.mark.full
def test_messages_are_clipped_and_bear_their_noise():
    """No message longer than C; with noise, a variance of (z C)^2 = 1 a number.

    Of 120 draws 0.5 is 3.9 standard errors; half or twice the noise is 0.75 or 3 away.
    """
    clipped = sent(START, 100 * X, forward=transform.local_gaussian(0.5, 0.0))
    assert np.linalg.norm(clipped, axis=1).max() <= 0.5 * (1 + 1e-6) and np.linalg.norm(clipped, axis=1).min() > 0.49
    noisy = sent(START, 100 * X, forward=transform.local_gaussian(0.5, 2.0))
    assert abs(np.var(noisy - clipped) - 1) < 0.5 and len({float(x) for x in (noisy - clipped).ravel()}) == noisy.size


@pytest.mark.full
def test_no_noise_is_exact_and_more_costs_more():
    """A clip above every message, and noise 0, change nothing; noise of 30 clip norms learns nothing.

    Catches noise that is drawn at the parties' own end only.
    """
    plain, clipped = trained(X, 30), trained(X, 30, forward=transform.local_gaussian(1e3, 0.0))
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(clipped), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)

    def loss(params):
        return float(algorithms.vertical_loss(MODEL, LOSS)(params, {"x": X, "y": Y})["loss"].mean())

    drowned = trained(X, 30, forward=transform.local_gaussian(0.5, 30.0))
    assert loss(plain) < 0.35 < loss(drowned)


@pytest.mark.full
def test_noise_back_moves_bottoms_and_not_the_top():
    """Noise on the gradients reaches party 1's parameters, and in the first step nobody else's."""
    plain, noisy = trained(X), trained(X, backward=transform.local_gaussian(1.0, 1.0))
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), plain, noisy)
    own = gaps["parties"].pop("party_1")
    assert min(jax.tree.leaves(own)) > 0 and max(jax.tree.leaves(gaps)) < 1e-6


@pytest.mark.full
def test_each_party_has_a_link_of_its_own():
    """Noise of one party reaches its messages alone, and its bytes are its own. Catches the first link for all."""
    model = models.vertical_mlp(columns=(2, 1, 1), num_outputs=1, embedding=2)
    params, loss = model.init(jax.random.key(0))[0], models.sigmoid_cross_entropy
    links = {"party_2": link(forward=transform.local_gaussian(1.0, 1.0), encrypted=True)}

    def messages(**how):
        seen = algorithms.vertical_transcript(model, loss, params, {"x": X, "y": Y}, key=jax.random.key(5), **how)
        return {message.source: (np.asarray(message.value), message.encrypted) for message in seen.seen_by(0)}

    plain, noisy = messages(), messages(link=links)
    np.testing.assert_array_equal(plain[1][0], noisy[1][0])
    assert (plain[2][0] != noisy[2][0]).all() and [noisy[p][1] for p in (1, 2)] == [False, True]
    how = {"num_steps": 1, "mesh": None}
    made = algorithms.vertical(model, loss, sampling.full(1), optax.sgd(0.1), links=links, **how)
    data = population.stored({"x": X, "y": Y}, [0, ROWS])
    info = jax.jit(made.step)(jax.random.key(0), made.init(jax.random.key(0), params, data), data)[1]
    assert info["forward_bytes"].total() == ROWS * 2 * 8 + 28
    for wrong in ({"links": {"party_0": link()}}, {"links": links, "encrypted": True}):
        with pytest.raises(ValueError, match="link"):
            algorithms.vertical(model, loss, sampling.full(1), optax.sgd(0.1), **how, **wrong)


def test_noise_that_keeps_a_sum_is_refused():
    with pytest.raises(ValueError, match="noise on each message"):
        trained(X, forward=transform.gaussian_mechanism(1.0, 1.0))
