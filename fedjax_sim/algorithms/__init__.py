"""Wiring: the star composer and the recipes over it."""

from fedjax_sim.algorithms.federated import FederatedState, federated
from fedjax_sim.algorithms.recipes import (
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fednova,
    fedprox,
    fedsgd,
    fedyogi,
    scaffold,
)

__all__ = [
    "FederatedState",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "federated",
    "fednova",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "scaffold",
]
