"""FedAsync: against an event loop in NumPy, in blocks and one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, population
from fedjax_sim.algorithms.asynchronous.fedasync import _between, _chain
from fedjax_sim.algorithms.asynchronous.in_flight import Traffic
from fedjax_sim.population.store import write_store
from fedjax_sim.round.collect import in_turn
from fedjax_sim.server.staleness import hinge
from tests.algorithms.asynchronous import test_arrivals as events
from tests.algorithms.asynchronous.test_asynchronous import (
    CENTERS,
    CURVATURES,
    RATE,
    SIZE,
    arrivals,
    clients,
    quadratic,
    run,
)
from tests.laws.laws import check_equal_bits

ALPHA, PROX = 0.6, 0.4


def proximal(w, id):
    """Two steps on the client's risk and (PROX / 2) |w - start|^2."""
    start = w
    for _ in range(2):
        w = w - RATE * (CURVATURES[id] * (w - CENTERS[id]) + PROX * (w - start))
    return w - start


def mixed(versions, id, base, gap):
    """The next version."""
    factor = ALPHA * (1 if gap <= 4 else 1 / (10 * (gap - 4) + 1))
    return (1 - factor) * versions[-1] + factor * (versions[base] + proximal(versions[base], id))


def options(**own):
    return {"concurrency": 9, "mixing_rate": ALPHA, "staleness": hinge(10.0, 4), "coefficient": PROX} | own


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(("block", "oldest"), [(1, 200), (4, 200), (4, 8)])
def test_fedasync_is_the_event_loop(block, oldest):
    """Catches an update that is mixed in from a version that it was not sent, a factor of another gap, a block that is
    used past its end, versions that are missing in the ring, a cut block that writes over one in use."""
    made = quadratic(algorithms.fedasync, **options(arrivals_per_step=block, max_staleness=oldest))
    found, infos, _ = run(made, {"w": jnp.zeros(1)}, clients(), 16)
    devices = events.devices(SIZE)
    traffic = Traffic(devices, concurrency=9, block=block, buffer_size=1, max_staleness=oldest, refill="other")
    loop, versions = events.Loop(traffic), [0.0]
    gaps, sizes = set(), set()
    for t, model in enumerate(found):
        rows, old = arrivals(loop, t)
        for id, base, gap, _ in rows:
            versions.append(mixed(versions, id, base, gap))
            gaps.add(gap)
        np.testing.assert_allclose(model["w"], versions[-1], rtol=2e-5, atol=1e-6)
        assert infos[t]["clients_reported"] == len(rows)
        sizes.add(len(rows))
        if old:  # the loop does not fill the places of those who were stopped
            break
    assert block == 1 or len(sizes) > 1, "no block was cut"
    assert old == 0 if oldest == 200 else oldest in gaps


