"""`with_distinct_clients` counts the distinct clients that have taken part in a run."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.sampling.inner import inner_observe, inner_tell
from fedjax_sim.types import Array, Metric, PyTree, Sampler

DISTINCT = Metric("distinct_clients", "different clients took part", "count", "last")


class _Visited(NamedTuple):
    """The state of the wrapped sampler, and the clients that have reported so far."""

    sampler: PyTree
    bits: Array  # [ceil(N / 32)] uint32, one bit for each client
    # [] int32, the number of bits that are set. Checkpoints have this name, though tuples have a method `count`
    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]


def with_distinct_clients(sampler: Sampler) -> Sampler:
    """Counts the distinct clients that have reported so far, in `metrics["distinct_clients"]`.

    The count is exact: the sampler's state, and so a checkpoint, has a bit for each of the N clients. This wrapper must
    be the outermost, where it sees who finally reports; other wrappers refuse a sampler with it. A client whose update
    is dropped because it is not finite counts as a client that reported.

    Args:
      sampler: any sampler.

    Returns: a sampler of the same cohorts.

    Guarantees:
      - the size of the set of ids, also with slots that are padding, repeat a client, or do not report, and unchanged
        cohorts (tests/sampling/test_visits.py::test_it_counts_as_a_set_does_and_cohorts_are_untouched)
      - counts are the same after a resume (tests/command/test_app.py::test_resume_goes_on_to_the_same_bits)

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
    num_words = -(-sampler.design.population_size // 32)

    def init():
        return _Visited(sampler.init(), jnp.zeros(num_words, jnp.uint32), jnp.zeros((), jnp.int32))

    def sample(key, state):
        cohort, inner = sampler.sample(key, state.sampler)
        word = cohort.ids >> 5
        bit = jnp.uint32(1) << (cohort.ids & 31).astype(jnp.uint32)
        is_new = cohort.reported & (state.bits[word] & bit == 0)
        if sampler.design.replacement:
            is_new = _first_of_each_id(cohort.ids, is_new)
        # Each bit is added at most once, so adding sets it.
        bits = state.bits.at[word].add(jnp.where(is_new, bit, 0))
        count = state.count + is_new.sum(dtype=jnp.int32)
        metrics = {**cohort.metrics, "distinct_clients": count}
        return cohort._replace(metrics=metrics), _Visited(inner, bits, count)

    return sampler._replace(
        init=init,
        sample=sample,
        metrics=(*sampler.metrics, DISTINCT),
        tell=inner_tell(sampler),
        observe=inner_observe(sampler),
    )


def _first_of_each_id(ids: Array, mask: Array) -> Array:
    """The mask [m] bool, with all but one of the slots of the same id cleared."""
    sort_keys = jnp.where(mask, ids, -1)
    order = jnp.argsort(sort_keys)
    sorted_keys = sort_keys[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), sorted_keys[1:] != sorted_keys[:-1]])
    return jnp.zeros_like(mask).at[order].set(is_first) & mask
