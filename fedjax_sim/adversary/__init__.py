"""What attackers send, and what a curious server infers."""

from fedjax_sim.adversary.attacks import (
    alie,
    forged_weight,
    free_rider,
    gaussian_noise,
    inner_product,
    large_value,
    scaled,
    sign_flip,
    stale,
)
from fedjax_sim.adversary.byzantine import corrupted
from fedjax_sim.adversary.kinds import Alone, Honest, Omniscient, Together
from fedjax_sim.adversary.omniscient import adaptive, fang, mimic, min_max, min_sum
from fedjax_sim.adversary.who import clients, share_of_clients

__all__ = [
    "Alone",
    "Honest",
    "Omniscient",
    "Together",
    "adaptive",
    "alie",
    "clients",
    "corrupted",
    "fang",
    "forged_weight",
    "free_rider",
    "gaussian_noise",
    "inner_product",
    "large_value",
    "mimic",
    "min_max",
    "min_sum",
    "scaled",
    "share_of_clients",
    "sign_flip",
    "stale",
]
