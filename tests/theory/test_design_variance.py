"""The variance of an aggregate under a sampler: closed forms, enumeration, and the simulator's own rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, population, sampling
from fedjax_sim.theory import estimators as module
from fedjax_sim.theory.estimators import design_variance
from fedjax_sim.theory.moments import Moments
from fedjax_sim.theory.sampling_variance import cohort_mean_variance, horvitz_thompson_variance, population_variance
from fedjax_sim.types import Received

N, SLOTS, ROUNDS = 8, 8, 20_000
RNG = np.random.default_rng(2)
# in many directions, so that the squared distance of an aggregate varies little and 20,000 rounds tell 5 %
UPDATES = (np.linalg.qr(RNG.normal(size=(N, N)))[0] + 0.1).astype(np.float32).astype(np.float64)
WEIGHTS = np.array([1, 2, 5, 3, 8, 1, 4, 9.0])


def samplers() -> dict:
    uniform, drawn, dropped = sampling.uniform(N, 4), sampling.with_replacement(N, 3), sampling.with_dropout
    plain = {
        "uniform": uniform,
        "with_replacement": drawn,
        "weighted": sampling.weighted(WEIGHTS, 3),
        "full": sampling.full(N),
        "poisson": sampling.poisson(N, 0.4, num_slots=N),
        "truncated": sampling.poisson(N, 0.4, num_slots=3),
        "cyclic": sampling.cyclic(N, 3),
        "shuffled": sampling.cyclic(N, 3, shuffled=True),
    }
    over = sampling.with_over_invitation(dropped(sampling.uniform(N, 6), 0.3), 4)
    return (
        plain
        | {f"{name}, dropout": dropped(sampler, 0.3) for name, sampler in plain.items()}
        | {"over-invited, dropout": dropped(over, 0.2)}
        | {"invited to fit": sampling.with_over_invitation(dropped(sampling.full(N), 0.5), 4)}
        | {"cyclic, over-invited": sampling.with_over_invitation(dropped(sampling.cyclic(N, 5), 0.3), 3)}
    )


SAMPLERS = samplers()
ESTIMATORS = {
    "mean": {"estimator": "mean"},
    "uniform": {"estimator": "mean", "weighting": "uniform"},
    "fixed_mean": {"estimator": "fixed_mean", "denominator": 3.0},
    "keep_old": {"estimator": "keep_old"},
    "horvitz_thompson": {"estimator": "horvitz_thompson"},
    "hansen_hurwitz": {"estimator": "hansen_hurwitz"},
}


def fits(sampler, estimator):
    wanted = {"horvitz_thompson": False, "hansen_hurwitz": True}
    return estimator not in wanted or wanted[estimator] == sampler.design.replacement


@pytest.mark.parametrize("name", SAMPLERS)
def test_closed_forms_equal_enumeration(name, monkeypatch):
    """Every formula that calls itself exact equals the sum over all cohorts to 1e-12; the others do not.

    Catches a wrong joint probability, a lost empty cohort, weights that are squared or forgotten, chances
    without the dropout.
    """
    closed_forms = {form: getattr(module, form) for form in ("_with_replacement", "_without_replacement")}
    for kind, options in ESTIMATORS.items():
        if not fits(SAMPLERS[name], kind):
            continue
        first = design_variance(SAMPLERS[name].design, UPDATES, WEIGHTS, method="leading order", **options)
        with monkeypatch.context() as patch:
            for form, closed in closed_forms.items():
                patch.setattr(module, form, lambda *args, closed=closed: closed(*args)._replace(exact=False))
            truth = design_variance(SAMPLERS[name].design, UPDATES, WEIGHTS, method="exact", **options)
        same = np.allclose(first.mean, truth.mean, rtol=1e-12) and np.isclose(
            first.variance, truth.variance, 1e-11, 1e-14
        )
        assert same == first.exact, (kind, first, truth)
        assert first.exact or kind in ("mean", "uniform")
        assert truth.exact and np.allclose(truth.target, first.target)
        if kind in ("horvitz_thompson", "hansen_hurwitz"):
            assert np.allclose(truth.bias, 0, atol=1e-12)
        auto = design_variance(SAMPLERS[name].design, UPDATES, WEIGHTS, **options)
        assert np.isclose(auto.variance, truth.variance if auto.exact else first.variance)


@functools.cache
def aggregates(name):
    """{rule: [rounds, N]} what the real aggregators make of the real sampler's cohorts."""
    sampler = SAMPLERS[name]

    @jax.jit
    def cohorts(key, state):
        step = lambda state, key: sampler.sample(key, state)[::-1]  # noqa: E731
        found = jax.lax.scan(step, state, jax.random.split(key, ROUNDS))[1]
        pad = lambda x: jnp.pad(x, ((0, 0), (0, SLOTS - x.shape[1])))  # noqa: E731
        return pad(found.ids), pad(found.reported)

    ids, reported = cohorts(jax.random.key(5), sampler.init())
    return run_rules(ids, reported, jnp.float32(UPDATES), jnp.float32(WEIGHTS))


