"""FedEM: each client's data are a mixture of shared components, with weights that the client keeps to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, tree, validate
from fedjax_sim.algorithms.personal.ifca import check_spread, perturbed_models
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.models import Model, supervised
from fedjax_sim.models.ensemble import mixture
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, ClientUpdate, ParamsKind, PyTree, Sampler
from fedjax_sim.validate import FromData, Integer, NonNegative, NonNegativeInt, named_arguments


class FedEMOptions(client.LocalOptions, MessageOptions, total=False):
    """The options of `client.work` and `federated`, but no `downlink`: several models would share one replica."""


@named_arguments
def fedem(
    model: Model,
    loss: Annotated[Callable, FromData("loss")],
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    task: Annotated[Literal["binary", "classification", "regression"], FromData("task")],
    num_components: Annotated[int, Integer(1, 1000)] = 3,
    spread: NonNegative = 0.1,
    start_seed: NonNegativeInt = 0,
    aggregator: Aggregator | None = None,
    **options: Unpack[FedEMOptions],
) -> Algorithm:
    """Makes FedEM: the server holds M component models, and each client mixes them with weights of its own.

    A client receives all components theta_m. E step: of each row, component m is responsible for the share
    q_m ~ weight_m exp(-loss(theta_m)), with the row's loss as -log p. M step: the client's weights become the means of
    q_m over its rows, and each component is trained on the rows' losses times q_m. The client sends the updates of all
    components.

    Args:
      model: without state; the architecture of each component.
      loss: (outputs, y) -> per-example losses [n], or a dict with "loss".
      sampler, aggregator: as in `fedavg`.
      optimizer: as in `fedavg`. It trains all components as one pytree, leaves [M, ...], on the same minibatches.
      task: what the outputs are, as in `models.ensemble.mixture`.
      num_components: M.
      spread, start_seed: of the components before training, as in `ifca`.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. The mean is by examples, as in the
        paper.
      transform: of a client's message, the updates of all components as one.
      nonfinite, plan, mesh: as in `federated`.

    Returns: an Algorithm whose `evaluated.model` is the mixture (`models.ensemble.mixture`). `evaluated.personal` are a
    client's parameters of it: the shared components and the client's weights, equal ones for a client that has not
    trained. `params` is the mixture with equal weights. `fine_tuned` is not for it: gradient steps would leave the
    simplex.

    Raises: ValueError, when traced, for a loss that weighs rows, such as that of texts by their tokens; for components
    that start equal, as `ifca`.

    Guarantees: one component is FedAvg up to rounding (tests/algorithms/personal/test_fedem.py::
    test_one_component_is_fedavg); components and weights match NumPy (::test_matches_numpy); weights are in no message,
    and bytes are those of M models in both directions (::test_bytes_are_of_components).

    References: Marfoq, Neglia, Bellet, Kameni, Vidal 2021 (FedEM), algorithm 1.
    """
    check_spread(num_components, spread)
    mixed = mixture(model, num_components, task)
    work, round_options = client.local_work(options)
    loss_fn = supervised(model, loss)

    def of_components(components: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        """Returns the per-example values of each component, [M, n]."""
        values = jax.vmap(lambda component: loss_fn(component, examples, key))(components)
        if "weight" in values:
            hint = "A row's likelihood is that of one label."
            validate.fail("loss", "one whose rows all have weight 1", sorted(values), hint)
        return values

    def weighted_values(components, examples, key):
        values = of_components(components, examples["data"], key)
        responsibilities = examples["responsibilities"].T
        return {name: (responsibilities.astype(x.dtype) * x).sum(0) for name, x in values.items()}

    train = local_training(weighted_values, optimizer, work)

    def apply(key, broadcast, weights, data):
        rows = tree.where(data.mask, data.examples, tree.zeros_like(data.examples))
        losses = of_components(broadcast, rows, None)["loss"]
        responsibilities = jax.nn.softmax(jnp.log(weights)[:, None] - losses.astype(jnp.float32), axis=0).T
        examples = {"data": data.examples, "responsibilities": responsibilities}
        training = train(key, broadcast, data._replace(examples=examples), uncorrected(broadcast))
        sums = jnp.where(data.mask[:, None], responsibilities, 0).sum(0)
        new_weights = sums / jnp.maximum(sums.sum(), 1e-30)
        return training.report(tree.subtract(training.params, broadcast), work.weighs_examples()), new_weights

    def equal_weights() -> Array:
        return jnp.full(num_components, 1 / num_components)

    def mixed_params(components: PyTree, weights: Array) -> PyTree:
        return {"components": components, "weights": weights}

    def start(params: PyTree) -> PyTree:
        return perturbed_models(jax.random.key(start_seed), params, num_components, spread)

    inner = server.optimizer(optax.sgd(1.0))
    step = inner._replace(
        init=lambda params: inner.init(start(params)),
        params=lambda state: jax.tree.map(lambda components: components[0], inner.params(state)),
        takes=lambda params: jax.eval_shape(start, params),
        moved=None,
        params_kind=ParamsKind.PART,
    )
    rule = aggregation.mean() if aggregator is None else aggregator
    local = ClientUpdate(lambda broadcast: equal_weights(), apply, facts_of(work, optimizer))
    made = with_own_models(
        sampler, local, rule, step, lambda components, weights, _: mixed_params(components, weights), **round_options
    )
    return made._replace(
        params=lambda state: mixed_params(inner.params(state.server), equal_weights()),
        evaluated=made.evaluated._replace(model=mixed),
    )
