"""This study measures how often secure aggregation aborts when clients leave, and how many messages its sums hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, engine, theory, validate
from fedjax_sim.prng import stream
from fedjax_sim.running import kept_results
from fedjax_sim.study.dropout.claims import dropout_claims
from fedjax_sim.study.dropout.figure import dropout_figure
from fedjax_sim.study.findings import Comparison, Findings, measured, rows_of
from fedjax_sim.types import Array, Cohort, Received, Round

QUESTION = "How often does secure aggregation abort where clients leave, and how many messages do its sums hold?"
GRAPHS = ("complete graph", "circle")
BLOCK = 250  # rounds under one vmap


def dropout(
    *,
    num_clients: int = 100,
    neighbours: int = 20,
    threshold_share: float = 0.6,
    dropouts: Sequence[float] = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15),
    num_rounds: int = 4000,
    seed: int = 0,
) -> Findings:
    """How often does secure aggregation abort when clients leave, and how many messages do its sums hold?

    A client leaves before each of the protocol's four steps with the same probability. Rounds are those of
    `secure_sum`, without training. Each client shares its secrets with all others (the complete graph) or with k
    neighbours on a random circle. A secret is lost, and the round aborted, if fewer holders than the threshold are
    left: ceil(share m) on the complete graph, ceil(share k) on the circle.

    Args:
      num_clients: m.
      neighbours: k of the circle, even, below m.
      threshold_share: the share of a secret's holders that must stay, in (0.5, 1].
      dropouts: probabilities in [0, 1] of leaving before a step, rising.
      num_rounds: R, simulated for each probability and each graph.
      seed: decides everything.

    Returns: `Findings` with the share of aborted rounds and the number of messages in a sum. The prediction of the
      share is exact on the complete graph and an upper bound on the circle. Messages are counted in aborted rounds too.

    Guarantees: every prediction holds in a study of 30 clients, seed 0
    (tests/study/test_dropout.py::test_predictions_hold).

    References: Bonawitz et al. 2017, section 4; Bell et al. 2020, section 3.
    """
    options = dict(locals())
    _check(options)
    options["dropouts"] = [float(p) for p in dropouts]
    comparisons = list(_comparisons(stream(jax.random.key(seed), "dropout"), options))
    rows = rows_of(comparisons)
    return Findings(
        name="dropout",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(dropout_claims(rows, options)),
        figure=partial(dropout_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `dropout`, by name.
    """
    validate.integer("num_clients", options["num_clients"], 4, 10_000)
    validate.integer("neighbours", options["neighbours"], 2, options["num_clients"] - 1)
    if options["neighbours"] % 2:
        validate.fail("neighbours", "an even number", options["neighbours"])
    validate.in_range("threshold_share", options["threshold_share"], 0.5, 1, open_low=True)
    validate.sequence("dropouts", options["dropouts"])
    for i, p in enumerate(options["dropouts"]):
        validate.in_range(f"dropouts[{i}]", p, 0, 1)
    if list(options["dropouts"]) != sorted(set(options["dropouts"])):
        validate.fail("dropouts", "rising probabilities", list(options["dropouts"]))
    validate.integer("num_rounds", options["num_rounds"], 2)
    validate.integer("seed", options["seed"], 0)


def _comparisons(key: Array, options: dict[str, Any]) -> Iterator[Comparison]:
    """Measures aborted rounds and messages for each graph and each probability of leaving.

    The threshold is t = ceil(share h), with h = m holders of a secret on the complete graph and h = k on the circle.
    The share of R aborted rounds has the standard error sqrt(q (1 - q) / R). Here q is the exact probability on the
    complete graph, and the measured share on the circle.

    Args:
      key: the random key of all rounds.
      options: the study's options.

    Yields: two comparisons for each graph and probability: the share of aborted rounds, in [0, 1], and the mean number
      of messages in a sum, in [0, m].
    """
    m = options["num_clients"]
    rounds = options["num_rounds"]
    for graph, k in zip(GRAPHS, (None, options["neighbours"]), strict=True):
        # A secret has m holders on the complete graph and k on the circle.
        threshold = math.ceil(options["threshold_share"] * (m if k is None else k))
        for p in options["dropouts"]:
            aborted, messages = _rounds(stream(key, f"{graph} {p}"), m, threshold, k=k, p=p, number=rounds)
            conditions = {"part": graph, "dropout": p}
            probability = theory.abort_probability(m, threshold, p, neighbours=k)
            share = float(aborted.mean())
            is_bound = k is not None
            # The variance of a share: by the exact probability if it is known, else by the measured share.
            variance = share * (1 - share) if is_bound else probability * (1 - probability)
            error = math.sqrt(variance / rounds)
            kind = "upper bound" if is_bound else "exact"
            # A share of R rounds moves in steps of 1/R, and is far from normal where the event is rare.
            yield Comparison(
                conditions=conditions,
                quantity="aborted share",
                measured=share,
                standard_error=error,
                degrees=math.inf,
                predicted=probability,
                kind=kind,
                resolution=3 / rounds,
            )
            yield measured(conditions, "messages in a sum", messages, theory.expected_messages(m, p))


def _rounds(
    key: Array, m: int, threshold: int, *, k: int | None, p: float, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Simulates rounds in which every client sends 1.

    Args:
      key: the random key of all rounds.
      m: clients.
      threshold: t, the fewest holders of a secret that must stay: of m on the complete graph, of k on the circle.
      k: neighbours on the circle, even; None for the complete graph.
      p: the probability in [0, 1] of leaving before each of the four steps.
      number: R rounds.

    Returns: (1 for an aborted round and else 0 [R], the number of messages in its sum [R]).
    """
    secure_sum = aggregation.secure_sum(aggregation.modular_sum(1.0), threshold, neighbours=k, dropout=p)
    everybody = jnp.ones(m, bool)
    slots = jnp.arange(m, dtype=jnp.int32)
    round = Round(Cohort(slots, everybody, everybody))
    received = Received(jnp.ones((m, 1), jnp.int32), jnp.ones(m), slots, slots)

    def single_round(key):
        carry = secure_sum.init(jax.ShapeDtypeStruct((1,), jnp.int32), m)
        carry = secure_sum.accumulate(key, round, carry, received)
        _, metrics = secure_sum.finalize(key, round, carry)
        return metrics["aborted_rounds"], metrics["total_weight"]

    all_rounds = jax.jit(
        lambda keys: jax.lax.map(single_round, keys, batch_size=BLOCK), compiler_options=engine.compiler_options()
    )
    return jax.device_get(kept_results.call(all_rounds, jax.random.split(key, number)))
