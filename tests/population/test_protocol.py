"""A user's own population: `size` and `client(id)`, and nothing else, is enough for all that reads populations.

What it offers besides is a whole protocol, or it is refused.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import InvalidType, algorithms, metrics, population, run, sampling
from fedjax_sim.population.datasets.native import ScaledBytes
from fedjax_sim.population.describe import describe
from fedjax_sim.population.groups.grouped import CountedGroup, GroupOfGroups
from fedjax_sim.population.poisoned.poisoning import poisoned
from fedjax_sim.population.protocol import check_population, sizes_of
from fedjax_sim.round.collect import in_turn
from fedjax_sim.types import CheapReads, ClientData, Groups, Population, Subpopulation
from tests.laws import problems as p
from tests.refusals import refused

KEY, START = jax.random.key(0), jnp.array(p.START)
MISSING = object()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """The least that the protocol asks for. An id outside of [0, size), which must not occur, gives another's rows."""

    rows: dict  # [N, n, ...]
    mask: jax.Array  # [N, n]
    size: int = dataclasses.field(metadata={"static": True})

    def client(self, id):
        return ClientData(jax.tree.map(lambda x: x[id], self.rows), self.mask[id])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting(Own, CheapReads):
    """With the number of examples too, without which clients are not sorted by size."""

    def count(self, id):
        return self.mask[id].sum()


def own(kind=Own):
    full = jax.vmap(p.ragged().client)(jnp.arange(p.NUM_CLIENTS))
    return kind(full.examples, full.mask, p.NUM_CLIENTS)


def make(**work):
    return algorithms.fedavg(p.linear_loss, sampling.uniform(p.NUM_CLIENTS, 4), optax.sgd(0.05), mesh=None, **work)


def test_size_and_client_are_enough_to_train():
    """Catches a round, an evaluation or a plan that reads what only the built-in populations have."""
    judge = metrics.evaluation(p.linear_loss, held_out=own())
    found, expected = (
        run(KEY, make(num_steps=2), START, people, 2, evaluation=judge)[1].records for people in (own(), p.ragged())
    )
    assert found == expected and "held_out_loss" in found[-1]
    algorithm = make(num_epochs=2, batch_size=2)
    for people in (own(), own(Counting)):  # traced is planned; sorted where they can be counted
        state = jax.eval_shape(algorithm.init, KEY, START, people)
        assert "local_loss" in jax.eval_shape(algorithm.step, KEY, state, people)[1]
    assert in_turn(algorithm.parts, own()) and not in_turn(algorithm.parts, own(Counting))
    group = population.grouped(own(), np.zeros(p.NUM_CLIENTS, int)).group(0)
    assert not in_turn(make(num_steps=2).parts, group)  # some of its places may be empty


def test_size_and_client_are_enough_to_look_at():
    """Catches rows lost or read twice where the population does not count them, and ids past the last client."""
    mine, built = own(), p.ragged()
    np.testing.assert_array_equal(sizes_of(mine), built.sizes)
    jax.tree.map(np.testing.assert_array_equal, population.pooled(mine), population.pooled(built))
    halves = [population.grouped(x, np.arange(x.size) % 2) for x in (mine, built)]
    jax.tree.map(np.testing.assert_array_equal, halves[0].sizes, halves[1].sizes)
    jax.tree.map(np.testing.assert_array_equal, halves[0].group(1).sizes, halves[1].group(1).sizes)
    jax.tree.map(np.testing.assert_array_equal, *(population.pooled(x) for x in halves))
    data = population.digits(num_clients=5)
    about = [describe(data._replace(train=x, task="regression")) for x in (mine, built)]
    assert about[0] == about[1]


class Named(NamedTuple):
    size: int
    x: jax.Array

    def client(self, id):
        return ClientData({"x": self.x}, jnp.ones(3, bool))


class Plain:
    size = 3

    def client(self, id):
        return ClientData({"x": jnp.ones((3, 1))}, jnp.ones(3, bool))


