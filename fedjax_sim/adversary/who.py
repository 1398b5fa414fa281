"""Which clients attack."""

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

__all__ = ["clients", "number_of_attackers", "poisoned", "share_of_clients"]

PART = 1 << 20  # ids looked at together


def clients(
    ids: Sequence[int], *, population_size: Annotated[int | None, FromData("population_size")] = None
) -> Attackers:
    """Attackers by id: the same clients in every round.

    Args:
      population_size: N, which ids must be below; None = not checked. A config gives it.

    >>> import jax, jax.numpy as jnp
    >>> clients([3, 5])(jax.random.key(0), jnp.array([5, 6])).tolist()
    [True, False]
    """
    known = np.unique(np.asarray(ids))
    if known.size == 0 or not np.issubdtype(known.dtype, np.integer) or known[0] < 0 or known[-1] > validate.INT32_MAX:
        validate.fail("ids", f"clients' ids in [0, {validate.INT32_MAX}], at least one", ids)
    if population_size is not None and known[-1] >= population_size:
        validate.fail("ids", f"ids below the population's {population_size}", int(known[-1]))
    table = jnp.asarray(known, jnp.int32)

    def who(key, ids):
        place = jnp.clip(jnp.searchsorted(table, ids), 0, table.size - 1)
        return table[place] == ids

    return who


def poisoned(poisoned_ids: Annotated[Sequence[int] | None, FromData("poisoned_ids")]) -> Attackers:
    """The clients whose data are poisoned attack too: those who train a backdoor send it.

    Args:
      poisoned_ids: of a population, `population.Poisoned.poisoned_ids`; a config takes them from the data, of the last
        poison in the file. None is refused; of no ids nobody attacks.

    Guarantees: tests/population/poisoned/test_backdoors.py::test_who_holds_poison_attacks.

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
    """Each client is an attacker with this chance.

    Args:
      share: in [0, 1].
      seed: of who they are; 0 in a config too, so runs of other seeds have the same attackers unless it is set.
      each_round: drawn anew in every round, else once for all.
    """

    def who(key, ids):
        key = stream(key, "attackers") if each_round else jax.random.key(seed)
        luck = engine.client_keys(key, ids)[:, 0] >> 8  # 24 bits
        return luck.astype(jnp.float32) < jnp.float32(share * 2**24)

    return who


@validate.named_arguments
def number_of_attackers(who: Attackers, population_size: PositiveInt, *, seed: int = 0) -> int:
    """How many of a population's clients attack; of attackers that are drawn anew each round, in one such draw.

    Args:
      who: as for `corrupted`; `AggregatorFacts.attackers` of a corrupted one.
      population_size: N.
      seed: of the draw.

    >>> number_of_attackers(clients([3, 5]), 5)
    1
    """
    validate.function("who", who, "key, ids")
    found, key = 0, jax.random.key(seed)
    for start in range(0, population_size, PART):
        found += int(who(key, jnp.arange(start, min(start + PART, population_size), dtype=jnp.int32)).sum())
    return found
