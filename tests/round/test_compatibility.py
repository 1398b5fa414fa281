"""Parts that do not fit are refused by their facts, exactly where a number would go wrong."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, sampling, server, transform
from fedjax_sim.round.compatibility import (
    LARGEST_INTEGER,
    check_aggregate,
    check_discount,
    check_distinct,
    check_everyone,
    check_parts,
    discounts,
    looks_like_the_model,
)
from fedjax_sim.server import staleness
from fedjax_sim.types import Noise
from fedjax_sim.validate import InvalidArgument, InvalidType
from tests.round.stars import local

STEP = server.optimizer(optax.sgd(1.0))
PARAMS = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}


def refused(*, num_slots=4, client=None, change=None, rule=None) -> str | None:
    """The argument that `check_parts` refuses for parts whose facts are made up; None where it takes them."""
    parts = {"transform": transform.identity(), "aggregator": aggregation.mean(), "client": local()}
    for name, facts in (("client", client), ("transform", change), ("aggregator", rule)):
        parts[name] = parts[name].stating(**(facts or {}))
    try:
        check_parts(sampling.uniform(9, num_slots), server=STEP, **parts)
    except InvalidArgument as error:
        return error.argument
    return None


def test_a_modular_sum_never_wraps():
    """The sums of m messages of at most A, weighted by at most w, are 2 m A w + 1 numbers: they fit into the ring or
    are refused. Faults: one value too few, a weight or the larger end of a range that is left out."""
    for num_slots, low, high, weight in itertools.product((1, 4), (-3, -7), (5, 7), (1, 3)):
        largest_sum = num_slots * max(-low, high) * weight
        sums = range(-largest_sum, largest_sum + 1)
        for modulus in (len(sums) - 1, len(sums)):
            fits = len({x % modulus for x in sums}) == len(sums)
            change, rule = {"integer_range": (low, high)}, {"modulus": modulus, "max_weight": weight}
            assert (refused(num_slots=num_slots, change=change, rule=rule) is None) == fits
    assert refused(rule={"modulus": 100}) == "transform"  # floats
    change, rule = {"integer_range": (-1, 1)}, {"modulus": 2**62, "max_weight": 2**31}
    assert refused(change=change, rule=rule) == "aggregator.max_weight"  # a product that no int32 holds


def test_integers_that_a_float_rounds():
    """Catches an integer that float32 cannot hold, and integers that are compared with a number in another unit."""
    assert np.float32(LARGEST_INTEGER + 1) == np.float32(LARGEST_INTEGER) != np.float32(LARGEST_INTEGER - 1)
    for largest, argument in ((LARGEST_INTEGER, None), (LARGEST_INTEGER + 1, "transform")):
        for integer_range in ((-1, largest), (-largest, 1)):
            change, rule = {"integer_range": integer_range}, {"homogeneous": True}
            assert refused(change=change, rule=rule) == argument
    assert refused(change={"integer_range": (-1, 1)}, rule={"homogeneous": False}) == "transform"


def test_noise_needs_a_bound_and_its_shares():
    """Catches noise beside a sum that one client moves without bound, and a sum of fewer shares than the noise has."""
    noises = {place: Noise("gaussian", place, 1.0, 1.0, "client") for place in ("central", "distributed", "local")}
    for place, noise in noises.items():
        bounded = refused(change={"noise": noise}, rule={"sensitivity": 0.1})
        unbounded = refused(change={"noise": noise}, rule={"sensitivity": None})
        assert (bounded, unbounded) == (None, None if place == "local" else "aggregator")
    for least, argument in ((2, "aggregator.least"), (3, None)):
        noise = noises["distributed"]._replace(details={"cohort_size": 3})
        assert refused(change={"noise": noise}, rule={"sensitivity": 0.1, "least": least}) == argument
    # Noise that names no number of shares has one for each slot.
    assert refused(change={"noise": noises["distributed"]}, rule={"sensitivity": 0.1, "least": 3}) == "aggregator.least"


def test_weights_that_were_asked_for_are_taken():
    """Catches clients that count alike although their user said "examples", in all or in some parts of an update."""
    for weighted, partly in itertools.product((True, False), (True, False)):
        rule = {"weighted": weighted, "partly_weighted": partly}
        expected = None if weighted and not partly else "aggregator"
        assert refused(client={"needs_weights": True}, rule=rule) == expected
        assert refused(client={"needs_weights": False}, rule=rule) is None


def test_who_is_drawn():
    """Catches a client drawn twice whose state would be overwritten, and a cohort that lacks somebody. A design that
    says nothing promises neither."""
    silent = sampling.full(5)._replace(design=SimpleNamespace())
    with_replacement = sampling.with_replacement(5, 5)
    for check, taken, not_taken in (
        (check_distinct, [sampling.uniform(5, 2), sampling.full(5)], [with_replacement, silent]),
        (check_everyone, [sampling.full(5)], [sampling.uniform(5, 4), with_replacement, silent]),
    ):
        for sampler in taken:
            check(sampler, "why")
        for sampler in not_taken:
            with pytest.raises(InvalidArgument) as refusal:
                check(sampler, "why")
            assert refusal.value.argument == "sampler"


def test_which_factors_discount():
    """Faults: a factor of 1 that counts as a discount, the last gap left out, a NaN or a 0 that passes."""
    assert not discounts(staleness.constant(), 5) and discounts(staleness.polynomial(0.5), 1)
    only_the_last = lambda gaps: jnp.where(gaps == 5, 0.5, 1.0)  # noqa: E731
    assert discounts(only_the_last, 5) and not discounts(only_the_last, 4)
    for wrong in (0.0, -1.0, 1.5, np.nan):
        with pytest.raises(InvalidArgument) as refusal:
            discounts(lambda gaps, wrong=wrong: jnp.where(gaps == 3, wrong, 1.0), 3)
        assert refusal.value.argument == "staleness(3)"
    for wrong in (lambda gaps: jnp.ones(()), lambda gaps: jnp.ones_like(gaps)):
        with pytest.raises(InvalidType):
            discounts(wrong, 3)


def test_what_may_count_in_part():
    """Catches a share of an update that is no update, and a share of an integer, which would be rounded."""
    check_discount(local(), PARAMS)
    with pytest.raises(InvalidArgument) as refusal:
        check_discount(local().stating(scalable=False), PARAMS)
    assert refusal.value.argument == "client"
    with pytest.raises(InvalidType) as refusal:
        check_discount(local(), PARAMS | {"count": jax.ShapeDtypeStruct((), jnp.int32)})
    assert refusal.value.argument == "update['count']"


def test_what_the_server_takes():
    """Catches an aggregate that NumPy's broadcasting would spread over the model, and one of another width."""
    shaped = lambda shape, dtype=jnp.float32: {"w": jax.ShapeDtypeStruct(shape, dtype)}  # noqa: E731
    assert looks_like_the_model(shaped((3,)), STEP, PARAMS)
    for other in (shaped(()), shaped((1,)), shaped((3, 1)), {"v": PARAMS["w"]}, PARAMS["w"]):
        assert not looks_like_the_model(other, STEP, PARAMS)
        with pytest.raises(InvalidArgument) as refusal:
            check_aggregate(other, STEP, PARAMS)
        assert refusal.value.argument.startswith("update")
    check_aggregate(PARAMS, STEP, PARAMS)
    with pytest.raises(InvalidType) as refusal:
        looks_like_the_model(shaped((3,), jnp.float16), STEP, PARAMS)
    assert refusal.value.argument == "update['w']"
