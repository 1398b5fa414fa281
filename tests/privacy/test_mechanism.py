"""A mechanism is read from an algorithm's parts, or refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest

from fedjax_sim import adversary, aggregation, client, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.privacy import Mechanism, account, mechanism_from, mechanism_of, written_down
from fedjax_sim.types import Noise
from tests.refusals import refused

N, M = 200, 20


def parts(sampler=None, change=None, aggregator=None, own=None):
    """The parts of a federation with central noise, some of them exchanged."""
    return {
        "sampler": sampling.poisson(N, M / N) if sampler is None else sampler,
        "client": own or client.local_sgd(lambda w, x, key: (w * x).sum(), optax.sgd(0.1), client.work(num_steps=1)),
        "transform": transform.gaussian_mechanism(0.5, 1.2) if change is None else change,
        "aggregator": aggregator or aggregation.fixed_mean(M),
        "server": server.optimizer(optax.sgd(1.0)),
    }


def written(noise_multiplier=1.0, **changes):
    """A mechanism written down."""
    given = {
        "noise_multiplier": noise_multiplier,
        "scheme": "poisson",
        "population_size": N,
        "cohort_size": M,
        "num_slots": N,
    }
    return Mechanism(**(given | changes))


def test_reads_the_parts():
    """Catches a fact that is read from the wrong part: rate, slots, noise, clip."""
    found = mechanism_of(federated(**parts()))
    assert (found.law, found.rate, found.noise_multiplier, found.clip_norm) == ("truncated_poisson", M / N, 1.2, 0.5)
    assert found.num_slots == sampling.poisson(N, M / N).num_slots
    assert found.adjacency == "add_or_remove_one" and found.moves == 1
    fixed = mechanism_of(parts(sampling.uniform(N, M)))
    assert (fixed.law, fixed.adjacency, fixed.moves) == ("without_replacement", "replace_one", 2)
    assert mechanism_of(parts(sampling.full(N))).law == "always"
    assert mechanism_of(parts(sampling.uniform(N, N))).scheme == "full"
    thinned = mechanism_of(parts(sampling.with_dropout(sampling.poisson(N, 0.1), 0.3)))
    assert thinned.thinned and thinned.rate == M / N  # the rate of all those invited
    assert mechanism_of(parts(change=transform.identity())) is None
    assert mechanism_of({}) is None


def test_reads_chains_and_local_noise():
    """Catches noise that is overlooked in a chain, and local noise that a cohort is taken to amplify."""
    chained = mechanism_of(parts(change=transform.chain(transform.top_k(0.1), transform.gaussian_mechanism(1.0, 0.8))))
    assert chained.noise_multiplier == 0.8
    noisy, uniform = transform.local_gaussian(1.0, 3.0), aggregation.mean(weighting="uniform")
    local = mechanism_of(parts(change=noisy, aggregator=uniform))
    with pytest.raises(ValueError, match="takes no weights from clients"):  # they bear no noise
        mechanism_of(parts(change=noisy, aggregator=aggregation.mean()))
    assert (local.law, local.moves, local.releases(7)) == ("always", 2, 7)
    in_turn = mechanism_of(parts(sampling.cyclic(N, M), transform.local_gaussian(1.0, 3.0)))
    assert in_turn.releases(25) == 3 and in_turn.releases(10) == 1  # every tenth round
    shuffled = mechanism_of(parts(sampling.cyclic(N, M, shuffled=True), transform.local_gaussian(1.0, 3.0)))
    assert shuffled.releases(25) == 4 and shuffled.releases(1) == 1


def test_adaptive_clip_is_read():
    """Catches the multiplier of the update alone, which forgets what the noisy count spends."""
    found = mechanism_of(parts(change=transform.adaptive_clip(1.0, initial_clip_norm=0.1, quantile_noise=5.0)))
    assert found.noise_multiplier == 1.0 and found.detail("adaptive")


def test_noise_cohort_size_is_accounted_for_at_that_size():
    """Catches an epsilon for the small cohort with the large one's noise."""
    found = mechanism_of(parts(change=transform.gaussian_mechanism(1.0, 1.0, noise_cohort_size=100)))
    assert found.rate == 100 / N and found.detail("simulated_cohort_size") == M
    with pytest.raises(ValueError, match="noise_cohort_size"):
        mechanism_of(parts(change=transform.gaussian_mechanism(1.0, 1.0, noise_cohort_size=N + 1)))
    fixed = mechanism_of(parts(sampling.uniform(N, M), transform.gaussian_mechanism(1.0, 1.0, noise_cohort_size=100)))
    assert fixed.cohort_size == 100


def test_shares_of_noise_are_read():
    """Catches norms of updates before rounding, and integer noise without the dimension on which that depends."""
    made = transform.discrete_gaussian_mechanism(1.0, 1.0, M, granularity=0.05)
    own = parts(sampling.uniform(N, M), made)
    found = mechanism_of(own, dimension=100)
    assert found.detail("l2_units") == made.facts.noise.details.rounded_norm(100) > 20
    assert found.detail("clip_units") == 20 and found.event(3) is None
    with pytest.raises(ValueError, match="dimension"):
        mechanism_of(own)
    shares = mechanism_of(parts(sampling.full(N), transform.distributed_gaussian(1.0, 1.0, N)), adjacency="zero_out")
    assert shares.moves == 1