def of(client, size=3, rows=None):
    """A population whose client is this function's result."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Other:
        rows: jax.Array
        size: int = dataclasses.field(metadata={"static": True})

        def client(self, id):
            return client(self.rows)

    return Other(jnp.ones((3, 2)) if rows is None else rows, size)


MASK = jnp.ones(3, bool)
WRONG = {
    "unregistered": (Plain(), TypeError, "population: expected a pytree dataclass, got 'Plain'. Write @jax.tree_util."),
    "size that is a leaf": (Named(3, jnp.ones(3)), TypeError, "population.size: expected a static integer"),
    "size that is a float": (of(lambda x: ClientData(x, MASK), 3.0), TypeError, "population.size: expected an integer"),
    "nobody": (of(lambda x: ClientData(x, MASK), 0), ValueError, "population.size: expected an integer in"),
    "text": (of(lambda x: ClientData(x, MASK), rows=np.array(["a"])), TypeError, "population.rows: expected an array"),
    "complex": (of(lambda x: ClientData(x * 1j, MASK)), TypeError, "of bool, integer or float, got 'complex64'"),
    "a tuple": (of(lambda x: (x, MASK)), TypeError, "population.client: expected ClientData(examples"),
    "a float mask": (of(lambda x: ClientData(x, jnp.ones(3))), TypeError, "population.client: expected ClientData("),
    "no rows": (of(lambda x: ClientData({}, MASK)), ValueError, "population.client: expected leaves of 3 rows"),
    "other rows": (of(lambda x: ClientData(x[:2], MASK)), ValueError, "leaves of 3 rows like the mask, got [(2, 2)]"),
    "a data set": (population.quadratics(), TypeError, "population: expected a Population, got 'FederatedData'"),
}


@pytest.mark.parametrize(("people", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_no_population_is_refused(people, error, words):
    """Catches JAX's own error message, or a wrong broadcast, where a user's population breaks the protocol."""
    with pytest.raises(error) as caught:
        run(KEY, make(num_steps=1), START, people, 1)
    assert words in str(caught.value)


def test_defaults_of_cheap_reads():
    """Catches size classes or a request to a storage that nobody stated, and a class without `count`."""
    people = own(Counting)
    ids = jnp.arange(3)
    assert people.capacities == () and people.capped(1) is people and people.announce(ids) is ids
    check_population(people)

    class Forgetful(Own, CheapReads):
        pass

    with pytest.raises(TypeError, match=r"abstract method .*count"):
        own(Forgetful)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Announcing(Counting):
    """A population whose storage is asked to read ahead, which shows in the ids."""

    def announce(self, ids):
        return ids + 1


@pytest.mark.default_rows("Own", "Announcing")
@pytest.mark.parametrize("inner", [Own, Counting, Announcing])
def test_wrappers_ask_the_storage_and_count(inner):
    """Catches a wrapper that reads nothing ahead, and one that needs more than `size` and `client`."""
    people = own(inner)
    data = population.synthetic_images(num_clients=4, examples_per_client=10)._replace(train=people)
    split = population.with_local_test(data)
    change = jax.tree_util.Partial(lambda key, data: data.examples)
    wrappers = [ScaledBytes(people), split.train, split.local_test, poisoned(data, change, "", clients=[1]).train]
    announced_ids = [1, 2, 3] if inner is Announcing else [0, 1, 2]
    for wrapper in wrappers:
        assert wrapper.announce(jnp.arange(3)).tolist() == announced_ids
        assert int(wrapper.count(2)) == int(wrapper.client(2).mask.sum())
        assert wrapper.capacities == () and wrapper.capped(1).size == people.size


# All members of each protocol, as functions of a population that does not inherit from it.
MEMBERS = {
    CheapReads: {
        "count": lambda self, id: self.mask[id].sum(),
        "capacities": (),
        "capped": lambda self, rows: self,
        "announce": lambda self, ids: ids,
    },
    Groups: {"group": lambda self, id: self, "num_members": None},
    Subpopulation: {
        "has_empty_places": False,
        "there": lambda self, ids: ids >= 0,
        "place": lambda self, ids: ids,
        "own_ids": lambda self, places: places,
    },
}
ONE_MEMBER = [(protocol, name) for protocol, members in MEMBERS.items() for name in members]


def with_members(members, *bases):
    """A population of the class `Other` with these members besides `size` and `client`."""
    kind = type("Other", (Own, *bases), dict(members))
    return own(jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(kind)))


def group_of(members):
    """A population of groups that have these members besides `size` and `client`."""
    group = with_members(members)
    return with_members({"group": lambda self, id: group, "num_members": None})


@pytest.mark.parametrize("protocol", MEMBERS)
def test_all_of_a_protocol_is_accepted(protocol):
    """Catches a class that has to inherit, members that this table lacks, and a protocol that takes in another one."""
    names = {*vars(protocol), *inspect.get_annotations(protocol)}
    assert {name for name in names if not name.startswith("_")} == MEMBERS[protocol].keys()
    members = dict(MEMBERS[protocol])
    if protocol is Groups:
        members["group"] = lambda self, id: own()
    people = with_members(members)
    check_population(people)
    assert [isinstance(people, kind) for kind in MEMBERS] == [kind is protocol for kind in MEMBERS]


@pytest.mark.parametrize(("protocol", "name"), ONE_MEMBER)
def test_a_part_of_a_protocol_is_refused(protocol, name):
    """Catches members that would not be used, where one member is missing and where all others are.

    Python 3.11 and 3.12 look members up in two ways, so a property without a value, a member that only `__getattr__`
    finds and a method that is None are missing in both.
    """
    rest = {other: member for other, member in MEMBERS[protocol].items() if other != name}
    alone = {name: MEMBERS[protocol][name]}

    def found_by_getattr(self, attribute):
        if attribute == name:
            return MEMBERS[protocol][name]
        raise AttributeError(attribute)

    unable = {name: property(lambda self: self.nothing)}
    cases = [(rest, name), (alone, ", ".join(sorted(rest))), (rest | unable, name), (unable, "")]
    cases += [(rest | {"__getattr__": found_by_getattr}, name), ({"__getattr__": found_by_getattr}, "")]
    if callable(MEMBERS[protocol][name]):
        cases.append((rest | {name: None}, name))
    for members, missing in cases:
        with pytest.raises(TypeError) as caught:
            run(KEY, make(num_steps=1), START, with_members(members), 1)
        words = f"population: expected all members of types.{protocol.__name__} or none, got 'Other without {missing}"
        assert str(caught.value).startswith(words), str(caught.value)
        assert f"inherit from fedjax_sim.types.{protocol.__name__}" in str(caught.value)


@pytest.mark.parametrize(("protocol", "name"), ONE_MEMBER)
def test_a_group_with_a_part_of_a_protocol_is_refused(protocol, name):
    """Catches empty places of a group that would be clients, also in groups of groups."""
    alone = {name: MEMBERS[protocol][name]}
    with refused("population.group", rule=f"types.{protocol.__name__} ", kind=InvalidType):
        check_population(group_of(alone))
    outer = with_members({"group": lambda self, id: group_of(alone), "num_members": None})
    with refused("population.group.group", rule="all members", kind=InvalidType):
        check_population(outer)


def test_what_is_no_group_is_refused():
    """Catches an error of JAX's inside of a round, where `group` gives no population."""
    with refused("population.group", value="int", kind=InvalidType):
        check_population(with_members({"group": lambda self, id: 3, "num_members": None}))


