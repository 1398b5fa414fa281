"""Basic transforms: the identity, a transform from a user's function, and chains of transforms."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.prng import fold_in
from fedjax_sim.types import Metric, PyTree, TransformFacts, UpdateTransform, Wire
from fedjax_sim.validate import Positive


class Whole(Wire):
    """The wire of a message whose numbers are all decoded from one code, such as the two factors of a matrix.

    No part of the code gives only some of the numbers. So a later member of a chain that sends only some of them is
    charged for the whole code, or for these numbers as plain floats, whichever is less.

    Guarantees: numbers picked from a low-rank message (tests/transform/test_low_rank.py::test_wire) or from a rotated
    one (tests/transform/test_rotation.py::test_wire_bits) cost 32 bits each, or the whole code if that is less.
    """


def check_floats(update: PyTree) -> None:
    """Checks that all leaves of an update are floats; a message of floats would be truncated to an integer dtype.

    Raises: TypeError for an update with another leaf.

    Guarantees: clip, personal_clip, quantize, natural_compression, drive, low_rank and random_k refuse an update with
    an int32 leaf (tests/transform/test_chain.py::test_whole_numbers_are_refused_where_they_would_be_cut).
    """
    for leaf in jax.tree.leaves(update):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            hint = "Its message would be truncated to whole numbers: let the client send floats."
            validate.fail("update", "leaves of floats", f"a leaf of {leaf.dtype}", hint, TypeError)


def plain_wire(update_spec: PyTree) -> Wire:
    """Returns the wire of an update that is sent as it is, every number at its dtype's width.

    Guarantees: the number of bits is an exact Python integer that counts every leaf, scalars included
    (tests/transform/test_chain.py::test_plain_wire_counts_every_leaf).

    >>> import jax.numpy as jnp
    >>> plain_wire({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3, jnp.bfloat16)}).bits
    240
    """
    return Wire(tree.num_values(update_spec), 8 * tree.num_bytes(update_spec))


def as_it_comes(update_spec: PyTree, wire: Wire) -> Wire:
    """Returns the wire of the incoming update as it is.

    This is the `wire` function of a transform that changes numbers, but not how they are sent.

    Guarantees: chain() sends a plain update (tests/transform/test_chain.py::test_plain_wire_counts_every_leaf).
    """
    return wire


def wire_of(transform: UpdateTransform, update_spec: PyTree) -> Wire:
    """Returns the wire of a message under a transform, if the update comes in as plain numbers.

    Guarantees: the members of a chain count in turn (tests/transform/test_chain.py::test_plain_wire_counts_every_leaf).
    """
    return transform.wire(update_spec, plain_wire(update_spec))


@validate.named_arguments
def stateless(
    fn: Callable,
    *,
    wire: Callable = as_it_comes,
    l2_bound: Positive | None = None,
    nonexpansive: bool = False,
    squared_error: Callable | None = None,
    **facts,
) -> UpdateTransform:
    """Makes a transform from a function `fn(key, update) -> update`, written for one client.

    Args:
      fn: a pure function; its key is the client's own in this round.
      wire: (update_spec, Wire of the incoming update) -> Wire of the outgoing update.
      l2_bound: the largest norm of `fn`'s output; None = not known. Other parts rely on this fact and on the next, so
        state only what always holds.
      nonexpansive: whether `fn` never lengthens an update.
      squared_error: (update) -> E |fn(key, update) - update|^2 over the key, as `UpdateTransform` has it; None = not
        known.
      facts: further fields of `TransformFacts`, such as `unbiased`.

    Guarantees: clients' keys are independent of chunk, order and devices (tests/laws/test_invariance.py).

    >>> import jax, jax.numpy as jnp
    >>> half = stateless(lambda key, update: jax.tree.map(lambda x: x / 2, update), nonexpansive=True)
    >>> half.on_client(jax.random.key(0), {"w": jnp.ones(2)}, (), ())[0]["w"].tolist()
    [0.5, 0.5]
    """
    facts.setdefault("mirrored", False)  # neither end keeps a state, so neither keeps a copy of what is sent
    return UpdateTransform(
        init=lambda update_spec: (),
        init_client=lambda update_spec: (),
        on_client=lambda key, update, state, memory: (fn(key, update), memory, {}),
        on_server=lambda key, cohort, aggregate, state, measured, sensitivity: (aggregate, state, {}),
        wire=wire,
        facts=TransformFacts(l2_bound=l2_bound, nonexpansive=nonexpansive, **facts),
        squared_error=squared_error,
    )


def identity() -> UpdateTransform:
    """Sends updates as they are, at their dtype's width.

    Guarantees: a round with it is, bit for bit, the round without a transform
    (tests/transform/test_chain.py::test_identity_changes_no_bit).
    """
    return stateless(
        lambda key, update: update, nonexpansive=True, squared_error=no_error, unbiased=True, exact_error=True
    )


def no_error(update: PyTree) -> float:
    """Returns 0, the `squared_error` of a transform that changes nothing.

    Guarantees: `chain()` has the squared error 0, and an identity in a chain adds no error
    (tests/transform/test_chain.py::test_errors_of_a_chain).
    """
    return 0.0


def chain(*transforms: UpdateTransform) -> UpdateTransform:
    """Composes transforms: in order at the client, and in reverse order at the server. A chain is again a transform.

    Args:
      transforms: the members. Each turns the wire of what it receives into the wire of what it sends. Only the last
        member may send integers.

    Returns: a transform. Its `l2_bound` is the least bound of a member after which all members are nonexpansive. It is
    unbiased if all members are. Its error is known if at most one member makes an error. Metrics of the same name get
    the member's place as a prefix: `member_1_clipped_update_share`.

    Raises:
      TypeError: for a member that is no transform.
      ValueError: for two members with noise; for a member that may lengthen an update after the clip on which another
        member's noise relies; for a member after noise that adds up over messages; for a member after one that sends
        integers; for a member that changes messages after one that keeps copies of what is sent.

    Guarantees:
      - chain() is the identity, and chain(a, chain(b, c)) equals chain(a, b, c) up to the shape of its state and the
        names of colliding metrics (tests/transform/test_chain.py::test_chain_is_closed)
      - member i draws from a stream of its own (::test_members_draw_from_their_own_streams)
      - no member's metric hides another's (tests/laws/test_facts.py::test_no_metric_hides_another)
    """
    for i, member in enumerate(transforms):
        if not isinstance(member, UpdateTransform):
            hint = "Wrap a function in stateless(fn)."
            validate.fail(f"transforms[{i}]", "an UpdateTransform", member, hint, TypeError)

    def on_client(key, update, state, memory):
        memories = []
        measured = []
        for i, member in enumerate(transforms):
            member_key = fold_in(key, i)
            update, member_memory, member_measured = member.on_client(member_key, update, state[i], memory[i])
            memories.append(member_memory)
            measured.append(member_measured)
        return update, tuple(memories), tuple(measured)

    def on_server(key, cohort, aggregate, state, measured, sensitivity):  # noqa: PLR0917 - called by position
        states = list(state)
        metrics = [{}] * len(transforms)
        for i, member in reversed(list(enumerate(transforms))):
            aggregate, states[i], metrics[i] = member.on_server(
                fold_in(key, i), cohort, aggregate, state[i], measured[i], sensitivity
            )
        joined = tree.joined_metrics({f"member_{i + 1}": x for i, x in enumerate(metrics)})
        return aggregate, tuple(states), joined

    def wire(update_spec, sent):
        for member in transforms:
            sent = member.wire(update_spec, sent)
        return sent

    facts_of_members = [member.facts for member in transforms]
    bound = None
    nonexpansive = True
    for facts in facts_of_members:
        # The bound of the members before holds after this member only if it never lengthens an update.
        bounds = (bound if facts.nonexpansive else None, facts.l2_bound)
        bound = min((x for x in bounds if x is not None), default=None)
        nonexpansive = nonexpansive and facts.nonexpansive
    _check_order(transforms)
    inexact = [member for member in transforms if not _changes_nothing(member)]
    only_inexact = inexact[0] if len(inexact) == 1 else None
    return UpdateTransform(
        init=lambda update_spec: tuple(member.init(update_spec) for member in transforms),
        init_client=lambda update_spec: tuple(member.init_client(update_spec) for member in transforms),
        on_client=on_client,
        on_server=on_server,
        wire=wire,
        facts=TransformFacts(
            l2_bound=bound,
            nonexpansive=nonexpansive,
            releases_when_empty=any(facts.releases_when_empty for facts in facts_of_members),
            unbiased=all(facts.unbiased for facts in facts_of_members),
            exact_error=only_inexact.facts.exact_error if only_inexact else not inexact,
            integer_range=facts_of_members[-1].integer_range if facts_of_members else None,
            noise=next((facts.noise for facts in facts_of_members if facts.noise is not None), None),
            mirrored=any(facts.mirrored for facts in facts_of_members),
            metrics=_metrics(transforms),
        ),
        squared_error=only_inexact.squared_error if only_inexact else None if inexact else no_error,
    )


def _metrics(transforms: tuple[UpdateTransform, ...]) -> tuple[Metric, ...]:
    """The metrics that the members state, under the names that they have in a chain."""
    by_name = tree.joined_metrics(
        {f"member_{i + 1}": {x.name: x for x in m.facts.metrics} for i, m in enumerate(transforms)}
    )
    return tuple(metric._replace(name=name) for name, metric in by_name.items())


def _changes_nothing(member: UpdateTransform) -> bool:
    """Whether a member sends updates exactly as they are."""
    return member.facts.exact_error and member.squared_error is no_error


def _check_order(transforms: tuple[UpdateTransform, ...]) -> None:
    """Raises ValueError for an order in which a member breaks what an earlier member promises.

    Args:
      transforms: the members, in the order in which a client applies them.
    """
    noisy = [(i, x.facts.noise.place) for i, x in enumerate(transforms) if x.facts.noise is not None]
    if len(noisy) > 1:
        validate.fail("transforms", "one member with noise", len(noisy), "One accountant accounts for one mechanism.")
    for i, member in enumerate(transforms[:-1]):
        if member.facts.integer_range is not None:
            validate.fail(f"transforms[{i}]", "integers from the last member only", "a member after it")
        if member.facts.mirrored and not all(_changes_nothing(later) for later in transforms[i + 1 :]):
            hint = "Both its ends may keep copies of what is sent: wrap the whole chain, or state mirrored=False."
            validate.fail(f"transforms[{i}]", "nothing after it that changes messages", "a member that does", hint)
    for i, place in noisy:
        for j, later in enumerate(transforms[i + 1 :], i + 1):
            if place == "central" and not later.facts.nonexpansive:
                hint = (
                    "It could lengthen an update after the clip that the noise relies on: put it before the "
                    "mechanism, whose clip then bounds what is really sent."
                )
                validate.fail(f"transforms[{j}]", "a member that never lengthens an update", "one that may", hint)
            if place == "distributed":
                validate.fail(f"transforms[{j}]", "nothing after noise that adds up over messages", "a member")
