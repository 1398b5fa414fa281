"""Federated k-means against Lloyd's algorithm in NumPy on the pooled rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim import InvalidType, aggregation, algorithms, network, population, privacy, sampling, transform
from fedjax_sim.algorithms import as_client_update
from fedjax_sim.round.costs import message_spec
from fedjax_sim.transform.chain import wire_of
from tests.algorithms.analytics import problem as p
from tests.refusals import refused

START = {"centroids": np.array([[1.0, 1.0], [3.0, 1.0], [1.0, 3.0], [50.0, 50.0]], np.float32)}
CLUSTERS = {"num_clusters": 4}


def lloyd(centroids, num_rounds):
    """Estimates and objectives (before each step) of Lloyd's algorithm in float64."""
    x, _ = p.pooled()
    estimates, objectives = [], []
    centroids = np.array(centroids, np.float64)
    for _ in range(num_rounds):
        distances = ((x[:, None] - centroids[None]) ** 2).sum(-1)
        objectives.append(distances.min(1).mean())
        nearest = distances.argmin(1)
        for j in set(nearest):
            centroids[j] = x[nearest == j].mean(0)
        estimates.append(centroids.copy())
    return estimates, objectives


def test_everybody_together_is_lloyd():
    """Catches means of the clients' means, padding that counts, and the mean weighted by rows twice."""
    estimates, infos = p.rounds(algorithms.kmeans(p.EVERYBODY, **CLUSTERS), 5, params=START)
    expected, objectives = lloyd(START["centroids"], 5)
    for estimate, centroids in zip(estimates, expected, strict=True):
        np.testing.assert_allclose(estimate["centroids"], centroids, rtol=1e-5)
    np.testing.assert_allclose([info["local_loss"] for info in infos], objectives, rtol=1e-5)


@pytest.mark.full
@pytest.mark.default_rows(1)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_objective_never_rises(seed):
    """Catches a step that is no mean, from starts that are drawn."""
    made = algorithms.kmeans(p.EVERYBODY, low=-2.0, high=6.0, start_seed=seed, input_shape=(2,), **CLUSTERS)
    _, infos = p.rounds(made, 8)
    objectives = np.array([info["local_loss"] for info in infos])
    assert (np.diff(objectives) <= 1e-5).all() and objectives[-1] < objectives[0]


@pytest.mark.full
def test_empty_clusters_stay():
    """Catches 0 / 0, and a cluster below the least share that moves."""
    (estimate,), _ = p.rounds(algorithms.kmeans(p.EVERYBODY, **CLUSTERS), 1, params=START)
    np.testing.assert_array_equal(estimate["centroids"][3], [50, 50])
    (estimate,), _ = p.rounds(algorithms.kmeans(p.EVERYBODY, least_share=0.9, **CLUSTERS), 1, params=START)
    np.testing.assert_array_equal(estimate["centroids"], START["centroids"])


