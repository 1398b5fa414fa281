"""Ditto: beside the shared model each client trains one of its own, which a term keeps near the shared one."""

from __future__ import annotations

from typing import Unpack

import optax

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.algorithms.personal.own_models import own_training, with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.client.proximal import proximal_term
from fedjax_sim.prng import stream
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, ClientUpdate, Sampler
from fedjax_sim.validate import LossFn, NonNegative, PositiveInt, named_arguments


@named_arguments
def ditto(
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    coefficient: NonNegative = 0.1,
    own_optimizer: optax.GradientTransformation | None = None,
    own_steps: PositiveInt | None = None,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes Ditto: FedAvg, beside which each client trains a model v_i of its own near the shared one.

    In a round a client takes FedAvg's local steps from the broadcast w, and steps on its own model,
    v <- v - rate (g(v) + coefficient (v - w)), on minibatches of their own.

    Args:
      loss_fn, sampler, optimizer, aggregator: as in `fedavg`.
      coefficient: lambda in the paper, >= 0. With 0 own models are trained without anybody's help, beside a shared
        model that sends bytes; `local` has no shared model.
      own_optimizer: trains the own models; None: `optimizer`. In the paper both have a rate eta. Either rate may fall
        over rounds (`client.over_rounds`).
      own_steps: steps of an own model in a round, s in the paper; None: as many as those of the shared model. A client
        takes all of `own_steps`, also where it completes only a part of its other work.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The own models have minibatches of the
        same size. The mean of the shared models is by examples; the paper takes the plain mean, "uniform".
      Others as in `federated`.

    Returns: an Algorithm whose `params` is the shared model. A client that has not trained yet has the shared model.

    Guarantees: on a CPU the shared models are those of FedAvg bit for bit (tests/algorithms/personal/test_limits.py::
    test_dittos_shared_model_is_fedavgs); with coefficient 0 a client's own model is trained on its own data alone
    (::test_ditto_without_a_pull_is_local_training); both match NumPy
    (tests/algorithms/personal/test_numpy.py::test_matches_numpy); a round's cost has the own steps
    (tests/algorithms/personal/test_own_steps.py::test_own_steps_are_counted), which partial work does not shorten
    (::test_partial_work_leaves_own_steps); clients are told the round if either rate falls over rounds
    (::test_an_own_rate_may_fall_over_rounds).

    References: Li, Hu, Beirami, Smith 2021 (Ditto), algorithm 1.
    """
    work, round_options = client.local_work(options)
    train = local_training(loss_fn, optimizer, work)
    own_rule = optimizer if own_optimizer is None else own_optimizer
    train_own = own_training(loss_fn, own_rule, work, own_steps)
    by_examples = work.weighs_examples()
    pull = proximal_term(coefficient)

    def apply(key, broadcast, own, data):
        shared = train(key, broadcast, data, uncorrected(broadcast))
        trained = train_own(stream(key, "own model"), own, data, pull(broadcast))
        report = shared.report(tree.subtract(shared.params, broadcast), by_examples)
        own_metrics = {name.replace("local_", "own_", 1): value for name, value in trained.metrics.items()}
        return report._replace(metrics=report.metrics | own_metrics), trained.params

    def model_of(broadcast, own, has_trained):
        return tree.where(has_trained, own, broadcast)

    # `facts_of` looks at the shared model's rate alone.
    reads_round = any(isinstance(each, client.OverRounds) for each in (optimizer, own_rule))
    facts = facts_of(work, optimizer)._replace(reads_round=reads_round)
    local = ClientUpdate(lambda broadcast: broadcast, apply, facts)
    rule = aggregation.mean() if aggregator is None else aggregator
    return with_own_models(sampler, local, rule, server.optimizer(optax.sgd(1.0)), model_of, **round_options)