def test_correlated_noise_is_one_release():
    """Catches noise of a whole run that is charged every round, and clients that come back sooner than it counts on."""

    def made(**options):
        return transform.matrix_mechanism(1.0, 2.0, num_rounds=40, bands=4, **options)

    found = mechanism_of(parts(sampling.cyclic(N, M), made(separation=10)))
    assert (found.law, found.adjacency, found.releases(1), found.releases(40)) == ("always", "zero_out", 1, 1)
    assert account(found, 40, 1e-5).epsilon == account(found, 1, 1e-5).epsilon
    assert account(found, 40, 1e-5).epsilon == account(written(2.0, scheme="full", cohort_size=N), 1, 1e-5).epsilon
    assert mechanism_of(parts(sampling.poisson(N, 0.1), made(separation=1))).law == "always"
    for sampler, separation in (
        (sampling.cyclic(N, M), 11),
        (sampling.cyclic(N, M), None),
        (sampling.cyclic(N, M, shuffled=True), 10),
        (sampling.poisson(N, 0.1), 2),
    ):
        with pytest.raises(ValueError, match="separation"):
            mechanism_of(parts(sampler, made(separation=separation)))


def test_record_level_is_read():
    """Catches records that are accounted for as clients, and shuffled batches as Poisson ones."""

    def made(**options):
        options = {"num_steps": 5, "batch_size": 4, "num_examples": 40} | options
        return parts(
            change=transform.identity(),
            own=client.private_sgd(lambda w, x, key: (w * x).sum(), 1.0, 1.1, 0.1, **options),
        )

    found = mechanism_of(made())
    assert (found.unit, found.law, found.releases(3)) == ("record", "truncated_poisson", 15)
    assert found.drawn_from[:2] == (40, 0.1) and found.drawn_from[2] < 40
    shuffled = mechanism_of(made(sampling="shuffled"))
    assert shuffled.law == "always" and shuffled.adjacency == "zero_out"
    with pytest.raises(ValueError, match="other batches"):
        mechanism_of(made(sampling="shuffled"), adjacency="add_or_remove_one")
    with pytest.raises(ValueError, match="one part with noise"):
        mechanism_of(made() | {"transform": transform.gaussian_mechanism(1.0, 1.0)})


ATTACKS = (adversary.sign_flip(), adversary.forged_weight(9.0), adversary.alie(1.0), adversary.mimic())


@pytest.mark.parametrize("attack", ATTACKS, ids=["sign flip", "forged weight", "alie", "mimic"])
def test_attackers_keep_no_bound(attack):
    """Central and distributed noise hide what a clip bounds, which attackers leave out: no epsilon. What honest clients
    add to their own messages or gradients needs no such bound: theirs stays.

    Catches a corrupted aggregate that states the honest one's sensitivity, whatever is put around it, and local noise
    that is refused with it.
    """
    central = [
        parts(),
        parts(change=transform.adaptive_clip(1.0, initial_clip_norm=0.1, quantile_noise=5.0)),
        parts(change=transform.matrix_mechanism(1.0, 2.0, num_rounds=40, bands=4, separation=1)),
        parts(sampling.full(N), transform.distributed_gaussian(1.0, 1.0, N)),
    ]
    record = client.private_sgd(lambda w, x, key: 0.0, 1.0, 1.1, 0.1, num_steps=5, batch_size=4, num_examples=40)
    own = [parts(change=transform.local_gaussian(1.0, 3.0)), parts(change=transform.identity(), own=record)]
    around = (lambda x: x, lambda x: aggregation.by_part({"all": x}))

    def attacked(given, wrap):
        return given | {"aggregator": wrap(adversary.corrupted(given["aggregator"], attack, adversary.clients([3])))}

    for wrap in around:
        for given in central:
            assert mechanism_of(given | {"aggregator": wrap(given["aggregator"])}) == mechanism_of(given)
            with pytest.raises(ValueError, match=r"aggregator\.sensitivity"):
                mechanism_of(attacked(given, wrap))
        for given in own:
            assert mechanism_of(attacked(given, wrap)) == mechanism_of(given)


