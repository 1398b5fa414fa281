"""This module measures heterogeneity of model populations and their slowdown against shuffled examples.

The populations are digits with Dirichlet labels and Synthetic(alpha, alpha).
"""

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

EXAMPLES = 40  # that each client of the digits has
COHORT = 10
HIDDEN = 32  # units of the MLP


class ModelPopulation(NamedTuple):
    """A `ModelPopulation` is a population with its model, and with its examples shuffled over clients of equal sizes.

    Fields:
      name: the name in the conditions, such as "alpha 0.1".
      own: the clients with their own examples.
      shuffled: clients of the same sizes that hold the same examples in random order.
      test: held-out examples.
      loss_fn: the training loss.
      params: the first model.
      counts: [N, L] examples of each label that each client holds.
    """

    name: str
    own: Population
    shuffled: Population
    test: Any
    loss_fn: Any
    params: Any
    counts: np.ndarray


def _population(name: str, data: Any, hidden: tuple[int, ...], seed: int) -> ModelPopulation:
    """Makes a population with an MLP, or with a linear model if `hidden` is empty.

    Args:
      name: the population's name in the conditions.
      data: a `FederatedData` of N clients with classification labels.
      hidden: units of the MLP's hidden layers.
      seed: decides the first model, and how examples are shuffled over clients.

    Returns: a `ModelPopulation`, with the clients' own examples and with shuffled ones.
    """
    all_examples = population.pooled(data.train).examples
    offsets = np.concatenate([[0], np.cumsum(np.asarray(data.train.sizes))])
    rows = np.arange(offsets[-1], dtype=np.int32)
    shuffled_rows = np.random.default_rng([seed, 1]).permutation(rows)
    build = models.mlp if hidden else models.linear
    model = build(input_shape=data.input_shape, num_outputs=data.num_outputs, **({"hidden": hidden} if hidden else {}))
    loss_fn = _loss_fn(model, data.task)
    counts = metrics.label_counts(data.train, num_labels=data.num_outputs)
    # Both populations index one table of examples, so their shapes and their memory are the same.
    own, shuffled = (
        population.indexed(all_examples, population.Partition(order, offsets)) for order in (rows, shuffled_rows)
    )
    return ModelPopulation(
        name=name,
        own=own,
        shuffled=shuffled,
        test=data.test,
        loss_fn=loss_fn,
        params=model.init(jax.random.key(seed))[0],
        counts=counts,
    )


def _loss_fn(model: Any, task: str) -> Any:
    """Returns the training loss of a model for a task."""
    return models.supervised(model, models.default_loss(task))


def digits_population(size: int, alpha: float, seed: int) -> ModelPopulation:
    """Makes clients of the digits with label shares from Dirichlet(alpha), and an MLP.

    Args:
      size: N.
      alpha: small values give clients with unlike labels.
      seed: decides data and model.
    """
    data = population.digits(
        num_clients=size, alpha=alpha, min_examples=EXAMPLES, max_examples=EXAMPLES, held_out_clients=0, seed=seed
    )
    return _population(f"alpha {alpha:g}", data, (HIDDEN,), seed)


def synthetic_population(size: int, alpha: float, seed: int) -> ModelPopulation:
    """Makes clients of Synthetic(alpha, alpha) of Li et al. 2020 (FedProx), and a linear model.

    Args:
      size: N.
      alpha: how much labelling and inputs differ between clients.
      seed: decides data and model.
    """
    data = population.synthetic(alpha=alpha, beta=alpha, num_clients=size, max_examples=100, seed=seed)
    return _population(f"({alpha:g}, {alpha:g})", data, (), seed)


def model_rows(key: Any, name: str, fields: Sequence[ModelPopulation], options: dict[str, Any]) -> Iterator[Comparison]:
    """Measures the heterogeneity of each population at the first model, and its slowdown.

    The slowdown is the number of rounds to the target, divided by the number that the shuffled clients need.

    Args:
      key: the random key of all runs.
      name: the part's name.
      fields: the part's populations, with one model and one size.
      options: the study's options.

    Yields: for each population its measures without predictions, then the slowdown. If a run misses the target, the
      loss after the last round over the target takes the place of the slowdown.
    """
    num_runs = options["num_runs"]
    last_round = options["num_rounds"]
    size = fields[0].own.size
    loss_fn = fields[0].loss_fn
    params = fields[0].params

    def make(rate):
        return algorithms.fedavg(
            loss_fn, sampling.uniform(size, COHORT), optax.sgd(rate), num_steps=options["num_steps"], batch_size=10,
            mesh=None,
        )  # fmt: skip

    def evaluation(params, test):
        return {"loss": metrics.pooled(loss_fn, params, test)["loss"]}

    train = traced_runs(make, evaluation)
    keys = jax.random.split(stream(key, name), num_runs)
    rates = (jnp.full(2 * num_runs, options["learning_rate"]),)
    for field in fields:
        conditions = {"part": name, "population": field.name}
        # The first half of the runs trains on the clients' own examples, the second half on shuffled examples.
        clients = stacked([field.own] * num_runs + [field.shuffled] * num_runs)
        test = stacked([jax.tree.map(jnp.asarray, field.test)] * 2 * num_runs)
        paired_keys = jnp.concatenate([keys, keys])  # run r draws the same cohorts in both halves
        starts = stacked([params] * 2 * num_runs)
        losses = train(paired_keys, starts, clients, rates, test, rounds=np.arange(1, last_round + 1))["loss"]
        own_losses = losses[:num_runs]
        shuffled_losses = losses[num_runs:]
        label_measures = metrics.label_heterogeneity(field.counts, positions=np.arange(field.counts.shape[1]))
        for measure, value in label_measures.items():
            yield measured(conditions, measure.replace("_", " "), value)
        own_gradients = metrics.gradient_heterogeneity(loss_fn, params, field.own)
        shuffled_gradients = metrics.gradient_heterogeneity(loss_fn, params, field.shuffled)
        yield measured(conditions, "gradient dissimilarity", own_gradients.dissimilarity)
        yield measured(conditions, "gradient dissimilarity, shuffled", shuffled_gradients.dissimilarity)
        yield measured(conditions, "B dissimilarity", own_gradients.b_dissimilarity)
        yield measured(conditions, "gradient diversity", own_gradients.diversity)
        # The target is what shuffled clients reach on average, so it does not depend on how hard the problem is.
        target = shuffled_losses[:, options["reference_rounds"] - 1].mean()
        rounds = np.array(
            [[metrics.rounds_to_target(path, target) for path in half] for half in (own_losses, shuffled_losses)]
        )
        if np.isfinite(rounds).all():
            half_a_round = float((0.5 / rounds[1]).mean())  # numbers of rounds are whole
            yield measured(conditions, "slowdown", rounds[0] / rounds[1], resolution=half_a_round)
        else:
            yield measured(conditions, "loss after the last round / target", own_losses[:, -1] / target)
