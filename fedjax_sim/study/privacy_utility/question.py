"""This study measures what privacy costs: error of the released mean, error floor and accuracy against epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import (
    aggregation,
    client,
    metrics,
    models,
    population,
    privacy,
    sampling,
    server,
    theory,
    transform,
    validate,
)
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import FEW, Comparison, Findings, least_runs, measured, rows_of
from fedjax_sim.study.privacy_utility.claims import privacy_utility_claims
from fedjax_sim.study.privacy_utility.figure import privacy_utility_figure
from fedjax_sim.study.privacy_utility.spending import NUM_ROUNDS, STEP_SIZE, epsilon_of, release_of
from fedjax_sim.study.problems import Vectors, side_by_side
from fedjax_sim.types import Array

QUESTION = "What does privacy cost?"
# The norm of the longest update at the optimum, in clip norms. The rest is room for noise, so no update is clipped.
LONGEST_UPDATE = 0.1


def privacy_utility(
    *,
    num_clients: int = 100,
    dimension: int = 32,
    clip_norm: float = 1.0,
    noise_multipliers: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
    epsilons: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
    delta: float = 1e-5,
    num_releases: int = 8000,
    num_runs: int = 400,
    digits_clients: int = 400,
    digits_rounds: int = 40,
    digits_runs: int = 8,
    seed: int = 0,
) -> Findings:
    """What does privacy cost? Measures error of the released mean, error floor and accuracy against z and epsilon.

    In the first part all clients take part and no update is clipped, so noise is the only error. The study `clip`
    measures the cost of clipping. In the second part Poisson cohorts of the digits' clients train an MLP, whose
    accuracy is measured and not predicted.

    Args:
      num_clients: m of the first part.
      dimension: d.
      clip_norm: C.
      noise_multipliers: z.
      epsilons: each gives a further z, calibrated for all rounds of a run together.
      delta: the delta of every epsilon; it should lie below 1 / number of clients.
      num_releases: rounds behind each squared error.
      num_runs: runs behind each floor.
      digits_clients: N of the digits, a tenth of them expected in a round; 0 leaves them out.
      digits_rounds: rounds of each run on the digits.
      digits_runs: independent runs on the digits.
      seed: decides everything.

    Returns: `Findings`: E |release - mean|^2, E |w - w*|^2 at the error floor, test accuracy and loss of the digits.

    Guarantees: every prediction lies in its interval, which is 1 % of it for a release at default settings
    (tests/study/test_privacy_utility.py::test_predictions_hold). Noise at another place does not
    (::test_it_can_tell_another_noise).

    References: McMahan et al. 2018; Balle and Wang 2018 for the multiplier of an epsilon.
    """
    options = dict(locals())
    _check(options)
    key = jax.random.key(seed)
    release = release_of(options)
    # (part, z, epsilon): given multipliers with the epsilon that they spend, and multipliers from given epsilons.
    settings = [("noise multiplier", z, epsilon_of(z, delta, release)) for z in noise_multipliers]
    settings += [("epsilon", privacy.calibrate(epsilon, delta, NUM_ROUNDS, **release).noise_multiplier, epsilon)
                 for epsilon in epsilons]  # fmt: skip
    _check_room(max(z for _, z, _ in settings), num_clients, dimension)
    rng = np.random.default_rng([seed, num_clients])
    values = rng.normal(size=(num_clients, dimension))
    values -= values.mean(0)
    # A local step of size eta makes updates eta u_i at the optimum, the longest of them LONGEST_UPDATE clip norms.
    values *= LONGEST_UPDATE * clip_norm / STEP_SIZE / np.linalg.norm(values, axis=1).max()
    comparisons = list(_noise(key, Vectors(values), settings, clip_norm, num_releases=num_releases, num_runs=num_runs))
    if digits_clients:
        comparisons += _digits(key, digits_clients, epsilons, delta, rounds=digits_rounds, runs=digits_runs, seed=seed)
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    rows = rows_of(comparisons)
    return Findings(
        name="privacy_utility",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(privacy_utility_claims(rows, options)),
        figure=partial(privacy_utility_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `privacy_utility`, by name.
    """
    validate.integer("num_clients", options["num_clients"], 2)
    validate.integer("dimension", options["dimension"], 1, 10_000)
    validate.in_range("clip_norm", options["clip_norm"], 1e-3, 1e3)
    for name in ("noise_multipliers", "epsilons"):
        validate.sequence(name, options[name])
        for value in options[name]:
            validate.in_range(name, value, 1e-2, 1e3)
    validate.in_range("delta", options["delta"], 0, 1, open_low=True, open_high=True)
    for name in ("num_releases", "num_runs"):
        validate.integer(name, options[name], max(20, least_runs(options["dimension"])), hint=FEW)
    validate.integer("digits_clients", options["digits_clients"], 0)
    if options["digits_clients"]:
        validate.integer("digits_clients", options["digits_clients"], 100, hint="Or 0, to leave them out.")
    validate.integer("digits_rounds", options["digits_rounds"])
    validate.integer("digits_runs", options["digits_runs"], 2)
    validate.integer("seed", options["seed"], 0)


