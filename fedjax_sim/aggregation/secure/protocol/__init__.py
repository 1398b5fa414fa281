"""Secure aggregation with real keys, between parties on one host."""

__all__: list[str] = []
