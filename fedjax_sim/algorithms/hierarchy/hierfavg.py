"""HierFAVG: devices train under edges, and edges under a cloud. Seen from the cloud, an edge is a client.

Let n_e be the number of examples under edge e, n their sum, and w_e the model of edge e after its kappa rounds. A round
of the cloud is

    w <- w + sum_e (n_e / n) (w_e - w).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, engine, sampling, server, tree, validate
from fedjax_sim.algorithms.server.fedavg import fedavg
from fedjax_sim.engine.arithmetic import exact_sums
from fedjax_sim.prng import fold_in, stream
from fedjax_sim.round.compatibility import check_parts
from fedjax_sim.round.costs import metrics_of
from fedjax_sim.round.federated import federated
from fedjax_sim.round.inner_time import time_inside
from fedjax_sim.round.levels import by_own_ids, named_by, remembers, summed_over_rounds, told, without_empty_places
from fedjax_sim.round.options import AveragingOptions
from fedjax_sim.round.round import FederatedState, close, collect, initial_state, invite
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientFacts,
    ClientUpdate,
    Devices,
    Inside,
    Level,
    Mean,
    Population,
    PyTree,
    Report,
    Sampler,
    Star,
    Subpopulation,
    UpdateTransform,
)
from fedjax_sim.validate import FromData, LossFn

WEIGHTINGS = (None, "examples", "uniform")
WEIGHT = "weight inside"  # the name of a metric that sums the clients' weights; it stays inside of the level


def as_client_update(
    federation: Star | Algorithm,
    rounds: int = 1,
    *,
    name: str = "edge",
    weighting: str | None = None,
    keep: bool = False,
    devices: Devices | None = None,
) -> ClientUpdate:
    """Makes one client of a whole federation: the client makes `rounds` rounds of its own and sends the model's change.

    The clients inside are a group of the population (`population.grouped`). The new client may itself be inside of a
    federation that is a client, so levels nest. Inside, a sampler draws places of the group, of which some are empty in
    groups that are not the largest. The keys of clients follow from the group's id and their places. The aggregator,
    its attackers and its memory of clients use the clients' ids in the whole population.

    Args:
      federation: the federation inside: an algorithm such as `fedavg(...)` or `split_gnn(...)`, or its parts. Its
        `mesh` is not used, because devices share out edges. With `nonfinite="error"`, a message inside that is not
        finite makes the message of this client not finite.
      rounds: kappa, the rounds inside for each round above.
      name: of this level, also in statements of privacy. With the name "edge" the info has `edge_uplink_bytes`,
        `edge_clients_reported`, ... These are summed exactly over the edges that send a message, used or not: a message
        may be too late for a deadline above, or lost in a secure sum. Nothing is counted of an edge that is stopped at
        its work
        (tests/algorithms/hierarchy/test_hierfavg.py::test_an_edge_too_late_for_a_deadline,
        ::test_late_edges_of_a_region, ::test_edges_that_leave_a_secure_sum).
      weighting: the weight of this client. "examples": the sum of the weights that its clients reported, as a mean over
        its rounds; that is n_e where all take part. "uniform": 1. None: as "examples", if the aggregator above takes
        weights. A round inside that was skipped counts for nothing; if all were skipped there is no message.
      keep: True: sampler, optimiser, memories and clients' states go on in the next round above, from the model that is
        then broadcast. False: all begin anew. The own models of personal clients inside go on with their states, and
        no evaluation above reads them.
      devices: of all clients inside, by their ids in the whole population, for a clock above; None without one. A round
        inside lasts as long as the slowest client of its cohort, and `rounds` of them follow one another. Where the
        clients inside are federations, these devices are their links to the level above, and they state the devices
        inside of them. The joules of all clients inside are joules of this client.

    Returns: a ClientUpdate whose `federation` is the star of these parts.

    Raises: ValueError
      for parts that do not fit, or are not a whole algorithm (`Star.complete`: Mime has one more pass);
      for a server that does not say how it goes on from another model (`ServerUpdate.moved`: SCAFFOLD's state is more
      than a model);
      for an aggregator made for one population's weights;
      in groups of unequal size for a sampler with a state (a cohort of empty places would be drawn again) or a limit of
      reports (empty places would count);
      and, without `keep`, for a state of sampler, clients, transform or aggregator that would be lost (an optimiser's
      state begins anew).
    With `devices` it also raises the errors of `inner_time.time_inside`, and ValueError for an algorithm whose rounds
    inside are not those of its parts.

    Guarantees: one round, weighted by examples, under a mean is flat FedAvg, and not if weighted equally
    (tests/algorithms/hierarchy/test_hierfavg.py::test_one_edge_round_is_flat); more rounds meet a closed form
    (::test_fixed_points); a group without messages sends none, and the model keeps its bits (::test_empty_groups); nor
    does a group whose rounds were skipped send any (::test_skipped_rounds_weigh_nothing); kept states go on
    (::test_momentum_at_the_edge); states that an edge would lose are refused (::test_what_an_edge_would_lose). For a
    clock above, its rounds take the time of the cohorts that it draws, with examples or without
    (::test_time_of_an_empty_group, tests/round/test_inner_time.py::test_rounds_inside_by_hand).

    References: Liu, Zhang, Song and Letaief 2020 (HierFAVG), algorithm 1.
    """
    level = _level_of(federation)
    star = level.star
    _check_options(star, rounds, name, weighting, keep)
    if keep:
        _check_moved(star)
    if devices is not None and isinstance(federation, Algorithm) and federation.level is not None:
        hint = "Its rounds are more than invite, collect and close, and their time is not known: leave devices out."
        validate.fail("federation", "the parts of a whole algorithm, for rounds that take time", "another", hint)

    def init(params: PyTree, group: Population) -> PyTree:
        has_empty_places = isinstance(group, Subpopulation) and group.has_empty_places
        if has_empty_places and remembers(star.sampler):
            hint = "A cohort of empty places would be drawn again and again. Take uniform, poisson or full."
            validate.fail("sampler", "one without a state in groups of unequal size", "one with a state", hint)
        if has_empty_places and getattr(star.sampler.design, "max_reports", None) is not None:
            hint = "Empty places would count among the first. Leave the limit out, or make the groups equal."
            rule = "one without a limit of reports in groups of unequal size"
            validate.fail("sampler", rule, star.sampler.design.max_reports, hint)
        with engine.unplaced():  # the memory of a group is a plain array
            state = level.init(params, group)
        if not keep:
            _check_nothing_is_lost(state)
        return state

    def apply(key, broadcast, own_state, group):
        # The edge goes on from the broadcast model, with its own states or with new ones.
        if keep:
            assert star.server.moved is not None, "`_check_moved` refuses None"
            start = own_state._replace(server=star.server.moved(own_state.server, broadcast))
        else:
            start = init(broadcast, group)

        def step(state, t):
            # `inner_time.time_inside` derives the same key, to price the cohorts that are drawn here.
            state, inside = level.step(fold_in(stream(key, "inside"), t), state, group)
            return state, told(inside, name)

        end, reports = jax.lax.scan(step, start, jnp.arange(rounds))
        update = tree.subtract(star.server.params(end.server), broadcast)
        means, counts, (total_weight, num_used) = summed_over_rounds(reports)
        if weighting == "uniform":
            weight = (num_used > 0).astype(jnp.float32)
        else:
            weight = total_weight / rounds
        if star.execution.nonfinite == "error":
            # A weight of NaN makes this client's message unusable, so that the level above applies its own `nonfinite`.
            weight = jnp.where(reports.broken.any(), jnp.nan, weight)
        return Report(update, weight, means, counts), end if keep else own_state

    facts = ClientFacts(
        uniform_weights=weighting == "uniform",
        needs_weights=weighting == "examples",
        metrics=(*named_by(name, level.metrics), *star.client.facts.metrics),
        level=name,
    )
    return ClientUpdate(
        init=init if keep else lambda params, group: (),
        apply=apply,
        facts=facts,
        federation=on_one_device(star),
        time_inside=None if devices is None else time_inside(star, rounds, devices),
    )


def _level_of(federation: Star | Algorithm) -> Level:
    """Returns the form of a federation that a hierarchy needs.

    Args:
      federation: an algorithm that states its `level`; or the parts of a whole algorithm, or an algorithm with such
        parts. Of parts a level is made, whose steps are their rounds, on one device.

    Returns: a `Level`. In one that is made here, `Inside.weight` is the sum of the weights of the messages that
    arrived, [] float32, and the info has no metric `WEIGHT`.

    Raises: ValueError for parts that are not a whole algorithm, and those of `check_parts`; TypeError for another kind.
    """
    if isinstance(federation, Algorithm) and federation.level is not None:
        validate.part("federation.level", federation.level, Level)
        validate.part("federation.level.star", federation.level.star, Star)
        return federation.level
    whole = federation.parts if isinstance(federation, Algorithm) else federation
    validate.part("star", whole, Star)
    assert whole is not None, "`validate.part` refuses None"
    _check_whole(whole)
    inner = on_one_device(whole._replace(client=_with_weight_metric(whole.client)))

    def step(key: Array, state: FederatedState, group: Population) -> tuple[FederatedState, Inside]:
        star = inner._replace(aggregator=by_own_ids(inner.aggregator, group))
        cohort, sampler_state = invite(star, key, state)
        cohort = without_empty_places(cohort, group)
        gathered = collect(star, key, cohort, state, group)
        state, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))
        means, _ = exact_sums.total(gathered.means)
        weight = means.pop(WEIGHT).total
        info = {name: x for name, x in info.items() if name.removeprefix("client_") != WEIGHT}
        return state, Inside(info, means, gathered.counts, weight, info["dropped_clients"] > 0)

    init = partial(initial_state, inner)
    return Level(whole, init, step, metrics_of(whole._replace(client=None)))


@validate.named_arguments
def hierarchical_fedavg(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    edge_rounds: int = 1,
    group_size: Annotated[int | None, FromData("group_size")] = None,
    edge_sampler: Sampler | None = None,
    edge_aggregator: Aggregator | None = None,
    edge_transform: UpdateTransform | None = None,
    edge_optimizer: optax.GradientTransformation | None = None,
    edge_weighting: str | None = None,
    edge_devices: Devices | None = None,
    keep_edges: bool = False,
    server_optimizer: optax.GradientTransformation | None = None,
    **options: Unpack[AveragingOptions],
) -> Algorithm:
    """Makes HierFAVG: edges make rounds of FedAvg over their groups of clients, and a cloud averages the edges' models.

    In the info, `clients_reported`, `uplink_bytes`, ... count messages between edges and cloud.
    `edge_clients_reported`, `edge_uplink_bytes`, ... count messages between clients and edges.

    Args:
      loss_fn: as in `client.local_sgd`.
      sampler, aggregator, transform, downlink: of the cloud, whose clients are the edges.
      server_optimizer: of the cloud; None: the mean of the edges' models is its next model.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in
        `client.work`.
      edge_rounds, edge_weighting, keep_edges: kappa, the weight of an edge, and whether its states are kept: `rounds`,
        `weighting` and `keep` of `as_client_update`.
      group_size: number of clients in the largest group (`Grouped.group_size`), all of whom take part unless there is
        an `edge_sampler`, beside which it may be None.
      edge_sampler: draws from that number of clients; None: all of them take part.
      edge_aggregator, edge_transform, edge_optimizer: as the cloud's; by default `aggregation.mean()`, no transform,
        and SGD with rate 1.
      edge_devices: of all clients, for a sampler with a clock, whose own devices are then the edges' links to the
        cloud; see `as_client_update`. None without a clock. In a config the table [devices] describes the edges' links,
        and the clients have devices of the same kind unless there is a table [algorithm.edge_devices].
      plan: of the clients inside of an edge; edges follow one another, or are shared out over devices.
      nonfinite: of messages to an edge and to the cloud, as in `federated`.
      mesh: devices that share the edges, as in `federated`.

    Guarantees: the models are those of NumPy, with momentum at both levels
    (tests/algorithms/hierarchy/test_hierfavg.py::test_the_recipe); and the guarantees of `as_client_update`.

    References: Liu, Zhang, Song and Letaief 2020 (HierFAVG), algorithm 1.

    >>> import jax, jax.numpy as jnp
    >>> from fedjax_sim import population, sampling
    >>> devices = population.quadratic_population([1.0] * 5, [0.0, 0.0, 1.0, 1.0, 1.0])
    >>> edges = population.grouped(devices, [0, 0, 1, 1, 1])
    >>> options = {"group_size": edges.group_size, "num_steps": 1, "edge_rounds": 2}
    >>> algorithm = hierarchical_fedavg(population.quadratic_loss, sampling.full(2), optax.sgd(0.5), **options)
    >>> state = algorithm.init(jax.random.key(0), {"w": jnp.zeros(1)}, edges)
    >>> state, info = jax.jit(algorithm.step)(jax.random.key(0), state, edges)
    >>> algorithm.params(state)["w"].tolist()  # 2/5 of 0 and 3/5 of 0.75
    [0.45000001788139343]
    >>> int(info["clients_reported"]), info["edge_clients_reported"].total()  # 2 edges; 5 clients in each of 2 rounds
    (2, 10)
    """
    edge_sampler = sampler_inside(edge_sampler, group_size, "clients")
    edge_parts = {"aggregator": edge_aggregator, "transform": edge_transform, "server_optimizer": edge_optimizer}
    edge_options, cloud_options = _options_by_level(options)
    edge = fedavg(loss_fn, edge_sampler, optimizer, **edge_parts, **edge_options)
    if edge_devices is not None and sampler.devices is None:
        hint = "Put with_clock around the cloud's sampler; or leave edge_devices out."
        validate.fail("edge_devices", "None without a clock", "devices", hint)
    work = as_client_update(edge, edge_rounds, weighting=edge_weighting, keep=keep_edges, devices=edge_devices)
    aggregator = cloud_options.pop("aggregator", None)
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    return federated(sampler, work, rule, step, **cloud_options)


def _options_by_level(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the rounds inside of an edge, and those of the cloud's rounds; `nonfinite` is for both."""
    cloud_names = {"aggregator", "transform", "downlink", "mesh"}
    edge = {name: value for name, value in options.items() if name not in cloud_names}
    cloud = {name: value for name, value in options.items() if name in cloud_names or name == "nonfinite"}
    return edge, cloud


