"""Split learning over many clients: SplitFed (V1, V2, several server copies), and the relay of Gupta and Raskar.

With S copies of the server's part a round has turns (`algorithms.split.sequential_turns`): S = m is SplitFed V1, FedAvg
on the joint model; S = 1 is V2; and if the client's part goes on too, from client to client, it is the relay.
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

__all__ = ["split_learning", "splitfed"]

PEER = Metric("peer_bytes", "besides, parts handed on to peers", "bytes", besides=True)


class RelayOptions(client.LocalSteps, ExecutionOptions, total=False):
    """The options of `client.work` without a weight, and how a round is carried out."""


class SplitFedOptions(client.LocalOptions, ExecutionOptions, total=False):
    """The options of `client.work`, and how a round is carried out."""


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
    """SplitFed: clients train their part of the model in parallel with a server that has the rest.

    `uplink_bytes` and `downlink_bytes` are those of the clients' parts at the beginning and the end of a round, as the
    server's part never leaves it; `split_up_bytes` and `split_down_bytes` those of the local steps.

    Args:
      model, loss, cut, u_shaped, link, decorrelation: as in `split_loss`.
      sampler, server_optimizer, aggregator, nonfinite, plan, mesh: as in `fedavg`.
      optimizer: of clients and server, as in `split_client`.
      server_copies: S. None: one for each client (V1), who all train at once. 1: V2, in which the server's part goes
        through the cohort client by client, in the cohort's order; between: as many chains as copies.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      transform: of the client's part, on its way up; without noise.

    Returns: an Algorithm, whose model is the joint one; `Evaluated.model` goes through the links, and so do the
    evaluations of `fedjax-sim run`.

    Raises: ValueError for samplers whose rounds take time (a clock would price the whole model at the client: see
    `split_costs`) or have late clients (`split_client`), for a transform with noise, and with `server_copies` for one
    with a memory.

    Guarantees: V1 is FedAvg on the joint model bit for bit, and FedSGD with one step
    (tests/algorithms/split/test_splitfed.py ::test_version_one_is_fedavg, ::test_one_step_is_fedsgd); V2 and copies
    follow NumPy's loop (::test_copies_by_hand); bytes are those of the clients' parts
    (::test_only_the_clients_part_travels); the order of a cohort counts where clients follow one another, and there
    alone (tests/laws/test_turns.py::test_order).

    References: Thapa, Arachchige, Camtepe and Sun 2022 (SplitFed), algorithms 1 and 2; Gawali et al. 2021 for copies.
    """
    split = split_of(models.cut(model, cut, u_shaped=u_shaped, name="cut"), loss, link, None, decorrelation)
    work, execution = client.local_work(options)
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    inner = identity() if transform is None else transform
    parts = (split_client(split, optimizer, work), rule, _sends_part(step, split), _on_part(inner, split))
    made = _federated(sampler, parts, split, **execution)
    if server_copies is None:
        return made
    validate.integer("server_copies", server_copies, 1, sampler.num_slots)
    if transform is not None:
        _check_memoryless(model, inner, split)
    return in_turns(made, split, server_copies)


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
    """Split learning: one model is trained by one client after the other, each with the server.

    A client takes over its part from the client before, in the cohort's order, does its local steps, and hands on. The
    optimisers begin anew with each client.

    Args:
      model, loss, cut, u_shaped, link, decorrelation: as in `split_loss`.
      sampler: `sampling.full`, say; the round's clients, in their order.
      optimizer: of clients and server, as in `split_client`.
      handover: how a client's part goes on: by way of the "server" (`uplink_bytes`, `downlink_bytes`), or straight
        from "peer" to peer (`peer_bytes`).
      num_steps, num_epochs, batch_size, shuffle: as in `client.work`.
      nonfinite, plan, mesh: as in `fedavg`.

    Returns: an Algorithm, as of `splitfed`. A client whose result is not finite hands on what it got.

    Raises: ValueError as `splitfed`.

    Guarantees: SGD is that on the clients' batches one after the other
    (tests/algorithms/split/test_splitfed.py::test_relay_is_centralised_sgd); both ways of handing over train the same
    model (::test_handover).

    References: Gupta and Raskar 2018, section 3.3 (peer to peer) and 3.4; Vepakomma et al. 2018.
    """
    split = split_of(models.cut(model, cut, u_shaped=u_shaped, name="cut"), loss, link, None, decorrelation)
    work, execution = client.local_work(options)
    trains, sends = split_client(split, optimizer, work), _on_part(identity(), split)
    step = _sends_part(server.optimizer(optax.sgd(1.0)), split)
    if handover == "peer":
        trains, nothing = _hands_on(trains, split), Wire(0, 0)
        sends, step = sends._replace(wire=lambda *_: nothing), step._replace(wire=lambda spec: nothing)
    made = _federated(sampler, (trains, aggregation.mean(), step, sends), split, **execution)
    return in_turns(made, split, 1, relay=True)


def _federated(sampler: Sampler, parts: tuple, split: Split, **execution: Unpack[ExecutionOptions]) -> Algorithm:
    """`federated`, whose evaluations go through the links where these change outputs."""
    made = federated(sampler, *parts, **execution)
    return made._replace(evaluated=Evaluated(model=split.model if split.changes_outputs else None))


def _own(split: Split, params: PyTree) -> PyTree:
    """The client's part of the joint parameters, or of their specs."""
    return split.cut.split(params)[0]


