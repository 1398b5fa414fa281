"""Servers with their own examples: they train on these after each round, or train a part that no client has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.models import combine, partition
from fedjax_sim.prng import stream
from fedjax_sim.types import ClientData, ClientUpdate, PyTree, Report, ServerUpdate


def own_examples(work: ClientUpdate, data: ClientData) -> ClientData:
    """Checks a server's local work and examples, and puts zeros into the padding of the examples.

    Args:
      work: the server's local work on its examples, as a client's.
      data: the examples and their mask.

    Returns: the examples as JAX arrays, and their mask.

    Raises: ValueError, TypeError for work with noise, which nobody accounts for, and for examples that are not finite.
    """
    validate.part("work", work, ClientUpdate)
    validate.part("data", data, ClientData)
    if work.facts.noise is not None or work.federation is not None:
        hint = "Nobody accounts for noise at the server."
        validate.fail("work", "local work without noise, of one client", "another", hint)
    # Padding may hold NaN, which would fail the check of finite examples.
    examples = jax.tree.map(jnp.array, tree.where(data.mask, data.examples, tree.zeros_like(data.examples)))
    if not engine.all_finite(examples):
        validate.fail("data", "finite examples", "NaN or infinity", "Impute or drop those examples first.")
    return ClientData(examples, jnp.array(data.mask))


def public_examples(work: ClientUpdate, public: ClientData | None) -> ClientData:
    """Checks the public examples {"x": [n, ...]} of an algorithm that distils, as `own_examples` does; others go.

    Raises: ValueError, TypeError as `own_examples`, and ValueError for None, which a config passes without server rows.
    """
    if public is None:
        hint = "Set rows aside: [data.with_server_rows], or population.with_server_rows(data)."
        validate.fail("public", "examples that server and clients hold", None, hint)
    validate.part("public", public, ClientData)
    if not isinstance(public.examples, dict) or "x" not in public.examples:
        validate.fail("public", 'examples with inputs "x"', type(public.examples).__name__)
    return own_examples(work, public._replace(examples={"x": public.examples["x"]}))


def check_constant_rate(argument: str, work: ClientUpdate) -> None:
    """Refuses a server's local work whose rate falls over rounds (`client.over_rounds`), since it is told no round.

    Args:
      argument: the name of what the work is made of, for the error.
      work: the server's local work.
    """
    if work.facts.reads_round:
        hint = "The server's training is not told the round: take a constant rate, or a schedule over local steps."
        validate.fail(argument, "a rate that does not fall over rounds", "one that does", hint)


class OwnDataState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server
    data: ClientData  # part of the state, so that it is an argument of the compiled round and not a constant in it


class OwnPartState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server, whose model is the clients' part
    own: PyTree  # the parameters that only the server has
    data: ClientData  # as in `OwnDataState`


def with_own_data(server: ServerUpdate, work: ClientUpdate, data: ClientData) -> ServerUpdate:
    """Makes a server train on its own examples after each aggregation.

    The new model is w <- w' + (update of local work from w'), where w' is the model after the clients' aggregate.

    Args:
      server: takes the step with the clients' aggregate; it must be able to go on from another model
        (`ServerUpdate.moved`).
      work: the server's local work, as a client's, such as `client.local_sgd`; without state or noise.
      data: the server's examples, leaves [n, ...], and their mask.

    Returns: a ServerUpdate whose state holds the examples.

    Raises: ValueError, TypeError for a server that cannot go on from another model, and for work with a state, with
    noise, or with a rate that falls over rounds.

    Guarantees: the steps are those of NumPy (tests/server/test_own_data.py::test_steps_on_own_data); without examples
    the result is that of the wrapped server, bit for bit (::test_without_examples).

    References: Yoshida et al. 2020 (Hybrid-FL), algorithm 1.
    """
    server_moved, data = _checked(server, work, data)

    def apply(key, aggregate, state):
        aggregated = server.apply(key, aggregate, state.server)
        model = server.params(aggregated)
        # The wrapped server is given the same key, so the local work has a stream of its own.
        report, _ = work.apply(stream(key, "own data"), model, _empty_state(work, model), state.data)
        return state._replace(server=server_moved(aggregated, _add_update(model, report)))

    return server._replace(
        init=lambda params: OwnDataState(server.init(params), data),
        broadcast=lambda state: server.broadcast(state.server),
        apply=apply,
        params=lambda state: server.params(state.server),
        moved=lambda state, params: state._replace(server=server_moved(state.server, params)),
    )


@validate.named_arguments
def with_own_part(
    server: ServerUpdate, work: ClientUpdate, data: ClientData, own: Sequence[str], *, whole: bool = True
) -> ServerUpdate:
    """Makes a server whose model has a part that no client sees; the server trains it on its own examples.

    Clients receive and update the other part, with a loss of their own. After each aggregation the server joins both
    parts, and does its local work on the joined model.

    Args:
      server, work, data: as for `with_own_data`; the loss in `work` is that of the joined model.
      own: paths of the server's part in the parameters, nested dicts, such as ["head"] (`models.partition`).
      whole: True: the server's steps move the clients' part too; False: they move the server's part alone.

    Returns: a ServerUpdate; `params` is the joined model, and the broadcast is the clients' part.

    Raises: ValueError, TypeError as `with_own_data`, and for paths that the parameters lack.

    Guarantees: the steps are those of NumPy, on both parts or on the server's alone
    (tests/server/test_own_data.py::test_own_part).
    """
    server_moved, data = _checked(server, work, data)

    def joined(state):
        return combine(state.own, server.params(state.server))

    def init(params):
        server_part, clients_part = partition(params, own)
        return OwnPartState(server.init(clients_part), server_part, data)

    def apply(key, aggregate, state):
        # The clients' aggregate moves the clients' part; then local work moves the joined model.
        state = state._replace(server=server.apply(key, aggregate, state.server))
        model = joined(state)
        report, _ = work.apply(stream(key, "own data"), model, _empty_state(work, model), state.data)
        return moved(state, _add_update(model, report), whole)

    def moved(state, params, both=True):
        server_part, clients_part = partition(params, own)
        server_state = server_moved(state.server, clients_part) if both else state.server
        return state._replace(own=server_part, server=server_state)

    return server._replace(
        init=init,
        broadcast=lambda state: server.broadcast(state.server),
        apply=apply,
        params=joined,
        takes=lambda params: server.expects(partition(params, own)[1]),
        moved=None,  # its clients send updates of a part of the model only
    )


def _add_update(model: PyTree, report: Report) -> PyTree:
    """Adds the update of the server's local work to the model; without examples the model keeps its bits."""

    def leaf(x, u):
        return jnp.where(report.weight > 0, x + u.astype(x.dtype), x)

    return jax.tree.map(leaf, model, report.update)


def _checked(server: ServerUpdate, work: ClientUpdate, data: ClientData) -> tuple[Callable, ClientData]:
    """Checks the arguments of a server with its own data.

    Returns: (`ServerUpdate.moved` of the server, the data as `own_examples` returns them).
    """
    validate.part("server", server, ServerUpdate)
    if server.moved is None:
        hint = "Take server.optimizer, or state `moved` for a server of your own."
        validate.fail("server", "one that can go on from another model", "another", hint)
    data = own_examples(work, data)
    check_constant_rate("work", work)
    return server.moved, data


def _empty_state(work: ClientUpdate, model: PyTree) -> PyTree:
    """The state of the server's local work, which must hold no numbers."""
    state = work.init(model)
    if jax.tree.leaves(state):
        validate.fail("work", "local work without a state", "one with a state", "The server would forget it.")
    return state
