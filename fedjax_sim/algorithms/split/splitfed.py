"""Split learning over many clients: SplitFed (V1, V2, several server copies), and the relay of Gupta and Raskar.

With S copies of the server's part a round goes through its cohort in turns (`algorithms.split.sequential_turns`). S = m
is SplitFed V1, which is FedAvg on the joint model; S = 1 is V2. If the client's part is passed on too, from client to
client, the algorithm is the relay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, models, server, tree, validate
from fedjax_sim.algorithms.split.client import split_client
from fedjax_sim.algorithms.split.loss import Split, split_of
from fedjax_sim.algorithms.split.sequential_turns import in_turns
from fedjax_sim.models import Model
from fedjax_sim.network import Link
from fedjax_sim.round.counts import from_int
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.transform.chain import identity, plain_wire
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    ClientUpdate,
    Evaluated,
    Metric,
    PyTree,
    Sampler,
    ServerUpdate,
    UpdateTransform,
    Wire,
)
from fedjax_sim.validate import FromData

PEER = Metric("peer_bytes", "besides, parts handed on to peers", "bytes", besides=True)


class RelayOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` without `weighting`, and the execution options of `federated`."""


class SplitFedOptions(client.LocalOptions, ExecutionOptions, total=False):
    """The options of `client.work`, and the execution options of `federated`."""


@validate.named_arguments
def splitfed(
    model: Model,
    loss: Annotated[Callable, FromData("loss")],
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    cut: str | Sequence[str],
    u_shaped: bool = False,
    link: Link | None = None,
    decorrelation: float = 0.0,
    server_copies: int | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    transform: UpdateTransform | None = None,
    **options: Unpack[SplitFedOptions],
) -> Algorithm:
    """Makes SplitFed: clients train their part of the model together with a server that holds the other parts.

    In the info, `uplink_bytes` and `downlink_bytes` count the clients' parts at the end and at the beginning of a
    round; the server's part never leaves the server. `split_up_bytes` and `split_down_bytes` count the messages of
    local steps.

    Args:
      model, loss, cut, u_shaped, link, decorrelation: as in `split_loss`.
      sampler, server_optimizer, aggregator, nonfinite, plan, mesh: as in `fedavg`.
      optimizer: of clients and server, as in `split_client`.
      server_copies: S, the number of copies of the server's part. None: a copy for each client (V1), and all clients
        train at once. 1: V2, in which the server's part goes through the cohort client by client, in the cohort's
        order. Numbers between make as many chains of clients as there are copies.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform: of the client's part, on its way up; without noise.

    Returns: an Algorithm, whose model is the joint model. `Evaluated.model` uses the links, and so do the evaluations
    of `fedjax-sim run`.

    Raises: ValueError for samplers whose rounds take time (a clock would price the whole model at the client: see
    `split_costs`) or have late clients (`split_client`), for a transform with noise, and with `server_copies` for a
    transform with a memory.

    Guarantees: V1 is FedAvg on the joint model bit for bit, and FedSGD with one step
    (tests/algorithms/split/test_splitfed.py ::test_version_one_is_fedavg, ::test_one_step_is_fedsgd); V2 and copies
    follow NumPy's loop (::test_copies_by_hand); bytes are those of the clients' parts
    (::test_only_the_clients_part_travels); the order of a cohort counts only where clients follow one another
    (tests/laws/test_turns.py::test_order).

    References: Thapa, Arachchige, Camtepe and Sun 2022 (SplitFed), algorithms 1 and 2; Gawali et al. 2021 for copies.
    """
    split = split_of(models.cut(model, cut, u_shaped=u_shaped, name="cut"), loss, link, None, decorrelation)
    work, execution = client.local_work(options)
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    part_transform = identity() if transform is None else transform
    parts = (split_client(split, optimizer, work), rule, _sends_part(step, split), _on_part(part_transform, split))
    algorithm = _federated(sampler, parts, split, **execution)
    if server_copies is None:
        return algorithm
    validate.integer("server_copies", server_copies, 1, sampler.num_slots)
    if transform is not None:
        _check_memoryless(model, part_transform, split)
    return in_turns(algorithm, split, server_copies)


