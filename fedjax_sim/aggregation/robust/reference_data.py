"""Rules that know more than a round's messages: data of the server's own, or what each client sent before."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim import engine, tree, validate
from fedjax_sim.aggregation.gather import gather
from fedjax_sim.aggregation.rows import squared_norms, weighted_mean
from fedjax_sim.engine.all_messages.all_messages import by_rule
from fedjax_sim.engine.all_messages.messages import inner_products, squared_distances, weighted_sum
from fedjax_sim.prng import stream
from fedjax_sim.types import Aggregator, Array, ClientData, ClientUpdate, PyTree
from fedjax_sim.validate import FromData, PopulationSize, Positive

__all__ = ["fltrust", "foolsgold"]


def fltrust(
    server_work: Annotated[ClientUpdate, FromData("server_work")],
    server_data: Annotated[ClientData, FromData("server_data")],
) -> Aggregator:
    """FLTrust: the server trains on a small clean data set of its own, and trusts whom its update agrees with.

    With g the server's update from the model that was broadcast, and t_i = max(0, cos(u_i, g)), the result is
    sum_i t_i (|g| / |u_i|) u_i / sum_i t_i: messages against g count for nothing, and none is longer than g.

    Args:
      server_work: the server's local work, as the clients' (`client.local_sgd` with the same steps); one without state.
        A config takes the clients' own.
      server_data: the server's examples, leaves [n, ...], and their mask. A config takes them from
        `[data.with_server_rows]`.

    Returns: an Aggregator with state (the data), that holds all m messages. Weights are not looked at. Where nobody is
    trusted the update is zero.

    Raises: ValueError without data, and for work whose rate falls over rounds; when the round is built, for work that
      keeps a state.

    Guarantees: NumPy's (tests/aggregation/robust/test_reference_data.py::test_fltrust); whatever a majority of
    attackers sends, an update no longer than the server's (::test_a_majority_of_attackers); from a config it learns
    where a mean of the same messages does not (tests/population/test_server_rows.py::test_fltrust_from_a_config).

    References: Cao, Fang, Liu and Gong 2021, section 4 and algorithm 2.
    """
    validate.part("server_work", server_work, ClientUpdate)
    if server_work.facts.reads_round:
        hint = "Aggregators are not told the round: take a constant rate, or a schedule over local steps."
        validate.fail("server_work", "work whose rate does not fall over rounds", "work whose rate does", hint)
    if server_data is None:
        hint = "Set rows aside: [data.with_server_rows], or population.with_server_rows(data)."
        validate.fail("server_data", "examples of the server's own", None, hint)
    validate.part("server_data", server_data, ClientData)

    def rule(key, round, cohort):
        memory = server_work.init(round.broadcast)
        if jax.tree.leaves(memory):
            validate.fail("server_work", "work without a state", f"one with {jax.tree.structure(memory)}")
        own, _ = server_work.apply(stream(key, "server"), round.broadcast, memory, round.state)
        length = jnp.sqrt(squared_norms(jax.tree.map(lambda x: x[None], own.update))[0])
        lengths = jnp.sqrt(squared_distances(cohort.messages))
        safe = jnp.where((lengths > 0) & jnp.isfinite(lengths), lengths, jnp.inf)
        cosines = engine.divide(inner_products(cohort.messages, own.update), safe * jnp.maximum(length, 2.0**-100))
        trust = jnp.where(cohort.arrived & (cosines > 0), cosines, 0)  # NaN is not above 0
        total = engine.pairwise_sum(trust, (0,))
        scales = engine.divide(trust * length, safe * jnp.where(total > 0, total, 1))
        return weighted_sum(cohort.messages, scales), {"trusted_share": _share(trust > 0, cohort.number)}, round.state

    return by_rule(rule, weighted=False, start=lambda spec: server_data)


def _share(chosen: Array, number: Array) -> Array:
    return engine.divide(chosen.sum().astype(jnp.float32), jnp.maximum(number, 1).astype(jnp.float32))


@validate.named_arguments
def foolsgold(population_size: PopulationSize, *, confidence: Positive = 1.0) -> Aggregator:
    """FoolsGold: clients whose updates of all rounds point the same way are taken for one, many times over (sybils).

    Each client's messages are summed up over rounds. A client's weight falls with the largest cosine between its sum
    and another one's in the cohort; where the other has more such company, it is pardoned in part.

    Args:
      population_size: N; memory is N times the model, so it is for cross-silo. A round with a client past it is
        skipped.
      confidence: positive, of the logit that spreads weights between 0 and 1 (the paper's kappa).

    Returns: an Aggregator with state (a sum for each client). Weights are not looked at; the mean of the messages by
    FoolsGold's weights, zero where all are zero.

    Guarantees: NumPy's over rounds (tests/aggregation/robust/test_reference_data.py::test_foolsgold), also for a client
    that points away from all others (::test_a_client_unlike_all_others_counts_in_full).

    References: Fung, Yoon and Beschastnikh 2020, algorithm 1; a client's cosine with itself is 0, as in their code.
    """

    def rule(key, updates, weights, ids, round):
        there = weights > 0
        at = jnp.where(there, ids, population_size)  # past the end: dropped
        sums = jax.tree.map(lambda h, x: h.at[at].add(x.astype(h.dtype), mode="drop"), round.state, updates)
        own = tree.take_rows(sums, jnp.where(there, ids, 0))
        others = there[:, None] & there[None] & (ids[:, None] != ids[None])  # a client may be drawn twice
        alike = jnp.where(others, _cosines(own), 0)  # as its own company a client counts 0, so no maximum is below 0
        most = alike.max(1)
        # Pardon: the one with less company keeps the part that its largest cosine is of the other's.
        pardoned = jnp.where(most[None] > most[:, None], engine.divide(most[:, None], _nonzero(most[None])), 1)
        worst = (alike * pardoned).max(1)
        share = jnp.where(there, jnp.clip(1 - worst, 0, 1), 0)
        share = engine.divide(share, _nonzero(share.max()))
        share = jnp.minimum(share, 0.99)
        odds = confidence * (jnp.log(engine.divide(share, 1 - share)) + 0.5)
        share = jnp.where(there, jnp.clip(odds, 0, 1), 0)
        beyond = (there & (ids >= population_size)).any()
        return jax.tree.map(lambda x: jnp.where(beyond, jnp.nan, x), weighted_mean(updates, share)), sums

    def start(update_spec):
        return jax.tree.map(lambda x: jnp.zeros((population_size, *x.shape), jnp.float32), update_spec)

    return gather(rule, start=start, weighted=False, homogeneous=True)


def _nonzero(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)


def _cosines(rows: PyTree) -> Array:
    """[m, m] of the rows of leaves [m, ...]; 0 beside a row of zeros."""
    peaks = jnp.stack([jnp.abs(x.reshape(x.shape[0], -1)).max(1, initial=0) for x in jax.tree.leaves(rows)]).max(0)
    peaks = _nonzero(peaks)  # or squares and products of long rows were infinite
    rows = jax.tree.map(lambda x: engine.divide(x, peaks.reshape(-1, *[1] * (x.ndim - 1))), rows)
    lengths = jnp.sqrt(squared_norms(rows))
    unit = engine.divide(jnp.ones_like(lengths), _nonzero(lengths))
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    flat = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(rows)]
    total = sum(product(x, x.T) for x in flat)
    return total * unit[:, None] * unit[None]
