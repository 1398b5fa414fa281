"""Every transform with every aggregator: it composes, with the same bits on any number of devices, or is refused."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, client, engine, transform
from fedjax_sim.transform.chain import plain_wire, wire_of
from tests.laws import cases, laws, problems as p
from tests.laws.row import Row

MEMBERS = cases.CASES["transform"] | {
    "quantize integers": Row(lambda: transform.quantize(4, range=2.0, integers=True)),
    "sparse integers": Row(
        lambda: transform.chain(transform.top_k(0.5), transform.quantize(4, range=2.0, integers=True))
    ),
    "quantize, then clip and noise": Row(
        lambda: transform.chain(transform.quantize(8), transform.gaussian_mechanism(1.0, 0.5))
    ),
    "feedback around a chain": Row(
        lambda: transform.error_feedback(transform.chain(transform.top_k(0.5), transform.quantize(4)))
    ),
}
WORK = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=1))
NEEDS_A_BOUND = [name for name, make in MEMBERS.items() if make().facts.noise and make().facts.noise.place != "local"]


def aggregator_for(name):
    """An aggregator that suits a member: a special one where its row needs one."""
    return MEMBERS[name].needs.get("aggregator", lambda: aggregation.fixed_mean(10.0))()


COMPILED = {"ef21", "quantize integers"}


@pytest.mark.full
@pytest.mark.parametrize("name", cases.rows(MEMBERS, COMPILED))
def test_a_mean_or_a_reason(name):
    """On two devices the cohort is backwards. Catches messages that depend on the device or the slot, NaN in a real
    round, and messages that an aggregator misreads."""
    found = []
    for mesh, ids in ((None, p.COHORT), (engine.device_mesh(2), p.COHORT[::-1])):
        federation = p.Federation(client=WORK, transform=MEMBERS[name](), aggregator=aggregator_for(name), mesh=mesh)
        found.append(p.outcome(*federation.run(ids)))
    laws.check_equal_bits(found[0][0], found[1][0], "state on two devices")
    laws.check_equal_bits(found[0][1], found[1][1], "info on two devices")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[0][0].server))


@pytest.mark.default_rows("discrete_gaussian_mechanism", "gaussian_mechanism", "quantize", "quantize integers", "top_k")
@pytest.mark.parametrize("name", MEMBERS)
def test_a_modular_sum_or_a_reason(name):
    """Catches floats that a sum of integers takes for integers."""
    member, sum_of_integers = MEMBERS[name](), aggregation.modular_sum(denominator=10.0)
    if member.facts.integer_range is None:
        with pytest.raises(ValueError, match="expected integers for a modular sum"):
            p.Federation(transform=member, aggregator=sum_of_integers)
        return
    federation = p.Federation(transform=member, aggregator=sum_of_integers)
    assert jax.eval_shape(federation.algorithm.step, jax.random.key(0), federation.init(), p.ragged())
    with pytest.raises(ValueError, match="or sums would wrap"):
        p.Federation(transform=member, aggregator=aggregation.modular_sum(modulus_bits=4, denominator=10.0))


@pytest.mark.parametrize("name", NEEDS_A_BOUND)
def test_noise_needs_bounded_sensitivity(name):
    """Catches noise whose sum is divided by the cohort that happened to report."""
    with pytest.raises(ValueError, match="a client moves by a bounded amount"):
        p.Federation(transform=MEMBERS[name](), aggregator=aggregation.mean())


@pytest.mark.default_rows("gaussian_mechanism", "quantize")
@pytest.mark.parametrize("name", MEMBERS)
def test_error_feedback_or_a_reason(name):
    """Catches a residual of what was noised, or of integers in another unit."""
    spec = jax.ShapeDtypeStruct((3,), np.float32)
    try:
        wrapped = transform.error_feedback(MEMBERS[name]())
        federation = p.Federation(client=WORK, transform=wrapped, aggregator=aggregator_for(name))
        jax.eval_shape(federation.algorithm.step, jax.random.key(0), federation.init(), p.ragged())
    except ValueError as error:
        assert ": expected " in str(error) and len(str(error).split()) > 8
        return
    assert wire_of(wrapped, spec).bits == wire_of(MEMBERS[name](), spec).bits <= plain_wire(spec).bits + 400
