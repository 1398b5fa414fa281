"""Whose reports do not count, and why: every count is of clients who were invited, each under one name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array, Cohort

__all__ = ["NEVER", "UNHEARD", "losing", "lost_to", "recounted", "regained", "some_slots"]

NEVER = 2**31 - 1  # ticks
UNHEARD = NEVER - 1  # the moment of what is lost whenever the round ends: after all others


def losing(cohort: Cohort, name: str, slots: Array, at: Array | int = UNHEARD) -> Cohort:
    """The cohort in which these slots are lost to `name`; `metrics` counts each client under what took it first.

    What would have happened after that moment no longer does, but for what is lost whenever the round ends.

    Args:
      name: of the metric.
      slots: [m] bool; those that were lost to it before stay so. Clients whose reports are missing for no known reason
        stay so, too.
      at: [] or [m] int32, ticks after the invitation; by default, whenever the round ends.

    Guarantees: invited clients report, or are lost under one name
    (tests/sampling/time/test_lost_reports.py::test_every_client_is_counted_once).

    >>> everyone = jnp.ones(3, bool)
    >>> few = losing(Cohort(jnp.arange(3), everyone, everyone), "late", jnp.array([True, True, False]), 9)
    >>> found = losing(few, "dropped", jnp.array([True, False, True]), 5)
    >>> {name: int(number) for name, number in found.metrics.items()}, found.reported.tolist()
    ({'late': 1, 'dropped': 2}, [False, False, False])
    """
    known = cohort.reported | _lost(cohort)
    moments = jnp.where(slots & known, jnp.asarray(at, jnp.int32), NEVER)
    lost = {other: jnp.where((moments < x) & (x < UNHEARD), NEVER, x) for other, x in cohort.timing.lost.items()}
    lost[name] = jnp.minimum(cohort.timing.lost.get(name, NEVER), moments)
    return recounted(cohort._replace(reported=cohort.reported & ~slots).timed(lost=lost))


def regained(cohort: Cohort, name: str, slots: Array) -> Cohort:
    """The cohort in which these slots are not lost to `name`: they report, unless something else takes them.

    Guarantees: tests/sampling/time/test_lost_reports.py::test_shorter_work_of_clients_that_are_lost.
    """
    lost = cohort.timing.lost
    back = slots & (lost[name] < NEVER)
    few = cohort.timed(lost=lost | {name: jnp.where(back, NEVER, lost[name])})
    return recounted(few._replace(reported=cohort.reported | (back & ~_lost(few))))


def lost_to(cohort: Cohort) -> dict[str, Array]:
    """{name: [m] bool} invited clients by what took their reports first."""
    first = jnp.stack([*cohort.timing.lost.values(), jnp.full(cohort.ids.shape, NEVER)]).min(0)
    left, found = cohort.invited & (first < NEVER), {}
    for name, moments in cohort.timing.lost.items():
        found[name] = left & (moments == first)
        left &= ~found[name]
    return found


def recounted(cohort: Cohort) -> Cohort:
    """The cohort whose metrics count the invited clients that were lost, and those that report with shortened work."""
    counts = {name: where.sum(dtype=jnp.int32) for name, where in lost_to(cohort).items()}
    if cohort.timing.shortened is not None:
        counts["shortened"] = (cohort.timing.shortened & cohort.reported).sum(dtype=jnp.int32)
    return cohort._replace(metrics=cohort.metrics | counts)


def _lost(cohort: Cohort) -> Array:
    """[m] bool: lost to anything."""
    return jnp.stack([jnp.zeros_like(cohort.reported), *(x < NEVER for x in cohort.timing.lost.values())]).any(0)


def some_slots(cohort: Cohort, slots: Array) -> Cohort:
    """The cohort of these slots alone, [k] int32."""
    few = jax.tree.map(lambda x: x[slots], cohort._replace(metrics={}))
    return recounted(few._replace(metrics=cohort.metrics))
