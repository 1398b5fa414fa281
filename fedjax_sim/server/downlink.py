"""Compressed broadcasts: clients train from a replica of the model that compressed differences keep up to date."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree, ServerUpdate, UpdateTransform, Wire

__all__ = ["downlink"]


class DownlinkState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath
    replica: PyTree  # what every client holds


def downlink(server: ServerUpdate, transform: UpdateTransform) -> ServerUpdate:
    """A server whose broadcast is compressed: clients hold a replica w', moved by Q(w - w') after every server step.

    The model w itself stays exact at the server. What the replica still lacks is part of the next difference, so the
    replica is its own error feedback. An entry whose difference comes through unrounded becomes exactly the model's, as
    sending the number itself would cost the same. Everything that `server` broadcasts is compressed so, and all clients
    start from the initial broadcast.

    It is assumed that every round's message reaches everybody who may be invited later, for a client that missed one
    could not use the next. A round counts the bytes of one message for each client invited. If clients that were away
    must be served too, the messages they missed, or the whole model, cost extra.

    Args:
      server: any; its model is the one that is evaluated.
      transform: applied to the difference, leaf by leaf of the broadcast; without a memory, as the difference is one.

    Returns: a ServerUpdate with `wire`, what each client receives a round.

    Raises: ValueError for a transform with noise, with integers, with a memory, with a state at the receiver (every
    client would have to keep one), or, when the model is known, with an error no less than the difference itself, for
    equal or for normal entries (a few levels for many numbers).

    Guarantees: with a transform that changes nothing, bit for bit the round without it
    (tests/server/test_downlink.py::test_identity_changes_no_bit, ::test_what_comes_through_is_the_models); the replica
    moves by exactly what was sent, and the model is the server's own (::test_replica_follows_the_model); rounding to 8
    bits converges to the optimum (::test_compressed_broadcast_converges); the bytes are the message's
    (::test_bytes_of_the_message); a chain is applied in its order (::test_chains_keep_their_order).

    References: Tang et al. 2019 (DoubleSqueeze); Philippenko and Dieuleveut 2021 (preserved central model);
    Gruntkowska, Tyurin and Richtarik 2023 (EF21-P).
    """
    validate.part("server", server, ServerUpdate)
    validate.part("downlink", transform, UpdateTransform)
    if transform.facts.noise is not None:
        hint = "Noise belongs to clients' messages and their sum; the broadcast only post-processes that."
        validate.fail("downlink", "a compressor without noise", transform.facts.noise.mechanism, hint)
    if transform.facts.integer_range is not None:
        hint = "Nothing is summed here: let it send decoded numbers, with integers=False."
        validate.fail("downlink", "one that sends numbers", f"integers in {transform.facts.integer_range}", hint)

    def init(params):
        inner = server.init(params)
        replica = jax.tree.map(jnp.array, server.broadcast(inner))  # not the model's own buffers, which may be donated
        _check(transform, tree.spec(replica))
        return DownlinkState(inner, replica)

    def apply(key, aggregate, state):
        inner = server.apply(key, aggregate, state.server)
        model, own = server.broadcast(inner), stream(key, "downlink")
        zero = engine.hidden_zero(own)
        wanted = engine.computed_once(tree.subtract(model, state.replica), zero)
        sent = engine.computed_once(_sent(transform, own, wanted), zero)

        def moved(replica, model, x, wanted):
            return jnp.where(x == wanted, model, replica + x.astype(replica.dtype))

        replica = jax.tree.map(moved, state.replica, model, sent, wanted)
        return DownlinkState(inner, replica)

    return ServerUpdate(
        init=init,
        broadcast=lambda state: state.replica,
        apply=apply,
        params=lambda state: server.params(state.server),
        wire=lambda broadcast_spec: transform.wire(broadcast_spec, _plain(broadcast_spec)),
        takes=server.takes,
    )


def wire_with_rest(server: ServerUpdate) -> Callable | None:
    """The `wire` of a server that broadcasts {"params": what `server` does} and other entries, sent as they are.

    None if `server` compresses nothing.
    """
    if server.wire is None:
        return None

    def wire(broadcast_spec):
        rest = {name: x for name, x in broadcast_spec.items() if name != "params"}
        return server.wire(broadcast_spec["params"]).with_plain(_plain(rest))

    return wire


def _plain(spec: PyTree) -> Wire:
    return Wire(tree.num_values(spec), 8 * tree.num_bytes(spec))


def _check(transform: UpdateTransform, spec: PyTree) -> None:
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(spec)):
        validate.fail("params", "a broadcast of floats", [str(x.dtype) for x in jax.tree.leaves(spec)])
    if jax.tree.leaves(transform.init(spec)):
        hint = "Every client would have to keep it: use a compressor without one."
        validate.fail("downlink", "no state at the receiver", "one", hint)
    if jax.tree.leaves(transform.init_client(spec)):
        hint = "What the replica lacks is in the next difference already: it would be sent twice."
        validate.fail("downlink", "a compressor without a memory", "one with it", hint)
    hint = "The replica would diverge from it: use the unscaled form, such as random_k(scaled=False), or send more."
    validate.contraction("downlink", partial(_sent, transform), spec, hint=hint)


def _sent(transform: UpdateTransform, key: Array, wanted: PyTree) -> PyTree:
    """The difference as clients decode it."""
    spec = tree.spec(wanted)
    nothing = transform.init(spec)  # a state without numbers, nested as a chain's
    message, _, measured = transform.on_client(key, wanted, nothing, transform.init_client(spec))
    return transform.on_server(key, None, message, nothing, measured, None)[0]
