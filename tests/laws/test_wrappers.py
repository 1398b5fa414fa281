"""Wrappers of a config's tables in any order: each pair works, or is refused in one form, with an order that works.

Parts are made and samplers traced; nothing is compiled or trained.
"""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from fedjax_sim.config import registry
from fedjax_sim.config.build import Builder
from fedjax_sim.config.document import ConfigError, load
from tests.laws import cases, laws

FORM = re.compile(r"[\w.\[\]]+: ([\w., ]+: )?expected \S.*, got .+\.( \S.*\.)?", re.DOTALL)


def of_rows(table: str, subpackage: str) -> dict[str, dict[str, str]]:
    """The options of the wrappers that have a row in `cases.py`, as their rows state them."""
    found = {}
    for name, row in cases.CASES[subpackage].items():
        if name in registry.wrappers(table):
            own = [setting.removeprefix(f"{table}.{name}.") for setting in row.config if f".{name}." in setting]
            found[name] = {key: value for key, _, value in (setting.partition("=") for setting in own)}
    return found


@functools.cache
def timed() -> set[str]:
    """Samplers of devices: they are a clock, or stand around one."""
    return {name for name, row in cases.CASES["sampling"].items() if row().devices is not None}


OPTIONS = {
    "data": {
        "backdoor": {"trigger": "{name='pixels', positions=[0, 1]}", "target": 1, "clients": [1]},
        "constrained": {"class_share": 0.5},
        "edge_case_backdoor": {"source": 1, "target": 2, "clients": [1]},
        "label_flip": {"clients": [1]},
        "label_offset": {"offset": 1.0, "clients": [1]},
        "random_labels": {"clients": [3]},
        "with_groups": {"num_groups": 2},
        "with_links": {"test_share": 0.2},
        "with_local_test": {"fraction": 0.3},
        "with_parties": {"num_parties": 2},
        "with_permuted_labels": {"num_clusters": 2},
        "with_private_labels": {"epsilon": 1.0},
        "with_public_preparation": {},
        "with_rotated_images": {"num_clusters": 2},
        "with_server_rows": {"examples": 20},
    },
    "model": {
        "ensemble": {"num_members": 2},
        "freeze": {"trained": "['output']"},
        "lora": {"rank": 2},
        "started_from": {"path": f"'{Path(__file__).parent / 'start.safetensors'}'"},
    },
    "sampler": of_rows("sampler", "sampling"),
    "aggregator": of_rows("aggregator", "aggregation")
    | {"corrupted": {"attack": "{name='sign_flip'}", "who": "{name='clients', ids=[3]}"}},
}
BASES = {
    "mlp": ("model", ["data.num_clients=8", "model.hidden=[2]"]),
    "digits": ("data", ["data.num_clients=8"]),
    "images": ("data", ["data.name=synthetic_images", "data.num_clients=8", "data.examples_per_client=10"]),
    "graph": ("data", ["data.name=karate_club"]),
    "numbers": ("data", ["data.name=mean_estimation", "data.num_clients=8"]),
    "full": ("sampler", ["sampler.name=full", "data.num_clients=8"]),
    "uniform": ("sampler", ["sampler.cohort_size=4", "data.num_clients=8"]),
    "median": ("aggregator", ["aggregator.name=median"]),
    "mean": ("aggregator", ["aggregator.name=fixed_mean", "aggregator.denominator=4.0"]),
    "integers": ("aggregator", ["aggregator.name=modular_sum", "aggregator.denominator=4.0"]),
}
SOME = {  # by default; all of them in the whole rows
    "mlp": tuple(OPTIONS["model"]),
    "digits": ("constrained", "label_flip", "with_groups"),
    "full": (
        "power_of_choice",
        "with_clock",
        "with_deadline",
        "with_distinct_clients",
        "with_dropout",
        "with_stragglers",
    ),
    "median": tuple(OPTIONS["aggregator"]),
    "integers": ("by_examples", "secure_sum"),
}
EDGES = ["algorithm.name=hierarchical_fedavg", "sampler.name=full"]


def settings(table, *names):
    """The wrappers of these names, in this order, as settings of the command line."""
    for name in names:
        options = OPTIONS[table][name]
        yield from (f"{table}.{name}.{key}={value}" for key, value in options.items())
        if not options:
            yield f"{table}.{name}={{}}"


