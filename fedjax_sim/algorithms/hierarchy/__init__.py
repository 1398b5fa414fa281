"""Federations of federations: devices under edges, edges under a cloud."""

__all__: list[str] = []
