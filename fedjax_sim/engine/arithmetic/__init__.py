"""Sums that are the same bits in any order, and rounding that does not depend on what XLA makes of a program."""

__all__: list[str] = []