def needing_devices(names):
    """The names with the clock, and the settings with devices, that such wrappers need."""
    if "with_clock" not in names:
        first = next((place for place, name in enumerate(names) if name in timed()), None)
        names = names if first is None else (*names[:first], "with_clock", *names[first:])
    return names, ["devices.name=cross_silo"] if "with_clock" in names else []


def built(table, base, names):
    """What a table makes with wrappers in this order; raises ConfigError."""
    names, devices = needing_devices(names)
    builder = Builder(load(None, [*base, *devices, *settings(table, *names)]))
    if table == "data":
        made = builder.data()
        builder.stop()
        for people in filter(None, (made.train, made.local_test)):
            jax.eval_shape(people.client, jax.ShapeDtypeStruct((), jnp.int32))
            assert people.sizes.shape == (people.size,)
    elif table == "model":
        made = builder.wrapped(table, input_shape=(64,), num_outputs=10)
        builder.stop()
        jax.eval_shape(made.init, jax.random.key(0))
    elif table == "sampler":
        made = builder.sampler(8)
        builder.stop()
    else:
        made = builder.wrapped(table, design=None, population_size=8, total_weight=lambda: 8.0)
        builder.stop()
    return made


def refused(table, base, names):
    """The problem that a table has with wrappers in this order; "" where they work."""
    try:
        built(table, base, names)
    except ConfigError as error:
        (problem,) = error.problems
        assert FORM.fullmatch(problem), problem
        return problem
    return ""


@pytest.mark.every_row
@pytest.mark.parametrize("table", sorted(set(registry.WRAPPED) - set(registry.CHAINS)))
def test_every_wrapper_has_a_row(table):
    """Catches a wrapper that no pair has."""
    assert OPTIONS[table].keys() == registry.wrappers(table).keys()


ROWS = [pytest.param(base, names, id=base) for base, names in SOME.items()] + [
    pytest.param(base, tuple(OPTIONS[BASES[base][0]]), id=f"{base} whole", marks=pytest.mark.full) for base in BASES
]


@pytest.mark.parametrize(("base", "names"), ROWS)
def test_any_two_wrappers(base, names):
    """Catches a pair that ends in a raw error, and a refusal whose reader has to guess which order works."""
    table, base = BASES[base]
    pairs = {pair: refused(table, base, pair) for pair in itertools.permutations(names, 2)}
    assert "" in pairs.values() and any(pairs.values())
    for pair, problem in pairs.items():
        order, turned = needing_devices(pair)[0], needing_devices(pair[::-1])[0]
        if problem and len(order) == len(turned) and not pairs[pair[::-1]]:
            assert "In this order they work: " in problem, (pair, problem)
            works = tuple(re.findall(r"\[\w+\.(\w+)\]", problem.rpartition("In this order they work: ")[2]))
            assert sorted(works) == sorted(order) and not refused(table, base, works), (pair, problem)


@pytest.mark.full
def test_any_two_samplers_draw():
    """Catches wrappers that contradict each other only when a cohort is drawn."""
    table, base = BASES["full"]
    for pair in itertools.permutations(OPTIONS[table], 2):
        if not refused(table, base, pair):
            sampler = built(table, base, pair)
            jax.eval_shape(lambda sampler=sampler: sampler.sample(jax.random.key(0), sampler.init()))


@pytest.mark.parametrize("name", cases.rows(sorted(OPTIONS["data"].keys() - {"with_groups"}), ["with_local_test"]))
def test_groups_go_around_all_others_in_a_hierarchy(name):
    """Catches edges whose clients are lost to a wrapper behind them: `run edges --set data.with_local_test...`."""
    table, base = BASES["digits"]
    if refused(table, base, (name, "with_groups")):  # not of these data at all
        assert refused(table, [*base, *EDGES], ("with_groups", name))
        return
    inside, behind = (built(table, [*base, *EDGES], pair) for pair in ((name, "with_groups"), ("with_groups", name)))
    assert hasattr(behind.train, "group")
    laws.check_equal_bits(inside.train, behind.train, name)
    laws.check_equal_bits(inside.local_test, behind.local_test, name)
