"""Groups as populations: what they know of their members, and groups of groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import population as field
from fedjax_sim.population.groups.with_groups import counts_of_labels_in_range
from fedjax_sim.types import CheapReads, ClientData, Groups, Subpopulation

SIZES = np.array([70, 3, 0, 2, 65, 1, 4])
GROUP_OF = np.array([1, 0, 1, 2, 1, 0, 0])


client_of = jax.jit(lambda population, id: population.client(id))


def people():
    rows = {"y": np.arange(SIZES.sum())}
    return field.stored(rows, np.concatenate([[0], np.cumsum(SIZES)]))


def data_of(train, num_outputs=2):
    """A data set of these clients."""
    test = {"x": np.zeros((1, 1), np.float32), "y": np.zeros(1, np.int32)}
    return field.FederatedData(
        train=train, test=test, held_out=None, input_shape=(1,), num_outputs=num_outputs, task="classification"
    )


def alike(num_clients, rows=12):
    """Clients of as many rows each."""
    x = np.arange(num_clients * rows, dtype=np.float32)[:, None]
    return field.stored({"x": x, "y": np.zeros(len(x), np.int32)}, np.arange(num_clients + 1) * rows)


def test_a_group_hands_on_what_its_population_knows():
    """Fault: counts or size classes of other clients; members of the next group in empty places; a group that offers
    what its population does not."""
    whole = people()
    groups = field.grouped(whole, GROUP_OF)
    assert groups.ragged and not field.grouped(whole, np.arange(7)).ragged
    assert groups.group(1).capacities == whole.capacities and len(whole.capacities) == 2
    ids = jnp.arange(-1, 4)
    for g, mine in enumerate(([1, 5, 6], [0, 2, 4], [3])):
        group = groups.group(jnp.int32(g))
        assert group.has_empty_places and group.there(ids).tolist() == [
            False,
            *(i < len(mine) for i in range(3)),
            False,
        ]
        expected = [0, *SIZES[mine], *[0] * (4 - len(mine))]
        assert group.own_ids(ids).tolist() == [-1, *mine, *[-1] * (4 - len(mine))]
        assert jax.vmap(group.count)(ids).tolist() == expected
        small = jax.vmap(group.capped(64).client)(ids)
        assert small.mask.shape == (5, 64) and small.mask.sum(1).tolist() == np.minimum(expected, 64).tolist()
    nobody = groups.group(jnp.int32(-1))
    assert not nobody.there(jnp.arange(3)).any() and not jax.vmap(nobody.client)(ids).mask.any()
    plain = field.generated(4, lambda parameters, id: ClientData({"y": jnp.ones(2)}, jnp.ones(2, bool)))
    group = field.grouped(plain, [0, 0, 1, 1]).group(0)
    assert isinstance(group, CheapReads) and group.capacities == () and int(group.count(0)) == 2
    assert isinstance(group, Subpopulation) and not group.has_empty_places
    assert not isinstance(group, Groups)


def test_ways_to_group():
    """Faults: sizes that differ by more than one, a client who is lost, groups that follow no seed, or no size."""
    data = data_of(alike(11))
    found = {}
    for by in ("order", "random", "size"):
        train = field.with_groups(data, num_groups=3, by=by, seed=4).train
        assert sorted(train.members.tolist()) == list(range(11)) and train.counts.tolist() == [4, 4, 3]
        found[by] = train.members.tolist()
    assert found["order"] == list(range(11)) != found["random"]
    assert field.with_groups(data, num_groups=3, by="random", seed=5).train.members.tolist() != found["random"]
    unequal = data._replace(train=people())
    train = field.with_groups(unequal, num_groups=3, by="size").train
    assert [sorted(SIZES[train.members[a:b]]) for a, b in ((0, 3), (3, 5), (5, 7))] == [[0, 1, 2], [3, 4], [65, 70]]
    assert field.with_groups(data, groups=[0] * 4 + [1] * 7).train.counts.tolist() == [4, 7]


def test_groups_by_labels():
    """Clients with one label each, in an order that hides it. Fault: groups by numbers of examples, or padding's
    labels."""
    label = np.array([2, 0, 1, 1, 0, 2, 2, 0])
    rows = {"x": np.zeros((36, 1), np.float32), "y": np.repeat(label, np.arange(1, 9))}
    train = field.stored(rows, np.concatenate([[0], np.cumsum(np.arange(1, 9))]))
    data = data_of(train, num_outputs=3)
    np.testing.assert_array_equal(
        counts_of_labels_in_range(train, 3), np.eye(3, dtype=int)[label] * np.arange(1, 9)[:, None]
    )
    groups = field.with_groups(data, num_groups=3, by="labels").train
    found = np.split(label[np.asarray(groups.members)], np.asarray(groups.offsets[1:-1]))
    assert sorted(x.tolist() for x in found) == [[0, 0, 0], [1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "num_groups, groups: expected exactly one of the two"),
        ({"num_groups": 2, "groups": [0] * 8}, "num_groups, groups: expected exactly one of the two"),
        ({"num_groups": 9}, r"num_groups: expected an integer in \[1, 8\]"),
        ({"num_groups": 2, "by": "site"}, "by: expected one of"),
        ({"num_groups": 4, "by": "labels"}, "num_groups: expected .* 1 different shares"),
        ({"groups": [0] * 7}, "group_of_client: expected 8 integers"),
    ],
)
def test_wrong_groups(options, words):
    """Fault: a group without a client, or a way that is ignored."""
    same = field.stored({"x": np.zeros((8, 1), np.float32), "y": np.zeros(8, int)}, np.arange(9))
    with pytest.raises((ValueError, TypeError), match=words):
        field.with_groups(data_of(same), **options)


def test_a_group_has_its_clients_local_tests():
    """Fault: a group that is judged by the rows of one client, or by those of another group."""
    data = field.with_local_test(data_of(alike(4, rows=10)), fraction=0.3)
    found = field.with_groups(data, groups=[1, 0, 1, 0]).local_test

    def rows(data):
        return sorted(np.asarray(data.examples["x"])[np.asarray(data.mask)].ravel().tolist())

    for group, members in ((0, (1, 3)), (1, (0, 2))):
        own = [x for i in members for x in rows(client_of(data.local_test, i))]
        assert rows(client_of(found, group)) == sorted(own)
        assert int(found.sizes[group]) == 6


def test_groups_of_groups():
    """Fault: an inner group outside of its own outer one, or one in an empty place."""
    inner = field.grouped(people(), GROUP_OF)
    outer = field.grouped(inner, [0, 1, 1])
    found = []

    @jax.jit
    def read(r, e):
        return jax.vmap(outer.group(r).group(e).client)(jnp.arange(3))

    for r in range(2):
        for e in range(-1, 3):
            data = read(jnp.int32(r), jnp.int32(e))
            found.append(np.sort(np.asarray(data.examples["y"])[np.asarray(data.mask)]).tolist())
    rows = np.split(np.arange(SIZES.sum()), np.cumsum(SIZES)[:-1])
    expected = [sorted(int(x) for i in np.flatnonzero(g == GROUP_OF) for x in rows[i]) for g in range(3)]
    assert found == [[], expected[0], [], [], [], expected[1], expected[2], []]
    np.testing.assert_array_equal(outer.sizes, [8, 137])


def test_members_of_groups_of_groups():
    """Fault: the number of groups for that of clients; counts of pooled rows, by which edges would be packed."""
    outer = field.grouped(field.grouped(people(), GROUP_OF), [0, 1, 1])
    group = outer.group(0)
    assert outer.num_members == outer.population.num_members == 7
    assert isinstance(group, Groups) and group.num_members is None
    assert isinstance(group, Subpopulation) and not isinstance(group, CheapReads)
    assert field.grouped(group, [0, 1]).num_members is None
