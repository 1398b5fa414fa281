"""Algorithms that also train at the server: on its own examples before the first round, or by distillation (FedDF)."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import client, engine, server, validate
from fedjax_sim.aggregation import gather, rows
from fedjax_sim.models import Model, distillation
from fedjax_sim.models.ensemble import running_mean
from fedjax_sim.prng import stream
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.server.own_data import check_constant_rate, own_examples, public_examples
from fedjax_sim.types import Algorithm, ClientData, ClientUpdate, PyTree, Sampler, ServerUpdate
from fedjax_sim.validate import FromData, LossFn


class FedDFOptions(client.LocalOptions, MessageOptions, total=False):
    """The options of `client.work` and `federated`, but no `downlink`: the server holds models that it has not sent."""


@validate.named_arguments
def pretrained(algorithm: Algorithm, work: ClientUpdate, data: ClientData) -> Algorithm:
    """Makes an algorithm start from a model that is first trained on the server's own examples.

    Args:
      algorithm: any algorithm.
      work: the training before the first round, as of one client, such as `client.local_sgd`; without state or noise.
      data: the server's examples, leaves [n, ...], and their mask.

    Returns: the Algorithm with another `init`.

    Raises: ValueError, TypeError for other parts, for work whose rate falls over rounds, and for examples that are not
      finite; FloatingPointError in `init`
    where the training ends at a model that is not finite.

    Guarantees: the rounds are those from the trained model, bit for bit
    (tests/algorithms/server/test_distillation.py::test_pretrained); a training that diverges stops before the first
    round (::test_pretraining_that_diverges).
    """
    validate.part("algorithm", algorithm, Algorithm)
    data = own_examples(work, data)
    check_constant_rate("work", work)

    def init(key, params, population):
        report, _ = work.apply(stream(key, "pretraining"), params, work.init(params), data)
        start = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), params, report.update)
        is_finite = engine.all_finite(start)
        # A traced value cannot be checked; a program that traces `init` gets the model as it is.
        if not isinstance(is_finite, Tracer) and not is_finite:
            hint = "Its training on the server's examples diverged: take a smaller rate, or fewer steps."
            validate.fail("work", "training that ends at a finite model", "NaN or infinity", hint, FloatingPointError)
        return algorithm.init(key, start, population)

    parts = algorithm.parts and algorithm.parts._replace(complete=False)  # they do not hold the training before
    return algorithm._replace(init=init, parts=parts)


@validate.named_arguments
def feddf(
    model: Model,
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    public: Annotated[ClientData, FromData("server_data")],
    *,
    distill_optimizer: optax.GradientTransformation | None = None,
    distill_steps: int,
    distill_batch_size: int | None = None,
    temperature: float = 1.0,
    squared_temperature: bool = True,
    **options: Unpack[FedDFOptions],
) -> Algorithm:
    """Makes FedDF: FedAvg whose mean model is then trained to imitate the ensemble of the clients' models.

    The training uses unlabelled public examples at the server. The teacher's logits are the mean of the logits of all
    models that arrived, with equal weights. The student starts from the clients' mean model and takes steps on
    T^2 KL(softmax(t / T) || softmax(z / T)), with the teacher's logits t, its own z and the temperature T
    (`models.distillation`). The server holds m models.

    Args:
      model: a classifier without state.
      loss_fn: the clients' loss of that model.
      sampler: draws the cohorts.
      optimizer: the clients' optimizer; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in
        `client.work`. The mean from which the student starts is by examples, as in the paper.
      public: examples {"x": [n, ...]} at the server, and their mask; labels are not read. A config takes the server's
        rows (`[data.with_server_rows]`).
      distill_optimizer: of the student's training; None: `optimizer`. Its rate may not fall over rounds.
      distill_steps: steps of the student's training in each round.
      distill_batch_size: of these steps; None: all public rows at each step.
      temperature: T > 0, by which all logits are divided in the divergence. The paper has none, as with 1.
      squared_temperature: True: the factor T^2, by which gradients have about the same size for every T (Hinton et al.
        2015). False: without it, as in the paper's code.
      transform: of the updates; it must send numbers, not integers.
      nonfinite, plan, mesh: as in `federated`.

    Raises: ValueError, TypeError for public rows that are not finite, for a transform that sends integers, and for a
    student's rate that falls over rounds.

    Guarantees: the results are those of NumPy for a linear model
    (tests/algorithms/server/test_distillation.py::test_feddf, ::test_the_divergence_alone); models that agree on the
    public examples leave the mean as it is (::test_models_that_agree_teach_nothing).

    References: Lin, Kong, Stich and Jaggi 2020 (FedDF), algorithm 1.
    """
    validate.part("model", model, Model)
    transform = options.get("transform")
    if transform is not None and transform.facts.integer_range is not None:
        hint = "The ensemble needs each client's model: let it send decoded numbers, with integers=False."
        validate.fail("transform", "one that sends numbers", f"integers in {transform.facts.integer_range}", hint)
    work, round_options = client.local_work(options)
    student = client.local_sgd(
        distillation(model, temperature, squared_temperature=squared_temperature),
        distill_optimizer or optimizer,
        client.work(num_steps=distill_steps, batch_size=distill_batch_size),
    )
    check_constant_rate("optimizer" if distill_optimizer is None else "distill_optimizer", student)
    distilling_server = _distilling(server.optimizer(optax.sgd(1.0)), model, student, public, sampler.num_slots)
    local = client.local_sgd(loss_fn, optimizer, work)
    return federated(sampler, local, gather(_mean_and_rows), distilling_server, **round_options)


def _mean_and_rows(key, updates, weights, ids) -> dict[str, PyTree]:
    """The mean of the updates, each single update, and which of them arrived."""
    return {"mean": rows.weighted_mean(updates, weights), "updates": updates, "arrived": weights > 0}


class _DistillingState(NamedTuple):
    """The server's state."""

    server: PyTree  # the state of the wrapped server
    public: ClientData  # part of the state, so that it is an argument of the compiled round and not a constant in it


