"""This study measures how many attackers break a robust aggregator, and how far fewer attackers can move it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import adversary, aggregation, engine, theory, validate
from fedjax_sim.prng import normal, stream
from fedjax_sim.running import kept_results
from fedjax_sim.study.breakdown.claims import breakdown_claims
from fedjax_sim.study.breakdown.figure import breakdown_figure
from fedjax_sim.study.findings import Comparison, Findings, measured, rows_of
from fedjax_sim.study.robust_digits import ATTACKS, RULES
from fedjax_sim.study.single_rounds import released
from fedjax_sim.study.switched import attack_of_index, first_clients, rule_of_index
from fedjax_sim.types import Aggregator, Array

QUESTION = "How many attackers break a rule, and how far do fewer of them move it?"
# Each coordinate of a message that is meant to break a rule. Honest numbers lie between about -3 and 4.
FAR = 2.0**20
BROKEN = 0.01  # a rule is broken if it is moved by this share of FAR
LONG = aggregation.geometric_median(400)  # enough steps to follow a majority of 11 to 10 over a distance of 2^20
# Rules with proven bounds: the fields of `theory.Robustness`, and the names in `RULES` in the same order.
BOUNDED = ("trimmed_mean", "krum", "geometric_median", "median")
RULE_NAMES = ("trimmed mean", "Krum", "geometric median", "median")


def breakdown(
    *,
    num_messages: int = 21,
    num_byzantine: int = 5,
    attackers: Sequence[int] = (1, 3, 5, 7, 9),
    dimension: int = 16,
    num_draws: int = 200,
    seed: int = 0,
) -> Findings:
    """How many attackers break a rule, and how far do fewer move it? Compares both with proven points and bounds.

    Messages are normal. In the first part a growing number of attackers all send the same far number. Rules with a
    parameter f keep the same f, and the geometric median makes 400 steps, since after few steps it has not yet
    followed a majority. In the second part each rule is set for the true number of attackers. The effect of the worst
    attack is compared with the rule's proven bound.

    Args:
      num_messages: m, odd, so that half of the messages is never a whole number.
      num_byzantine: f of the rules in the first part, with 2 f + 3 <= m.
      attackers: numbers of attackers in the second part, rising.
      dimension: d.
      num_draws: rounds behind each bound.
      seed: decides everything.

    Returns: `Findings` with the smallest number of attackers that breaks each rule (m if none does), and
      |rule - mean|^2 in units of the honest messages' variance.

    Guarantees: every breakdown point equals its closed form, and no attack exceeds a bound
    (tests/study/test_breakdown.py::test_predictions_hold).

    References: Huber 1981; Blanchard et al. 2017; Allouah et al. 2023, table 1.
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    comparisons = [*_breakdown_points(stream(key, "far"), num_messages, num_byzantine, dimension)]
    comparisons += _bounds(stream(key, "bounds"), num_messages, attackers, dimension, num_draws)
    options["attackers"] = list(attackers)
    rows = rows_of(comparisons)
    return Findings(
        name="breakdown",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(breakdown_claims(rows, options)),
        figure=partial(breakdown_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `breakdown`, by name.
    """
    m = options["num_messages"]
    validate.integer("num_messages", m, 7, 101)
    if m % 2 == 0:
        validate.fail("num_messages", "an odd number", m, "Half of an even number breaks some rules and others not.")
    validate.sequence("attackers", options["attackers"])
    for name, values in (("num_byzantine", [options["num_byzantine"]]), ("attackers", options["attackers"])):
        for value in values:
            validate.integer(name, value, 1, (m - 3) // 2, hint="Krum needs 2 f + 3 <= m.")
    if list(options["attackers"]) != sorted(set(options["attackers"])):
        validate.fail("attackers", "rising numbers", list(options["attackers"]))
    validate.integer("dimension", options["dimension"], 1, 10_000)
    validate.integer("num_draws", options["num_draws"], 2)
    validate.integer("seed", options["seed"], 0)


def _messages(key: Array, m: int, dimension: int) -> Array:
    """Draws honest messages with mean 0.5 and unit variance, [m, d]."""
    return 0.5 + normal(key, (m, dimension))


def _breakdown_points(key: Array, m: int, f: int, dimension: int) -> Iterator[Comparison]:
    """Measures the smallest number of attackers that breaks each rule, when all send the same far message.

    Args:
      key: of the honest messages.
      m: number of messages.
      f: number of attackers that the rules are built for.
      dimension: d.

    Yields: for each rule the number of attackers, in [1, m]; m if m - 1 do not break it.
    """
    x = _messages(key, m, dimension)
    for name, make in RULES.items():
        rule = LONG if name == "geometric median" else make(m, f)
        # For 1, ..., m - 1 attackers.
        shifts = jax.device_get(_shifts(rule, key, x)) / (FAR * np.sqrt(dimension))
        is_broken = shifts > BROKEN
        fewest = 1 + int(np.argmax(is_broken)) if is_broken.any() else m
        conditions = {"part": "far messages", "rule": name, "attackers": None}
        yield measured(conditions, "fewest attackers that break it", fewest, _predicted_point(name, m, f))


def _shifts(rule: Aggregator, key: Array, x: Array) -> Array:
    """Returns how far 1, ..., m - 1 attackers at FAR move a rule from the honest mean, [m - 1]."""

    @partial(jax.jit, compiler_options=engine.compiler_options())
    def all_shifts(numbers):
        def shift(number):
            is_attacker = jnp.arange(x.shape[0]) < number
            messages = jnp.where(is_attacker[:, None], FAR, x)
            honest_mean = jnp.where(is_attacker[:, None], 0, x).sum(0) / (~is_attacker).sum()
            return jnp.sqrt(((released(rule, key, messages) - honest_mean) ** 2).sum())

        return jax.lax.map(shift, numbers)

    return kept_results.call(all_shifts, jnp.arange(1, x.shape[0], dtype=jnp.int32))


def _predicted_point(name: str, m: int, f: int) -> int:
    """Returns the breakdown point by the closed form, for attackers who all send the same far message.

    Krum scores a message by its squared distances to its m - f - 2 nearest messages, and distances to far messages
    decide. With a attackers, an honest message has max(0, a - f - 1) attackers among its nearest. An attacker's message
    has max(0, m - f - 1 - a) honest messages among them. So honest messages win while a < m / 2. Multi-Krum takes
    m - f - 2 messages, which are all honest while there are that many honest messages.

    Args:
      name: the rule, a key of `RULES`.
      m: messages in a round, odd.
      f: the number of attackers that the rule is set for, with 2 f + 3 <= m.

    Returns: the fewest attackers that break the rule, in [1, m]; m says that no number below m does.
    """
    majority = (m + 1) // 2
    num_averaged = max(m - f - 2, 1)  # by multi-Krum
    return {
        "mean": 1,
        "median": majority,
        "trimmed mean": f + 1,
        "Krum": majority,
        "multi-Krum": min(majority, m - num_averaged + 1),
        "geometric median": majority,
        "centred clipping": m,
        "mixing, trimmed mean": f + 1,
    }[name]


def _bounds(key: Array, m: int, attackers: Sequence[int], dimension: int, num_draws: int) -> Iterator[Comparison]:
    """Compares the worst attack of each draw on rules that know f with the proven bound on any attack.

    Let H be the m - f honest messages, with mean mu and variance v = sum_{i in H} |x_i - mu|^2 / (m - f). What is
    measured is |rule(x) - mu|^2 / v, the largest over the attacks. The bound is the rule's coefficient kappa(m, f).

    Args:
      key: the random key of all draws.
      m: messages in a round, odd.
      attackers: [F] numbers of attackers f, rising, with 2 f + 3 <= m. Clients 0 to f - 1 attack.
      dimension: d of a message.
      num_draws: R sets of messages, the same for all rules, attacks and f.

    Yields: for each f and each rule a comparison, whose samples are R ratios.
    """
    attacks = [attack for name, attack in ATTACKS.items() if name != "none"]
    settings = [(name, f) for f in attackers for name in (*RULE_NAMES, "mixing, trimmed mean")]
    rules = [RULES[name](m, f) for name, f in settings]

    def squared_shift(args):
        key, index, attack, number = args
        x = _messages(key, m, dimension)
        is_honest = jnp.arange(m)[:, None] >= number
        rule = adversary.corrupted(rule_of_index(rules, index), attack_of_index(attacks, attack), first_clients(number))
        honest_mean = jnp.where(is_honest, x, 0).sum(0) / is_honest.sum()
        variance = jnp.where(is_honest, (x - honest_mean[None]) ** 2, 0).sum() / is_honest.sum()
        return ((released(rule, key, x) - honest_mean) ** 2).sum() / variance

    # Every combination of a setting, an attack and a draw is a row; rows run one after the other (`study.switched`).
    shape = len(settings), len(attacks), num_draws
    index, attack, draw = (x.reshape(-1) for x in jnp.indices(shape, jnp.int32))
    numbers = jnp.asarray([f for _, f in settings], jnp.int32)[index]
    all_shifts = jax.jit(lambda *rows: jax.lax.map(squared_shift, rows), compiler_options=engine.compiler_options())
    keys = jax.random.split(key, num_draws)[draw]  # one draw has the same messages for all settings and attacks
    all_ratios = kept_results.call(all_shifts, keys, index, attack, numbers)
    worst = np.asarray(all_ratios).reshape(shape).max(1)
    for (name, f), ratios in zip(settings, worst, strict=True):
        coefficients = theory.robustness_coefficients(m, f)
        bounds: dict[str, float] = dict(
            zip(RULE_NAMES, (getattr(coefficients, field) for field in BOUNDED), strict=True)
        )
        bounds["mixing, trimmed mean"] = coefficients.mixed(m, f).trimmed_mean
        conditions = {"part": "worst attack", "rule": name, "attackers": f}
        yield measured(conditions, "squared shift / variance", ratios, bounds[name], kind="upper bound")
