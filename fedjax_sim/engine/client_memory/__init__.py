"""Keeps per-client state between rounds, in memory and on disk."""

__all__: list[str] = []
