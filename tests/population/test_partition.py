"""Partitioners: exact set equality, and the laws that they claim."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedjax_sim import population as field
from fedjax_sim.population.partition import apportioned, with_minimum
from tests.calls import calls
from tests.refusals import refused

LABELS = np.random.default_rng(1).integers(0, 10, 4000)

TRUE_PARTITIONS = {
    "iid": lambda seed: field.iid(4000, 37, seed=seed),
    "dirichlet": lambda seed: field.dirichlet(LABELS, 37, 0.05, min_examples=20, seed=seed),
    "shards": lambda seed: field.shards(LABELS, 37, 3, seed=seed),
    "pathological": lambda seed: field.pathological(LABELS, 37, 3, seed=seed),
    "quantity_power_law": lambda seed: field.quantity_power_law(4000, 37, exponent=1.3, min_examples=5, seed=seed),
    "quantity_lognormal": lambda seed: field.quantity_lognormal(4000, 37, sigma=2.0, min_examples=5, seed=seed),
    "quantity_linear": lambda seed: field.quantity_linear(4000, 37, seed=seed),
    "quantity_exponential": lambda seed: field.quantity_exponential(4000, 37, ratio=1.2, seed=seed),
    "quantity_given": lambda seed: field.quantity_given(4000, [1, 2, 3997], seed=seed),
    "dirichlet_of_sizes": lambda seed: field.dirichlet_of_sizes(LABELS, [100] * 39 + [99, 1], 0.05, seed=seed),
    "by_group": lambda seed: field.by_group(LABELS + seed),
}


@pytest.mark.parametrize("name", TRUE_PARTITIONS)
def test_partitioners_lose_and_duplicate_nothing(name):
    """Catches a lost remainder, a row dealt twice, and a seed that is ignored."""
    partition = TRUE_PARTITIONS[name](3)
    assert partition.indices.dtype == np.int32
    np.testing.assert_array_equal(np.sort(partition.indices), np.arange(4000))
    assert partition.offsets[0] == 0 and partition.offsets[-1] == 4000 and (partition.sizes > 0).all()
    np.testing.assert_array_equal(partition.indices, TRUE_PARTITIONS[name](3).indices)
    if name != "by_group":
        assert (partition.indices != TRUE_PARTITIONS[name](4).indices).any()
    population = field.indexed({"row": np.arange(4000)}, partition)
    np.testing.assert_array_equal(field.pooled(population).examples["row"], partition.indices)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    num_clients=st.integers(1, 12),
    alpha=st.sampled_from([1e-300, 1e-3, 0.3, 1e9]),
    data=st.data(),
)
def test_dirichlet_always_ends_and_meets_its_minimum(labels, num_clients, alpha, data):
    """Catches rejection loops, a minimum missed by one, and rows lost while clients are filled."""
    minimum = data.draw(st.integers(0, len(labels) // num_clients))
    partition = field.dirichlet(labels, num_clients, alpha, min_examples=minimum, seed=0)
    assert sorted(partition.indices.tolist()) == list(range(len(labels)))
    assert len(partition.sizes) == num_clients and partition.sizes.min() >= minimum


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), data=st.data())
def test_a_minimum_keeps_the_sum_and_takes_from_the_largest(sizes, data):
    sizes = np.array(sizes)
    minimum = data.draw(st.integers(0, int(sizes.sum()) // len(sizes)))
    found = with_minimum(sizes, minimum)
    assert found.sum() == sizes.sum() and found.min() >= minimum
    gave = found < sizes
    kept = ~gave & (sizes >= minimum)
    if gave.any():
        assert found[gave].max() - found[gave].min() <= 1  # down to one level
        assert not kept.any() or sizes[kept].max() <= found[gave].min() + 1


def test_apportionment_adds_up():
    weights = np.random.default_rng(0).random(101)
    sizes = apportioned(weights, 1234)
    assert sizes.sum() == 1234 and (np.abs(sizes - 1234 * weights / weights.sum()) < 1).all()


@pytest.mark.parametrize("num_clients, classes_per_client", [(37, 3), (5, 2), (12, 10), (100, 1)])
def test_pathological_clients_have_their_classes(num_clients, classes_per_client):
    """Catches a client with a class twice, a class that too many clients have, and rows that one client gets alone."""
    partition = field.pathological(LABELS, num_clients, classes_per_client, seed=3)
    owner = np.repeat(np.arange(num_clients), partition.sizes)
    counts = np.zeros((num_clients, 10), int)
    np.add.at(counts, (owner, LABELS[partition.indices]), 1)
    assert ((counts > 0).sum(axis=1) == classes_per_client).all() and counts.sum() == 4000
    num_owners = (counts > 0).sum(axis=0)
    assert num_owners.max() - num_owners.min() <= 1
    assert all(np.ptp(column[column > 0]) <= 1 for column in counts.T)


def test_pathological_refuses_what_it_cannot_keep():
    for arguments, words in (
        (([0, 1, 0, 1], 2, 3), "classes_per_client"),
        (([0, 1, 2, 3], 1, 2), "num_clients: expected clients with places for all 4 classes"),
        (([0, 0, 0, 1], 2, 2), "1 rows of class 1"),
    ):
        with pytest.raises(ValueError, match=words):
            field.pathological(*arguments, seed=0)


def _rejects(values, law, wrong):
    """Mean of independent values: the law lies within 5 standard errors (false alarm 6e-7), a wrong one does not."""
    values = np.asarray(values)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - law) < 5 * error, (values.mean(), law, error)
    assert abs(values.mean() - wrong) > 5 * error, (values.mean(), wrong, error)


def test_dirichlet_shares_follow_the_law():
    """Catches alpha divided by N or K, and proportions drawn over classes instead of clients."""
    num_clients, alpha, labels = 20, 0.5, np.repeat(np.arange(10), 5000)
    spread = []
    for seed in range(60):
        partition = field.dirichlet(labels, num_clients, alpha, min_examples=0, seed=seed)
        owner = np.repeat(np.arange(num_clients), partition.sizes)
        counts = np.zeros((num_clients, 10))
        np.add.at(counts, (owner, labels[partition.indices]), 1)
        spread += list(((counts / 5000 - 1 / num_clients) ** 2).mean(axis=0))  # one independent value per class

    def law(alpha):
        return (1 / num_clients) * (1 - 1 / num_clients) / (num_clients * alpha + 1)

    _rejects(spread, law(alpha), law(alpha * 1.25))


def test_small_classes_go_to_all_clients():
    """An even split of 400 classes of 5 rows among 50 clients: 40 rows each. Each class gives a client a row with
    probability 1/10, so counts have the standard deviation sqrt(36), and 50 of them leave six of it once in 10^7.
    Catches cuts that are rounded in one way, which give all rows to the same five clients."""
    labels = np.repeat(np.arange(400), 5)
    sizes = field.dirichlet(labels, 50, 1e9, min_examples=0, seed=0).sizes
    assert np.abs(sizes - 40).max() < 36


def test_dirichlet_draws_follow_the_law():
    """Catches a mix shared by clients, a draw from the table's prior, and class rows drawn unevenly."""
    labels = np.repeat([0, 1, 2, 3], [10, 20, 30, 40])  # an uneven table: the law is per class all the same
    clients, alpha, n = 50_000, 0.3, 25
    partition = field.dirichlet_draws(labels, clients, alpha, min_examples=n, max_examples=n, seed=1)
    share = (labels[partition.indices].reshape(clients, n) == 2).mean(axis=1)
    _rejects(share, 1 / 4, 0.3)

    def law(alpha):
        return (1 / 4) * (3 / 4) * (n + 4 * alpha) / (n * (1 + 4 * alpha))

    _rejects((share - 1 / 4) ** 2, law(alpha), law(alpha * 1.2))
    # Within a class every row is as likely: chi-square with 29 degrees of freedom, 76.1 has a false-alarm rate of 4e-6.
    counts = np.bincount(partition.indices, minlength=100)[30:60]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 76.1


