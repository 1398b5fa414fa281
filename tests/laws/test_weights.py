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


def takes_weighting() -> dict[str, set[str]]:
    """Recipes around a server with an option for the weighting, and the names of their arguments."""
    functions = {name: getattr(algorithms, name) for name in public_names("fedjax_sim.algorithms")}
    signatures = {name: inspect.signature(f).parameters for name, f in functions.items() if inspect.isfunction(f)}
    return {name: set(found) for name, found in signatures.items() if {"weighting", "sampler"} <= found.keys()}


def weighed(with_rule: bool) -> list[str]:
    """Those that `built` makes with these options alone, and that take any aggregator, or have one of their own."""
    recipes = takes_weighting()
    return [
        name
        for name in cases.named("algorithms", lambda row: row.weighed)
        if name in recipes and ("aggregator" in recipes[name]) == with_rule
    ]


def default_weighting(name: str) -> str | None:
    return inspect.signature(getattr(algorithms, name)).parameters["weighting"].default


@pytest.mark.every_row
def test_one_default():
    """By examples, if the aggregator takes weights; but a number of examples is no public number beside DP-SGD.

    Catches a recipe with a default of its own, and one whose name has no row.
    """
    recipes = takes_weighting()
    assert recipes.keys() <= cases.CASES["algorithms"].keys() and len(recipes) > 20
    for name in recipes:
        star = cases.CASES["algorithms"][name]().parts
        is_private = star is not None and star.client.facts.noise is not None
        assert default_weighting(name) == ("uniform" if is_private else None), name


BY_EXAMPLES = [name for name in weighed(True) + weighed(False) if default_weighting(name) is None]


@pytest.mark.parametrize("name", BY_EXAMPLES)
def test_examples_count_unless_told(name):
    """Catches clients of 1, 50 and 7 rows that count alike although nobody asked for that."""
    # These hold a sum over the population, whose weight they are told.
    holds_a_sum = "total_weight" in takes_weighting()[name]
    total = {"total_weight": cases.TOTAL} if holds_a_sum else {}
    star = built(name, **total).parts
    work = star.client.facts
    assert star.aggregator.facts.weighted and not work.uniform_weights and not work.needs_weights
    assert built(name, weighting="uniform").parts.client.facts.uniform_weights
    if holds_a_sum:
        with refused("total_weight", value=None, rule="all clients'"):
            built(name)


def built(name: str, **options):
    """The recipe with these options."""
    recipe = getattr(algorithms, name)
    sampler = sampling.full(p.NUM_CLIENTS) if cases.CASES["algorithms"][name].everybody else cases.SAMPLER
    given = {
        "loss_fn": p.linear_loss, "sampler": sampler, "optimizer": optax.sgd(p.RATE), "num_steps": 1,
        "clip_norm": 1.0, "noise_multiplier": 1.0, "batch_size": 1, "num_examples": p.ROWS, "group_size": 3,
    }  # fmt: skip
    wanted = inspect.signature(recipe).parameters
    return recipe(**{key: value for key, value in given.items() if key in wanted} | options)


@pytest.mark.parametrize("name", weighed(with_rule=True))
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
