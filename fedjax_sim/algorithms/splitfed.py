"""Split learning over many clients: SplitFed (V1, V2, several server copies), and the relay of Gupta and Raskar.

With S copies of the server's part, a round has ceil(m / S) turns. In a turn each copy serves one client: its local
steps move the copy and the client's own part, and the copy goes on with the next client. At the end the clients' parts
are aggregated, and so are the copies. S = m is SplitFed V1, FedAvg on the joint model; S = 1 is V2; and if the client's
part goes on too, from client to client, it is the relay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from fedjax_sim import aggregation, client, engine, server, tree, validate
from fedjax_sim.algorithms.collect import collect, everything
from fedjax_sim.algorithms.compatibility import check_distinct
from fedjax_sim.algorithms.costs import metrics_of, wires
from fedjax_sim.algorithms.federated import federated
from fedjax_sim.algorithms.round import close, invite
from fedjax_sim.algorithms.split import Split, split_client, split_loss
from fedjax_sim.algorithms.state import Bases, Gathered
from fedjax_sim.engine import exact
from fedjax_sim.models import Model
from fedjax_sim.network import Link
from fedjax_sim.prng import stream
from fedjax_sim.transform.chain import identity, plain_wire
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    ClientUpdate,
    Cohort,
    Metric,
    PyTree,
    Received,
    Round,
    Sampler,
    ServerUpdate,
    Star,
    UpdateTransform,
    Wire,
)

__all__ = ["split_learning", "splitfed"]

PEER = Metric("peer_bytes", "clients' parts handed on from client to client", "bytes")


@validate.named_arguments
def splitfed(
    model: Model,
    loss: Callable,
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
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    weighting: str = "examples",
    shuffle: bool = True,
    transform: UpdateTransform | None = None,
    nonfinite: str = "drop",
    plan: engine.Plan | None = None,
    mesh: Mesh | str | None = "all",
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

    Returns: an Algorithm, whose model is the joint one.

    Raises: ValueError for samplers whose rounds take time (a clock would price the whole model at the client: see
    `split_costs`), for a transform with noise, and with `server_copies` for one with a memory.

    Guarantees: V1 is FedAvg on the joint model bit for bit, and FedSGD with one step (tests/algorithms/test_splitfed.py
    ::test_version_one_is_fedavg, ::test_one_step_is_fedsgd); V2 and copies follow NumPy's loop (::test_copies_by_hand);
    bytes are those of the clients' parts (::test_only_the_clients_part_travels).

    References: Thapa, Arachchige, Camtepe and Sun 2022 (SplitFed), algorithms 1 and 2; Gawali et al. 2021 for copies.
    """
    split = split_loss(model, loss, cut, u_shaped=u_shaped, link=link, decorrelation=decorrelation)
    work = client.work(
        num_steps=num_steps, num_epochs=num_epochs, batch_size=batch_size, weighting=weighting, shuffle=shuffle
    )
    rule = aggregation.mean() if aggregator is None else aggregator
    step = server.optimizer(optax.sgd(1.0) if server_optimizer is None else server_optimizer)
    inner = identity() if transform is None else transform
    parts = (split_client(split, optimizer, work), rule, _sends_part(step, split), _on_part(inner, split))
    made = _federated(sampler, parts, nonfinite, plan, mesh)
    if server_copies is None:
        return made
    validate.integer("server_copies", server_copies, 1, sampler.num_slots)
    if transform is not None:
        _check_memoryless(model, inner, split)
    return _in_turns(made, split, server_copies, relay=False)


