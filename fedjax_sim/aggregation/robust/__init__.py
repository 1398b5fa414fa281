"""Robust rules, whose aggregate a bounded number of attackers moves by a bounded distance only."""

__all__: list[str] = []
