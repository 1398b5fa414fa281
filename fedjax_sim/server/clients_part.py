"""A server of a model of which every client keeps a part to itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedjax_sim import tree, validate
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.types import ParamsKind, PyTree, ServerUpdate, Wire


class ClientsPartState(NamedTuple):
    """The server's state."""

    server: PyTree  # the wrapped server's, over the shared part
    start: PyTree  # the clients' part of the model before training, which never changes here


@validate.named_arguments
def with_clients_part(server: ServerUpdate, own: Sequence[str]) -> ServerUpdate:
    """Makes a server for clients who keep a part of the model to themselves and send updates of the rest.

    The server knows the clients' part of the model before training, as every client does, and nothing else of it. The
    broadcast has it for clients that come for the first time; it is known, so it counts no bytes.

    Args:
      server: takes the step with the aggregate of the shared part.
      own: paths of the clients' part in the parameters, nested dicts, such as ["output"] (`models.partition`).

    Returns: a ServerUpdate whose aggregate is an update of the shared part; `params` is the shared part joined to the
    clients' part before training.

    Raises: ValueError for paths that the parameters lack, or that leave nothing to share.

    Guarantees: no leaf of the clients' part is in a message (tests/algorithms/personal/test_limits.py::
    test_own_parts_stay), and none counts a byte.
    """

    def init(params):
        clients_part, shared = partition(params, own)
        if not shared:
            validate.fail("own", "paths that leave a part to share", list(own))
        return ClientsPartState(server.init(shared), clients_part)

    def joined(shared: PyTree, state: ClientsPartState) -> PyTree:
        return combine(state.start, shared)

    def shared_wire(broadcast_spec):
        _, shared = partition(broadcast_spec, own)
        if server.wire is not None:
            return server.wire(shared)
        return Wire(tree.num_values(shared), 8 * tree.num_bytes(shared))

    def moved_by(server_moved: Callable) -> Callable:
        return lambda state, params: state._replace(server=server_moved(state.server, partition(params, own)[1]))

    return server._replace(
        init=init,
        broadcast=lambda state: joined(server.broadcast(state.server), state),
        apply=lambda key, aggregate, state: state._replace(server=server.apply(key, aggregate, state.server)),
        params=lambda state: joined(server.params(state.server), state),
        wire=shared_wire,
        takes=lambda params: server.expects(partition(params, own)[1]),
        moved=None if server.moved is None else moved_by(server.moved),
        params_kind=ParamsKind.PART,
    )
