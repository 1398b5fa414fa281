"""No division of a row is left to the compiler. What else it could round in two ways, `tests/laws/test_devices.py` and
`tests/engine/arithmetic/test_rewriter.py` look for."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

from fedjax_sim import aggregation, client, engine, server, transform
from fedjax_sim.engine.jaxpr import Program, inner_programs, jaxpr_and_constants, walk
from fedjax_sim.round.round import aggregate, collect, invite
from fedjax_sim.types import ClientUpdate, Received, Report
from tests.laws import cases, device_rows, problems as p

KEY = jax.random.key(0)


def divisions(program: Program) -> Iterator[bool]:
    """For each division of floats, whether both of its numbers come through their bits."""
    program, _ = jaxpr_and_constants(program)
    made_by = {x: equation.primitive.name for equation in program.eqns for x in equation.outvars}
    for equation in program.eqns:
        if equation.primitive.name == "div" and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
            yield all(
                not isinstance(x, core.Literal) and made_by.get(x) == "bitcast_convert_type" for x in equation.invars
            )
        for _, inner in inner_programs(equation):
            yield from divisions(inner)


def of_a_round(algorithm, data, params=p.START) -> list[bool]:
    state = jax.eval_shape(lambda: algorithm.init(KEY, jax.tree.map(jnp.array, params), data))
    return list(divisions(jax.make_jaxpr(algorithm.step)(KEY, state, data).jaxpr))


OTHERS = [  # parts that no recipe has
    (kind, name) for kind in ("client", "server") for name in cases.named(kind, lambda row: not row.in_recipes)
]
ROWS = [
    (kind, name) for kind in ("algorithms", "transform", "aggregation", "sampling") for name in device_rows.names(kind)
]
FAMILIES = ("dpsgd", "fedasync", "scaffold", "clip", "gather", "krum", "mean")


@pytest.mark.default_rows(*FAMILIES)
@pytest.mark.parametrize("kind, name", ROWS)
def test_no_row_divides_bare(kind, name):
    """Catches A / c that becomes A (1 / c) on one device and not on two: a mean, a norm, a rate, an optimiser's own."""
    found = of_a_round(device_rows.algorithm(kind, name, lambda sampler: sampler), p.ragged())
    assert found and all(found), found


@pytest.mark.parametrize("kind, name", OTHERS)
def test_nor_do_parts_of_no_recipe(kind, name):
    """Catches the same in clients and servers that are put together by hand."""
    row = cases.CASES[kind][name]
    parts = {kind: row()} | {other: make() for other, make in row.needs.items()}
    found = of_a_round(device_rows.star(**parts), p.ragged(), row.start())
    assert found and all(found), found


def divided(x):
    """x / 27, a third of it in each of a loop, a branch and a call."""
    x = jax.lax.fori_loop(0, 1, lambda i, x: x / 3, x)
    return jax.jit(lambda x: x / 3)(jax.lax.cond(x.sum() > 0, lambda x: x / 3, lambda x: x / 3.0, x))


def test_nor_does_what_a_user_brings():
    """Divisions in each of a user's own parts. Catches a part that is run as it was written."""

    def sample(key, state):
        cohort, state = cases.SAMPLER.sample(key, state)
        return cohort._replace(reported=cohort.reported & (divided(jax.random.uniform(key, (3,))) > -1).all()), state

    def accumulate(key, cohort, carry, received):
        return rule.accumulate(key, cohort, carry, received._replace(updates=divided(received.updates)))

    def observe(state, cohort, outcome):
        return divided(state + outcome.losses)

    work = client.local_sgd(
        lambda *args: divided(p.linear_loss(*args)), optax.adam(p.RATE), client.work(num_steps=2, batch_size=3)
    )
    rule = aggregation.gather(lambda key, updates, weights, ids: divided(updates.sum(0)) / weights.sum())
    step = server.optimizer(optax.sgd(1.0))
    counts = []
    for own in ("none", "all"):
        parts, sampler = {"client": work, "aggregator": rule, "server": step}, cases.SAMPLER
        if own == "all":
            sampler = sampler._replace(init=lambda: jnp.zeros(p.SLOTS), sample=sample, observe=observe)
            parts["aggregator"] = rule._replace(accumulate=accumulate)
            parts["client"] = work._replace(apply=lambda key, model, *rest: work.apply(key, divided(model), *rest))
            parts["transform"] = transform.stateless(lambda key, x: divided(x))
            parts["server"] = step._replace(
                apply=lambda key, aggregate, state: step.apply(key, divided(aggregate), state),
                broadcast=lambda state: divided(step.broadcast(state)),
            )
        found = of_a_round(device_rows.star(sampler, **parts), p.ragged())
        assert all(found)
        counts.append(len(found))
    assert counts[1] >= counts[0] + 28  # four each in seven places


