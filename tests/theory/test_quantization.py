"""Errors of quantised updates and of privacy noise: closed forms against the real transforms and simulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import transform
from fedjax_sim.theory.noise import local_to_central_ratio, noise_floor, noise_variance
from fedjax_sim.theory.quantization import (
    crossover_cohort_size,
    expected_squared_error,
    level_distance,
    quantization_error,
    quantization_floor,
)
from fedjax_sim.theory.relative_error import (
    largest_stable_step,
    qsgd_relative_variance,
    random_k_relative_variance,
    stochastic_relative_variance,
    top_k_contraction,
)

RNG = np.random.default_rng(4)
TRIALS = 40_000
UPDATES = {
    "uniform": RNG.uniform(-1, 1, 64),
    "small": RNG.normal(size=64) * 0.01,
    "sparse": np.where(np.arange(64) % 9 == 0, RNG.normal(size=64), 0),
    "on the grid": RNG.integers(-3, 4, 64) / 3,
    "out of range": RNG.normal(size=64) * 1.5,
}


def draws(made, update, trials=TRIALS):
    """[trials, d] messages as the server receives them."""
    send = lambda key, x: made.on_client(key, x, (), ())[0]  # noqa: E731
    keys = jax.random.split(jax.random.key(1), trials)
    return np.asarray(jax.jit(jax.vmap(send, (0, None)))(keys, jnp.float32(update)), np.float64)


def close_but_not_five_percent_off(found, expected, deviations=4.5):
    """The mean of independent `found` is the expected one; 5 % more or less is rejected (chances below 1e-5)."""
    error = deviations * found.std() / np.sqrt(len(found))
    assert abs(found.mean() - expected) <= error + 1e-4 * expected, (found.mean(), expected, error)
    assert error < 0.025 * expected, "too few trials to tell 5 %"


@pytest.mark.parametrize("keeps_zeros", [False, True])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_the_transforms_declare_the_same_error(keeps_zeros, rounding):
    """Ranges that are fixed or follow the update, both grids, QSGD and TernGrad, numbers past the range.

    Catches levels that are off by a half, a lost cost of clipping, a scale of the wrong update.
    """
    for name, update in UPDATES.items():
        for bits, limit in ((2, 1.0), (3, None), (4, 1.0), (8, None), (8, 2.0)):
            made = transform.quantize(bits, range=limit, rounding=rounding, keeps_zeros=keeps_zeros)
            options = {"range": limit, "rounding": rounding, "keeps_zeros": keeps_zeros}
            expected = quantization_error(update, bits, **options).squared
            # per update the transform leaves a margin of 2^-19 above the largest number, now beside a level
            delta = level_distance(bits, keeps_zeros=keeps_zeros)
            slack = 1e-12 if limit else 1e-4 * np.abs(update).max() ** 2 * delta
            assert np.isclose(made.squared_error(update), expected, rtol=1e-4, atol=slack), (name, bits, limit)
        for levels in (1, 4):
            found, expected = transform.qsgd(levels).squared_error(update), quantization_error(update, levels=levels)
            assert np.isclose(found, expected.squared, rtol=1e-4)
        assert np.isclose(transform.terngrad().squared_error(update), quantization_error(update, 2).squared, rtol=1e-4)
    rows = np.stack(list(UPDATES.values()))
    together = quantization_error(rows, 3, rounding=rounding, keeps_zeros=keeps_zeros)
    alone = [quantization_error(row, 3, rounding=rounding, keeps_zeros=keeps_zeros).squared for row in rows]
    assert np.allclose(together.squared, alone)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_real_messages_have_this_bias_and_variance(rounding):
    """Each number's mean and variance over 40,000 real messages; catches bias and variance exchanged, also past s."""
    update = np.array([-1.7, -1.0, -0.9, -0.5, -0.2, 0.0, 0.123, 0.7, 1.0])
    for keeps_zeros in (False, True):
        sent = draws(transform.quantize(3, range=1.0, rounding=rounding, keeps_zeros=keeps_zeros), update)
        error = quantization_error(update, 3, range=1.0, rounding=rounding, keeps_zeros=keeps_zeros)
        deviation = np.sqrt(error.variance / TRIALS)
        assert (np.abs(sent.mean(0) - update - error.bias) <= 5 * deviation + 1e-6).all()
        fourth = np.square(sent - sent.mean(0)).std(0) / np.sqrt(TRIALS)
        assert (np.abs(sent.var(0) - error.variance) <= 5 * fourth + 1e-6).all()
        if rounding == "stochastic":
            close_but_not_five_percent_off(np.square(sent - update).sum(1), error.squared)