def test_refusals_of_parts():
    """Catches each composition whose epsilon would be a wrong number that looks right."""
    base = transform.gaussian_mechanism(1.0, 1.0)
    for wrong, message in (
        (parts(aggregator=aggregation.mean(weighting="examples")), "sensitivity"),
        (parts(aggregator=aggregation.mean(weighting="uniform")), "realised cohort"),
        (parts(aggregator=aggregation.fixed_mean(M, weighting="examples")), "example counts"),
        (parts(change=base.stating(l2_bound=None)), "l2_bound"),
        (parts(change=base.stating(l2_bound=1.01)), "l2_bound"),
        (parts(change=base.stating(releases_when_empty=False)), "nobody was there"),
        (parts(aggregator=aggregation.fixed_mean(M).stating(least=2)), "too few were there"),
        (parts(sampling.with_replacement(N, M)), "without replacement"),
        (parts(sampling.weighted([1.0] * N, M)), "without replacement"),
        (parts(sampling.cyclic(N, M)), "independent rounds"),
        (parts(sampling.poisson(N, 0.1), transform.distributed_gaussian(1.0, 1.0, M)), "share of the noise"),
        (
            parts(sampling.with_dropout(sampling.uniform(N, M), 0.1), transform.distributed_gaussian(1.0, 1.0, M)),
            "share of the noise",
        ),
        (parts(sampling.uniform(N, M), transform.distributed_gaussian(1.0, 1.0, M + 1)), "at most 20 messages"),
        (parts(sampling.full(N)._replace(observe=lambda state, cohort, outcome: state)), "observes no losses"),
    ):
        with pytest.raises(ValueError, match=message):
            mechanism_of(wrong)
    missing = parts()
    del missing["sampler"]
    with pytest.raises(ValueError, match="sampler"):
        mechanism_of(missing)
    undesigned = sampling.full(N)._replace(design=None)
    with pytest.raises(TypeError, match="SamplingDesign"):
        mechanism_of(parts(undesigned))


def test_refusals():
    """Catches an adjacency that the sampling does not have, and values out of range."""
    fixed = {"scheme": "uniform_without_replacement", "num_slots": M}
    for changes, message in (
        ({**fixed, "adjacency": "add_or_remove_one"}, "no Poisson sample"),
        ({**fixed, "adjacency": "zero_out"}, "no Poisson sample"),
        ({**fixed, "cohort_size": 19.5}, "whole number"),
        ({"place": "local", "adjacency": "add_or_remove_one"}, "who sent one"),
        ({"place": "distributed", "scheme": "full", "cohort_size": N, "adjacency": "add_or_remove_one"}, "no share"),
        ({"scheme": "with_replacement"}, "without replacement"),
        ({"scheme": "cyclic"}, "independent rounds"),
        ({"scheme": "unknown"}, "a law of who takes part that an accountant knows, got 'unknown'"),
        ({"scheme": "unknown_without_replacement", "place": "local"}, "from who arrives first"),
        ({"kind": "cauchy"}, "kind"),
        ({"kind": "skellam"}, "distributed"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"cohort_size": N + 1}, "cohort_size"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"unit": "record"}, "private_sgd"),
    ):
        with pytest.raises(ValueError, match=message):
            written(**changes)
    with pytest.raises(TypeError):
        written(True)
    with pytest.raises(TypeError, match="matrix_mechanism"):
        written(kind="tree")
    with pytest.raises(ValueError, match="accountant"):
        mechanism_from(sampling.full(N).design, Noise("cauchy", "central", 1.0, 1.0, "client"))


def test_swept_noise_is_no_number():
    """Catches an epsilon that is asked for inside of a sweep over the noise."""

    def inside(z):
        return written(z).rate * z

    with pytest.raises(TypeError, match="outside of the sweep"):
        jax.make_jaxpr(inside)(1.0)


def test_fingerprints_and_json():
    """Catches a field that two different mechanisms share, or that storage loses."""
    made = written(details={"noise_cohort_size": 50, "simulated_cohort_size": 20.0})
    back = Mechanism.from_dict(json.loads(json.dumps(made.as_dict())))
    assert back == made and back.fingerprint == made.fingerprint and hash(back) == hash(made)
    changes = {"noise_multiplier": 1.1, "cohort_size": 21.0, "adjacency": "zero_out", "clip_norm": 2.0, "thinned": True}
    prints = {dataclasses.replace(made, **{name: value}).fingerprint for name, value in changes.items()}
    assert len(prints | {made.fingerprint}) == len(changes) + 1
    with pytest.raises(ValueError, match="fields"):
        Mechanism.from_dict({"noise": 1})
    assert written(noise_multiplier=jnp.float32(1.5)).noise_multiplier == 1.5


def test_cases_that_were_wrong_once():
    """Cohorts that are simulated smaller than they are, slots of another cohort, bits that move twice as far."""
    smaller = transform.gaussian_mechanism(1.0, 1.0, noise_cohort_size=2)
    with refused("noise_cohort_size", rule="at least"):
        mechanism_of(parts(sampling.poisson(1000, 0.05), smaller))
    sizes = {"population_size": 10_000, "cohort_size": 10, "noise_cohort_size": 1000, "noise_multiplier": 1.0}
    cut = written_down(scheme="truncated_poisson", num_slots=34, **sizes)
    assert (cut.scheme, cut.num_slots) == ("poisson", 10_000)
    adaptive = transform.adaptive_clip(1.0, initial_clip_norm=1.0, quantile_noise=0.6)
    with refused("adjacency", value="zero_out", hint="moves twice"):
        mechanism_of(parts(sampling.poisson(1000, 0.05), adaptive), adjacency="zero_out")
    record = Mechanism(
        noise_multiplier=1.0, scheme="full", population_size=100, cohort_size=100, num_slots=100, unit="record",
        place="local", details={"steps": 1, "sampling": "poisson", "rate": 0.1, "num_examples": 600},
    )  # fmt: skip
    assert record.num_units == 60_000
