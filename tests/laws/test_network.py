"""Devices, availability, hazards and distributions: pure functions of ids, whatever the slots and the platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import engine
from fedjax_sim.network import Distribution, Graph, Hazard, Link, Mixing
from fedjax_sim.types import Availability, Devices, Load
from tests.laws import cases, problems as p

pytestmark = pytest.mark.optimised(False)  # these laws do not depend on the compiler

KEY, IDS = jax.random.key(0), jnp.arange(p.NUM_CLIENTS, dtype=jnp.int32)
EVERY = {name: make() for name, make in cases.CASES["network"].items()}
OTHERS = Graph | Mixing | Link  # their laws are in test_gossip.py, and in tests/network/test_link.py
MADE = {name: made for name, made in EVERY.items() if not isinstance(made, OTHERS)}
LOADS = [Load(*map(jnp.float32, load)) for load in ((1e9, 1e6, 1e5), (0, 0, 0), (1e30, jnp.inf, jnp.nan))]


def named(*kinds):
    return [name for name, made in MADE.items() if isinstance(made, kinds)]


def asked(made):
    """What a round asks of a part, as one function of (key, ids, a number)."""
    if isinstance(made, Devices):
        return lambda key, ids, x: made.spend(key, ids, Load(x, x / 100, x / 300))
    if isinstance(made, Availability):
        return lambda key, ids, x: made.at(ids, x.astype(jnp.int32))
    if isinstance(made, Hazard):
        return lambda key, ids, x: made.done(key, ids, x / 1e4)
    return lambda key, ids, x: made.draw(key, ids)


@pytest.mark.every_row
def test_every_row_is_of_a_kind():
    """Catches a row that no law here meets."""
    assert set(MADE) == {*named(Devices), *named(Availability), *named(Hazard), *named(Distribution)}


@pytest.mark.default_rows(3)
@pytest.mark.parametrize("name", MADE)
def test_slots_do_not_matter(name):
    """As a round computes it, for seven clients or three, in another order, twice: the same bits for each client.

    Catches draws by slot, sums over the cohort, and keys ignored or split.
    """
    ask = jax.jit(engine.reproducible(asked(MADE[name])))
    whole = ask(KEY, IDS, jnp.float32(1e6))
    some = IDS[jnp.array([5, 0, 5])]
    for all_of_it, part in zip(jax.tree.leaves(whole), jax.tree.leaves(ask(KEY, some, jnp.float32(1e6))), strict=True):
        np.testing.assert_array_equal(all_of_it[some], part)
        assert all_of_it.shape == IDS.shape
    assert p.digest(whole) == p.digest(ask(KEY, IDS, jnp.float32(1e6)))
    one = ask(KEY, IDS[:1], jnp.float32(1e6))
    assert p.digest(jax.tree.map(lambda x: x[:1], whole)) == p.digest(one)


@pytest.mark.default_rows("heterogeneous")
@pytest.mark.parametrize("name", named(Devices))
def test_devices(name):
    """Catches another dtype, a duration that is negative or wraps, work that costs less than none, lost clients."""
    devices = MADE[name]
    assert devices.population_size == p.NUM_CLIENTS
    spend = jax.jit(devices.spend)
    some, none, most = (spend(KEY, IDS, load) for load in LOADS)
    for spent in (some, none, most):
        assert [x.dtype for x in spent] == [jnp.int32] * 3 + [jnp.float32]
        assert all((x >= 0).all() for x in spent[:3])
        assert (np.sum([np.asarray(x, np.int64) for x in spent[:3]], 0) == np.asarray(spent.total)).all()
    assert (none.joules == 0).all() or cases.CASES["network"][name].idle_joules  # latency costs energy
    assert all((a >= b).all() for a, b in zip(some[:3], none[:3], strict=True))
    assert all((a >= b).all() for a, b in zip(most[:3], some[:3], strict=True))
    again = jax.tree.map(lambda x: jnp.broadcast_to(x, IDS.shape), LOADS[0])
    np.testing.assert_array_equal(spend(KEY, IDS, again).total, some.total)


@pytest.mark.default_rows("bernoulli")
@pytest.mark.parametrize("name", named(Availability))
def test_availability(name):
    """Catches a time for each client that is read as one for all, and shares outside of [0, 1]."""
    there = MADE[name]
    at = jax.jit(there.at)
    times = jnp.array([0, 10, 3600, 90_000, 2**31 - 1, 5, 1800, 86_399], jnp.int32)[: len(IDS)]
    each = at(IDS[: len(times)], times)
    assert each.dtype == bool and at(IDS, 0).shape == IDS.shape
    assert [bool(at(IDS, time)[i]) for i, time in enumerate(times)] == each.tolist()
    if there.rate is not None:
        rates = there.rate(np.asarray(IDS))
        assert rates.dtype == np.float64 and rates.shape == IDS.shape and ((rates >= 0) & (rates <= 1)).all()
        np.testing.assert_array_equal(there.rate(np.array([3, 3])), rates[[3, 3]])


@pytest.mark.default_rows("memoryless")
@pytest.mark.parametrize("name", named(Hazard))
def test_hazards(name):
    """Catches a share outside of [0, 1], and one that grows with the work."""
    done = jax.jit(MADE[name].done)
    shares = np.stack([done(KEY, IDS, jnp.float32(x)) for x in (0, 1, 50, 1000, jnp.inf)])
    assert (shares[0] == 1).all() and (np.diff(shares, axis=0) <= 0).all() and (shares >= 0).all()
    assert (jax.jit(MADE[name].leaves_after)(KEY, IDS) > 0).all()


@pytest.mark.default_rows("lognormal", "pareto")
@pytest.mark.parametrize("name", named(Distribution))
def test_distributions(name):
    """On the host as in a round, rising, within its bounds. Catches a quantile that theory reads otherwise."""
    law = MADE[name]
    u = np.linspace(2.0**-24, 1 - 2.0**-24, 1001)
    host, device = law.quantile(u), jax.jit(law.quantile)(u.astype(np.float32))
    assert host.dtype == np.float64 and device.dtype == jnp.float32
    np.testing.assert_allclose(host[:-1], device[:-1], rtol=2e-4)
    assert (np.diff(host) >= 0).all()
    assert law.least <= host[0] * (1 + 1e-6) and host[-1] <= law.most * (1 + 1e-6)


def test_nothing_grows_with_the_population():
    """Catches an array of N clients in a round."""
    for name in named(Devices, Availability, Hazard):
        for jaxpr in [jax.make_jaxpr(asked(MADE[name]))(KEY, jnp.array([2**31 - 2]), jnp.float32(1))]:
            sizes = [x.aval.size for eqn in jaxpr.eqns for x in eqn.outvars if hasattr(x.aval, "size")]
            assert max(sizes) <= 8, name


@pytest.mark.default_rows("cuda")
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_rows_lower(platform):
    """Catches code that only a CPU's compiler takes."""
    with engine.compiling_for(platform):
        for made in MADE.values():
            traced = jax.jit(asked(made)).trace(KEY, IDS, jnp.float32(1e6))
            assert "custom_call @xla_python" not in traced.lower(lowering_platforms=(platform,)).as_text()
