"""The server's room."""

from fedjax_sim.server.control_variates import control_variates
from fedjax_sim.server.downlink import downlink
from fedjax_sim.server.optimizer import adaptive, optimizer, replacement, rescaled

__all__ = ["adaptive", "control_variates", "downlink", "optimizer", "replacement", "rescaled"]
