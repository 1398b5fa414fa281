"""The server's room."""

from fedjax_sim.server.optimizer import adaptive, optimizer, replacement, rescaled

__all__ = ["adaptive", "optimizer", "replacement", "rescaled"]
