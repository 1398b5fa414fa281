"""Noise correlated over rounds: its covariance, what it hides, and its error."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import linalg

from fedjax_sim import aggregation, server
from fedjax_sim.transform import matrix, matrix_mechanism
from fedjax_sim.transform.matrix import (
    optimal_coefficients,
    prefix_error,
    square_root_coefficients,
    strategy_sensitivity,
)
from tests.laws import problems as p

KEY = jax.random.key(6)
T, CLIP, Z, SENSITIVITY = 7, 0.5, 1.5, 0.1
needs_extra = pytest.mark.skipif(not importlib.util.find_spec("jax_privacy"), reason="needs the extra privacy")
OPTIMAL = pytest.param("optimal_banded", marks=needs_extra)


def coefficients_of(name, rounds=T, bands=3):
    """What a strategy is made of; None for the tree."""
    if name == "optimal_banded":
        return optimal_coefficients(rounds, bands)
    return square_root_coefficients(bands) if name == "banded" else None


def strategy(name, rounds=T, bands=3):
    """C, written down again: a banded Toeplitz matrix, or the rounds of each node where it is complete."""
    if name != "tree":
        column = np.zeros(rounds)
        column[:bands] = coefficients_of(name, rounds, bands)
        return linalg.toeplitz(column, np.zeros(rounds))
    nodes = np.zeros((rounds, rounds))
    for t in range(1, rounds + 1):
        nodes[t - 1, t - (t & -t) : t] = 1
    return nodes


def made(name, **options):
    bands = {} if name == "tree" else {"bands": 3}
    return matrix_mechanism(CLIP, Z, num_rounds=T, strategy=name, **(bands | options))


def noise_of(mechanism, size, rounds=T):
    """[T, size] noise of a run of nothing but zeros."""
    zeros = {"a": jnp.zeros(size // 2), "b": jnp.zeros((size // 4, 2))}

    @jax.jit
    def run(key):
        def one(state, t):
            here = jax.random.fold_in(key, t)
            noisy, state, _ = mechanism.on_server(here, None, zeros, state, mechanism.measured, SENSITIVITY)
            return state, jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(noisy)])

        return jax.lax.scan(one, mechanism.init(zeros), jnp.arange(rounds))[1]

    return np.float64(run(KEY))


class Server:
    """A mechanism with measurements of a cohort of one."""

    def __init__(self, mechanism):
        self.init, self.on_server = mechanism.init, mechanism.on_server
        self.measured = mechanism.on_client(KEY, {"a": jnp.ones(2)}, (), ())[2]


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["banded", OPTIMAL, "tree"])
def test_noise_has_the_strategys_covariance(name):
    """400,000 numbers in 7 rounds: S^2 (z C s)^2 (C^-1)(C^-1)^T, entries within five deviations (1.2 % of the largest).

    Another number of bands, or independent noise, is off by more than 20 %. The same sums over rounds have the stated
    error. Catches state of the wrong order, noise of a node that is not taken back, and a scale without S.
    """
    mechanism, size = made(name), 400_000
    unit = Z * CLIP * SENSITIVITY * mechanism.facts.noise.details["sensitivity"]
    drawn = noise_of(Server(mechanism), size) / unit
    inverse = np.linalg.inv(strategy(name))
    expected, found = inverse @ inverse.T, drawn @ drawn.T / size
    assert np.abs(found - expected).max() < 5 * math.sqrt(2 / size) * expected.max()
    coefficients = coefficients_of(name)
    sums = np.cumsum(drawn, 0).std(1)
    np.testing.assert_allclose(sums, prefix_error(coefficients, T), rtol=5 / math.sqrt(2 * size))
    assert abs(np.corrcoef(drawn[3, : size // 2], drawn[3, size // 2 :])[0, 1]) < 5 / math.sqrt(size / 2)
    details = mechanism.facts.noise.details
    assert math.isclose(details["noise_std"], details["sensitivity"] * prefix_error(coefficients, T)[-1])


@pytest.mark.parametrize("name, bands", [("banded", 1), ("banded", 3), ("banded", 7), ("tree", 0)])
@pytest.mark.parametrize("separation", [1, 2, 3, 7])
def test_privacy_of_all_participations(name, bands, separation):
    """Every set of rounds apart enough, with every sign: |C u| <= S. For bands, or one participation, one reaches it.

    |C u| / (S z) is the mu of the Gaussian mechanism that the whole run is for u. Catches a sensitivity of one column
    for clients that come again.
    """
    C = strategy(name, bands=bands)
    worst = 0.0
    for times in range(1, T + 1):
        for rounds in itertools.combinations(range(T), times):
            if all(b - a >= separation for a, b in itertools.pairwise(rounds)):
                for signs in itertools.product([1, -1], repeat=times - 1):
                    worst = max(worst, np.linalg.norm(C[:, rounds] @ np.array([1, *signs])))
    coefficients = None if name == "tree" else square_root_coefficients(bands)
    stated = strategy_sensitivity(coefficients, T, separation)
    assert worst <= stated * (1 + 1e-12)
    if name == "banded" or separation == T:
        assert worst >= stated * (1 - 1e-12)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("name", ["banded", OPTIMAL, "tree"])
def test_streams_are_the_inverse(name):
    """Draws that are the unit vectors come out as C^-1, which times C is the identity. Catches what 400,000 draws miss.

    12 rounds and 5 bands: bands come round more than once, and a tree is not full.
    """
    rounds, coefficients = 12, coefficients_of(name, 12, 5)

    @jax.jit
    def stream(unit_vectors):
        def one(rows, given):
            fresh, t = given
            if name == "tree":
                noise, rows = matrix._tree(fresh, rows, t)
            else:
                noise, rows = matrix._banded(fresh, rows, coefficients)
            return rows, noise

        return jax.lax.scan(one, jnp.zeros((4, rounds)), (unit_vectors, jnp.arange(rounds)))[1]

    inverse = np.asarray(stream(jnp.eye(rounds)))
    np.testing.assert_allclose(inverse @ strategy(name, rounds, 5), np.eye(rounds), atol=1e-6)
    if name != "tree" and importlib.util.find_spec("jax_privacy"):
        from jax_privacy.matrix_factorization import toeplitz

        theirs = toeplitz.inverse_as_streaming_matrix(jnp.float32(coefficients)).materialize(rounds)
        np.testing.assert_allclose(inverse, theirs, atol=1e-6)


@pytest.mark.full
@needs_extra
def test_factors_are_jax_privacys():
    """Square root, sensitivities and errors of sums against theirs. Catches a formula that agrees with its own test."""
    from jax_privacy.matrix_factorization import dense, sensitivity, toeplitz

    rounds = 12
    c = square_root_coefficients(rounds)
    np.testing.assert_allclose(c, toeplitz.optimal_max_error_strategy_coefs(rounds), rtol=1e-6)
    for bands in (4, 12):
        theirs = toeplitz.per_query_error(strategy_coef=jnp.float32(c[:bands]), n=rounds)
        np.testing.assert_allclose(prefix_error(c[:bands], rounds) ** 2, theirs, rtol=1e-5)
        C = jnp.float32(strategy("banded", rounds, bands))
        for apart in (1, 3, 5, 12):
            ours = strategy_sensitivity(c[:bands], rounds, apart)
            theirs = toeplitz.minsep_sensitivity_squared(jnp.float32(c[:bands]), apart, n=rounds)
            assert math.isclose(ours**2, theirs, rel_tol=1e-5)
            if bands <= apart:
                assert math.isclose(ours, sensitivity.get_sensitivity_banded(C, apart), rel_tol=1e-5)
    C = jnp.float32(strategy("tree", 15))
    assert math.isclose(
        strategy_sensitivity(None, 15, 15), sensitivity.single_participation_sensitivity(C), rel_tol=1e-6
    )
    theirs = dense.per_query_error(strategy_matrix=C)
    np.testing.assert_allclose(prefix_error(None, 15) ** 2, theirs, rtol=1e-5)


@pytest.mark.full
@pytest.mark.default_rows(1)
@needs_extra
@pytest.mark.parametrize("error", ["mean", "max"])
def test_optimal_coefficients(error):
    """S^2 times the squared error: theirs, below the square root's, and no coefficient 1 % off gives less.

    With all bands, the "max" is least for the square root. Catches the other error, another T, a sensitivity left
    out, and coefficients that are traced.
    """
    rounds, bands = 40, 6
    reduce = {"mean": np.mean, "max": np.max}[error]

    def loss(c):
        return strategy_sensitivity(c, rounds, rounds) ** 2 * reduce(prefix_error(c, rounds) ** 2)

    traced = jax.jit(lambda x: x * optimal_coefficients(rounds, bands, error=error))(jnp.ones(bands))
    best = optimal_coefficients(rounds, bands, error=error)
    np.testing.assert_allclose(traced, best, rtol=1e-6)
    assert best[0] == 1 and (np.diff(best) < 0).all() and loss(best) < 0.98 * loss(square_root_coefficients(bands))
    for moved in itertools.product(range(1, bands), [0.99, 1.01]):
        other = best.copy()
        other[moved[0]] *= moved[1]
        assert loss(other) > loss(best)
    made = matrix_mechanism(1.0, 1.0, num_rounds=rounds, strategy="optimal_banded", bands=bands, error=error)
    made = made.facts.noise
    assert made.mechanism == "banded_toeplitz"
    assert math.isclose(made.details["noise_std"] ** 2, best @ best * prefix_error(best, rounds)[-1] ** 2)
    if error == "max":
        np.testing.assert_allclose(optimal_coefficients(8, 8, error="max"), square_root_coefficients(8), atol=2e-5)


def test_without_the_extra(monkeypatch):
    """Catches an error that does not name what to install."""
    monkeypatch.setitem(sys.modules, "jax_privacy.matrix_factorization", None)
    with pytest.raises(ImportError, match=r"strategy: .*'fedjax_sim\[privacy\]'"):
        matrix_mechanism(1.0, 1.0, num_rounds=11, strategy="optimal_banded")


@pytest.mark.parametrize("coefficients", [[1.0, -0.5, 0.25], [1.0, 0.0, 0.0, 1.0], [1.0, 0.2, -0.6]])
def test_other_coefficients_have_a_bound(coefficients):
    """Signs and rises: no participations move more than S. Catches the norm of cancelled columns."""
    C = linalg.toeplitz(np.pad(coefficients, (0, T - len(coefficients))), np.zeros(T))
    for apart in (1, 2, T):
        stated = strategy_sensitivity(np.array(coefficients), T, apart)
        for rounds in itertools.product([-1, 0, 1], repeat=T):
            times = np.flatnonzero(rounds)
            if (np.diff(times) >= apart).all():
                assert np.linalg.norm(C @ rounds) <= stated * (1 + 1e-12)


@pytest.mark.full
def test_one_band_is_independent_noise():
    """Fresh draws of std z C s in each round. Catches state that is kept for nothing."""
    mechanism = made("banded", bands=1)
    drawn = noise_of(Server(mechanism), 40_000)
    assert np.abs(np.corrcoef(drawn) - np.eye(T)).max() < 5.5 / math.sqrt(40_000)
    assert abs(drawn.std() / (Z * CLIP * SENSITIVITY) - 1) < 5 / math.sqrt(2 * drawn.size)
    assert jax.tree.leaves(mechanism.init(jnp.zeros(3))[1])[0].size == 0


@pytest.mark.full
def test_rounds_past_the_last():
    """In a federation of cyclic cohorts, round T + 1 leaves the model as it is, and is counted. Catches free rounds."""
    mechanism = matrix_mechanism(CLIP, Z, num_rounds=3, separation=2)
    parts = {
        "transform": mechanism,
        "aggregator": aggregation.fixed_mean(float(p.SLOTS)),
        "server": server.optimizer(optax.sgd(1.0)),
    }
    federation = p.Federation(**parts)
    state, models = federation.init(), []
    for i in range(5):
        state, infos = federation.run(np.arange(p.SLOTS), state=state, keys=[i])
        models.append(p.flat(federation.algorithm.params(state)))
        assert int(infos[0]["skipped_rounds"]) == (i >= 3)
    assert (models[2] == models[3]).all() and (models[3] == models[4]).all() and (models[1] != models[2]).all()


def test_square_root():
    """c * c = 1, 1, 1, ...; the run's error is (log T + gamma + log 16) / pi. Catches a wrong recursion."""
    c = square_root_coefficients(1024)
    np.testing.assert_allclose(np.convolve(c, c)[:1024], 1, rtol=1e-12)
    details = matrix_mechanism(1.0, 1.0, num_rounds=1024, bands=1024).facts.noise.details
    assert abs(details["noise_std"] - (math.log(1024) + np.euler_gamma + math.log(16)) / math.pi) < 1e-3
    tree = matrix_mechanism(1.0, 1.0, num_rounds=1023, strategy="tree").facts.noise.details
    assert math.isclose(tree["noise_std"], 10) and details["noise_std"] < 10 < math.sqrt(1023)  # independent noise's


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"num_rounds": 0}, "num_rounds: expected"),
        ({"strategy": "treee"}, "Did you mean 'tree'"),
        ({"bands": 8}, "bands: expected"),
        ({"bands": True}, "bands: expected"),
        ({"strategy": "tree", "bands": 2}, "bands: expected None for a tree"),
        ({"separation": 8}, "separation: expected"),
        ({"error": "max"}, "error: expected None for 'banded'"),
        ({"strategy": "optimal_banded", "bands": 2, "error": "maximum"}, "error: expected"),
        ({"strategy": "optimal_banded", "bands": 3, "separation": 2}, r"bands: expected .* 2\]"),
        ({"strategy": "optimal_banded", "num_rounds": 10_001}, r"num_rounds: expected .* 10000\]"),
        ({"noise_multiplier": -1.0}, "noise_multiplier: expected"),
        ({"clip_norm": math.nan}, "clip_norm: expected"),
    ],
)
def test_wrong_input(wrong, words):
    """Catches options for which the stated privacy would not hold."""
    options = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_rounds": T} | wrong
    with pytest.raises((ValueError, TypeError), match=words):
        matrix_mechanism(options.pop("clip_norm"), options.pop("noise_multiplier"), **options)


def test_an_aggregator_without_a_bound():
    """Catches noise scaled to nothing."""
    mechanism = Server(made("banded"))
    zeros = jnp.zeros(2)
    with pytest.raises(ValueError, match=r"aggregator.sensitivity: expected a bound"):
        mechanism.on_server(KEY, None, zeros, mechanism.init(zeros), mechanism.measured, None)
