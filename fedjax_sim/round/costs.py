"""Counts the costs of a round: bytes, steps and operations of its clients, and messages that could not be used."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, tree, validate
from fedjax_sim.engine.jaxpr import walk
from fedjax_sim.network.devices import SATURATED, num_saturated
from fedjax_sim.population.protocol import num_rows, sizes_of
from fedjax_sim.transform.chain import plain_wire, wire_of
from fedjax_sim.types import (
    Array,
    ClientData,
    Cohort,
    Count,
    Groups,
    Metric,
    Population,
    PyTree,
    Star,
    TimeInside,
    Wire,
    Work,
)

ID = jax.ShapeDtypeStruct((), jnp.int32)
NAMED_CLIENTS = 8  # an error names at most so many clients
ROUND_METRICS = (
    Metric("clients_invited", "clients invited", "count"),
    Metric("clients_reported", "updates used", "count"),
    Metric("uplink_bytes", "sent up by clients", "bytes"),
    Metric("downlink_bytes", "sent down to clients", "bytes"),
    Metric("skipped_rounds", "rounds skipped", "count"),
    Metric("dropped_clients", "updates dropped for not being finite", "count"),
    Metric("uplink_coded_bytes", "the same under an entropy code, at most", "bytes", instead="uplink_bytes"),
    Metric("wasted_bytes", "of them too late to count", "bytes"),
)


def own_data(star: Star, population: Population, id: Array) -> ClientData | Population:
    """The data of client `id`, or its group of clients where the star's clients are federations."""
    return _data_of(star, population, id) if star.client.federation is None else group_of(population, id)


def _data_of(star: Star, population: Population, id: Array) -> ClientData:
    """The data of client `id`; one that reads the number of the round (`ClientFacts.reads_round`) is given round 0."""
    data = population.client(id)
    return data._replace(round=jnp.zeros((), jnp.int32)) if star.client.facts.reads_round else data


def group_of(population: Population, id: Array) -> Population:
    """The group of clients of federation `id`."""
    if not isinstance(population, Groups):
        hint = "Its clients are federations: population.grouped makes groups ([data.with_groups]), around all wrappers."
        validate.fail("population", "one of groups (`types.Groups`)", type(population).__name__, hint, TypeError)
    return population.group(id)


def own_state(star: Star, broadcast: PyTree, population: Population) -> PyTree:
    """The state that each client has before its first round."""
    if star.client.federation is None:
        return star.client.init(broadcast)
    group = jax.eval_shape(lambda people, id: own_data(star, people, id), population, ID)
    return star.client.init(broadcast, group)


def message_spec(star: Star, broadcast: PyTree, population: Population) -> PyTree:
    """Shapes and dtypes of one client's update, before the transform; nothing is computed.

    Args:
      star: the parts; the shapes are those of client 0, and hold for all clients.
      broadcast: what the clients receive, as arrays or specs.
      population: arrays or specs.

    Returns: a pytree of `jax.ShapeDtypeStruct`.

    Guarantees: these are the shapes that are sent, also by clients that send more than the model
    (tests/laws/test_foreign_updates.py::test_foreign_updates_are_refused).
    """

    def update(broadcast, population):
        data = own_data(star, population, jnp.zeros((), jnp.int32))
        state = own_state(star, broadcast, population)
        return jax.jit(star.client.apply)(jax.random.key(0), broadcast, state, data)[0].update

    return jax.eval_shape(update, broadcast, population)