def test_dirichlet_draws_sizes_are_uniform_and_drawn_without_a_loop():
    """Catches an excluded upper bound, and a Python loop over clients, by its calls."""
    number, partition = calls(
        lambda: field.dirichlet_draws(LABELS, 100_000, 0.3, min_examples=20, max_examples=60, seed=0)
    )
    assert partition.sizes.min() == 20 and partition.sizes.max() == 60 and partition.indices.dtype == np.int32
    counts = np.bincount(partition.sizes)[20:]
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 91.8  # chi-square, 40 degrees, 6e-6
    assert number < 50_000


def test_quantity_laws():
    """Catches an exponent off by one (density against tail), and a variance taken for a standard deviation."""
    num_clients, total = 5000, 5_000_000
    sizes = field.quantity_power_law(total, num_clients, exponent=3.0, seed=0).sizes
    assert sizes.sum() == total
    _rejects(np.log(sizes / sizes.min()), 1 / 2, 1 / 3)
    sizes = field.quantity_lognormal(total, num_clients, sigma=0.7, seed=0).sizes
    logs = np.log(sizes)
    _rejects((logs - logs.mean()) ** 2, 0.7**2, 0.8**2)
    assert field.quantity_power_law(100, 100, exponent=1.01, seed=0).sizes.tolist() == [1] * 100