@validate.named_arguments
def split_learning(
    model: Model,
    loss: Annotated[Callable, FromData("loss")],
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    cut: str | Sequence[str],
    u_shaped: bool = False,
    link: Link | None = None,
    decorrelation: float = 0.0,
    handover: Literal["server", "peer"] = "server",
    **options: Unpack[RelayOptions],
) -> Algorithm:
    """Makes the relay of split learning: clients train the model one after the other, each together with the server.

    In the order of the cohort, a client receives the client's part from the client before, does its local steps, and
    passes the part on. The optimisers begin anew with each client.

    Args:
      model, loss, cut, u_shaped, link, decorrelation: as in `split_loss`.
      sampler: draws the clients of a round, in their order; `sampling.full`, for example.
      optimizer: of clients and server, as in `split_client`.
      handover: how a client's part reaches the next client. "server": by way of the server (`uplink_bytes`,
        `downlink_bytes`). "peer": straight from client to client (`peer_bytes`).
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      nonfinite, plan, mesh: as in `fedavg`.

    Returns: an Algorithm, as of `splitfed`. A client whose result is not finite passes on what it received.

    Raises: ValueError for samplers whose rounds take time or have late clients, as in `splitfed`.

    Guarantees: with SGD it is centralised SGD on the clients' batches one after the other
    (tests/algorithms/split/test_splitfed.py::test_relay_is_centralised_sgd); both kinds of handover train the same
    model (::test_handover).

    References: Gupta and Raskar 2018, section 3.3 (peer to peer) and 3.4; Vepakomma et al. 2018.
    """
    split = split_of(models.cut(model, cut, u_shaped=u_shaped, name="cut"), loss, link, None, decorrelation)
    work, execution = client.local_work(options)
    local = split_client(split, optimizer, work)
    part_transform = _on_part(identity(), split)
    step = _sends_part(server.optimizer(optax.sgd(1.0)), split)
    if handover == "peer":
        # Nothing passes the server; the client counts the bytes that it sends to the next client.
        local = _sending_to_peer(local, split)
        nothing = Wire(0, 0)
        part_transform = part_transform._replace(wire=lambda *_: nothing)
        step = step._replace(wire=lambda spec: nothing)
    algorithm = _federated(sampler, (local, aggregation.mean(), step, part_transform), split, **execution)
    return in_turns(algorithm, split, 1, relay=True)


def _federated(sampler: Sampler, parts: tuple, split: Split, **execution: Unpack[ExecutionOptions]) -> Algorithm:
    """Makes an algorithm by `federated`, whose evaluations use the links where these change outputs."""
    algorithm = federated(sampler, *parts, **execution)
    return algorithm._replace(evaluated=Evaluated(model=split.model if split.changes_outputs else None))


def _client_part(split: Split, params: PyTree) -> PyTree:
    """Returns the client's part of the joint parameters, or of their specs."""
    return split.cut.split(params)[0]


def _sends_part(step: ServerUpdate, split: Split) -> ServerUpdate:
    """Makes a server's broadcast count as the client's part alone: the other parts stay at the server."""
    return step._replace(wire=lambda spec: plain_wire(_client_part(split, spec)))


def _on_part(transform: UpdateTransform, split: Split) -> UpdateTransform:
    """Applies a transform to the client's part alone; the other parts of an update are at the server already.

    Args:
      transform: of the update of the client's part, without noise.
      split: says which parameters are the client's part.

    Returns: an UpdateTransform of updates of the joint model. Its bytes are those of the client's part.
    """
    validate.part("transform", transform, UpdateTransform)
    if transform.facts.noise is not None:
        hint = "The servers' parts are trained on the same examples, and have no noise."
        validate.fail("transform", "one without noise", transform.facts.noise.mechanism, hint)

    def with_client_part(update, client_part):
        return split.cut.join((client_part, *split.cut.split(update)[1:]))

    def on_client(key, update, state, memory):
        client_part, memory, measured = transform.on_client(key, _client_part(split, update), state, memory)
        return with_client_part(update, client_part), memory, measured

    def on_server(key, cohort, aggregate, *arguments):
        client_part, *state_and_metrics = transform.on_server(key, cohort, _client_part(split, aggregate), *arguments)
        return with_client_part(aggregate, client_part), *state_and_metrics

    def wire(update_spec, sent):
        client_part = _client_part(split, update_spec)
        return transform.wire(client_part, plain_wire(client_part))

    transform_of_joint = transform._replace(
        init=lambda spec: transform.init(_client_part(split, spec)),
        init_client=lambda spec: transform.init_client(_client_part(split, spec)),
        on_client=on_client,
        on_server=on_server,
        wire=wire,
        squared_error=None,
    )
    # Facts about the client's part do not hold for the joint update.
    return transform_of_joint.stating(l2_bound=None, nonexpansive=False, exact_error=False, integer_range=None)


def _check_memoryless(model: Model, transform: UpdateTransform, split: Split) -> None:
    """Raises ValueError for a transform with a memory, which a round in turns would not keep."""
    spec = _client_part(split, jax.eval_shape(lambda: model.init(jax.random.key(0))[0]))
    if jax.tree.leaves(jax.eval_shape(lambda: transform.init_client(spec))):
        validate.fail("transform", "one without a memory, with server_copies", "one with a memory")


def _sending_to_peer(local: ClientUpdate, split: Split) -> ClientUpdate:
    """Makes a client count the bytes of its part, which it sends to the next client."""

    def apply(key, broadcast, state, data):
        report, state = local.apply(key, broadcast, state, data)
        words = from_int(tree.num_bytes(_client_part(split, broadcast)))
        is_sent = (report.weight > 0).astype(jnp.uint32)
        return report._replace(counts=report.counts | {"peer_bytes": words * is_sent}), state

    return local._replace(apply=apply).stating(metrics=(*local.facts.metrics, PEER))
