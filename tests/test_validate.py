"""Checks of arguments, with one format for all errors: `name: expected RULE, got VALUE. HINT`."""

from __future__ import annotations

import inspect
import math
from typing import Annotated, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import InvalidType, client, sampling, transform, validate
from fedjax_sim.types import Sampler
from fedjax_sim.validate.errors import CLASSES
from tests.refusals import refused

WRONG_NUMBERS = [
    (True, TypeError),
    (np.True_, TypeError),
    ("1", TypeError),
    (None, TypeError),
    (1j, TypeError),
    ([1.0], TypeError),
    (np.ones(2), TypeError),
    (math.nan, ValueError),
    (math.inf, ValueError),
    (-math.inf, ValueError),
    (np.float32("nan"), ValueError),
]


@pytest.mark.parametrize("value, error", WRONG_NUMBERS)
@pytest.mark.parametrize("check", [validate.positive, validate.in_range, lambda n, v: validate.in_range(n, v, 0, 1)])
def test_no_number(check, value, error):
    """Catches bool for int, NaN passing a comparison, arrays for scalars."""
    with pytest.raises(error, match=r"^rate: expected a .*number.*, got "):
        check("rate", value)


@pytest.mark.parametrize("value", [0, -1, 0.0, -1e-300])
def test_positive(value):
    """Catches zero taken for positive."""
    with refused("rate", value=value, rule="> 0", hint="Use less."):
        validate.positive("rate", value, hint="Use less.")


def test_limits_are_closed_or_open_as_said():
    """Catches an open end that accepts its limit."""
    for good in (0, 1, 0.5, np.float64(0.2), jnp.float32(1), np.array(0.3)):
        validate.in_range("x", good, 0, 1)
    for bad, options in ((1, {"open_high": True}), (0, {"open_low": True}), (1.1, {}), (-0.1, {})):
        with pytest.raises(ValueError, match="x: expected a number in "):
            validate.in_range("x", bad, 0, 1, **options)


def test_traced_values_pass():
    """Catches checks that break a sweep."""
    rates = jax.vmap(lambda rate: validate.positive("rate", rate) or rate)(jnp.array([1.0, -1.0]))
    assert rates.tolist() == [1, -1]


@pytest.mark.parametrize(
    "value, error",
    [(True, TypeError), (1.0, TypeError), ("3", TypeError), (0, ValueError), (2**31, ValueError), (10**30, ValueError)],
)
def test_integer(value, error):
    """Catches floats and bools for integers, and int32 overflow."""
    with refused("n", value=value, rule="[1, 2147483647]", kind=CLASSES[error]):
        validate.integer("n", value)
    validate.integer("n", np.int64(5))


def test_one_of_names_the_nearest():
    """Catches 1 accepted for True, and an error without a suggestion."""
    validate.one_of("w", "examples", ("examples", "uniform"))
    with refused("w", value="exmples", rule="'examples', 'uniform'", hint="'examples'"):
        validate.one_of("w", "exmples", ("examples", "uniform"))
    for wrong in (1, 1.0, "True", None):
        with pytest.raises(ValueError):
            validate.one_of("flag", wrong, (True, False))
    assert validate.nearest("zzz", ["abc"]) == ""


def test_sequence():
    """Catches one number, a text or an empty list taken for a list of numbers."""
    for good in ([1], (0.5, 2), np.ones(3)):
        validate.sequence("rates", good)
    validate.sequence("rates", [], least=0)
    for wrong, error in ((3, TypeError), (np.array(3), TypeError), ("12", TypeError), ([], ValueError)):
        with pytest.raises(error, match="rates: expected"):
            validate.sequence("rates", wrong)


def test_part():
    """Catches a factory that was not called, whose attributes would be missed later."""
    validate.part("sampler", sampling.full(3), Sampler)
    wrappers = (
        lambda wrong: sampling.with_dropout(wrong, 0.1),
        lambda wrong: sampling.with_over_invitation(wrong, 1),
        lambda wrong: sampling.with_stragglers(wrong, 0.1),
        lambda wrong: sampling.with_local_steps(wrong, [1]),
        sampling.with_distinct_clients,
    )
    for wrap in wrappers:
        with refused("sampler", value="function", rule="a Sampler", kind=InvalidType):
            wrap(sampling.full)
    for wrap in (client.send_model, client.normalized, client.touched_rows):
        with refused("client", value="function", rule="a ClientUpdate", kind=InvalidType):
            wrap(client.local_sgd)
    with pytest.raises(TypeError, match="transform: expected an UpdateTransform"):
        transform.error_feedback(transform.top_k)


def test_long_values_are_cut():
    """Catches an error that prints a whole data set."""
    with pytest.raises(TypeError) as error:
        validate.positive("x", list(range(10_000)))
    assert len(str(error.value)) < 250


def test_memory():
    """Catches a limit without both numbers."""
    validate.fits_in_memory("store", 10, 10)
    with pytest.raises(MemoryError, match=r"store: .*got '11 bytes'\. Shrink\."):
        validate.fits_in_memory("store", 11, 10, hint="Shrink.")


class Options(TypedDict, total=False):
    """Options that two recipes share."""

    rate: Annotated[validate.Positive, validate.Default(0.5)]


def test_shared_options_are_read_without_postponed_annotations():
    """Fault: `Unpack` is found in the text of an annotation, which only a module with postponed annotations has."""

    def recipe(size: int, **options: Unpack[Options]):
        return options

    recipe.__annotations__ = {"size": int, "options": Unpack[Options]}
    checked = validate.named_arguments(recipe)
    assert list(inspect.signature(checked).parameters) == ["size", "rate"]
    assert checked(1, rate=0.25) == {"rate": 0.25}
    with refused("rate", value=-1.0):
        checked(1, rate=-1.0)