def test_levels_are_the_transforms():
    """Delta is the least distance of received numbers, s a level (Suresh et al. 2017). Catches 2^b for 2^b - 1."""
    update = np.linspace(-1, 1, 999)
    for keeps_zeros in (False, True):
        for bits in (2, 3):
            sent = np.unique(draws(transform.quantize(bits, range=1.0, keeps_zeros=keeps_zeros), update, 8).round(5))
            assert np.allclose(np.diff(sent), level_distance(bits, keeps_zeros=keeps_zeros), atol=2e-5)
            assert np.allclose(sent[[0, -1]], [-1, 1])
    for wrong in ((0, 1.0), (17, 1.0), (2, 0.0), (True, 1.0), (2, np.nan)):
        with pytest.raises((ValueError, TypeError), match="expected"):
            level_distance(*wrong)
    with pytest.raises(ValueError, match="at least 2"):
        level_distance(1)


def test_expected_error_of_uniform_updates():
    """Suresh et al. 2017, section 2, with simulation over updates; small ones cost 1.5 times that without a zero."""
    for bits, expected in {1: 0.666667, 2: 0.0740741, 4: 0.00296296, 8: 1.02525e-5}.items():
        assert np.isclose(expected_squared_error(1, bits, keeps_zeros=False), expected, rtol=1e-5)
    updates = RNG.uniform(-2, 2, (4000, 100))
    for bits in (2, 4, 8):
        for rounding in ("stochastic", "nearest"):
            for keeps_zeros in (False, True):
                options = {"range": 2.0, "rounding": rounding, "keeps_zeros": keeps_zeros}
                found = quantization_error(updates, bits, **options).squared
                close_but_not_five_percent_off(found, expected_squared_error(100, bits, **options))
    small = quantization_error(RNG.normal(size=100_000) * 0.01, 2, range=1.0, keeps_zeros=False)
    assert abs(small.squared / expected_squared_error(100_000, 2, keeps_zeros=False) - 1.49865) < 2e-4
    assert np.isclose(quantization_error(np.zeros(5), 2, range=1.0, keeps_zeros=False).squared, 5 / 9)
    assert quantization_error(np.zeros(5), 2).squared == 0 == quantization_error(np.zeros(5), levels=3).squared


def test_error_of_a_fixed_update():
    """0.0765036531, where the textbook's average says 0.1088435."""
    update = [-1, -0.9, -0.5, -0.2, 0, 0.123, 0.7, 1]
    error = quantization_error(update, 3, range=1.0, keeps_zeros=False)
    assert abs(error.squared - 0.0765036531) < 1e-9 and (error.bias == 0).all()
    assert abs(expected_squared_error(8, 3, keeps_zeros=False) - 0.1088435) < 1e-7


def test_stochastic_against_nearest():
    """At x = 0.3 of {0, 1} the bias -0.3 stays in the mean of m, the variance 0.21 does not (Suresh et al. 2017).

    The levels {0, 1} are those of one bit on [-1/2, 1/2], moved by a half.
    """
    options = {"range": 0.5, "keeps_zeros": False}
    nearest = quantization_error([-0.2], 1, rounding="nearest", **options)
    stochastic = quantization_error([-0.2], 1, **options)
    assert np.allclose([nearest.bias[0], nearest.variance[0]], [-0.3, 0])
    assert np.allclose([stochastic.bias[0], stochastic.variance[0]], [0, 0.21])
    assert np.isclose(nearest.of_mean(7), 0.09) and np.isclose(stochastic.of_mean(7), 0.03)
    assert np.isclose(crossover_cohort_size(0.3), 7 / 3) and crossover_cohort_size(0.5) == 1
    assert stochastic.of_mean(2) > nearest.of_mean(2) and stochastic.of_mean(3) < nearest.of_mean(3)
    assert crossover_cohort_size(0) == np.inf
    sent = draws(transform.quantize(1, **options), np.full(3, -0.2), 3 * TRIALS).mean(1)  # a mean of three
    close_but_not_five_percent_off(np.square(sent + 0.2), float(stochastic.of_mean(3)))


