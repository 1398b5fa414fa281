"""HeteroFL: clients of unequal devices train sub-models, each the first units of every hidden layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import aggregation, client, server, tree, validate
from fedjax_sim.client.local_sgd import facts_of, local_training
from fedjax_sim.models import Model
from fedjax_sim.round.bases import Bases, starting_from
from fedjax_sim.round.costs import metrics_of, senders
from fedjax_sim.round.counts import from_int, word_pair_product, word_pair_sum
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.round.round import close, collect, invite
from fedjax_sim.round.state import initial_state
from fedjax_sim.transform import identity
from fedjax_sim.types import (
    Algorithm,
    Array,
    ClientUpdate,
    Count,
    Evaluated,
    Execution,
    PyTree,
    Sampler,
    ServerUpdate,
    Star,
)
from fedjax_sim.validate import LossFn, named_arguments


class HeteroFLOptions(client.LocalOptions, ExecutionOptions, total=False):
    """The options of `client.work`, and how a round is computed."""


class TierUnits(NamedTuple):
    """The units that a leaf of the parameters joins, and which of them each tier holds; NumPy arrays."""

    inputs: np.ndarray | None  # [tiers, in] bool; None for a leaf with outputs alone
    outputs: np.ndarray  # [tiers, out] bool


@named_arguments
def heterofl(
    model: Model,
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    widths: Sequence[float] = (1.0, 0.5),
    **options: Unpack[HeteroFLOptions],
) -> Algorithm:
    """Makes HeteroFL: client i trains the first share r_i of the units of each hidden layer.

    A client receives the parameters between its units, all inputs and all outputs included, and trains them. The server
    moves each parameter by the mean update of the clients in the cohort that hold it; one that none of them holds
    stays. In the program all clients have arrays of one shape, in which zeros stand for what a client does not hold. So
    sub-models save bytes here, but no time of the simulator.

    The paper also scales activations of small models in training, masks the loss of classes that a client lacks, and
    has a batch normalisation without running statistics. All three are left out.

    Args:
      model: dense and convolutional layers one after the other, such as `models.mlp` and `models.cnn`. The last axis of
        a kernel is its outputs, and the last but one its inputs.
      loss_fn: of that model, as in `fedavg`.
      sampler: as in `fedavg`; without a clock, which would price all clients as the whole model.
      optimizer: as in `fedavg`. It trains the sub-model, with zeros for gradients outside of it.
      widths: r_i in (0, 1], one share for each client, or a shorter list that repeats: client i has
        widths[i % len(widths)]. Numbers of units are rounded up.
      num_steps, num_epochs, batch_size, shuffle, weighting: as in `client.work`. A parameter's mean is by examples; the
        paper takes the plain mean of the clients that hold it, "uniform".
      nonfinite, plan, mesh: as in `federated`. There is no transform, downlink or other aggregator: a parameter's mean
        is a ratio of two means.

    Returns: an Algorithm whose `params` is the whole model. A client's own model is its sub-model, with zeros
    elsewhere. `uplink_bytes` and `downlink_bytes` are the sum of the bytes of each client's sub-model; which client
    holds which width is known, and counts none.

    Raises: ValueError for a model with other layers, branches or normalisations; for widths out of range, or more than
    clients; and for a sampler with a clock.

    Guarantees: one width of 1 is FedAvg up to rounding (tests/algorithms/personal/test_heterofl.py::
    test_whole_models_are_fedavg); models match NumPy on sub-matrices (::test_matches_numpy); what nobody in a cohort
    holds stays, bit for bit (::test_what_nobody_holds_stays); bytes are those of sub-models (::test_bytes).

    References: Diao, Ding, Tarokh 2021 (HeteroFL), algorithm 1.
    """
    validate.sequence("widths", widths)
    for i, width in enumerate(widths):
        validate.in_range(f"widths[{i}]", width, 0, 1, open_low=True)
    validate.part("model", model, Model)
    population_size = sampler.design.population_size
    if len(widths) > population_size:
        validate.fail("widths", f"at most one for each of {population_size} clients", len(widths))
    if sampler.devices is not None:
        hint = "A clock would price the whole model at every client: take a sampler without one."
        validate.fail("sampler", "rounds that take no time, for sub-models differ", "simulated time", hint)
    shares, tier_of_place = np.unique(np.asarray(widths, np.float64), return_inverse=True)
    tiers = jnp.asarray(tier_of_place, jnp.int32)
    _units(model, jax.eval_shape(lambda: model.init(jax.random.key(0))[0]), shares)  # refuses other models
    work, execution = client.local_work(options)
    train = local_training(loss_fn, optimizer, work)

    def tier_of(ids: Array) -> Array:
        return tiers[ids % len(widths)]

    def sub_model(params: PyTree, tier: Array) -> PyTree:
        """Returns the parameters with zeros where a tier holds none."""
        leaves, structure = jax.tree.flatten(params)
        units = jax.tree.leaves(_units(model, params, shares), is_leaf=lambda x: isinstance(x, TierUnits))
        return structure.unflatten([_held(x, part, tier) for x, part in zip(leaves, units, strict=True)])

    def apply(key, start, state, data):
        tier = start["tier"]
        training = train(key, start["params"], data, lambda gradients, params: sub_model(gradients, tier))
        update = sub_model(tree.subtract(training.params, start["params"]), tier)
        is_tier = (jnp.arange(len(shares)) == tier).astype(jnp.float32)
        return training.report({"update": update, "tier": is_tier}, work.weighs_examples()), state

    step_of_server = _ratio_of_holders(server.optimizer(optax.sgd(1.0)), model, shares)
    local = ClientUpdate(lambda broadcast: (), apply, facts_of(work, optimizer))
    star = Star(
        sampler=sampler,
        client=local,
        aggregator=aggregation.mean(),
        server=step_of_server,
        transform=identity(),
        execution=Execution(**execution),
    )

    def init(key, params, population):
        return initial_state(star, params, population)

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        params = star.server.params(state.server)
        every_tier = jnp.arange(len(shares), dtype=jnp.int32)
        starts = {"params": jax.vmap(sub_model, (None, 0))(params, every_tier), "tier": every_tier}
        tiers_of_slots = tier_of(cohort.ids)
        bases = Bases(starts, tiers_of_slots)
        gathered = collect(star, key, cohort, state, population, extension=starting_from(bases))
        state, info = close(star, key, cohort, gathered, state._replace(sampler=sampler_state))
        uploads = senders(cohort)
        sizes = _bytes_by_tier(model, params, shares)
        counted = {"uplink_bytes": uploads, "downlink_bytes": cohort.invited}
        if "wasted_bytes" in info:
            counted["wasted_bytes"] = uploads & ~cohort.reported
        return state, info | {name: _total(sizes, tiers_of_slots, chosen) for name, chosen in counted.items()}

    def personal(state, ids):
        params = star.server.params(state.server)
        return jax.vmap(sub_model, (None, 0))(params, tier_of(ids))

    return Algorithm(
        init,
        step,
        lambda state: star.server.params(state.server),
        star,
        evaluated=Evaluated(personal=personal),
        metrics=metrics_of(star),
        params_kind=star.params_kind,
    )


def _units(model: Model, params: PyTree, shares: np.ndarray) -> PyTree:
    """Returns the `TierUnits` of each leaf, in a pytree like the parameters.

    Args:
      model: dense and convolutional layers one after the other; another is refused.
      params: of the model, or their specs.
      shares: [tiers] of the units of hidden layers.
    """
    layers = [layer for layer in getattr(model, "layers", ()) if layer.keys]
    if not layers or any(layer.branches for layer in layers):
        hint = "Take models.mlp or models.cnn, or build such a model by models.sequential."
        validate.fail("model", "dense and convolutional layers one after the other", [x.name for x in layers], hint)
    units_of_layers = {}
    held = None  # [tiers, units] of the layer before
    for layer in layers:
        entries = {key: params[key] for key in layer.keys}
        kernels = [x for x in jax.tree.leaves(entries) if len(x.shape) >= 2]
        shapes = [x.shape for x in jax.tree.leaves(entries)]
        num_inputs, num_outputs = kernels[0].shape[-2:] if kernels else (0, 0)
        others_are_biases = all(shape == (num_outputs,) for shape in shapes if len(shape) < 2)
        num_held = num_inputs if held is None else held.shape[1]
        # A layer that flattens images has the units of the layer before at each place, the units last.
        if len(kernels) != 1 or not others_are_biases or num_inputs % num_held:
            hint = "A normalisation would see the zeros of absent units, and other layers do not say what a unit is."
            validate.fail("model", f"one kernel [..., in, out] and biases [out] in layer {layer.name!r}", shapes, hint)
        is_last = layer is layers[-1]
        counts = [num_outputs if is_last else math.ceil(validate.as_written(share) * num_outputs) for share in shares]
        inputs = np.ones((len(shares), num_inputs), bool)
        if held is not None:
            inputs = np.tile(held, (1, num_inputs // num_held))
        outputs = np.arange(num_outputs)[None] < np.array(counts)[:, None]

        def of_leaf(x, inputs=inputs, outputs=outputs):
            return TierUnits(inputs if len(x.shape) >= 2 else None, outputs)

        units_of_layers |= jax.tree.map(of_leaf, entries)
        held = outputs
    return units_of_layers


def _held(x: Array, units: TierUnits, tier: Array) -> Array:
    """Returns a leaf with zeros where a tier, [] int32, holds nothing."""
    is_held = jnp.asarray(units.outputs)[tier]
    if units.inputs is not None:
        is_held = jnp.asarray(units.inputs)[tier][:, None] & is_held[None]
    return jnp.where(is_held.reshape((1,) * (x.ndim - is_held.ndim) + is_held.shape), x, jnp.zeros((), x.dtype))


def _bytes_by_tier(model: Model, params: PyTree, shares: np.ndarray) -> list[int]:
    """Returns the bytes of each tier's sub-model."""
    leaves = jax.tree.leaves(params)
    units = jax.tree.leaves(_units(model, params, shares), is_leaf=lambda x: isinstance(x, TierUnits))
    sizes = np.zeros(len(shares), np.int64)
    for x, part in zip(leaves, units, strict=True):
        joined = 1 if part.inputs is None else part.inputs.sum(1)
        places = math.prod(x.shape[:-2])
        sizes += x.dtype.itemsize * places * joined * part.outputs.sum(1)
    return [int(size) for size in sizes]


