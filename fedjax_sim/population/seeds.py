"""Keys of generated clients: a population holds the words of one key, and every client's key follows from its id."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedjax_sim.prng import client_key
from fedjax_sim.types import Array

__all__ = ["generated_client_key", "seed_words"]


def seed_words(seed: int, purpose: int) -> np.ndarray:
    """[2] uint32, the data of a threefry key: independent for other seeds and other purposes (training, held out).

    >>> bool((seed_words(0, 1) == seed_words(0, 2)).all())
    False
    """
    return np.random.SeedSequence([seed, purpose]).generate_state(2)


def generated_client_key(parameters: Any, id: Array) -> Array:
    """The key of client `id` in a population whose `parameters["seed"]` holds `seed_words`."""
    return client_key(jax.random.wrap_key_data(parameters["seed"], impl="threefry2x32"), id)
