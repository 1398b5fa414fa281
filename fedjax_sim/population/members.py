"""A population in which some clients have no rows, as if they had never joined."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.wrapper import Around
from fedjax_sim.types import Array, ClientData, Population


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Members(Around):
    """The clients of `inner`, of which those that are no members have no rows. Ids and their number stay."""

    inner: Population
    is_member: Array  # [N] bool; a leaf, so that a program may try several coalitions
    size: int = dataclasses.field(metadata={"static": True})

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, a scalar int32."""
        data = self.inner.client(id)
        return data._replace(mask=data.mask & self.is_member[id])

    @property
    def sizes(self) -> Array:
        """[N] int32 examples per client."""
        return jnp.where(self.is_member, super().sizes, 0)

    def count(self, id: Array) -> Array:
        """Returns the number of examples of client `id`."""
        return jnp.where(self.is_member[id], super().count(id), 0)


def without_clients(population: Population, ids: Sequence[int]) -> Members:
    """Takes the rows of some clients away. All others keep their ids, so that rounds draw the same cohorts.

    A run over it, with the key of an earlier run, is that run as if these clients had never had a row: exact
    unlearning, by training anew. (Noise for privacy is drawn anew too, since it is bound to the data.)

    Args:
      population: any; of a `FederatedData`, its `train`.
      ids: of the clients that leave, each once.

    Returns: a population with the same number of clients. A client without rows takes part in no mean.

    Raises: ValueError for ids that are no clients, or for one that is named twice.

    Guarantees: a run over it has the bits of a run over clients that have no rows
    (tests/population/test_members.py::test_a_client_that_left_had_no_rows).

    >>> from fedjax_sim.population import digits
    >>> people = digits(num_clients=3).train
    >>> [int(without_clients(people, [1]).count(i)) > 0 for i in range(3)]
    [True, False, True]
    """
    left = np.asarray(ids)
    is_id = left.ndim == 1 and (left.dtype.kind in "iu" or not left.size)
    if not is_id or not ((left >= 0) & (left < population.size)).all() or len(set(left.tolist())) < left.size:
        validate.fail("ids", f"integers in [0, {population.size}), each once", ids)
    is_member = np.ones(population.size, bool)
    is_member[left.astype(int)] = False
    return Members(population, jnp.asarray(is_member), population.size)