def _sends_part(step: ServerUpdate, split: Split) -> ServerUpdate:
    """The same server, which sends clients their part alone."""
    return step._replace(wire=lambda spec: plain_wire(_own(split, spec)))


def _on_part(transform: UpdateTransform, split: Split) -> UpdateTransform:
    """The transform, of the client's part alone; the others' parts are at the server already."""
    validate.part("transform", transform, UpdateTransform)
    if transform.facts.noise is not None:
        hint = "The servers' parts are trained on the same examples, and have no noise."
        validate.fail("transform", "one without noise", transform.facts.noise.mechanism, hint)

    def joined(update, own):
        return split.cut.join((own, *split.cut.split(update)[1:]))

    def on_client(key, update, state, memory):
        own, memory, measured = transform.on_client(key, _own(split, update), state, memory)
        return joined(update, own), memory, measured

    def on_server(key, cohort, aggregate, *rest):
        own, *others = transform.on_server(key, cohort, _own(split, aggregate), *rest)
        return joined(aggregate, own), *others

    def wire(update_spec, sent):
        own = _own(split, update_spec)
        return transform.wire(own, plain_wire(own))

    made = transform._replace(
        init=lambda spec: transform.init(_own(split, spec)),
        init_client=lambda spec: transform.init_client(_own(split, spec)),
        on_client=on_client,
        on_server=on_server,
        wire=wire,
        squared_error=None,
    )
    return made.stating(l2_bound=None, nonexpansive=False, exact_error=False, integer_range=None)


def _check_memoryless(model: Model, transform: UpdateTransform, split: Split) -> None:
    spec = _own(split, jax.eval_shape(lambda: model.init(jax.random.key(0))[0]))
    if jax.tree.leaves(jax.eval_shape(lambda: transform.init_client(spec))):
        validate.fail("transform", "one without a memory, with server_copies", "one with a memory")


def _hands_on(trains: ClientUpdate, split: Split) -> ClientUpdate:
    """The same client, which sends its part to the next one."""

    def apply(key, broadcast, state, data):
        report, state = trains.apply(key, broadcast, state, data)
        size = jnp.array(divmod(tree.num_bytes(_own(split, broadcast)), 1 << 32), jnp.uint32)
        there = (report.weight > 0).astype(jnp.uint32)
        return report._replace(counts=report.counts | {"peer_bytes": size * there}), state

    return trains._replace(apply=apply).stating(metrics=(*trains.facts.metrics, PEER))
