"""Reports that do not count, by cause: each invited client whose report is lost is counted under one cause."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.types import Array, Cohort

NEVER = 2**31 - 1  # ticks
UNHEARD = NEVER - 1  # the moment of a report that is lost whenever the round ends: after all other moments


def losing(cohort: Cohort, name: str, slots: Array, at: Array | int = UNHEARD) -> Cohort:
    """Returns the cohort in which the reports of some slots are lost to a cause; `metrics` counts them.

    A client is counted under the cause that comes first. A loss to another cause at a later moment no longer happens,
    unless the report is lost whenever the round ends.

    Args:
      cohort: the cohort before.
      name: of the cause, and of its metric.
      slots: [m] bool, the slots that lose their report; slots that lost it to this cause before stay lost. Clients
        whose report is missing for no stated cause are not counted.
      at: [] or [m] int32, the moment in ticks after the invitation; by default, the report is lost whenever the round
        ends.

    Guarantees: invited clients report, or are lost under one name
    (tests/sampling/time/test_lost_reports.py::test_every_client_is_counted_once).

    >>> everyone = jnp.ones(3, bool)
    >>> few = losing(Cohort(jnp.arange(3), everyone, everyone), "late", jnp.array([True, True, False]), 9)
    >>> fewer = losing(few, "dropped", jnp.array([True, False, True]), 5)
    >>> {name: int(number) for name, number in fewer.metrics.items()}, fewer.reported.tolist()
    ({'late': 1, 'dropped': 2}, [False, False, False])
    """
    has_known_cause = cohort.reported | _is_lost(cohort)
    moments = jnp.where(slots & has_known_cause, jnp.asarray(at, jnp.int32), NEVER)
    lost = {other: jnp.where((moments < x) & (x < UNHEARD), NEVER, x) for other, x in cohort.timing.lost.items()}
    lost[name] = jnp.minimum(cohort.timing.lost.get(name, NEVER), moments)
    return recounted(cohort._replace(reported=cohort.reported & ~slots).timed(lost=lost))


def regained(cohort: Cohort, name: str, slots: Array) -> Cohort:
    """Returns the cohort in which slots are no longer lost to a cause; they report, unless lost to another cause.

    Args:
      cohort: the cohort before.
      name: of the cause.
      slots: [m] bool.

    Guarantees: a client that is silent, dropped out, or lost its report for a cause that is not stated does not report
    again, though a deadline with partial work makes its round shorter
    (tests/sampling/time/test_lost_reports.py::test_shorter_work_of_clients_that_are_lost).
    """
    lost = cohort.timing.lost
    is_regained = slots & (lost[name] < NEVER)
    without_cause = cohort.timed(lost=lost | {name: jnp.where(is_regained, NEVER, lost[name])})
    reported = cohort.reported | (is_regained & ~_is_lost(without_cause))
    return recounted(without_cause._replace(reported=reported))


def lost_to(cohort: Cohort) -> dict[str, Array]:
    """Returns, for each cause, the mask [m] of invited clients whose report was first lost to this cause."""
    first_loss_ticks = jnp.stack([*cohort.timing.lost.values(), jnp.full(cohort.ids.shape, NEVER)]).min(0)
    is_lost = cohort.invited & (first_loss_ticks < NEVER)
    slots_by_cause: dict[str, Array] = {}
    for name, moments in cohort.timing.lost.items():
        # Of causes at the same moment the first counts, so that a client is counted once.
        slots_by_cause[name] = is_lost & (moments == first_loss_ticks)
        is_lost &= ~slots_by_cause[name]
    return slots_by_cause


def recounted(cohort: Cohort) -> Cohort:
    """Returns the cohort with new counts in its metrics: of lost reports, and of reports with shortened work."""
    counts = {name: slots.sum(dtype=jnp.int32) for name, slots in lost_to(cohort).items()}
    if cohort.timing.shortened is not None:
        counts["shortened"] = (cohort.timing.shortened & cohort.reported).sum(dtype=jnp.int32)
    return cohort._replace(metrics=cohort.metrics | counts)


def _is_lost(cohort: Cohort) -> Array:
    """Tells which slots lose their report to any cause, [m] bool."""
    return jnp.stack([jnp.zeros_like(cohort.reported), *(x < NEVER for x in cohort.timing.lost.values())]).any(0)


def some_slots(cohort: Cohort, slots: Array) -> Cohort:
    """Returns the cohort of the given slots alone, [k] int32."""
    few = jax.tree.map(lambda x: x[slots], cohort._replace(metrics={}))
    return recounted(few._replace(metrics=cohort.metrics))
