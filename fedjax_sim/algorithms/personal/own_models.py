"""What personal algorithms share: each client keeps something, counts its rounds, and has a model of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import client, engine
from fedjax_sim.client.local_sgd import TrainingResult, local_training
from fedjax_sim.round.federated import federated
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientData,
    ClientUpdate,
    Evaluated,
    PyTree,
    Sampler,
    ServerUpdate,
)


class OwnModelState(NamedTuple):
    """The state of a client."""

    own: PyTree  # what it keeps to itself
    rounds: Array  # [] int32, rounds in which it trained and its message arrived


def own_training(
    loss_fn: Callable, optimizer: optax.GradientTransformation, work: client.LocalWork, num_steps: int | None
) -> Callable:
    """Makes the training of what clients keep, as `local_training` does.

    Args:
      loss_fn, optimizer, work: as in `local_training`.
      num_steps: steps of this training; None for as many as the work has. A client takes all of `num_steps`, also where
        it completes only a part of its work, so that their cost is a constant of a round.

    Returns: (key, params, data, correct) -> `TrainingResult`.
    """
    if num_steps is None:
        return local_training(loss_fn, optimizer, work)
    train = local_training(loss_fn, optimizer, work._replace(num_steps=num_steps, num_epochs=None))

    def all_steps(key: Array, params: PyTree, data: ClientData, correct: Callable) -> TrainingResult:
        return train(key, params, data._replace(work=None), correct)

    return all_steps


def with_own_models(
    sampler: Sampler,
    local: ClientUpdate,
    aggregator: Aggregator,
    server: ServerUpdate,
    model_of: Callable[[PyTree, PyTree, Array], PyTree],
    **round_options: Any,
) -> Algorithm:
    """Makes a federated algorithm in which each client keeps a state that it never sends, and a model made of it.

    Args:
      sampler, aggregator, server, round_options: as in `federated`.
      local: the local work; its state is what a client keeps.
      model_of: (broadcast, what a client keeps, [] bool: it has trained) -> that client's model; for ONE client.

    Returns: an Algorithm. `evaluated.personal` takes (state, ids [c]) and returns the clients' own models, leaves
    [c, ...]. `evaluated.has_trained` takes the same and returns [c] bool: whether a message of the client has arrived
    in a round that was not skipped. Before that, a client keeps what `local.init` gives.

    Guarantees: own models stand by id, and who has trained is not forgotten
    (tests/laws/test_personal.py::test_own_models_stand_by_id).
    """

    def init(broadcast):
        return OwnModelState(local.init(broadcast), jnp.int32(0))

    def apply(key, broadcast, kept, data):
        report, own = local.apply(key, broadcast, kept.own, data)
        return report, OwnModelState(own, kept.rounds + 1)

    made = federated(sampler, local._replace(init=init, apply=apply), aggregator, server, **round_options)

    def has_trained(state, ids):
        kept, _ = engine.take(state.clients, ids)
        return kept.rounds > 0

    def personal(state, ids):
        kept, _ = engine.take(state.clients, ids)
        broadcast = server.broadcast(state.server)
        return jax.vmap(model_of, (None, 0, 0))(broadcast, kept.own, kept.rounds > 0)

    return made._replace(evaluated=Evaluated(personal=personal, has_trained=has_trained))
