"""Transforms of a letter: identity, a user's own function, and their composition."""

from __future__ import annotations

from collections.abc import Callable

import jax

from fedjax_sim import tree, validate
from fedjax_sim.types import PyTree, UpdateTransform

__all__ = ["chain", "identity", "plain_bits", "stateless"]


def plain_bits(update_spec: PyTree) -> int:
    """Bits of an update sent as it is.

    Guarantees: an exact integer (tests/transform/test_chain.py::test_plain_bits_counts_every_leaf).

    >>> import jax.numpy as jnp
    >>> plain_bits({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3, jnp.bfloat16)})
    240
    """
    return 8 * tree.num_bytes(update_spec)


def stateless(
    fn: Callable,
    *,
    wire_bits: Callable = plain_bits,
    l2_bound: float | None = None,
    nonexpansive: bool = False,
) -> UpdateTransform:
    """A transform from `fn(key, update) -> update`, written for one client.

    Args:
      fn: pure; the key is the client's own in this round.
      wire_bits: (update_spec) -> bits of one letter.
      l2_bound, nonexpansive: facts about `fn`'s output that later parts may rely on; state only what holds always.

    Guarantees: clients' keys are independent of chunk, order and devices (tests/laws/test_invariance.py).

    >>> import jax, jax.numpy as jnp
    >>> half = stateless(lambda key, update: jax.tree.map(lambda x: x / 2, update), nonexpansive=True)
    >>> half.on_client(jax.random.key(0), {"w": jnp.ones(2)}, (), ())[0]["w"].tolist()
    [0.5, 0.5]
    """
    if l2_bound is not None:
        validate.positive("l2_bound", l2_bound)
    return UpdateTransform(
        init=lambda update_spec: (),
        init_client=lambda update_spec: (),
        on_client=lambda key, update, state, memory: (fn(key, update), memory, {}),
        on_server=lambda key, cohort, aggregate, state, measured, sensitivity: (aggregate, state, {}),
        wire_bits=wire_bits,
        l2_bound=l2_bound,
        nonexpansive=nonexpansive,
    )


def identity() -> UpdateTransform:
    """Letters travel as they are, at their dtype's width.

    Guarantees: bit for bit the round without a transform
    (tests/transform/test_chain.py::test_identity_changes_no_bit).
    """
    return stateless(lambda key, update: update, nonexpansive=True)


def chain(*transforms: UpdateTransform) -> UpdateTransform:
    """Transforms in order at the client, in reverse order at the server; again a transform.

    The letter on the wire is the last transform's, so its `wire_bits` count. The bound of the chain is that of the last
    member that has one, provided every later member is nonexpansive.

    Guarantees: chain() is the identity, chain(a, chain(b, c)) equals chain(a, b, c) up to the shape of its state
    (tests/transform/test_chain.py::test_chain_is_closed); member i draws from its own stream
    (::test_members_draw_from_their_own_streams).
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
        states, metrics = list(state), {}
        for i, member in reversed(list(enumerate(transforms))):
            aggregate, states[i], seen = member.on_server(
                jax.random.fold_in(key, i), cohort, aggregate, state[i], measured[i], sensitivity
            )
            metrics |= seen
        return aggregate, tuple(states), metrics

    bound, nonexpansive = None, True
    for member in transforms:
        bound = member.l2_bound if member.l2_bound is not None else bound if member.nonexpansive else None
        nonexpansive = nonexpansive and member.nonexpansive
    return UpdateTransform(
        init=lambda update_spec: tuple(member.init(update_spec) for member in transforms),
        init_client=lambda update_spec: tuple(member.init_client(update_spec) for member in transforms),
        on_client=on_client,
        on_server=on_server,
        wire_bits=transforms[-1].wire_bits if transforms else plain_bits,
        l2_bound=bound,
        nonexpansive=nonexpansive,
        releases_when_empty=any(member.releases_when_empty for member in transforms),
    )