def test_sizes_are_as_asked():
    """Catches a ratio of rates, a first client without rows, and sizes that are rounded twice."""
    np.testing.assert_array_equal(field.quantity_linear(5050, 100, seed=0).sizes, np.arange(1, 101))
    np.testing.assert_array_equal(field.quantity_exponential(1023, 10, ratio=2.0, seed=0).sizes, 2 ** np.arange(10))
    assert field.quantity_exponential(100, 3, ratio=1.0, seed=0).sizes.tolist() == [34, 33, 33]
    huge = field.quantity_exponential(4000, 30, ratio=1e30, min_examples=2, seed=0).sizes
    assert huge.tolist() == [2] * 29 + [4000 - 58]
    assert field.quantity_given(10, [0, 7, 3], seed=0).sizes.tolist() == [0, 7, 3]
    for sizes, argument in (([1, 2], "sizes"), ([10, 1], "sizes"), ([], "sizes")):
        with refused(argument):
            field.quantity_given(10, sizes, seed=0)
        with refused(argument):
            field.dirichlet_of_sizes(np.zeros(10, int), sizes, 1.0, seed=0)
    with refused("sizes[1]", value=-1):
        field.quantity_given(10, [11, -1], seed=0)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    alpha=st.sampled_from([1e-300, 1e-3, 0.3, 1e9]),
)
def test_dirichlet_of_sizes_keeps_sizes_and_rows(labels, cuts, alpha):
    """Catches a class that is overdrawn, shares of exactly 0 without end, and rows lost when a class runs out."""
    places = sorted(min(cut, len(labels)) for cut in cuts)
    sizes = np.diff([0, *places, len(labels)]).tolist()
    partition = field.dirichlet_of_sizes(labels, sizes, alpha, seed=0)
    assert sorted(partition.indices.tolist()) == list(range(len(labels)))
    assert partition.sizes.tolist() == sizes


def test_dirichlet_of_sizes_follows_the_law():
    """Catches a concentration for the sum of classes, and labels that stay IID: moments over seeds."""
    num_classes, alpha, n = 4, 0.5, 20
    labels = np.repeat(np.arange(num_classes), 1000)
    # Only where the small client comes before the large one, which would have left few classes.
    shares = []
    for seed in range(2500):
        partition = field.dirichlet_of_sizes(labels, [n] + [0] * 3 + [len(labels) - n], alpha, seed=seed)
        rows = partition.indices[:n]
        order = field.partition.generator("dirichlet_of_sizes", seed)
        order.permutation(len(labels))
        clients = order.permutation(5).tolist()
        if clients.index(0) < clients.index(4):
            shares.append(np.bincount(labels[rows], minlength=num_classes) / n)
    shares = np.array(shares)
    p = 1 / num_classes
    variance = p * (1 - p) * (n + num_classes * alpha) / (n * (1 + num_classes * alpha))
    _rejects(shares[:, 0], p, p * 1.2)
    _rejects((shares[:, 0] - p) ** 2, variance, variance * 1.3)


@pytest.mark.parametrize("name", ["power_law_sizes", "lognormal_sizes", "linear_sizes", "exponential_sizes"])
def test_labels_are_skewed_at_the_same_sizes(name):
    """Catches a law of sizes that alpha changes, labels that stay IID, and an alpha that is not passed on."""
    options = {"num_clients": 20, "min_examples": 30, "seed": 5} | (
        {"ratio": 1.1} if name == "exponential_sizes" else {}
    )
    make = getattr(field.partitioners, name)
    plain, skewed = (make(alpha=alpha, **options).divide(LABELS) for alpha in (None, 0.01))
    np.testing.assert_array_equal(plain.sizes, skewed.sizes)
    np.testing.assert_array_equal(np.sort(skewed.indices), np.arange(4000))
    most = [
        np.mean([np.bincount(LABELS[part]).max() / len(part) for part in np.split(parts.indices, parts.offsets[1:-1])])
        for parts in (plain, skewed)
    ]
    assert most[0] < 0.3 and most[1] > 0.6


