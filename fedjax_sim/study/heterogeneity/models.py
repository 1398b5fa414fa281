"""Models on the digits and on Synthetic: measures of each population, and its slowdown against shuffled examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import algorithms, metrics, models, population, sampling
from fedjax_sim.instruments.traced_runs import stacked, traced_runs
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.types import Population

__all__ = ["COHORT", "ModelPopulation", "digits_population", "model_rows", "synthetic_population"]

EXAMPLES, COHORT, HIDDEN = 40, 10, 32


class ModelPopulation(NamedTuple):
    """A population with its model, and the same examples shuffled over clients of the same sizes."""

    name: str
    own: Population
    shuffled: Population
    test: Any
    loss_fn: Any
    params: Any
    counts: np.ndarray  # [N, L] of each label


def _population(name: str, data: Any, hidden: tuple[int, ...], seed: int) -> ModelPopulation:
    everything = population.pooled(data.train).examples
    offsets = np.concatenate([[0], np.cumsum(np.asarray(data.train.sizes))])
    rows = np.arange(offsets[-1], dtype=np.int32)
    dealt = np.random.default_rng([seed, 1]).permutation(rows)
    build = models.mlp if hidden else models.linear
    model = build(input_shape=data.input_shape, num_outputs=data.num_outputs, **({"hidden": hidden} if hidden else {}))
    loss_fn = _loss_fn(model, data.task)
    counts = metrics.label_counts(data.train, num_labels=data.num_outputs)
    own, shuffled = (population.indexed(everything, (order, offsets)) for order in (rows, dealt))
    return ModelPopulation(name, own, shuffled, data.test, loss_fn, model.init(jax.random.key(seed))[0], counts)


def _loss_fn(model: Any, task: str) -> Any:
    return models.supervised(model, models.default_loss(task))


def digits_population(size: int, alpha: float, seed: int) -> ModelPopulation:
    """Digits whose clients' label shares are Dirichlet(alpha), with an MLP."""
    data = population.digits(
        num_clients=size, alpha=alpha, min_examples=EXAMPLES, max_examples=EXAMPLES, held_out_clients=0, seed=seed
    )
    return _population(f"alpha {alpha:g}", data, (HIDDEN,), seed)


def synthetic_population(size: int, alpha: float, seed: int) -> ModelPopulation:
    """Synthetic(alpha, alpha) of Li et al. 2020 (FedProx), with a linear model."""
    data = population.synthetic(alpha=alpha, beta=alpha, num_clients=size, max_examples=100, seed=seed)
    return _population(f"({alpha:g}, {alpha:g})", data, (), seed)


def model_rows(key: Any, name: str, fields: Sequence[ModelPopulation], options: dict[str, Any]) -> Iterator[Comparison]:
    """Measures of each population at the first model, and its slowdown: rounds to the target over those when shuffled.

    Args:
      name: of the part. fields: its populations. options: of the study.
    """
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
