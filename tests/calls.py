"""How many functions a piece of code calls: a loop over clients is seen without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls(function: Callable[[], Any]) -> tuple[int, Any]:
    """(Python and C functions called, the result)."""
    number, before = 0, sys.getprofile()

    def count(frame, event, argument):
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        result = function()
    finally:
        sys.setprofile(before)
    return number, result
