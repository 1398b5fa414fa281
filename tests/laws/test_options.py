"""Every option of every recipe changes what a run computes or says, or is refused: none is accepted in silence."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, aggregation, algorithms, network, sampling, transform
from fedjax_sim.server import staleness
from tests.laws import cases, problems as p

pytestmark = pytest.mark.optimised(False)
KEY, ROUNDS = jax.random.key(0), 4
HOW = {  # how a round is computed; that it changes no bit, or only what a bad message does, are laws of their own
    "mesh": "test_devices.py",
    "nonfinite": "test_nonfinite.py",
    "plan": "test_invariance.py",
    "gradients": "tests/oracles: one result, computed in two ways",
    # What the data are called and measured in changes an answer's words: tests/algorithms/analytics/test_own_units.py.
    "feature_names": "words",
    "label_names": "words",
    "units": "words",
    "microbatch_size": "tests/oracles: one result, computed in parts",
}
HALVED = transform.stateless(lambda key, update: jax.tree.map(lambda x: x / 2, update))
DEVICES = network.heterogeneous(p.NUM_CLIENTS, speed=100.0, bandwidth_down=10.0, bandwidth_up=5.0)
OTHER = {  # another value of options that several recipes share than the default and than the rows' own
    "adaptivity": 0.1,
    "aggregator": aggregation.fixed_mean(3.0, weighting="uniform"),
    "arrivals_per_step": 2,
    "attack": adversary.sign_flip(),
    "backward": HALVED,
    "barrier": "local",
    "batch_size": 1,
    "bits_per_round": 1,
    "buffer_size": 4,
    "client_layers": 0,
    "client_norm": 2.0,
    "clients_per_tier": 3,
    "cloud_every": 2,
    "coefficient": 0.3,
    "column": 1,
    "concurrency": 7,
    "consensus_step": 0.25,
    "cut_edges": "drop",
    "decorrelation": 0.5,
    "devices": DEVICES,
    "distill_batch_size": 2,
    "distill_optimizer": optax.sgd(0.02),
    "downlink": transform.quantize(4),
    "edge_aggregator": aggregation.fixed_mean(2.0, weighting="uniform"),
    "edge_devices": DEVICES,
    "edge_optimizer": optax.sgd(0.25),
    "edge_rounds": 3,
    "edge_sampler": sampling.uniform(5, 2),
    "edge_transform": transform.quantize(4),
    "edge_weighting": "uniform",
    "edges": [[-1.0, 0.5, 1.0]] * p.WIDTH,
    "embedding": "body",
    "epsilon": 0.01,
    "exponent": 2.0,
    "first_decay": 0.5,
    "form": "adapt_then_combine",
    "forward": HALVED,
    "graph_at": "server",
    "group_size": 4,
    "hazard": network.memoryless(1.0),
    "handover": "peer",
    "high": 4.0,
    "inner_learning_rate": 0.05,
    "inner_steps": 2,
    "input_shape": (4,),
    "learning_rate": 0.07,
    "link": network.link(forward=transform.quantize(2)),
    "least_gain": 0.2,
    "least_share": 0.5,
    "least_variance": 0.7,
    "links": [network.link(forward=transform.quantize(2))] * 3,
    "low": -4.0,
    "max_clusters": 1,
    "max_depth": 1,
    "max_staleness": 0,
    "mean_norm": 0.01,
    "mixing_rate": 0.3,
    "momentum": 0.4,
    "num_bins": 5,
    "num_byzantine": 2,
    "num_categories": 3,
    "num_clusters": 3,
    "num_components": 3,
    "num_epochs": 1,
    "num_examples": 5,
    "num_prefixes": 1,
    "num_regions": 2,
    "num_steps": 1,
    "num_symbols": 5,
    "num_tiers": 2,
    "num_trees": 40,
    "objective": "taylor",
    "option": 1,
    "order": "first",
    "own": ["shared"],
    "own_optimizer": optax.sgd(0.03),
    "own_steps": 3,
    "penalty": 0.5,
    "probabilities": (0.1, 0.4, 0.9),
    "radius": 0.1,
    "refill": "same",
    "region_column": 1,
    "residual_bound": 0.2,
    "rows": "one",
    "rule": "adam",
    "sampling": "fixed",
    "second_decay": 0.5,
    "server_copies": 2,
    "server_learning_rate": 0.45,
    "server_optimizer": optax.sgd(0.45),
    "server_share": 0.45,
    "share": 0.3,
    "share_learning_rate": 0.5,
    "spread": 0.5,
    "staleness": staleness.polynomial(3.0),
    "start_seed": 1,
    "step_size": 0.07,
    "symbols": lambda examples: 7 - cases.signs(examples),
    "temperature": 3.0,
    "threshold": 0.4,
    "tilt": -1.0,
    "total_weight": 7.0,
    "transform": transform.quantize(4),
    "solver_steps": 1,
    "weight_decay": 0.1,
    "weight_learning_rate": 0.02,
    "weighting": "uniform",
    "who": adversary.clients([5]),
    "widths": [0.5],
}
RECIPES = cases.named("algorithms", lambda row: row.changes_rounds)


def recipe_of(name: str) -> Any:
    return getattr(algorithms, name)


def options_of(name: str) -> list[str]:
    """Options that have a default, less those of how a round is computed."""
    parameters = inspect.signature(recipe_of(name)).parameters.values()
    options = [x.name for x in parameters if x.default is not x.empty and x.name not in HOW]
    return [x for x in options if x not in cases.CASES["algorithms"][name].idle_options]


@contextlib.contextmanager
def given(recipe: Any, **options):
    """Calls of the recipe, wherever a row makes them, get these options."""
    (cell,) = (x for x in recipe.__closure__ if x.cell_contents is recipe.__wrapped__)
    takes = inspect.signature(recipe)

    @functools.wraps(recipe.__wrapped__)
    def with_options(*args, **own):
        return recipe.__wrapped__(**takes.bind(*args, **own).arguments | options)

    cell.cell_contents = with_options
    try:
        yield
    finally:
        cell.cell_contents = recipe.__wrapped__


def another(name: str, option: str) -> Any:
    """Another value of an option: the row's, that of all recipes, or for a truth value the other one."""
    values = OTHER | cases.CASES["algorithms"][name].other
    if option in values:
        return values[option]
    default = inspect.signature(recipe_of(name)).parameters[option].default
    told = f"state other={{{option!r}: another value}} in the row {name!r} of tests/laws/cases.py"
    assert isinstance(default, bool), told
    return not default


