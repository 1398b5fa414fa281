"""Servers with a state beside the model: the statistics of an optimiser, or the model of the round before."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from fedjax_sim.server.downlink import wire_with_rest
from fedjax_sim.types import PyTree, ServerUpdate


class StatisticsState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server
    statistics: PyTree  # s, such as moments of the gradient


def statistics(server: ServerUpdate, start: Callable, track: Callable) -> ServerUpdate:
    """Makes Mime's server, which also broadcasts the statistics of an optimiser, updated once a round.

    Its clients are `client.mime`. The aggregate must be {"params": a mean of the cohort's updates, "gradient": the mean
    of the cohort's gradients at the server's model}. The broadcast is {"params": the model, "statistics": s}.

    Args:
      server: takes the step on the model.
      start: (params) -> s before the first round.
      track: (gradient, s) -> s.

    Guarantees: matches a NumPy transcription of the paper (tests/oracles/test_mime.py::test_matches_the_paper).

    References: Karimireddy et al. 2021 (Mime), algorithm 1.
    """

    def apply(key, aggregate, state):
        server_state = server.apply(key, aggregate["params"], state.server)
        # Clients of this round used the old statistics; the mean of their gradients updates them for the next round.
        return StatisticsState(server_state, track(aggregate["gradient"], state.statistics))

    return ServerUpdate(
        init=lambda params: StatisticsState(server.init(params), start(params)),
        broadcast=lambda state: {"params": server.broadcast(state.server), "statistics": state.statistics},
        apply=apply,
        params=lambda state: server.params(state.server),
        wire=wire_with_rest(server),
        takes=lambda params: {"params": server.expects(params), "gradient": params},
        params_kind=server.params_kind,
    )


class LastTwoState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server
    before: PyTree  # the model of that server a round ago


def last_two(server: ServerUpdate) -> ServerUpdate:
    """Makes a server whose evaluated model is the mean of its last two models; clients still receive the last model.

    Adaptive steps make the model oscillate from round to round. The mean of two models removes most of the oscillation.

    Args:
      server: any server.

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
            lambda last, before: last / 2 + before / 2, server.params(state.server), state.before
        ),
        wire=server.wire,
        takes=server.takes,
        params_kind=server.params_kind,
    )
