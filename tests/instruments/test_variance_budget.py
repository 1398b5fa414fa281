"""The variance budget: each part against what is known of it, their sum against real rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, algorithms, client, population, run, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.instruments.runs import independent_runs, squared_distance
from fedjax_sim.instruments.variance_budget import variance_budget
from fedjax_sim.theory.floor import SOURCES

SIZE, ROWS, BATCH, COHORT, DIMENSION = 30, 6, 2, 6, 3
RNG = np.random.default_rng(0)
VALUES = (RNG.normal(size=(SIZE, 1, DIMENSION)) + 0.7 * RNG.normal(size=(SIZE, ROWS, DIMENSION))).astype(np.float32)
CLIENTS = population.from_clients([{"x": values} for values in VALUES])
ZERO = {"w": jnp.zeros(DIMENSION)}


def loss(params, examples, key):
    return {"loss": 0.5 * jnp.sum((params["w"][None] - examples["x"]) ** 2, -1)}


def algorithm(sampler=None, rule=None, member=None, weighting="uniform", mesh=None):
    work = client.local_sgd(loss, optax.sgd(1.0), client.work(num_steps=1, batch_size=BATCH, weighting=weighting))
    sampler = sampling.uniform(SIZE, COHORT) if sampler is None else sampler
    rule = aggregation.fixed_mean(COHORT) if rule is None else rule
    return federated(sampler, work, rule, server.optimizer(optax.sgd(1.0)), member, mesh=mesh)


BOTH = transform.chain(transform.quantize(3, range=6.0), transform.gaussian_mechanism(20.0, 0.02))


def budget(made):
    return variance_budget(made, ZERO, CLIENTS, num_clients=12)


def estimates(evaluation, count=400):
    """[count] estimates of each part, at models that differ so little that the truth is the same."""
    seen = [evaluation({"w": jnp.full(DIMENSION, 1e-4 * i)}) for i in range(count)]
    return {name: np.array([float(row[f"variance_{name}"]) for row in seen]) for name in (*SOURCES, "total")}


@functools.cache
def of_both():
    return budget(algorithm(member=BOTH))


@functools.cache
def found():
    return estimates(of_both())


def accepted(samples, truth):
    """Within 4.5 standard errors (false alarm 1e-5), and these are below 5 % of it."""
    error = samples.std(ddof=1) / np.sqrt(samples.size)
    assert error < 0.05 * truth
    assert abs(samples.mean() - truth) < 4.5 * error, (samples.mean(), truth, error)


def test_parts_are_those_of_real_rounds():
    """Fault: a mean square without its correction, a divisor, minibatches that are counted with clients, noise lost."""
    means = VALUES.astype(np.float64).mean(1)
    between = ((means - means.mean(0)) ** 2).sum() / (SIZE - 1)
    accepted(found()["client_sampling"], between / COHORT * (1 - COHORT / SIZE))
    within = ((VALUES - means[:, None]) ** 2).sum() / SIZE / (ROWS - 1)
    accepted(found()["minibatch"], within / BATCH * (1 - BATCH / ROWS) / COHORT)
    np.testing.assert_allclose(found()["privacy_noise"], DIMENSION * (0.02 * 20 / COHORT) ** 2, rtol=1e-6)
    for name in SOURCES[:2]:
        assert found()[name].std() > 0  # other clients at each model
    total = sum(found()[name] for name in SOURCES)
    np.testing.assert_allclose(found()["total"], total, rtol=1e-5)


CASES = {
    "all": lambda: algorithm(member=BOTH),
    "poisson": lambda: algorithm(sampling.poisson(SIZE, COHORT / SIZE)),
    "realised": lambda: algorithm(sampling.poisson(SIZE, 0.5), aggregation.mean(weighting="uniform")),
    "replacement": lambda: algorithm(sampling.with_replacement(SIZE, COHORT), aggregation.mean()),
    "local noise": lambda: algorithm(member=transform.local_gaussian(20.0, 0.01)),
}


SOME = ("all", "poisson")
ALL = [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ALL)
def test_the_sum_is_the_variance_of_real_rounds(name):
    """Fault: a sampling design, a divisor or a message's factor that differs from the round's."""
    made = CASES[name]()
    total = (found() if name == "all" else estimates(budget(made), 100))["total"]
    runs = independent_runs(
        jax.random.key(5), made, ZERO, CLIENTS, 4000, batch=500,
        evaluation=lambda params: squared_distance(ZERO)(params) | {f"w{i}": params["w"][i] for i in range(DIMENSION)},
    )  # fmt: skip
    rounds = np.stack([runs[f"w{i}"] for i in range(DIMENSION)], 1)
    squares = ((rounds - rounds.mean(0)) ** 2).sum(1)
    error = np.hypot(total.std() / np.sqrt(total.size), squares.std() / np.sqrt(squares.size))
    assert error < 0.05 * squares.mean()
    assert abs(total.mean() - squares.mean()) < 4.5 * error, (total.mean(), squares.mean(), error)


def test_deterministic_and_fresh():
    """Fault: another estimate after a resume, or the same clients at every model."""
    first, again, other = (float(of_both()({"w": jnp.full(3, w)})["variance_total"]) for w in (0.1, 0.1, 0.2))
    assert first == again != other


@pytest.mark.full
@pytest.mark.devices
def test_a_run_on_several_devices():
    """Fault: probes on all devices that cannot take a run's model, which is the copy of one device."""
    assert jax.device_count() > 1
    records = []
    for mesh in (None, "all"):
        made = algorithm(mesh=mesh)
        evaluation = variance_budget(made, ZERO, CLIENTS, num_clients=5)
        _, history = run(jax.random.key(0), made, ZERO, CLIENTS, 1, evaluation=evaluation)
        records.append(history.records)
    assert records[0] == records[1] and records[0][0]["variance_total"] > 0


