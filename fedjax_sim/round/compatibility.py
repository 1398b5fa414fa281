"""Checks, by static facts, that the parts of a round fit together: refused combinations would give wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_sim import validate
from fedjax_sim.types import Aggregator, ClientUpdate, Devices, PyTree, Sampler, ServerUpdate, UpdateTransform

LARGEST_INTEGER = 2**24  # float32 holds this integer and every smaller one exactly


def check_parts(
    sampler: Sampler, client: ClientUpdate, transform: UpdateTransform, aggregator: Aggregator, server: ServerUpdate
) -> None:
    """Raises ValueError for parts of a federation that do not fit together.

    The checks cover integer messages and the sum that takes them, an aggregator and the server's compressor, a clock or
    late clients and the clients' steps, noise and the sums that it protects, and the weights of clients, aggregator and
    sampler.

    Args:
      sampler, client, transform, aggregator, server: the parts, of which static facts are read.

    Guarantees: each transform composes with a suitable mean or sum, with the same bits on one device and on two, and
    composes with a modular sum or is refused (tests/laws/test_compositions.py); a client drawn in proportion to its
    size is not weighted by size as well (tests/laws/test_facts.py::test_nobody_counts_twice); an aggregator made for
    another sampler is refused (::test_weights_belong_to_the_sampler); no clock prices steps that other parties help to
    compute, and no bytes of late clients are lost
    (tests/algorithms/split/test_client.py::test_no_clock_prices_what_others_help_with); weights that were asked for are
    used by the aggregator, or refused (tests/laws/test_weights.py).
    """
    _check_integers(sampler, transform, aggregator)
    if aggregator.facts.keyless and server.wire is not None:
        hint = "It holds the model encrypted, and cannot compress what it sends."
        validate.fail("downlink", "None for a server without a key", "a compressor", hint)
    if sampler.devices is not None:
        check_alone(client, "sampler")
        check_time_inside(client, sampler.devices)
    _check_no_late_clients(sampler, client)
    noise = transform.facts.noise
    design = sampler.design
    facts = aggregator.facts
    client_facts = client.facts
    # Central and distributed noise hide a client in the aggregate, which needs a bound on what one client moves there.
    # Local noise hides it in its message already.
    if noise is not None and noise.place != "local" and facts.sensitivity is None:
        hint = "Divide by a number fixed beforehand: aggregation.fixed_mean(m), with uniform weights."
        rule = "one whose result a client moves by a bounded amount, for the transform has noise"
        validate.fail("aggregator", rule, "one without a sensitivity", hint)
    if noise is not None and noise.place == "distributed" and facts.least is not None:
        num_shares = noise.named_details.get("cohort_size", sampler.num_slots)
        if facts.least < num_shares:
            hint = (
                f"Its noise is shared among {num_shares}: min_messages={num_shares}, or a mechanism with a smaller "
                "cohort_size."
            )
            rule = "no sum of fewer messages than the noise has shares"
            validate.fail("aggregator.least", rule, facts.least, hint)
    if client_facts.needs_weights and (facts.partly_weighted or not facts.weighted):
        hint = "Clients would count alike: leave weighting out, or say 'uniform'; or take aggregation.mean(), and for "
        hint += "integers by_examples(...) around a modular or secure sum."
        rule = "one that takes weights, for weighting = 'examples' was asked for"
        description = "one that takes none for some parts of an update" if facts.weighted else "one that takes none"
        validate.fail("aggregator", rule, description, hint)
    if facts.design is not None and facts.design != design:
        hint = "Its weights are for other cohorts: pass the `design` of the sampler with all its wrappers."
        validate.fail("aggregator.design", f"the sampler's, {design}", facts.design, hint)
    # A client that is drawn in proportion to its examples, and then weighted by them, would count twice.
    equal_chances = getattr(design, "equal_chances", None)
    if not equal_chances and facts.design is None and facts.weighted and not client_facts.uniform_weights:
        reason = "The sampler draws some clients more often"
        if equal_chances is None:
            reason = "The sampler's design does not say that it draws all alike (`equal_chances`)"
        elif not design.known:
            reason = "The sampler's scheme is unknown, and it may draw some clients more often"
        hint = (
            f"{reason}: weighting them by examples too counts them twice. Take weighting='uniform', or "
            "aggregation.li_scheme_one(); a part of your own states its `weighted`, `uniform_weights`."
        )
        validate.fail("aggregator", "one that takes no weights from clients", "one that does", hint)


def check_alone(client: ClientUpdate, name: str = "client") -> None:
    """Raises ValueError for a client whose steps are partly computed by other parties: no clock can price them.

    Rounds that take time call this check. It looks at every level of a hierarchy.

    Args:
      client: the client of the rounds.
      name: of the argument that the error refuses.

    Guarantees: rounds with a clock and asynchronous rounds refuse the clients of `split_client`, and rounds with a
    clock refuse edges that have such clients
    (tests/algorithms/split/test_client.py::test_no_clock_prices_what_others_help_with).
    """
    if _is_helped(client):
        hint = "A clock would price all of the model at the client, and nothing of what crosses in each step: take a "
        hint += "sampler without one, and algorithms.split_costs for the time of a step."
        rule = "rounds that take no time, for others compute parts of a client's steps"
        validate.fail(name, rule, "simulated time", hint)


def check_time_inside(client: ClientUpdate, devices: Devices) -> None:
    """Raises ValueError for a federation whose inner rounds have no time, or count time in another unit.

    Args:
      client: a client of rounds that take time; an ordinary client always passes.
      devices: the devices of these rounds, whose `ticks_per_second` the inner rounds must share.

    Guarantees: a federation without devices, a federation of such federations, and devices with other ticks per second
    are refused (tests/round/test_inner_time.py::test_what_is_refused).
    """
    if client.federation is None:
        return
    if client.time_inside is None:
        hint = "Pass the devices of its clients: as_client_update(devices=...), hierarchical_fedavg(edge_devices=...), "
        hint += "[algorithm.edge_devices] in a config; or take a sampler without a clock."
        validate.fail("client", "a federation that states its clients' devices, for rounds take time", "another", hint)
    inner_unit = client.time_inside.ticks_per_second
    outer_unit = devices.ticks_per_second
    if inner_unit != outer_unit:
        rule = f"{outer_unit}, as of the rounds above"
        validate.fail("devices.ticks_per_second", rule, inner_unit, "Times of both are added.")


def _is_helped(client: ClientUpdate) -> bool:
    """Whether other parties compute parts of the steps of this client, or of a client inside of it."""
    return client.facts.helped or (client.federation is not None and _is_helped(client.federation.client))


def _check_no_late_clients(sampler: Sampler, client: ClientUpdate) -> None:
    """Raises ValueError for a sampler with late clients, if other parties help to compute the clients' steps."""
    if not _is_helped(client):
        return
    cohort, _ = jax.eval_shape(lambda: sampler.sample(jax.random.key(0), sampler.init()))
    if cohort.timing.sent is not None:
        hint = "Late clients train too, and what crosses in their steps would not be counted: invite as many as report."
        validate.fail("sampler", "one without late clients, for others help them", "one with late clients", hint)


