"""Servers with examples of their own: mixed into each round, or behind a part of the model that no client has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.models import combine, partition
from fedjax_sim.prng import stream
from fedjax_sim.types import ClientData, ClientUpdate, PyTree, Report, ServerUpdate

__all__ = ["own_examples", "with_own_data", "with_own_part"]


def own_examples(work: ClientUpdate, data: ClientData) -> ClientData:
    """A server's examples, with zeros in padding, and its work on them, checked.

    Raises: ValueError, TypeError for work with noise, which nobody accounts for, and examples that are not finite.
    """
    validate.part("work", work, ClientUpdate)
    validate.part("data", data, ClientData)
    if work.facts.noise is not None or work.federation is not None:
        hint = "Nobody accounts for noise at the server."
        validate.fail("work", "local work without noise, of one client", "another", hint)
    examples = jax.tree.map(jnp.array, tree.where(data.mask, data.examples, tree.zeros_like(data.examples)))
    if not tree.all_finite(examples):
        validate.fail("data", "finite examples", "NaN or infinity", "Impute or drop those examples first.")
    return ClientData(examples, jnp.array(data.mask))


class OwnDataState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath
    data: ClientData  # an argument of the compiled round, not a constant in it


class OwnPartState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath, whose model is what clients have
    own: PyTree  # the parameters that only the server has
    data: ClientData


def with_own_data(server: ServerUpdate, work: ClientUpdate, data: ClientData) -> ServerUpdate:
    """A server that trains on its own examples after each aggregation: w <- w' + (local work from w').

    Args:
      server: takes the step with the clients' aggregate; one that can go on from another model (`ServerUpdate.moved`).
      work: the server's local work, as a client's, such as `client.local_sgd`; without state or noise.
      data: the server's examples, leaves [n, ...], and their mask.

    Returns: a ServerUpdate whose state holds the examples.

    Raises: ValueError, TypeError for another server or work.

    Guarantees: NumPy's steps (tests/server/test_own_data.py::test_steps_on_own_data); without examples it is the server
    underneath, bit for bit (::test_without_examples).

    References: Yoshida et al. 2020 (Hybrid-FL), algorithm 1.
    """
    data = _checked(server, work, data)

    def apply(key, aggregate, state):
        moved = server.apply(key, aggregate, state.server)
        model = server.params(moved)
        report, _ = work.apply(stream(key, "own data"), model, _own_work(work, model), state.data)
        return state._replace(server=server.moved(moved, _added(model, report)))

    return server._replace(
        init=lambda params: OwnDataState(server.init(params), data),
        broadcast=lambda state: server.broadcast(state.server),
        apply=apply,
        params=lambda state: server.params(state.server),
        moved=lambda state, params: state._replace(server=server.moved(state.server, params)),
    )


@validate.named_arguments
def with_own_part(
    server: ServerUpdate, work: ClientUpdate, data: ClientData, own: Sequence[str], *, whole: bool = True
) -> ServerUpdate:
    """A server whose model has a part that no client sees, trained on the server's examples after each aggregation.

    Clients receive and update the rest, with a loss of their own. The server then joins both parts, and does its local
    work on the joined model.

    Args:
      server, work, data: as for `with_own_data`; the loss in `work` is that of the joined model.
      own: paths of the server's part in the parameters, nested dicts, such as ["head"] (`models.partition`).
      whole: whether the server's steps move the clients' part too, or its own part alone.

    Returns: a ServerUpdate; `params` is the joined model, the broadcast is the clients' part.

    Raises: ValueError, TypeError as `with_own_data`, and for paths that the parameters lack.

    Guarantees: NumPy's steps, on both parts or on the server's alone (tests/server/test_own_data.py::test_own_part).
    """
    data = _checked(server, work, data)

    def joined(state):
        return combine(state.own, server.params(state.server))

    def init(params):
        mine, rest = partition(params, own)
        return OwnPartState(server.init(rest), mine, data)

    def apply(key, aggregate, state):
        state = state._replace(server=server.apply(key, aggregate, state.server))
        model = joined(state)
        report, _ = work.apply(stream(key, "own data"), model, _own_work(work, model), state.data)
        return moved(state, _added(model, report), whole)

    def moved(state, params, both=True):
        mine, rest = partition(params, own)
        return state._replace(own=mine, server=server.moved(state.server, rest) if both else state.server)

    return server._replace(
        init=init,
        broadcast=lambda state: server.broadcast(state.server),
        apply=apply,
        params=joined,
        takes=lambda params: server.expects(partition(params, own)[1]),
        moved=None,  # what clients send is not the whole model
    )


def _added(model: PyTree, report: Report) -> PyTree:
    def leaf(x, u):
        return jnp.where(report.weight > 0, x + u.astype(x.dtype), x)  # the model's own bits without an example

    return jax.tree.map(leaf, model, report.update)


def _checked(server: ServerUpdate, work: ClientUpdate, data: ClientData) -> ClientData:
    validate.part("server", server, ServerUpdate)
    if server.moved is None:
        hint = "Take server.optimizer, or state `moved` for a server of your own."
        validate.fail("server", "one that can go on from another model", "another", hint)
    return own_examples(work, data)


def _own_work(work: ClientUpdate, model: PyTree) -> PyTree:
    """The state of the server's local work: none."""
    state = work.init(model)
    if jax.tree.leaves(state):
        validate.fail("work", "local work without a state", "one with a state", "The server would forget it.")
    return state