def sampler_inside(edge_sampler: Sampler | None, group_size: int | None, members: str) -> Sampler:
    """Returns the sampler of an edge: `edge_sampler`, or everybody in the largest group where it is None.

    Args:
      edge_sampler: draws from the places of the largest group; None: all of them take part.
      group_size: number of places in the largest group; None: those of the `edge_sampler`.
      members: the word for the clients of a group in errors, such as "clients" or "parties".

    Raises: ValueError, TypeError where both are None, and where the sampler is for groups of another size.
    """
    if edge_sampler is None:
        hint = f"Group the {members}: population.grouped, or [data.with_groups] in a config; or give an edge_sampler."
        if group_size is None:
            validate.fail("group_size", f"the {members} of the largest group", None, hint)
        return sampling.full(group_size)
    validate.part("edge_sampler", edge_sampler, Sampler)
    num_places = edge_sampler.design.population_size
    if group_size not in (None, num_places):
        hint = "Leave it out: the edge_sampler knows how many it draws from."
        validate.fail("group_size", f"None or {num_places}, as of the edge_sampler", group_size, hint)
    return edge_sampler


def _check_options(star: Star, rounds: int, name: str, weighting: str | None, keep: bool) -> None:
    """Raises ValueError, TypeError for options of `as_client_update` that are out of range or do not fit the star.

    Args:
      star: the parts of the rounds inside.
      rounds: kappa, at least 1.
      name: of the level, a Python identifier.
      weighting: "examples", "uniform" or None.
      keep: whether states inside go on in the next round above; False refuses a sampler with a state and a rate over
        rounds.
    """
    validate.integer("rounds", rounds)
    validate.one_of("weighting", weighting, WEIGHTINGS)
    validate.truth("keep", keep)
    if not (isinstance(name, str) and name.isidentifier()):
        validate.fail("name", "a word, such as 'edge'", name)
    if star.sampler.devices is not None:
        hint = "Put with_clock around the upper sampler, and pass what runs inside as `devices` (edge_devices)."
        validate.fail("sampler", "one without a clock, inside of a hierarchy", "one with a clock", hint)
    if not keep and star.client.facts.reads_round:
        hint = "Its rounds begin anew in each round above. Pass keep=True, for a rate over an edge's own rounds."
        validate.fail("optimizer", "a rate over steps in an edge that keeps nothing", "one over rounds", hint)
    if not keep and remembers(star.sampler):
        hint = "It would begin anew, and draw the same cohorts, in each round above. Pass keep=True."
        validate.fail("sampler", "one without a state, with keep=False", "one with a state", hint)


