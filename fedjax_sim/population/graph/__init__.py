"""Graphs, divided among clients."""

__all__: list[str] = []
