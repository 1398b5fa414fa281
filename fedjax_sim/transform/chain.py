"""Transforms of an update: identity, a user's own function, and their composition."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Metric, PyTree, TransformFacts, UpdateTransform, Wire
from fedjax_sim.validate import Positive

__all__ = ["Whole", "as_it_comes", "chain", "check_floats", "identity", "plain_wire", "stateless", "wire_of"]


class Whole(Wire):
    """The wire of a message whose numbers are all decoded from one code, such as the two factors of a matrix.

    A later member that sends only some of these numbers pays for the whole code or for them as plain floats, whichever
    is less: no part of the code gives just those numbers.

    Guarantees: tests/transform/test_low_rank.py::test_wire, tests/transform/test_rotation.py::test_wire_bits.
    """


def check_floats(update: PyTree) -> None:
    """Raises TypeError for an update with integer leaves: what a member returns would be truncated to their dtype.

    Guarantees: tests/transform/test_chain.py::test_whole_numbers_are_refused_where_they_would_be_cut.
    """
    for x in jax.tree.leaves(update):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            hint = "Its message would be truncated to whole numbers: let the client send floats."
            validate.fail("update", "leaves of floats", f"a leaf of {x.dtype}", hint, TypeError)


def plain_wire(update_spec: PyTree) -> Wire:
    """An update sent as it is, every number at its dtype's width.

    Guarantees: exact integers (tests/transform/test_chain.py::test_plain_wire_counts_every_leaf).

    >>> import jax.numpy as jnp
    >>> plain_wire({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3, jnp.bfloat16)}).bits
    240
    """
    return Wire(tree.num_values(update_spec), 8 * tree.num_bytes(update_spec))


def as_it_comes(update_spec: PyTree, wire: Wire) -> Wire:
    """The `wire` of a transform that changes numbers, but not what is sent.

    Guarantees: chain() sends a plain update (tests/transform/test_chain.py::test_plain_wire_counts_every_leaf).
    """
    return wire


def wire_of(transform: UpdateTransform, update_spec: PyTree) -> Wire:
    """What one message costs under a transform.

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
    """A transform from `fn(key, update) -> update`, written for one client.

    Args:
      fn: pure; the key is the client's own in this round.
      wire: (update_spec, Wire of what comes in) -> Wire of what goes out.
      l2_bound, nonexpansive: facts about `fn`'s output that later parts rely on; state only what always holds.
      squared_error: as `UpdateTransform` has it.
      facts: further ones of `TransformFacts`, such as `unbiased`.

    Guarantees: clients' keys are independent of chunk, order and devices (tests/laws/test_invariance.py).

    >>> import jax, jax.numpy as jnp
    >>> half = stateless(lambda key, update: jax.tree.map(lambda x: x / 2, update), nonexpansive=True)
    >>> half.on_client(jax.random.key(0), {"w": jnp.ones(2)}, (), ())[0]["w"].tolist()
    [0.5, 0.5]
    """
    facts = {"mirrored": False} | facts  # neither end keeps a state, so neither keeps a copy of what is sent
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
    """Updates are sent as they are, at their dtype's width.

    Guarantees: bit for bit the round without a transform (tests/transform/test_chain.py::test_identity_changes_no_bit).
    """
    facts = {"unbiased": True, "exact_error": True}
    return stateless(lambda key, update: update, nonexpansive=True, squared_error=no_error, **facts)


def no_error(update: PyTree) -> float:
    """The `squared_error` of a transform that changes nothing: 0.

    Guarantees: tests/transform/test_chain.py::test_errors_of_a_chain.
    """
    return 0.0