def plan_of(star: Star, broadcast: PyTree, population: Population) -> engine.Plan:
    """The plan (clients vmapped, messages summed at once) that fits the clients' memory, messages and cohort.

    On a CPU, clients with XLA's convolutions train one after the other. So do clients that are federations: their plan
    is that of their own clients, if their rounds can be planned.

    Args:
      star, population: as for `message_spec`.
      broadcast: arrays or specs; nothing is computed.

    Guarantees: the plan is the same for any number of devices (tests/round/test_costs.py::test_plans_fit_the_work), and
    has one lane on a CPU for XLA's convolutions alone (::test_plans_of_convolutions).
    """

    if (inside := star.client.federation) is not None and inside.client.apply is None:
        return engine.Plan(1, 1)
    if inside is not None:
        group = jax.eval_shape(lambda people: own_data(star, people, jnp.zeros((), jnp.int32)), population)
        inner_broadcast = jax.eval_shape(lambda params: inside.server.broadcast(inside.server.init(params)), broadcast)
        return plan_of(inside, inner_broadcast, group)

    def local(broadcast, population, id):
        data = own_data(star, population, id)
        report, _ = star.client.apply(jax.random.key(0), broadcast, star.client.init(broadcast), data)
        return report.update

    of_client_0 = partial(local, id=jnp.zeros((), jnp.int32))
    program, update = jax.make_jaxpr(of_client_0, return_shape=True)(tree.spec(broadcast), population)
    if any(x.primitive is jax.lax.conv_general_dilated_p for x in walk(program)):
        # XLA:CPU is fast at the convolutions of one client, and slow at those of several under a `vmap`.
        if engine.target() == "cpu":
            return engine.Plan(1, 1)
        # Under a `vmap` other programs compute convolutions, which take more memory.
        one_lane = jnp.zeros(1, jnp.int32)
        program = jax.make_jaxpr(jax.vmap(local, (None, None, 0)))(tree.spec(broadcast), population, one_lane)
    working_bytes = engine.working_bytes(program)
    return engine.plan_for(update, working_bytes=working_bytes, num_slots=star.sampler.num_slots)


def client_wires(star: Star, broadcast: PyTree, population: Population) -> tuple[Wire, Wire]:
    """The sizes of the message that a client sends, and of the broadcast that it receives.

    The message is counted after the transform. An aggregator may change both sizes: a secure sum adds keys and shares,
    and may have the server send something beside the broadcast or in its place.

    Args: as for `message_spec`.

    Returns: (`Wire` of a message, `Wire` of what a client receives), in a cohort of all slots.

    Guarantees: a round's bytes are these times the messages
    (tests/sampling/test_participation.py::test_late_messages_are_counted), both ways
    (tests/aggregation/test_wires.py).
    """
    update = message_spec(star, broadcast, population)
    return _aggregator_wires(star, update, _plain_wires(star, update, broadcast), star.sampler.num_slots)


def _plain_wires(star: Star, update: PyTree, broadcast: PyTree) -> tuple[Wire, Wire]:
    """The sizes of a message after the transform, and of the broadcast, before the aggregator changes them."""
    broadcast_wire = plain_wire if star.server.wire is None else star.server.wire
    return wire_of(star.transform, update), broadcast_wire(broadcast)


def _aggregator_wires(
    star: Star, update: PyTree, plain_wires: tuple[Wire, Wire], num_invited: int
) -> tuple[Wire, Wire]:
    """The same sizes as the aggregator's protocol makes them, in a cohort of `num_invited` clients."""
    rules = star.aggregator.facts.wire, star.aggregator.facts.wire_down
    pairs = zip(rules, plain_wires, strict=True)
    up, down = (wire if rule is None else rule(update, wire, num_invited) for rule, wire in pairs)
    return up, down