def test_nor_does_a_step_alone():
    """Catches an aggregate that is rounded in one way by `close` and in another where an algorithm asks for it."""
    rule = aggregation.gather(lambda key, updates, weights, ids: divided(updates.sum(0)) / weights.sum())
    made, data = device_rows.star(aggregator=rule), p.ragged()

    def update(key, state):
        cohort, _ = invite(made.parts, key, state)
        return aggregate(made.parts, key, cohort, collect(made.parts, key, cohort, state, data), state)

    found = list(divisions(jax.make_jaxpr(update)(KEY, made.init(KEY, jnp.array(p.START), data)).jaxpr))
    assert len(found) > 4 and all(found)


def long_sums(rule) -> list[tuple[int, ...]]:
    """Shapes of the sums of floats in an aggregator of 64 messages of 2^19 numbers that are left to the compiler."""
    slots, spec = 64, jax.ShapeDtypeStruct((1 << 19,), jnp.float32)

    def aggregate_all(updates, weights, ids, round):
        carry = rule.accumulate(KEY, round, rule.init(spec, slots), Received(updates, weights, ids, ids))
        return rule.finalize(KEY, round, carry)

    rows = [
        jax.ShapeDtypeStruct((slots, *shape), dtype) for shape, dtype in ((spec.shape, jnp.float32), ((), jnp.float32))
    ]
    ids = jax.ShapeDtypeStruct((slots,), jnp.int32)
    program = jax.make_jaxpr(engine.reproducible(aggregate_all))(*rows, ids, cases.round_for(rule))
    sums = [x.invars[0].aval for x in walk(program) if x.primitive.name == "reduce_sum"]
    return [x.shape for x in sums if jnp.issubdtype(x.dtype, jnp.floating) and x.size > 1 << 24]


@pytest.mark.full
def test_no_long_sum_over_messages_is_left_to_the_compiler():
    """Catches a rule that adds up more than 2^24 numbers by `x.sum()`, whose order then follows the devices."""
    for name in cases.named("aggregation", lambda row: row.long_messages):
        assert long_sums(cases.CASES["aggregation"][name]()) == [], name
    assert long_sums(aggregation.gather(lambda key, updates, weights, ids: updates.sum(0))) == [(64, 1 << 19)]


def test_the_law_sees_bare_divisions():
    """Guards the laws above."""
    program = jax.make_jaxpr(lambda x: (divided(x), x // 2.0))(jnp.ones(3)).jaxpr
    assert list(divisions(program)).count(False) >= 4


@pytest.mark.full
def test_clients_keep_zeros_without_their_sign():
    """Catches -0.0 in a client's memory, which another program makes 0.0: SCAFFOLD's, of pixels that are never on."""

    def apply(key, broadcast, state, data):
        return Report(jax.tree.map(jnp.ones_like, broadcast), jnp.float32(1), {}), -jnp.abs(state)

    work = ClientUpdate(lambda params: jnp.zeros(3), apply)
    memory = transform.error_feedback(transform.top_k(count=3))  # nothing is left out: 0 is remembered
    federation = p.Federation(client=work, transform=memory, aggregator=aggregation.mean())
    state = federation.run(p.COHORT, num_rounds=1)[0]
    for x in jax.tree.leaves((state.clients, state.memory)):
        assert not np.signbit(np.asarray(x)[np.asarray(x) == 0]).any()