def told(name: str, **options) -> dict[str, np.ndarray] | None:
    """Everything that a few rounds of a row compute and say; None where these options are refused."""
    try:
        with given(recipe_of(name), **options):
            made = cases.CASES["algorithms"][name]()
        people = p.ragged()

        @jax.jit
        def program(people):
            state = made.init(KEY, jnp.array(p.START), people)
            keys = jax.random.split(KEY, ROUNDS)
            state, info = jax.lax.scan(lambda state, key: made.step(key, state, people), state, keys)
            return {"params": made.params(state), "info": info}

        found = program(people)
    except (ValueError, TypeError) as error:
        assert ": expected " in str(error) and " got " in str(error), error
        return None
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(found)}


def differ(one: dict, other: dict) -> bool:
    return one.keys() != other.keys() or any(not np.array_equal(one[x], other[x], equal_nan=True) for x in one)


@pytest.mark.parametrize("name", cases.rows(RECIPES, ("dgd",)))
def test_every_option_changes_something_or_is_refused(name):
    """Catches weights that nobody looks at, numbers of an optimiser that another rule does not read, a size of groups
    beside a sampler that knows another."""
    base, silent = told(name), []
    assert base is not None
    for option in options_of(name):
        beside = cases.CASES["algorithms"][name].beside.get(option, {})
        found = told(name, **beside, **{option: another(name, option)})
        if found is not None and not differ(told(name, **beside) if beside else base, found):
            silent.append(option)
    assert not silent


@pytest.mark.full
@pytest.mark.parametrize("aggregator", sorted(cases.CASES["aggregation"]))
def test_beside_every_aggregator(aggregator):
    """The options of FedAvg that say what clients send and how they count. Catches an aggregator that switches off one
    of them."""
    rule = cases.CASES["aggregation"][aggregator]()
    sends = {"transform": transform.quantize(4, range=2.0, integers=True)} if rule.facts.modulus else {}
    options = {"aggregator": rule, "weighting": "uniform"} | sends
    base = told("fedavg", **options)
    assert base is not None
    for option in ("batch_size", "downlink", "num_steps", "server_optimizer", "shuffle", "transform"):
        found = told("fedavg", **options | {option: another("fedavg", option)})
        assert found is None or differ(base, found), option
    weighted = told("fedavg", **options | {"weighting": "examples"})
    assert weighted is None or differ(base, weighted)
