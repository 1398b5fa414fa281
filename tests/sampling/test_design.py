"""The contract of every sampler, and the sampling design that describes it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_sim.sampling as sampling
from fedjax_sim import aggregation, theory, types
from fedjax_sim.privacy import mechanism_from
from fedjax_sim.round.compatibility import check_parts
from fedjax_sim.sampling.design import SamplingDesign, mean_of_minimum
from fedjax_sim.transform import identity
from tests.refusals import refused

CASES = {
    "uniform": sampling.uniform(20, 6),
    "uniform, large": sampling.uniform(1500, 6),
    "with_replacement": sampling.with_replacement(20, 6),
    "full": sampling.full(20),
    "cyclic": sampling.cyclic(20, 6),
    "shuffled": sampling.cyclic(20, 6, shuffled=True),
    "poisson": sampling.poisson(20, 0.3, num_slots=7),
    "weighted": sampling.weighted(np.arange(20), 6),
    "with_dropout": sampling.with_dropout(sampling.poisson(20, 0.3), 0.25),
    "with_distinct_clients": sampling.with_distinct_clients(sampling.with_replacement(20, 6)),
    "with_over_invitation": sampling.with_over_invitation(sampling.with_dropout(sampling.uniform(20, 9), 0.25), 6),
}


def scan(sampler, num_rounds, seed=0):
    """Consecutive rounds in one program; counts how often `sample` is traced."""
    traces = []

    @jax.jit
    def run(key, state):
        def step(state, t):
            traces.append(t)
            cohort, state = sampler.sample(jax.random.fold_in(key, t), state)
            return state, cohort

        return jax.lax.scan(step, state, jnp.arange(num_rounds))

    outputs = [run(jax.random.key(s), sampler.init()) for s in (seed, seed + 1)]
    return outputs, len(traces)


@pytest.mark.default_rows(2)
@pytest.mark.parametrize("name", CASES)
def test_inclusion_probabilities_are_the_frequencies(name):
    """The contract of a `Sampler` in a scan (traced once, state of one shape, ids valid), and the design's pi_i as the
    frequency of reporting at least once in 10,000 rounds; cyclic coverage is exact to one pass."""
    sampler, num_rounds = CASES[name], 10_000
    (((state, cohort), (_, other)), traces) = scan(sampler, num_rounds)
    design = sampler.design
    assert traces == 1
    spec = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert spec(state) == spec(sampler.init())
    assert cohort.ids.dtype == jnp.int32 and cohort.ids.shape == (num_rounds, sampler.num_slots)
    assert design.num_slots == sampler.num_slots
    assert ((cohort.ids >= 0) & (cohort.ids < design.population_size)).all()
    assert cohort.invited.dtype == cohort.reported.dtype == bool and not (cohort.reported & ~cohort.invited).any()
    assert all(x.shape == (num_rounds,) for x in cohort.metrics.values())
    if design.scheme not in ("full", "cyclic"):
        assert not np.array_equal(cohort.ids, other.ids)  # another seed, other cohorts
    assert design.fixed_size == (len(set(np.asarray(cohort.invited).sum(axis=1).tolist())) == 1)

    ids, reported = np.asarray(cohort.ids), np.asarray(cohort.reported)
    member = np.zeros((num_rounds, design.population_size), bool)
    rounds, slots = np.nonzero(reported)
    member[rounds, ids[rounds, slots]] = True
    repeats = reported.sum() > member.sum()
    assert design.replacement == repeats
    pi = np.broadcast_to(design.inclusion_probabilities(), design.population_size)
    error = 5.5 * np.sqrt(pi * (1 - pi) / num_rounds) + 1e-9 if design.independent_rounds else 2 / num_rounds
    assert (np.abs(member.mean(axis=0) - pi) <= error).all()


def test_design_of_each_scheme():
    """Catches a design that tells the accountant another scheme, q or cap than the sampler draws."""
    poisson = CASES["poisson"].design
    assert (poisson.scheme, poisson.rate, poisson.cohort_size, poisson.num_slots) == ("truncated_poisson", 0.3, 6.0, 7)
    assert not poisson.fixed_size and poisson.overflow_probability == pytest.approx(0.22773, abs=1e-5)
    uniform = CASES["uniform"].design
    assert (uniform.scheme, uniform.rate, uniform.fixed_size) == ("uniform_without_replacement", 0.3, True)
    assert uniform.overflow_probability == 0 and uniform.response_rate == 1
    assert CASES["with_dropout"].design.response_rate == 0.75
    assert CASES["with_dropout"].design.scheme == "truncated_poisson"
    assert not CASES["weighted"].design.draw_probabilities.flags.writeable
    assert not CASES["cyclic"].design.independent_rounds
    assert sampling.with_replacement(1, 3).design.inclusion_probabilities() == 1
    assert {case.design.scheme for case in CASES.values()} >= {"full", "shuffled_cyclic", "with_replacement"}


def test_mean_of_minimum():
    """Against the sum over the binomial law."""
    from scipy import stats

    for trials, rate, limit in [(1, 0.4, 1), (20, 0.3, 7), (20, 0.3, 20), (50, 0.9, 3), (5, 1.0, 3)]:
        k = np.arange(trials + 1)
        expected = (np.minimum(k, limit) * stats.binom.pmf(k, trials, rate)).sum()
        assert mean_of_minimum(trials, rate, limit) == pytest.approx(expected, rel=1e-12)


def test_bad_designs():
    """Catches designs that no sampler can have."""
    good = CASES["uniform"].design
    for changes, text in [
        (
            {"scheme": "uniform_with_replacement"},
            "scheme: expected one of .* Did you mean 'uniform_without_replacement'",
        ),
        ({"population_size": 0}, "population_size: expected"),
        ({"num_slots": True}, "num_slots: expected"),
        ({"cohort_size": float("nan")}, "cohort_size: expected"),
        ({"rate": 1.5}, "rate: expected"),
        ({"response_rates": (0.5, 1.2)}, "response_rates: expected"),
        ({"max_reports": 7}, "max_reports: expected"),
        ({"max_reports": 3}, "reports_limited_after: expected"),
        ({"reports_limited_after": 0}, "max_reports: expected"),
        ({"draw_probabilities": np.ones(20)}, "draw_probabilities: expected None"),
        ({"scheme": "weighted_with_replacement"}, r"draw_probabilities: expected an array of shape \(20,\)"),
    ]:
        with pytest.raises((ValueError, TypeError), match=text):
            dataclasses.replace(good, **changes)
    unknown = dataclasses.replace(good, response_rates=(None,))
    with refused("response_rate", value=None, rule="a number"):
        unknown.inclusion_probabilities()
    for denominator in ("fixed", 6.0):
        with refused("response_rate", value=None, rule="a number"):
            theory.cohort_coefficients(unknown, np.full(20, 0.05), denominator=denominator)
    assert isinstance(good, SamplingDesign)


@pytest.mark.parametrize("scheme", ["unknown", "unknown_without_replacement"])
def test_an_unknown_scheme_fails_closed(scheme):
    """Catches a formula or an accountant that takes cohorts that follow losses for uniform ones."""
    good = CASES["uniform"].design
    design = dataclasses.replace(good, scheme=scheme)
    assert design.replacement == (scheme == "unknown")
    assert not (design.known or design.equal_chances or design.fixed_size or design.independent_rounds)
    values, shares = np.arange(20.0), np.full(20, 0.05)
    central = types.Noise("gaussian", "central", 1.0, 1.0, "client")
    for uses in (
        lambda design: design.inclusion_probabilities(),
        lambda design: design.overflow_probability,
        theory.report_counts,
        theory.joint_inclusion_probability,
        theory.enumerate_cohorts,
        lambda design: theory.design_variance(design, values),
        lambda design: theory.cohort_coefficients(design, shares),
        lambda design: theory.cohort_coefficients(design, shares, denominator=6.0),
        lambda design: theory.budget_from_moments([[1.0]], step_size=0.1, design=design, client_covariance=1.0),
        lambda design: aggregation.horvitz_thompson(design, 20.0),
        lambda design: mechanism_from(design, central),
        lambda design: mechanism_from(design, central._replace(place="local")),
    ):
        uses(good)
        for unknown in (design, dataclasses.replace(design, response_rates=(0.5,))):
            with pytest.raises(ValueError, match=f"{scheme}|without replacement"):
                uses(unknown)
    sampler = CASES["uniform"]._replace(design=design)
    with pytest.raises(ValueError, match="fixed number of different clients"):
        sampling.with_over_invitation(sampler, 3)
    with pytest.raises(ValueError, match="scheme is unknown, and it may draw"):
        check_parts(sampler, types.ClientUpdate(None, None), identity(), aggregation.mean(), None)
