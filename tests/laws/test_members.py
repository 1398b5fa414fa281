"""Every public factory of the subpackages that make up a round obeys the same laws."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, server
from fedjax_sim.transform.chain import wire_of
from tests.laws import cases, laws, problems as p

pytestmark = pytest.mark.optimised(False)  # bits that are compared here are those of one program
KEY = jax.random.key(0)
TRANSFORMS = ("clip", "error_feedback", "gaussian_mechanism", "privunit", "qsgd", "rotated", "scaled_sign", "top_k")


@pytest.mark.every_row
@pytest.mark.parametrize("subpackage", cases.SUBPACKAGES)
def test_every_member_has_a_row(subpackage):
    """Catches a part without a row, which nobody tests, or one whose type is written in another way than in
    `cases.RETURNED`, so that it is taken for no part; and a row whose part is gone."""
    others = set(cases.functions(subpackage)) - set(cases.members(subpackage))
    expected = cases.NO_PARTS.get(subpackage, set())
    assert others == expected, "annotate a part as cases.RETURNED has it; add what is none to cases.NO_PARTS"
    without_row = set(cases.members(subpackage)) - cases.CASES[subpackage].keys()
    without_part = cases.CASES[subpackage].keys() - set(cases.members(subpackage))
    assert not without_row, f"add a row to cases.CASES[{subpackage!r}] in tests/laws/cases.py"
    assert not without_part, "a row of tests/laws/cases.py names no public part"


RECIPES = cases.named("algorithms", lambda row: row.named_arguments)


@pytest.mark.parametrize("name", RECIPES)
def test_wrong_arguments_of_a_recipe_are_named(name):
    """Catches Python's own error for options without a name, missing arguments, and names of other libraries."""
    recipe = getattr(algorithms, name)
    for arguments, options, words in (
        ([None] * 30, {}, r"at most \d arguments without a name \(.*\), got 30"),
        ([], {}, "its argument .*, got nothing"),
        ([], {"lr": 0.1}, "one of its arguments, got 'lr'"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected {words}"):
            recipe(*arguments, **options)


@pytest.mark.parametrize("name", cases.compiled_rows("sampling"))
def test_samplers(name):
    """Catches ids out of range in padding, reports of the uninvited, state that changes shape, keys ignored."""
    sampler = cases.CASES["sampling"][name]()
    sample = jax.jit(sampler.sample)
    cohort, state = sample(KEY, sampler.init())
    chex.assert_trees_all_equal_shapes_and_dtypes(sampler.init(), state)
    again, _ = sample(KEY, sampler.init())
    assert p.digest(cohort) == p.digest(again)
    assert cohort.ids.shape == cohort.invited.shape == cohort.reported.shape == (sampler.num_slots,)
    assert (cohort.ids.dtype, cohort.invited.dtype, cohort.reported.dtype) == (jnp.int32, jnp.bool_, jnp.bool_)
    assert sampler.design.population_size == p.NUM_CLIENTS and sampler.design.num_slots == sampler.num_slots
    others = [sample(jax.random.key(seed), sampler.init())[0] for seed in range(1, 9)]
    for cohort in others:
        ids = np.asarray(cohort.ids)
        assert ((ids >= 0) & (ids < p.NUM_CLIENTS)).all()
        assert not (np.asarray(cohort.reported) & ~np.asarray(cohort.invited)).any()
    design = sampler.design
    invites_everybody = design.cohort_size == design.population_size and not design.replacement
    assert (len({p.digest(cohort) for cohort in others}) > 1) != (invites_everybody and not design.response_rates)


def client_row(name):
    """(client, broadcast, state) of a row."""
    row = cases.CASES["client"][name]
    one, broadcast = row(), row.broadcast(jnp.array(p.START))
    return one, broadcast, one.init(broadcast)


@pytest.mark.parametrize("name", cases.CASES["client"])
def test_clients_keep_the_structure(name):
    """Catches state or an update that changes shape or dtype, and a weight that is no scalar."""
    one, broadcast, state = client_row(name)
    report, after = jax.eval_shape(lambda data: one.apply(KEY, broadcast, state, data.client(0)), p.ragged())
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert report.weight.shape == ()


@pytest.mark.parametrize("name", cases.compiled_rows("client"))
def test_clients(name):
    """Catches padding rows that reach the update, and an empty client that counts."""
    one, broadcast, state = client_row(name)
    data = p.ragged()
    apply = jax.jit(lambda data, id: one.apply(KEY, broadcast, state, data.client(id)))
    report, _ = apply(data, 0)
    loud = type(data)(data.size, data.generate, data.parameters | {"x": jnp.nan_to_num(data.parameters["x"], nan=1e30)})
    laws.check_equal_bits(report, apply(loud, 0)[0], "padding rows")
    assert float(report.weight) == p.SIZES[0]
    empty = apply(p.ragged(sizes=np.zeros(p.NUM_CLIENTS, int)), 0)[0]
    assert float(empty.weight) == 0 and bool(engine.all_finite(empty))


@pytest.mark.default_rows(*TRANSFORMS)
@pytest.mark.parametrize("name", cases.CASES["transform"])
def test_transforms(name):
    """Catches a declared bound or nonexpansiveness that does not hold, and state that changes shape."""
    member = cases.CASES["transform"][name]()
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    state, memory = member.init(spec), member.init_client(spec)

    def both_ends(update):
        message, new, measured = member.on_client(KEY, update, state, memory)
        return message, new, member.on_server(KEY, None, message, state, measured, None)[1]

    _, new, after = jax.eval_shape(both_ends, spec)
    chex.assert_trees_all_equal_shapes_and_dtypes((memory, state), (new, after))
    scales = np.array([0.0, 1e-38, 1e-3, 1.0, 1e3, 1e18], np.float32)[:, None]
    updates = scales * np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    messages = jax.jit(jax.vmap(lambda update: both_ends(update)[0]))(updates)
    lengths, before = (np.linalg.norm(np.float64(x), axis=1) for x in (messages, updates))
    assert member.facts.l2_bound is None or (lengths <= member.facts.l2_bound * (1 + 1e-6)).all()
    assert not member.facts.nonexpansive or (lengths <= before * (1 + 1e-6)).all()
    wire = wire_of(member, spec)
    assert all(type(x) is int and x >= 0 for x in (wire.values, wire.payload_bits, wire.side_bits, wire.coded))
    assert wire.bits > 0


@pytest.mark.parametrize("name", cases.CASES["server"])
def test_servers(name):
    """Catches a server whose state or model changes structure or dtype in a step."""
    row = cases.CASES["server"][name]
    member = row()
    params = {"w": jnp.ones(3), "half": jnp.ones(2, jnp.bfloat16)}
    state = member.init(params)
    aggregate = row.aggregate(jax.tree.map(lambda x: x.astype(jnp.float32), params))
    after = jax.eval_shape(member.apply, KEY, aggregate, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, member.params(state))
    received = row.model_in(member.broadcast(state))
    chex.assert_trees_all_equal_shapes_and_dtypes(row.known(params), received)


@pytest.mark.default_rows("dpsgd", "fedasync", "kmeans", "scaffold")
@pytest.mark.parametrize("name", cases.traced_rows())
def test_algorithms_keep_the_structure(name):
    """Catches state that grows or changes its type in a round."""
    algorithm = cases.CASES["algorithms"][name]()
    data = p.ragged()
    state = jax.eval_shape(lambda: algorithm.init(KEY, jnp.array(p.START), data))
    after, _ = jax.eval_shape(algorithm.step, KEY, state, data)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    chex.assert_trees_all_equal_shapes_and_dtypes(jnp.array(p.START), jax.eval_shape(algorithm.params, after))


@pytest.mark.default_rows("fedadam")
@pytest.mark.parametrize("name", cases.compiled_rows("algorithms"))
def test_algorithms(name):
    """Vmapped over seeds in one program: the same seed the same bits, another seed another model, and it learns.

    Catches keys that ignore the seed, parts that cannot be vmapped, a step uphill.
    """
    row, data = cases.CASES["algorithms"][name], p.ragged()
    algorithm = row()
    state = algorithm.init(KEY, jnp.array(p.START), data)

    @jax.jit
    def run(keys, state, data):
        def one(key):
            def body(state, key):
                return algorithm.step(key, state, data)

            return jax.lax.scan(body, state, jax.random.split(key, 48))

        return jax.vmap(one)(keys)

    keys = jax.vmap(jax.random.key)(jnp.array([0, 0, 1]))
    last, info = run(keys, state, data)
    models = np.asarray(jax.vmap(algorithm.params)(last))
    assert models[0].tobytes() == models[1].tobytes() and (models[0] != models[2]).any()
    if row.trains:
        losses = np.asarray(info.get("local_loss", info.get("consensus_distance")))  # where rounds only mix
        assert (losses[:, -12:].mean(1) < losses[:, :12].mean(1)).all()
    assert (np.asarray(info["dropped_clients"]) == 0).all() and (np.asarray(info["skipped_rounds"]) == 0).all()


def test_server_rates_may_be_swept():
    """Numeric hyper-parameters as tracers. Catches validation or constants that need a Python number."""

    def model(rate):
        step = server.optimizer(server.adaptive("adam", rate))
        return step.params(step.apply(KEY, jnp.ones(2), step.init(jnp.zeros(2))))

    swept = jax.vmap(model)(jnp.array([0.1, 0.2]))
    np.testing.assert_allclose(swept, [model(0.1), model(0.2)], rtol=1e-6)
    plain = jax.vmap(lambda rate: server.optimizer(optax.sgd(rate)).init(jnp.zeros(2)).params)(jnp.array([0.1]))
    assert plain.shape == (1, 2)
