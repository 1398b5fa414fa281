"""FedDyn's server: its step by the mean update is corrected by the sum of all updates so far."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_sim import tree, validate
from fedjax_sim.types import PyTree, ServerUpdate
from fedjax_sim.validate import Positive


class DynamicState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server
    mean: PyTree  # h, the population's mean of the clients' h_i, shaped like the model


@validate.named_arguments
def dynamic(server: ServerUpdate, coefficient: Positive) -> ServerUpdate:
    """Makes FedDyn's server, which corrects its step by the mean h of the clients' vectors h_i.

    In each round h <- h - coefficient P, and then `server` takes the step Delta - h / coefficient. Its clients are
    `client.dynamic`.

    The aggregate must be {"cohort": Delta, "population": P}. Delta is the mean of the cohort's updates, and P is their
    weighted sum divided by the weights of all clients of the population. `algorithms.feddyn` makes both from one sum.
    With weights 1 the first line is the paper's h <- h - (alpha / N) sum_S (w_i - w_t).

    Args:
      server: takes the step on the model; `optimizer(optax.sgd(1.0))` is the paper's.
      coefficient: alpha > 0, equal to that of the clients.

    Guarantees: h stays the weighted mean of all h_i, whoever takes part
    (tests/oracles/test_feddyn.py::test_the_server_holds_the_mean). For a model in 16 bits this holds up to rounding
    errors that add up over the rounds.

    References: Acar et al. 2021 (FedDyn), algorithm 1.
    """

    def init(params):
        return DynamicState(server.init(params), tree.zeros_like(params))

    def apply(key, aggregate, state):
        def updated_mean(h, u):
            # The aggregate may be wider than the model: the difference is rounded once, to the dtype of h.
            wide = tree.common_dtype(h, u)
            return (h.astype(wide) - (coefficient * u).astype(wide)).astype(h.dtype)

        mean = jax.tree.map(updated_mean, state.mean, aggregate["population"])
        step = jax.tree.map(lambda u, h: u - (h / coefficient).astype(u.dtype), aggregate["cohort"], mean)
        return DynamicState(server.apply(key, step, state.server), mean)

    return ServerUpdate(
        init=init,
        broadcast=lambda state: server.broadcast(state.server),
        apply=apply,
        params=lambda state: server.params(state.server),
        wire=server.wire,
        takes=lambda params: {"cohort": server.expects(params), "population": params},
        params_kind=server.params_kind,
    )