@validate.named_arguments
def split_learning(
    model: Model,
    loss: Callable,
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    cut: str | Sequence[str],
    u_shaped: bool = False,
    link: Link | None = None,
    decorrelation: float = 0.0,
    handover: str = "server",
    num_steps: int | None = None,
    num_epochs: int | None = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    nonfinite: str = "drop",
    plan: engine.Plan | None = None,
    mesh: Mesh | str | None = "all",
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

    Returns: an Algorithm. A client whose result is not finite hands on what it got.

    Raises: ValueError as `splitfed`.

    Guarantees: SGD is that on the clients' batches one after the other
    (tests/algorithms/test_splitfed.py::test_relay_is_centralised_sgd); both ways of handing over train the same model
    (::test_handover).

    References: Gupta and Raskar 2018, section 3.3 (peer to peer) and 3.4; Vepakomma et al. 2018.
    """
    validate.one_of("handover", handover, ("server", "peer"))
    split = split_loss(model, loss, cut, u_shaped=u_shaped, link=link, decorrelation=decorrelation)
    work = client.work(num_steps=num_steps, num_epochs=num_epochs, batch_size=batch_size, shuffle=shuffle)
    trains, sends = split_client(split, optimizer, work), _on_part(identity(), split)
    step = _sends_part(server.optimizer(optax.sgd(1.0)), split)
    if handover == "peer":
        trains, nothing = _hands_on(trains, split), Wire(0, 0)
        sends, step = sends._replace(wire=lambda *_: nothing), step._replace(wire=lambda spec: nothing)
    made = _federated(sampler, (trains, aggregation.mean(), step, sends), nonfinite, plan, mesh)
    return _in_turns(made, split, 1, relay=True)


def _federated(sampler: Sampler, parts: tuple, nonfinite: str, plan: engine.Plan | None, mesh) -> Algorithm:
    validate.part("sampler", sampler, Sampler)
    if sampler.devices is not None:
        hint = "Its clock would price the whole model at the client; algorithms.split_costs has the time of a step."
        validate.fail("sampler", "one whose rounds take no time", "one with a clock", hint)
    return federated(sampler, *parts, nonfinite=nonfinite, plan=plan, mesh=mesh)


def _own(split: Split, params: PyTree) -> PyTree:
    """The client's part of the joint parameters, or of their specs."""
    return split.cut.split(params)[0]


def _sends_part(step: ServerUpdate, split: Split) -> ServerUpdate:
    """The same server, which sends clients their part alone."""
    return step._replace(wire=lambda spec: plain_wire(_own(split, spec)))


def _on_part(transform: UpdateTransform, split: Split) -> UpdateTransform:
    """The transform, of the client's part alone; the others' parts are at the server already."""
    validate.part("transform", transform, UpdateTransform)
    if transform.noise is not None:
        hint = "The servers' parts are trained on the same examples, and have no noise."
        validate.fail("transform", "one without noise", transform.noise.mechanism, hint)

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

    return transform._replace(
        init=lambda spec: transform.init(_own(split, spec)),
        init_client=lambda spec: transform.init_client(_own(split, spec)),
        on_client=on_client,
        on_server=on_server,
        wire=wire,
        l2_bound=None,
        nonexpansive=False,
        squared_error=None,
        exact_error=False,
        integer_range=None,
    )


def _check_memoryless(model: Model, transform: UpdateTransform, split: Split) -> None:
    spec = _own(split, jax.eval_shape(lambda: model.init(jax.random.key(0))[0]))
    if jax.tree.leaves(jax.eval_shape(lambda: transform.init_client(spec))):
        validate.fail("transform", "one without a memory, with server_copies", "one with a memory")


def _hands_on(trains: ClientUpdate, split: Split) -> ClientUpdate:
    """The same client, which sends its part to the next one."""

    def apply(key, broadcast, state, data):
        report, state = trains.apply(key, broadcast, state, data)
        size = jnp.array(divmod(8 * tree.num_bytes(_own(split, broadcast)) // 8, 1 << 32), jnp.uint32)
        there = (report.weight > 0).astype(jnp.uint32)
        return report._replace(counts=report.counts | {"peer_bytes": size * there}), state

    return trains._replace(apply=apply, metrics=(*trains.metrics, PEER))


def _in_turns(made: Algorithm, split: Split, copies: int, *, relay: bool) -> Algorithm:
    """The algorithm whose round goes through its cohort in turns of so many clients, as this module says."""
    star = made.parts
    check_distinct(star.sampler, "A client is served once a round.")
    keeping = star._replace(aggregator=everything(star))

    def step(key, state, population):
        cohort, sampler_state = invite(star, key, state)
        gathered = _turns(star, keeping, split, copies, relay, key, cohort, state, population)
        return close(star, key, cohort, gathered, state._replace(sampler=sampler_state))

    parts = star._replace(complete=False)  # its rounds are turns, which no edge above would make
    return made._replace(step=step, observe=None, parts=parts, metrics=metrics_of(star))


def _turns(
    star: Star, keeping: Star, split: Split, copies: int, relay: bool, key, cohort: Cohort, state, population
) -> Gathered:
    """`Gathered` of a cohort that goes through the servers' copies; its messages end at the copies' last models."""
    num_slots = cohort.ids.shape[0]
    turns = -(-num_slots // copies)
    room = jnp.arange(turns * copies, dtype=jnp.int32).reshape(turns, copies)
    place = jnp.minimum(room, num_slots - 1)
    there = room < num_slots
    broadcast = engine.steady(star.server.broadcast)(state.server)
    models = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (copies, *x.shape)), broadcast)

    def turn(models, slots):
        at, real = slots
        work = None if cohort.work is None else cohort.work[at]
        some = Cohort(cohort.ids[at], cohort.invited[at] & real, cohort.reported[at] & real, work=work)
        bases = Bases(models, jnp.arange(copies, dtype=jnp.int32), jnp.ones(copies))
        found = collect(keeping, key, some, state, population, bases)
        updates, weights = engine.all_rows(found.carry, jnp.arange(copies, dtype=jnp.int32))

        def moved(models, updates):
            after = jax.tree.map(lambda x, u: x + u.astype(x.dtype), models, updates)
            if relay:
                return after
            own = jax.vmap(lambda x: _own(split, x))(models)
            return jax.vmap(split.cut.join)((own, *jax.vmap(split.cut.split)(after)[1:]))

        losses = () if found.losses is None else found.losses
        told = (updates, weights, found.arrived, found.dropped, losses)
        rest = (found.means, found.counts, found.num_arrived, found.num_dropped)
        return engine.steady(moved)(models, updates), (told, rest)

    last, (told, rest) = jax.lax.scan(turn, models, (place, there))
    updates, weights, arrived, dropped, losses = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_slots], told)
    means, counts, num_arrived, num_dropped = rest
    means = jax.lax.scan(lambda a, b: (exact.merge(a, b), None), *_first(means))[0]
    sums = [jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), x) for x in (counts, num_arrived, num_dropped)]
    messages = engine.steady(lambda *x: _ends(split, copies, relay, *x))(broadcast, last, updates)
    round = Round(*cohort, broadcast, state.aggregator)
    carry = star.aggregator.init(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), messages), num_slots
    )

    def accumulate(carry, one):
        received = Received(*jax.tree.map(lambda x: x[None], one))
        return star.aggregator.accumulate(stream(key, "aggregation"), round, carry, received), None

    positions = jnp.arange(num_slots, dtype=jnp.int32)
    rows = (messages, weights, cohort.ids, positions)
    carry = jax.lax.scan(engine.steady(accumulate), carry, rows)[0]
    stores = [engine.take(store, cohort.ids)[::-1] for store in (state.clients, state.memory)]
    losses = None if star.sampler.observe is None else losses
    up_down = wires(star, broadcast, population)
    return Gathered(carry, means, sums[0], arrived, dropped, *sums[1:], *stores, losses, broadcast, *up_down)


def _ends(split: Split, copies: int, relay: bool, broadcast: PyTree, last: PyTree, updates: PyTree) -> PyTree:
    """The messages [m, ...]: a client's own part moved as it says, all else to where its copy ended."""
    slots = jax.tree.leaves(updates)[0].shape[0]
    ends = jax.tree.map(lambda x, y: (x - y[None])[jnp.arange(slots) % copies], last, broadcast)
    if relay:
        return ends
    own = jax.vmap(lambda x: _own(split, x))(updates)
    return jax.vmap(split.cut.join)((own, *jax.vmap(split.cut.split)(ends)[1:]))


def _first(stacked: PyTree) -> tuple[PyTree, PyTree]:
    """(the first of stacked pytrees, the others)."""
    return jax.tree.map(lambda x: x[0], stacked), jax.tree.map(lambda x: x[1:], stacked)