def test_shards_give_few_labels():
    """Catches shards dealt in order, and shards cut across the shuffled data."""
    labels = np.repeat(np.arange(10), 600)
    partition = field.shards(labels, 100, 2, seed=0)
    assert set(partition.sizes.tolist()) == {60}
    held = [len(set(labels[partition.indices[a : a + 60]])) for a in partition.offsets[:-1]]
    assert set(held) == {1, 2}


def test_by_group_is_natural():
    partition = field.by_group(np.array(["u7", "u1", "u7", "u3"]))
    assert partition.indices.tolist() == [1, 3, 0, 2] and partition.sizes.tolist() == [1, 1, 2]


def test_feature_shift_moves_each_client_rigidly():
    """Catches a shift per example, a shift of labels, and a scale that is a variance."""
    examples = {"x": np.random.default_rng(0).standard_normal((4000, 8)).astype(np.float32), "y": LABELS}
    partition = field.iid(4000, 400, seed=0)
    population = field.feature_shift(examples, partition, scale=3.0, seed=5)
    np.testing.assert_array_equal(population.examples["y"], LABELS[partition.indices])
    moved = (np.asarray(population.examples["x"]) - examples["x"][partition.indices]).reshape(400, 10, 8)
    assert np.ptp(moved, axis=1).max() < 1e-5
    _rejects(moved[:, 0].reshape(-1) ** 2, 9.0, 3.0)


BAD = [
    (lambda: field.iid(3, 4, seed=0), "num_clients: expected at most the 3 examples, got 4"),
    (lambda: field.iid(3, 2, seed=-1), "seed: expected an integer"),
    (lambda: field.iid(3.0, 2, seed=0), "num_examples: expected an integer"),
    (lambda: field.iid(3, True, seed=0), "num_clients: expected an integer"),
    (lambda: field.dirichlet([0, 1], 1, 0.0, seed=0), "alpha: expected a finite number > 0"),
    (lambda: field.dirichlet([0, 1], 1, np.nan, seed=0), "alpha: expected"),
    (lambda: field.dirichlet([0, 1], 1, np.inf, seed=0), "alpha: expected"),
    (lambda: field.dirichlet([0, 1, 1], 2, 0.5, min_examples=2, seed=0), "at most 1 for 2 clients of 3 examples"),
    (lambda: field.dirichlet([[0, 1]], 1, 0.5, seed=0), "not one-hot"),
    (
        lambda: field.dirichlet([0.5, 1], 1, 0.5, seed=0),
        "labels: expected a 1-D integer array.* measured have no class",
    ),
    (lambda: field.shards(np.ones((4, 3), int), 1, seed=0), "int64.4, 3.*: iid, .*need no classes"),
    (lambda: field.dirichlet([], 1, 0.5, seed=0), "labels: expected"),
    (lambda: field.shards([0, 1], 1, 3, seed=0), "^shards_per_client: expected at most 2"),
    (lambda: field.shards([0, 1], 3, 1, seed=0), "^num_clients: expected at most the 2 examples, got 3"),
    (lambda: field.iid(2, 3, seed=0), "^num_clients: expected at most the 2 examples, got 3"),
    (lambda: field.shards([0, 1], 1, 0, seed=0), "shards_per_client"),
    (lambda: field.quantity_power_law(9, 2, exponent=1.0, seed=0), "exponent"),
    (lambda: field.quantity_lognormal(9, 2, sigma=-1.0, seed=0), "sigma"),
    (lambda: field.dirichlet_draws([0], 1, 1.0, min_examples=3, max_examples=2, seed=0), "max_examples"),
    (lambda: field.dirichlet_draws([0], 10**9, 1.0, min_examples=3, max_examples=3, seed=0), "rows drawn"),
    (lambda: field.by_group([0.5]), "groups: expected"),
    (lambda: field.feature_shift({"x": np.arange(3)}, field.iid(3, 1, seed=0), scale=1.0, seed=0), "floating features"),
    (lambda: field.feature_shift({"x": np.zeros(2)}, field.iid(3, 1, seed=0), scale=1.0, seed=0), "rows in"),
]


@pytest.mark.parametrize(("build", "message"), BAD)
def test_bad_input_is_refused(build, message):
    """Catches impossible requests before anything is drawn."""
    with pytest.raises((ValueError, TypeError), match=message):
        build()
