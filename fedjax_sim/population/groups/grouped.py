"""This module forms groups of clients, such as the edge servers of a hierarchy or the hospitals of a network."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim import validate
from fedjax_sim.population.protocol import num_rows, sizes_of
from fedjax_sim.types import (
    Array,
    CheapReads,
    ClientData,
    Groups,
    Learned,
    Population,
    Subpopulation,
    learned_from,
)

static = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Group(Subpopulation):
    """A `Group` is one group of clients as a population of static size.

    Its members come first, then empty places up to that size. What a group offers besides depends on its members: see
    `CountedGroup` and `GroupOfGroups`.

    Guarantees: counts, size classes and inner groups are those of the members
    (tests/population/groups/test_groups.py::test_a_group_hands_on_what_its_population_knows).
    """

    population: Population
    members: Array  # [size] int32 client ids
    num_filled: Array  # [] int32, how many places hold a member
    size: int = dataclasses.field(metadata=static)
    # Whether groups differ in their number of members
    has_empty_places: bool = dataclasses.field(default=False, metadata=static)

    @property
    def max_examples(self) -> int:
        """The number of rows of a member, padding included."""
        return num_rows(self.population)

    @property
    def sizes(self) -> Array:
        """[size] int32 examples per member, 0 at empty places."""
        has_member = self.there(jnp.arange(self.size))
        return jnp.where(has_member, sizes_of(self.population)[self.members], 0)

    def there(self, ids: Array) -> Array:
        """Returns which of these places of the group hold a member, bool in the shape of `ids`."""
        return (0 <= ids) & (ids < self.num_filled)

    def place(self, ids: Array) -> Array:
        """Returns the places in this group of clients that are named by their ids in the whole population.

        The result has the shape of `ids`. It is -1 for a client of another group.
        """
        has_member = self.there(jnp.arange(self.size))

        def place_of(id):
            is_here = (self.members == id) & has_member
            return jnp.where(is_here.any(), is_here.argmax().astype(jnp.int32), -1)

        return jax.vmap(place_of)(ids.reshape(-1)).reshape(ids.shape)

    def own_ids(self, places: Array) -> Array:
        """Returns the ids in the whole population of the members at these places, -1 at empty places.

        The result has the shape of `places`. The method is the inverse of `place`.
        """
        return jnp.where(self.there(places), self._member(places), -1)

    def client(self, id: Array) -> ClientData:
        """Returns the data of the member at place `id`. An empty place has no valid row."""
        data = self.population.client(self._member(id))
        return data._replace(mask=data.mask & self.there(id))

    def _member(self, id: Array) -> Array:
        """Returns the id in the population of the member at place `id`, an arbitrary one for an empty place."""
        return self.members[jnp.clip(id, 0, self.size - 1)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CountedGroup(Group, CheapReads):
    """A `CountedGroup` is a group of clients whose population offers `CheapReads`, as the group then does."""

    population: CheapReads

    # A field of a protocol is read only, but Python's types have no word for it.
    @property
    def capacities(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The size classes of the population's clients."""
        return self.population.capacities

    def capped(self, rows: int) -> CountedGroup:
        """Returns the same group, whose members have arrays of `rows` rows."""
        return dataclasses.replace(self, population=self.population.capped(rows))

    def count(self, id: Array) -> Array:
        """Returns the number of examples of the member at place `id`, 0 for an empty place, without reading them."""
        return jnp.where(self.there(id), self.population.count(self._member(id)), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupOfGroups(Group, Groups):
    """A `GroupOfGroups` is a group whose members are groups themselves, so that groups can be nested.

    It does not know its `num_members`: groups of groups have one static size and differ in their number of clients.
    """

    population: Groups

    def group(self, id: Array) -> Population:
        """Returns the member at place `id` as a population of its own clients, without clients for an empty place."""
        return self.population.group(jnp.where(self.there(id), self._member(id), -1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Groups):
    """A `Grouped` population consists of disjoint groups of another population's clients. `grouped` builds it.

    Each group can be read in two ways. A client that is a federation (`algorithms.as_client_update`) receives `group`,
    a population of the members, without a copy of their data. Any other client receives `client`, the pooled rows of
    all members, padded to `group_size` times the rows of the largest member.
    """

    population: Population
    members: Array  # [N] int32 client ids, group after group
    offsets: Array  # [G + 1] int32
    group_size: int = dataclasses.field(metadata=static)  # clients in the largest group
    size: int = dataclasses.field(metadata=static)  # G
    ragged: bool = dataclasses.field(metadata=static)  # whether groups differ in their number of clients

    @property
    def max_examples(self) -> int:
        """The number of rows of a group that is read as one client, padding included."""
        return self.group_size * num_rows(self.population)

    # A field of a protocol is read only, but Python's types have no word for it.
    @property
    def num_members(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of clients in all groups together, on the lowest level if groups are nested; None = not known."""
        return self.population.num_members if isinstance(self.population, Groups) else self.population.size

    @property
    def learned(self) -> tuple[Learned, ...] | None:
        """What was learnt from several clients' rows to prepare the inner population's inputs, see `types.Learned`."""
        return learned_from(self.population)

    @property
    def counts(self) -> Array:
        """[G] int32 clients per group."""
        return jnp.diff(self.offsets)

    @property
    def sizes(self) -> Array:
        """[G] int32 examples per group."""
        group_of_member = jnp.repeat(jnp.arange(self.size), self.counts, total_repeat_length=self.members.shape[0])
        return jax.ops.segment_sum(sizes_of(self.population)[self.members], group_of_member, self.size)

    def group(self, id: Array) -> Group:
        """Returns group `id` as a population of `group_size` clients. It is traceable, so groups can be vmapped."""
        valid_id = jnp.clip(id, 0, self.size - 1)
        start = self.offsets[valid_id]
        # Positions beyond a smaller group are members of other groups, which `count` declares to be empty places.
        positions = start + jnp.arange(self.group_size, dtype=jnp.int32)
        count = jnp.where(valid_id == id, self.offsets[valid_id + 1] - start, 0)
        members = self.members.at[positions].get(mode="clip")
        # A group of groups tells no counts: pooled rows of groups are not sorted by size.
        if isinstance(self.population, Groups):
            return GroupOfGroups(self.population, members, count, self.group_size, self.ragged)
        if isinstance(self.population, CheapReads):
            return CountedGroup(self.population, members, count, self.group_size, self.ragged)
        return Group(self.population, members, count, self.group_size, self.ragged)

    def client(self, id: Array) -> ClientData:
        """Returns the pooled data of group `id`: the rows of one member after the other, with padding between them."""
        data = jax.vmap(self.group(id).client)(jnp.arange(self.group_size, dtype=jnp.int32))
        # Leaves [group_size, n, ...] become [group_size * n, ...].
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)


def grouped(population: Population, group_of_client: ArrayLike) -> Grouped:
    """Builds the population whose clients are groups of another population's clients.

    Args:
      population: N clients.
      group_of_client: [N] integers in [0, G), the group of each client. Every group needs one client at least.
    Raises: ValueError for a wrong length or an empty group.
    Guarantees: every client is in one group, once; nothing is lost
    (tests/population/test_population.py::test_grouped_loses_and_duplicates_nothing).

    >>> import jax, numpy as np
    >>> from fedjax_sim.population.population import stored
    >>> population = stored({"y": np.array([5, 6, 7])}, [0, 1, 2, 3])
    >>> hospitals = grouped(population, [1, 0, 1])
    >>> hospitals.size, jax.jit(hospitals.client)(1).examples["y"].tolist()
    (2, [5, 7])
    """
    group_of_client = np.asarray(group_of_client)
    if group_of_client.shape != (population.size,) or group_of_client.dtype.kind not in "iu":
        shown = f"{group_of_client.dtype.name}{list(group_of_client.shape)}"
        validate.fail("group_of_client", f"{population.size} integers, one per client", shown)
    low = int(group_of_client.min())
    high = int(group_of_client.max())
    if not (0 <= low and high < population.size):
        validate.fail("group_of_client", f"groups in [0, {population.size})", f"groups in [{low}, {high}]")
    counts = np.bincount(group_of_client)
    # An empty group would be a client without examples, which nobody intends: group numbers have a gap.
    if not counts.all():
        hint = "Renumber with np.unique(groups, return_inverse=True)[1]."
        validate.fail("group_of_client", "a client in every group", f"none in group {counts.argmin()}", hint)
    members = np.argsort(group_of_client, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(counts)])
    group_size = int(counts.max())
    validate.integer("rows of a group", group_size * num_rows(population), hint="Make smaller groups.")
    is_ragged = bool((counts != group_size).any())
    return Grouped(
        population=population,
        members=jnp.array(members, jnp.int32),
        offsets=jnp.array(offsets, jnp.int32),
        group_size=group_size,
        size=len(counts),
        ragged=is_ragged,
    )
