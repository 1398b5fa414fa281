"""Shows bounds rounded in their safe direction.

A bound from above, such as an epsilon, is shown as no less than it is: 2.0002 in four digits is 2.001, and never 2.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any


def shown_up(number: Any, digits: int = 4) -> str:
    """Shows a bound from above, such as epsilon, delta or needed noise: no digit of it makes it smaller than it is.

    Args:
      number: a number, or its text in a log.
      digits: significant digits.

    Guarantees: what is shown is at least the number, and less than one unit of the last digit above it
    (tests/text/test_bounds.py::test_shown_bounds).

    >>> shown_up(2.0002), shown_up(2.0), shown_up(0.60701, 3), shown_up(1234.5), shown_up(1e-6), shown_up("inf")
    ('2.001', '2', '0.608', '1,235', '1e-06', 'infinite')
    """
    return _shown(number, digits, ROUND_CEILING)


def shown_down(number: Any, digits: int = 4) -> str:
    """Shows a bound from below, as `shown_up` shows one from above.

    >>> shown_down(4.37729), shown_down(2.0)
    ('4.377', '2')
    """
    return _shown(number, digits, ROUND_FLOOR)


def _shown(number: Any, digits: int, rounding: str) -> str:
    """Shows a number in significant digits, rounded in one direction; its decimals are the shortest that are it."""
    value = float(number)
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite" if value > 0 else "minus infinite"
    rounded = Context(prec=digits, rounding=rounding).plus(Decimal(str(number)))
    return f"{float(rounded):,.{digits}g}"
