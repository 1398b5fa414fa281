"""The steps of a round: replay, counts of clients, samplers that learn, what a skipped round leaves unchanged."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, engine, models, population, run, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.round.costs import plan_of
from fedjax_sim.round.round import invite, observe
from fedjax_sim.types import ClientData, Count, Execution, Sampler, Work
from tests.laws import problems as p

KEY = jax.random.key(3)


def local(**options):
    return client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(**({"num_steps": 2} | options)))


def star(sampler, **parts):
    parts = {"client": local(), "aggregator": aggregation.mean(), "server": server.optimizer(optax.sgd(1.0))} | parts
    return federated(sampler, **parts, plan=p.PLAN, mesh=None)


def started(algorithm):
    return algorithm.init(KEY, jnp.array(p.START), p.ragged())


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
    with pytest.raises(ValueError, match="algorithm: expected one that can replay its rounds"):
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


def counted(amount, dtype=jnp.uint32):
    """Clients that report a count, in proportion to their size."""
    work = local()

    def apply(key, broadcast, state, data):
        report, state = work.apply(key, broadcast, state, data)
        return report._replace(counts={"inner_bytes": jnp.asarray(amount, dtype) * data.mask.sum(dtype=dtype)}), state

    return work._replace(apply=apply)


def test_counts_are_exact():
    """Past 2^32 in a sum, on two devices. Catches float sums, a sum that wraps, clients that did not take part."""
    amount, sampler = 200_000_003, sampling.with_dropout(sampling.full(p.NUM_CLIENTS), 0.3)
    parts = sampler, counted(amount), aggregation.mean(), server.optimizer(optax.sgd(1.0))
    made = federated(*parts, plan=p.PLAN, mesh=engine.device_mesh(2))
    state = started(made)
    cohort, _ = jax.jit(lambda state: invite(made.parts, KEY, state))(state)
    there = np.asarray(cohort.reported)
    assert 0 < there.sum() < p.NUM_CLIENTS
    expected = int(amount) * int(p.SIZES[np.asarray(cohort.ids)[there]].sum())
    _, info = jax.jit(made.step)(KEY, state, p.ragged())
    assert isinstance(info["inner_bytes"], Count) and info["inner_bytes"].total() == expected > 2**33  # on a device


def test_counts_are_counts():
    """Catches a float that a sum of bytes would round."""
    made = star(sampling.full(p.NUM_CLIENTS), client=counted(1, jnp.float32))
    with pytest.raises(TypeError, match=r"counts\['inner_bytes'\]: expected a scalar of an integer dtype"):
        jax.eval_shape(made.step, KEY, started(made), p.ragged())


@pytest.mark.full
def test_counts_of_a_log_are_integers():
    """Catches a count that is rounded, or a float, on its way into a log."""
    made = star(sampling.full(p.NUM_CLIENTS), client=counted(5))
    _, history = run(KEY, made, jnp.array(p.START), p.ragged(), 2)
    assert [record["inner_bytes"] for record in history.records] == [5 * int(p.SIZES.sum())] * 2


def loss_seeking(size, slots, told):
    """Invites the clients whose last loss was highest, unseen ones first: a sampler that learns."""

    def sample(key, state):
        cohort, _ = sampling.uniform(size, slots).sample(key, ())
        ids = jax.lax.top_k(state["loss"], slots)[1].astype(jnp.int32)
        return cohort._replace(ids=ids), state

    def observe(state, cohort, outcome):
        known = jnp.where(outcome.arrived, outcome.losses, state["loss"][cohort.ids])
        return state | {"loss": state["loss"].at[cohort.ids].set(known)}

    def tell(state, work):
        told.append(work)
        return state

    design = dataclasses.replace(sampling.uniform(size, slots).design, scheme="unknown_without_replacement")
    return Sampler(
        init=lambda: {"loss": jnp.full(size, jnp.inf)},
        sample=sample,
        num_slots=slots,
        design=design,
        tell=tell,
        observe=observe,
    )


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

    with pytest.raises(ValueError, match=r"info\['messages'\]: expected at most 4,096 numbers.*observe"):
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


def test_quadratic_clients_have_known_work():
    """Catches bytes or steps of another part in what samplers are told."""
    told = []
    people = population.quadratic_population([1.0] * 4, [0.0, 1.0, 2.0, 3.0])
    sampler = loss_seeking(4, 2, told)
    work = client.local_sgd(population.quadratic_loss, optax.sgd(0.1), client.work(num_epochs=3, batch_size=1))
    change = {"transform": transform.quantize(8), "downlink": transform.quantize(8)}
    made = federated(sampler, work, aggregation.total(), server.optimizer(optax.sgd(1.0)), **change, mesh=None)
    made.init(KEY, {"w": jnp.zeros(1)}, people)
    assert told[0].bytes_up == told[0].bytes_down < 8 and int(told[0].steps(5)) == 15


def test_plans_fit_the_work():
    """Catches lanes by the message alone, where larger minibatches fill the cache, and by the devices."""

    def lanes(batch_size, mesh=None):
        work = client.local_sgd(p.mlp_loss, optax.sgd(0.1), client.work(num_steps=2, batch_size=batch_size))
        made = star(sampling.uniform(100, 64), client=work)
        rows = {"x": np.zeros((100 * 512, p.WIDTH), np.float32), "y": np.zeros(100 * 512, np.float32)}
        people = population.stored(rows, np.arange(101) * 512)
        return plan_of(made.parts._replace(execution=Execution(mesh=mesh)), p.mlp_params(), people).lanes

    assert lanes(4) > lanes(256) >= 1
    assert lanes(4) == lanes(4, engine.device_mesh(2))


def test_plans_of_convolutions():
    """Catches lanes of clients on a CPU, where their convolutions would be slow, and lanes that accelerators lose."""
    model = models.cnn(input_shape=(8, 8, 32), num_outputs=3, channels=(4,))
    loss = models.supervised(model, models.softmax_cross_entropy)
    work = client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=1))
    rows = {"x": np.zeros((100, 8, 8, 32), np.float32), "y": np.zeros(100, np.int32)}
    people = population.stored(rows, np.arange(101))
    made = star(sampling.full(100), client=work).parts
    params, _ = jax.eval_shape(model.init, KEY)
    assert plan_of(made, params, people) == engine.Plan(1, 1)
    with engine.compiling_for("cuda"):
        assert plan_of(made, params, people).lanes == 100


@pytest.mark.full
def test_client_memory_is_written_in_place():
    """Rounds in a loop, their info kept: the program needs less than half of what all clients remember beside it.

    Catches a late read of the memory's old rows, for which the compiler copies it whole in every round.
    """
    size, width = 4_000, 500
    people = population.generated(size, wide_row, jnp.zeros(width))

    def loss(params, examples, key):
        return ((params[None] - examples["x"]) ** 2).sum(-1)

    work = client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=1))
    change = {"transform": transform.error_feedback(transform.top_k(0.1))}
    made = star(sampling.uniform(size, 4), client=work, **change)
    state = made.init(KEY, jnp.zeros(width), people)

    def rounds(state, count):
        _, info = jax.eval_shape(made.step, KEY, state, people)
        kept = jax.tree.map(lambda x: jnp.zeros((8, *x.shape), x.dtype), info)

        def one(i, carry):
            state, kept = carry
            state, info = made.step(jax.random.fold_in(KEY, i), state, people)
            return state, jax.tree.map(lambda rows, x: rows.at[i].set(x), kept, info)

        return jax.lax.fori_loop(0, count, one, (state, kept))

    compiled = jax.jit(rounds, donate_argnums=0).lower(state, 8).compile()
    assert engine.needs(compiled).temporary < 4 * size * width / 2


def wide_row(parameters, id):
    """One example a client."""
    return ClientData({"x": (parameters + id)[None]}, jnp.ones(1, bool))


def test_the_norm_of_a_change_in_few_bits():
    """Fault: squares in the model's own float16, which are 0 for small changes and infinite for large ones."""
    made = algorithms.fedavg(population.quadratic_loss, sampling.full(4), optax.sgd(1.0), num_steps=1, mesh=None)
    step = jax.jit(made.step)
    for curvature in (1e-4, 300.0):
        people = population.quadratic_population([curvature] * 4, [0.0, 1.0, 2.0, 3.0])
        state, info = step(KEY, made.init(KEY, {"w": jnp.zeros(1, jnp.float16)}, people), people)
        change = float(made.params(state)["w"][0])
        assert change > 0 and float(info["update_norm"]) == pytest.approx(change)
