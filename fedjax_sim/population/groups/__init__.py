"""Clients in groups, for hierarchies."""

__all__: list[str] = []
