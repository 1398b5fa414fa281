"""Holds what an annotation can say of an argument: its range, its default among shared options, and who passes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fedjax_sim.validate.checks import INT32_MAX, in_range, integer, one_of, positive, truth


class Default(NamedTuple):
    """The value of an option that is not given: `shuffle: Annotated[bool, Default(True)]` in a TypedDict.

    >>> Annotated[bool, Default(True)].__metadata__[0].value
    True
    """

    value: Any


class Number(NamedTuple):
    """The range of a number, for an annotation: `momentum: Annotated[float, Number(0, 1)]`; see `in_range`.

    >>> Number(0, 1, open_high=True).check("momentum", 1.0)
    Traceback (most recent call last):
        ...
    fedjax_sim.InvalidArgument: momentum: expected a number in [0, 1), got 1.0.
    """

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    normal: bool = False  # whether float32 must hold the number as more than 0

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidArgument for a value out of range, and InvalidType for a value that is no number."""
        in_range(name, value, *self[:2], open_low=self.open_low, open_high=self.open_high)
        if self.normal:
            positive(name, value)


class Integer(NamedTuple):
    """The range of an integer, for an annotation: `num_rounds: Annotated[int, Integer(1)]`; see `integer`."""

    low: int = 1
    high: int = INT32_MAX

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidArgument for a value out of range, and InvalidType for a value that is no integer."""
        integer(name, value, self.low, self.high)


class Choice(NamedTuple):
    """The values of an option whose annotation is a `Literal`."""

    options: tuple[Any, ...]

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidArgument for a value that is not among the options."""
        one_of(name, value, self.options)


class Truth(NamedTuple):
    """The values of an option whose annotation is `bool`: True and False."""

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidType for a value that is neither True nor False."""
        truth(name, value)


class Checked(NamedTuple):
    """A check of its own, for an annotation: `plan: Annotated[Plan | None, Checked(check_plan)]`."""

    check: Callable[[str, Any], None]  # (the argument's name, a value that is not None); raises for a wrong one


class FromData(NamedTuple):
    """Says in an annotation which value a config passes: `Annotated[int, FromData("num_features")]`."""

    name: str  # a name that `config.build` knows


Finite = Annotated[float, Number()]
Positive = Annotated[float, Number(0, open_low=True, normal=True)]
NonNegative = Annotated[float, Number(0)]
Share = Annotated[float, Number(0, 1)]  # in [0, 1]
PositiveShare = Annotated[float, Number(0, 1, open_low=True)]  # in (0, 1]
ShareBelowOne = Annotated[float, Number(0, 1, open_high=True)]  # in [0, 1)
OpenShare = Annotated[float, Number(0, 1, open_low=True, open_high=True)]  # in (0, 1)
PositiveInt = Annotated[int, Integer(1)]
NonNegativeInt = Annotated[int, Integer(0)]
# Local steps of a client in a round: beyond 2^24 float32 cannot count them.
Steps = Annotated[int, Integer(1, 1 << 24)]
LossFn = Annotated[Callable, FromData("loss_fn")]
NumFeatures = Annotated[PositiveInt, FromData("num_features")]
NumOutputs = Annotated[PositiveInt, FromData("num_outputs")]
PopulationSize = Annotated[PositiveInt, FromData("population_size")]
