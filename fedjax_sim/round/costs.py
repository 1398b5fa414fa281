"""Costs of a round: bytes, steps and operations of its clients, and messages that could not be used."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, tree, validate
from fedjax_sim.network.devices import SATURATED, num_saturated
from fedjax_sim.population.protocol import num_rows, sizes_of
from fedjax_sim.transform.chain import plain_wire, wire_of
from fedjax_sim.types import Array, ClientData, Cohort, Count, Metric, Population, PyTree, Star, Wire, Work

__all__ = [
    "ROUND_METRICS",
    "bytes_by_invited",
    "client_wires",
    "eight_bytes",
    "message_spec",
    "metrics_of",
    "own_data",
    "own_state",
    "plan_of",
    "spending_metrics",
    "traffic",
    "two_words",
    "unusable",
    "words_of",
    "work_of",
]

ID = jax.ShapeDtypeStruct((), jnp.int32)
NAMED_CLIENTS = 8  # ids that an error names
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
    """What client `id` works on: its data, in round 0 if it reads that, or its group where the star's clients are
    federations."""
    if star.client.federation is None:
        data = population.client(id)
        return data._replace(round=jnp.zeros((), jnp.int32)) if star.client.facts.reads_round else data
    if not hasattr(population, "group"):
        hint = "Its clients are federations: population.grouped makes groups ([data.with_groups]), around all wrappers."
        validate.fail("population", "one of groups (`Population.group`)", type(population).__name__, hint, TypeError)
    return population.group(id)


def own_state(star: Star, broadcast: PyTree, population: Population) -> PyTree:
    """The state that each client starts from."""
    if star.client.federation is None:
        return star.client.init(broadcast)
    group = jax.eval_shape(lambda people, id: own_data(star, people, id), population, ID)
    return star.client.init(broadcast, group)


def message_spec(star: Star, broadcast: PyTree, population: Population) -> PyTree:
    """Shapes and dtypes of one client's update, before the transform; nothing is computed.

    Args:
      star: the parts; the client's shapes are those that it has for client 0.
      broadcast: what the clients receive, as arrays or specs.
      population: arrays or specs.

    Returns: a pytree of `jax.ShapeDtypeStruct`.

    Guarantees: the shapes that are sent, also by clients that send more than the model
    (tests/laws/test_foreign_updates.py::test_foreign_updates_are_refused).
    """

    def update(broadcast, population):
        data = own_data(star, population, jnp.zeros((), jnp.int32))
        state = own_state(star, broadcast, population)
        return jax.jit(star.client.apply)(jax.random.key(0), broadcast, state, data)[0].update

    return jax.eval_shape(update, broadcast, population)


def plan_of(star: Star, broadcast: PyTree, population: Population) -> engine.Plan:
    """The plan that fits the star's clients: their messages, what they work with, and the slots of the cohort.

    Of clients that are federations it is the plan inside of them, if they have one: they themselves follow one another.

    Args:
      broadcast: arrays or specs; nothing is computed.

    Guarantees: the same for any number of devices (tests/round/test_round.py::test_plans_fit_the_work).
    """

    if (inside := star.client.federation) is not None and inside.client.apply is None:
        return engine.Plan(1, 1)
    if inside is not None:
        group = jax.eval_shape(lambda people: own_data(star, people, jnp.zeros((), jnp.int32)), population)
        sent = jax.eval_shape(lambda params: inside.server.broadcast(inside.server.init(params)), broadcast)
        return plan_of(inside, sent, group)

    def local(broadcast, population):
        data = own_data(star, population, jnp.zeros((), jnp.int32))
        report, _ = star.client.apply(jax.random.key(0), broadcast, star.client.init(broadcast), data)
        return report.update

    program, update = jax.make_jaxpr(local, return_shape=True)(tree.spec(broadcast), population)
    work = engine.working_bytes(program)
    return engine.plan_for(update, working_bytes=work, num_slots=star.sampler.num_slots)


def client_wires(star: Star, broadcast: PyTree, population: Population) -> tuple[Wire, Wire]:
    """The sizes of what a client sends, after the transform and as the aggregator has it sent, and of what it receives:
    the broadcast, and what the aggregator has the server send beside it or in its place.

    Arguments as for `message_spec`.

    Guarantees: a round's bytes are these times the messages
    (tests/sampling/test_participation.py::test_late_messages_are_counted), both ways
    (tests/aggregation/test_wires.py).
    """
    update = message_spec(star, broadcast, population)
    return _among(star, update, _alone(star, update, broadcast), star.sampler.num_slots)


def _alone(star: Star, update: PyTree, broadcast: PyTree) -> tuple[Wire, Wire]:
    """The sizes of a message after the transform, and of the broadcast."""
    return wire_of(star.transform, update), (plain_wire if star.server.wire is None else star.server.wire)(broadcast)


def _among(star: Star, update: PyTree, alone: tuple[Wire, Wire], num_invited: int) -> tuple[Wire, Wire]:
    """The same as the aggregator has them sent among so many clients."""
    rules = star.aggregator.facts.wire, star.aggregator.facts.wire_down
    pairs = zip(rules, alone, strict=True)
    up, down = (wire if rule is None else rule(update, wire, num_invited) for rule, wire in pairs)
    return up, down


def bytes_by_invited(star: Star, broadcast: PyTree, population: Population) -> np.ndarray | None:
    """[m + 1, 3] int64 bytes of a message, of the same under an entropy code, and of what a client receives, in cohorts
    of 0, 1, ... m invited clients. None where the aggregator has them alike, so that `client_wires` tells all.

    Arguments as for `message_spec`.

    Guarantees: tests/aggregation/test_wires.py::test_keys_of_those_who_are_invited.
    """
    if star.aggregator.facts.wire is None and star.aggregator.facts.wire_down is None:
        return None
    update = message_spec(star, broadcast, population)
    alone = _alone(star, update, broadcast)
    pairs = [_among(star, update, alone, max(number, 1)) for number in range(star.sampler.num_slots + 1)]
    bits = np.array([(up.bits, up.coded, down.bits) for up, down in pairs], np.int64)
    return None if (bits == bits[0]).all() else -(-bits // 8)


def work_of(star: Star, params: PyTree, population: Population) -> Work:
    """The cost of one round to one client, in bytes, steps and floating-point operations.

    The local work is traced and its operations counted; nothing is run. A client that is a federation computes nothing
    itself, and its rounds are `Work.inside`.

    Args:
      star: the parts.
      params: the model's parameters, or their specs.
      population: whose client 0 stands for all; operations are counted over all its rows, padding included.

    Returns: `Work`; what it is for a client with n examples says `network.load_of`.

    Guarantees: bytes after both transforms, and the client's own steps
    (tests/round/test_round.py::test_quadratic_clients_have_known_work); operations grow with the steps as counted
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
    sizes, examples = (-(-wire.bits // 8) for wire in (up, down)), partial(sizes_of, population)
    by_invited = bytes_by_invited(star, broadcast, population)
    by_invited = None if by_invited is None else by_invited[:, [0, 2]]
    if star.client.federation is not None:
        inside = None if star.client.time_inside is None else partial(_asked_inside, star, broadcast, population)
        return Work(*sizes, None, 0.0, examples=examples, inside=inside, by_invited=by_invited)

    def local(broadcast, population, steps):
        data = own_data(star, population, jnp.zeros((), jnp.int32))._replace(work=steps)
        return star.client.apply(jax.random.key(0), broadcast, own_state(star, broadcast, population), data)

    facts = star.client.facts
    steps = None if facts.all_steps is None else jax.ShapeDtypeStruct((), jnp.int32)  # a loop over the steps
    program = jax.make_jaxpr(local)(tree.spec(broadcast), population, steps)
    once, one = (engine.flops(program, turns) for turns in (0, 1))
    rows = num_rows(population) if facts.num_steps is None else None
    return Work(*sizes, facts.all_steps, float(one), float(one - once), rows, examples, by_invited=by_invited)


def _asked_inside(
    star: Star, broadcast: PyTree, population: Population, flops_scale: float, bytes_scale: float
) -> PyTree:
    """What rounds inside of each client ask of its own clients, leaves [N, ...] (`TimeInside.asked`)."""

    def of_one(id):
        return star.client.time_inside.asked(broadcast, own_data(star, population, id), flops_scale, bytes_scale)

    return jax.vmap(of_one)(jnp.arange(population.size, dtype=jnp.int32))


def traffic(cohort: Cohort, up: Wire, down: Wire, by_invited: np.ndarray | None = None) -> dict[str, Count]:
    """The bytes that one pass over a cohort sends, messages that came too late included.

    Args:
      cohort: who was invited, who reported, who sent.
      up, down: sizes of one message and of one broadcast, in a cohort of all slots.
      by_invited: `bytes_by_invited`.

    Returns: `uplink_bytes` and `downlink_bytes`; `uplink_coded_bytes` where an entropy code would make messages
    smaller; `wasted_bytes`, those of late messages, where the sampler states who sent (`Timing.sent`).

    Guarantees: every message that was sent is counted
    (tests/sampling/test_participation.py::test_late_messages_are_counted).
    """
    uploads = cohort.reported if cohort.timing.sent is None else cohort.timing.sent
    invited, reported, sent = (x.sum(dtype=jnp.int32) for x in (cohort.invited, cohort.reported, uploads))
    units = (Count.of(sent, -(-bits // 8)).unit for bits in (up.bits, up.coded, down.bits))
    if by_invited is not None:
        words = np.stack([by_invited >> 32, by_invited & 0xFFFFFFFF], -1).astype(np.uint32)
        units = jnp.asarray(words)[invited]
    plain, coded, received = units
    found = {"uplink_bytes": Count(sent, plain), "downlink_bytes": Count(invited, received)}
    if up.coded < up.bits:
        found["uplink_coded_bytes"] = Count(sent, coded)
    if cohort.timing.sent is not None:
        found["wasted_bytes"] = Count(sent - reported, plain)
    return found


def spending_metrics(cohort: Cohort) -> dict[str, Array]:
    """What a cohort's devices spend, where its rounds take time (`Timing.spent`).

    Returns: `joules`; `wasted_joules`, of invited clients who do not report; `utilisation`, the share of the time until
    the last one is done in which the invited clients are busy, 0 without any; `saturated_clients`, of the invited, who
    are too slow for the clock. {} without times.

    Guarantees: tests/sampling/time/test_clock.py::test_energy_and_utilisation.
    """
    if cohort.timing.spent is None:
        return {}
    spent = cohort.timing.spent
    joules, busy = spent.joules, spent.total.astype(jnp.float32)
    wasted = jnp.where(cohort.reported, 0, joules)
    together = busy.max(initial=0) * cohort.invited.sum(dtype=jnp.float32)
    share = busy.sum() / jnp.where(together > 0, together, 1)
    slow = {SATURATED.name: num_saturated(spent, cohort.invited)}
    return {"joules": joules.sum(), "wasted_joules": wasted.sum(), "utilisation": share} | slow


def unusable(star: Star, cohort: Cohort, dropped: Array, num_dropped: Array) -> dict[str, Array]:
    """How many messages could not be used, and whose they were where that is an error.

    Args:
      dropped: [m] bool, slots with a message that was not usable; `num_dropped` is their number, [] int32.

    Returns: `dropped_clients`, [] int32; with `nonfinite="error"` also `error_ids`, [8] int32: the first such clients,
    filled with -1. `run` stops on them and removes them from the log.

    Guarantees: a client that does not exist is counted too
    (tests/laws/test_nonfinite.py::test_a_client_who_does_not_exist_is_counted).
    """
    found = {"dropped_clients": num_dropped}
    if star.execution.nonfinite == "error":
        first = jnp.argsort(~dropped, stable=True)[:NAMED_CLIENTS]
        found["error_ids"] = jnp.where(dropped[first], cohort.ids[first], -1)
    return found


def eight_bytes(words: Array) -> Array:
    """[..., 8] uint32: the bytes of integers of two words [..., 2] uint32, high and low; the lowest first."""
    return jnp.stack([words[..., word] >> place & 255 for word in (1, 0) for place in (0, 8, 16, 24)], -1)


def words_of(count: Count) -> Array:
    """[2] uint32: a count's product modulo 2^64, high and low word.

    Guarantees: Python's products (tests/algorithms/hierarchy/test_hierfavg.py::test_counts_past_32_bits).

    >>> words_of(Count.of(jnp.int32(1_000_000), 5_000)).tolist()
    [1, 705032704]
    """
    number, (high, low) = count.number.astype(jnp.uint32), count.unit
    a, b, c, d = number >> 16, number & 0xFFFF, low >> 16, low & 0xFFFF
    middle = (b * d >> 16) + (a * d & 0xFFFF) + (b * c & 0xFFFF)
    over = a * c + (a * d >> 16) + (b * c >> 16) + (middle >> 16)
    return jnp.stack([number * high + over, number * low])


def two_words(sums: Array) -> Array:
    """A sum of uint32 counts as the two words of a 64-bit integer, from the sums of its bytes.

    Args:
      sums: [4] or [8] uint32, the sum of the counts' lowest bytes first; exact for up to 2^24 counts.

    Returns: [2] uint32, high word and low word, as `Count.unit`.

    Guarantees: exact past 2^32 (tests/round/test_round.py::test_counts_are_exact).

    >>> two_words(jnp.array([0, 0, 0, 3 << 8], jnp.uint32)).tolist()  # 3 * 2^32
    [3, 0]
    """
    high = low = jnp.zeros((), jnp.uint32)
    for i in range(4):
        part = sums[i] << 8 * i
        carry = (low + part < low).astype(jnp.uint32)
        high += (sums[i] >> 32 - 8 * i if i else jnp.uint32(0)) + carry
        low += part
    for i in range(4, sums.shape[0]):
        high += sums[i] << 8 * (i - 4)
    return jnp.stack([high, low])


def metrics_of(star: Star) -> tuple[Metric, ...]:
    """What a round's Info holds, as far as its parts state it; a part's name stands before a name that two of them use,
    as in Info."""
    parts = {
        name: {x.name: x for x in getattr(getattr(part, "facts", part), "metrics", ())}
        for name, part in star._asdict().items()
    }
    joined = tree.joined_metrics({name: found for name, found in parts.items() if found})
    return (*ROUND_METRICS, *(metric._replace(name=name) for name, metric in joined.items()))
