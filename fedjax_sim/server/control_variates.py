"""SCAFFOLD's server: the model and the control variate that every client is corrected with."""

from __future__ import annotations

from typing import NamedTuple

import jax

from fedjax_sim import tree
from fedjax_sim.server.downlink import wire_with_rest
from fedjax_sim.types import PyTree, ServerUpdate

__all__ = ["control_variates"]


class ControlState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath
    control: PyTree  # c, shaped like the model


def control_variates(server: ServerUpdate) -> ServerUpdate:
    """A server that also broadcasts c = sum_i w_i c_i / W and updates it every round; for `client.scaffold`.

    It expects the aggregate {"params": a mean of the cohort's model updates, "control": sum_S w_i (c_i+ - c_i) / W},
    with W the weights of the whole population: `aggregation.by_part({"params": mean(), "control": keep_old(W)})`. With
    weights 1 the second is the paper's (|S| / N) times the mean over the cohort.

    At a fixed point every c_i is its client's gradient and every corrected gradient equals c, so c = 0. The weights in
    c therefore decide which objective is minimised, not those of the model updates: uniform weights sum_i f_i / N,
    examples sum_i n_i f_i / n. Dividing c's part by the cohort's weights instead, or by a cohort size that dropout
    shrinks, would make c something else than the clients' mean.

    Args:
      server: takes the step on the model, such as `optimizer(optax.sgd(1.0))`; its rate is the paper's eta_g.

    Guarantees: c stays the weighted mean of all c_i, whoever takes part
    (tests/oracles/test_scaffold.py::test_control_is_the_mean_of_the_clients); of a model in 16 bits to roundings
    that add up over the rounds.

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
    )
