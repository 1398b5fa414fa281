"""Different clients are counted exactly, and counting them changes nothing."""

import jax
import numpy as np
import pytest

from fedjax_sim import sampling

SAMPLERS = {
    "padded": (sampling.poisson(50, 0.2),),
    "repeated": (sampling.with_replacement(33, 40), sampling.with_dropout(sampling.with_replacement(20, 10), 0.5)),
    "others": (
        sampling.uniform(50, 10),
        sampling.cyclic(45, 10, shuffled=True),
        sampling.with_over_invitation(sampling.uniform(64, 20), 7),
    ),
}


def cohorts(sampler, num_rounds=12):
    def one(state, key):
        cohort, state = sampler.sample(key, state)
        return state, cohort

    return jax.lax.scan(one, sampler.init(), jax.random.split(jax.random.key(0), num_rounds))[1]


@pytest.mark.default_rows("padded", "repeated")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_it_counts_as_a_set_does_and_cohorts_are_untouched(kind):
    """Fault: visits counted as clients, a client drawn twice in a cohort counted twice (or carried into another's bit),
    padding or lost reports counted, the last word of bits cut off; a wrapper that spends the cohort's key."""
    samplers = SAMPLERS[kind]
    counted, plain = jax.jit(
        lambda: ([cohorts(sampling.with_distinct_clients(s)) for s in samplers], [cohorts(s) for s in samplers])
    )()
    for sampler, found, alone in zip(samplers, counted, plain, strict=True):
        seen, expected = set(), []
        for ids, reported in zip(np.asarray(alone.ids), np.asarray(alone.reported), strict=True):
            seen |= set(ids[reported].tolist())
            expected.append(len(seen))
        assert found.metrics["distinct_clients"].tolist() == expected, sampler.design
        for name in ("ids", "invited", "reported"):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
        assert set(found.metrics) - set(alone.metrics) == {"distinct_clients"}
    assert sampling.with_distinct_clients(samplers[0]).design is samplers[0].design
    assert sampling.with_distinct_clients(sampling.full(10**6)).init().bits.nbytes == 10**6 // 8
