"""FedMD: clients share their logits on public rows, and every client keeps a whole model of its own."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, tree, validate
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.models import Model, distillation
from fedjax_sim.prng import stream
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.server.own_data import public_examples
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientData,
    ClientUpdate,
    ParamsKind,
    PyTree,
    Sampler,
    ServerUpdate,
    Wire,
)
from fedjax_sim.validate import FromData, LossFn, Positive, PositiveInt, named_arguments


class FedMDOptions(client.LocalSteps, MessageOptions, total=False):
    """The options of `client.work` but the weighting, and those of `federated` but `downlink`."""


class ConsensusState(NamedTuple):
    """The server's state."""

    start: PyTree  # the model that every client starts from, which never changes
    public: ClientData  # part of the state, so that it is an argument of the compiled round and not a constant in it
    logits: Array  # [rows, classes], the consensus on the public rows
    is_known: Array  # [] bool; a round has made a consensus


@named_arguments
def fedmd(
    model: Model,
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    public: Annotated[ClientData, FromData("server_data")],
    *,
    distill_optimizer: optax.GradientTransformation | None = None,
    distill_steps: PositiveInt,
    distill_batch_size: int | None = None,
    temperature: Positive = 1.0,
    squared_temperature: bool = True,
    aggregator: Aggregator | None = None,
    **options: Unpack[FedMDOptions],
) -> Algorithm:
    """Makes FedMD: clients distil each other by their logits on public rows, and send no parameters.

    In a round a client first trains its model to imitate the consensus on the public rows (`models.distillation`, a
    divergence times temperature^2), then on its own rows. It sends its logits on the public rows. The mean of the
    logits that arrive is the next consensus. In the first round there is none to imitate.

    Args:
      model: a classifier without state. All clients have the same architecture here; the paper's may differ.
      loss_fn: the clients' loss of that model.
      sampler, optimizer: as in `fedavg`.
      public: examples {"x": [n, ...]} that server and clients hold, and their mask; labels are not read. A config takes
        the server's rows (`[data.with_server_rows]`).
      distill_optimizer: of the imitation; None: `optimizer`. Either rate may fall over rounds (`client.over_rounds`).
      distill_steps: steps of the imitation in a round. A client takes all of them, also where it completes only a part
        of its other work.
      distill_batch_size: of the imitation; None: all public rows at each step.
      temperature: > 0, by which all logits are divided in the imitation. The paper has none, as with 1.
      squared_temperature: whether the divergence is multiplied by temperature^2, as in `feddf`.
      aggregator: of the logits; None is the mean, in which clients count alike.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`, of the training on own rows.
      transform: of the logits; it must send numbers, not integers.
      nonfinite, plan, mesh: as in `federated`.

    The paper first trains every client on labelled public rows and its own. Here all start from one model; `pretrained`
    makes another one.

    Returns: an Algorithm. There is no shared model: `params` is the model that all clients start from, and the info's
    `update_norm` is 0. Clients are judged by `evaluated.personal`; a client that has not trained has the start model.
    Messages in both directions count logits alone.

    Raises: ValueError, TypeError for public rows that are not finite, and for a transform that sends integers.

    Guarantees: for clients with the same rows it is local training, since they agree already
    (tests/algorithms/personal/test_fedmd.py::test_equal_clients_teach_each_other_nothing); models and consensus match
    NumPy (::test_matches_numpy), also where a rate falls over rounds (::test_a_rate_may_fall_over_rounds); bytes are
    those of logits (::test_bytes_are_of_logits).

    References: Li, Wang 2019 (FedMD), algorithm 1.
    """
    validate.part("model", model, Model)
    transform = options.get("transform")
    if transform is not None and transform.facts.integer_range is not None:
        hint = "Logits have no unit that clients share: let it send decoded numbers, with integers=False."
        validate.fail("transform", "one that sends numbers", f"integers in {transform.facts.integer_range}", hint)
    work, round_options = client.local_work({**options, "weighting": "uniform"})
    train = local_training(loss_fn, optimizer, work)
    imitation = client.work(num_steps=distill_steps, batch_size=distill_batch_size)
    divergence = distillation(model, temperature, squared_temperature=squared_temperature)
    student = client.local_sgd(divergence, distill_optimizer or optimizer, imitation)
    public = public_examples(student, public)

    def apply(key, broadcast, own, data):
        rows = broadcast.public
        examples = {"x": rows.examples["x"], "teacher": broadcast.logits}
        report, _ = student.apply(stream(key, "imitation"), own, (), rows._replace(examples=examples, round=data.round))
        imitated = jax.tree.map(jnp.add, own, report.update)
        start = tree.where(broadcast.is_known, imitated, own)
        training = train(key, start, data, uncorrected(start))
        logits = _logits(model, training.params, rows)
        return training.report({"logits": logits}, by_examples=False), training.params

    rule = aggregation.mean() if aggregator is None else aggregator
    # Either rate may fall over rounds, and `facts_of` looks at that of the own rows alone.
    reads_round = any(isinstance(each, client.OverRounds) for each in (optimizer, distill_optimizer))
    facts = facts_of(work, optimizer)._replace(reads_round=reads_round)
    local = ClientUpdate(lambda broadcast: broadcast.start, apply, facts)
    step = _consensus_server(model, public)
    return with_own_models(sampler, local, rule, step, lambda _, own, __: own, **round_options)


def _logits(model: Model, params: PyTree, rows: ClientData) -> Array:
    """Returns a model's logits on public rows [n, classes], zero in padding."""
    x = tree.where(rows.mask, rows.examples["x"], tree.zeros_like(rows.examples["x"]))
    logits, _ = model.apply(params, (), x, None, False)
    if logits.ndim != 2:
        validate.fail("model", "a classifier with logits [n, classes]", f"outputs of shape {logits.shape}")
    return jnp.where(rows.mask[:, None], logits, 0)


def _consensus_server(model: Model, public: ClientData) -> ServerUpdate:
    """Makes the server that keeps the aggregate of the clients' logits.

    Args:
      model: the clients' model, for the shape of its logits [n, classes].
      public: the n public rows, padding included, which are a part of the state.

    Returns: a ServerUpdate that takes {"logits": [n, classes]} and broadcasts its whole state, of which the logits
    alone count as bytes. `params` is the start model, which is never trained.
    """

    def spec(params: PyTree) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(lambda params: _logits(model, params, public), params)

    def init(params):
        like = spec(params)
        # A copy: a run donates its state, and the algorithm may make another run.
        rows = jax.tree.map(jnp.copy, public)
        return ConsensusState(params, rows, jnp.zeros(like.shape, like.dtype), jnp.zeros((), bool))

    def apply(key, aggregate, state):
        logits = aggregate["logits"].astype(state.logits.dtype)
        return state._replace(logits=logits, is_known=jnp.ones((), bool))

    def wire(broadcast):
        # Clients know the start model and the public rows.
        return Wire(tree.num_values(broadcast.logits), 8 * tree.num_bytes(broadcast.logits))

    def takes(params):
        return {"logits": spec(params)}

    kind = ParamsKind.UNTRAINED
    return ServerUpdate(
        init=init,
        broadcast=lambda state: state,
        apply=apply,
        params=lambda state: state.start,
        wire=wire,
        takes=takes,
        params_kind=kind,
    )