@jax.jit
def run_rules(ids, reported, updates, weights):
    rules = {
        "mean": aggregation.mean(),
        "uniform": aggregation.mean(weighting="uniform"),
        "fixed_mean": aggregation.fixed_mean(3.0),
        "total": aggregation.total(weighting="examples"),
    }

    def one(ids, reported):
        reports = jnp.where(reported[:, None], updates[ids], 0)
        received = Received(reports, jnp.where(reported, weights[ids], 0), ids, jnp.arange(SLOTS))
        made = {}
        for name, rule in rules.items():
            carry = rule.init(jax.ShapeDtypeStruct((N,), jnp.float32), SLOTS)
            carry = rule.accumulate(jax.random.key(0), None, carry, received)
            made[name] = rule.finalize(jax.random.key(0), None, carry)[0]
        return made

    return jax.vmap(one)(ids, reported)


def check_moments(found, law, deviations=4.5):
    """The mean and the variance of independent rounds are the law's, and 5 % more or less variance is not.

    Standard errors from the sample's fourth moment: a true law fails with probability below 1e-5, and another is
    rejected but for 1e-3.
    """
    found = np.asarray(found, np.float64)
    squares = np.square(found - law.mean).sum(1)
    error = squares.std() / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - law.mean) <= deviations * found.std(0) / np.sqrt(len(found)) + 1e-6).all()
    assert abs(squares.mean() - law.variance) <= deviations * error + 1e-6, (squares.mean(), law.variance, error)
    if law.variance > 1e-9:
        assert abs(squares.mean() - 1.05 * law.variance) > deviations * error
        assert abs(squares.mean() - 0.95 * law.variance) > deviations * error


SLOW = {"full", *(f"{name}, dropout" for name in ("weighted", "full", "poisson", "truncated", "cyclic", "shuffled"))}


@pytest.mark.default_rows(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SAMPLERS]
)
def test_real_rounds_have_the_predicted_moments(name):
    """20,000 rounds of each real sampler through the real aggregators, mean and variance, 5 % off is rejected.

    Catches theory of another simulator: slots of one client that drop out one by one, an empty cohort that repeats the
    last update, a truncation that favours low ids. Cyclic rounds in order repeat, so 20,000 of them are all windows.
    """
    found, total_weight = dict(aggregates(name)), WEIGHTS.sum()
    design = SAMPLERS[name].design
    total = np.asarray(found.pop("total"), np.float64)
    found["keep_old"] = total / total_weight
    if not design.replacement:
        found["horvitz_thompson"] = total / (total_weight * design.inclusion_probabilities())
    elif name == "with_replacement":  # p_i = 1/N
        found["hansen_hurwitz"] = total * N / (design.num_slots * total_weight)
    for kind, aggregate in found.items():
        check_moments(aggregate, design_variance(design, UPDATES, WEIGHTS, method="exact", **ESTIMATORS[kind]))