def private():
    options = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_steps": 1, "batch_size": 2, "num_examples": ROWS}
    return algorithms.record_private_fedavg(loss, sampling.uniform(SIZE, COHORT), optax.sgd(0.1), **options)


def mime():
    return algorithms.mime(loss, sampling.uniform(SIZE, COHORT), optax.sgd(0.1), num_steps=1, weighting="uniform")


def noisy():
    """A star of a user's own, whose parts `federated` would have refused."""
    made = algorithm(member=transform.gaussian_mechanism(1.0, 1.0), rule=aggregation.fixed_mean(float(COHORT)))
    return made._replace(parts=made.parts._replace(aggregator=aggregation.mean()))


def attacked():
    last = adversary.clients([SIZE - 1])
    return algorithm(rule=adversary.corrupted(aggregation.mean(), adversary.sign_flip(), last))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: algorithm(sampling.weighted(np.arange(1, SIZE + 1), COHORT), aggregation.mean()), "sampler: expected"),
        (lambda: algorithm(rule=aggregation.keep_old(99.0)), "aggregator: expected a mean"),
        (
            lambda: algorithm(member=transform.adaptive_clip(1.0, initial_clip_norm=1.0, quantile_noise=1.0)),
            "transform: expected",
        ),
        (lambda: algorithm(member=transform.error_feedback(transform.top_k(0.5))), "messages that depend on the model"),
        (lambda: algorithm(rule=aggregation.extrapolated()), "aggregator: expected a mean"),
        (lambda: algorithm(rule=aggregation.norm_bounding(aggregation.mean(), 100.0)), "aggregator: expected a mean"),
        (lambda: algorithm(rule=aggregation.homomorphic_mean()), "aggregator: expected a mean"),
        (attacked, "aggregator: expected one without attackers"),
        (noisy, "aggregator: expected one with a sensitivity"),
        (mime, "sends clients the model alone"),
        (private, "client: expected no noise"),
    ],
)
def test_refusals(make, words):
    """Fault: a budget of causes that cannot be separated."""
    with pytest.raises((TypeError, ValueError), match=words):
        variance_budget(make(), ZERO, CLIENTS, num_clients=5)
