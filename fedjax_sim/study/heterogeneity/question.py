"""How different are the clients, by which measure, and does it tell how much slower training is?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, models, population, sampling, theory, validate
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, Findings, measured
from fedjax_sim.study.heterogeneity.figure import heterogeneity_figure, heterogeneity_reading
from fedjax_sim.study.quadratic_settings import LARGEST, quadratic_clients
from fedjax_sim.types import Population

__all__ = ["heterogeneity"]

QUESTION = "How different are the clients, and how much slower does that make training?"
EXAMPLES, COHORT, HIDDEN = 40, 10, 32
STEP_SIZES = np.geomspace(0.005, 1 / LARGEST, 40)  # of which the best is taken
SHARE = 1e-3  # of the start's excess loss: the target on quadratics
MAX_ROUNDS = 300


def heterogeneity(
    *,
    spreads: Sequence[float] = (0.0, 0.25, 0.5, 1.0, 2.0),
    num_clients: int = 20,
    dimension: int = 4,
    num_steps: int = 5,
    alphas: Sequence[float] = (0.03, 0.1, 0.3, 1.0, 10.0),
    synthetic: Sequence[float] = (0.0, 0.5, 1.0),
    model_clients: int = 100,
    learning_rate: float = 0.1,
    reference_rounds: int = 25,
    num_rounds: int = 150,
    num_runs: int = 8,
    seed: int = 0,
) -> Findings:
    """How different are the clients? Measures of heterogeneity, and how they go with the rounds that training takes.

    Distances of two label distributions, with the models that fit them; quadratic clients, whose rounds to a target at
    the best constant step have a closed form; and digits with Dirichlet labels and Synthetic(alpha, alpha), each beside
    the same examples dealt to the same clients at random: the slowdown is the ratio of their rounds.

    Args:
      spreads: of the quadratic clients' optima. num_clients: N; dimension: d.
      num_steps: K of FedAvg everywhere.
      alphas: of the digits' label shares. synthetic: alpha = beta of Synthetic. Empty leaves them out.
      model_clients: N of the digits, a third of it of Synthetic; ten a round, batches of ten.
      learning_rate: of the models' local steps.
      reference_rounds: the target is the mean test loss of the shuffled clients after that many.
      num_rounds: T; who needs more has no slowdown. num_runs: of each model.
      seed: decides everything.

    Returns: `Findings`.

    Guarantees: every prediction lies in its interval (tests/study/test_heterogeneity.py::test_predictions_hold), and a
    round more or less does not (::test_it_can_tell_another_round); dealing at random takes heterogeneity away and
    leaves the examples (::test_shuffled_clients_hold_the_same_examples).

    References: Li et al. 2020 (FedProx), definition 3 and section 5.1; Hsu, Qi and Brown 2019; Zhao et al. 2018.
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    found = [*_labels()]
    found += _quadratics(num_clients, dimension, num_steps, sorted({*spreads}), seed)
    families = {
        "digits MLP": [_digits(model_clients, value, seed) for value in sorted({*alphas})],
        "Synthetic": [_synthetic(max(COHORT, model_clients // 3), value, seed) for value in sorted({*synthetic})],
    }
    for name, fields in families.items():
        if fields:
            found += _models(key, name, fields, options)
    found += _correlations(found)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    theories = {"spreads": spreads, "path": lambda spread: _best(num_clients, dimension, num_steps, spread, seed)[2]}
    reading = list(heterogeneity_reading(options, found))
    return Findings("heterogeneity", QUESTION, found, reading, lambda: heterogeneity_figure(found, **theories), options)


def _check(options: dict[str, Any]) -> None:
    for name, least in (("spreads", 1), ("alphas", 0), ("synthetic", 0)):
        validate.sequence(name, options[name], least=least)
    for name in ("spreads", "synthetic"):
        for value in options[name]:
            validate.in_range(name, value, 0, 100)
    for value in options["alphas"]:
        validate.positive("alphas", value)
    for name, low, high in (
        ("num_clients", 2, 10_000), ("dimension", 1, 40), ("num_steps", 1, 200), ("model_clients", COHORT, 100_000),
        ("reference_rounds", 1, 10_000), ("num_rounds", 1, 10_000), ("num_runs", 2, 1000),
    ):  # fmt: skip
        validate.integer(name, options[name], low, high)
    validate.integer("seed", options["seed"], 0)
    validate.in_range("learning_rate", options["learning_rate"], 0, 10, open_low=True)
    if options["num_rounds"] <= options["reference_rounds"]:
        validate.fail("num_rounds", "more than reference_rounds", options["num_rounds"])


def _labels() -> Iterator[Comparison]:
    """Two sites of ten values each: the gap of the constants that they fit, under squared loss."""

    def loss(params, examples, key):
        return {"loss": (params["w"] - examples["y"]) ** 2 / 2}

    def make(rate):
        return algorithms.fedavg(loss, sampling.full(1), optax.sgd(rate), num_steps=1, mesh=None)

    pairs = {
        "(.2, .5, .3) and (.5, .3, .2)": ((2, 5, 3), (5, 3, 2)),
        "(.5, 0, .5) and (0, 1, 0)": ((5, 0, 5), (0, 10, 0)),
    }
    values = np.arange(3.0)
    sites = [np.repeat(values, counts).astype(np.float32) for pair in pairs.values() for counts in pair]
    clients = stacked([population.stored({"y": site}, [0, len(site)]) for site in sites])
    keys = jax.random.split(jax.random.key(0), len(sites))
    runs = traced_runs(make, lambda params, target: {"w": params["w"]})
    best = runs(keys, {"w": jnp.zeros(len(sites))}, clients, (jnp.full(len(sites), 0.5),), jnp.zeros(len(sites)), [60])
    for (name, pair), (first, second) in zip(pairs.items(), best["w"].reshape(-1, 2), strict=True):
        laws = np.array(pair) / 10
        conditions, gap = {"part": "labels 0, 1, 2", "population": name}, abs(first - second)
        distance = metrics.earth_mover_distance(*laws, values)
        yield measured(
            conditions, "gap of the fitted constants", gap, metrics.optimum_gap(*laws, values), resolution=1e-6
        )
        yield measured(
            conditions, "gap, and earth mover's distance", gap, distance, kind="upper bound", resolution=1e-6
        )
        for words, value in (("total variation", metrics.total_variation(*laws)), ("L1", metrics.l1_distance(*laws)),
                             ("Jensen-Shannon", metrics.jensen_shannon_divergence(*laws))):  # fmt: skip
            yield measured(conditions, words, value)


def _best(size: int, dimension: int, k: int, spread: float, seed: int) -> tuple[Any, float, float]:
    """(problem, step, rounds): the constant step with the fewest rounds to the target, by the closed form."""
    problem = quadratic_clients(size, dimension, spread, seed)
    best = problem, float(STEP_SIZES[0]), math.inf
    for eta in STEP_SIZES:
        path = theory.budget(*problem, step_size=float(eta), num_steps=k).expected_loss(MAX_ROUNDS, start=problem.start)
        rounds = metrics.rounds_to_target(path[1:], SHARE * path[0])
        if rounds < best[2]:
            best = problem, float(eta), rounds
    return best


def _quadratics(size: int, dimension: int, k: int, spreads: Sequence[float], seed: int) -> Iterator[Comparison]:
    def make(eta):
        return algorithms.fedavg(
            population.quadratic_loss, sampling.full(size), optax.sgd(eta), num_steps=k, weighting="uniform", mesh=None
        )

    def excess(params, target):
        away = params["w"] - target["optimum"]
        return {"loss": away @ target["hessian"] @ away / 2}

    best = [_best(size, dimension, k, spread, seed) for spread in spreads]
    problems = [one[0] for one in best]
    starts = {"w": jnp.asarray(np.stack([one.start for one in problems]), jnp.float32)}
    goals = stacked([
        {"optimum": jnp.asarray(one.optimum, jnp.float32), "hessian": jnp.asarray(one.hessians.mean(0), jnp.float32)}
        for one in problems
    ])  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(best))
    etas = (jnp.asarray([eta for _, eta, _ in best], jnp.float32),)
    last = max([10, *(int(rounds) for *_, rounds in best if math.isfinite(rounds))]) + 1
    clients = stacked([one.clients() for one in problems])
    paths = traced_runs(make, excess)(keys, starts, clients, etas, goals, np.arange(1, last + 1))["loss"]
    for spread, (problem, eta, rounds), path in zip(spreads, best, paths, strict=True):
        conditions = {"part": "quadratics", "population": f"spread {spread:g}", "step_size": float(f"{eta:.3g}")}
        at = {"w": jnp.asarray(problem.optimum, jnp.float32)}
        seen = metrics.gradient_heterogeneity(population.quadratic_loss, at, problem.clients())
        yield measured(conditions, "gradient dissimilarity", seen.dissimilarity)
        expected = theory.budget(*problem, step_size=eta, num_steps=k).expected_loss(last, start=problem.start)
        target = SHARE * expected[0]
        if not math.isfinite(rounds):
            yield measured(
                conditions, "loss after the last round", path[-1], expected[-1], resolution=1e-5 * expected[0]
            )
            continue
        unsure = int((np.abs(expected[1:] / target - 1) < 1e-4).sum())
        count = metrics.rounds_to_target(path, target)
        count = count if math.isfinite(count) else float(last + 1)
        yield measured(conditions, "rounds to target", count, rounds, resolution=unsure)


class _Field(NamedTuple):
    """A population, and the same examples dealt to clients of the same sizes at random."""

    name: str
    own: Population
    shuffled: Population
    test: Any
    loss_fn: Any
    params: Any
    counts: np.ndarray  # [N, L] labels


def _field(name: str, data: Any, hidden: tuple[int, ...], seed: int) -> _Field:
    everything = population.pooled(data.train).examples
    offsets = np.concatenate([[0], np.cumsum(np.asarray(data.train.sizes))])
    rows = np.arange(offsets[-1], dtype=np.int32)
    dealt = np.random.default_rng([seed, 1]).permutation(rows)
    build = models.mlp if hidden else models.linear
    model = build(input_shape=data.input_shape, num_outputs=data.num_outputs, **({"hidden": hidden} if hidden else {}))
    loss_fn = _loss_fn(model, data.task)
    counts = metrics.label_counts(data.train, num_labels=data.num_outputs)
    own, shuffled = (population.indexed(everything, (order, offsets)) for order in (rows, dealt))
    return _Field(name, own, shuffled, data.test, loss_fn, model.init(jax.random.key(seed))[0], counts)


def _loss_fn(model: Any, task: str) -> Any:
    return models.supervised(model, models.default_loss(task))


def _digits(size: int, alpha: float, seed: int) -> _Field:
    data = population.digits(
        num_clients=size, alpha=alpha, min_examples=EXAMPLES, max_examples=EXAMPLES, held_out_clients=0, seed=seed
    )
    return _field(f"alpha {alpha:g}", data, (HIDDEN,), seed)


def _synthetic(size: int, alpha: float, seed: int) -> _Field:
    data = population.synthetic(alpha=alpha, beta=alpha, num_clients=size, max_examples=100, seed=seed)
    return _field(f"({alpha:g}, {alpha:g})", data, (), seed)


def _models(key: Any, name: str, fields: Sequence[_Field], options: dict[str, Any]) -> Iterator[Comparison]:
    """Measures of each population at the first model, and its slowdown."""
    runs, last, size = options["num_runs"], options["num_rounds"], fields[0].own.size
    loss_fn, params = fields[0].loss_fn, fields[0].params

    def make(rate):
        return algorithms.fedavg(
            loss_fn, sampling.uniform(size, COHORT), optax.sgd(rate), num_steps=options["num_steps"], batch_size=10,
            mesh=None,
        )  # fmt: skip

    def evaluation(params, test):
        return {"loss": metrics.pooled(loss_fn, params, test)["loss"]}

    train = traced_runs(make, evaluation)
    keys, rates = jax.random.split(stream(key, name), runs), (jnp.full(2 * runs, options["learning_rate"]),)
    for field in fields:
        conditions = {"part": name, "population": field.name}
        clients = stacked([field.own] * runs + [field.shuffled] * runs)
        test = stacked([jax.tree.map(jnp.asarray, field.test)] * 2 * runs)
        both = jnp.concatenate([keys, keys])  # the same cohorts on both sides
        losses = train(both, stacked([params] * 2 * runs), clients, rates, test, np.arange(1, last + 1))["loss"]
        own, shuffled = losses[:runs], losses[runs:]
        labels = metrics.label_heterogeneity(field.counts, positions=np.arange(field.counts.shape[1]))
        for words, value in labels.items():
            yield measured(conditions, words.replace("_", " "), value)
        seen = metrics.gradient_heterogeneity(loss_fn, params, field.own)
        mixed = metrics.gradient_heterogeneity(loss_fn, params, field.shuffled)
        yield measured(conditions, "gradient dissimilarity", seen.dissimilarity)
        yield measured(conditions, "gradient dissimilarity, shuffled", mixed.dissimilarity)
        yield measured(conditions, "B dissimilarity", seen.b_dissimilarity)
        yield measured(conditions, "gradient diversity", seen.diversity)
        target = shuffled[:, options["reference_rounds"] - 1].mean()
        counts = np.array([[metrics.rounds_to_target(path, target) for path in side] for side in (own, shuffled)])
        if np.isfinite(counts).all():
            half = float((0.5 / counts[1]).mean())  # of a round: counts are whole
            yield measured(conditions, "slowdown", counts[0] / counts[1], resolution=half)
        else:
            yield measured(conditions, "loss after the last round / target", own[:, -1] / target)


MEASURES = (
    "total variation", "l1 distance", "kullback leibler", "jensen shannon", "earth mover distance", "labels per client",
    "gradient dissimilarity", "B dissimilarity", "gradient diversity",
)  # fmt: skip


def _correlations(found: Sequence[Comparison]) -> Iterator[Comparison]:
    """Spearman's, of each measure with the slowdown, over the populations that have one."""
    from scipy import stats

    for name, parts in (("digits MLP", ("digits MLP",)), ("both families", ("digits MLP", "Synthetic"))):
        known = {(one.conditions["part"], one.conditions["population"], one.quantity): one.measured for one in found}
        fields = [key[:2] for key in known if key[0] in parts and key[2] == "slowdown"]
        slow = [known[*field, "slowdown"] for field in fields]
        if len(fields) < 4 or len({field[0] for field in fields}) < len(parts) or len({*slow}) < 2:
            continue
        for measure in MEASURES:
            rank = stats.spearmanr([known[*field, measure] for field in fields], slow).statistic
            conditions = {"part": f"rank correlation with the slowdown, {name}", "population": f"{len(fields)} of them"}
            if math.isfinite(rank):
                yield Comparison(conditions, measure, float(rank), math.nan)  # of random slowdowns, without an interval
