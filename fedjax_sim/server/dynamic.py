"""FedDyn's server: a step by the mean update, corrected by what all clients' updates have added up to."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_sim import tree, validate
from fedjax_sim.types import PyTree, ServerUpdate
from fedjax_sim.validate import Positive

__all__ = ["dynamic"]


class DynamicState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath
    mean: PyTree  # h, the population's mean of the clients' h_i, shaped like the model


@validate.named_arguments
def dynamic(server: ServerUpdate, coefficient: Positive) -> ServerUpdate:
    """h <- h - coefficient P, then `server` takes the step Delta - h / coefficient; for `client.dynamic`.

    It expects the aggregate {"cohort": Delta, the mean of the cohort's updates, "population": P, their sum over the
    weights of all clients}; `algorithms.feddyn` makes both from one sum. With weights 1 that is the paper's
    h <- h - (alpha / N) sum_S (w_i - w_t).

    Args:
      server: takes the step on the model; `optimizer(optax.sgd(1.0))` is the paper's.
      coefficient: alpha > 0, the clients' own.

    Guarantees: h stays the weighted mean of all h_i, whoever takes part
    (tests/oracles/test_feddyn.py::test_the_server_holds_the_mean); of a model in 16 bits to roundings that add up
    over the rounds.

    References: Acar et al. 2021 (FedDyn), algorithm 1.
    """

    def init(params):
        return DynamicState(server.init(params), tree.zeros_like(params))

    def apply(key, aggregate, state):
        def moved(h, u):
            wide = tree.common_dtype(h, u)
            return (h.astype(wide) - (coefficient * u).astype(wide)).astype(h.dtype)

        mean = jax.tree.map(moved, state.mean, aggregate["population"])
        step = jax.tree.map(lambda u, h: u - (h / coefficient).astype(u.dtype), aggregate["cohort"], mean)
        return DynamicState(server.apply(key, step, state.server), mean)

    return ServerUpdate(
        init=init,
        broadcast=lambda state: server.broadcast(state.server),
        apply=apply,
        params=lambda state: server.params(state.server),
        wire=server.wire,
        takes=lambda params: {"cohort": server.expects(params), "population": params},
    )
