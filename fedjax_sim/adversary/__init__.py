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
)
from fedjax_sim.adversary.backdoor import model_replacement
from fedjax_sim.adversary.byzantine import (
    Alone,
    Honest,
    Omniscient,
    Together,
    corrupted,
)
from fedjax_sim.adversary.omniscient import adaptive, fang, mimic, min_max, min_sum
from fedjax_sim.adversary.who import clients, poisoned, share_of_clients

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
    "model_replacement",
    "poisoned",
    "scaled",
    "share_of_clients",
    "sign_flip",
]