def test_relative_variances_bound_the_error():
    """No update has more, adversarial ones included, and TernGrad's is reached. Catches d for sqrt(d)."""
    for d in (1, 2, 9, 64):
        flat = np.concatenate([np.ones((200, 1)), np.repeat(np.linspace(0, 1, 200)[:, None], d - 1, 1)], axis=1)
        updates = np.concatenate([RNG.normal(size=(500, d)), RNG.uniform(size=(500, d)) ** 9, flat])
        norms = np.square(updates).sum(1)
        for bits in (1, 2, 3, 8):
            for keeps_zeros in (False, True)[: 1 + (bits > 1)]:
                found = quantization_error(updates, bits, keeps_zeros=keeps_zeros).squared / norms
                assert found.max() <= stochastic_relative_variance(d, bits, keeps_zeros=keeps_zeros) + 1e-12
        reached = (quantization_error(flat, 2).squared / np.square(flat).sum(1)).max()
        bound = stochastic_relative_variance(d, 2)
        assert reached >= 0.99 * min(bound, (np.sqrt(d) - 1) / 2)
        for levels in (1, 3, 20):
            found = quantization_error(updates, levels=levels).squared / norms
            assert found.max() <= qsgd_relative_variance(d, levels) + 1e-12


def test_sparsifiers():
    """Stich et al. 2018, section 2, and the transforms' declared errors. Catches d/k for d/k - 1."""
    update = np.array([3, -1, 0.5, 2])
    assert (
        random_k_relative_variance(4, 2) * (update @ update)
        == 14.25
        == transform.random_k(count=2).squared_error(update)
    )
    assert (
        transform.top_k(count=2).squared_error(update) == 1.25 <= top_k_contraction(4, 2) * (update @ update) == 7.125
    )
    equal = np.ones(8)
    assert transform.top_k(count=3).squared_error(equal) == top_k_contraction(8, 3) * 8
    for wrong in ((4, 5), (4, 0), (0, 1)):
        with pytest.raises(ValueError, match="expected"):
            top_k_contraction(*wrong)


def test_multiplicative_noise_limits_the_step():
    """The mean square neither grows nor shrinks at this step. Catches 2 / L, which omega makes diverge."""
    for smoothness, omega, m in ((1.0, 3.0, 3), (4.0, 0.0, 1), (0.5, 15.0, 10)):
        step = largest_stable_step(smoothness, omega, m)
        factor = lambda eta: (1 - eta * smoothness) ** 2 + (eta * smoothness) ** 2 * omega / m  # noqa: B023, E731
        assert np.isclose(factor(step), 1) and factor(0.99 * step) < 1 < factor(1.01 * step)
    # random_k of d coordinates, k sent: omega = d/k - 1, and updates of quadratics through the real transform
    d, k = 8, 2
    step = largest_stable_step(1.0, random_k_relative_variance(d, k))
    sent = draws(transform.random_k(count=k), np.ones(d), 4000)
    for share, shrinks in ((0.8, True), (1.25, False)):
        assert (np.square(1 - share * step * sent).sum(1).mean() < d) == shrinks


def test_ratios_of_floors():
    """25 from 2 to 4 bits, 289 from 4 to 8 (Suresh et al. 2017, section 2.1); a wrong contraction is refused."""
    floor = lambda bits: quantization_floor(10, bits, 1.0, 5, 0.9, keeps_zeros=False)  # noqa: E731
    assert np.isclose(floor(2) / floor(4), 25) and np.isclose(floor(4) / floor(8), 289)
    for wrong in (1.0, -1.0, 1.5, np.nan):
        with pytest.raises(ValueError, match="contraction"):
            quantization_floor(10, 4, 1.0, 5, wrong)
        with pytest.raises(ValueError, match="contraction"):
            noise_floor(1.0, wrong)


