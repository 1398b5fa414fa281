"""This module derives the keys of generated clients.

A population holds the data of one key, and every client's key follows from that key and the client's id.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedjax_sim.prng import client_key
from fedjax_sim.types import Array


def seed_words(seed: int, purpose: int) -> np.ndarray:
    """Returns the data of a threefry key, [2] uint32. Other seeds and other purposes give independent keys.

    Args:
      seed: of the data set.
      purpose: a number that separates the uses of one seed, such as 1 for training and 2 for held-out clients.

    >>> bool((seed_words(0, 1) == seed_words(0, 2)).all())
    False
    """
    return np.random.SeedSequence([seed, purpose]).generate_state(2)


def generated_client_key(parameters: Any, id: Array) -> Array:
    """Returns the key of client `id` in a population whose `parameters["seed"]` holds the result of `seed_words`."""
    return client_key(jax.random.wrap_key_data(parameters["seed"], impl="threefry2x32"), id)
