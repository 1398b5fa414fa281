"""What an annotation says of an argument: its range, its default among shared options, and who passes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fedjax_sim.validate.checks import INT32_MAX, in_range, integer, one_of, positive, truth

__all__ = [
    "Choice",
    "Default",
    "Finite",
    "FromData",
    "Integer",
    "LossFn",
    "NonNegative",
    "NonNegativeInt",
    "NumFeatures",
    "NumOutputs",
    "Number",
    "OpenShare",
    "PopulationSize",
    "Positive",
    "PositiveInt",
    "PositiveShare",
    "Share",
    "ShareBelowOne",
    "Steps",
    "Truth",
]


class Default(NamedTuple):
    """The value of an option that is not given: `shuffle: Annotated[bool, Default(True)]` in a TypedDict."""

    value: Any


class Number(NamedTuple):
    """The range of a number, for an annotation: `momentum: Annotated[float, Number(0, 1)]`; see `in_range`."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    normal: bool = False  # float32 holds it as more than 0

    def check(self, name: str, value: Any) -> None:
        """Refuses a value out of range."""
        in_range(name, value, *self[:2], open_low=self.open_low, open_high=self.open_high)
        if self.normal:
            positive(name, value)


class Integer(NamedTuple):
    """The range of an integer, for an annotation: `num_rounds: Annotated[int, Integer(1)]`; see `integer`."""

    low: int = 1
    high: int = INT32_MAX

    def check(self, name: str, value: Any) -> None:
        """Refuses a value out of range."""
        integer(name, value, self.low, self.high)


class Choice(NamedTuple):
    """The values of an option whose annotation is a `Literal`."""

    options: tuple[Any, ...]

    def check(self, name: str, value: Any) -> None:
        """Refuses another value."""
        one_of(name, value, self.options)


class Truth(NamedTuple):
    """What an option whose annotation is `bool` takes."""

    def check(self, name: str, value: Any) -> None:
        """Refuses another value."""
        truth(name, value)


class FromData(NamedTuple):
    """Says in an annotation, `Annotated[int, FromData("num_features")]`, which value a config passes."""

    name: str  # one of those that `config.build` knows


Finite = Annotated[float, Number()]
Positive = Annotated[float, Number(0, open_low=True, normal=True)]
NonNegative = Annotated[float, Number(0)]
Share = Annotated[float, Number(0, 1)]  # in [0, 1]
PositiveShare = Annotated[float, Number(0, 1, open_low=True)]  # in (0, 1]
ShareBelowOne = Annotated[float, Number(0, 1, open_high=True)]  # in [0, 1)
OpenShare = Annotated[float, Number(0, 1, open_low=True, open_high=True)]  # in (0, 1)
PositiveInt = Annotated[int, Integer(1)]
NonNegativeInt = Annotated[int, Integer(0)]
Steps = Annotated[int, Integer(1, 1 << 24)]  # of one client in a round: past it float32 cannot count them
LossFn = Annotated[Callable, FromData("loss_fn")]
NumFeatures = Annotated[PositiveInt, FromData("num_features")]
NumOutputs = Annotated[PositiveInt, FromData("num_outputs")]
PopulationSize = Annotated[PositiveInt, FromData("population_size")]