def test_floor_of_a_simulated_recursion():
    """Scalar quadratics, whose m clients send real quantised messages or noise, converge to their floor.

    Updates that fill two whole steps between levels have uniform positions, as the formula assumes. 5 % off is
    rejected.
    """
    m, d, r, s, bits = 4, 512, 0.8, 1.0, 4
    made = transform.quantize(bits, range=s, keeps_zeros=False)
    grid = np.linspace(-1, 1, d, endpoint=False) * level_distance(bits, s, keeps_zeros=False) / (1 - r)
    one, two = (np.random.default_rng(i).permutation(grid) for i in range(2))
    targets = np.stack([one, -one, two, -two])  # the optimum is 0

    @jax.jit
    def run(key, targets):
        def step(w, key):
            updates = (1 - r) * (targets - w[None])  # of one local step with eta h = 1 - r
            sent = jax.vmap(lambda k, x: made.on_client(k, x, (), ())[0])(jax.random.split(key, m), updates)
            w = w + sent.mean(0)
            return w, jnp.square(w).mean()

        return jax.lax.scan(step, jnp.zeros(d), jax.random.split(key, 3000))[1]

    rounds = np.asarray(run(jax.random.key(0), jnp.float32(targets)), np.float64)[100:]
    blocks = rounds[: len(rounds) // 50 * 50].reshape(-1, 50).mean(1)  # longer than the memory of 1 / (1 - r^2)
    close_but_not_five_percent_off(blocks, quantization_floor(1, bits, s, m, r, keeps_zeros=False))
    noise, w, squares = (
        np.random.default_rng(1).normal(size=(2000, 2000)) * np.sqrt(noise_variance(0.5, 2.0, 10)),
        0.0,
        [],
    )
    for row in noise:
        w = r * w + row
        squares.append(np.square(w).mean())
    blocks = np.reshape(squares[100:], (-1, 50)).mean(1)
    close_but_not_five_percent_off(blocks, noise_floor(noise_variance(0.5, 2.0, 10), r))


def test_noise_of_the_mean():
    """Kairouz et al. 2021, section 4: 1e-4 against 1e-2, slopes -2 and -1, ratio m, and 4 m for a replaced message."""
    sizes = np.array([10, 100, 1000, 10_000])
    for place, slope in (("central", -2), ("distributed", -2), ("local", -1)):
        variances = [noise_variance(1.3, 0.7, int(m), place=place) for m in sizes]
        assert np.isclose(np.polyfit(np.log(sizes), np.log(variances), 1)[0], slope, atol=1e-9)
    assert np.isclose(noise_variance(1, 1, 100), 1e-4) and np.isclose(noise_variance(1, 1, 100, place="local"), 1e-2)
    assert np.isclose(noise_variance(1, 1, 200), noise_variance(1, 1, 100) / 4)  # half the standard deviation
    for replace_one in (False, True):
        ratio = noise_variance(1, 1, 100, place="local", replace_one=replace_one) / noise_variance(1, 1, 100)
        assert np.isclose(ratio, local_to_central_ratio(100, replace_one=replace_one))
    assert noise_variance(2.0, 3.0, 5, num_values=7) == 7 * (6 / 5) ** 2
    for wrong in ({"place": "elsewhere"}, {"num_values": 0}, {"replace_one": 1}):
        with pytest.raises((ValueError, TypeError), match="expected"):
            noise_variance(1.0, 1.0, 10, **wrong)


def test_noise_is_that_of_the_transforms():
    """The variance of a mean of 5 real messages under central, local and distributed noise; 5 % off is rejected."""
    m, d, z, clip = 5, 50_000, 0.7, 2.0
    updates = jnp.zeros((m, d))
    places = {
        "central": transform.gaussian_mechanism(clip, z),
        "local": transform.local_gaussian(clip, z),
        "distributed": transform.distributed_gaussian(clip, z, m),
    }
    for place, made in places.items():
        state, keys = made.init(jax.ShapeDtypeStruct((d,), jnp.float32)), jax.random.split(jax.random.key(2), m)

        @jax.jit
        def released(keys, key, made=made, state=state, place=place):
            send = jax.vmap(lambda key, x: made.on_client(key, x, state, ()))
            sent, _, measured = send(keys, updates)
            measured = jax.tree.map(lambda x: x.sum(0), measured)
            mean = sent.mean(0)
            return made.on_server(key, None, mean, state, measured, 1 / m)[0] if place == "central" else mean

        found = np.square(np.asarray(released(keys, jax.random.key(3)), np.float64))
        expected = noise_variance(z, clip, m, place=place)
        error = 4.5 * found.std() / np.sqrt(d)
        assert abs(found.mean() - expected) <= error < 0.03 * expected


def test_rounding_variance():
    """Fault: a series with a wrong term, positions from the wrong origin, the limits mixed up."""
    from fedjax_sim.theory import rounding_variance

    mean, spread = np.array([0.0, 0.13, 0.5, -0.37, 2.9]), np.array([0.0, 0.05, 0.2, 0.4, 3.0])
    nodes = np.linspace(-9, 9, 200_001)
    weights = np.exp(-(nodes**2) / 2)
    for distance in (0.3, 1.0):
        position = (mean[:, None] + spread[:, None] * nodes) / distance
        position -= np.floor(position)
        integral = (position * (1 - position)) @ weights / weights.sum() * distance**2
        np.testing.assert_allclose(rounding_variance(mean, spread, distance), integral, atol=1e-5 * distance**2)
        np.testing.assert_allclose(rounding_variance(mean, 10 * distance, distance), distance**2 / 6, rtol=1e-3)
    rng = np.random.default_rng(0)
    draws = 0.13 + 0.1 * rng.normal(size=10**6)
    draws -= np.floor(draws)
    np.testing.assert_allclose(rounding_variance(0.13, 0.1, 1.0), (draws * (1 - draws)).mean(), rtol=2e-3)
    for wrong in ((0.0, -1.0, 1.0), (np.nan, 1.0, 1.0), (0.0, 1.0, 0.0)):
        with pytest.raises(ValueError, match="expected"):
            rounding_variance(*wrong)
