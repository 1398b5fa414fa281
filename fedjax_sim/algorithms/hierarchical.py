"""Hierarchies: a federation, seen from above, is a client. Devices train under edges, and edges under a cloud.

With n_e examples under edge e, n all of them, and w_e the model of edge e after its kappa rounds, a cloud round is

    w <- w + sum_e (n_e / n) (w_e - w).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fedjax_sim import aggregation, engine, sampling, server, tree, validate
from fedjax_sim.algorithms.compatibility import check_parts
from fedjax_sim.algorithms.costs import eight_bytes, metrics_of, two_words, words_of
from fedjax_sim.algorithms.federated import federated
from fedjax_sim.algorithms.recipes import fedavg
from fedjax_sim.algorithms.round import FederatedState, close, collect, initial_state, invite
from fedjax_sim.engine import exact
from fedjax_sim.prng import stream
from fedjax_sim.sampling.fates import recounted
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientUpdate,
    Cohort,
    Count,
    Mean,
    Population,
    PyTree,
    Report,
    Sampler,
    Star,
    UpdateTransform,
)

__all__ = ["as_client_update", "hierarchical_fedavg"]

WEIGHTINGS = ("examples", "uniform")


def as_client_update(
    star: Star, rounds: int = 1, *, name: str = "edge", weighting: str = "examples", keep: bool = False
) -> ClientUpdate:
    """A federation as one client: it makes `rounds` rounds of its own, and sends how far its model moved.

    Its clients are a group of the population (`population.grouped`). It may be a client of a federation that is a
    client again, so levels nest. Inside, clients are known by their place in the group: their keys follow from the
    group's id and that place, and a sampler draws places, some of which are empty in groups that are not the largest.

    Args:
      star: the parts of the federation inside, such as `federated(...).parts`; its `mesh` is not used: devices share
        out edges. With `nonfinite="error"` a message inside that is not finite makes this client's own so.
      rounds: kappa, of its own for each one above.
      name: of this level: "edge" tells `edge_uplink_bytes`, `edge_clients_reported`, ... in info, summed exactly.
      weighting: "examples": the weights that its clients reported, summed, as a mean over its rounds: n_e where all
        take part; "uniform": 1. A round inside that was skipped counts for nothing; without any there is no message.
      keep: whether sampler, optimiser, memories and clients' states go on in the next round above, from the model that
        is then broadcast; else all begin anew.

    Returns: a ClientUpdate whose `federation` is the star.

    Raises: ValueError for parts that do not fit, or are not a whole algorithm (`Star.complete`: Mime has a pass more);
    for a server that does not say how it goes on from another model (`ServerUpdate.moved`: SCAFFOLD's is more than a
    model); for an aggregator made for one population's weights; for a sampler with a state in groups of unequal size (a
    cohort of empty places would be drawn again); and, without `keep`, for a state of sampler, clients, transform or
    aggregator that would be lost. An optimiser's begins anew.

    Guarantees: one round, weighed by examples, under a mean is flat FedAvg, and not if weighed equally
    (tests/algorithms/test_hierarchical.py::test_one_edge_round_is_flat); more rounds meet a closed form
    (::test_fixed_points); a group without messages sends none, and the model keeps its bits (::test_empty_groups), nor
    does one whose rounds were skipped (::test_skipped_rounds_weigh_nothing); what is kept goes on
    (::test_momentum_at_the_edge); what an edge would lose is refused (::test_what_an_edge_would_lose).

    References: Liu, Zhang, Song and Letaief 2020 (HierFAVG), algorithm 1.
    """
    _check(star, rounds, name, weighting, keep)
    inner = star._replace(client=_weighed(star.client, f"{name}_weight"), mesh=None)

    def initial(params: PyTree, group: Population) -> FederatedState:
        if getattr(group, "ragged", False) and _remembers(star):
            hint = "A cohort of empty places would be drawn again and again. Take uniform, poisson or full."
            validate.fail("sampler", "one without a state in groups of unequal size", "one with a state", hint)
        with engine.unplaced():  # the memory of a group is a plain array
            state = initial_state(inner, params, group)
        if not keep:
            _check_nothing_is_lost(state)
        return state

    def one_round(key: Array, state: FederatedState, group: Population) -> tuple[FederatedState, _Told]:
        cohort, sampler = invite(inner, key, state)
        cohort = _existing(cohort, group)
        gathered = collect(inner, key, cohort, state, group)
        state, info = close(inner, key, cohort, gathered, state._replace(sampler=sampler))
        return state, _told(info, exact.total(gathered.means)[0], gathered.counts, name)

    def apply(key, broadcast, own, group):
        if keep:
            start = own._replace(server=star.server.moved(own.server, broadcast))
        else:
            start = initial(broadcast, group)

        def step(state, t):
            return one_round(jax.random.fold_in(stream(key, "inside"), t), state, group)

        end, told = jax.lax.scan(step, start, jnp.arange(rounds))
        update = tree.subtract(star.server.params(end.server), broadcast)
        means, counts, (weight, used) = _over_rounds(told, f"{name}_weight")
        weight = weight / rounds if weighting == "examples" else (used > 0).astype(jnp.float32)
        if star.nonfinite == "error":
            weight = jnp.where(counts[f"{name}_dropped_clients"].any(), jnp.nan, weight)
        return Report(update, weight, means, counts), end if keep else own

    levels = [
        x._replace(
            name=f"{name}_{x.name}",
            words=f"{x.words} ({name})",
            instead=x.instead and f"{name}_{x.instead}",
            by=x.by and f"{name}_{x.by}",
        )
        for x in metrics_of(star._replace(client=None))
    ]
    return ClientUpdate(
        init=initial if keep else lambda params, group: (),
        apply=apply,
        uniform_weights=weighting == "uniform",
        metrics=(*levels, *star.client.metrics),
        federation=star._replace(mesh=None),
    )


@validate.named_arguments
def hierarchical_fedavg(
    loss_fn: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    edge_rounds: int = 1,
    group_size: int | None = None,
    edge_sampler: Sampler | None = None,
    edge_aggregator: Aggregator | None = None,
    edge_transform: UpdateTransform | None = None,
    edge_optimizer: optax.GradientTransformation | None = None,
    edge_weighting: str = "examples",
    keep_edges: bool = False,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "examples",
    shuffle: bool = True,
    transform: UpdateTransform | None = None,
    downlink: UpdateTransform | None = None,
    nonfinite: str = "drop",
    plan: engine.Plan | None = None,
    mesh: Mesh | str | None = "all",
) -> Algorithm:
    """HierFAVG: edges make rounds of FedAvg over their groups of clients, and the cloud averages the edges' models.

    `clients_reported`, `uplink_bytes`, ... are those between edges and cloud, `edge_clients_reported`,
    `edge_uplink_bytes`, ... those between clients and edges.

    Args:
      sampler, aggregator, transform, downlink, server_optimizer: of the cloud, whose clients are the edges.
      optimizer: the clients'; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in `client.work`.
      edge_rounds, edge_weighting, keep_edges: kappa, what an edge weighs, whether it remembers: `as_client_update`.
      group_size: clients in the largest group (`Grouped.group_size`), all of whom take part unless there is an
        `edge_sampler`, one of as many clients.
      edge_aggregator, edge_transform, edge_optimizer: as the cloud's; `aggregation.mean()`, none, SGD with rate 1.
      plan: of the clients inside of an edge; edges follow one another, or are shared out over devices.

    Guarantees: NumPy's, with momentum at both levels (tests/algorithms/test_hierarchical.py::test_the_recipe); and
    those of `as_client_update`.

    References: Liu, Zhang, Song and Letaief 2020 (HierFAVG), algorithm 1.

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim import population, sampling
    >>> devices = population.quadratic_population([1.0] * 5, [0.0, 0.0, 1.0, 1.0, 1.0])
    >>> edges = population.grouped(devices, [0, 0, 1, 1, 1])
    >>> options = {"group_size": edges.group_size, "num_steps": 1, "edge_rounds": 2}
    >>> made = hierarchical_fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(0.5), **options)
    >>> state = made.init(jax.random.key(0), {"w": jnp.zeros(1)}, edges)
    >>> state, info = made.step(jax.random.key(0), state, edges)
    >>> made.params(state)["w"].tolist()  # 2/5 of 0 and 3/5 of 0.75
    [0.45000001788139343]
    >>> int(info["clients_reported"]), info["edge_clients_reported"].total()  # of one round, and of two
    (2, 10)
    """
    if edge_sampler is None:
        hint = "Group the clients: population.grouped, or [data.with_groups] in a config; or give an edge_sampler."
        if group_size is None:
            validate.fail("group_size", "the clients of the largest group", None, hint)
        edge_sampler = sampling.full(group_size)
    inside = {"aggregator": edge_aggregator, "transform": edge_transform, "server_optimizer": edge_optimizer}
    work = {"num_steps": num_steps, "num_epochs": num_epochs, "batch_size": batch_size}
    how = {"weighting": weighting, "shuffle": shuffle, "nonfinite": nonfinite}
    edge = fedavg(loss_fn, edge_sampler, optimizer, **inside, **work, **how, plan=plan).parts
    work = as_client_update(edge, edge_rounds, weighting=edge_weighting, keep=keep_edges)
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    return federated(sampler, work, rule, step, transform, downlink=downlink, nonfinite=nonfinite, mesh=mesh)


def _check(star: Star, rounds: int, name: str, weighting: str, keep: bool) -> None:
    validate.part("star", star, Star)
    validate.integer("rounds", rounds)
    validate.one_of("weighting", weighting, WEIGHTINGS)
    validate.one_of("keep", keep, (True, False))
    if not (isinstance(name, str) and name.isidentifier()):
        validate.fail("name", "a word, such as 'edge'", name)
    if star.complete is not True:
        hint = "Its rounds are more than invite, collect and close: take parts of `federated`, which say `complete`."
        validate.fail("star", "the parts of a whole algorithm (`Star.complete`)", "parts without the rest", hint)
    check_parts(star.sampler, star.client, star.transform, star.aggregator)
    if star.aggregator.design is not None:
        hint = "Its weights add up to those of one population, and each edge has its own: take aggregation.mean()."
        validate.fail("aggregator", "one that takes weights as they come, inside of a hierarchy", "another", hint)
    if star.server.moved is None:
        hint = "What it keeps beside the model would be lost, or wrong. Take server.optimizer, or state `moved`."
        validate.fail("server", "one that can go on from another model (`ServerUpdate.moved`)", "another", hint)
    if star.sampler.devices is not None:
        hint = "The time of rounds inside is in no clock above: put with_clock around the upper sampler."
        validate.fail("sampler", "one without a clock, inside of a hierarchy", "one with a clock", hint)
    if not keep and _remembers(star):
        hint = "It would begin anew, and draw the same cohorts, in each round above. Pass keep=True."
        validate.fail("sampler", "one without a state, with keep=False", "one with a state", hint)


def _check_nothing_is_lost(state: FederatedState) -> None:
    kept = {"client": state.clients, "transform": (state.memory, state.transform), "aggregator": state.aggregator}
    for name, own in kept.items():
        if jax.tree.leaves(own):
            hint = "It would begin anew in each round above. Pass keep=True (keep_edges)."
            validate.fail(name, "one without a state inside of an edge that keeps nothing", "one with a state", hint)


def _remembers(star: Star) -> bool:
    return bool(jax.tree.leaves(jax.eval_shape(star.sampler.init)))


def _weighed(client: ClientUpdate, name: str) -> ClientUpdate:
    """The same client, whose weight is a metric too, so that the weights that arrived add up exactly."""

    def apply(*args):
        report, state = client.apply(*args)
        weight = jnp.asarray(report.weight, jnp.float32)
        return report._replace(metrics=report.metrics | {name: Mean(weight, jnp.ones_like(weight))}), state

    return client._replace(apply=apply)


def _existing(cohort: Cohort, group: Population) -> Cohort:
    """The cohort without the places of the group that are empty: nothing is sent to or by them."""
    if not hasattr(group, "there"):
        return cohort
    there = group.there(cohort.ids)
    sent = None if cohort.sent is None else cohort.sent & there
    return recounted(cohort._replace(invited=cohort.invited & there, reported=cohort.reported & there, sent=sent))


class _Told(NamedTuple):
    """What a round inside tells those above."""

    means: dict[str, Mean]  # the clients' metrics
    scalars: dict[str, Mean]  # floats in info
    counts: dict[str, Array]  # [2] uint32 words
    used: Array  # [] bool; the round was not skipped


def _told(info: dict[str, Any], means: dict[str, Mean], own: dict[str, Array], name: str) -> _Told:
    """The clients' metrics and counts under their own names; what the level itself counted under the level's."""
    counts, scalars = {key: two_words(x) for key, x in own.items()}, {}
    for key, x in info.items():
        if f"{name}_{key}" in own:
            validate.fail("name", "another than that of a level inside", name, "Name it 'region', say.")
        if key in own or key.removeprefix("client_") in means or (not isinstance(x, Count) and jnp.ndim(x)):
            continue
        if isinstance(x, Count):
            counts[f"{name}_{key}"] = words_of(x)
        elif jnp.issubdtype(x.dtype, jnp.inexact):
            finite = jnp.isfinite(x)
            scalars[f"{name}_{key}"] = Mean(jnp.where(finite, x, 0), finite.astype(jnp.float32))
        else:
            counts[f"{name}_{key}"] = jnp.stack([jnp.uint32(0), x.astype(jnp.uint32)])
    return _Told(means, scalars, counts, info["skipped_rounds"] == 0)


def _over_rounds(told: _Told, weight: str) -> tuple[dict[str, Mean], dict[str, Array], tuple[Array, Array]]:
    """Metrics and counts summed over rounds, and (the clients' weights in rounds that were used, the number of these).

    Args:
      told: leaves [rounds, ...].
    """
    both = tree.joined({"client": told.means, "level": told.scalars})
    means = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), both)
    counts = {key: two_words(eight_bytes(words).sum(0, dtype=jnp.uint32)) for key, words in told.counts.items()}
    weights = jnp.where(told.used, told.means[weight].total, 0).sum()
    return {key: x for key, x in means.items() if key != weight}, counts, (weights, told.used.sum())
