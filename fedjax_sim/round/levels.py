"""What a round inside of a hierarchy tells the levels above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.round.costs import eight_bytes, two_words, words_of
from fedjax_sim.sampling.time.lost_reports import recounted
from fedjax_sim.types import (
    Aggregator,
    Array,
    Cohort,
    Count,
    Inside,
    Mean,
    Metric,
    Population,
    Received,
    Sampler,
)

__all__ = ["Told", "by_own_ids", "existing", "named_by", "remembers", "summed_over_rounds", "told"]


class Told(NamedTuple):
    """What a round inside tells those above."""

    means: dict[str, Mean]  # the clients' metrics
    scalars: dict[str, Mean]  # floats in info
    counts: dict[str, Array]  # [2] uint32 words
    weight: Array  # [] float32 what its clients weigh
    used: Array  # [] bool; the round was not skipped
    broken: Array  # [] bool; somebody's message was not finite


def existing(cohort: Cohort, group: Population) -> Cohort:
    """The cohort without the places of the group that are empty: nothing is sent to or by them."""
    if not hasattr(group, "there"):
        return cohort
    there = group.there(cohort.ids)
    sent = None if cohort.timing.sent is None else cohort.timing.sent & there
    cohort = cohort._replace(invited=cohort.invited & there, reported=cohort.reported & there)
    return recounted(cohort.timed(sent=sent))


def by_own_ids(aggregator: Aggregator, group: Population) -> Aggregator:
    """The aggregator of a group, which knows clients by their ids in the whole population, not by their places.

    Who attacks, whom a rule remembers and who leaves a secure sum are then the same clients as without groups. In empty
    places, where nothing arrives, the id is 0.

    Raises: ValueError for attackers in a group that does not state these ids.

    Guarantees: tests/laws/test_attackers.py.
    """
    if not hasattr(group, "own_ids"):
        if aggregator.facts.attackers is not None:
            hint = "Attackers are known by these: state `Population.own_ids`, as population.grouped does."
            validate.fail("population", "groups that state their clients' own ids", type(group).__name__, hint)
        return aggregator

    def own_ids(places: Array) -> Array:
        return jnp.maximum(group.own_ids(places), 0)

    def renamed(call: Callable | None) -> Callable | None:
        def with_own_ids(key, round, *rest):
            rest = [x._replace(ids=own_ids(x.ids)) if isinstance(x, Received) else x for x in rest]
            cohort = round.cohort._replace(ids=own_ids(round.cohort.ids))
            return call(key, round._replace(cohort=cohort), *rest)

        return call and with_own_ids

    calls = {name: renamed(getattr(aggregator, name)) for name in ("accumulate", "finalize", "stays", "view")}
    return aggregator._replace(**calls)


def remembers(sampler: Sampler) -> bool:
    """Whether a sampler has a state."""
    return bool(jax.tree.leaves(jax.eval_shape(sampler.init)))


def named_by(name: str, metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """The metrics of a level, under its name."""
    return tuple(
        x._replace(
            name=f"{name}_{x.name}",
            words=f"{x.words} ({name})",
            instead=x.instead and f"{name}_{x.instead}",
            by=x.by and f"{name}_{x.by}",
        )
        for x in metrics
    )


def told(inside: Inside, name: str) -> Told:
    """The clients' metrics and counts under their own names; what the level itself counted under the level's."""
    counts, scalars = {key: two_words(x) for key, x in inside.counts.items()}, {}
    info: dict[str, Any] = inside.info
    for key, x in info.items():
        if f"{name}_{key}" in inside.counts:
            validate.fail("name", "another than that of a level inside", name, "Name it 'region', say.")
        if (
            key in inside.counts
            or key.removeprefix("client_") in inside.means
            or (not isinstance(x, Count) and jnp.ndim(x))
        ):
            continue
        if isinstance(x, Count):
            counts[f"{name}_{key}"] = words_of(x)
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            finite = jnp.isfinite(x)
            scalars[f"{name}_{key}"] = Mean(jnp.where(finite, x, 0), finite.astype(jnp.float32))
        else:
            counts[f"{name}_{key}"] = jnp.stack([jnp.uint32(0), x.astype(jnp.uint32)])
    return Told(inside.means, scalars, counts, inside.weight, info["skipped_rounds"] == 0, inside.broken)


def summed_over_rounds(told: Told) -> tuple[dict[str, Mean], dict[str, Array], tuple[Array, Array]]:
    """Metrics and counts summed over rounds, and (the clients' weights in rounds that were used, the number of these).

    Args:
      told: leaves [rounds, ...].
    """
    both = tree.joined_metrics({"client": told.means, "level": told.scalars})
    means = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), both)
    counts = {key: two_words(eight_bytes(words).sum(0, dtype=jnp.uint32)) for key, words in told.counts.items()}
    return means, counts, (jnp.where(told.used, told.weight, 0).sum(), told.used.sum())
