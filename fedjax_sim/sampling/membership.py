"""Clients that join or leave during a run, and the first of a cohort's clients who are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign, one_for_one, responding
from fedjax_sim.sampling.time.cut import unlimited, untimed
from fedjax_sim.sampling.time.lost_reports import recounted, some_slots
from fedjax_sim.types import Array, Cohort, Metric, PyTree, Sampler

__all__ = ["UNFILLED", "first_invited", "of_first", "with_membership"]

UNFILLED = Metric("unfilled", "places in cohorts that nobody filled", "count")
ABSENT = Metric("absent", "clients drawn before they joined or after they left", "count")


class _Members(NamedTuple):
    sampler: PyTree
    round: Array  # [] int32, rounds so far
    joins: Array  # [k] int32
    leaves: Array  # [k] int32


def with_membership(
    sampler: Sampler, joins: Sequence[int], leaves: Sequence[int] | None = None, *, num_invited: int | None = None
) -> Sampler:
    """Clients join and leave during a run: client i takes part from round `joins[i]` to the one before `leaves[i]`.

    Who joins receives the current model, as any invited client does; its kept state is the initial one. The population
    stays N, everybody who is ever there: divisors such as W of `keep_old` count them all, and so do accountants, whose
    chance of a client is that of a draw from N. Clients that are drawn while they are not there are not invited; with
    `num_invited` more are drawn than invited, and the first who are there fill the places. `metrics["absent"]` counts
    the former, `metrics["unfilled"]` places left empty.

    Args:
      sampler: any sampler without a clock or a limit of reports: what adds those goes around this. By the
        seconds of simulated time they join and leave in `network.trace`.
      joins: the first round of each client, at least 1 (the run's first); a shorter list repeats.
      leaves: the round in which each client is gone, above its `joins`; a list of that length. None = all stay.
      num_invited: at most `num_slots`; None = every client drawn who is there.

    Returns: a sampler of the same cohorts, less who is not there. Formulas and Horvitz-Thompson refuse its design.

    Raises: ValueError, TypeError for values out of range.

    Guarantees: who is there is invited, and only then (tests/sampling/test_membership.py::test_who_is_a_member); of the
    members every one is equally likely (::test_places_are_filled_evenly).

    >>> import jax
    >>> from fedjax_sim.sampling.uniform import full
    >>> growing = with_membership(full(3), [1, 1, 2])
    >>> cohort, state = growing.sample(jax.random.key(0), growing.init())
    >>> cohort.invited.tolist(), growing.sample(jax.random.key(1), state)[0].invited.tolist()
    ([True, True, False], [True, True, True])
    """
    untimed(sampler, "with_membership")
    unlimited(sampler, "with_membership", "Members alone are among the first: put with_over_invitation around it.")
    given = {"joins": joins} if leaves is None else {"joins": joins, "leaves": leaves}
    size = sampler.design.population_size
    for name, rounds in given.items():
        validate.sequence(name, rounds)
        if len(rounds) > size or len(rounds) != len(joins):
            validate.fail(name, f"{len(joins)} numbers, at most {size}", len(rounds), "Each client needs both.")
        for i, round in enumerate(rounds):
            if name == "joins":
                validate.integer(f"joins[{i}]", round, 1, validate.INT32_MAX - 1)
            else:
                validate.integer(f"leaves[{i}]", round, joins[i] + 1)
    slots = sampler.num_slots if num_invited is None else num_invited
    validate.integer("num_invited", slots, 1, sampler.num_slots, hint="Draw more clients than are invited.")
    first = np.asarray(joins, np.int32)
    gone = np.full_like(first, validate.INT32_MAX) if leaves is None else np.asarray(leaves, np.int32)

    def init():
        return _Members(sampler.init(), jnp.zeros((), jnp.int32), jnp.asarray(first), jnp.asarray(gone))

    def sample(key, state):
        cohort, inner = sampler.sample(key, state.sampler)
        round, who = state.round + 1, cohort.ids % len(first)
        here = (state.joins[who] <= round) & (round < state.leaves[who])
        absent = (cohort.invited & ~here).sum(dtype=jnp.int32)
        sent = None if cohort.timing.sent is None else cohort.timing.sent & here
        there = {"invited": cohort.invited & here, "reported": cohort.reported & here}
        cohort = cohort._replace(**there, metrics=cohort.metrics | {"absent": absent})
        cohort = recounted(cohort.timed(sent=sent))
        if num_invited is not None:
            cohort = first_invited(cohort, num_invited)
        return cohort, state._replace(sampler=inner, round=round)

    def tell(state, work):
        return state._replace(sampler=sampler.tell(state.sampler, work))

    def observe(state, cohort, outcome):
        return state._replace(sampler=sampler.observe(state.sampler, cohort, outcome))

    design = sampler.design if num_invited is None else of_first(sampler.design, num_invited)
    return sampler._replace(
        init=init,
        sample=sample,
        num_slots=slots,
        design=responding(design, "client"),
        tell=sampler.tell and tell,
        observe=sampler.observe and observe,
        metrics=(*sampler.metrics, ABSENT, *(() if num_invited is None else (UNFILLED,))),
    )


def first_invited(cohort: Cohort, num_invited: int) -> Cohort:
    """The cohort of so many slots in which the first invited clients stand, in their order; others follow uninvited.

    >>> invited = jnp.array([False, True, False, True])
    >>> few = first_invited(Cohort(jnp.array([7, 3, 9, 5]), invited, invited), 3)
    >>> few.ids.tolist(), few.invited.tolist(), int(few.metrics["unfilled"])
    ([3, 5, 7], [True, True, False], 1)
    """
    first = jnp.argsort(~cohort.invited, stable=True)[:num_invited]
    few = some_slots(cohort, first)
    unfilled = num_invited - few.invited.sum(dtype=jnp.int32)
    return few._replace(metrics=few.metrics | {"unfilled": unfilled})


def of_first(design: SamplingDesign, num_invited: int) -> SamplingDesign:
    """The design of cohorts in which only the first so many of the clients drawn are invited."""
    if not isinstance(design, SamplingDesign) or design.max_reports is not None:
        rule = "a SamplingDesign without a limit of reports"
        validate.fail("sampler.design", rule, type(design).__name__, "Limit the reports in a wrapper around this one.")
    return dataclasses.replace(responding(design, "client" if one_for_one(design) else "others"), num_slots=num_invited)
