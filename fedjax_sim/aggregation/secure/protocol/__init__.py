"""Secure aggregation with real cryptographic keys, between parties on one host."""
