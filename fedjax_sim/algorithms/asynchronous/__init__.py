"""Servers that do not wait: FedBuff, FedAsync, FedAT, and the clients who are in flight."""

__all__: list[str] = []
