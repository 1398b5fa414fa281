"""The steps of a round: replay, samplers that learn, what a skipped round leaves unchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, aggregation, algorithms, population, run, sampling, transform
from fedjax_sim.round.round import close, collect, invite, observe
from fedjax_sim.types import Work
from tests.laws import problems as p
from tests.refusals import refused
from tests.round.stars import KEY, local, loss_seeking, star, started


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("change", [transform.identity(), transform.quantize(8)])
def test_observe_is_the_round(change):
    """Catches a replay of another cohort, of other draws, or of updates before they were compressed."""
    sampler = sampling.with_dropout(sampling.uniform(p.NUM_CLIENTS, 6), 0.3)
    made = star(sampler, transform=change)
    state, step = started(made), jax.jit(made.step)
    replay = jax.jit(lambda key, state, people: observe(made, key, state, people))
    for t in range(2):
        key = jax.random.fold_in(KEY, t)
        seen = replay(key, state, p.ragged())
        before = made.params(state)
        state, info = step(key, state, p.ragged())
        assert int((seen.weights > 0).sum()) == int(info["clients_reported"]) < 6
        mean = np.average(np.asarray(seen.messages, float), axis=0, weights=np.asarray(seen.weights))
        np.testing.assert_allclose(made.params(state) - before, mean, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(seen.broadcast, before)
        assert not np.asarray(seen.messages)[np.asarray(seen.weights) == 0].any()
        assert len(set(seen.ids.tolist())) == 6
    with refused("algorithm", rule="replay"):
        observe(made._replace(observe=None), KEY, state, p.ragged())


@pytest.mark.full
def test_mime_is_observed_in_both_passes():
    """Catches an observer that misses one of the two messages of a client."""
    work = {"num_steps": 2, "weighting": "uniform", "mesh": None}
    made = algorithms.mime(p.linear_loss, sampling.full(p.NUM_CLIENTS), optax.sgd(0.05), **work)
    state = started(made)
    seen = observe(made, KEY, state, p.ragged())
    assert set(seen.messages) == {"gradient", "update"}
    ids = np.asarray(seen.ids)
    gradients = [jax.grad(lambda w, i=i: mean_loss(w, i))(jnp.array(p.START)) for i in ids]
    np.testing.assert_allclose(seen.messages["gradient"], gradients, rtol=1e-4, atol=1e-6)
    new, _ = jax.jit(made.step)(KEY, state, p.ragged())
    moved = np.asarray(seen.messages["update"], float).mean(0)
    np.testing.assert_allclose(made.params(new) - made.params(state), moved, rtol=1e-4, atol=1e-6)


def mean_loss(params, id):
    data = p.ragged().client(jnp.int32(id))
    examples = jax.tree.map(lambda x: jnp.where(data.mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0), data.examples)
    return jnp.where(data.mask, p.linear_loss(params, examples, None), 0).sum() / data.mask.sum()


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("wrap", [lambda s: s, sampling.with_distinct_clients])
def test_samplers_are_told_and_observe(wrap):
    """Catches losses of other clients or of nobody, and a wrapper that hands on its own state as the sampler's."""
    told = []
    made = star(wrap(loss_seeking(p.NUM_CLIENTS, 4, told)), aggregator=aggregation.mean(weighting="uniform"))
    state = started(made)
    assert isinstance(told[0], Work) and told[0][:3] == (4 * len(p.START), 4 * len(p.START), 2) and told[0].flops > 0
    step, inner = jax.jit(made.step), lambda state: getattr(state.sampler, "sampler", state.sampler)
    for t in range(-(-p.NUM_CLIENTS // 4)):
        before, model = inner(state)["loss"], made.params(state)
        state, _ = step(jax.random.fold_in(KEY, t), state, p.ragged())
        changed = np.flatnonzero(np.asarray(before) != np.asarray(inner(state)["loss"]))
        for id in changed:  # mean of two full-batch steps' losses
            one, _ = local().apply(KEY, model, (), p.ragged().client(jnp.int32(id)))
            loss = one.metrics["local_loss"]
            np.testing.assert_allclose(inner(state)["loss"][id], loss.total / loss.weight, rtol=1e-5)
    assert np.isfinite(inner(state)["loss"]).all()  # everybody was invited


def test_losses_that_were_not_kept():
    """Fault: an `assert` for an algorithm of a user's own, which collects with one star and closes with another."""
    made = star(loss_seeking(p.NUM_CLIENTS, 4, []), aggregator=aggregation.mean(weighting="uniform"))
    blind = made.parts._replace(sampler=made.parts.sampler._replace(observe=None))

    def step(state):
        cohort, _ = invite(made.parts, KEY, state)
        return close(made.parts, KEY, cohort, collect(blind, KEY, cohort, state, p.ragged()), state)

    with refused("gathered.losses", value=None, hint="the star that closes"):
        jax.eval_shape(step, started(made))


@pytest.mark.full
def test_mime_tells_the_costs_of_both_passes():
    """Catches the bytes and operations of the second pass alone: of a round's two messages, half of what is sent."""
    told = []
    work = {"num_steps": 3, "batch_size": 2, "weighting": "uniform"}
    made = algorithms.mime(p.linear_loss, loss_seeking(p.NUM_CLIENTS, 4, told), optax.sgd(0.1), **work)
    _, info = jax.jit(made.step)(KEY, started(made), p.ragged())
    work = told[-1]
    assert (work.bytes_up, work.bytes_down) == tuple(
        info[name].total() // 4 for name in ("uplink_bytes", "downlink_bytes")
    )
    assert work.steps == 3 and [work.before.flops, work.flops] == [one.flops for one in told[:-1]]


def test_a_large_entry_of_info_is_refused():
    """Catches a log of arrays: what a server saw belongs to `observe`."""
    made = star(sampling.full(p.NUM_CLIENTS))

    def step(key, state, population):
        state, info = made.step(key, state, population)
        return state, info | {"messages": jnp.zeros(5_000)}

    with refused("info['messages']", rule="4,096", hint="observe"):
        run(KEY, made._replace(step=step), jnp.array(p.START), p.ragged(), 1)


@pytest.mark.parametrize(
    ("results", "told"), [(lambda state, info: state, "FederatedState"), (lambda *two: two[::-1], "tuple")]
)
def test_a_round_that_returns_something_else_is_refused(results, told):
    """Fault: an error of Python about a state without `items`, for a step of a user's own."""
    made = star(sampling.full(p.NUM_CLIENTS))

    def step(key, state, population):
        return results(*made.step(key, state, population))

    with refused("algorithm.step", value=told, kind=InvalidType):
        run(KEY, made._replace(step=step), jnp.array(p.START), p.ragged(), 1)


def test_skipped_rounds_keep_everything():
    """Catches a rule's or a client's memory that moves in a round whose model did not."""
    rule = aggregation.gather(
        lambda key, updates, weights, ids, round: (updates.mean(0), round.state + 1), start=lambda spec: jnp.zeros(())
    )
    made = star(sampling.full(p.NUM_CLIENTS), aggregator=rule, client=p.counting(local()))
    spoilt = p.ragged(spoil={int(id): 1e30 for id in range(p.NUM_CLIENTS)})
    state, step = started(made), jax.jit(made.step)
    moved, _ = step(KEY, state, p.ragged())
    kept, info = step(KEY, moved, spoilt)
    assert int(info["skipped_rounds"]) == 1 and float(moved.aggregator) == float(kept.aggregator) == 1
    assert all(
        (x == y).all() for x, y in zip(jax.tree.leaves(moved.clients), jax.tree.leaves(kept.clients), strict=True)
    )


def test_the_norm_of_a_change_in_few_bits():
    """Fault: squares in the model's own float16, which are 0 for small changes and infinite for large ones."""
    made = algorithms.fedavg(population.quadratic_loss, sampling.full(4), optax.sgd(1.0), num_steps=1, mesh=None)
    step = jax.jit(made.step)
    for curvature in (1e-4, 300.0):
        people = population.quadratic_population([curvature] * 4, [0.0, 1.0, 2.0, 3.0])
        state, info = step(KEY, made.init(KEY, {"w": jnp.zeros(1, jnp.float16)}, people), people)
        change = float(made.params(state)["w"][0])
        assert change > 0 and float(info["update_norm"]) == pytest.approx(change)