@pytest.mark.full
def test_a_run_of_the_simulator_has_the_predicted_variance():
    """One federated round from the same model, 6,000 times: quadratics, dropout, the mean of FedAvg.

    Catches theory that fits the parts but not what `federated` makes of them.
    """
    rate, sampler = 0.3, sampling.with_dropout(sampling.uniform(30, 6), 0.2)
    centers = RNG.normal(size=(30, 8))
    data = population.quadratic_population(np.tile(np.eye(8), (30, 1, 1)), centers)
    algorithm = algorithms.fedavg(population.quadratic_loss, sampler, optax.sgd(rate), num_steps=1)
    state = algorithm.init(jax.random.key(0), {"w": jnp.full((8,), 2.0)}, data)

    @jax.jit
    def rounds(keys, state, data):
        return jax.lax.map(lambda key: algorithm.params(algorithm.step(key, state, data)[0])["w"] - 2, keys)

    law = design_variance(sampler.design, rate * (centers - 2.0))
    assert law.exact
    check_moments(rounds(jax.random.split(jax.random.key(1), 6_000), state, data), law)


def test_known_laws():
    """Known cases (Cochran 1977, chapters 2 and 6; Li et al. 2020, section 3.3), and formulas as special cases."""
    pair = sampling.uniform(2, 1).design
    law = design_variance(pair, [0.0, 1.0], [1, 9])
    assert law.mean == 0.5 and np.isclose(law.target, 0.9) and np.isclose(law.bias, -0.4) and law.exact
    assert design_variance(pair, [0.0, 1.0], [1, 9], weighting="uniform").target == 0.5
    for estimator in ("horvitz_thompson", "li_scheme_two"):
        assert np.isclose(design_variance(pair, [0.0, 1.0], [1, 9], estimator=estimator).mean, 0.9)
    sigma, target = population_variance(UPDATES), WEIGHTS @ UPDATES / WEIGHTS.sum()
    for m in (1, 3, N):
        law = design_variance(sampling.uniform(N, m).design, UPDATES)
        assert np.isclose(law.variance, cohort_mean_variance(sigma, N, m), atol=1e-15) and law.exact
        drawn = design_variance(sampling.with_replacement(N, m).design, UPDATES)
        assert np.isclose(drawn.variance, sigma / m) and drawn.exact
    assert design_variance(sampling.full(N).design, UPDATES, WEIGHTS).variance == 0
    weighted = design_variance(sampling.weighted(WEIGHTS, 3).design, UPDATES, WEIGHTS, estimator="li_scheme_one")
    share = WEIGHTS / WEIGHTS.sum()
    assert np.isclose(weighted.variance, share @ np.square(UPDATES - target).sum(1) / 3)
    assert np.allclose(weighted.target, target) and np.allclose(weighted.bias, 0, atol=1e-9)
    poisson = design_variance(
        sampling.poisson(N, 0.25, num_slots=N).design, UPDATES, WEIGHTS, estimator="horvitz_thompson"
    )
    terms = WEIGHTS[:, None] * UPDATES / WEIGHTS.sum()
    assert np.isclose(poisson.variance, horvitz_thompson_variance(terms, np.full(N, 0.25)))
    assert np.isclose(poisson.mean_squared_error, poisson.variance)


def test_an_offset_costs_no_digits():
    """Values 1e5 + 1e-3 normal: the textbook's variance to 1e-7. Catches differences of raw squares."""
    values = 1e5 + 1e-3 * np.random.default_rng(1).normal(size=1000)
    sigma = population_variance(values)
    designs = {"uniform": sampling.uniform(1000, 10), "drawn": sampling.with_replacement(1000, 10)}
    wanted = {"uniform": cohort_mean_variance(sigma, 1000, 10), "drawn": sigma / 10}
    fixed = {"estimator": "fixed_mean", "denominator": 10.0}
    for name, sampler in designs.items():
        inverse = "horvitz_thompson" if name == "uniform" else "hansen_hurwitz"
        for options in ({}, fixed, {"estimator": inverse}):
            law = design_variance(sampler.design, values, **options)
            assert law.exact and law.variance == pytest.approx(wanted[name], rel=1e-7, abs=0), (name, options)
    windows = values.reshape(100, 10).mean(1)
    law = design_variance(sampling.cyclic(1000, 10).design, values)
    assert law.variance == pytest.approx(windows.var(), rel=1e-5, abs=0)
    lone = design_variance(sampling.poisson(1000, 0.001, num_slots=1000).design, values, method="leading order")
    empty = 0.999**1000
    assert lone.variance == pytest.approx(empty * (1 - empty) * 1e10, rel=1e-6)
    assert lone.mean[0] == pytest.approx((1 - empty) * 1e5, rel=1e-6)


