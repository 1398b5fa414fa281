"""Hands on to the sampler inside of a wrapper what is told and observed; the wrapper's state holds its `sampler`."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_sim.types import Sampler


def inner_tell(sampler: Sampler) -> Callable | None:
    """Returns the `tell` of a wrapper that hands on what it is told; None if the sampler inside takes nothing."""
    tell = sampler.tell
    return None if tell is None else lambda state, work: state._replace(sampler=tell(state.sampler, work))


def inner_observe(sampler: Sampler) -> Callable | None:
    """Returns the `observe` of a wrapper that hands on what it observes; None if the sampler inside takes nothing."""
    observe = sampler.observe
    if observe is None:
        return None
    return lambda state, cohort, outcome: state._replace(sampler=observe(state.sampler, cohort, outcome))
