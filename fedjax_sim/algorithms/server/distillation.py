"""Federated and centralised: training that begins at a model of the server's, and ensembles distilled at the server."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import client, server, tree, validate
from fedjax_sim.aggregation import gather, rows
from fedjax_sim.models import Model, distillation
from fedjax_sim.models.ensemble import running_mean
from fedjax_sim.prng import stream
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import MessageOptions
from fedjax_sim.server.own_data import own_examples
from fedjax_sim.types import Algorithm, ClientData, ClientUpdate, PyTree, Sampler, ServerUpdate
from fedjax_sim.validate import LossFn

__all__ = ["feddf", "pretrained"]


class FedDFOptions(client.LocalOptions, MessageOptions, total=False):
    """Those of other algorithms around a server without `downlink`: the server holds models that it has not sent."""


@validate.named_arguments
def pretrained(algorithm: Algorithm, work: ClientUpdate, data: ClientData) -> Algorithm:
    """The algorithm, from a model that is first trained on the server's own examples.

    Args:
      algorithm: any.
      work: the training before the first round, as of one client, such as `client.local_sgd`; without state or noise.
      data: the server's examples, leaves [n, ...], and their mask.

    Returns: the Algorithm with another `init`.

    Raises: ValueError, TypeError for other parts, and for examples that are not finite; FloatingPointError in `init`
    where the training ends at a model that is not.

    Guarantees: the rounds are those from the trained model, bit for bit
    (tests/algorithms/server/test_distillation.py::test_pretrained); what diverges stops there
    (::test_pretraining_that_diverges).
    """
    validate.part("algorithm", algorithm, Algorithm)
    data = own_examples(work, data)

    def init(key, params, population):
        report, _ = work.apply(stream(key, "pretraining"), params, work.init(params), data)
        start = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), params, report.update)
        fit = tree.all_finite(start)
        if not isinstance(fit, jax.core.Tracer) and not fit:
            hint = "Its training on the server's examples diverged: take a smaller rate, or fewer steps."
            validate.fail("work", "training that ends at a finite model", "NaN or infinity", hint, FloatingPointError)
        return algorithm.init(key, start, population)

    parts = algorithm.parts and algorithm.parts._replace(complete=False)
    return algorithm._replace(init=init, parts=parts)


@validate.named_arguments
def feddf(
    model: Model,
    loss_fn: LossFn,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    public: ClientData,
    *,
    distill_optimizer: optax.GradientTransformation,
    distill_steps: int,
    distill_batch_size: int | None = None,
    temperature: float = 1.0,
    **options: Unpack[FedDFOptions],
) -> Algorithm:
    """FedAvg whose mean is then taught by the ensemble of the clients' models, on unlabelled public examples.

    The teacher's logits are the mean of those of all models that arrived, each weighed alike; the student starts from
    the clients' mean and takes steps on their divergence (`models.distillation`). The server holds m models.

    Args:
      model: a classifier without state; `loss_fn` is the clients' own loss of it.
      optimizer: the clients'; `num_steps`, `num_epochs`, `batch_size`, `weighting`, `shuffle` as in `client.work`.
      public: examples {"x": [n, ...]} at the server, and their mask.
      distill_optimizer, distill_steps, distill_batch_size: of the student in each round.
      transform: of the updates; one that sends numbers, not integers.

    Guarantees: NumPy's for a linear model (tests/algorithms/server/test_distillation.py::test_feddf); models that agree
    on the public examples leave the mean as it is (::test_models_that_agree_teach_nothing).

    References: Lin, Kong, Stich and Jaggi 2020 (FedDF), algorithm 1.
    """
    validate.part("model", model, Model)
    transform = options.get("transform")
    if transform is not None and transform.facts.integer_range is not None:
        hint = "The ensemble needs each client's model: let it send decoded numbers, with integers=False."
        validate.fail("transform", "one that sends numbers", f"integers in {transform.facts.integer_range}", hint)
    work, round_options = client.local_work(options)
    student = client.local_sgd(
        distillation(model, temperature),
        distill_optimizer,
        client.work(num_steps=distill_steps, batch_size=distill_batch_size),
    )
    step = _taught(server.optimizer(optax.sgd(1.0)), model, student, public, sampler.num_slots)
    local = client.local_sgd(loss_fn, optimizer, work)
    return federated(sampler, local, gather(_with_rows), step, **round_options)


def _with_rows(key, updates, weights, ids) -> dict[str, PyTree]:
    """The mean of the updates, each of them, and which arrived."""
    return {"mean": rows.weighted_mean(updates, weights), "updates": updates, "arrived": weights > 0}


class _TaughtState(NamedTuple):
    """The server's state."""

    server: PyTree  # of the server underneath
    public: ClientData


def _taught(
    inner: ServerUpdate, model: Model, student: ClientUpdate, public: ClientData, num_slots: int
) -> ServerUpdate:
    """`inner`, whose model is then trained by `student` on the logits of the clients' models."""
    public = own_examples(student, public)

    def teacher(start, aggregate, x):
        def output(update):
            return model.apply(jax.tree.map(jnp.add, start, update), (), x, None, False)[0]

        def member(carry, row):
            mean, number = carry
            update, arrived = row
            number = number + arrived.astype(jnp.int32)
            return (jnp.where(arrived, running_mean(mean, output(update), number), mean), number), None

        spec = jax.eval_shape(output, start)
        rows = aggregate["updates"], aggregate["arrived"]
        return jax.lax.scan(member, (jnp.zeros(spec.shape, spec.dtype), jnp.int32(0)), rows)[0][0]

    def apply(key, aggregate, state):
        start = inner.params(state.server)
        examples = {"x": state.public.examples["x"], "teacher": teacher(start, aggregate, state.public.examples["x"])}
        moved = inner.apply(key, aggregate["mean"], state.server)
        now = inner.params(moved)
        report, _ = student.apply(stream(key, "distillation"), now, (), state.public._replace(examples=examples))
        return state._replace(server=inner.moved(moved, jax.tree.map(jnp.add, now, report.update)))

    def takes(params):
        def stacked(x):
            return jax.ShapeDtypeStruct((num_slots, *x.shape), x.dtype)

        arrived = jax.ShapeDtypeStruct((num_slots,), jnp.bool_)
        return {"mean": params, "updates": jax.tree.map(stacked, params), "arrived": arrived}

    return ServerUpdate(
        init=lambda params: _TaughtState(inner.init(params), public),
        broadcast=lambda state: inner.broadcast(state.server),
        apply=apply,
        params=lambda state: inner.params(state.server),
        takes=takes,
    )