def _distilling(
    inner: ServerUpdate, model: Model, student: ClientUpdate, public: ClientData, num_slots: int
) -> ServerUpdate:
    """Makes a server train its model, after each step of `inner`, on the mean logits of the clients' models.

    Args:
      inner: the server whose step comes first.
      model: of server and clients.
      public: the examples on which the server trains, {"x": [n, ...]}, without labels.
      num_slots: m, of the cohort.
      student: the training, as a client's local work on {"x", "teacher"}.
    """
    public = public_examples(student, public)

    def teacher_logits(start, aggregate, x):
        def logits(update):
            client_model = jax.tree.map(jnp.add, start, update)
            return model.apply(client_model, (), x, None, False)[0]

        # One model after the other: the logits of all models at once would take m times the memory.
        def add_member(carry, row):
            mean, number = carry
            update, arrived = row
            number = number + arrived.astype(jnp.int32)
            return (jnp.where(arrived, running_mean(mean, logits(update), number), mean), number), None

        spec = jax.eval_shape(logits, start)
        rows = aggregate["updates"], aggregate["arrived"]
        (mean, _), _ = jax.lax.scan(add_member, (jnp.zeros(spec.shape, spec.dtype), jnp.int32(0)), rows)
        return mean

    def apply(key, aggregate, state):
        start = inner.params(state.server)
        x = state.public.examples["x"]
        examples = {"x": x, "teacher": teacher_logits(start, aggregate, x)}
        averaged = inner.apply(key, aggregate["mean"], state.server)
        mean_model = inner.params(averaged)
        assert inner.moved is not None, "the wrapped server goes on from another model"
        report, _ = student.apply(stream(key, "distillation"), mean_model, (), state.public._replace(examples=examples))
        return state._replace(server=inner.moved(averaged, jax.tree.map(jnp.add, mean_model, report.update)))

    def takes(params):
        def stacked(x):
            return jax.ShapeDtypeStruct((num_slots, *x.shape), x.dtype)

        arrived = jax.ShapeDtypeStruct((num_slots,), jnp.bool_)
        return {"mean": params, "updates": jax.tree.map(stacked, params), "arrived": arrived}

    return ServerUpdate(
        # A copy: a run donates its state, and the algorithm may make another run.
        init=lambda params: _DistillingState(inner.init(params), jax.tree.map(jnp.copy, public)),
        broadcast=lambda state: inner.broadcast(state.server),
        apply=apply,
        params=lambda state: inner.params(state.server),
        takes=takes,
        params_kind=inner.params_kind,
    )
