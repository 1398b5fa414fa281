"""A round inside of a hierarchy reports metrics, counts and weights to the levels above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.round.counts import bytes_of, words_by_name, words_of
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
    Subpopulation,
)


class Told(NamedTuple):
    """The report of a round inside of a hierarchy to the levels above it."""

    means: dict[str, Mean]  # the clients' metrics
    scalars: dict[str, Mean]  # floats of the round's info, under the level's name
    counts: dict[str, Array]  # [2] uint32, the high and the low word of each count
    weight: Array  # [] float32, the sum of its clients' weights
    used: Array  # [] bool; the round was not skipped
    broken: Array  # [] bool; some message was not finite


def without_empty_places(cohort: Cohort, group: Population) -> Cohort:
    """Returns the cohort without the group's empty places: nothing is sent to or by an empty place."""
    if not isinstance(group, Subpopulation):
        return cohort
    has_client = group.there(cohort.ids)
    senders = None if cohort.timing.sent is None else cohort.timing.sent & has_client
    cohort = cohort._replace(invited=cohort.invited & has_client, reported=cohort.reported & has_client)
    return recounted(cohort.timed(sent=senders))  # losses in empty places are not counted either


def by_own_ids(aggregator: Aggregator, group: Population) -> Aggregator:
    """Makes an aggregator see clients by their ids in the whole population, not by their places in a group.

    Attackers, clients that a rule remembers, and clients that leave a secure sum are then the same as without groups.
    In empty places, where nothing arrives, the id is 0.

    Args:
      aggregator: any aggregator of a group's messages.
      group: a `Subpopulation`, which translates places into ids by `own_ids`. In any other population ids stay as they
        are.

    Raises: ValueError for attackers in a population that does not state these ids.

    Guarantees: an attacker is the same client in a flat federation, in edges and in regions
    (tests/laws/test_attackers.py::test_an_attacker_is_the_same_client); groups that do not state ids are refused if
    there are attackers (::test_groups_without_ids_refuse_attackers).
    """
    if not isinstance(group, Subpopulation):
        if aggregator.facts.attackers is not None:
            hint = "Attackers are known by these: inherit from types.Subpopulation, as population.Group does."
            validate.fail("population", "groups that state their clients' own ids", type(group).__name__, hint)
        return aggregator

    def own_ids(places: Array) -> Array:
        return jnp.maximum(group.own_ids(places), 0)

    def with_translated_ids(function: Callable | None) -> Callable | None:
        if function is None:
            return None

        def translated(key, round, *arguments):
            arguments = [x._replace(ids=own_ids(x.ids)) if isinstance(x, Received) else x for x in arguments]
            cohort = round.cohort._replace(ids=own_ids(round.cohort.ids))
            return function(key, round._replace(cohort=cohort), *arguments)

        return translated

    # These are all functions of an aggregator that see ids; `stays` and `view` may be None.
    names = ("accumulate", "finalize", "stays", "view")
    return aggregator._replace(**{name: with_translated_ids(getattr(aggregator, name)) for name in names})


def remembers(sampler: Sampler) -> bool:
    """Whether a sampler has a state, by which it remembers earlier rounds."""
    return bool(jax.tree.leaves(jax.eval_shape(sampler.init)))


def named_by(name: str, metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """Puts a level's name before the names of its metrics, and behind their words."""
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
    """Makes the report of a round inside of a hierarchy.

    The clients' metrics and counts keep their names. Numbers of the level itself stand under the level's name, such as
    `edge_skipped_rounds`.

    Args:
      inside: the round's info, and its clients' metrics, counts and weight.
      name: of the level, such as "edge".

    Raises: ValueError where a level further inside has the same name.
    """
    counts = words_by_name(inside.counts)
    scalars = {}
    info: dict[str, Any] = inside.info
    for key, x in info.items():
        if f"{name}_{key}" in inside.counts:
            validate.fail("name", "another than that of a level inside", name, "Name it 'region', say.")
        # The info repeats the clients' metrics and counts, which the report has already; arrays cannot be summed over
        # rounds.
        is_of_clients = key in inside.counts or key.removeprefix("client_") in inside.means
        if is_of_clients or (not isinstance(x, Count) and jnp.ndim(x)):
            continue
        if isinstance(x, Count):
            counts[f"{name}_{key}"] = words_of(x)
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            # A NaN of one round, such as a mean over no clients, is left out of the mean over rounds.
            is_finite = jnp.isfinite(x)
            scalars[f"{name}_{key}"] = Mean(jnp.where(is_finite, x, 0), is_finite.astype(jnp.float32))
        else:
            counts[f"{name}_{key}"] = jnp.stack([jnp.uint32(0), x.astype(jnp.uint32)])
    return Told(
        means=inside.means,
        scalars=scalars,
        counts=counts,
        weight=inside.weight,
        used=info["skipped_rounds"] == 0,
        broken=inside.broken,
    )


def summed_over_rounds(told: Told) -> tuple[dict[str, Mean], dict[str, Array], tuple[Array, Array]]:
    """Sums the reports of several rounds.

    Args:
      told: leaves [rounds, ...].

    Returns: (metrics, counts, (sum of the clients' weights over the rounds that were used, number of these rounds)).
    """
    metrics_by_round = tree.joined_metrics({"client": told.means, "level": told.scalars})
    means = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), metrics_by_round)
    counts = words_by_name({key: bytes_of(words).sum(0, dtype=jnp.uint32) for key, words in told.counts.items()})
    used_weight = jnp.where(told.used, told.weight, 0).sum()
    return means, counts, (used_weight, told.used.sum())
