"""Checks that the parts of a round fit together, by their static facts: what is refused would give wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.types import Aggregator, ClientUpdate, Devices, PyTree, Sampler, ServerUpdate, UpdateTransform

__all__ = [
    "check_aggregate",
    "check_alone",
    "check_discount",
    "check_distinct",
    "check_parts",
    "check_time_inside",
    "discounts",
    "looks_like_the_model",
]

LARGEST_INTEGER = 2**24  # that float32 holds, with all below it


def check_parts(
    sampler: Sampler, client: ClientUpdate, transform: UpdateTransform, aggregator: Aggregator, server: ServerUpdate
) -> None:
    """Raises ValueError where what clients send does not suit the aggregator, or this the server.

    Guarantees: tests/laws/test_compositions.py; a client drawn in proportion to its size is not weighted by size as
    well (tests/laws/test_facts.py::test_nobody_counts_twice); an aggregator made for another sampler is refused
    (::test_weights_belong_to_the_sampler); no clock prices what others help with, and no bytes of late clients are lost
    (tests/algorithms/split/test_client.py::test_no_clock_prices_what_others_help_with); weights that are asked for are
    looked at (tests/laws/test_weights.py).
    """
    _check_integers(sampler, transform, aggregator)
    if aggregator.facts.keyless and server.wire is not None:
        hint = "It holds the model encrypted, and cannot compress what it sends."
        validate.fail("downlink", "None for a server without a key", "a compressor", hint)
    if sampler.devices is not None:
        check_alone(client, "sampler")
        check_time_inside(client, sampler.devices)
    _check_late(sampler, client)
    noise, design = transform.facts.noise, sampler.design
    facts, work = aggregator.facts, client.facts
    if noise is not None and noise.place != "local" and facts.sensitivity is None:
        hint = "Divide by a number fixed beforehand: aggregation.fixed_mean(m), with uniform weights."
        rule = "one whose result a client moves by a bounded amount, for the transform has noise"
        validate.fail("aggregator", rule, "one without a sensitivity", hint)
    if noise is not None and noise.place == "distributed" and facts.least is not None:
        shares = noise.named_details.get("cohort_size", sampler.num_slots)
        if facts.least < shares:
            hint = (
                f"Its noise is shared among {shares}: min_messages={shares}, or a mechanism with a smaller cohort_size."
            )
            rule = "no sum of fewer messages than the noise has shares"
            validate.fail("aggregator.least", rule, facts.least, hint)
    if work.needs_weights and (facts.partly_weighted or not facts.weighted):
        hint = "Clients would count alike: leave weighting out, or say 'uniform'; or take aggregation.mean(), and for "
        hint += "integers by_examples(...) around a modular or secure sum."
        rule = "one that takes weights, for weighting = 'examples' was asked for"
        given = "one that takes none for some parts of an update" if facts.weighted else "one that takes none"
        validate.fail("aggregator", rule, given, hint)
    if facts.design is not None and facts.design != design:
        hint = "Its weights are for other cohorts: pass the `design` of the sampler with all its wrappers."
        validate.fail("aggregator.design", f"the sampler's, {design}", facts.design, hint)
    known = getattr(design, "equal_chances", None)
    if not known and facts.design is None and facts.weighted and not work.uniform_weights:
        why = "The sampler draws some clients more often"
        if known is None:
            why = "The sampler's design does not say that it draws all alike (`equal_chances`)"
        elif not design.known:
            why = "The sampler's scheme is unknown, and it may draw some clients more often"
        hint = (
            f"{why}: weighting them by examples too counts them twice. Take weighting='uniform', or "
            "aggregation.li_scheme_one(); a part of your own states its `weighted`, `uniform_weights`."
        )
        validate.fail("aggregator", "one that takes no weights from clients", "one that does", hint)


def check_alone(client: ClientUpdate, name: str = "client") -> None:
    """Raises ValueError where others compute parts of a client's steps, on any level: for rounds that take time.

    Args:
      name: of the argument that is refused.

    Guarantees: tests/algorithms/split/test_client.py::test_no_clock_prices_what_others_help_with.
    """
    if _is_helped(client):
        hint = "A clock would price all of the model at the client, and nothing of what crosses in each step: take a "
        hint += "sampler without one, and algorithms.split_costs for the time of a step."
        rule = "rounds that take no time, for others compute parts of a client's steps"
        validate.fail(name, rule, "simulated time", hint)


def check_time_inside(client: ClientUpdate, devices: Devices) -> None:
    """Raises ValueError for a federation whose rounds inside have no time, or another unit of it, than those above.

    Args:
      devices: of the rounds above.

    Guarantees: tests/round/test_inner_time.py::test_what_is_refused.
    """
    if client.federation is None:
        return
    if client.time_inside is None:
        hint = "Pass the devices of its clients: as_client_update(devices=...), hierarchical_fedavg(edge_devices=...), "
        hint += "[algorithm.edge_devices] in a config; or take a sampler without a clock."
        validate.fail("client", "a federation that states its clients' devices, for rounds take time", "another", hint)
    own, above = client.time_inside.ticks_per_second, devices.ticks_per_second
    if own != above:
        validate.fail("devices.ticks_per_second", f"{above}, as of the rounds above", own, "Times of both are added.")


def _is_helped(client: ClientUpdate) -> bool:
    return client.facts.helped or (client.federation is not None and _is_helped(client.federation.client))


def _check_late(sampler: Sampler, client: ClientUpdate) -> None:
    if not _is_helped(client):
        return
    cohort, _ = jax.eval_shape(lambda: sampler.sample(jax.random.key(0), sampler.init()))
    if cohort.timing.sent is not None:
        hint = "Late clients train too, and what crosses in their steps would not be counted: invite as many as report."
        validate.fail("sampler", "one without late clients, for others help them", "one with late clients", hint)


def check_distinct(sampler: Sampler, hint: str) -> None:
    """Raises ValueError unless the sampler's design says that no client is drawn twice in a round.

    Guarantees: one that does not say so is refused (tests/laws/test_facts.py::test_clients_with_state_are_distinct).
    """
    if getattr(sampler.design, "replacement", True):
        found = getattr(sampler.design, "scheme", "one that does not say")
        validate.fail("sampler", "a design without replacement, for clients with state", found, hint)


def discounts(factors: Callable, most: int) -> bool:
    """Whether some updates count less for their staleness.

    Args:
      factors: a `StalenessWeight`, which is called with the gaps 0, ..., most.

    Raises: ValueError, TypeError for factors of another shape or dtype, outside of (0, 1] or not finite.

    Guarantees: tests/algorithms/asynchronous/test_asynchronous.py::test_factors_out_of_range.
    """
    gaps = jnp.arange(most + 1, dtype=jnp.int32)
    with jax.ensure_compile_time_eval():
        found = jnp.asarray(factors(gaps))
    if found.shape != gaps.shape or not jnp.issubdtype(found.dtype, jnp.floating):
        rule = f"a float for each of {gaps.size} gaps"
        validate.fail(
            "staleness", rule, f"{found.dtype} of shape {found.shape}", "See server.staleness.polynomial.", TypeError
        )
    if isinstance(found, jax.core.Tracer):
        return True  # a sweep's exponent
    found = np.asarray(found)  # constants: `discounts` also answers while a program is traced
    wrong = ~((found > 0) & (found <= 1))
    if wrong.any():
        gap = int(np.argmax(wrong))
        validate.fail(f"staleness({gap})", "a factor in (0, 1]", float(found[gap]))
    return bool((found < 1).any())


def check_discount(client: ClientUpdate, update: PyTree) -> None:
    """Refuses what a stale update cannot count in part.

    Args:
      update: spec of the client's, before its transform.

    Raises: ValueError for clients that do not state `scalable`; TypeError for integers, a share of which is rounded.

    Guarantees: tests/algorithms/asynchronous/test_asynchronous.py::test_updates_that_cannot_be_discounted.
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
    sent, facts = transform.facts.integer_range, aggregator.facts
    if facts.modulus is not None:
        if sent is None:
            hint = "It sums integers: end the transform with one that sends them, such as quantize(..., integers=True)."
            validate.fail("transform", "integers for a modular sum", "a transform that sends floats", hint)
        largest = max(abs(x) for x in sent) * facts.max_weight
        if largest > validate.INT32_MAX:
            hint = "A smaller max_weight, or fewer bits a message."
            validate.fail("aggregator.max_weight", "products of 32 bits", facts.max_weight, hint)
        most = sampler.num_slots * largest
        if 2 * most >= facts.modulus:
            needed = f"modulus_bits={(2 * most).bit_length()}"
            hint = f"{sampler.num_slots} messages reach {most}: {needed}, fewer bits a message, or fewer clients."
            validate.fail("aggregator.modulus", f"more than {2 * most}, or sums would wrap", facts.modulus, hint)
    elif sent is not None and max(abs(x) for x in sent) > LARGEST_INTEGER:
        hint = "Sums are float32: use aggregation.modular_sum, or a coarser grid."
        validate.fail("transform", f"integers up to {LARGEST_INTEGER} at a sum of floats", sent, hint)
    if sent is not None and not facts.homogeneous:
        hint = "This aggregator compares messages with a number: integers=False, or another aggregator."
        validate.fail("transform", "one that sends numbers", f"integers in {sent}", hint)


