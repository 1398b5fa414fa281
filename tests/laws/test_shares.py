"""The law of shares: a share at its threshold reaches it, and a share of a number that is whole is that number."""

from fractions import Fraction
from math import floor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, metrics, models, network, population, privacy, sampling
from fedjax_sim.adversary import tpr_at_fpr
from fedjax_sim.client.work import work
from fedjax_sim.metrics import rounds_to_target
from fedjax_sim.population.poisoned.poisoning import chosen_clients
from fedjax_sim.running.log import plain
from fedjax_sim.running.stopping import StopWhen
from fedjax_sim.sampling.time.round_cost import Price
from fedjax_sim.types import ClientData, Cohort, Work
from fedjax_sim.types.shares import exceeds, product_of_share, reaches

SIZES = [7, 10, 13, 25, 29, 50, 100, 147, 300, 1000]
HUNDREDTHS = np.arange(1, 101)


def quotients(count, size):
    """A share as the aggregators round it: by a division, and by a product with the rounded inverse."""
    count, size = np.float32(count), np.float32(size)
    return np.stack([count / size, count * (np.float32(1) / size)])


@pytest.mark.parametrize("size", SIZES)
def test_a_share_reaches_its_threshold(size):
    """Every count of every size against every other. Catches a comparison that one unit of float32 decides."""
    counts = np.arange(size + 1)
    shares = quotients(counts, size)
    for threshold in range(1, size):
        decimal = float(Fraction(threshold, size))
        np.testing.assert_array_equal(reaches(shares, decimal), np.stack([counts >= threshold] * 2))
        np.testing.assert_array_equal(exceeds(shares, decimal), np.stack([counts > threshold] * 2))


