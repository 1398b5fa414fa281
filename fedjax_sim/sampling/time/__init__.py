"""Samplers with a clock: deadlines, hazards, batteries, and what a round costs."""

__all__: list[str] = []
