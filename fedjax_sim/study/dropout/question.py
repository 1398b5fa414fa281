"""How often does secure aggregation abort where clients leave, and how many messages do its sums hold?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import aggregation, engine, theory, validate
from fedjax_sim.aggregation.secure.cost import secure_sum_cost
from fedjax_sim.prng import stream
from fedjax_sim.study.dropout.figure import dropout_figure
from fedjax_sim.study.dropout.reading import dropout_reading
from fedjax_sim.study.findings import Comparison, Findings, measured
from fedjax_sim.types import Array, Cohort, Received, Round

__all__ = ["GRAPHS", "dropout"]

QUESTION = "How often does secure aggregation abort where clients leave, and how many messages do its sums hold?"
GRAPHS = ("complete graph", "circle")
BLOCK = 250  # rounds that are vmapped


def dropout(
    *,
    num_clients: int = 100,
    neighbours: int = 20,
    threshold_share: float = 0.6,
    dropouts: Sequence[float] = (0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15),
    num_rounds: int = 4000,
    seed: int = 0,
) -> Findings:
    """How often does secure aggregation abort where clients leave, and how many messages do its sums hold?

    Each client leaves before each of the four steps with one probability. Rounds are those of `secure_sum`, without
    training: on the complete graph with threshold ceil(share m), on a random circle with threshold ceil(share k).

    Args:
      num_clients: m. neighbours: k, even, below m.
      threshold_share: in (0.5, 1], of the holders of a secret.
      dropouts: probabilities in [0, 1], rising.
      num_rounds: R, simulated for each of them and each graph.
      seed: decides everything.

    Returns: `Findings`: the share of aborted rounds (exact on the complete graph, an upper bound on the circle), and
      the number of messages in a sum, counted in aborted rounds too.

    Guarantees: every prediction holds (tests/study/test_dropout.py::test_predictions_hold).

    References: Bonawitz et al. 2017, section 4; Bell et al. 2020, section 3.
    """
    options = dict(locals())
    _check(options)
    options["dropouts"] = [float(p) for p in dropouts]
    found = list(_compared(stream(jax.random.key(seed), "dropout"), options))
    reading = list(dropout_reading(found, options, _costs(num_clients, neighbours)))
    return Findings("dropout", QUESTION, found, reading, partial(dropout_figure, found, options), options)


def _check(options: dict[str, Any]) -> None:
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


def _compared(key: Array, options: dict[str, Any]) -> Iterator[Comparison]:
    m, rounds = options["num_clients"], options["num_rounds"]
    for graph, k in zip(GRAPHS, (None, options["neighbours"]), strict=True):
        threshold = math.ceil(options["threshold_share"] * (m if k is None else k))
        for p in options["dropouts"]:
            aborted, messages = _rounds(stream(key, f"{graph} {p}"), m, threshold, k, p, rounds)
            conditions = {"part": graph, "dropout": p}
            chance = theory.abort_probability(m, threshold, p, neighbours=k)
            share, at_most = float(aborted.mean()), k is not None
            error = math.sqrt((share * (1 - share) if at_most else chance * (1 - chance)) / rounds)
            kind = "upper bound" if at_most else "exact"
            # A share of R rounds moves in steps of 1/R: rare events are no normal numbers.
            yield Comparison(conditions, "aborted share", share, error, math.inf, chance, kind, 3 / rounds)
            yield measured(conditions, "messages in a sum", messages, theory.expected_messages(m, p))


def _rounds(key: Array, m: int, threshold: int, k: int | None, p: float, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(aborted [R], messages [R]) of rounds in which everybody sends 1."""
    made = aggregation.secure_sum(aggregation.modular_sum(1.0), threshold, neighbours=k, dropout=p)
    everybody, slots = jnp.ones(m, bool), jnp.arange(m, dtype=jnp.int32)
    round = Round(Cohort(slots, everybody, everybody))
    received = Received(jnp.ones((m, 1), jnp.int32), jnp.ones(m), slots, slots)

    def one(key):
        carry = made.accumulate(key, round, made.init(jax.ShapeDtypeStruct((1,), jnp.int32), m), received)
        _, metrics = made.finalize(key, round, carry)
        return metrics["aborted_rounds"], metrics["total_weight"]

    every = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=BLOCK), compiler_options=engine.compiler_options())
    return jax.device_get(every(jax.random.split(key, number)))


def _costs(m: int, k: int) -> list[tuple[str, float, int]]:
    """(graph, bytes a client moves beside its message, mask words of one number) for each graph."""
    costs = [secure_sum_cost(m, 1, 32, neighbours=neighbours) for neighbours in (None, k)]
    rows = zip(GRAPHS, costs, strict=True)
    return [(name, (c.client_up_bits + c.client_down_bits - 32) / 8, c.client_mask_words) for name, c in rows]