def test_size_classes_need_a_method():
    """Catches size classes beside the default `capped`, which returns all rows."""
    with refused("population.capped", rule="method of its own", kind=InvalidType):
        check_population(with_members({"count": Counting.count, "capacities": (2, 4)}, CheapReads))


def test_a_class_that_inherits_and_forgets_a_field_is_refused():
    """Catches a field that a protocol cannot ask for: since Python 3.12 `isinstance` does not look at it."""
    places = {name: member for name, member in MEMBERS[Subpopulation].items() if name != "has_empty_places"}
    with pytest.raises(TypeError, match="'Other without has_empty_places'"):
        check_population(with_members(places, Subpopulation))


def built_in(folder):
    """One population of each class, and the protocols that it offers."""
    rows = {"x": np.zeros((4, 1), np.uint8), "y": np.array([0, 1, 0, 1])}
    population.write_store(folder / "store", rows, [0, 1, 4])
    stored = population.stored(rows, [0, 1, 4])
    data = population.synthetic_images(num_clients=4, examples_per_client=10)
    groups = population.grouped(data.train, [0, 0, 1, 1])
    cheap_group = {CheapReads, Subpopulation}
    table = [
        (stored, {CheapReads}),
        (population.indexed(rows, (np.arange(4), np.array([0, 1, 4]))), {CheapReads}),
        (population.quadratics().train, {CheapReads}),
        (p.ragged(), {CheapReads}),
        (population.host_store(folder / "store"), {CheapReads}),
        (ScaledBytes(stored), {CheapReads}),
        (population.with_private_labels(data, epsilon=1.0).train, {CheapReads}),
        (population.random_labels(data, clients=[1]).train, {CheapReads}),
        (population.with_permuted_labels(data).train, {CheapReads}),
        (population.without_clients(stored, [0]), {CheapReads}),
        (population.with_local_test(data).train, {CheapReads}),
        (population.with_local_test(data._replace(train=own())).local_test, {CheapReads}),
        (groups, {Groups}),
        (groups.group(0), cheap_group),
        (population.grouped(own(), np.arange(p.NUM_CLIENTS) % 2).group(0), {Subpopulation}),
        (population.grouped(groups, [0, 0]), {Groups}),
        (population.grouped(groups, [0, 0]).group(0), {Groups, Subpopulation}),
        (population.grouped(groups, [0, 0]).group(0).group(0), cheap_group),
    ]
    return [(people, [kind for kind in MEMBERS if kind in kinds]) for people, kinds in table]


def classes_of_populations():
    """Every class in the subpackage `population` whose instances have clients."""
    found = set()
    for module in pkgutil.walk_packages(population.__path__, "fedjax_sim.population."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and hasattr(kind, "client") and dataclasses.is_dataclass(kind):
                found.add(kind)
    return found


def test_both_lookups_agree_on_built_in_populations(tmp_path):
    """Python 3.11 computes a protocol's members, Python 3.12 does not: both find all or none, and what is listed.

    Catches a property that raises AttributeError, a wrapper that loses a member, and a population without a row here.
    """
    table = built_in(tmp_path)
    assert {type(people) for people, _ in table} == classes_of_populations() >= {CountedGroup, GroupOfGroups}
    for people, offered in table:
        assert isinstance(people, Population)
        for protocol, members in MEMBERS.items():
            name = f"{type(people).__name__}, {protocol.__name__}"
            lookups = {hasattr(people, member) for member in members}
            lookups |= {inspect.getattr_static(people, member, MISSING) is not MISSING for member in members}
            assert lookups == {protocol in offered} == {isinstance(people, protocol)}, name
        leaves, structure = jax.tree.flatten(people)
        again = jax.tree.unflatten(structure, leaves)
        assert [isinstance(again, protocol) for protocol in offered] == [True] * len(offered)
        check_population(people)