def bytes_by_invited(star: Star, broadcast: PyTree, population: Population) -> np.ndarray | None:
    """The bytes that one client sends and receives, for each number of invited clients, where that number matters.

    In a secure sum, for example, a client receives a key of every other invited client.

    Args: as for `message_spec`.

    Returns: [m + 1, 3] int64; row i holds the bytes in a cohort of i invited clients: of a message, of the same message
    under an entropy code, and of what a client receives. None where all rows would be equal: `client_wires` then says
    everything.

    Guarantees: in a secure sum with Poisson cohorts, the bytes of a round are those of a cohort with as many slots as
    clients were invited (tests/aggregation/test_wires.py::test_keys_of_those_who_are_invited).
    """
    if star.aggregator.facts.wire is None and star.aggregator.facts.wire_down is None:
        return None
    update = message_spec(star, broadcast, population)
    plain_wires = _plain_wires(star, update, broadcast)
    num_slots = star.sampler.num_slots
    pairs = [_aggregator_wires(star, update, plain_wires, max(number, 1)) for number in range(num_slots + 1)]
    bits = np.array([(up.bits, up.coded, down.bits) for up, down in pairs], np.int64)
    return None if (bits == bits[0]).all() else -(-bits // 8)  # a message is whole bytes, rounded up


def work_of(star: Star, params: PyTree, population: Population) -> Work:
    """The cost of one round to one client, in bytes, steps and floating-point operations.

    The local work is traced and its operations are counted; nothing is run. A client that is a federation computes
    nothing itself, and its rounds are `Work.inside`.

    Args:
      star: the parts.
      params: the model's parameters, or their specs.
      population: all clients; client 0 stands for every client. Operations are counted over all its rows, padding
        included.

    Returns: `Work`; `network.load_of` makes of it the load of a client with n examples.

    Raises: ValueError for a client with a loop of unknown length that does not state its number of steps.

    Guarantees: bytes are counted after both transforms, and steps are those of the client
    (tests/round/test_costs.py::test_quadratic_clients_have_known_work); operations grow with the steps as counted
    by hand (tests/round/test_costs.py).

    >>> import jax.numpy as jnp, optax
    >>> from fedjax_sim import algorithms, population, sampling
    >>> clients, start = population.quadratic_population([1.0] * 4, [0.0, 1.0, 2.0, 3.0]), {"w": jnp.zeros(1)}
    >>> made = algorithms.fedavg(population.quadratic_loss, sampling.full(4), optax.sgd(0.1), num_steps=3, batch_size=1)
    >>> work_of(made.parts, start, clients)[:3]
    (4, 4, 3)
    """
    broadcast = jax.eval_shape(lambda params: star.server.broadcast(star.server.init(params)), params)
    up, down = client_wires(star, broadcast, population)
    bytes_up, bytes_down = (-(-wire.bits // 8) for wire in (up, down))
    examples = partial(sizes_of, population)
    by_invited = bytes_by_invited(star, broadcast, population)
    by_invited = None if by_invited is None else by_invited[:, [0, 2]]
    if star.client.federation is not None:
        time_inside = star.client.time_inside
        inside = None if time_inside is None else partial(_asked_inside, time_inside, broadcast, population)
        return Work(
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            steps=None,
            flops=0.0,
            examples=examples,
            inside=inside,
            by_invited=by_invited,
        )

    def local(broadcast, population, steps):
        data = _data_of(star, population, jnp.zeros((), jnp.int32))._replace(work=steps)
        return star.client.apply(jax.random.key(0), broadcast, own_state(star, broadcast, population), data)

    facts = star.client.facts
    # The number of steps is an argument of the program, so the steps are a loop of unknown length in it. Counting with
    # no turn and with one turn of such loops tells the cost of a step from what is done once.
    steps = None if facts.all_steps is None else jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(local)(tree.spec(broadcast), population, steps)
    flops_without_steps, flops_with_one_step = (engine.flops(program, turns) for turns in (0, 1))
    step_flops = flops_with_one_step - flops_without_steps
    if facts.all_steps is None and step_flops:
        hint = "Its local work is a loop of unknown length, which would be priced as one step: let it state the fact "
        hint += "ClientFacts.all_steps, the number of steps or (examples) -> steps."
        validate.fail("client", "one whose number of local steps is known, for time or energy follows", "none", hint)
    rows = num_rows(population) if facts.num_steps is None else None
    return Work(
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        steps=facts.all_steps,
        flops=float(flops_with_one_step),
        step_flops=float(step_flops),
        rows=rows,
        examples=examples,
        by_invited=by_invited,
    )


def _asked_inside(
    time_inside: TimeInside, broadcast: PyTree, population: Population, flops_scale: float, bytes_scale: float
) -> PyTree:
    """The work that the rounds inside of each client ask of its own clients, leaves [N, ...] (`TimeInside.asked`)."""

    def asked_of_client(id):
        return time_inside.asked(broadcast, group_of(population, id), flops_scale, bytes_scale)

    return jax.vmap(asked_of_client)(jnp.arange(population.size, dtype=jnp.int32))


def senders(cohort: Cohort) -> Array:
    """Returns which slots sent a message, in time or too late: [m] bool.

    >>> cohort = Cohort(jnp.arange(2), jnp.array([True, True]), jnp.array([False, True]))
    >>> senders(cohort).tolist(), senders(cohort.timed(sent=cohort.invited)).tolist()  # the first message was late
    ([False, True], [True, True])
    """
    return cohort.reported if cohort.timing.sent is None else cohort.timing.sent


def traffic(cohort: Cohort, up: Wire, down: Wire, by_invited: np.ndarray | None = None) -> dict[str, Count]:
    """Counts the bytes that one pass over a cohort sends, messages that came too late included.

    Args:
      cohort: says which slots were invited, reported and sent a message.
      up, down: sizes of one message and of one broadcast, in a cohort of all slots.
      by_invited: `bytes_by_invited`; None: the sizes hold for any number of invited clients.

    Returns: `uplink_bytes` and `downlink_bytes`; `uplink_coded_bytes` where an entropy code would make messages
    smaller; `wasted_bytes`, those of late messages, where the sampler states who sent (`Timing.sent`).

    Guarantees: every message that was sent is counted
    (tests/sampling/test_participation.py::test_late_messages_are_counted).
    """
    who = cohort.invited, cohort.reported, senders(cohort)
    num_invited, num_reported, num_sent = (x.sum(dtype=jnp.int32) for x in who)
    # A `Count` keeps the number of messages and the bytes of one message apart: their product may exceed 32 bits.
    units = (Count.of(num_sent, -(-bits // 8)).unit for bits in (up.bits, up.coded, down.bits))
    if by_invited is not None:
        words = np.stack([by_invited >> 32, by_invited & 0xFFFFFFFF], -1).astype(np.uint32)
        units = jnp.asarray(words)[num_invited]
    plain_bytes, coded_bytes, received_bytes = units
    counts = {"uplink_bytes": Count(num_sent, plain_bytes), "downlink_bytes": Count(num_invited, received_bytes)}
    if up.coded < up.bits:
        counts["uplink_coded_bytes"] = Count(num_sent, coded_bytes)
    if cohort.timing.sent is not None:
        counts["wasted_bytes"] = Count(num_sent - num_reported, plain_bytes)
    return counts


def spending_metrics(cohort: Cohort) -> dict[str, Array]:
    """Metrics of the energy and time that a cohort's devices spend, where rounds take time (`Timing.spent`).

    Args:
      cohort: of one round; without times its `timing.spent` is None.

    Returns: {} without times, else four scalars:
      `joules`: the energy of all invited clients.
      `wasted_joules`: the part spent by invited clients who do not report.
      `utilisation`: the share of time in which invited clients are busy, until the last client is done; 0 where nobody
        is invited.
      `saturated_clients`: the number of invited clients who are too slow for the clock.

    Guarantees: joules, wasted joules and utilisation of a cohort equal closed forms up to rounding, and all metrics of
    an empty cohort are 0 (tests/sampling/time/test_clock.py::test_energy_and_utilisation).
    """
    if cohort.timing.spent is None:
        return {}
    spent = cohort.timing.spent
    joules = spent.joules
    busy_ticks = spent.total.astype(jnp.float32)
    wasted_joules = jnp.where(cohort.reported, 0, joules)
    available_ticks = busy_ticks.max(initial=0) * cohort.invited.sum(dtype=jnp.float32)
    utilisation = busy_ticks.sum() / jnp.where(available_ticks > 0, available_ticks, 1)
    saturated = {SATURATED.name: num_saturated(spent, cohort.invited)}
    energy = {"joules": joules.sum(), "wasted_joules": wasted_joules.sum()}
    return energy | {"utilisation": utilisation} | saturated


def unusable(star: Star, cohort: Cohort, dropped: Array, num_dropped: Array) -> dict[str, Array]:
    """Counts the messages that could not be used, and names their clients where such messages are an error.

    Args:
      star: the parts; `star.execution.nonfinite` says whether an unusable message is an error.
      cohort: says which client is in which slot.
      dropped: [m] bool, slots whose message was not usable.
      num_dropped: [] int32, the number of these slots.

    Returns: `dropped_clients`, [] int32; with `nonfinite="error"` also `error_ids`, [8] int32: the first such clients,
    filled up with -1. `run` stops on these ids and removes them from the log.

    Guarantees: a client that does not exist is counted too
    (tests/laws/test_nonfinite.py::test_a_client_who_does_not_exist_is_counted).
    """
    info = {"dropped_clients": num_dropped}
    if star.execution.nonfinite == "error":
        # False sorts before True, so a stable sort puts the dropped slots first, in the cohort's order.
        first_slots = jnp.argsort(~dropped, stable=True)[:NAMED_CLIENTS]
        info["error_ids"] = jnp.where(dropped[first_slots], cohort.ids[first_slots], -1)
    return info


def metrics_of(star: Star) -> tuple[Metric, ...]:
    """The metrics that the parts of a star state for a round's info, after those that every round has.

    Where two parts use the same name, the part's name stands before it, as in the info.
    """
    # Part name -> metric name -> Metric.
    metrics_by_part = {
        name: {x.name: x for x in getattr(getattr(part, "facts", part), "metrics", ())}
        for name, part in star._asdict().items()
    }
    joined = tree.joined_metrics({name: metrics for name, metrics in metrics_by_part.items() if metrics})
    return (*ROUND_METRICS, *(metric._replace(name=name) for name, metric in joined.items()))
