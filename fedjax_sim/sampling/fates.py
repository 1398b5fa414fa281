"""Whose reports do not count, and why: every count is of clients who were invited, each under one name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array, Cohort

__all__ = ["losing", "recounted", "some_slots"]


def losing(cohort: Cohort, name: str, slots: Array) -> Cohort:
    """The cohort in which these slots are lost to `name`, and to nothing else; `metrics[name]` counts them.

    Args:
      name: of the metric.
      slots: [m] bool; those that were lost to it before stay so.

    Guarantees: invited clients report, or are lost under one name
    (tests/sampling/test_fates.py::test_every_client_is_counted_once).

    >>> everyone = jnp.ones(3, bool)
    >>> few = losing(Cohort(jnp.arange(3), everyone, everyone), "late", jnp.array([True, True, False]))
    >>> found = losing(few, "dropped", jnp.array([True, False, False]))
    >>> {name: int(number) for name, number in found.metrics.items()}, found.reported.tolist()
    ({'late': 1, 'dropped': 1}, [False, False, True])
    """
    lost = {other: where & ~slots for other, where in cohort.lost.items()}
    lost[name] = lost.get(name, False) | slots
    return recounted(cohort._replace(reported=cohort.reported & ~slots, lost=lost))


def recounted(cohort: Cohort) -> Cohort:
    """The cohort whose metrics count the invited clients that were lost."""
    lost = {name: where & cohort.invited for name, where in cohort.lost.items()}
    counts = {name: where.sum(dtype=jnp.int32) for name, where in lost.items()}
    return cohort._replace(lost=lost, metrics=cohort.metrics | counts)


def some_slots(cohort: Cohort, slots: Array) -> Cohort:
    """The cohort of these slots alone, [k] int32."""
    few = jax.tree.map(lambda x: x[slots], cohort._replace(metrics={}))
    return recounted(few._replace(metrics=cohort.metrics))
