"""MOON: local training pulls embeddings to those of the server's model, away from those of the last local model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from fedjax_sim import aggregation, client, server, tree
from fedjax_sim.models import Model, per_example, supervised
from fedjax_sim.models.embedding import with_embedding
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import RecipeOptions
from fedjax_sim.types import Aggregator, Algorithm, Array, PyTree, Sampler
from fedjax_sim.validate import FromData, NonNegative, Positive, named_arguments


class LastModel(NamedTuple):
    """The state of a client."""

    model: PyTree  # its local model at the end of its last round
    is_known: Array  # [] bool; there was such a round


@named_arguments
def moon(
    model: Model,
    loss: Annotated[Callable, FromData("loss")],
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    embedding: str | None = None,
    coefficient: NonNegative = 1.0,
    temperature: Positive = 0.5,
    aggregator: Aggregator | None = None,
    **options: Unpack[RecipeOptions],
) -> Algorithm:
    """Makes MOON: each row's loss has a contrast between the received model and the client's own last one.

    With h, h_g and h_p the embeddings of a row by the local model, the received model and the client's local model at
    the end of its last round, the loss of a row is
    loss(x, y) - coefficient log(e^(cos(h, h_g) / t) / (e^(cos(h, h_g) / t) + e^(cos(h, h_p) / t))) with temperature t.
    An embedding of zeros has the cosine 0 with all. A local step costs two more evaluations of the model.

    Every client keeps a model; for many clients see `engine.client_memory`. In its first round it has no last model and
    takes the one that it receives, so that the contrast is log 2 and moves nothing. A round whose message does not
    arrive, and a client without rows, leave the last model as it was.

    Args:
      model: with layers (`models.sequential`), two at least.
      loss: (outputs, y) -> per-example losses [n] or a dict with "loss".
      sampler: as in `fedavg`, without replacement.
      optimizer, aggregator: as in `fedavg`.
      embedding: the layer whose flattened output is h; None = the last layer but one. The paper has a projection head
        of two layers there: such a model has it as layers of its own.
      coefficient: mu in the paper, >= 0; 0 is FedAvg, whose clients keep nothing.
      temperature: tau in the paper, > 0.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform, downlink, nonfinite, plan, mesh: as in `federated`. The last model is the one that the client trained,
        before its message is clipped, compressed or perturbed, and it is never sent.

    Returns: an Algorithm. The info has `local_task_loss`, and `local_contrast`, the second term over its coefficient.

    Raises: ValueError for a model without layers or with one layer, and for a sampler with replacement.

    Guarantees: coefficient 0 is FedAvg bit for bit (tests/algorithms/server/test_moon.py::test_zero_is_fedavg); models
    match NumPy where some clients take part in a round (::test_matches_numpy); the first round is FedAvg's up to
    rounding (::test_the_first_round_is_fedavgs); bytes are FedAvg's (::test_matches_numpy).

    References: Li, He, Song 2021 (MOON), algorithm 1.
    """
    work, round_options = client.local_work(options)
    embedded = with_embedding(model, embedding)
    plain = client.local_sgd(supervised(model, loss), optimizer, work)

    def apply(key, broadcast, last, data):
        previous = tree.where(last.is_known, last.model, broadcast)

        def with_contrast(params, examples, key):
            outputs, own = embedded(params, examples["x"])
            to_received, to_previous = (
                _cosines(own, jax.lax.stop_gradient(embedded(other, examples["x"])[1]))
                for other in (broadcast, previous)
            )
            values = per_example(loss(outputs, examples["y"]), own.shape[0])
            contrast = jnp.logaddexp(0.0, (to_previous - to_received) / temperature)
            contrasted = {"loss": values["loss"] + coefficient * contrast.astype(values["loss"].dtype)}
            return values | contrasted | {"task_loss": values["loss"], "contrast": contrast}

        report, _ = client.local_sgd(with_contrast, optimizer, work).apply(key, broadcast, (), data)
        trained = LastModel(jax.tree.map(jnp.add, broadcast, report.update), jnp.bool_(True))
        return report, tree.where(data.mask.any(), trained, last)

    is_off = not isinstance(coefficient, Tracer) and coefficient == 0
    contrasting = plain._replace(init=lambda broadcast: LastModel(broadcast, jnp.bool_(False)), apply=apply)
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0))
    return federated(sampler, plain if is_off else contrasting, rule, step, **round_options)


def _cosines(a: Array, b: Array) -> Array:
    """Returns the cosines [n] float32 of the angles between rows of a and b [n, size]; 0 where a row is zero."""
    a, b = (x.astype(jnp.float32) for x in (a, b))
    squares = jnp.square(a).sum(1) * jnp.square(b).sum(1)
    is_apart = squares > 0
    # The square root of 0 has no derivative, so a number that has one takes its place before the choice.
    return jnp.where(is_apart, (a * b).sum(1) / jnp.sqrt(jnp.where(is_apart, squares, 1)), 0)