def looks_like_the_model(update: PyTree, server: ServerUpdate, params: PyTree) -> bool:
    """Whether an update has the structure and shapes of what the server takes.

    If not, the aggregator may still turn updates into what the server takes: see `check_aggregate`.

    Args:
      update, params: specs, or arrays.

    Raises: TypeError where structure and shapes agree with the server's or the parameters' but a dtype does not: bytes
      would be counted, and the model rounded, in another width.

    Guarantees: tests/laws/test_foreign_updates.py.
    """
    likes = [like for like in (server.expects(params), params) if _difference(update, like) is None]
    for like in likes[:1]:
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(update), jax.tree.leaves(like), strict=True):
            if x.dtype != y.dtype:
                name, hint = f"update{jax.tree_util.keystr(path)}", "Cast it in the client."
                validate.fail(name, f"{y.dtype}, as the server expects", str(x.dtype), hint, TypeError)
    return _difference(update, server.expects(params)) is None


def check_aggregate(aggregate: PyTree, server: ServerUpdate, params: PyTree) -> None:
    """Raises ValueError for an aggregate of other shapes than the server takes: it would be broadcast into the model.

    Guarantees: tests/laws/test_foreign_updates.py.
    """
    if (difference := _difference(aggregate, server.expects(params))) is not None:
        hint = "Send an update shaped like the parameters; a server of another kind states what it takes (`takes`)."
        validate.fail(*difference, hint)


def _difference(update: PyTree, like: PyTree) -> tuple[str, str, str] | None:
    """(name, expected, found) of the first difference in structure or shape; None without any."""
    if jax.tree.structure(update) != jax.tree.structure(like):
        return "update", f"{jax.tree.structure(like)}", str(jax.tree.structure(update))
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(update), jax.tree.leaves(like), strict=True):
        if jnp.shape(x) != jnp.shape(y):
            return f"update{jax.tree_util.keystr(path)}", f"shape {jnp.shape(y)}", str(jnp.shape(x))
    return None
