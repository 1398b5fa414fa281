"""Training on own rows alone: every client has a model of its own, and nobody sends anything."""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, engine
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.transform import identity
from fedjax_sim.types import Algorithm, ClientUpdate, ParamsKind, Sampler, ServerUpdate, Wire
from fedjax_sim.validate import LossFn, named_arguments

NO_MESSAGE = Wire(0, 0)


class LocalTrainingOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` but the weighting, and how a round is computed."""


@named_arguments
def local(
    loss_fn: LossFn, sampler: Sampler, optimizer: optax.GradientTransformation, **options: Unpack[LocalTrainingOptions]
) -> Algorithm:
    """Makes training on own rows alone, the baseline that a federation has to beat.

    All clients begin with the same model. A client trains its own in the rounds in which it is drawn, with the key and
    the steps that FedAvg would give it there, and goes on from it the next time. Nothing is sent: rounds have 0 bytes
    in both directions, and no time of transmission.

    Args:
      loss_fn, sampler, optimizer: as in `fedavg`. The optimizer begins anew in each round, as FedAvg's does.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      nonfinite, plan, mesh: as in `federated`. There is no transform, downlink, aggregator or weighting, since there is
        no message.

    Returns: an Algorithm. There is no shared model: `params` is the model that all clients start from, and the info's
    `update_norm` is 0. Clients are judged by `evaluated.personal`; a client that has not trained has the start model.
    A client whose model is no longer finite, that drops out or is too late keeps the model that it had.

    Guarantees: a client's model is that of its own local steps one after the other, and no other client's rows change
    it (tests/algorithms/personal/test_local.py::test_models_are_of_own_rows); its first round is FedAvg's local work
    bit for bit (::test_first_round_is_fedavgs_local_work); no byte is counted, and no time of a link
    (::test_nothing_is_sent); a model that is not finite is not kept (::test_a_broken_model_is_not_kept).

    >>> from fedjax_sim import sampling
    >>> local(lambda params, examples, key: examples["x"], sampling.full(2), optax.sgd(0.1), num_steps=1).params_kind
    <ParamsKind.UNTRAINED: 'the start, which no round trains; each client trains a model of its own'>
    """
    work, round_options = client.local_work({**options, "weighting": "uniform"})
    train = local_training(loss_fn, optimizer, work)

    def apply(key, broadcast, own, data):
        training = train(key, own, data, uncorrected(own))
        # The message counts no bit, and says whether the model can be kept.
        is_finite = jnp.where(engine.all_finite(training.params), 0.0, jnp.nan).astype(jnp.float32)
        return training.report({"is_finite": is_finite}, by_examples=False), training.params

    server = ServerUpdate(
        init=lambda params: params,
        broadcast=lambda start: start,
        apply=lambda key, aggregate, start: start,
        params=lambda start: start,
        wire=lambda broadcast: NO_MESSAGE,  # clients know the start model
        takes=lambda params: {"is_finite": jax.ShapeDtypeStruct((), jnp.float32)},
        params_kind=ParamsKind.UNTRAINED,
    )
    unsent = identity()._replace(wire=lambda *_: NO_MESSAGE)
    clients = ClientUpdate(lambda start: start, apply, facts_of(work, optimizer))
    return with_own_models(
        sampler, clients, aggregation.mean(), server, lambda _, own, __: own, transform=unsent, **round_options
    )
