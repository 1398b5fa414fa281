"""Servers with a state beside the model: statistics of an optimiser, or the previous iterate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from fedjax_sim.server.downlink import wire_with_rest
from fedjax_sim.types import PyTree, ServerUpdate

__all__ = ["last_two", "statistics"]


class StatisticsState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath
    statistics: PyTree  # s, such as moments of the gradient


def statistics(server: ServerUpdate, start: Callable, track: Callable) -> ServerUpdate:
    """A server that also broadcasts the statistics of an optimiser, updated once a round; for `client.mime`.

    It expects the aggregate {"params": a mean of the cohort's updates, "gradient": that of their gradients at the
    server's model}, and broadcasts {"params", "statistics"}.

    Args:
      server: takes the step on the model.
      start: (params) -> s before the first round.
      track: (gradient, s) -> s.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_mime.py::test_matches_the_paper).

    References: Karimireddy et al. 2021 (Mime), algorithm 1.
    """

    def apply(key, aggregate, state):
        moved = server.apply(key, aggregate["params"], state.server)
        return StatisticsState(moved, track(aggregate["gradient"], state.statistics))

    return ServerUpdate(
        init=lambda params: StatisticsState(server.init(params), start(params)),
        broadcast=lambda state: {"params": server.broadcast(state.server), "statistics": state.statistics},
        apply=apply,
        params=lambda state: server.params(state.server),
        wire=wire_with_rest(server),
        takes=lambda params: {"params": server.expects(params), "gradient": params},
    )


class LastTwoState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath
    before: PyTree  # its model a round ago


def last_two(server: ServerUpdate) -> ServerUpdate:
    """The model that is evaluated is the mean of the last two; clients still get the last one.

    Adaptive steps make the iterate oscillate from round to round; the mean of two removes most of that.

    Guarantees: the trajectory is that of `server`, bit for bit
    (tests/oracles/test_fedexp.py::test_mean_of_the_last_two).

    References: Jhunjhunwala, Wang and Joshi 2023 (FedExP), section 4 (on the last iterate).
    """
    return ServerUpdate(
        init=lambda params: LastTwoState(server.init(params), params),
        broadcast=lambda state: server.broadcast(state.server),
        apply=lambda key, aggregate, state: LastTwoState(
            server.apply(key, aggregate, state.server), server.params(state.server)
        ),
        params=lambda state: jax.tree.map(
            lambda new, old: new / 2 + old / 2, server.params(state.server), state.before
        ),
        wire=server.wire,
        takes=server.takes,
    )
