"""This study measures what robust aggregators cost without attackers: variance on normal messages, digits' accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_sim import aggregation, engine, theory, validate
from fedjax_sim.prng import normal, stream
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, Findings, few, measured, rows_of
from fedjax_sim.study.price_of_robustness.claims import price_of_robustness_claims
from fedjax_sim.study.price_of_robustness.figure import price_of_robustness_figure
from fedjax_sim.study.robust_digits import ATTACKS, RULES, RobustDigits
from fedjax_sim.study.single_rounds import released
from fedjax_sim.types import Aggregator, Array
from fedjax_sim.validate import Positive

QUESTION = "What does a robust rule cost where nobody attacks?"


@validate.named_arguments
def price_of_robustness(
    *,
    num_messages: int = 63,
    num_byzantine: int = 6,
    bucket_sizes: Sequence[int] = (1, 3),
    dimension: int = 500,
    num_draws: int = 200,
    num_clients: int = 20,
    tolerated: int = 2,
    digits_bucket: int = 2,
    alphas: Sequence[float] = (100.0, 0.1),
    num_steps: int = 3,
    learning_rate: Positive = 0.3,
    num_rounds: int = 200,
    num_runs: int = 3,
    seed: int = 0,
) -> Findings:
    """What does a robust rule cost without attackers? Measures variances on normal messages, and accuracies on digits.

    The first part measures the variance of each rule on normal messages, divided by the variance of their mean. The
    variance of the median is known exactly, that of the trimmed mean for many messages. In the second part honest
    clients of the digits, with similar or unlike labels, train a linear model under each rule. Both parts are measured
    with buckets and without: a rule on buckets gets the means of small groups of messages.

    Args:
      num_messages: m of the normal messages; m and the numbers of buckets are odd.
      num_byzantine: f of the rules on normal messages.
      bucket_sizes: s, divisors of m; s = 1 is without buckets.
      dimension: d.
      num_draws: rounds behind each variance, of d numbers each.
      num_clients: clients of the digits, who all take part; 0 leaves them out.
      tolerated: f of the rules on the digits.
      digits_bucket: s on the digits, at least 2.
      alphas: parameters of the clients' Dirichlet label shares, from similar to unlike clients.
      num_steps: local steps on the digits, as for `robustness`.
      learning_rate: the learning rate of local steps.
      num_rounds: T on the digits.
      num_runs: runs of each rule on the digits.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every exact prediction lies in its interval
    (tests/study/test_price_of_robustness.py::test_predictions_hold).

    References: Karimireddy, He and Jaggi 2022, table 1; Huber 1981, section 3.3.
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    comparisons = [*_variances(stream(key, "normal"), options)]
    if num_clients:
        comparisons += _digits(stream(key, "digits"), options)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    rows = rows_of(comparisons)
    return Findings(
        name="price_of_robustness",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(price_of_robustness_claims(rows, options)),
        figure=partial(price_of_robustness_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `price_of_robustness`, by name.
    """
    m = options["num_messages"]
    validate.integer("num_messages", m, 7, 1001)
    for name in ("bucket_sizes", "alphas"):
        validate.sequence(name, options[name])
    for size in options["bucket_sizes"]:
        validate.integer("bucket_sizes", size, 1)
        if m % size or (m // size) % 2 == 0:
            hint = f"A divisor of {m}, with an odd number of buckets: the median's variance is known for these."
            validate.fail("bucket_sizes", "sizes that divide the messages", size, hint)
    if list(options["bucket_sizes"]) != sorted(set(options["bucket_sizes"])):
        validate.fail("bucket_sizes", "rising numbers", list(options["bucket_sizes"]))
    fewest_buckets = m // max(options["bucket_sizes"])
    validate.integer(
        "num_byzantine", options["num_byzantine"], 0, (fewest_buckets - 3) // 2, hint="2 f + 3 <= buckets."
    )
    validate.integer("dimension", options["dimension"], 1)
    validate.integer("num_draws", options["num_draws"], 100)
    validate.integer("digits_bucket", options["digits_bucket"], 2)
    if options["num_clients"]:
        validate.integer("num_clients", options["num_clients"], 3 * options["digits_bucket"], 200)
        most_tolerated = (-(-options["num_clients"] // options["digits_bucket"]) - 3) // 2
        validate.integer("tolerated", options["tolerated"], 0, most_tolerated, hint="2 f + 3 <= buckets.")
    for alpha in options["alphas"]:
        validate.positive("alphas", alpha)
    validate.in_range("learning_rate", options["learning_rate"], 0, 10, open_low=True)
    for name, low in (("num_steps", 1), ("num_rounds", 1), ("num_runs", 2), ("seed", 0)):
        validate.integer(name, options[name], low)


def _rules(m: int, f: int, bucket_size: int) -> dict[str, Aggregator]:
    """Makes the rules for m messages in buckets of a size, by name."""
    if bucket_size == 1:
        return {name: make(m, f) for name, make in RULES.items()}
    # Buckets do not change the mean, which is left out.
    rules = {name: make(-(-m // bucket_size), f) for name, make in RULES.items() if name != "mean"}
    return {name: aggregation.bucketing(rule, bucket_size) for name, rule in rules.items()}


def _variances(key: Array, options: dict[str, Any]) -> Iterator[Comparison]:
    """Measures m times the variance of a coordinate of each rule, which is 1 for the mean of normal messages.

    A sample is (m / d) |rule(x)|^2 for m messages x_i of independent N(0, 1) coordinates. Centred clipping is left out.

    Args:
      key: the random key of all rounds.
      options: the study's options. `num_messages` is m, `dimension` d, `num_draws` the samples, `num_byzantine` the f
        of the rules.

    Yields: a comparison for each bucket size s and rule. On m / s buckets the median has a known variance and the
      trimmed mean an estimate for many messages; other rules have no prediction.
    """
    m = options["num_messages"]
    f = options["num_byzantine"]
    dimension = options["dimension"]
    keys = jax.random.split(key, options["num_draws"])
    for size in options["bucket_sizes"]:
        for name, rule in _rules(m, f, size).items():
            if name == "centred clipping":  # it stays near its start, which is the truth here
                continue

            def scaled_variance(key, rule=rule):
                # The messages have mean zero, so a mean square over coordinates is a variance.
                return m * (released(rule, key, normal(stream(key, "messages"), (m, dimension))) ** 2).mean()

            over_keys = partial(jax.lax.map, scaled_variance)
            samples = kept_results.call(jax.jit(over_keys, compiler_options=engine.compiler_options()), keys)
            num_buckets = m // size
            predicted = None
            kind = "exact"
            if name in ("mean", "median"):
                predicted = 1.0 if name == "mean" else theory.median_efficiency(num_buckets)
            elif name == "trimmed mean":
                # An asymptotic formula, for many messages.
                predicted = theory.trimmed_mean_efficiency(f / num_buckets)
                kind = "estimate"
            conditions = {"part": "normal messages", "rule": name, "bucket_size": size, "alpha": None}
            yield measured(conditions, "variance / the mean's", samples, predicted, kind=kind, resolution=1e-5)


def _digits(key: Array, options: dict[str, Any]) -> Iterator[Comparison]:
    """Measures test accuracies, and the loss against the mean with the same first models and minibatches.

    Args:
      key: the random key of all runs.
      options: the study's options. `num_clients` is m, `tolerated` the f of the rules, `digits_bucket` the bucket size.

    Yields: for each alpha, bucket size and rule two comparisons of R runs: the test accuracy, in [0, 1], and the
      accuracy of the mean minus that of the rule, in [-1, 1].
    """
    m = options["num_clients"]
    training_options = {name: options[name] for name in ("num_steps", "learning_rate", "num_rounds", "num_runs")}
    settings = [
        (size, name, rule)
        for size in (1, options["digits_bucket"])
        for name, rule in _rules(m, options["tolerated"], size).items()
    ]
    for alpha in options["alphas"]:
        accuracies = RobustDigits(m, alpha, options["seed"]).accuracies(
            stream(key, str(alpha)), [rule for *_, rule in settings], [ATTACKS["none"]],
            [(i, 0, 0) for i in range(len(settings))], **training_options,
        )  # fmt: skip
        mean_accuracies = accuracies[0]  # the first rule is the mean
        for (size, name, _), rule_accuracies in zip(settings, np.asarray(accuracies), strict=True):
            conditions = {"part": "digits", "rule": name, "bucket_size": size, "alpha": alpha}
            yield few(conditions, "test accuracy", rule_accuracies)
            yield few(conditions, "loss against the mean", mean_accuracies - rule_accuracies)
