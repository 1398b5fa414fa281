"""Clients that join or leave during a run, and cohorts of the first present clients of those drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.sampling.design import SamplingDesign, one_for_one, responding
from fedjax_sim.sampling.inner import inner_observe, inner_tell
from fedjax_sim.sampling.time.cut import unlimited, untimed
from fedjax_sim.sampling.time.lost_reports import recounted, some_slots
from fedjax_sim.types import Array, Cohort, Metric, PyTree, Sampler

UNFILLED = Metric("unfilled", "places in cohorts that nobody filled", "count")
ABSENT_CLIENTS = Metric("absent", "clients drawn before they joined or after they left", "count")


class _Members(NamedTuple):
    """The state of the wrapped sampler, and when clients are members."""

    sampler: PyTree
    round: Array  # [] int32, the number of rounds so far
    joins: Array  # [k] int32, the first round of a client
    leaves: Array  # [k] int32, the first round without the client


def with_membership(
    sampler: Sampler, joins: Sequence[int], leaves: Sequence[int] | None = None, *, num_invited: int | None = None
) -> Sampler:
    """Clients join and leave during a run: client i is a member from round `joins[i]` on, and before `leaves[i]`.

    A client that joins receives the current model, as any invited client does; its kept state is the initial one. The
    population size stays N, the number of all clients that are members at any time. Divisors such as W of `keep_old`
    count them all, and so do accountants, whose chance of a client is that of a draw from N.

    A client that is drawn while it is no member is not invited; `metrics["absent"]` counts such clients. With
    `num_invited`, more clients are drawn than invited, and the first members fill the places; `metrics["unfilled"]`
    counts places that stay empty.

    Args:
      sampler: any sampler without a clock and without a limit of reports; wrappers that add these go around this
        wrapper. To let clients join and leave at seconds of simulated time, use `network.trace`.
      joins: the first round of each client, at least 1 (the first round of the run); a shorter list repeats.
      leaves: the first round without each client, above its `joins`; a list of the same length. None = all clients
        stay.
      num_invited: at most `num_slots`; None = every member that is drawn.

    Returns: a sampler of the same cohorts, without clients that are no members. Formulas and Horvitz-Thompson refuse
    its design.

    Raises: ValueError or TypeError for values out of range.

    Guarantees:
      - members are invited, and nobody else (tests/sampling/test_membership.py::test_who_is_a_member)
      - every member is equally likely (::test_places_are_filled_evenly)

    >>> import jax
    >>> from fedjax_sim.sampling.uniform import full
    >>> growing = with_membership(full(3), [1, 1, 2])
    >>> cohort, state = growing.sample(jax.random.key(0), growing.init())
    >>> cohort.invited.tolist(), growing.sample(jax.random.key(1), state)[0].invited.tolist()
    ([True, True, False], [True, True, True])
    """
    untimed(sampler, "with_membership")
    unlimited(sampler, "with_membership", "Members alone are among the first: put with_over_invitation around it.")
    rounds_by_name = {"joins": joins} if leaves is None else {"joins": joins, "leaves": leaves}
    size = sampler.design.population_size
    for name, rounds in rounds_by_name.items():
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
    first_rounds = np.asarray(joins, np.int32)
    if leaves is None:
        rounds_without = np.full_like(first_rounds, validate.INT32_MAX)
    else:
        rounds_without = np.asarray(leaves, np.int32)

    def init():
        zero = jnp.zeros((), jnp.int32)
        return _Members(sampler.init(), zero, jnp.asarray(first_rounds), jnp.asarray(rounds_without))

    def sample(key, state):
        cohort, inner = sampler.sample(key, state.sampler)
        round = state.round + 1
        index = cohort.ids % len(first_rounds)  # shorter lists repeat
        is_member = (state.joins[index] <= round) & (round < state.leaves[index])
        num_absent = (cohort.invited & ~is_member).sum(dtype=jnp.int32)
        sent = None if cohort.timing.sent is None else cohort.timing.sent & is_member
        masks = {"invited": cohort.invited & is_member, "reported": cohort.reported & is_member}
        cohort = cohort._replace(**masks, metrics=cohort.metrics | {"absent": num_absent})
        cohort = recounted(cohort.timed(sent=sent))
        if num_invited is not None:
            cohort = first_invited(cohort, num_invited)
        return cohort, state._replace(sampler=inner, round=round)

    design = sampler.design if num_invited is None else of_first(sampler.design, num_invited)
    return sampler._replace(
        init=init,
        sample=sample,
        num_slots=slots,
        design=responding(design, "client"),
        tell=inner_tell(sampler),
        observe=inner_observe(sampler),
        metrics=(*sampler.metrics, ABSENT_CLIENTS, *(() if num_invited is None else (UNFILLED,))),
    )


def first_invited(cohort: Cohort, num_invited: int) -> Cohort:
    """Returns the cohort of the first `num_invited` invited clients, in their order.

    If fewer clients are invited, slots that are not invited follow; `metrics["unfilled"]` counts them.

    >>> invited = jnp.array([False, True, False, True])
    >>> few = first_invited(Cohort(jnp.array([7, 3, 9, 5]), invited, invited), 3)
    >>> few.ids.tolist(), few.invited.tolist(), int(few.metrics["unfilled"])
    ([3, 5, 7], [True, True, False], 1)
    """
    slots = jnp.argsort(~cohort.invited, stable=True)[:num_invited]
    few = some_slots(cohort, slots)
    num_unfilled = num_invited - few.invited.sum(dtype=jnp.int32)
    return few._replace(metrics=few.metrics | {"unfilled": num_unfilled})


def of_first(design: SamplingDesign, num_invited: int) -> SamplingDesign:
    """Returns the design of cohorts in which only the first `num_invited` available clients of those drawn are invited.

    Raises: ValueError for a design that is no `SamplingDesign`, or has a limit of reports.
    """
    if not isinstance(design, SamplingDesign) or design.max_reports is not None:
        rule = "a SamplingDesign without a limit of reports"
        validate.fail("sampler.design", rule, type(design).__name__, "Limit the reports in a wrapper around this one.")
    return dataclasses.replace(responding(design, "client" if one_for_one(design) else "others"), num_slots=num_invited)