def _total(sizes: list[int], tiers: Array, chosen: Array) -> Count:
    """Counts the bytes of the chosen slots' sub-models.

    Args:
      sizes: bytes of each tier.
      tiers: [m] int32, of each slot.
      chosen: [m] bool.
    """
    products = [
        word_pair_product((chosen & (tiers == tier)).sum(dtype=jnp.int32), from_int(size))
        for tier, size in enumerate(sizes)
    ]
    return Count(jnp.int32(1), reduce(word_pair_sum, products))


def _ratio_of_holders(inner: ServerUpdate, model: Model, shares: np.ndarray) -> ServerUpdate:
    """Makes a server that divides each parameter's mean update by the share of the clients that hold it.

    With the weights a_i of the cohort's clients, which add up to 1, parameter j moves by sum_i a_i u_ij / sum_i a_i
    h_ij, where h_ij is 1 if client i holds the parameter, else 0. A parameter that no client holds does not move.

    Args:
      inner: takes the step with these quotients.
      model: dense and convolutional layers one after the other.
      shares: [tiers] float64 in (0, 1], rising: the shares of hidden units that the tiers hold.

    Returns: a ServerUpdate that takes {"update": the mean sum_i a_i u_i, zeros for what a client does not hold, as the
    model; "tier": [tiers] float32, the share of the weight that each tier has}. It broadcasts {"params": the whole
    model, "tier": 0}; in its place `Bases` sends each client its sub-model and its tier.
    """

    def apply(key, aggregate, state):
        tier_shares = aggregate["tier"]

        def mean_of_holders(update, units):
            share = tier_shares[:, None] * units.outputs.astype(np.float32)
            share = share.sum(0) if units.inputs is None else units.inputs.astype(np.float32).T @ share
            share = share.reshape((1,) * (update.ndim - share.ndim) + share.shape).astype(update.dtype)
            return jnp.where(share > 0, update / jnp.where(share > 0, share, 1), 0)

        leaves, structure = jax.tree.flatten(aggregate["update"])
        units = jax.tree.leaves(_units(model, aggregate["update"], shares), is_leaf=lambda x: isinstance(x, TierUnits))
        means = [mean_of_holders(x, part) for x, part in zip(leaves, units, strict=True)]
        return inner.apply(key, structure.unflatten(means), state)

    return inner._replace(
        broadcast=lambda state: {"params": inner.broadcast(state), "tier": jnp.int32(0)},
        apply=apply,
        takes=lambda params: {"update": params, "tier": jax.ShapeDtypeStruct((len(shares),), jnp.float32)},
        moved=None,
    )
