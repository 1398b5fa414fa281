"""Parts that do not fit are refused by their facts, exactly where a number would go wrong."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
from tests.refusals import refused
from tests.round.stars import local

STEP = server.optimizer(optax.sgd(1.0))
PARAMS = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}


def refused_argument(*, num_slots=4, client=None, change=None, rule=None) -> tuple[str, str] | None:
    """What `check_parts` refuses of parts whose facts are made up, as (argument, rule); None where it takes them."""
    parts = {"transform": transform.identity(), "aggregator": aggregation.mean(), "client": local()}
    for name, facts in (("client", client), ("transform", change), ("aggregator", rule)):
        parts[name] = parts[name].stating(**(facts or {}))
    try:
        check_parts(sampling.uniform(9, num_slots), server=STEP, **parts)
    except InvalidArgument as error:
        return error.argument, error.rule
    return None


def same(found: tuple[str, str] | None, expected: tuple[str, str] | None) -> bool:
    """Whether parts are taken, or refused, as expected: an argument, and a telling word or two of the rule."""
    if found is None or expected is None:
        return found is expected
    return found[0] == expected[0] and expected[1] in found[1]


def test_a_modular_sum_never_wraps():
    """The sums of m messages of at most A, weighted by at most w, are 2 m A w + 1 numbers: they fit into the ring or
    are refused. Faults: one value too few, a weight or the larger end of a range that is left out."""
    for num_slots, low, high, weight in itertools.product((1, 4), (-3, -7), (5, 7), (1, 3)):
        largest_sum = num_slots * max(-low, high) * weight
        sums = range(-largest_sum, largest_sum + 1)
        for modulus in (len(sums) - 1, len(sums)):
            fits = len({x % modulus for x in sums}) == len(sums)
            change, rule = {"integer_range": (low, high)}, {"modulus": modulus, "max_weight": weight}
            found = refused_argument(num_slots=num_slots, change=change, rule=rule)
            assert same(found, None if fits else ("aggregator.modulus", "wrap"))
    assert same(refused_argument(rule={"modulus": 100}), ("transform", "a modular sum"))  # floats
    change, rule = {"integer_range": (-1, 1)}, {"modulus": 2**62, "max_weight": 2**31}
    found = refused_argument(change=change, rule=rule)
    assert same(found, ("aggregator.max_weight", "32 bits"))  # a product that no int32 holds


def test_integers_that_a_float_rounds():
    """Catches an integer that float32 cannot hold, and integers that are compared with a number in another unit."""
    assert np.float32(LARGEST_INTEGER + 1) == np.float32(LARGEST_INTEGER) != np.float32(LARGEST_INTEGER - 1)
    too_large = ("transform", "a sum of floats")
    for largest, expected in ((LARGEST_INTEGER, None), (LARGEST_INTEGER + 1, too_large)):
        for integer_range in ((-1, largest), (-largest, 1)):
            change, rule = {"integer_range": integer_range}, {"homogeneous": True}
            assert same(refused_argument(change=change, rule=rule), expected)
    found = refused_argument(change={"integer_range": (-1, 1)}, rule={"homogeneous": False})
    assert same(found, ("transform", "sends numbers"))


def test_noise_needs_a_bound_and_its_shares():
    """Catches noise beside a sum that one client moves without bound, and a sum of fewer shares than the noise has."""
    noises = {place: Noise("gaussian", place, 1.0, 1.0, "client") for place in ("central", "distributed", "local")}
    for place, noise in noises.items():
        assert refused_argument(change={"noise": noise}, rule={"sensitivity": 0.1}) is None
        unbounded = refused_argument(change={"noise": noise}, rule={"sensitivity": None})
        assert same(unbounded, None if place == "local" else ("aggregator", "a bounded amount"))
    too_few = ("aggregator.least", "shares")
    for least, expected in ((2, too_few), (3, None)):
        noise = noises["distributed"]._replace(details={"cohort_size": 3})
        assert same(refused_argument(change={"noise": noise}, rule={"sensitivity": 0.1, "least": least}), expected)
    # Noise that names no number of shares has one for each slot.
    found = refused_argument(change={"noise": noises["distributed"]}, rule={"sensitivity": 0.1, "least": 3})
    assert same(found, too_few)


def test_weights_that_were_asked_for_are_taken():
    """Catches clients that count alike although their user said "examples", in all or in some parts of an update."""
    for weighted, partly in itertools.product((True, False), (True, False)):
        rule = {"weighted": weighted, "partly_weighted": partly}
        expected = None if weighted and not partly else ("aggregator", "one that takes weights")
        assert same(refused_argument(client={"needs_weights": True}, rule=rule), expected)
        assert refused_argument(client={"needs_weights": False}, rule=rule) is None


def test_who_is_drawn():
    """Catches a client drawn twice whose state would be overwritten, and a cohort that lacks somebody. A design that
    says nothing promises neither."""
    silent = sampling.full(5)._replace(design=SimpleNamespace())
    with_replacement = sampling.with_replacement(5, 5)
    distinct, everyone = [sampling.uniform(5, 2), sampling.full(5)], [sampling.full(5)]
    for check, rule, taken, not_taken in (
        (check_distinct, "without replacement", distinct, [with_replacement, silent]),
        (check_everyone, "draws all clients", everyone, [sampling.uniform(5, 4), with_replacement, silent]),
    ):
        for sampler in taken:
            check(sampler, "why")
        for sampler in not_taken:
            with refused("sampler", rule=rule, hint="why"):
                check(sampler, "why")


def test_which_factors_discount():
    """Faults: a factor of 1 that counts as a discount, the last gap left out, a NaN or a 0 that passes."""
    assert not discounts(staleness.constant(), 5) and discounts(staleness.polynomial(0.5), 1)
    only_the_last = lambda gaps: jnp.where(gaps == 5, 0.5, 1.0)  # noqa: E731
    assert discounts(only_the_last, 5) and not discounts(only_the_last, 4)
    for wrong in (0.0, -1.0, 1.5, np.nan):
        with refused("staleness(3)", value=wrong, rule="(0, 1]"):
            discounts(lambda gaps, wrong=wrong: jnp.where(gaps == 3, wrong, 1.0), 3)
    for wrong in (lambda gaps: jnp.ones(()), lambda gaps: jnp.ones_like(gaps)):
        with refused("staleness", rule="a float for each of 4 gaps", kind=InvalidType):
            discounts(wrong, 3)


def test_what_may_count_in_part():
    """Catches a share of an update that is no update, and a share of an integer, which would be rounded."""
    check_discount(local(), PARAMS)
    with refused("client", rule="`scalable`"):
        check_discount(local().stating(scalable=False), PARAMS)
    with refused("update['count']", value="int32", rule="floats", kind=InvalidType):
        check_discount(local(), PARAMS | {"count": jax.ShapeDtypeStruct((), jnp.int32)})


def test_what_the_server_takes():
    """Catches an aggregate that NumPy's broadcasting would spread over the model, and one of another width."""
    shaped = lambda shape, dtype=jnp.float32: {"w": jax.ShapeDtypeStruct(shape, dtype)}  # noqa: E731
    assert looks_like_the_model(shaped((3,)), STEP, PARAMS)
    of_shape, of_structure = ("update['w']", "shape (3,)"), ("update", "PyTreeDef")
    for other, (argument, rule) in (
        (shaped(()), of_shape),
        (shaped((1,)), of_shape),
        (shaped((3, 1)), of_shape),
        ({"v": PARAMS["w"]}, of_structure),
        (PARAMS["w"], of_structure),
    ):
        assert not looks_like_the_model(other, STEP, PARAMS)
        with refused(argument, rule=rule):
            check_aggregate(other, STEP, PARAMS)
    check_aggregate(PARAMS, STEP, PARAMS)
    with refused("update['w']", value="float16", rule="float32", kind=InvalidType):
        looks_like_the_model(shaped((3,), jnp.float16), STEP, PARAMS)