def test_leading_order_improves_with_the_cohort():
    """First order errs by O(1/m) of itself: where cohorts can be enumerated it is close, and has the right sign.

    Catches a bias of the wrong sign or without the correction for finite populations.
    """
    rng = np.random.default_rng(0)
    size = 16
    values, weights = rng.normal(size=(size, 1)), rng.uniform(1, 3, size)
    errors = []
    for m in (2, 4, 8, 12):
        design = sampling.uniform(size, m).design
        truth = design_variance(design, values, weights, method="exact")
        first = design_variance(design, values, weights, method="leading order")
        assert truth.exact and not first.exact and first.bias * truth.bias > 0
        errors.append((abs(first.bias / truth.bias - 1).item(), abs(first.variance / truth.variance - 1)))
    assert errors[-1][0] < 0.03 and errors[-1][1] < 0.03 and errors[0][0] > 3 * errors[-1][0]


@pytest.mark.parametrize("name", ["uniform", "with_replacement", "poisson, dropout", "shuffled", "truncated"])
def test_moments_suffice(name):
    """Sums over a million clients replace their arrays. Catches moments taken at other weights."""
    design = SAMPLERS[name].design
    for kind, options in ESTIMATORS.items():
        if not fits(SAMPLERS[name], kind) or kind == "hansen_hurwitz":
            continue
        used = np.ones(N) if kind in ("uniform", "fixed_mean") else WEIGHTS
        from_sums = design_variance(design, Moments.of(UPDATES, used), **options)
        from_rows = design_variance(design, UPDATES, WEIGHTS, method="leading order", **options)
        assert np.allclose(from_sums.mean, from_rows.mean) and np.isclose(from_sums.variance, from_rows.variance)
        assert np.allclose(from_sums.target, from_rows.target)
    million = Moments.from_mean_and_variance(10**6, [1.0, 2.0], 4.0)
    law = design_variance(sampling.uniform(10**6, 1000).design, million)
    assert np.isclose(law.variance, cohort_mean_variance(4.0, 10**6, 1000), rtol=1e-9) and law.exact


def test_what_does_not_fit_is_refused():
    """Catches answers to questions that have none."""
    design, drawn = sampling.uniform(N, 3).design, sampling.with_replacement(N, 3).design
    cases = [
        ((design, UPDATES[:5]), {}, "values"),
        ((design, UPDATES, WEIGHTS[:5]), {}, "weights"),
        ((design, UPDATES), {"estimator": "median"}, "estimator"),
        ((design, UPDATES), {"estimator": "hansen_hurwitz"}, "with replacement"),
        ((drawn, UPDATES), {"estimator": "horvitz_thompson"}, "without replacement"),
        ((design, UPDATES), {"denominator": 2.0}, "denominator"),
        ((design, UPDATES), {"estimator": "fixed_mean"}, "denominator"),
        ((design, UPDATES), {"estimator": "keep_old", "weighting": "uniform"}, "weighting"),
        ((design, UPDATES), {"method": "guess"}, "method"),
        ((design, Moments.of(UPDATES), WEIGHTS), {}, "weights=None"),
        ((drawn, Moments.of(UPDATES)), {"estimator": "li_scheme_one"}, "treat all clients alike"),
        ((sampling.cyclic(N, 3).design, Moments.of(UPDATES)), {}, "treat all clients alike"),
        ((design, Moments.of(UPDATES, WEIGHTS)), {"method": "exact"}, "Moments cannot"),
        ((sampling.weighted([0, 1], 1).design, [1.0, 2.0]), {"estimator": "hansen_hurwitz"}, "never drawn"),
        ((sampling.uniform(60, 30).design, RNG.normal(size=60), np.arange(60)), {"method": "exact"}, "enumerate"),
    ]
    for args, options, words in cases:
        with pytest.raises(ValueError, match=words):
            design_variance(*args, **options)
    with pytest.raises(TypeError, match="sampler carries it"):
        design_variance(sampling.full(N), UPDATES)
