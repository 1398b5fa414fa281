"""How many attackers break a rule, and how far do fewer of them move it? Beside breakdown points and proven bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import adversary, aggregation, engine, theory, validate
from fedjax_sim.prng import normal, stream
from fedjax_sim.study.breakdown.figure import breakdown_figure
from fedjax_sim.study.breakdown.reading import breakdown_reading
from fedjax_sim.study.findings import Comparison, Findings, measured
from fedjax_sim.study.robust_digits import ATTACKS, RULES
from fedjax_sim.study.single_rounds import released
from fedjax_sim.study.switched import attack_of_index, first_clients, rule_of_index
from fedjax_sim.types import Aggregator, Array

__all__ = ["FAR", "breakdown"]

QUESTION = "How many attackers break a rule, and how far do fewer of them move it?"
FAR = 2.0**20  # what attackers who want to break a rule send, at each coordinate; honest numbers are some -3 to 4
BROKEN = 0.01  # a rule is broken that is moved by this share of it
LONG = aggregation.geometric_median(400)  # enough steps to follow a majority of 11 to 10 over a distance of 2^20
BOUNDED = ("trimmed_mean", "krum", "geometric_median", "median")  # of `theory.Robustness`
NAMES = ("trimmed mean", "Krum", "geometric median", "median")


def breakdown(
    *,
    num_messages: int = 21,
    num_byzantine: int = 5,
    attackers: Sequence[int] = (1, 3, 5, 7, 9),
    dimension: int = 16,
    num_draws: int = 200,
    seed: int = 0,
) -> Findings:
    """How many attackers break a rule, and how far do fewer of them move it? Beside breakdown points and proven bounds.

    Messages are normal. First attackers all send one number that is far away, and more and more of them; rules that
    are told a number of attackers are told f, and the geometric median makes 400 steps, for after few it has not
    followed a majority yet. Then each rule is told the true number, and what the worst of the attacks does to it is
    compared with its bound.

    Args:
      num_messages: m, odd, so that no majority is even.
      num_byzantine: f, 2 f + 3 <= m.
      attackers: numbers of them for the bounds, rising; each as f.
      dimension: d. num_draws: rounds behind each bound.
      seed: decides everything.

    Returns: `Findings`: fewest attackers that break a rule (m: none do), and |rule - mean|^2 in units of the honest
      messages' variance.

    Guarantees: every breakdown point is that of its closed form, and no attack exceeds a bound
    (tests/study/test_breakdown.py::test_predictions_hold).

    References: Huber 1981; Blanchard et al. 2017; Allouah et al. 2023, table 1.
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    found = [*_points(stream(key, "far"), num_messages, num_byzantine, dimension)]
    found += _bounds(stream(key, "bounds"), num_messages, attackers, dimension, num_draws)
    options["attackers"] = list(attackers)
    reading = list(breakdown_reading(found, options))
    return Findings("breakdown", QUESTION, found, reading, partial(breakdown_figure, found, options), options)


def _check(options: dict[str, Any]) -> None:
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
    return 0.5 + normal(key, (m, dimension))


def _points(key: Array, m: int, f: int, dimension: int) -> Iterator[Comparison]:
    """The fewest attackers that break each rule, all with the same far message."""
    x = _messages(key, m, dimension)
    for name, make in RULES.items():
        rule = LONG if name == "geometric median" else make(m, f)
        far = jax.device_get(_moved(rule, key, x)) / (FAR * np.sqrt(dimension))  # of 1, ..., m - 1 attackers
        fewest = 1 + int(np.argmax(far > BROKEN)) if (far > BROKEN).any() else m
        conditions = {"part": "far messages", "rule": name, "attackers": None}
        yield measured(conditions, "fewest attackers that break it", fewest, _point(name, m, f))


def _moved(rule: Aggregator, key: Array, x: Array) -> Array:
    """[m - 1] how far 1, ..., m - 1 attackers at FAR move a rule from the honest mean."""

    @partial(jax.jit, compiler_options=engine.compiler_options())
    def every(numbers):
        def one(number):
            bad = jnp.arange(x.shape[0]) < number
            sent = jnp.where(bad[:, None], FAR, x)
            mean = jnp.where(bad[:, None], 0, x).sum(0) / (~bad).sum()
            return jnp.sqrt(((released(rule, key, sent) - mean) ** 2).sum())

        return jax.lax.map(one, numbers)

    return every(jnp.arange(1, x.shape[0], dtype=jnp.int32))


def _point(name: str, m: int, f: int) -> int:
    """The closed form, for attackers who all send the same far message.

    Krum's scores count squared distances of FAR: with a attackers an honest message has max(0, a - f - 1) of them among
    its nearest, an attacker's max(0, m - f - 1 - a). So honest ones win while a < m / 2, and those m - f - 2 that
    multi-Krum takes are honest while there are as many.
    """
    majority, most = (m + 1) // 2, max(m - f - 2, 1)
    return {
        "mean": 1,
        "median": majority,
        "trimmed mean": f + 1,
        "Krum": majority,
        "multi-Krum": min(majority, m - most + 1),
        "geometric median": majority,
        "centred clipping": m,
        "mixing, trimmed mean": f + 1,
    }[name]


def _bounds(key: Array, m: int, attackers: Sequence[int], dimension: int, num_draws: int) -> Iterator[Comparison]:
    """The worst attack of each draw on rules that know f, beside what no attack can exceed."""
    attacks = [attack for name, attack in ATTACKS.items() if name != "none"]
    settings = [(name, f) for f in attackers for name in (*NAMES, "mixing, trimmed mean")]
    rules = [RULES[name](m, f) for name, f in settings]

    def one(args):
        key, index, attack, number = args
        x, honest = _messages(key, m, dimension), jnp.arange(m)[:, None] >= number
        rule = adversary.corrupted(rule_of_index(rules, index), attack_of_index(attacks, attack), first_clients(number))
        mean = jnp.where(honest, x, 0).sum(0) / honest.sum()
        spread = jnp.where(honest, (x - mean[None]) ** 2, 0).sum() / honest.sum()
        return ((released(rule, key, x) - mean) ** 2).sum() / spread

    shape = len(settings), len(attacks), num_draws
    index, attack, draw = (x.reshape(-1) for x in jnp.indices(shape, jnp.int32))
    numbers = jnp.asarray([f for _, f in settings], jnp.int32)[index]
    every = jax.jit(lambda *rows: jax.lax.map(one, rows), compiler_options=engine.compiler_options())
    keys = jax.random.split(key, num_draws)[draw]
    worst = np.asarray(every(keys, index, attack, numbers)).reshape(shape).max(1)
    for (name, f), ratios in zip(settings, worst, strict=True):
        known = theory.robustness_coefficients(m, f)
        bounds = dict(zip(NAMES, (getattr(known, field) for field in BOUNDED), strict=True))
        bounds["mixing, trimmed mean"] = known.mixed(m, f).trimmed_mean
        conditions = {"part": "worst attack", "rule": name, "attackers": f}
        yield measured(conditions, "squared shift / variance", ratios, bounds[name], kind="upper bound")
