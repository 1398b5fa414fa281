"""Reads recorded values as numbers, and writes them as the text that a report shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

NOTHING = "\N{EN DASH}"  # shown in place of a missing value


def recorded_number(value: Any) -> float:
    """Returns a recorded number; NaN for other values. The strings "nan", "inf" and "-inf" are numbers.

    >>> recorded_number(3), recorded_number("inf"), recorded_number(None), recorded_number("<b>")
    (3.0, inf, nan, nan)
    """
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def in_percent(metric: str) -> tuple[float, str]:
    """Returns the factor by which a figure draws a metric, and the metric's name on an axis: accuracies in percent.

    >>> in_percent("test_accuracy"), in_percent("test_loss")
    ((100.0, 'test accuracy (%)'), (1.0, 'test loss'))
    """
    name = metric.replace("_", " ")
    return (100.0, f"{name} (%)") if metric.endswith("accuracy") else (1.0, name)


def bounds_of(metric: str, values: Sequence[float] | np.ndarray = ()) -> tuple[float, float]:
    """Returns the least and the largest number that a metric can be, as far as its name says.

    Args:
      metric: its name.
      values: finite numbers of it, which show that a metric of the user's is none of those.

    >>> bounds_of("test_accuracy"), bounds_of("test_loss"), bounds_of("my_accuracy", [80.0])
    ((0.0, 1.0), (-inf, inf), (-inf, inf))
    """
    low, high = -math.inf, math.inf
    if metric.endswith(("accuracy", "attack_success")):
        low, high = 0.0, 1.0
    elif metric.endswith(("bytes", "seconds", "epsilon", "perplexity", "_so_far")):
        low = 0.0
    return (low, high) if all(low <= value <= high for value in values) else (-math.inf, math.inf)


def is_better_low(metric: str) -> bool:
    """Returns whether less of a metric is better: of a loss, a perplexity, and errors of numbers and of probabilities.

    >>> is_better_low("test_loss"), is_better_low("held_out_perplexity"), is_better_low("test_accuracy")
    (True, True, False)
    """
    return metric.endswith(("loss", "perplexity", "rmse", "mae", "brier", "calibration_error"))


def listed(values: Any) -> str:
    """Returns numbers as a text; rows of numbers are separated by semicolons. A text stays as it is.

    >>> listed([0.51234567, 3, "nan"]), listed([[1.0, 2.0], [3.0, 4.0]]), listed("many"), listed([])
    ('0.51235, 3, nan', '1, 2; 3, 4', 'many', 'none')
    """
    if not isinstance(values, list):
        return f"{values:.5g}" if isinstance(values, float) else str(values)
    separator = "; " if any(isinstance(entry, list) for entry in values) else ", "
    return separator.join(map(listed, values)) or "none"


def scaled_bytes(value: float) -> tuple[float, str]:
    """Returns the decimal unit in which a number of bytes reads well: (bytes in a unit, its name).

    >>> scaled_bytes(2_500_000)
    (1000000.0, 'MB')
    """
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = min(int(math.log10(value) // 3), len(units) - 1) if math.isfinite(value) and value >= 1 else 0
    return 1000.0**power, units[power]


def scaled_seconds(value: float) -> tuple[float, str]:
    """Returns the unit in which a duration reads well on an axis: (seconds in a unit, its name).

    >>> scaled_seconds(90.0), scaled_seconds(50_000.0)
    ((1.0, 's'), (3600.0, 'h'))
    """
    return (1.0, "s") if value < 300 else (60.0, "min") if value < 10_800 else (3600.0, "h")


def scaled_joules(value: float) -> tuple[float, str]:
    """Returns the unit in which an energy reads well: (joules in a unit, its name).

    It is a joule, or a watt hour from 100 kJ on, or a kilowatt hour from 10 MJ on.

    >>> scaled_joules(7.2e9)
    (3600000.0, 'kWh')
    """
    return (1.0, "J") if value < 1e5 else (3600.0, "Wh") if value < 1e7 else (3.6e6, "kWh")


def _plain(recorded: Any) -> float | str:
    """Returns a finite number, or the text that is shown in place of a value that is none."""
    if recorded is None:
        return NOTHING
    if isinstance(recorded, (str, bool, dict, list)) and recorded not in ("nan", "inf", "-inf"):
        return str(recorded)
    recorded = recorded_number(recorded)
    return recorded if math.isfinite(recorded) else "not a number" if math.isnan(recorded) else "infinite"


def count(value: Any) -> str:
    """Shows a whole number with separators; a fraction below 100 with three digits.

    >>> count(12345), count(2.5), count("nan"), count(None)
    ('12,345', '2.5', 'not a number', '–')
    """
    value = _plain(value)
    return (
        value if isinstance(value, str) else f"{value:,.0f}" if value == int(value) or value > 99 else f"{value:,.3g}"
    )


def real(value: Any) -> str:
    """Shows four significant digits.

    >>> real(0.123456), real(None)
    ('0.1235', '–')
    """
    value = _plain(value)
    return value if isinstance(value, str) else f"{value:,.4g}"


def percent(value: Any) -> str:
    """Shows a share as a percentage with two decimals.

    >>> percent(0.25)
    '25.00 %'
    """
    value = _plain(value)
    return value if isinstance(value, str) else f"{100 * value:.2f} %"


def size(value: Any) -> str:
    """Shows a number of bytes in the decimal unit that suits it.

    >>> size(2_500_000)
    '2.5 MB'
    """
    value = _plain(value)
    if isinstance(value, str):
        return value
    unit, name = scaled_bytes(value)
    return f"{value / unit:.3g} {name}" if value < 999.5 * unit else f"{value / unit:,.0f} {name}"


def seconds(value: Any) -> str:
    """Shows a duration: in seconds below two minutes, in minutes below two hours, else in hours and minutes.

    >>> seconds(90.0), seconds(3600), seconds(8000)
    ('90 s', '60 min', '2 h 13 min')
    """
    value = _plain(value)
    if isinstance(value, str) or value < 120:
        return value if isinstance(value, str) else f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


def energy(value: Any) -> str:
    """Shows an amount of energy in joules or watt hours.

    >>> energy(90.0), energy(7.2e6)
    ('90 J', '2,000 Wh')
    """
    value = _plain(value)
    if isinstance(value, str):
        return value
    unit, name = scaled_joules(value)
    return f"{value / unit:,.0f} {name}" if value >= 99.5 * unit else f"{value / unit:.3g} {name}"


def shown_with_unit(value: Any, unit: str) -> str:
    """Shows a number with the unit that its part states (`types.Metric.unit`).

    >>> shown_with_unit(1_500, "bytes"), shown_with_unit(0.25, "share"), shown_with_unit(2.5, "")
    ('1.5 kB', '25.00 %', '2.5')
    """
    show = {"bytes": size, "share": percent, "seconds": seconds, "count": count, "joules": energy}.get(unit, real)
    return show(value)
