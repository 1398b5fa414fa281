"""Every recipe under `JAX_NUMPY_DTYPE_PROMOTION=strict`, in which JAX converts no number by itself."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim.types import Received
from tests.laws import cases, problems as p

SPEC = jax.ShapeDtypeStruct((3,), np.float32)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("name", cases.compiled_rows("algorithms"))
def test_a_recipe_is_traced_under_strict_promotion(name):
    """Catches an integer or a truth value that meets a float somewhere in a round, for a user who forbids that."""
    people, start = p.ragged(), np.array(p.START, np.float32)
    with jax.numpy_dtype_promotion("strict"):
        algorithm = cases.CASES["algorithms"][name]()
        state = algorithm.init(jax.random.key(0), start, people)
        after, _ = jax.eval_shape(algorithm.step, jax.random.key(0), state, people)
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.full
@pytest.mark.parametrize("name", cases.CASES["aggregation"])
def test_an_aggregator_is_traced_under_strict_promotion(name):
    """Catches the same in an aggregator beside plain clients."""
    with jax.numpy_dtype_promotion("strict"):
        rule = cases.CASES["aggregation"][name]()
        slots = np.arange(p.SLOTS, dtype=np.int32)
        messages = np.ones((p.SLOTS, *SPEC.shape), np.float32)
        received = Received(messages, np.ones(p.SLOTS, np.float32), p.COHORT.astype(np.int32), slots)

        def aggregate(key, received):
            carry = rule.accumulate(key, cases.round_for(rule), rule.init(SPEC, p.SLOTS), received)
            return rule.finalize(key, cases.round_for(rule), carry)

        aggregate, *_ = jax.eval_shape(aggregate, jax.random.key(0), received)
    assert jax.tree.map(np.shape, aggregate) == SPEC.shape


@pytest.mark.full
@pytest.mark.parametrize("name", cases.CASES["sampling"])
def test_a_sampler_is_traced_under_strict_promotion(name):
    """Catches the same in a sampler."""
    with jax.numpy_dtype_promotion("strict"):
        sampler = cases.CASES["sampling"][name]()
        cohort, _ = jax.eval_shape(lambda key: sampler.sample(key, sampler.init()), jax.random.key(0))
    assert cohort.ids.shape == (sampler.num_slots,)
