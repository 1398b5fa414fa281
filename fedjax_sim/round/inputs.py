"""How the clients of a cohort receive what they train on: examples, or groups of clients where they are federations.

Both follow from what the client and the population state about themselves, and not from who calls `collect`: any
algorithm may have clients that are federations, and may run inside of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim import engine, tree
from fedjax_sim.population.protocol import num_rows
from fedjax_sim.round.costs import group_of, senders
from fedjax_sim.round.message import Shared, Slot
from fedjax_sim.types import Array, ClientData, Cohort, Population, Star, Subpopulation


class Inputs(NamedTuple):
    """How the clients of a cohort receive what they train on."""

    # (Shared, Slot, rows) -> what the client's `apply` takes as its data; `rows` is the number of a client's rows that
    # are read, None = all
    read: Callable
    works: Callable  # (Cohort, reported [m] bool) -> [m] bool, the slots whose clients do their work
    plan: engine.Plan | None = None  # how many clients are vmapped; None = fitted to their work
    may_skip: bool = False  # whether a chunk is skipped in which no client does its work


def inputs_of(star: Star, population: Population) -> Inputs:
    """Returns how the clients of a star receive what they train on.

    Args:
      star: the parts; clients that are federations (`ClientUpdate.federation`) receive groups.
      population: all clients; in a group (`Subpopulation`) some places may be empty.

    Guarantees: a client that does not report sees no examples
    (tests/round/test_inputs.py::test_who_does_not_report_sees_nothing); a group whose message is not used has made its
    rounds, and these are counted (::test_groups_work_whose_messages_are_late).
    """
    may_skip = isinstance(population, Subpopulation)
    if star.client.federation is None:
        return Inputs(read=_examples, works=_who_report, may_skip=may_skip)
    # The clients inside are vmapped, so federations follow one another.
    return Inputs(read=_group, works=_who_send, plan=engine.Plan(1, 1), may_skip=may_skip)


def _examples(shared: Shared, slot: Slot, rows: int | None) -> ClientData:
    """Returns the examples of one client.

    Args:
      shared: `population` and `round` are read.
      slot: of the client; without `reported` it sees no examples, so that it need not train.
      rows: how many of its rows are read; None = all.

    Returns: `ClientData`, with zeros in padding, which may hold anything in a population, NaN included.
    """
    population = shared.population
    reads_all_rows = rows is None or rows == num_rows(population)
    data = (population if reads_all_rows else population.capped(rows)).client(slot.id)
    mask = data.mask & slot.reported
    examples = tree.where(mask, data.examples, tree.zeros_like(data.examples))
    round = shared.round if slot.version is None else slot.version
    return data._replace(examples=examples, mask=mask, work=slot.work, round=round)


def _group(shared: Shared, slot: Slot, rows: int | None) -> Population:
    """Returns the group of clients of one federation; a group without clients where it makes no rounds."""
    return group_of(shared.population, jnp.where(slot.worked, slot.id, -1))


def _who_report(cohort: Cohort, reported: Array) -> Array:
    return reported


def _who_send(cohort: Cohort, reported: Array) -> Array:
    # The rounds inside are counted where a message was sent, used or not, as `costs.traffic` counts its bytes.
    return senders(cohort)
