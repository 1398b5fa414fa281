"""Federated quantiles against NumPy, and their stated error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import aggregation, algorithms, population, sampling, transform
from tests.algorithms.analytics import problem as p
from tests.refusals import refused

PROBABILITIES = (0.1, 0.5, 0.8)


def test_everybody_together_brackets_numpy():
    """The smallest value whose share is at least p is in every interval, which halves. Catches `<` for `<=`, padding,
    and a half that is left on the wrong side."""
    made = algorithms.quantiles(p.EVERYBODY, probabilities=PROBABILITIES, low=-8.0, high=8.0, column=0)
    x, _ = p.pooled()
    expected = np.quantile(x[:, 0], PROBABILITIES, method="inverted_cdf")
    estimates, _ = p.rounds(made, 12)
    for t, estimate in enumerate(estimates, 1):
        assert (estimate["low"] < expected).all() and (expected <= estimate["high"]).all()
        np.testing.assert_allclose(estimate["high"] - estimate["low"], 16 / 2**t, rtol=1e-4)
        assert (np.abs(estimate["quantiles"] - expected) <= 8 / 2**t + 1e-5).all()


@pytest.mark.full
def test_labels_are_numbers_too():
    """Without a column the number y is meant."""
    made = algorithms.quantiles(p.EVERYBODY, probabilities=(0.5,), low=-1.0, high=4.0)
    (*_, estimate), _ = p.rounds(made, 20)
    _, y = p.pooled()
    assert estimate["quantiles"][0] == pytest.approx(np.quantile(y, 0.5, method="inverted_cdf"), abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("values", [[20.0] * 3 + [60.0] * 7, [*range(1, 11)]], ids=["tied", "ranks"])
def test_shares_that_are_met_exactly(values):
    """Ten clients with a row each, whose shares are the probabilities. Catches 0.3 as a float32, which lies above 3 of
    10: the quantile would be the next value."""
    probabilities = [i / 10 for i in range(1, 10)]
    people = population.from_clients([{"x": np.full((1, 1), v, np.float32)} for v in values])
    made = algorithms.quantiles(sampling.full(10), probabilities=probabilities, low=0.0, high=100.0, column=0)
    estimates, _ = p.rounds(made, 20, data=people)
    expected = np.quantile(values, probabilities, method="inverted_cdf")
    assert (estimates[-1]["low"] < expected).all() and (expected <= estimates[-1]["high"]).all()


@pytest.mark.full
def test_small_cohorts_keep_the_bound():
    """The rank of the interval's ends is off by less than e in all but 2 T exp(-2 m e^2) of runs: here 6 rounds, m = 60
    and e = 0.2 give at most 0.098 for both ends of one quantile. Of 300 runs more than 50 fail by chance with
    probability 1e-4; an e of half the size fails far more often. Catches cohorts that are read with padding."""
    size, e = 2000, 0.2
    data = population.mixture(num_clients=size, num_components=1, dimension=1, spread=1.0, examples_per_client=1)
    made = algorithms.quantiles(sampling.uniform(size, 60), probabilities=(0.5,), low=-5.0, high=6.0, column=0)
    found = p.repeated(made, 6, 300, data=data.train)
    values = np.asarray(jax.vmap(data.train.client)(np.arange(size, dtype=np.int32)).examples["x"]).reshape(-1)

    def misses(e):
        below = (values[None] <= found["low"]).mean(1)
        at_most = (values[None] <= found["high"]).mean(1)
        return ((below >= 0.5 + e) | (at_most <= 0.5 - e)).sum()

    assert misses(e) <= 50 and misses(0.02) > 50


@pytest.mark.full
def test_cohorts_without_rows_leave_the_interval():
    """Catches an empty sum that counts as a threshold above the quantile."""
    people = population.from_clients([{"x": np.zeros((0, 1), np.float32), "y": np.zeros(0, np.float32)}] * 3 + [
        {"x": np.full((1, 1), 0.8, np.float32), "y": np.full(1, 0.8, np.float32)}
    ])  # fmt: skip
    made = algorithms.quantiles(sampling.cyclic(4, 1), probabilities=(0.5,))
    state, step, ends = made.init(jax.random.key(0), (), people), jax.jit(made.step), []
    for t in range(4):
        state, _ = step(jax.random.key(t), state, people)
        ends.append((float(made.params(state)["low"][0]), float(made.params(state)["high"][0])))
    assert set(ends) <= {(0.0, 1.0), (0.5, 1.0)} and ends[-1] == (0.5, 1.0)


def test_rules_against_attackers_are_refused():
    """Catches a median of counts, which is no count."""
    with refused("aggregator", rule="statistic"):
        algorithms.quantiles(p.EVERYBODY, aggregator=aggregation.median())


def test_the_loss_is_the_pinball_loss():
    """Its minimum over a constant is the quantile."""
    loss_fn = algorithms.quantiles(p.EVERYBODY, probabilities=(0.25,)).evaluated.loss_fn
    examples = {"x": jnp.zeros((2, 1)), "y": jnp.array([1.0, -1.0])}
    np.testing.assert_allclose(loss_fn({"quantiles": jnp.zeros(1)}, examples, None)["loss"], [0.25, 0.75])


@pytest.mark.parametrize(
    "options, words",
    [
        ({"probabilities": (0.5, 1.0)}, r"probabilities\[1\]: expected a number in \(0, 1\), got 1.0"),
        ({"probabilities": ()}, "probabilities: expected"),
        ({"low": 1.0}, "high: expected more than low = 1"),
        ({"transform": transform.error_feedback(transform.top_k(0.1))}, "transform: expected one without a memory"),
    ],
)
def test_what_is_refused(options, words):
    """Before anything compiles."""
    with pytest.raises((ValueError, TypeError), match=words):
        algorithms.quantiles(sampling.full(3), **options)
