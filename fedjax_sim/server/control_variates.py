"""SCAFFOLD's server: it holds the model and the control variate by which all clients correct their gradients."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_sim import tree
from fedjax_sim.server.downlink import wire_with_rest
from fedjax_sim.types import PyTree, ServerUpdate


class ControlState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server
    control: PyTree  # c, shaped like the model


def control_variates(server: ServerUpdate) -> ServerUpdate:
    """Makes SCAFFOLD's server, which also broadcasts the mean c of the clients' control variates.

    The mean is c = sum_i w_i c_i / W over all clients, where w_i are the clients' weights and W their sum over the
    whole population. The server updates c in every round. Its clients are `client.scaffold`.

    The aggregate must be {"params": a mean of the cohort's model updates, "control": sum_S w_i (c_i+ - c_i) / W}, where
    S is the cohort. `aggregation.by_part({"params": mean(), "control": keep_old(W)})` makes it. With weights 1 the
    second part is the paper's (|S| / N) times the mean over the cohort.

    At a fixed point every c_i is its client's gradient and every corrected gradient equals c, so c = 0. Therefore the
    weights in c decide which objective is minimised, not the weights of the model updates: uniform weights minimise
    sum_i f_i / N, examples sum_i n_i f_i / n. If c's part were divided by the cohort's weights, or by a cohort size
    that dropout shrinks, c would no longer be the clients' mean.

    Args:
      server: takes the step on the model, such as `optimizer(optax.sgd(1.0))`; its rate is the paper's eta_g.

    Returns: a ServerUpdate whose broadcast is {"params": the model, "control": c}.

    Guarantees: c stays the weighted mean of all c_i, whoever takes part
    (tests/oracles/test_scaffold.py::test_control_is_the_mean_of_the_clients). For a model in 16 bits this holds up to
    rounding errors that add up over the rounds.

    References: Karimireddy et al. 2020 (SCAFFOLD), algorithm 1, equation 5.
    """

    def init(params):
        return ControlState(server.init(params), tree.zeros_like(params))

    def apply(key, aggregate, state):
        control = jax.tree.map(lambda c, x: c + x.astype(c.dtype), state.control, aggregate["control"])
        return ControlState(server.apply(key, aggregate["params"], state.server), control)

    return ServerUpdate(
        init=init,
        broadcast=lambda state: {"params": server.broadcast(state.server), "control": state.control},
        apply=apply,
        params=lambda state: server.params(state.server),
        wire=wire_with_rest(server),
        takes=lambda params: {"params": server.expects(params), "control": params},
        params_kind=server.params_kind,
    )
