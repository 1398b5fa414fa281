"""The server's step: any optax optimiser on the pseudo-gradient, and the adaptive rules of Reddi et al. 2021."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import tree, validate
from fedjax_sim.types import PyTree, ServerUpdate
from fedjax_sim.validate import Positive, ShareBelowOne

__all__ = ["adaptive", "optimizer", "replacement", "rescaled"]


class ServerState(NamedTuple):
    """The server's state."""

    params: PyTree
    optimizer: PyTree


def optimizer(transformation: optax.GradientTransformation) -> ServerUpdate:
    """An optax optimiser fed with the pseudo-gradient, minus the aggregated update.

    Guarantees: SGD with rate 1 adds the aggregate, bit for bit
    (tests/server/test_optimizer.py::test_sgd_of_rate_one_is_fedavg).

    References: Reddi et al. 2021 (Adaptive federated optimization), algorithm 1.
    """

    validate.optax_transformation("server.optimizer", transformation)

    def apply(key, aggregate, state):
        gradients = jax.tree.map(lambda x, p: -x.astype(p.dtype), aggregate, state.params)
        with jax.numpy_dtype_promotion("standard"):  # optax's code promotes
            updates, inner = transformation.update(gradients, state.optimizer, state.params)
        return ServerState(optax.apply_updates(state.params, updates), inner)

    return ServerUpdate(
        init=lambda params: ServerState(params, transformation.init(params)),
        broadcast=lambda state: state.params,
        apply=apply,
        params=lambda state: state.params,
        moved=lambda state, params: state._replace(params=params),
    )


def replacement() -> ServerUpdate:
    """The aggregate is the new model; for clients wrapped in `client.send_model`.

    Guarantees: see `client.send_model`.
    """
    return ServerUpdate(
        init=lambda params: params,
        broadcast=lambda params: params,
        apply=lambda key, aggregate, params: jax.tree.map(lambda x, p: x.astype(p.dtype), aggregate, params),
        params=lambda params: params,
        moved=lambda state, params: params,
    )


def rescaled(server: ServerUpdate) -> ServerUpdate:
    """FedNova's server: the mean direction times the mean number of effective steps, for `client.normalized`.

    Guarantees: tests/oracles/test_fednova.py.

    References: Wang et al. 2020 (FedNova), equation 4 with tau_eff = sum_i p_i |a_i|_1.
    """

    def apply(key, aggregate, state):
        update = jax.tree.map(lambda x: x * aggregate["steps"], aggregate["direction"])
        return server.apply(key, update, state)

    def takes(params):
        wide = [jax.ShapeDtypeStruct(x.shape, tree.at_least_float32(x.dtype)) for x in jax.tree.leaves(params)]
        direction = jax.tree.structure(params).unflatten(wide)  # divided by a float32
        return {"direction": server.expects(direction), "steps": jax.ShapeDtypeStruct((), jnp.float32)}

    return server._replace(apply=apply, takes=takes)


class AdaptiveState(NamedTuple):
    """Moments of the pseudo-gradient."""

    first: PyTree
    second: PyTree


@validate.named_arguments
def adaptive(
    rule: Literal["adagrad", "adam", "yogi"],
    learning_rate: Positive,
    *,
    first_decay: ShareBelowOne = 0.9,
    second_decay: ShareBelowOne = 0.99,
    adaptivity: Positive = 1e-3,
) -> optax.GradientTransformation:
    """FedAdagrad, FedAdam and FedYogi as the paper writes them, as an optax transformation.

    With the pseudo-gradient g = -Delta: m <- b1 m + (1 - b1) g; v <- v + g^2 (adagrad), b2 v + (1 - b2) g^2 (adam) or
    v - (1 - b2) g^2 sign(v - g^2) (yogi); step -rate m / (sqrt(v) + tau); m_0 = 0, v_0 = tau^2.

    Optax's own rules differ: `optax.adam` and `optax.yogi` correct the bias of both moments, and start v at 0 and 1e-6;
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

    def update(gradients, state, params=None):
        first = jax.tree.map(lambda m, g: first_decay * m + (1 - first_decay) * g, state.first, gradients)
        second = jax.tree.map(second_moment, state.second, gradients)
        updates = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + adaptivity), first, second)
        return updates, AdaptiveState(first, second)

    return optax.GradientTransformation(init, update)