@pytest.mark.parametrize(
    ("least_share", "moved"), [(0.0, [True, False, True, True]), (0.25, [True, False, True, False])]
)
def test_negative_counts_of_noise(least_share, moved):
    """Counts of 10, -30, 5 and 4 beside noise: rows are 19, and the cluster of -30 stays. Catches a mean of a negative
    count, and a least share of all rows that negative counts lower."""
    made = algorithms.kmeans(p.EVERYBODY, least_share=least_share, **CLUSTERS)
    counts = np.array([10, -30, 5, 4], np.float32)
    sums = np.full((4, 2), 7, np.float32) * counts[:, None]
    server = made.parts.server
    state = server.apply(jax.random.key(0), {"counts": counts, "sums": sums}, server.init(START))
    expected = np.where(np.array(moved)[:, None], 7, START["centroids"])
    np.testing.assert_allclose(server.params(state)["centroids"], expected, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fixed_mean", "additive_shares", "modular_sum", "secure_sum"])
def test_any_multiple_of_the_sum_will_do(name):
    """Catches a server that needs the cohort's mean: sums and counts are divided by the same number."""
    integers = transform.quantize(16, range=60.0, integers=True)
    plain = aggregation.modular_sum(2.0)
    rule, change, tolerance = {
        "fixed_mean": (aggregation.fixed_mean(7.0, weighting="uniform"), None, 1e-5),
        "additive_shares": (aggregation.additive_shares(plain, 3), integers, 1e-2),
        "modular_sum": (plain, integers, 1e-2),
        "secure_sum": (aggregation.secure_sum(plain, 20), integers, 1e-2),
    }[name]
    made = algorithms.kmeans(p.EVERYBODY, aggregator=rule, transform=change, **CLUSTERS)
    (estimate,), _ = p.rounds(made, 1, params=START)
    np.testing.assert_allclose(estimate["centroids"], lloyd(START["centroids"], 1)[0][0], rtol=tolerance)


@pytest.mark.full
def test_one_row_of_a_client():
    """Each round draws another row, uniformly among the client's own. Catches padding that is drawn, and a client whose
    first row is always sent."""
    made = algorithms.kmeans(p.EVERYBODY, rows="one", num_clusters=1)
    estimates, infos = p.rounds(made, 40, params={"centroids": np.zeros((1, 2), np.float32)})
    assert all(info["rows"] == pytest.approx((p.SIZES > 0).mean()) for info in infos)
    # The mean of one row a client, over rounds: that of the clients' own means, where a client has rows.
    own_means = np.array([p.X[i][p.MASK[i]].mean(0) for i in range(p.NUM_CLIENTS) if p.SIZES[i]])
    variances = [p.X[i][p.MASK[i]].var(0) for i in range(p.NUM_CLIENTS) if p.SIZES[i]]
    error = np.mean([estimate["centroids"][0] for estimate in estimates], 0) - own_means.mean(0)
    deviation = np.sqrt(np.sum(variances, 0)) / len(own_means) / np.sqrt(len(estimates))
    assert (np.abs(error) < 5 * deviation).all()  # fails by chance in one run of 10^6


def noisy():
    """20 of the clients with discrete noise."""
    noise = transform.discrete_gaussian_mechanism(10.0, 2.0, 20, bits=24)
    rule = aggregation.modular_sum(20.0, modulus_bits=24)
    sampler = sampling.uniform(p.NUM_CLIENTS, 20)
    return algorithms.kmeans(sampler, transform=noise, aggregator=rule, least_share=0.02, **CLUSTERS)


@pytest.mark.full
def test_clients_without_rows_report_under_noise():
    """Catches messages of clients without rows that are left out."""
    estimates, infos = p.rounds(noisy(), 3, params=START)
    assert [int(info["clients_reported"]) for info in infos] == [20, 20, 20]
    assert not any(info["skipped_rounds"] for info in infos) and np.isfinite(estimates[-1]["centroids"]).all()


def test_noise_has_its_epsilon():
    """Catches weights that tell the number of rows."""
    mechanism = privacy.mechanism_of(noisy(), dimension=12)
    assert mechanism.unit == "client" and 0 < privacy.account(mechanism, 3, 1e-3).epsilon < np.inf
    sampler = sampling.uniform(p.NUM_CLIENTS, 20)
    with refused("aggregator", rule="bounded amount"):
        algorithms.kmeans(sampler, transform=transform.gaussian_mechanism(1.0, 2.0), **CLUSTERS)


def test_a_message_counts_its_numbers():
    """Bytes are those of k sums and k counts; what comes down are k centroids."""
    made = algorithms.kmeans(p.EVERYBODY, **CLUSTERS)
    _, (info,) = p.rounds(made, 1, params=START)
    assert info["uplink_bytes"].total() == p.NUM_CLIENTS * 4 * (4 * 2 + 4)
    assert info["downlink_bytes"].total() == p.NUM_CLIENTS * 4 * 4 * 2
    spec = message_spec(made.parts, START, p.people())
    assert wire_of(made.parts.transform, spec).values == 12


@pytest.mark.full
def test_clients_take_time():
    """On devices a round takes what its arithmetic and messages do. Catches work that no clock can price."""
    devices = network.heterogeneous(p.NUM_CLIENTS, speed=100.0, bandwidth_down=10.0, bandwidth_up=5.0)
    made = algorithms.kmeans(sampling.with_clock(p.EVERYBODY, devices), **CLUSTERS)
    _, (info,) = p.rounds(made, 1, params=START)
    assert info["simulated_seconds"] > 48 / 5 + 32 / 10


def test_what_is_refused():
    """Each with a word on what to do instead of it."""
    made = algorithms.kmeans(p.EVERYBODY, **CLUSTERS)
    with pytest.raises(ValueError, match="high: expected more than low = 1, got 1"):
        algorithms.kmeans(p.EVERYBODY, low=1.0, high=1.0)
    with pytest.raises(ValueError, match="input_shape: expected the shape"):
        made.init(jax.random.key(0), (), p.people())
    for wrong, words in (
        ({"means": np.zeros((4, 2))}, "a dict of centroids"),
        ({"centroids": np.zeros((3, 2))}, r"an array \[4, d\]"),
        (np.zeros(3), "a dict of centroids"),
    ):
        with pytest.raises(ValueError, match=words):
            made.init(jax.random.key(0), wrong, p.people())
    tokens = population.generated(
        p.NUM_CLIENTS, lambda _, id: p._read({"x": np.ones((30, 5, 2), np.int32), "y": p.Y, "mask": p.MASK}, 0), {}
    )
    with refused("data", rule="floating-point", kind=InvalidType):
        made.init(jax.random.key(0), START, tokens)
    with pytest.raises(ValueError, match="server: expected one that can go on"):
        as_client_update(made.parts, keep=True)
