"""Populations some of whose clients attack with their data."""

__all__: list[str] = []