def check_distinct(sampler: Sampler, hint: str) -> None:
    """Raises ValueError unless the sampler's design says that no client is drawn twice in a round.

    Args:
      sampler: whose `design.replacement` is read.
      hint: the last sentence of the error: why a client must not be drawn twice.

    Guarantees: a design that does not say so is refused
    (tests/laws/test_facts.py::test_clients_with_state_are_distinct).
    """
    if getattr(sampler.design, "replacement", True):
        scheme = getattr(sampler.design, "scheme", "one that does not say")
        validate.fail("sampler", "a design without replacement, for clients with state", scheme, hint)


def check_everyone(sampler: Sampler, hint: str) -> None:
    """Raises ValueError unless the sampler's design says that every client is drawn once in every round.

    Args:
      sampler: whose `design` is read. Drawn clients may still fail to report.
      hint: the last sentence of the error: why all clients are needed.

    Guarantees: `clustered_by_updates` and `agnostic` refuse a cohort that lacks one client
    (tests/algorithms/personal/test_clustered_by_updates.py::test_what_is_refused,
    tests/algorithms/server/test_agnostic.py::test_what_is_refused).
    """
    design = sampler.design
    size = getattr(design, "population_size", None)
    if getattr(design, "replacement", True) or getattr(design, "cohort_size", None) != size:
        drawn = f"{getattr(design, 'cohort_size', 'an unknown number')} of {size}"
        validate.fail("sampler", "one that draws all clients, such as sampling.full", drawn, hint)


