"""Models with a part that each client keeps: FedPer, LG-FedAvg and FedBN, FedRep, FedBABU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import optax

from fedjax_sim import aggregation, client, server, tree, validate
from fedjax_sim.algorithms.personal.own_models import own_training, with_own_models
from fedjax_sim.client.local_sgd import TrainingResult, facts_of, local_training, uncorrected
from fedjax_sim.models.partition import combine, partition
from fedjax_sim.prng import stream
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.server.clients_part import with_clients_part
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientData, ClientUpdate, ParamsKind, PyTree, Sampler
from fedjax_sim.validate import LossFn, PositiveInt


@validate.named_arguments
def fedper(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    own: Sequence[str] = ("output",),
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedPer: FedAvg of a part of the model, the rest of which each client keeps and trains along.

    Which part it is makes the method: the last layer is FedPer's, the first layers are LG-FedAvg's, the layers of a
    normalisation are FedBN's.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`.
      own: paths of the clients' part in the parameters (`models.partition`); by default "output", the last layer of
        `models.mlp`, `cnn`, `gru`, `lstm` and `transformer`.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The mean is by examples, as in the
        papers of FedPer and LG-FedAvg; FedBN's takes the plain mean, "uniform".
      Others as in `federated`.

    Returns: an Algorithm whose `params` is the shared part with the clients' part as it was before training.

    Raises: ValueError for a path that the parameters lack, and for paths that leave nothing to share.

    Guarantees: no leaf of the clients' part is in a message (tests/algorithms/personal/test_limits.py::
    test_own_parts_stay), and none counts a byte; models match NumPy
    (tests/algorithms/personal/test_numpy.py::test_matches_numpy).

    References: Arivazhagan et al. 2019 (FedPer); Liang et al. 2020 (LG-FedAvg); Li et al. 2021 (FedBN).
    """
    work, round_options = client.local_work(options)
    train = local_training(loss_fn, optimizer, work)

    def both(key: Array, model: PyTree, data: ClientData) -> TrainingResult:
        return train(key, model, data, uncorrected(model))

    return _kept_part(both, sampler, optimizer, work, own=own, aggregator=aggregator, round_options=round_options)


@validate.named_arguments
def fedrep(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    own: Sequence[str] = ("output",),
    own_steps: PositiveInt | None = None,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedRep: each client first trains its own part, then the shared one.

    Args:
      loss_fn, sampler, optimizer, own, aggregator: as in `fedper`; the optimizer starts anew for each part.
      own_steps: steps of the own part in a round, tau in the paper; None: as many as those of the shared part. A client
        takes all of `own_steps`, also where it completes only a part of its other work.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The own part has minibatches of the
        same size. The mean is by examples; the paper takes the plain mean, "uniform", of one step, `num_steps` = 1.
      Others as in `federated`.

    Returns, Raises: as `fedper`.

    Guarantees: those of `fedper`; models match NumPy (tests/algorithms/personal/test_numpy.py::test_matches_numpy); a
    round's cost has the own steps (tests/algorithms/personal/test_own_steps.py::test_own_steps_are_counted), which
    partial work does not shorten (::test_partial_work_leaves_own_steps).

    References: Collins, Hassani, Mokhtari, Shakkottai 2021 (FedRep), algorithm 1.
    """
    work, round_options = client.local_work(options)
    train = local_training(loss_fn, optimizer, work)
    train_own = own_training(loss_fn, optimizer, work, own_steps)

    def own_first(key: Array, model: PyTree, data: ClientData) -> TrainingResult:
        first = train_own(stream(key, "own part"), model, data, _only(own, True))
        return train(key, first.params, data, _only(own, False))

    return _kept_part(own_first, sampler, optimizer, work, own=own, aggregator=aggregator, round_options=round_options)


@validate.named_arguments
def fedbabu(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    own: Sequence[str] = ("output",),
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes FedBABU: only the shared part is trained, under an own part that stays as it was before training.

    A client's own part is trained when the federation is over: see `fine_tuned`.

    Args:
      loss_fn, sampler, optimizer, own, aggregator: as in `fedper`.
      Others as in `fedper`. The mean is by examples, as in the paper.

    Returns, Raises: as `fedper`.

    Guarantees: those of `fedper`; the own part never changes (tests/algorithms/personal/test_limits.py::
    test_own_parts_stay).

    References: Oh, Kim, Yun 2022 (FedBABU), algorithm 1.
    """
    work, round_options = client.local_work(options)
    train = local_training(loss_fn, optimizer, work)

    def shared_only(key: Array, model: PyTree, data: ClientData) -> TrainingResult:
        return train(key, model, data, _only(own, False))

    return _kept_part(
        shared_only,
        sampler,
        optimizer,
        work,
        own=own,
        aggregator=aggregator,
        round_options=round_options,
        params_kind=ParamsKind.START,
    )


def _only(own: Sequence[str], is_own: bool) -> Callable:
    """Returns the correction that keeps the gradients of the own part (or of the shared one) and zeroes the others."""

    def correct(gradients: PyTree, params: PyTree) -> PyTree:
        own_part, shared = partition(gradients, own)
        kept, zeroed = (own_part, shared) if is_own else (shared, own_part)
        return combine(kept, tree.zeros_like(zeroed))

    return correct


def _kept_part(
    train: Callable[[Array, PyTree, ClientData], TrainingResult],
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    work: client.LocalWork,
    *,
    own: Sequence[str],
    aggregator: Aggregator | None,
    round_options: dict,
    params_kind: ParamsKind = ParamsKind.PART,
) -> Algorithm:
    """Makes the algorithm of clients that train a whole model and send the update of its shared part.

    Args:
      train: (key, model, data) -> `TrainingResult` of the whole model, which says which parts it trains.
      sampler: as in `fedper`.
      optimizer: of `train`; read for the facts of the client alone.
      work: of `train`; says how a client weighs.
      own: paths of the clients' part.
      aggregator: of the updates of the shared part; None = `aggregation.mean()`.
      round_options: of `federated`. A `downlink` is taken out of the dictionary.
      params_kind: what `params` are, the shared part beside the clients' part as it was before training.
    """

    def init(broadcast):
        return partition(broadcast, own)[0]

    def apply(key, broadcast, own_part, data):
        _, shared = partition(broadcast, own)
        training = train(key, combine(own_part, shared), data)
        new_own, new_shared = partition(training.params, own)
        return training.report(tree.subtract(new_shared, shared), work.weighs_examples()), new_own

    def model_of(broadcast, own_part, has_trained):
        start, shared = partition(broadcast, own)
        return combine(tree.where(has_trained, own_part, start), shared)

    # A transform of the broadcast is for the shared part, which alone is sent.
    step = server.optimizer(optax.sgd(1.0))
    downlink = round_options.pop("downlink", None)
    if downlink is not None:
        step = server.downlink(step, downlink)
    rule = aggregation.mean() if aggregator is None else aggregator
    local = ClientUpdate(init, apply, facts_of(work, optimizer))
    step = with_clients_part(step, own)._replace(params_kind=params_kind)
    return with_own_models(sampler, local, rule, step, model_of, **round_options)
