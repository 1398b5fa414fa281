"""Servers take a step on the model with the aggregate of a round, and broadcast the result."""

from fedjax_sim.server.clients_part import with_clients_part as with_clients_part
from fedjax_sim.server.control_variates import control_variates as control_variates
from fedjax_sim.server.downlink import downlink as downlink
from fedjax_sim.server.dynamic import dynamic as dynamic
from fedjax_sim.server.optimizer import (
    adaptive as adaptive,
    optimizer as optimizer,
    replacement as replacement,
    rescaled as rescaled,
)
from fedjax_sim.server.own_data import with_own_data as with_own_data, with_own_part as with_own_part
from fedjax_sim.server.statistics import last_two as last_two, statistics as statistics
