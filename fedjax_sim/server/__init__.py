"""Servers take a step on the model with the aggregate of a round, and broadcast the result."""

from fedjax_sim.server.clients_part import with_clients_part
from fedjax_sim.server.control_variates import control_variates
from fedjax_sim.server.downlink import downlink
from fedjax_sim.server.dynamic import dynamic
from fedjax_sim.server.optimizer import adaptive, optimizer, replacement, rescaled
from fedjax_sim.server.own_data import with_own_data, with_own_part
from fedjax_sim.server.statistics import last_two, statistics

__all__ = [
    "adaptive",
    "control_variates",
    "downlink",
    "dynamic",
    "last_two",
    "optimizer",
    "replacement",
    "rescaled",
    "statistics",
    "with_clients_part",
    "with_own_data",
    "with_own_part",
]
