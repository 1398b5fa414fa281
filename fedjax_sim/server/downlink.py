"""Compressed broadcasts: clients train from a replica of the model, which compressed differences keep up to date."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, PyTree, ServerUpdate, UpdateTransform, Wire


class DownlinkState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server
    replica: PyTree  # w', the copy of the broadcast that every client holds


def downlink(server: ServerUpdate, transform: UpdateTransform) -> ServerUpdate:
    """Makes a server compress its broadcast: it sends compressed differences, and clients hold a replica of the model.

    The replica w' moves by Q(w - w') after every server step, where w is the exact model, which stays at the server,
    and Q is the compressor. An error of the replica is part of the next difference, so the replica is its own error
    feedback. Where Q changes nothing in an entry of the difference, that entry of the replica becomes exactly the
    model's: sending the number itself would cost the same. All of the broadcast is compressed so, and all clients start
    from the initial broadcast.

    It is assumed that every round's message reaches all clients that may be invited later, because a client that missed
    a message could not use the next one. A round counts the bytes of one message for each invited client. If clients
    that were away must be served too, the messages that they missed, or the whole model, cost extra.

    Args:
      server: any server; its exact model is the one that is evaluated.
      transform: Q, applied to the difference, leaf by leaf of the broadcast. It must have no memory, because the
        difference is one.

    Returns: a ServerUpdate whose `wire` is the size of the message that each client receives in a round.

    Raises: ValueError for a transform with noise, with integers, with a memory, or with a state at the receiver (every
    client would have to keep one). Also, when the model is known, for a transform whose error is no smaller than the
    difference itself, for equal or for normal entries (a few levels for many numbers).

    Guarantees: a transform that changes nothing gives the round without it, bit for bit
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

    send = partial(_sent, transform)

    def init(params):
        server_state = server.init(params)
        # A copy: the model's own buffers may be donated to a round, which would write over the replica.
        replica = jax.tree.map(jnp.array, server.broadcast(server_state))
        _check_compressor(transform, send, tree.spec(replica))
        return DownlinkState(server_state, replica)

    def apply(key, aggregate, state):
        server_state = server.apply(key, aggregate, state.server)
        model = server.broadcast(server_state)
        send_key = stream(key, "downlink")
        wanted = tree.subtract(model, state.replica)
        sent = send(send_key, wanted)

        def updated_replica(replica, model, sent, wanted):
            # replica + (model - replica) may differ from the model in the last bit.
            return jnp.where(sent == wanted, model, replica + sent.astype(replica.dtype))

        replica = jax.tree.map(updated_replica, state.replica, model, sent, wanted)
        return DownlinkState(server_state, replica)

    return ServerUpdate(
        init=init,
        broadcast=lambda state: state.replica,
        apply=apply,
        params=lambda state: server.params(state.server),
        wire=lambda broadcast_spec: transform.wire(broadcast_spec, _uncompressed_wire(broadcast_spec)),
        takes=server.takes,
        params_kind=server.params_kind,
    )


def wire_with_rest(server: ServerUpdate) -> Callable | None:
    """Makes the `wire` of a server that broadcasts other entries beside those of a wrapped server.

    The broadcast is {"params": the broadcast of `server`, ...}; the other entries are sent as they are.

    Args:
      server: the wrapped server.

    Returns: (broadcast_spec) -> `Wire`; None if `server` compresses nothing.
    """
    server_wire = server.wire
    if server_wire is None:
        return None

    def wire(broadcast_spec):
        other_entries = {name: x for name, x in broadcast_spec.items() if name != "params"}
        return server_wire(broadcast_spec["params"]).with_plain(_uncompressed_wire(other_entries))

    return wire


def _uncompressed_wire(spec: PyTree) -> Wire:
    """The size of a broadcast that is sent as it is."""
    return Wire(tree.num_values(spec), 8 * tree.num_bytes(spec))


def _check_compressor(transform: UpdateTransform, send: Callable, spec: PyTree) -> None:
    """Raises ValueError for a transform that cannot keep a replica of a broadcast up to date.

    Args:
      transform: the compressor.
      send: (key, difference) -> the difference as clients decode it.
      spec: shapes and dtypes of the broadcast.
    """
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(spec)):
        validate.fail("params", "a broadcast of floats", [str(x.dtype) for x in jax.tree.leaves(spec)])
    if jax.tree.leaves(transform.init(spec)):
        hint = "Every client would have to keep it: use a compressor without one."
        validate.fail("downlink", "no state at the receiver", "one", hint)
    if jax.tree.leaves(transform.init_client(spec)):
        hint = "What the replica lacks is in the next difference already: it would be sent twice."
        validate.fail("downlink", "a compressor without a memory", "one with it", hint)
    hint = "The replica would diverge from it: use the unscaled form, such as random_k(scaled=False), or send more."
    validate.contraction("downlink", send, spec, hint=hint)


def _sent(transform: UpdateTransform, key: Array, wanted: PyTree) -> PyTree:
    """The difference as clients decode it, after both ends of the transform.

    Here the server is the sender, at the end that is the client's for messages, and all clients are receivers.
    """
    spec = tree.spec(wanted)
    empty_state = transform.init(spec)  # it holds no numbers, but is nested as the state of a chain
    message, _, measured = transform.on_client(key, wanted, empty_state, transform.init_client(spec))
    return transform.on_server(key, None, message, empty_state, measured, None)[0]