def chain(*transforms: UpdateTransform) -> UpdateTransform:
    """Transforms in order at the client, in reverse order at the server; again a transform.

    Members turn the wire of what they receive into that of what they send, one after the other. The chain's bound is
    the least bound of a member after which all are nonexpansive. A chain is unbiased if all members are, and its error
    is known if at most one member makes an error. Only the last member may send integers. Metrics of the same name are
    told apart by the member's place: `member_1_clipped_update_share`.

    Raises: ValueError for two members with noise; for a member that may lengthen an update after the clip on which
    another member's noise relies, or that comes after noise that adds up over messages; for a member after one that
    sends integers; for one that changes messages after one that keeps copies of what is sent.

    Guarantees: chain() is the identity, chain(a, chain(b, c)) equals chain(a, b, c) up to the shape of its state
    (tests/transform/test_chain.py::test_chain_is_closed) and the names of colliding metrics; member i draws from its
    own stream (::test_members_draw_from_their_own_streams); no member's metric hides another's
    (tests/laws/test_facts.py::test_no_metric_hides_another).
    """
    for i, member in enumerate(transforms):
        if not isinstance(member, UpdateTransform):
            hint = "Wrap a function in stateless(fn)."
            validate.fail(f"transforms[{i}]", "an UpdateTransform", member, hint, TypeError)

    def on_client(key, update, state, memory):
        memories, measured = [], []
        for i, member in enumerate(transforms):
            update, new, seen = member.on_client(jax.random.fold_in(key, i), update, state[i], memory[i])
            memories.append(new)
            measured.append(seen)
        return update, tuple(memories), tuple(measured)

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        states, metrics = list(state), [{}] * len(transforms)
        for i, member in reversed(list(enumerate(transforms))):
            aggregate, states[i], metrics[i] = member.on_server(
                jax.random.fold_in(key, i), cohort, aggregate, state[i], measured[i], sensitivity
            )
        joined = tree.joined_metrics({f"member_{i + 1}": seen for i, seen in enumerate(metrics)})
        return aggregate, tuple(states), joined

    def wire(update_spec, sent):
        for member in transforms:
            sent = member.wire(update_spec, sent)
        return sent

    facts = [member.facts for member in transforms]
    bound, nonexpansive = None, True
    for one in facts:
        bounds = (bound if one.nonexpansive else None, one.l2_bound)
        bound = min((x for x in bounds if x is not None), default=None)
        nonexpansive = nonexpansive and one.nonexpansive
    _check_order(transforms)
    inexact = [member for member in transforms if not _changes_nothing(member)]
    alone = inexact[0] if len(inexact) == 1 else None
    return UpdateTransform(
        init=lambda update_spec: tuple(member.init(update_spec) for member in transforms),
        init_client=lambda update_spec: tuple(member.init_client(update_spec) for member in transforms),
        on_client=on_client,
        on_server=on_server,
        wire=wire,
        facts=TransformFacts(
            l2_bound=bound,
            nonexpansive=nonexpansive,
            releases_when_empty=any(one.releases_when_empty for one in facts),
            unbiased=all(one.unbiased for one in facts),
            exact_error=alone.facts.exact_error if alone else not inexact,
            integer_range=facts[-1].integer_range if facts else None,
            noise=next((one.noise for one in facts if one.noise is not None), None),
            mirrored=any(one.mirrored for one in facts),
            metrics=_metrics(transforms),
        ),
        squared_error=alone.squared_error if alone else None if inexact else no_error,
    )


def _metrics(transforms: tuple[UpdateTransform, ...]) -> tuple[Metric, ...]:
    """What the members state about their numbers, under the names that these have in the chain's."""
    named = tree.joined_metrics(
        {f"member_{i + 1}": {x.name: x for x in m.facts.metrics} for i, m in enumerate(transforms)}
    )
    return tuple(metric._replace(name=name) for name, metric in named.items())


def _changes_nothing(member: UpdateTransform) -> bool:
    return member.facts.exact_error and member.squared_error is no_error


def _check_order(transforms: tuple[UpdateTransform, ...]) -> None:
    noisy = [i for i, member in enumerate(transforms) if member.facts.noise is not None]
    if len(noisy) > 1:
        validate.fail("transforms", "one member with noise", len(noisy), "One accountant accounts for one mechanism.")
    for i, member in enumerate(transforms[:-1]):
        if member.facts.integer_range is not None:
            validate.fail(f"transforms[{i}]", "integers from the last member only", "a member after it")
        if member.facts.mirrored and not all(_changes_nothing(later) for later in transforms[i + 1 :]):
            hint = "Both its ends may keep copies of what is sent: wrap the whole chain, or state mirrored=False."
            validate.fail(f"transforms[{i}]", "nothing after it that changes messages", "a member that does", hint)
    for i in noisy:
        for j, later in enumerate(transforms[i + 1 :], i + 1):
            if transforms[i].facts.noise.place == "central" and not later.facts.nonexpansive:
                hint = (
                    "It could lengthen an update after the clip that the noise relies on: put it before the "
                    "mechanism, whose clip then bounds what is really sent."
                )
                validate.fail(f"transforms[{j}]", "a member that never lengthens an update", "one that may", hint)
            if transforms[i].facts.noise.place == "distributed":
                validate.fail(f"transforms[{j}]", "nothing after noise that adds up over messages", "a member")