@pytest.mark.full
def test_blocks_change_nothing():
    """The same clients again, whose delays are their own: the same versions in blocks of one and of five."""
    histories = []
    for block in (1, 5):
        made = quadratic(algorithms.fedasync, **options(arrivals_per_step=block, refill="same", max_staleness=200))
        found, infos, _ = run(made, {"w": jnp.zeros(1)}, clients(), 40 // block if block == 1 else 25)
        counts = np.cumsum([int(info["clients_reported"]) for info in infos])
        seconds = [float(info["simulated_seconds"]) for info in infos]
        histories.append({n: (float(m["w"][0]), s) for n, m, s in zip(counts, found, seconds, strict=True)})
    common = histories[0].keys() & histories[1].keys()
    assert len(common) > 5
    for n in common:
        np.testing.assert_allclose(histories[0][n], histories[1][n], rtol=1e-6)


@pytest.mark.full
def test_a_message_that_is_not_finite():
    """It changes nothing, is counted, and makes a version all the same. Catches NaN that is mixed in."""
    bad = 9

    def loss(params, examples, key):
        wrong = jnp.abs(examples["center"] - jnp.float32(CENTERS[bad])).max(1) < 1e-6
        values = population.quadratic_loss(params, examples, key)["loss"]
        return jnp.where(wrong, jnp.nan, 1.0) * values

    made = algorithms.fedasync(
        loss,
        events.devices(SIZE),
        optax.sgd(RATE),
        population_size=SIZE,
        num_steps=2,
        mesh=None,
        **options(arrivals_per_step=4, max_staleness=200),
    )
    found, infos, _ = run(made, {"w": jnp.zeros(1)}, clients(), 25)
    devices = events.devices(SIZE)
    traffic = Traffic(devices, concurrency=9, block=4, buffer_size=1, max_staleness=200, refill="other")
    loop, versions, lost = events.Loop(traffic), [0.0], 0
    for t, model in enumerate(found):
        dropped = 0
        for id, base, gap, _ in arrivals(loop, t)[0]:
            dropped += id == bad
            versions.append(versions[-1] if id == bad else mixed(versions, id, base, gap))
        np.testing.assert_allclose(model["w"], versions[-1], rtol=2e-5, atol=1e-6)
        assert int(infos[t]["dropped_clients"]) == dropped
        lost += dropped
    assert lost > 0


@pytest.mark.full
def test_a_factor_that_is_none():
    """A message whose mixing rate is not in [0, 1] changes nothing, where a sweep varies it: known ones are refused.
    Catches NaN in the model, and mixing too much."""

    def strange(gaps, one=1.0):
        return one * jnp.where(gaps % 3 == 0, jnp.nan, jnp.where(gaps % 3 == 1, 2.0, 1.0))

    def fedasync(**own):
        return quadratic(algorithms.fedasync, **options(arrivals_per_step=4, max_staleness=200, **own))

    @jax.jit
    def swept(one, *given):
        return fedasync(staleness=lambda gaps: strange(gaps, one)).step(*given)

    made = fedasync()._replace(step=lambda *given: swept(jnp.float32(1), *given))
    found, _, _ = run(made, {"w": jnp.zeros(1)}, clients(), 16)
    devices = events.devices(SIZE)
    traffic = Traffic(devices, concurrency=9, block=4, buffer_size=1, max_staleness=200, refill="other")
    loop, versions = events.Loop(traffic), [0.0]
    for t, model in enumerate(found):
        for id, base, gap, _ in arrivals(loop, t)[0]:
            sent = versions[base] + proximal(versions[base], id)
            versions.append(versions[-1] + ALPHA * (sent - versions[-1]) if gap % 3 == 2 else versions[-1])
        np.testing.assert_allclose(model["w"], versions[-1], rtol=2e-5, atol=1e-6)


LEAVES = {"many": (60, 50), "few": (3, 4), "none": (0, 2), "one": (), "half": (7,), "more": (2049,)}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("names", [tuple(LEAVES), ("many", "more"), ("one",), ("half", "none")], ids=" ".join)
def test_leaves_of_all_sizes(names):
    """Leaf by leaf in NumPy, nine messages out of order among twelve rows, a ring that begins anew, 16 bits.

    Catches small leaves that are taken apart in another order than they were put together, a version in another place,
    one that nothing made, and a model of another dtype.
    """
    rng, size, count, rows = np.random.default_rng(1), 14, 12, jnp.array([3, 0, 11, 7, 2, 9, 1, 5, 10])
    factors, places = jnp.float32(rng.uniform(0, 1, 9)), (10 + jnp.arange(9)) % size
    kind = {name: jnp.bfloat16 if name == "half" else jnp.float32 for name in names}

    def made(*lead):
        return {name: jnp.asarray(rng.normal(size=(*lead, *LEAVES[name])), kind[name]) for name in names}

    params, models, messages = made(), made(size), made(count)
    last, kept = jax.jit(_chain)(params, models, messages, rows=rows, factors=factors, places=places)
    for name in names:
        mix = jax.jit(lambda w, factor, x, kind=kind[name]: (w + factor * (x - w)).astype(kind))
        w, ring = params[name], np.array(models[name])
        for row, factor, place in zip(rows, factors, places, strict=True):
            w = mix(w, factor, messages[name][row])
            ring[place] = w
        slack = 0.02 if name == "half" else 1e-6
        for found, expected in ((last[name], w), (kept[name], ring)):
            assert found.dtype == kind[name] and found.shape == np.shape(expected)
            np.testing.assert_allclose(np.float64(found), np.float64(expected), atol=slack)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_models_far_apart(dtype):
    """The halves of the largest and the least number. Catches their difference, which is past the dtype: versions were
    infinite, and the model stood still from then on."""
    most = np.finfo(dtype).max / (1 if dtype == "float16" else 2)  # messages are finite, and below a bound in float32
    old, new = ({"w": jnp.full((*lead, 3), x, dtype)} for lead, x in (((), -most), ((1,), most)))
    kept = {"w": jnp.zeros((2, 3), dtype)}
    one = jnp.ones(1, jnp.int32)
    last, kept = _chain(old, kept, new, rows=0 * one, factors=jnp.full(1, 0.75), places=one)
    for found in (last["w"], kept["w"][1]):
        np.testing.assert_allclose(np.float64(found), np.float64(most) / 2, rtol=1e-3)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_versions_have_zeros_without_a_sign(dtype):
    """What mixes nothing in, as padding does, would turn them. Catches -0 that is kept, and one that rounding makes."""
    old, new = (jnp.array(x, dtype) for x in ([-0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]))
    found = jax.jit(_between)(old, new, jnp.array([0.0, 0.0, 1e-44]))
    assert not np.signbit(np.float64(found)[:2]).any()
    assert dtype == "float32" or not np.signbit(np.float64(found)[2])


def far_from_smooth(params, examples, key):
    """Of a model with zeros of both signs and a leaf of 16 bits; NaN for one client."""
    center = examples["center"][:, :1]
    wrong = jnp.abs(center - jnp.float32(CENTERS[9])).max(1) < 1e-6
    loss = sum(((x.astype(jnp.float32)[None] - center) ** 2).sum(1) for x in params.values())
    return jnp.where(wrong, jnp.nan, 1.0) * (loss + 1e-20 * (params["w"] ** 2).sum())


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.optimised
@pytest.mark.parametrize(("plan", "on_disk"), [((2, 2), False), ((1, 4), True), ((7, 7), False)], ids=str)
def test_mixed_as_they_come_and_at_the_end(plan, on_disk, tmp_path):
    """On one device messages are mixed in chunk by chunk, on several once all are there: the same bits of the model, of
    all versions and of the info. Catches padding that is mixed in or overwrites a version in use, and another order."""
    start = {"w": jnp.array([-0.0, 0.0, 1e-30]), "half": jnp.array([-0.0, 0.5], jnp.bfloat16)}
    logs, data = [], clients()
    if on_disk:
        write_store(tmp_path / "toy", {"center": np.float32(CENTERS)[:, None]}, np.arange(SIZE + 1))
        data = population.host_store(tmp_path / "toy")
    for mesh in (None, engine.device_mesh(2)):
        made = algorithms.fedasync(
            far_from_smooth, events.devices(SIZE), optax.sgd(RATE), population_size=SIZE, num_steps=2, mesh=mesh,
            plan=engine.Plan(*plan), **options(arrivals_per_step=7, max_staleness=30),
        )  # fmt: skip
        assert in_turn(made.parts, data) is (mesh is None)
        models, infos, state = run(made, start, data, 20)
        logs.append((models, infos, state.models))
    assert len({int(info["clients_reported"]) for info in infos}) > 2, "no block was cut"
    assert any(int(info["dropped_clients"]) for info in infos)
    check_equal_bits(*logs, "as they come, and at the end")


@pytest.mark.full
def test_no_message_is_kept():
    """On one device a step's memory is that of a chunk, however many arrive. Catches a buffer of all messages."""
    dimension, many = 4000, 16

    def needs(arrivals):
        made = algorithms.fedasync(
            lambda params, examples, key: ((params["w"][None] - examples["center"][:, :1]) ** 2).sum(1),
            events.devices(SIZE),
            optax.sgd(RATE),
            population_size=SIZE,
            num_steps=1,
            plan=engine.Plan(1, 1),
            mesh=None,
            **{"concurrency": many, "refill": "same", "arrivals_per_step": arrivals, "max_staleness": 50},
        )
        state = jax.eval_shape(made.init, events.KEY, {"w": jnp.zeros(dimension)}, clients())
        program = jax.jit(made.step, donate_argnums=1).lower(events.KEY, state, clients()).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert needs(many) - needs(1) < 4 * dimension * many / 2


@pytest.mark.full
@pytest.mark.parametrize(("runs", "plan"), [(None, None), (2, None), (None, engine.Plan(2, 4))], ids=str)
def test_no_copy_of_the_versions(runs, plan):
    """A step holds no second copy of all versions that are kept, a sweep's neither, nor one of several groups a chunk.
    Catches versions that are selected as a whole for each arrival."""
    dimension, kept, data = 4000, 400, clients()

    def loss(params, examples, key):
        return jnp.sum((params["w"][None] - examples["center"][:, :1]) ** 2, axis=1)

    options = {"concurrency": 4, "refill": "same", "arrivals_per_step": 4, "max_staleness": kept}
    made = algorithms.fedasync(
        loss, events.devices(SIZE), optax.sgd(RATE), population_size=SIZE, num_steps=1, plan=plan, mesh=None, **options
    )
    state, step = jax.eval_shape(made.init, events.KEY, {"w": jnp.zeros(dimension)}, data), made.step
    if runs:
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((runs, *x.shape), x.dtype), state)
        step = jax.vmap(step, in_axes=(None, 0, None))
    program = jax.jit(step, donate_argnums=1).lower(events.KEY, state, data).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 * dimension * kept / 2
