"""Functions that say which clients attack: by id, by their data, or at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.prng import stream
from fedjax_sim.types import Attackers
from fedjax_sim.validate import FromData, NonNegativeInt, PositiveInt, Share

PART = 1 << 20  # the number of ids that are tested at once


def clients(
    ids: Sequence[int], *, population_size: Annotated[int | None, FromData("population_size")] = None
) -> Attackers:
    """Makes the given clients attackers, in every round.

    Args:
      ids: the ids of the attackers, at least one.
      population_size: N; ids must be below N. None = not checked. A config gives it.

    Returns: (key, ids [c]) -> [c] bool.

    Raises: ValueError for ids that are not integers in [0, 2^31 - 1], and for ids of N or more.

    >>> import jax, jax.numpy as jnp
    >>> clients([3, 5])(jax.random.key(0), jnp.array([5, 6])).tolist()
    [True, False]
    """
    sorted_ids = np.unique(np.asarray(ids))
    are_integers = sorted_ids.size > 0 and np.issubdtype(sorted_ids.dtype, np.integer)
    if not are_integers or sorted_ids[0] < 0 or sorted_ids[-1] > validate.INT32_MAX:
        validate.fail("ids", f"clients' ids in [0, {validate.INT32_MAX}], at least one", ids)
    if population_size is not None and sorted_ids[-1] >= population_size:
        validate.fail("ids", f"ids below the population's {population_size}", int(sorted_ids[-1]))
    table = jnp.asarray(sorted_ids, jnp.int32)

    def who(key, ids):
        index = jnp.clip(jnp.searchsorted(table, ids), 0, table.size - 1)
        return table[index] == ids

    return who


def poisoned(poisoned_ids: Annotated[Sequence[int] | None, FromData("poisoned_ids")]) -> Attackers:
    """Makes the clients with poisoned data attackers, so that clients that train a backdoor also send an attack.

    Args:
      poisoned_ids: the poisoned clients of a population, `population.Poisoned.poisoned_ids`. A config takes the ids
        from the data, of the last poison in the file. None is refused; with no ids no client attacks.

    Returns: (key, ids [c]) -> [c] bool.

    Raises: ValueError for None.

    Guarantees: the attackers of a config are the clients with poison, and nobody attacks if no client has any
    (tests/population/poisoned/test_backdoors.py::test_who_holds_poison_attacks).

    >>> import jax, jax.numpy as jnp
    >>> poisoned([3, 5])(jax.random.key(0), jnp.array([5, 6])).tolist()
    [True, False]
    """
    if poisoned_ids is None:
        hint = "Poison some, as by [data.backdoor], or say who attacks: adversary.clients."
        validate.fail("poisoned_ids", "clients with poisoned data", None, hint)
    return clients(poisoned_ids) if len(poisoned_ids) else lambda key, ids: jnp.zeros(ids.shape, bool)


@validate.named_arguments
def share_of_clients(share: Share, *, seed: NonNegativeInt = 0, each_round: bool = False) -> Attackers:
    """Makes each client an attacker with a given probability, independently.

    Args:
      share: the probability, in [0, 1].
      seed: of the draw of attackers. It is 0 in a config too, so runs with other seeds have the same attackers unless
        this seed is set.
      each_round: True: attackers are drawn anew in every round. False: they are drawn once.

    Returns: (key, ids [c]) -> [c] bool.
    """

    def who(key, ids):
        key = stream(key, "attackers") if each_round else jax.random.key(seed)
        random_bits = engine.client_keys(key, ids)[:, 0] >> 8  # 24 bits, which a float32 holds exactly
        return random_bits.astype(jnp.float32) < jnp.float32(share * 2**24)

    return who


@validate.named_arguments
def number_of_attackers(who: Attackers, population_size: PositiveInt, *, seed: int = 0) -> int:
    """Counts the clients of a population that attack.

    If attackers are drawn anew in each round, those of a single draw are counted.

    Args:
      who: as in `corrupted`, such as the fact `attackers` of a corrupted aggregator.
      population_size: N.
      seed: of the draw.

    >>> number_of_attackers(clients([3, 5]), 5)
    1
    """
    validate.function("who", who, "key, ids")
    num_attackers = 0
    key = jax.random.key(seed)
    for start in range(0, population_size, PART):
        ids = jnp.arange(start, min(start + PART, population_size), dtype=jnp.int32)
        num_attackers += int(who(key, ids).sum())
    return num_attackers
