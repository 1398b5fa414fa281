"""FedProto: clients share the mean embedding of each class, and every client keeps a whole model of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, tree
from fedjax_sim.algorithms.personal.own_models import with_own_models
from fedjax_sim.client.labels import check_classes
from fedjax_sim.client.local_sgd import facts_of, local_training, uncorrected
from fedjax_sim.models import Model, per_example
from fedjax_sim.models.embedding import with_embedding
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.types import Algorithm, Array, ClientUpdate, ParamsKind, PyTree, Sampler, ServerUpdate, Wire
from fedjax_sim.validate import FromData, NonNegative, named_arguments


class FedProtoOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` but the weighting, and how a round is computed."""


class PrototypeState(NamedTuple):
    """The server's state."""

    start: PyTree  # the model that every client starts from, which never changes
    prototypes: Array  # [classes, embedding] float32, the mean embedding of each class
    known: Array  # [classes] bool; some client has sent an embedding of the class


@named_arguments
def fedproto(
    model: Model,
    loss: Annotated[Callable, FromData("loss")],
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    input_shape: Annotated[Sequence[int], FromData("input_shape")],
    embedding: str | None = None,
    coefficient: NonNegative = 1.0,
    **options: Unpack[FedProtoOptions],
) -> Algorithm:
    """Makes FedProto: clients share class prototypes, and pull their embeddings towards those of all clients.

    A client trains its whole model on loss(x, y) + coefficient |h(x) - P_y|^2, where h(x) is its embedding of an
    example and P_y the prototype of the example's class. Then it sends the mean embedding of each class that it holds,
    at its trained model and over all of its rows, with the class's number of rows. The server's new prototype of a
    class is the mean over these rows; a class that nobody in the cohort holds keeps its prototype. A class without a
    prototype pulls nothing.

    Args:
      model: a classifier with layers (`models.sequential`), two at least. All clients have the same architecture.
      loss: (outputs, y) -> per-example losses [n] or a dict with "loss"; y [n] are integer classes.
      sampler, optimizer: as in `fedavg`.
      input_shape: shape of one example's x.
      embedding: the layer whose flattened output is h; None = the last layer but one.
      coefficient: lambda in the paper, >= 0. 0 is local training.
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      nonfinite, plan, mesh: as in `federated`. There is no transform, downlink or other aggregator: messages are sums
        over classes that some clients lack. They are sent as they are, and no epsilon covers them.

    Returns: an Algorithm. There is no shared model: `params` is the model that all clients start from, and the info's
    `update_norm` is 0. Clients are judged by `evaluated.personal`; a client that has not trained has the start model.
    The info has `local_task_loss`, and `local_prototype_distance`, the mean |h(x) - P_y|^2 with 0 for classes without a
    prototype.

    Raises: ValueError for a model without layers or with one layer, and for targets that are no integer classes.

    Guarantees: coefficient 0 is local training (tests/algorithms/personal/test_fedproto.py::
    test_without_a_pull_it_is_local_training); models and prototypes match NumPy (::test_matches_numpy); a message
    counts prototypes and numbers of rows alone (::test_bytes_are_of_prototypes); classes that nobody holds have no
    prototype (::test_matches_numpy).

    References: Tan et al. 2022 (FedProto), algorithm 1 and equations 4 to 7; the mean of equation 6 is weighted by
    rows, without its further factor 1 / |N_j|.
    """
    embedded = with_embedding(model, embedding)
    work, round_options = client.local_work({**options, "weighting": "uniform"})

    def loss_with_pull(params, examples, key):
        outputs, embeddings = embedded(params, examples["data"]["x"])
        values = per_example(loss(outputs, examples["data"]["y"]), embeddings.shape[0])
        distances = jnp.square(embeddings - examples["prototype"]).sum(-1)
        distances = jnp.where(examples["known"], distances, 0)
        pulled = {"loss": values["loss"] + coefficient * distances, "task_loss": values["loss"]}
        return values | pulled | {"prototype_distance": distances}

    train = local_training(loss_with_pull, optimizer, work)

    def apply(key, broadcast, own, data):
        prototypes, known = broadcast.prototypes, broadcast.known
        classes = data.examples["y"]
        check_classes(classes, "A prototype belongs to a class.")
        targets = {"prototype": prototypes[classes], "known": known[classes]}
        training = train(key, own, data._replace(examples={"data": data.examples, **targets}), uncorrected(own))
        x = tree.where(data.mask, data.examples["x"], tree.zeros_like(data.examples["x"]))
        _, embeddings = embedded(training.params, x)
        is_of_class = (classes[None] == jnp.arange(known.shape[0])[:, None]) & data.mask[None]
        rows = is_of_class.sum(1, dtype=jnp.float32)
        sums = is_of_class.astype(jnp.float32) @ embeddings.astype(jnp.float32)
        return training.report({"rows": rows, "sums": sums}, by_examples=False), training.params

    step = _prototype_server(embedded, tuple(input_shape))
    # A client with many rows counts for more, though its report weighs 1: unequal chances would count its rows twice.
    facts = facts_of(work, optimizer)._replace(uniform_weights=False)
    local = ClientUpdate(lambda broadcast: broadcast.start, apply, facts)
    return with_own_models(sampler, local, aggregation.mean(), step, lambda _, own, __: own, **round_options)


def _prototype_server(embedded: Callable, input_shape: tuple[int, ...]) -> ServerUpdate:
    """Makes the server that keeps the mean embedding of each class, its prototype.

    The prototype of class y is P_y = sum_i s_iy / sum_i n_iy, where client i holds n_iy rows of class y, whose
    embeddings add up to s_iy. A class without rows in the cohort keeps its prototype.

    Args:
      embedded: (params, x) -> (outputs, embeddings), as of `with_embedding`.
      input_shape: of one example's x, without an axis of rows.

    Returns: a ServerUpdate that takes the cohort's means {"rows": [classes] float32, "sums": [classes, size] float32}:
    in their quotient the divisor of the means cancels. It broadcasts its whole state, of which prototypes and known
    classes alone count as bytes.
    """

    def sizes(params: PyTree) -> tuple[int, int]:
        """Returns the numbers of classes and of an embedding's entries."""
        x = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
        outputs, embeddings = jax.eval_shape(embedded, params, x)
        num_outputs = outputs.shape[-1]
        return (2 if num_outputs == 1 else num_outputs), embeddings.shape[-1]  # one logit tells two classes apart

    def init(params):
        num_classes, size = sizes(params)
        return PrototypeState(params, jnp.zeros((num_classes, size)), jnp.zeros(num_classes, bool))

    def apply(key, aggregate, state):
        is_held = aggregate["rows"] > 0
        rows = jnp.where(is_held, aggregate["rows"], 1)
        means = aggregate["sums"] * (1 / rows)[:, None]  # a division for each class, not for each number
        prototypes = jnp.where(is_held[:, None], means, state.prototypes)
        return PrototypeState(state.start, prototypes, state.known | is_held)

    def wire(broadcast):
        sent = (broadcast.prototypes, broadcast.known)  # clients know the start model
        return Wire(tree.num_values(sent), 8 * tree.num_bytes(sent))

    def takes(params):
        num_classes, size = sizes(params)
        rows = jax.ShapeDtypeStruct((num_classes,), jnp.float32)
        return {"rows": rows, "sums": jax.ShapeDtypeStruct((num_classes, size), jnp.float32)}

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
