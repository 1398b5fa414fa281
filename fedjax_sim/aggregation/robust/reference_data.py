"""Rules that use more than the messages of a round: the server's own data, or what each client sent before."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.aggregation.gather import gather
from fedjax_sim.aggregation.rows import squared_norms, weighted_mean
from fedjax_sim.engine.all_messages.all_messages import by_rule
from fedjax_sim.engine.all_messages.messages import inner_products, squared_distances, weighted_sum
from fedjax_sim.prng import stream
from fedjax_sim.types import Aggregator, Array, ClientData, ClientUpdate, PyTree
from fedjax_sim.validate import FromData, PopulationSize, Positive


def fltrust(
    server_work: Annotated[ClientUpdate, FromData("server_work")],
    server_data: Annotated[ClientData, FromData("server_data")],
) -> Aggregator:
    """The server trains on a small clean data set and trusts clients whose updates agree with its own (FLTrust).

    Let g be the server's update, trained from the model that was broadcast, and t_i = max(0, cos(u_i, g)). The
    aggregate is sum_i t_i (|g| / |u_i|) u_i / sum_i t_i. So a message that points against g counts for nothing, and
    every other message is scaled to the length of g.

    Args:
      server_work: the server's local work, like that of the clients (`client.local_sgd` with the same steps); it keeps
        no state. A config takes the clients' local work.
      server_data: the server's examples, leaves [n, ...], and their mask. A config takes them from
        `[data.with_server_rows]`.

    Returns: an Aggregator with state (the data) that holds all m messages. Weights are ignored. If no client is trusted
    the aggregate is zero. The metric `trusted_share` is the share of messages with t_i > 0.

    Raises: ValueError without data, and for work whose learning rate falls over rounds; when the round is built, for
      work that keeps a state.

    Guarantees:
      - equals NumPy's aggregate (tests/aggregation/robust/test_reference_data.py::test_fltrust)
      - whatever a majority of attackers sends, the aggregate is no longer than the server's update
        (::test_a_majority_of_attackers)
      - from a config it learns where a mean of the same messages does not
        (tests/population/test_server_rows.py::test_fltrust_from_a_config)

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
        server_report, _ = server_work.apply(stream(key, "server"), round.broadcast, memory, round.state)
        server_update = server_report.update
        server_norm = jnp.sqrt(squared_norms(jax.tree.map(lambda x: x[None], server_update))[0])
        norms = jnp.sqrt(squared_distances(cohort.messages))
        # A message without a finite length gets the norm infinity, so its cosine and its scale are 0.
        safe_norms = jnp.where((norms > 0) & jnp.isfinite(norms), norms, jnp.inf)
        products = inner_products(cohort.messages, server_update)
        cosines = products / (safe_norms * jnp.maximum(server_norm, 2.0**-100))
        trust = jnp.where(cohort.arrived & (cosines > 0), cosines, 0)  # NaN is not above 0
        total_trust = trust.sum(0)
        scales = (trust * server_norm) / (safe_norms * jnp.where(total_trust > 0, total_trust, 1))
        metrics = {"trusted_share": _share(trust > 0, cohort.number)}
        return weighted_sum(cohort.messages, scales), metrics, round.state

    return by_rule(rule, weighted=False, start=lambda spec: server_data)


def _share(mask: Array, number: Array) -> Array:
    """Computes the share of `number` messages that a mask [m] marks, [] float32; 0 of no messages."""
    return mask.sum().astype(jnp.float32) / jnp.maximum(number, 1).astype(jnp.float32)


@validate.named_arguments
def foolsgold(population_size: PopulationSize, *, confidence: Positive = 1.0) -> Aggregator:
    """Clients whose summed updates point in the same direction lose weight, as copies of one attacker (FoolsGold).

    Such copies are called sybils. Each client's messages are summed over rounds. A client's weight falls with the
    largest cosine between its sum and the sum of another client of the cohort. If that other client has a larger
    cosine with a third client, the cosine counts only in part ("pardoning").

    Args:
      population_size: N; the memory is N times the model, so the rule is for cross-silo populations. A round with a
        client id of N or more is skipped.
      confidence: kappa of the paper, positive: the factor of the logit that spreads weights between 0 and 1.

    Returns: an Aggregator with state (a sum for each client). Reported weights are ignored. The aggregate is the mean
    of the messages by FoolsGold's weights, and zero where all these weights are zero.

    Guarantees:
      - equals NumPy's aggregates over several rounds (tests/aggregation/robust/test_reference_data.py::test_foolsgold)
      - a client that points away from all others counts in full (::test_a_client_unlike_all_others_counts_in_full)

    References: Fung, Yoon and Beschastnikh 2020, algorithm 1; a client's cosine with itself is 0, as in their code.
    """

    def rule(key, updates, weights, ids, round):
        has_arrived = weights > 0
        rows = jnp.where(has_arrived, ids, population_size)  # the row N is past the end, so it is dropped
        sums = jax.tree.map(lambda h, x: h.at[rows].add(x.astype(h.dtype), mode="drop"), round.state, updates)
        cohort_sums = tree.take_rows(sums, jnp.where(has_arrived, ids, 0))
        # A client may be drawn twice, so slots of equal ids are compared as one client.
        are_others = has_arrived[:, None] & has_arrived[None] & (ids[:, None] != ids[None])
        # A client's cosine with itself counts as 0, so no maximum is below 0.
        cosines = jnp.where(are_others, _cosines(cohort_sums), 0)
        largest = cosines.max(1)
        # Pardoning: if j's largest cosine exceeds i's, i's cosine with j counts by the ratio of the two.
        ratios = largest[:, None] / _nonzero(largest[None])
        pardon = jnp.where(largest[None] > largest[:, None], ratios, 1)
        worst = (cosines * pardon).max(1)
        share = jnp.where(has_arrived, jnp.clip(1 - worst, 0, 1), 0)
        share = share / _nonzero(share.max())
        share = jnp.minimum(share, 0.99)  # the logit of 1 is infinite
        logits = confidence * (jnp.log(share / (1 - share)) + 0.5)
        share = jnp.where(has_arrived, jnp.clip(logits, 0, 1), 0)
        is_beyond = (has_arrived & (ids >= population_size)).any()
        mean = weighted_mean(updates, share)
        return jax.tree.map(lambda x: jnp.where(is_beyond, jnp.nan, x), mean), sums

    def start(update_spec):
        return jax.tree.map(lambda x: jnp.zeros((population_size, *x.shape), jnp.float32), update_spec)

    return gather(rule, start=start, weighted=False, homogeneous=True)


def _nonzero(x: Array) -> Array:
    """Returns a divisor: x where it is positive, else 1."""
    return jnp.where(x > 0, x, 1)


def _cosines(rows: PyTree) -> Array:
    """[m, m] the cosines between the rows of leaves [m, ...]; 0 for a row of zeros."""
    # Rows are scaled to a largest magnitude of 1 first: squares and products of long rows would be infinite.
    peaks = jnp.stack([jnp.abs(x.reshape(x.shape[0], -1)).max(1, initial=0) for x in jax.tree.leaves(rows)]).max(0)
    peaks = _nonzero(peaks)
    rows = jax.tree.map(lambda x: x / peaks.reshape(-1, *[1] * (x.ndim - 1)), rows)
    norms = jnp.sqrt(squared_norms(rows))
    reciprocals = jnp.ones_like(norms) / _nonzero(norms)
    matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    flat = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(rows)]
    products = sum(matmul(x, x.T) for x in flat)
    return products * reciprocals[:, None] * reciprocals[None]
