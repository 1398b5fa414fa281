"""Robust rules: a bounded number of attackers moves the aggregate by a bounded distance only."""

__all__: list[str] = []