def discounts(factors: Callable, most: int) -> bool:
    """Whether a staleness weight makes some updates count less than fresh ones.

    Args:
      factors: a `StalenessWeight`, which is called with the gaps 0, ..., most.
      most: the largest gap that can occur, in rounds of the server.

    Returns: True also for factors that a sweep traces: they are not known, and only their shape and dtype are checked.

    Raises: TypeError for factors of another shape or dtype; ValueError for a factor outside of (0, 1], or NaN.

    Guarantees: FedBuff and FedAsync refuse factors that are NaN, 0 or above 1, a single number for all gaps, and
    integers (tests/algorithms/asynchronous/test_asynchronous.py::test_factors_out_of_range).
    """
    gaps = jnp.arange(most + 1, dtype=jnp.int32)
    # The gaps are constants, so their factors are known even while a program is traced.
    with jax.ensure_compile_time_eval():
        values = jnp.asarray(factors(gaps))
    if values.shape != gaps.shape or not jnp.issubdtype(values.dtype, jnp.floating):
        rule = f"a float for each of {gaps.size} gaps"
        validate.fail(
            "staleness", rule, f"{values.dtype} of shape {values.shape}", "See server.staleness.polynomial.", TypeError
        )
    if isinstance(values, Tracer):
        return True  # a sweep passes the exponent as an argument of its program: the factors are not known here
    values = np.asarray(values)
    is_wrong = ~((values > 0) & (values <= 1))  # NaN is wrong too
    if is_wrong.any():
        gap = int(np.argmax(is_wrong))
        validate.fail(f"staleness({gap})", "a factor in (0, 1]", float(values[gap]))
    return bool((values < 1).any())


def check_discount(client: ClientUpdate, update: PyTree) -> None:
    """Refuses clients whose stale updates cannot be multiplied by a factor below 1.

    Args:
      client: states in `ClientFacts.scalable` that a share of its update is an update.
      update: spec of the client's update, before its transform.

    Raises: ValueError for clients that do not state `scalable`; TypeError for integers, since a share of an integer
    would be rounded.

    Guarantees: SCAFFOLD, FedDyn, FedNova and clients that send their model are refused unless every update counts in
    full, and so are updates of integers
    (tests/algorithms/asynchronous/test_asynchronous.py::test_updates_that_cannot_be_discounted).
    """
    if not client.facts.scalable:
        hint = (
            "It keeps what belongs to the whole update (SCAFFOLD, FedDyn), or sends no difference of models. "
            "Take staleness=server.staleness.constant(); a client of your own states `scalable`."
        )
        validate.fail("client", "one whose updates may count in part when they are stale (`scalable`)", "another", hint)
    for path, x in jax.tree_util.tree_leaves_with_path(update):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            hint = "Stale updates count in part: send floats, or take staleness=server.staleness.constant()."
            validate.fail(f"update{jax.tree_util.keystr(path)}", "floats", str(x.dtype), hint, TypeError)


