"""A wrapper that counts the distinct clients that have taken part."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array, Metric, PyTree, Sampler

__all__ = ["DISTINCT", "with_distinct_clients"]


DISTINCT = Metric("distinct_clients", "different clients took part", "count", "last")


class _Visited(NamedTuple):
    sampler: PyTree
    bits: Array  # [ceil(N / 32)] uint32, one bit a client
    count: Array  # [] int32 bits that are set


def with_distinct_clients(sampler: Sampler) -> Sampler:
    """The same cohorts; `metrics["distinct_clients"]` is the number of distinct clients that have reported so far.

    The count is exact: the sampler's state has a bit for each of the N clients, so a checkpoint holds it. This wrapper
    is the outermost, where it sees who finally reports: the others refuse a sampler that counts already. A client whose
    non-finite update is dropped has reported.

    Args:
      sampler: any sampler.

    Guarantees: the size of the set of ids, also with slots that are padding, repeat a client, or do not report, and
    cohorts are unchanged (tests/sampling/test_visits.py::test_it_counts_as_a_set_does_and_cohorts_are_untouched); the
    same after a resume (tests/command/test_app.py::test_resume_goes_on_to_the_same_bits).

    >>> import jax
    >>> from fedjax_sim.sampling.uniform import full
    >>> counted = with_distinct_clients(full(5))
    >>> state = counted.init()
    >>> for round in range(2):
    ...     cohort, state = counted.sample(jax.random.key(round), state)
    >>> int(cohort.reported.sum()), int(cohort.metrics["distinct_clients"])
    (5, 5)
    """
    validate.part("sampler", sampler, Sampler)
    words = -(-sampler.design.population_size // 32)

    def init():
        return _Visited(sampler.init(), jnp.zeros(words, jnp.uint32), jnp.zeros((), jnp.int32))

    def sample(key, state):
        cohort, inner = sampler.sample(key, state.sampler)
        word, bit = cohort.ids >> 5, jnp.uint32(1) << (cohort.ids & 31).astype(jnp.uint32)
        new = cohort.reported & (state.bits[word] & bit == 0)
        if sampler.design.replacement:
            new = _first(cohort.ids, new)
        bits = state.bits.at[word].add(jnp.where(new, bit, 0))  # each bit once: adding sets it
        count = state.count + new.sum(dtype=jnp.int32)
        metrics = {**cohort.metrics, "distinct_clients": count}
        return cohort._replace(metrics=metrics), _Visited(inner, bits, count)

    def tell(state, work):
        return state._replace(sampler=sampler.tell(state.sampler, work))

    def observe(state, cohort, outcome):
        return state._replace(sampler=sampler.observe(state.sampler, cohort, outcome))

    return sampler._replace(
        init=init,
        sample=sample,
        metrics=(*sampler.metrics, DISTINCT),
        tell=sampler.tell and tell,
        observe=sampler.observe and observe,
    )


def _first(ids: Array, where: Array) -> Array:
    """`where` [m] bool, with all but one of the slots of the same id cleared."""
    keys = jnp.where(where, ids, -1)
    order = jnp.argsort(keys)
    ordered = keys[order]
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros_like(where).at[order].set(first) & where
