"""Secure aggregation with real cryptographic keys, between parties on one host."""

__all__: list[str] = []