def _check_room(multiplier: float, num_clients: int, dimension: int) -> None:
    """Refuses noise so large that updates would be clipped at the floor.

    An update at the floor is longer than at the optimum by at most eta |w - w*|. This length hardly ever exceeds 1.6
    times its root mean square.
    """
    noise = theory.noise_variance(multiplier, 1.0, num_clients, num_values=dimension)
    squared_distance = theory.noise_floor(noise, 1 - STEP_SIZE)  # in clip norms
    if not (LONGEST_UPDATE + 1.6 * STEP_SIZE * math.sqrt(squared_distance) < 1):
        hint = "Take more clients, fewer dimensions or a larger epsilon: floors are predicted where nothing is clipped."
        validate.fail("noise_multipliers, epsilons", "noise that keeps updates below the clip norm", multiplier, hint)


def _noise(
    key: Array, clients: Vectors, settings: Sequence[tuple], clip_norm: float, *, num_releases: int, num_runs: int
) -> Iterator[Comparison]:
    """Measures runs that start at the optimum: after one round the error is its noise, after many it is the floor.

    Theory gives v = d (z C / m)^2 after one round, and v / (1 - r^2) at the floor, with r = 1 - eta.

    Args:
      key: the random key of all runs.
      clients: m clients with vectors [m, d]. No update is clipped.
      settings: (part, z, epsilon) of each comparison; epsilon is for the conditions.
      clip_norm: C.
      num_releases: independent runs of one round.
      num_runs: independent runs of `NUM_ROUNDS` rounds.

    Yields: for each quantity and each setting E |w - mean|^2 of the model w.
    """

    def make(multiplier):
        return clients.algorithm(transform.gaussian_mechanism(clip_norm, multiplier), step_size=STEP_SIZE)

    # All multipliers are rows of one algorithm, and so one program.
    algorithm = side_by_side(make, {"multiplier": [z for _, z, _ in settings]})
    for quantity, rounds, runs in (("squared error", 1, num_releases), ("floor", NUM_ROUNDS, num_runs)):
        errors = clients.errors(stream(key, quantity), algorithm, runs, rounds, start=clients.mean)
        for i, (part, z, epsilon) in enumerate(settings):
            # In a run with a constant step the noise of all rounds adds up, with weights that fall geometrically.
            predicted = theory.noise_variance(z, clip_norm, clients.size, num_values=clients.dimension)
            if rounds > 1:
                predicted = theory.noise_floor(predicted, 1 - STEP_SIZE)
            conditions = {"part": part, "noise_multiplier": z, "epsilon": epsilon}
            yield measured(conditions, quantity, errors[:, i], predicted, resolution=1e-5 * predicted)


def _digits(
    key: Array, size: int, epsilons: Sequence[float], delta: float, *, rounds: int, runs: int, seed: int
) -> Iterator[Comparison]:
    """Measures the accuracy of an MLP on digits under DP-FedAvg with Poisson cohorts, and without noise.

    Args:
      key: the random key of model and runs.
      size: N; a client takes part in a round with probability 1 / 10.
      epsilons: of all rounds together; each gives a noise multiplier z.
      delta: of every epsilon, in (0, 1).
      rounds: T.
      runs: R independent runs.
      seed: decides the clients' data.

    Yields: test accuracy, in [0, 1], and test loss after T rounds, without noise first and then for each epsilon.
    """
    data = population.digits(num_clients=size, seed=seed)
    model = models.mlp(input_shape=data.input_shape, num_outputs=data.num_outputs, hidden=(32,))
    loss_fn = models.supervised(model, models.default_loss(data.task))
    expected_cohort = size / 10
    # Six standard deviations above the mean: a cohort is hardly ever cut off by the number of slots.
    num_slots = min(size, math.ceil(expected_cohort + 6 * math.sqrt(expected_cohort)))
    sampler = sampling.poisson(size, 0.1, num_slots=num_slots)
    work = client.local_sgd(loss_fn, optax.sgd(0.5), client.work(num_steps=3, batch_size=10, weighting="uniform"))
    aggregator = aggregation.fixed_mean(expected_cohort)
    server_step = server.optimizer(optax.sgd(1.0))

    def make(multiplier):
        noise = transform.gaussian_mechanism(1.0, multiplier)
        return federated(sampler, work, aggregator, server_step, transform=noise, mesh=None)

    mechanism = privacy.mechanism_of(make(1.0))
    calibrations = [privacy.calibrate(epsilon, delta, rounds, mechanism) for epsilon in epsilons]
    # (epsilon, noise multiplier) of each row of the combined algorithm; the first row has no noise.
    settings = [
        ("none", 0.0),
        *((epsilon, calibration.noise_multiplier) for epsilon, calibration in zip(epsilons, calibrations, strict=True)),
    ]

    def evaluation(params):
        return jax.vmap(lambda row: metrics.pooled(loss_fn, row, jax.tree.map(jnp.asarray, data.test)))(params)

    start = model.init(jax.random.fold_in(key, 2))[0]
    algorithm = side_by_side(make, {"multiplier": [z for _, z in settings]})
    results = independent_runs(
        stream(key, "digits"), algorithm, start, data.train, runs, evaluation=evaluation, rounds=rounds
    )
    for i, (epsilon, z) in enumerate(settings):
        for quantity in ("accuracy", "loss"):
            conditions = {"part": "digits MLP", "noise_multiplier": z, "epsilon": epsilon}
            yield measured(conditions, "test " + quantity, results[quantity][:, i])
