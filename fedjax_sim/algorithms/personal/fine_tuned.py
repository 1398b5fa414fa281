"""Models that every client fine-tunes on its own rows when the federation is over, before it uses them."""

from __future__ import annotations

import optax

from fedjax_sim import client, validate
from fedjax_sim.client.local_sgd import local_training, uncorrected
from fedjax_sim.client.optimizers import OverRounds
from fedjax_sim.types import Algorithm
from fedjax_sim.validate import LossFn, PositiveInt


@validate.named_arguments
def fine_tuned(
    algorithm: Algorithm,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    num_steps: PositiveInt = 5,
    batch_size: PositiveInt | None = None,
) -> Algorithm:
    """Makes an algorithm whose models each client fine-tunes on its own rows before it is judged.

    Training is that of the algorithm, bit for bit. An evaluation with `adapt` (`metrics.evaluation`) lets each client
    take some local steps from its model: its own one if the algorithm has personal models, else the shared one.

    Args:
      algorithm: any that trains the model of `loss_fn`.
      loss_fn: as in `client.local_sgd`.
      optimizer: of the fine-tuning.
      num_steps: local steps before a client is judged.
      batch_size: of these steps; None for all of the client's rows.

    Raises: ValueError for an optimizer whose rate falls over rounds, and for an algorithm that is judged by another
      model or loss than it was given, such as FedEM's mixture or a statistic's estimate.

    Guarantees: rounds are the algorithm's, and the judged models those of local training from the shared model
    (tests/algorithms/personal/test_judged.py::test_judged_models_are_fine_tuned).

    References: Yu, Bagdasaryan, Shmatikov 2020; the first baseline of personalisation.
    """
    validate.part("algorithm", algorithm, Algorithm)
    if isinstance(optimizer, OverRounds):
        hint = "A model is fine-tuned outside of rounds: take a constant rate, or a schedule of optax."
        validate.fail("optimizer", "a rate that does not fall over rounds", "one that does", hint)
    if algorithm.evaluated.model is not None or algorithm.evaluated.loss_fn is not None:
        hint = "Steps on loss_fn would train something else than what is judged."
        validate.fail("algorithm", "one that is judged by the model it was given", "another", hint)
    train = local_training(loss_fn, optimizer, client.work(num_steps=num_steps, batch_size=batch_size))

    def adapt(key, params, data):
        return train(key, params, data, uncorrected(params)).params

    return algorithm._replace(evaluated=algorithm.evaluated._replace(adapt=adapt))
