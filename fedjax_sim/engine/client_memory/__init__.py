"""Keeps per-client state between rounds, in memory and on disk."""