def on_one_device(star: Star) -> Star:
    """The star without a mesh: cohorts inside are not split over devices, because cohorts of the level above are."""
    return star._replace(execution=star.execution._replace(mesh=None))


def _check_whole(star: Star) -> None:
    """Raises ValueError for parts that are not a whole algorithm, or that cannot be inside of a hierarchy.

    Args:
      star: the parts of the rounds inside.
    """
    if star.complete is not True:
        hint = "Its rounds are more than invite, collect and close: take parts of `federated`, which say `complete`."
        validate.fail("star", "the parts of a whole algorithm (`Star.complete`)", "parts without the rest", hint)
    check_parts(star.sampler, star.client, star.transform, star.aggregator, star.server)
    if star.aggregator.facts.keyless:
        hint = "It holds its model encrypted, so what it sends up is a ciphertext: encrypt between edges and cloud."
        validate.fail("aggregator", "one whose server has a key, inside of a hierarchy", "one without", hint)
    if star.aggregator.facts.design is not None:
        hint = "Its weights add up to those of one population, and each edge has its own: take aggregation.mean()."
        validate.fail("aggregator", "one that takes weights as they come, inside of a hierarchy", "another", hint)
    _check_moved(star)


def _check_moved(star: Star) -> None:
    """Raises ValueError for a server that cannot go on from the model that the level above broadcasts."""
    if star.server.moved is None:
        hint = "What it keeps beside the model would be lost, or wrong. Take server.optimizer, or state `moved`."
        validate.fail("server", "one that can go on from another model (`ServerUpdate.moved`)", "another", hint)


def _check_nothing_is_lost(state: PyTree) -> None:
    """Raises ValueError for a federation whose parts have states that must not begin anew in each round above."""
    if not isinstance(state, FederatedState):
        return
    states = {"client": state.clients, "transform": (state.memory, state.transform), "aggregator": state.aggregator}
    for name, part_state in states.items():
        if jax.tree.leaves(part_state):
            hint = "It would begin anew in each round above. Pass keep=True (keep_edges)."
            validate.fail(name, "one without a state inside of an edge that keeps nothing", "one with a state", hint)


def _with_weight_metric(client: ClientUpdate) -> ClientUpdate:
    """Makes a client report its weight as a metric too: metrics are summed exactly over the messages that arrived."""

    def apply(*args):
        report, state = client.apply(*args)
        weight = jnp.asarray(report.weight, jnp.float32)
        return report._replace(metrics=report.metrics | {WEIGHT: Mean(weight, jnp.ones_like(weight))}), state

    return client._replace(apply=apply)
