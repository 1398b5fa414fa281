"""The server's step: an optax optimiser on the pseudo-gradient, or an adaptive rule of Reddi et al. 2021."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.types import ParamsKind, PyTree, ServerUpdate
from fedjax_sim.validate import Positive, ShareBelowOne


class ServerState(NamedTuple):
    """The server's state."""

    params: PyTree  # the model
    optimizer: PyTree  # the state of the optax optimiser


def optimizer(transformation: optax.GradientTransformation) -> ServerUpdate:
    """Makes a server that takes a step of an optax optimiser, with minus the aggregated update as its gradient.

    Args:
      transformation: any optax transformation; FedAvg's server is `optax.sgd(1.0)`. Its state is kept over rounds.

    Guarantees: SGD with rate 1 adds the aggregate, bit for bit
    (tests/server/test_optimizer.py::test_sgd_of_rate_one_is_fedavg).

    References: Reddi et al. 2021 (Adaptive federated optimization), algorithm 1.
    """

    validate.optax_transformation("server.optimizer", transformation)

    def apply(key, aggregate, state):
        # An optimiser goes down along its gradient, and the aggregate is the direction in which to go.
        gradients = jax.tree.map(lambda x, p: -x.astype(p.dtype), aggregate, state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax's code promotes
            updates, optimizer_state = transformation.update(gradients, state.optimizer, state.params)
        return ServerState(optax.apply_updates(state.params, updates), optimizer_state)

    return ServerUpdate(
        init=lambda params: ServerState(params, transformation.init(params)),
        broadcast=lambda state: state.params,
        apply=apply,
        params=lambda state: state.params,
        moved=lambda state, params: state._replace(params=params),
        params_kind=ParamsKind.MODEL,
    )


def replacement() -> ServerUpdate:
    """Makes a server whose new model is the aggregate itself, for clients that send models (`client.send_model`).

    Guarantees: see `client.send_model`.
    """
    return ServerUpdate(
        init=lambda params: params,
        broadcast=lambda params: params,
        apply=lambda key, aggregate, params: jax.tree.map(lambda x, p: x.astype(p.dtype), aggregate, params),
        params=lambda params: params,
        moved=lambda state, params: params,
        params_kind=ParamsKind.MODEL,
    )


def rescaled(server: ServerUpdate) -> ServerUpdate:
    """Makes FedNova's server, whose update is the mean direction times the mean number of effective steps.

    Args:
      server: takes the step with this update. Its clients are wrapped in `client.normalized`.

    Guarantees: on two quadratic clients, FedNova converges to its closed form within 2e-6
    (tests/oracles/test_fednova.py::test_fednova_converges_to_the_optimum_for_small_rates), and with equal numbers of
    steps its models equal FedAvg's up to rounding (::test_equal_work_is_fedavg).

    References: Wang et al. 2020 (FedNova), equation 4 with tau_eff = sum_i p_i |a_i|_1.
    """

    def apply(key, aggregate, state):
        update = jax.tree.map(lambda x: x * aggregate["steps"], aggregate["direction"])
        return server.apply(key, update, state)

    def takes(params):
        # Clients divide their update by a float32 number of steps, which widens leaves of 16 bits.
        wide_leaves = [jax.ShapeDtypeStruct(x.shape, tree.at_least_float32(x.dtype)) for x in jax.tree.leaves(params)]
        direction = jax.tree.structure(params).unflatten(wide_leaves)
        return {"direction": server.expects(direction), "steps": jax.ShapeDtypeStruct((), jnp.float32)}

    return server._replace(apply=apply, takes=takes)


class AdaptiveState(NamedTuple):
    """An `AdaptiveState` holds moments of the pseudo-gradient."""

    first: PyTree  # m
    second: PyTree  # v


@validate.named_arguments
def adaptive(
    rule: Literal["adagrad", "adam", "yogi"],
    learning_rate: Positive,
    *,
    first_decay: ShareBelowOne = 0.9,
    second_decay: ShareBelowOne = 0.99,
    adaptivity: Positive = 1e-3,
) -> optax.GradientTransformation:
    """Makes FedAdagrad, FedAdam or FedYogi as the paper writes them, as an optax transformation.

    The pseudo-gradient is g = -Delta, where Delta is the aggregated update. Then
      m <- b1 m + (1 - b1) g,
      v <- v + g^2 (adagrad), b2 v + (1 - b2) g^2 (adam) or v - (1 - b2) g^2 sign(v - g^2) (yogi),
      step = -rate m / (sqrt(v) + tau), from m_0 = 0 and v_0 = tau^2.

    Optax's own rules differ: `optax.adam` and `optax.yogi` correct the bias of both moments, and start v at 0 and 1e-6.
    `optax.adagrad` has no first moment, starts v at 0.1 and puts its epsilon under the root.

    Args:
      rule: "adagrad", "adam" or "yogi".
      learning_rate: the server's rate, positive.
      first_decay, second_decay: b1, b2 in [0, 1); the paper's are 0.9 (0 for adagrad) and 0.99.
      adaptivity: tau > 0.

    Guarantees: matches a NumPy transcription of algorithm 2
    (tests/server/test_optimizer.py::test_adaptive_rules_match_the_paper).

    References: Reddi et al. 2021, algorithm 2 and appendix D.
    """

    def second_moment(v, g):
        if rule == "adagrad":
            return v + g * g
        if rule == "adam":
            return second_decay * v + (1 - second_decay) * g * g
        return v - (1 - second_decay) * g * g * jnp.sign(v - g * g)

    def init(params):
        first = jax.tree.map(jnp.zeros_like, params)
        return AdaptiveState(first, jax.tree.map(lambda p: jnp.full_like(p, adaptivity**2), params))

    def update(updates, state, params=None):  # optax's names: its updates are the gradients
        first = jax.tree.map(lambda m, g: first_decay * m + (1 - first_decay) * g, state.first, updates)
        second = jax.tree.map(second_moment, state.second, updates)
        steps = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + adaptivity), first, second)
        return steps, AdaptiveState(first, second)

    return optax.GradientTransformation(init, update)
