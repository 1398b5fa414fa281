"""Robust rules: a bounded number of attackers moves the aggregate by a bounded distance only."""