def _check_integers(sampler: Sampler, transform: UpdateTransform, aggregator: Aggregator) -> None:
    """Raises ValueError for integers that a sum would round, wrap, or compare with a number in another unit.

    A modular sum of m messages of at most A in magnitude, with weights of at most w, needs 2 m A w < modulus.

    Args:
      sampler: of m slots (`num_slots`).
      transform: states the range of its integers (`integer_range`, both ends included); None = it sends floats.
      aggregator: states `modulus` (None = it sums floats), `max_weight` w, and `homogeneous` (its result is in the
        unit of the messages).
    """
    integer_range = transform.facts.integer_range
    facts = aggregator.facts
    if facts.modulus is not None:
        if integer_range is None:
            hint = "It sums integers: end the transform with one that sends them, such as quantize(..., integers=True)."
            validate.fail("transform", "integers for a modular sum", "a transform that sends floats", hint)
        largest = max(abs(x) for x in integer_range) * facts.max_weight
        if largest > validate.INT32_MAX:
            hint = "A smaller max_weight, or fewer bits a message."
            validate.fail("aggregator.max_weight", "products of 32 bits", facts.max_weight, hint)
        # Sums lie in [-largest_sum, largest_sum]; a ring of at least 2 * largest_sum + 1 values tells them apart.
        largest_sum = sampler.num_slots * largest
        if 2 * largest_sum >= facts.modulus:
            needed = f"modulus_bits={(2 * largest_sum).bit_length()}"
            num_slots = sampler.num_slots
            hint = f"{num_slots} messages reach {largest_sum}: {needed}, fewer bits a message, or fewer clients."
            rule = f"more than {2 * largest_sum}, or sums would wrap"
            validate.fail("aggregator.modulus", rule, facts.modulus, hint)
    elif integer_range is not None and max(abs(x) for x in integer_range) > LARGEST_INTEGER:
        hint = "Sums are float32: use aggregation.modular_sum, or a coarser grid."
        validate.fail("transform", f"integers up to {LARGEST_INTEGER} at a sum of floats", integer_range, hint)
    if integer_range is not None and not facts.homogeneous:
        hint = "This aggregator compares messages with a number: integers=False, or another aggregator."
        validate.fail("transform", "one that sends numbers", f"integers in {integer_range}", hint)


def looks_like_the_model(update: PyTree, server: ServerUpdate, params: PyTree) -> bool:
    """Whether an update has the structure and shapes of the aggregate that the server takes.

    Another update may still be right, since the aggregator may turn it into what the server takes; `check_aggregate`
    decides on the aggregator's result.

    Args:
      update: one client's update, as specs or arrays.
      server: states by `ServerUpdate.takes` which aggregate it takes; by default one like the parameters.
      params: the model's parameters, as specs or arrays.

    Raises: TypeError where structure and shapes agree with those of the server or of the parameters but a dtype does
      not. Bytes would be counted, and the model rounded, in another width.

    Guarantees: with every server and the plain mean, `init` refuses an update with a leaf of another shape or dtype,
    and one of another structure (tests/laws/test_foreign_updates.py::test_foreign_updates_are_refused).
    """
    matching = [like for like in (server.expects(params), params) if _difference(update, like) is None]
    for like in matching[:1]:
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(update), jax.tree.leaves(like), strict=True):
            if x.dtype != y.dtype:
                name = f"update{jax.tree_util.keystr(path)}"
                hint = "Cast it in the client."
                validate.fail(name, f"{y.dtype}, as the server expects", str(x.dtype), hint, TypeError)
    return _difference(update, server.expects(params)) is None


def check_aggregate(aggregate: PyTree, server: ServerUpdate, params: PyTree) -> None:
    """Raises ValueError for an aggregate whose shapes the server does not take.

    Without this check NumPy's broadcasting would spread such an aggregate over the model.

    Guarantees: an aggregator that returns one number for each leaf is refused, and one that restores the model's shapes
    is not (tests/laws/test_foreign_updates.py::test_what_the_aggregator_makes_decides).
    """
    if (difference := _difference(aggregate, server.expects(params))) is not None:
        hint = "Send an update shaped like the parameters; a server of another kind states what it takes (`takes`)."
        validate.fail(*difference, hint)


def _difference(update: PyTree, like: PyTree) -> tuple[str, str, str] | None:
    """Returns (name, expected value, value) of the first difference in structure or shape; None without any."""
    if jax.tree.structure(update) != jax.tree.structure(like):
        return "update", f"{jax.tree.structure(like)}", str(jax.tree.structure(update))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(update), jax.tree.leaves(like), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            return f"update{jax.tree_util.keystr(path)}", f"shape {jnp.shape(y)}", str(jnp.shape(x))
    return None