def test_a_share_of_steps():
    """k / K of K steps, and shares with two decimals. Catches 8 steps of 13 for the share 7 / 13."""
    number = np.arange(1, 401)

    @jax.jit
    @jax.vmap
    def by_client(share, steps):
        return work(num_epochs=1, batch_size=1).own_steps(steps, share)

    @jax.jit
    @jax.vmap
    def priced(share, steps):
        return network.load_of(Work(1, 1, lambda _: steps, flops=1.0, step_flops=1.0), jnp.int32(1), share)

    ids = jnp.arange(400)
    timed = Price(first=0, step=0, steps=ids + 1, bytes_down=0, bytes_up=0)
    for parts in range(1, 60):
        k = np.minimum(np.arange(1, 401) % parts + 1, parts)
        share = np.float32(k) / np.float32(parts)
        expected = -(-number * k // parts)
        np.testing.assert_array_equal(np.ceil(product_of_share(share, number)), expected)
        if parts in (13, 49, 50):
            np.testing.assert_array_equal(by_client(jnp.asarray(share), jnp.asarray(number)), expected)
            np.testing.assert_array_equal(priced(jnp.asarray(share), jnp.asarray(number)).flops, expected)
            cohort = Cohort(ids, ids >= 0, ids >= 0, work=jnp.asarray(share))
            np.testing.assert_array_equal(timed.num_steps(cohort), expected)
    for hundredths in HUNDREDTHS:
        found = product_of_share(np.float32(hundredths / 100), number)
        np.testing.assert_array_equal(np.ceil(found), -(-number * hundredths // 100))
        np.testing.assert_array_equal(np.floor(found), number * hundredths // 100)


def vote(arrays, id):
    return ClientData({"x": jnp.zeros((1, 1)), "y": arrays["y"][id][None]}, jnp.ones(1, bool))


def voters(count, size):
    """One of two symbols for each client; the first is held by so many of them."""
    return population.generated(size, vote, {"y": jnp.asarray(np.arange(size) >= count, jnp.int32)})


AT_THRESHOLD = [(5, 100, None), (15, 50, "fixed")]
MORE = [(10, 100), (20, 100), (30, 100), (5, 50), (10, 50), (7, 25), (9, 25), (3, 29)]
AT_THRESHOLD += [pytest.param(*sizes, rule, marks=pytest.mark.full) for sizes in MORE for rule in (None, "fixed")]


@pytest.mark.default_rows("fixed")
@pytest.mark.parametrize(("count", "size", "rule"), AT_THRESHOLD)
def test_heavy_hitters_at_the_threshold(count, size, rule):
    """Held by exactly the threshold's share, or by one client less. Catches misses by rounding."""
    options = {"aggregator": aggregation.fixed_mean(size)} if rule else {}
    made = algorithms.heavy_hitters(
        sampling.full(size), num_symbols=2, bits_per_round=1, threshold=count / size, num_prefixes=2, **options
    )
    step = jax.jit(made.step)
    for held, expected in ((count, {0, 1}), (count - 1, {1})):
        data = voters(held, size)
        state, _ = step(jax.random.key(0), made.init(jax.random.key(1), (), data), data)
        symbols = set(np.asarray(made.params(state)["symbols"]).tolist()) - {-1}
        assert symbols == expected


@pytest.mark.full
@pytest.mark.parametrize(("count", "size"), [(7, 25), pytest.param(53, 100, marks=pytest.mark.full)])
def test_a_quantile_at_its_share(count, size):
    """Rows 1, 2, ...: the quantile of the share k / n is k. Catches k + 1, because a product was rounded."""

    def read(arrays, id):
        return ClientData({"x": arrays["x"][id][None, None], "y": jnp.zeros(1)}, jnp.ones(1, bool))

    data = population.generated(size, read, {"x": jnp.arange(1.0, size + 1)})
    made = algorithms.quantiles(sampling.full(size), probabilities=[count / size], low=0.0, high=128.0, column=0)
    step = jax.jit(made.step)
    state = made.init(jax.random.key(1), (), data)
    for round in range(12):
        state, _ = step(jax.random.key(round), state, data)
    assert made.params(state)["quantiles"][0] == pytest.approx(count, abs=0.1)


@pytest.mark.full
@pytest.mark.parametrize(("count", "size"), [(9, 25), pytest.param(3, 29, marks=pytest.mark.full)])
def test_clusters_at_the_least_share(count, size):
    """A cluster with no larger share than `least_share` stays. Catches one that moves by rounding, and one that never
    moves."""

    def read(arrays, id):
        x = jnp.where(id < arrays["count"], 4.0, -4.0)
        return ClientData({"x": x[None, None], "y": jnp.zeros(1)}, jnp.ones(1, bool))

    made = algorithms.kmeans(sampling.full(size), num_clusters=2, least_share=count / size, low=-5.0, high=5.0)
    step = jax.jit(made.step)
    for held, moves in ((count, False), (count + 1, True)):
        data = population.generated(size, read, {"count": jnp.int32(held)})
        start = {"centroids": jnp.array([[3.0], [-3.0]])}
        state, _ = step(jax.random.key(0), made.init(jax.random.key(1), start, data), data)
        assert float(made.params(state)["centroids"][0, 0]) == pytest.approx(4.0 if moves else 3.0)


@pytest.mark.parametrize("size", [25, 100])
def test_a_target_is_reached_at_its_share(size):
    """k of n rows right reach the target k / n, and k - 1 do not. Catches an accuracy below its own decimals."""
    evaluate = metrics.evaluation(
        lambda params, examples, key: {
            "loss": jnp.zeros(size),
            "accuracy": (examples["y"] < params).astype(jnp.float32),
            "weight": jnp.ones(size),
        },
        test={"x": np.zeros((size, 1), np.float32), "y": np.arange(size)},
    )
    found = [plain(evaluate(jnp.int32(k))["test_accuracy"]) for k in range(size + 1)]
    for k in range(1, size + 1):
        rule = f"m >= {k / size}"
        assert StopWhen(rule)(1, None, {"round": 1, "m": found[k]})
        assert not StopWhen(rule)(1, None, {"round": 1, "m": found[k - 1]})
        assert rounds_to_target(found, k / size, rising=True) == k + 1


def test_counts_on_the_host():
    """Shares of clients, scores and units as their decimals read. Catches floor(0.29 * 100) = 28, ceil(0.07 * 100)."""
    included = np.arange(200) % 2 == 0
    for hundredths in range(1, 100):
        share = hundredths / 100
        for size in (50, 100, 200, 340):
            exact = Fraction(hundredths, 100) * size
            if round(exact):
                assert len(chosen_clients(size, None, share, 0)) == round(exact)
            others = np.arange(size)[::-1]
            # A member scores above each of the others: as many are found as the false positive rate lets through.
            assert tpr_at_fpr(others + 0.5, others, share) == pytest.approx((floor(exact) + 1) / size)
        one_run = privacy.audit_one_run(included, np.where(included, 1.0, -1.0), guessed=(share,))
        assert f"of {2 * max(hundredths, 1)} guesses" in one_run.note


def test_units_of_a_share():
    """7 of 100 units. Catches the eighth, because 0.07 * 100 is above 7 in floats."""
    model = models.mlp(input_shape=(1,), num_outputs=1, hidden=(100,))
    data = population.mean_estimation(num_clients=2).train
    made = algorithms.heterofl(
        model,
        models.supervised(model, models.squared_error),
        sampling.full(2),
        optax.sgd(0.1),
        widths=[0.07],
        num_steps=1,
    )
    params = model.init(jax.random.key(0))[0]
    state = made.init(jax.random.key(0), params, data)
    own = jax.jit(made.evaluated.personal)(state, jnp.arange(1))
    assert int((np.asarray(own["hidden_0"]["kernel"]) != 0).sum()) == 7
