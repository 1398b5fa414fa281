"""Weights that are asked for are looked at, or refused: by every recipe, beside every aggregator."""

from __future__ import annotations

import inspect
from functools import partial

import optax
import pytest

from fedjax_sim import aggregation, algorithms, client, sampling, server, transform
from fedjax_sim.algorithms import as_client_update, federated
from fedjax_sim.config.signatures import public_names
from tests.laws import cases, problems as p
from tests.refusals import refused

INTEGERS = transform.quantize(4, range=2.0, integers=True)
RECIPES = ("fedadagrad", "fedadam", "fedavg", "fedavgm", "fedprox", "fednova", "fedyogi")
RECIPES += ("apfl", "ditto", "per_fedavg", "pfedme")
# These take layers of a model, or the names of its parts, and not a loss of all its numbers.
OF_A_MODEL = {"fedbabu", "feddf", "fedem", "fedper", "fedrep", "flexlora", "heterofl", "splitfed", "vertical"}
INSIDE = {"hierarchical_fedavg"}  # its weighting is of clients in edges, its aggregator of edges
TOTALS = ("feddyn", "scaffold")  # these hold a sum over the population, whose weight they are told
OWN = (*TOTALS, "clustered_by_updates", "fedexp", "ifca", "mime", "mime_lite")  # these have an aggregator of their own


def takes_weighting() -> dict[str, set[str]]:
    """Recipes around a server with an option for the weighting, and the names of their arguments."""
    functions = {name: getattr(algorithms, name) for name in public_names("fedjax_sim.algorithms")}
    signatures = {name: inspect.signature(f).parameters for name, f in functions.items() if inspect.isfunction(f)}
    return {name: set(found) for name, found in signatures.items() if {"weighting", "sampler"} <= found.keys()}


def test_one_default():
    """By examples, if the aggregator takes weights; but a number of examples is no public number beside DP-SGD.

    Catches a recipe with a default of its own, and one that no law below meets.
    """
    recipes = takes_weighting()
    default = {name: inspect.signature(getattr(algorithms, name)).parameters["weighting"].default for name in recipes}
    assert default == dict.fromkeys(recipes) | {"record_private_fedavg": "uniform"}
    with_rule = {name for name, arguments in recipes.items() if "aggregator" in arguments} - OF_A_MODEL - INSIDE
    assert with_rule == {*RECIPES, "record_private_fedavg"}
    assert recipes.keys() - with_rule - OF_A_MODEL - INSIDE == set(OWN)


@pytest.mark.parametrize("name", [*RECIPES, *OWN])
def test_examples_count_unless_told(name):
    """Catches clients of 1, 50 and 7 rows that count alike although nobody asked for that."""
    total = {"total_weight": cases.TOTAL} if name in TOTALS else {}
    star = built(name, **total).parts
    work = star.client.facts
    assert star.aggregator.facts.weighted and not work.uniform_weights and not work.needs_weights
    assert built(name, weighting="uniform").parts.client.facts.uniform_weights
    if name in TOTALS:
        with refused("total_weight", value=None, rule="all clients'"):
            built(name)


def built(name: str, **options):
    """The recipe with these options."""
    recipe = getattr(algorithms, name)
    sampler = sampling.full(p.NUM_CLIENTS) if name == "clustered_by_updates" else cases.SAMPLER
    given = {
        "loss_fn": p.linear_loss, "sampler": sampler, "optimizer": optax.sgd(p.RATE), "num_steps": 1,
        "clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 1, "num_examples": p.ROWS, "group_size": 3,
    }  # fmt: skip
    wanted = inspect.signature(recipe).parameters
    return recipe(**{key: value for key, value in given.items() if key in wanted} | options)


@pytest.mark.parametrize("name", [*RECIPES, "record_private_fedavg"])
def test_weights_that_nobody_takes_are_refused(name):
    """Beside every aggregator that takes none; without the option it builds, and clients count alike.

    Catches clients of 1, 50 and 7 rows that count alike where their examples were asked for.
    """
    alike = aggregation.mean(weighting="uniform")
    told = "aggregator: expected one that takes weights, for weighting = 'examples' was asked for, got"
    with pytest.raises(ValueError, match=told):
        built(name, weighting="examples", aggregator=alike)
    for options in ({}, {"weighting": "uniform"}):
        assert not built(name, aggregator=alike, **options).parts.aggregator.facts.weighted
    assert built(name, weighting="examples").parts.client.facts.needs_weights


def test_weights_that_a_part_of_an_update_does_not_take():
    """Catches the uniform mean of the model beside steps that are weighted, where examples were asked for."""
    rule = aggregation.by_part({"direction": aggregation.mean(weighting="uniform"), "steps": aggregation.mean()})
    build = partial(built, "fednova", aggregator=rule)
    with refused("aggregator", value="one that takes none for some parts of an update"):
        build(weighting="examples")
    assert build(weighting="uniform").parts.aggregator.facts.partly_weighted


@pytest.mark.parametrize("name", sorted(cases.CASES["aggregation"]))
def test_every_aggregator_looks_at_weights_or_refuses_them(name):
    """By its own fact. Catches an aggregator that is missed, and an edge whose weight nobody above looks at."""
    rule = cases.CASES["aggregation"][name]()
    parts = {"transform": INTEGERS if rule.facts.modulus else transform.identity()}
    parts |= {"aggregator": rule.stating(design=None)}
    parts |= {"server": server.optimizer(optax.sgd(1.0)), "mesh": None}
    work = client.local_sgd(p.linear_loss, optax.sgd(p.RATE), client.work(num_steps=1, weighting="examples"))
    inside = algorithms.fedavg(p.linear_loss, sampling.full(2), optax.sgd(p.RATE), num_steps=1).parts
    for made in (work, as_client_update(inside, weighting="examples")):
        if rule.facts.weighted and not rule.facts.partly_weighted:
            assert federated(cases.SAMPLER, made, **parts).parts.client.facts.needs_weights
            continue
        with refused("aggregator", rule="takes weights"):
            federated(cases.SAMPLER, made, **parts)
