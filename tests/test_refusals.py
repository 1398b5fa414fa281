"""The errors of refused arguments: their classes, messages, fields and pickles, and the helper that tests them."""

from __future__ import annotations

import copy
import doctest
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_sim
from fedjax_sim import InvalidArgument, InvalidType, validate
from fedjax_sim.validate import fail
from tests import refusals
from tests.refusals import refused

VALUES = [0, 1.5, True, None, "two\nlines", [1, 2], np.float32(0.25), "long " * 40]


def refusal(*parts, error=ValueError):
    """Returns the error that `fail` raises."""
    with pytest.raises(InvalidArgument) as raised:
        fail(*parts, error=error)
    return raised.value


@pytest.mark.parametrize("error", [ValueError, TypeError])
@pytest.mark.parametrize("hint", ["", "Use less."])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_the_message_says_the_fields(value, hint, error):
    """Fault: a field that is not what the message says, or a field that is the text of the value."""
    found = refusal("rates[1]", "a number in [0, 1)", value, hint, error=error)
    assert (found.argument, found.rule, found.hint) == ("rates[1]", "a number in [0, 1)", hint)
    assert found.value is value
    shown = repr(value) if len(repr(value)) <= 120 else repr(value)[:117] + "..."
    assert str(found) == f"rates[1]: expected a number in [0, 1), got {shown}." + (f" {hint}" if hint else "")


def test_classes():
    """Fault: a refusal that no longer is the built-in error that users catch, or a wrong type that is only a value."""
    assert type(refusal("x", "a number", "1")) is fedjax_sim.InvalidArgument
    assert type(refusal("x", "a number", "1", error=TypeError)) is fedjax_sim.InvalidType
    assert issubclass(InvalidArgument, ValueError) and not issubclass(InvalidArgument, TypeError)
    assert issubclass(InvalidType, InvalidArgument) and issubclass(InvalidType, TypeError)


@pytest.mark.parametrize("error", [MemoryError, FileExistsError])
def test_another_class_has_the_message_alone(error):
    """Fault: an error of another class that becomes an InvalidArgument, or that loses its message."""
    with pytest.raises(error, match=r"^store: expected less, got 3\. Shrink\.$") as raised:
        fail("store", "less", 3, "Shrink.", error)
    assert raised.type is error


@pytest.mark.parametrize("kind", [InvalidArgument, InvalidType])
def test_a_message_alone_has_no_fields(kind):
    """Fault: fields that are guessed from a text, or a missing attribute."""
    error = kind("x: expected a number, got 1.")
    assert str(error) == "x: expected a number, got 1."
    assert [error.argument, error.value, error.rule, error.hint] == [None] * 4


@pytest.mark.parametrize("error", [ValueError, TypeError])
@pytest.mark.parametrize("value", [3, 0.5, 1j, "word", b"bytes", True, None])
def test_another_process_reads_the_fields(value, error):
    """Fault: a pickle that loses the fields, the class or the notes."""
    found = refusal("x", "less", value, "Use less.", error=error)
    found.add_note("while client 3 trained")
    for again in (pickle.loads(pickle.dumps(found)), copy.copy(found)):
        assert type(again) is type(found) and str(again) == str(found)
        assert vars(again) == vars(found) and type(again.value) is type(value)
        assert again.__notes__ == ["while client 3 trained"]


def test_a_value_that_cannot_travel_arrives_as_its_text():
    """Fault: a refusal that cannot be pickled, because it holds a function, an array or a traced value."""
    for value in (lambda x: x, np.ones(1000), [1, 2], object()):
        error = refusal("x", "less", value)
        again = pickle.loads(pickle.dumps(error))
        assert error.value is value
        assert isinstance(again.value, str) and f"got {again.value}." in str(error)
        assert len(pickle.dumps(error)) < 1000

    def traced(x):
        pickle.dumps(refusal("x", "less", x))
        return x

    jax.eval_shape(traced, jnp.ones(2))


WRONG = {
    "argument": {"argument": "size"},
    "part of the argument": {"argument": "cohort"},
    "value": {"value": 8},
    "value of another type": {"value": True},
    "rule": {"rule": "a number"},
    "hint": {"hint": "with_dropout"},
    "class": {"kind": InvalidType},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_helper_tells_refusals_apart(wrong):
    """Fault: a helper that lets pass another argument, value, rule, hint or class."""
    right = {"argument": "cohort_size", "value": 1, "rule": "[2, 9]", "hint": "Draw", "kind": InvalidArgument}

    def check(argument, **fields):
        with refused(argument, **fields):
            fail("cohort_size", "an integer in [2, 9]", 1, "Draw with replacement.")

    check(**right)
    with pytest.raises((pytest.fail.Exception, InvalidArgument)):
        check(**right | wrong)


def test_the_helper_needs_an_error():
    """Fault: a helper that lets pass a block without an error, a wrong type as a wrong value, or a bug."""
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"), refused("x"):
        pass
    with pytest.raises(pytest.fail.Exception, match="another refusal"), refused("x"):
        validate.integer("x", 0.5)
    with pytest.raises(ValueError, match="a bug"), refused("x"):
        raise ValueError("a bug")


def test_the_example_of_the_helper():
    """Fault: an example that no longer says how the helper is used."""
    assert doctest.testmod(refusals).attempted > 0 and doctest.testmod(refusals).failed == 0
