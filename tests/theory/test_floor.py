"""The error floor: against every cohort enumerated, against the simulator's own rounds, against known numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, population, sampling, server, transform
from fedjax_sim.engine import Plan
from fedjax_sim.sampling.design import SamplingDesign
from fedjax_sim.theory.coefficients import _linearised, cohort_coefficients
from fedjax_sim.theory.cohorts import enumerate_cohorts
from fedjax_sim.theory.convergence import fedprox_contraction, fedprox_fixed_point
from fedjax_sim.theory.floor import SOURCES, budget
from fedjax_sim.theory.quadratic import local_noise, local_progress
from fedjax_sim.theory.sgd import sgd_floor, stationary_covariance

N = 5
SHARES = np.array([1, 2, 3, 1, 5]) / 12
EQUAL = np.full(N, 1 / N)
DRAWN = np.array([0.3, 0.1, 0.2, 0.25, 0.15])


def design(scheme, cohort_size=2.0, num_slots=2, **options):
    return SamplingDesign(scheme=scheme, population_size=N, cohort_size=cohort_size, num_slots=num_slots, **options)


DESIGNS = {
    "uniform": design("uniform_without_replacement"),
    "dropout": design("uniform_without_replacement", 3, 3, response_rates=(0.7,)),
    "poisson": design("poisson", 2, N),
    "truncated": design("truncated_poisson", 2, 3),
    "replacement": design("with_replacement"),
    "weighted": design("weighted_with_replacement", draw_probabilities=DRAWN),
    "full": design("full", N, N),
}


def problem(dimension=2, seed=4):
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(N, dimension, dimension))
    hessians = factors @ np.swapaxes(factors, 1, 2) / dimension + 0.4 * np.eye(dimension)
    return hessians, rng.normal(size=(N, dimension))


def cohorts(scheme, shares, denominator):
    """([s] probabilities, [s, N] the weights c of each cohort), by the definition."""
    parts = list(enumerate_cohorts(scheme))
    chances, counts = np.concatenate([p for p, _ in parts]), np.concatenate([c for _, c in parts])
    if denominator == "fixed":
        return chances, counts * shares / (chances @ counts)
    if denominator != "realised":
        return chances, counts * shares * N / denominator
    weights = counts * shares
    total = weights.sum(1, keepdims=True)
    return chances, np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


@pytest.mark.parametrize("shares", [EQUAL, SHARES], ids=["equal", "unequal"])
@pytest.mark.parametrize("denominator", ["fixed", "realised", 3.0])
@pytest.mark.parametrize("name", DESIGNS)
def test_coefficients_are_the_moments_of_cohorts(name, denominator, shares):
    """Catches pairs taken as independent, a divisor by slots, and empty cohorts that are counted."""
    found = cohort_coefficients(DESIGNS[name], shares, denominator=denominator)
    chances, weights = cohorts(DESIGNS[name], shares, denominator)
    mean = chances @ weights
    second = (weights * chances[:, None]).T @ weights
    assert found.exact
    np.testing.assert_allclose(found.mean, mean, atol=1e-12)
    np.testing.assert_allclose(found.second, np.diag(second), atol=1e-12)
    np.testing.assert_allclose(found.spread(np.eye(N), np.eye(N)), second - np.outer(mean, mean), atol=1e-12)


def test_the_ratio_to_leading_order():
    """The error of the linearised ratio falls faster than the covariance itself. Catches a lost projection (s 1^T)."""
    distance, shares = [], np.array([0.2, 0.3, 0.5])
    for slots in (8, 32):
        scheme = SamplingDesign(scheme="with_replacement", population_size=3, cohort_size=slots, num_slots=slots)
        first, exact = _linearised(scheme, shares), cohort_coefficients(scheme, shares, denominator="realised")
        one, other = (x.spread(np.eye(3), np.eye(3)) for x in (first, exact))
        assert exact.exact and not first.exact
        np.testing.assert_allclose(one.sum(0), 0, atol=1e-14)  # weights sum to one, so nothing moves along it
        np.testing.assert_allclose(np.diag(one) + first.mean**2, first.second, atol=1e-14)
        distance.append(np.abs(one - other).max() / np.abs(other).max())
    assert distance[1] < 0.35 * distance[0] < 0.1


def test_the_ratio_with_empty_cohorts():
    """Poisson cohorts of 3 in 16, 5 % of them empty: all weights together move by P(K > 0), exactly.

    Catches a leading order that never meets an empty cohort, and a mean that forgets the ratio's bias.
    """
    shares = np.linspace(1, 2, 16) / 24
    scheme = SamplingDesign(scheme="poisson", population_size=16, cohort_size=2.7, num_slots=16)
    empty = (1 - 2.7 / 16) ** 16
    first, exact = _linearised(scheme, shares), cohort_coefficients(scheme, shares, denominator="realised")
    assert exact.exact and not first.exact and empty > 0.05
    one, other = (x.spread(np.eye(16), np.eye(16)) for x in (first, exact))
    assert first.mean.sum() == pytest.approx(1 - empty) and one.sum() == pytest.approx(empty * (1 - empty))
    np.testing.assert_allclose(first.mean, exact.mean, rtol=0.03)
    assert np.abs(exact.mean - (1 - empty) * shares).max() > 0.1 * exact.mean.max()
    assert np.trace(one) == pytest.approx(np.trace(other), rel=0.05)


def enumerated(hessians, centers, shares, scheme, *, denominator, num_steps, rate, noise, messages, error, released):
    """One round of (mean, raw second moment), by brute force over cohorts: [d], [d, d] -> [d], [d, d]."""
    chances, weights = cohorts(scheme, shares, denominator)
    progress = local_progress(hessians, num_steps, rate)
    own = local_noise(hessians, noise, num_steps, rate) + messages * np.eye(hessians.shape[-1])

    def step(mean, second, gamma):
        total_mean, total = np.zeros_like(mean), np.zeros_like(second)
        identity = np.eye(len(mean))
        for chance, c in zip(chances, weights, strict=True):
            matrix = identity - gamma * np.einsum("n,nij->ij", c, progress)
            shift = gamma * np.einsum("n,nij,nj->i", c, progress, centers)
            total_mean += chance * (matrix @ mean + shift)
            cross = np.outer(matrix @ mean, shift)
            total += chance * (matrix @ second @ matrix.T + cross + cross.T + np.outer(shift, shift))
            for i in range(len(c)):
                extra = own[i]
                message = np.einsum("ij,jk,lk->il", progress[i], second, progress[i])
                towards = progress[i] @ centers[i]
                mixed = np.outer(progress[i] @ mean, towards)
                message = message - mixed - mixed.T + np.outer(towards, towards)
                message = message + local_noise(hessians, noise, num_steps, rate)[i]
                extra = extra + error * np.diag(np.diag(message))
                total += chance * gamma**2 * c[i] ** 2 * extra
        return total_mean, total + gamma**2 * released * identity

    return step


CASES = [
    ("uniform", "fixed"),
    ("uniform", "realised"),
    ("poisson", "fixed"),
    ("dropout", "realised"),
    ("full", "fixed"),
    ("dropout", 3.0),
]


@pytest.mark.parametrize(("name", "denominator"), CASES)
def test_covariance_is_the_enumerated_one(name, denominator):
    """The stationary pair of a brute-force recursion over all cohorts, to 1e-9, every source at once.

    Catches multiplicative noise that is left out, p_i for p_i^2, a square of the server's rate that is missing.
    """
    hessians, centers = problem()
    options = {"num_steps": 3, "step_size": 0.1, "design": DESIGNS[name], "denominator": denominator}
    found = budget(
        hessians, centers, SHARES, server_rate=0.8, gradient_noise=0.5, quantization_variance=0.02,
        relative_error=0.3, privacy_variance=0.01, **options,
    )  # fmt: skip
    step = enumerated(
        hessians, centers, SHARES, DESIGNS[name], denominator=denominator, num_steps=3, rate=0.1, noise=0.5,
        messages=0.02, error=0.3, released=0.01,
    )  # fmt: skip
    mean = found.fixed_point
    second = found.covariance + np.outer(mean, mean)
    new_mean, new_second = step(mean, second, 0.8)
    np.testing.assert_allclose(new_mean, mean, atol=1e-12)
    np.testing.assert_allclose(new_second, second, atol=1e-12)
    assert set(found.covariances) == set(SOURCES)
    assert found.total == pytest.approx(sum(found.losses.values()))
    excess = (np.trace(found.hessian @ found.covariance) + found.bias @ found.hessian @ found.bias) / 2
    assert found.total == pytest.approx(excess, rel=1e-12)


def test_expected_path_is_the_enumerated_one():
    """The whole curve of the loss, from a start far away. Catches the cross term of mean and cohort."""
    hessians, centers = problem()
    found = budget(
        hessians, centers, SHARES, num_steps=2, step_size=0.15, design=DESIGNS["uniform"], denominator="realised",
        gradient_noise=0.5, relative_error=0.3, privacy_variance=0.01,
    )  # fmt: skip
    step = enumerated(
        hessians, centers, SHARES, DESIGNS["uniform"], denominator="realised", num_steps=2, rate=0.15, noise=0.5,
        messages=0.0, error=0.3, released=0.01,
    )  # fmt: skip
    start = np.array([3.0, -2.0])
    mean, second, expected = start, np.outer(start, start), []
    for _ in range(8):
        moment = second - np.outer(mean, found.optimum) - np.outer(found.optimum, mean)
        moment = moment + np.outer(found.optimum, found.optimum)
        expected.append(np.trace(found.hessian @ moment) / 2)
        mean, second = step(mean, second, 1.0)
    np.testing.assert_allclose(found.expected_loss(7, start=start), expected, rtol=1e-10)
    assert found.expected_loss(3000, start=start)[-1] == pytest.approx(found.total, rel=1e-9)


def test_floors_of_scalar_quadratics():
    """Gradient noise (Mandt et al. 2017, section 3), quantisation (Suresh et al. 2017, section 2) and privacy noise.

    Catches floors that are not divided by 1 - r^2 or by m.
    """
    sgd = budget([2.0], [0.3], step_size=0.3, gradient_noise=1.5)
    assert sgd.covariance[0, 0] == pytest.approx(sgd_floor(2.0, 1.5, step_size=0.3), rel=1e-12)
    assert sgd.contraction == pytest.approx(0.4) and sgd.losses["drift"] == pytest.approx(0)
    hessians = np.repeat(0.5 * np.eye(2)[None], 20, 0)  # equal curvatures, d = 2
    scheme = SamplingDesign(scheme="uniform_without_replacement", population_size=20, cohort_size=4, num_slots=4)
    contraction = (1 - 0.1 * 0.5) ** 3
    floors = {}
    for bits in (2, 4, 8):
        variance = (2 / (2**bits - 1)) ** 2 / 6
        options = {"step_size": 0.1, "num_steps": 3, "design": scheme, "quantization_variance": variance}
        found = budget(hessians, np.zeros((20, 2)), privacy_variance=(0.5 * 1.0 / 4) ** 2, **options)
        floors[bits] = np.trace(found.covariances["quantization"])
        assert floors[bits] == pytest.approx(2 * variance / 4 / (1 - contraction**2), rel=1e-12)
        assert np.trace(found.covariances["privacy_noise"]) == pytest.approx(2 / 64 / (1 - contraction**2), rel=1e-12)
    assert floors[2] / floors[4] == pytest.approx(25) and floors[4] / floors[8] == pytest.approx(289)
    floors = [budget(np.ones(m), np.zeros(m), step_size=0.5, gradient_noise=1.0).total for m in (1, 8)]
    assert floors[0] / floors[1] == pytest.approx(8)
    hessians, centers = problem()
    full = budget(hessians, centers, SHARES, step_size=0.1, num_steps=4, gradient_noise=0.3)
    expected = stationary_covariance(hessians, 0.3, SHARES, step_size=0.1, num_steps=4)
    np.testing.assert_allclose(full.covariances["minibatch"], expected, rtol=1e-10)


def test_proximal_term_and_limits():
    """FedProx's fixed point and rate are those of `theory.convergence`; a full cohort has no sampling component.

    Catches a proximal weight that reaches the mean but not the noise (smaller steps, less of it), and Cov(c) != 0.
    """
    work = {"step_size": 0.1, "num_steps": 4}
    found = budget(*problem(), SHARES, proximal_weight=2.0, gradient_noise=0.1, design=DESIGNS["full"], **work)
    expected = fedprox_fixed_point(*problem(), SHARES, proximal_weight=2.0, **work)
    np.testing.assert_allclose(found.fixed_point, expected, atol=1e-12)
    rate = fedprox_contraction(*problem(), SHARES, proximal_weight=2.0, **work)
    assert found.contraction == pytest.approx(rate, rel=1e-12)
    assert abs(found.losses["client_sampling"]) < 1e-15 and found.losses["sampling_bias"] == pytest.approx(0)
    own = local_noise(problem()[0], 0.1, 4, 0.1, 2.0)
    np.testing.assert_allclose(found.source, np.einsum("n,nij->ij", SHARES**2, own), atol=1e-14)


def test_relative_error_moves_the_limit_of_stability():
    """m equal clients, full batch: stable while eta L (1 + omega / m) < 2. Catches noise that only adds."""
    for m, omega in ((1, 3.0), (4, 3.0)):
        limit = 2 / (1 + omega / m)
        options = {"relative_error": omega}
        inside = budget(np.ones(m), np.zeros(m), step_size=0.999 * limit, **options)
        assert inside.mean_square_contraction < 1 and inside.total == pytest.approx(0)
        with pytest.raises(ValueError, match="mean square"):
            budget(np.ones(m), np.zeros(m), step_size=1.001 * limit, **options)


def test_rounds_to_floor(monkeypatch):
    """Catches an answer one round late, and a search given up that is taken for an answer."""
    hessians, centers = problem()
    found = budget(hessians, centers, step_size=0.05, gradient_noise=0.1)
    start = np.array([5.0, 5.0])
    rounds = found.rounds_to_floor(start)
    away = [np.linalg.matrix_power(found.mean_map, t) @ (start - found.fixed_point) for t in (rounds - 1, rounds)]
    before, then = (e @ found.hessian @ e for e in away)
    assert then <= np.trace(found.hessian @ found.covariance) < before
    assert rounds > 5 and found.rounds_to_floor(found.fixed_point) == 0
    monkeypatch.setattr("fedjax_sim.theory.floor.MAX_ROUNDS", rounds)
    assert found.rounds_to_floor(start) == np.inf


# ---- the simulator


def noisy(params, examples, key):
    """A quadratic whose every gradient carries fresh normal noise of standard deviation 0.3 in each coordinate."""
    loss = population.quadratic_loss(params, examples)["loss"]
    return loss + (0.0 if key is None else 0.3 * (params["w"] @ jax.random.normal(key, params["w"].shape)))


def masked(key, update):
    """Each coordinate doubled or dropped: an unbiased error of variance omega = 1 times its square."""
    keep = jax.random.bernoulli(key, 0.5, update["w"].shape)
    return {"w": jnp.where(keep, 2 * update["w"], 0)}


def simulated(parts, counts, budgeted, *, num_rounds=420, num_seeds=1024, burn_in=100):
    """Per seed, time averages over the rounds after `burn_in` of (w - w_inf)(w - w_inf)^T, flattened: [S, d^2]."""
    hessians, centers = problem()
    data = population.quadratic_population(hessians, centers, counts=counts)
    sampler, loss, aggregator, compressor, num_steps, rate = parts
    algorithm = algorithms.federated(
        sampler,
        client.local_sgd(loss, optax.sgd(0.1), client.work(num_steps=num_steps)),
        aggregator,
        server.optimizer(optax.sgd(rate)),
        **({"transform": compressor} if compressor is not None else {}),
        plan=Plan(sampler.num_slots, sampler.num_slots),
        mesh=None,
    )
    middle = jnp.asarray(budgeted.fixed_point, jnp.float32)

    def path(key, data):
        state = algorithm.init(key, {"w": middle}, data)

        def body(carry, key):
            state, total = carry
            state, _ = algorithm.step(key, state, data)
            away = algorithm.params(state)["w"] - middle
            return (state, total), away

        return jax.lax.scan(body, (state, 0.0), jax.random.split(key, num_rounds))[1][burn_in:]

    keys = jax.random.split(jax.random.key(8), num_seeds)
    away = np.asarray(jax.jit(jax.vmap(path, (0, None)))(keys, data), np.float64)
    return np.einsum("sti,stj->sij", away, away) / away.shape[1], away.mean(1)


def accepted(sample, expected):
    """Within 4 standard errors."""
    return abs(sample.mean() - expected) < 4 * sample.std(ddof=1) / np.sqrt(len(sample))


CLIP = 50.0  # never reached: the mechanism is there for its noise
SIMULATED = {
    "client_sampling": (
        sampling.uniform, "fixed", EQUAL, population.quadratic_loss, None, 1, 1.0, {}
    ),
    "ratio": (
        sampling.uniform, "realised", SHARES, population.quadratic_loss, None, 3, 1.0, {}
    ),
    "minibatch": (
        sampling.uniform, "fixed", EQUAL, noisy, None, 3, 0.7, {"gradient_noise": 0.09}
    ),
    "everything": (
        sampling.poisson, "fixed", EQUAL, noisy, "all", 2, 0.7,
        {"gradient_noise": 0.09, "quantization_variance": (2 / 15) ** 2 / 6, "privacy_variance": (CLIP / 400) ** 2},
    ),
    "relative": (
        sampling.uniform, "fixed", EQUAL, population.quadratic_loss, "masked", 2, 1.0, {"relative_error": 1.0}
    ),
}  # fmt: skip


@pytest.mark.full  # a simulation beside its closed forms
def test_privacy_noise_passes_the_server():
    """One round of 4,096 runs from the fixed point: the noise on the aggregate is multiplied by the server's rate.

    Within 4 standard errors of 1.6 %. Catches noise that is added behind the server's step (here twice as much).
    """
    hessians, centers = np.ones(4), np.zeros(4)
    released = (CLIP * 0.005 / 4) ** 2
    predicted = budget(hessians, centers, step_size=0.1, server_rate=0.7, privacy_variance=released)
    data = population.quadratic_population(hessians, centers)
    algorithm = algorithms.federated(
        sampling.full(4), client.local_sgd(population.quadratic_loss, optax.sgd(0.1), client.work(num_steps=1)),
        aggregation.fixed_mean(4.0), server.optimizer(optax.sgd(0.7)),
        transform=transform.gaussian_mechanism(CLIP, 0.005), plan=Plan(4, 4), mesh=None,
    )  # fmt: skip

    def moved(key, data):
        state = algorithm.init(key, {"w": jnp.zeros(1)}, data)
        return algorithm.params(algorithm.step(key, state, data)[0])["w"][0]

    found = np.asarray(jax.jit(jax.vmap(moved, (0, None)))(jax.random.split(jax.random.key(6), 4096), data), float)
    assert predicted.source[0, 0] == pytest.approx(0.49 * released, rel=1e-12)
    assert accepted(found**2, predicted.source[0, 0]) and not accepted(found**2, released)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_floors(name):
    """The real simulator's rounds have the predicted trace of the covariance and mean.

    Seeds are independent, so the average over 1,024 of them is normal: the prediction is accepted within 4 standard
    errors (false alarm 6e-5 a comparison); they are below 0.6 %, so that a floor 5 % off is refused (missed: 1e-5).
    """
    make, denominator, shares, loss, compressor, num_steps, rate, noise = SIMULATED[name]
    sampler = make(N, 2) if make is sampling.uniform else make(N, 0.4, num_slots=N)
    predicted = budget(
        *problem(), shares, step_size=0.1, num_steps=num_steps, design=sampler.design, denominator=denominator,
        server_rate=rate, **noise,
    )  # fmt: skip
    aggregator = aggregation.fixed_mean(2.0) if denominator == "fixed" else aggregation.mean()
    built = {
        None: lambda: None,
        "masked": lambda: transform.stateless(masked),
        "all": lambda: transform.chain(
            transform.quantize(4, range=1.0, keeps_zeros=False), transform.gaussian_mechanism(CLIP, 0.005)
        ),
    }[compressor]()
    counts = np.rint(shares * 12).astype(int) if denominator == "realised" else None
    squares, means = simulated((sampler, loss, aggregator, built, num_steps, rate), counts, predicted)
    assert predicted.exact
    measured, expected = np.trace(squares, axis1=1, axis2=2), np.trace(predicted.covariance)
    assert accepted(measured, expected)
    assert not accepted(measured, 1.05 * expected) and not accepted(measured, expected / 1.05)
    assert accepted(means[:, 0], 0.0) and accepted(means[:, 1], 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_size": 0.0}, "step_size"),
        ({"step_size": 30.0}, "mean square"),
        ({"step_size": 0.1, "server_rate": np.nan}, "server_rate"),
        ({"step_size": 0.1, "gradient_noise": -1.0}, "noise"),
        ({"step_size": 0.1, "quantization_variance": np.inf}, "quantization_variance"),
        ({"step_size": 0.1, "relative_error": -1.0}, "relative_error"),
        ({"step_size": 0.1, "denominator": "realized"}, "denominator"),
        ({"step_size": 0.1, "denominator": 0.0}, "denominator"),
        ({"step_size": 0.1, "privacy_variance": np.ones((N, 2, 2))}, "privacy_variance"),
        ({"step_size": 0.1, "gradient_noise": np.ones((3, 2, 2))}, "noise"),
        ({"step_size": 0.1, "design": "uniform"}, "SamplingDesign"),
        ({"step_size": 0.1, "design": design("cyclic")}, "independent"),
        (
            {"step_size": 0.1, "design": SamplingDesign(scheme="full", population_size=3, cohort_size=3, num_slots=3)},
            "5 clients",
        ),
    ],
)
def test_wrong_input(options, message):
    """Catches numbers that look right out of input that is wrong."""
    with pytest.raises((ValueError, TypeError), match=message):
        budget(*problem(), **options)


def test_the_ratio_is_refused_where_its_leading_order_is_nonsense():
    """Catches shares that count a negative number of times, and empty cohorts of unknown chance."""
    shares = np.r_[0.5, np.full(999, 0.5 / 999)]
    few = SamplingDesign(scheme="uniform_without_replacement", population_size=1000, cohort_size=2, num_slots=2)
    drawn = SamplingDesign(
        scheme="with_replacement", population_size=1000, cohort_size=4, num_slots=4, response_rates=(0.5,)
    )
    for scheme, message in ((few, "more reports"), (drawn, "empty cohort")):
        with pytest.raises(ValueError, match=message):
            cohort_coefficients(scheme, shares, denominator="realised")
