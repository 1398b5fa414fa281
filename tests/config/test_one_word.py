"""An algorithm around a server is changed by one word of a config, and nothing else changes with it."""

from __future__ import annotations

import inspect
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest

from fedjax_sim import algorithms, client, round
from fedjax_sim.algorithms.asynchronous.asynchronous import BufferOptions
from fedjax_sim.algorithms.gossip.state import GossipOptions, nodes_of
from fedjax_sim.client import optimizers
from fedjax_sim.config import registry, signatures
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.config.signatures import public_names
from fedjax_sim.round.options import FederatedOptions
from fedjax_sim.validate import Default
from tests.config.test_document import algorithm_of
from tests.laws import cases
from tests.refusals import refused

SMALL = ["data.num_clients=40", "model.hidden=[8]", "sampler.cohort_size=8", "run.devices=1"]
STARS = [
    name
    for name, part in registry.parts_of_table("algorithm").items()
    if {"sampler", "optimizer", "transform"} <= part.parts.keys() and "loss_fn" in part.values
]
UNSEEN = {  # optional arguments that TOML cannot express, of what is no part; parts have them in their rows
    "client.optimizers": {},
    "algorithms": {
        "split_loss": {"link", "measure"},
        "vertical_loss": {"link"},
        "vertical_transcript": {"key", "link"},
    },
}


def without(name: str) -> list[str]:
    """The quickstart's settings that an algorithm does not have: a client of FedSGD takes no steps."""
    options = registry.parts_of_table("algorithm")[name].options
    return [f"algorithm.{option}" for option in ("num_steps", "batch_size") if option not in options]


def test_the_algorithms_around_a_server():
    """Catches a law over fewer algorithms than there are."""
    assert {"fedavg", "fedadam", "fedexp", "fednova", "fedprox", "fedsgd", "mime", "scaffold", "feddyn"} <= set(STARS)
    assert [name for name in STARS if without(name)] == ["fedsgd"]


@pytest.mark.parametrize("name", STARS)
def test_the_same_tables(name):
    """Fault: an algorithm that refuses `[client_optimizer]`, has a weighting of its own, or another default rate."""
    row = cases.CASES["algorithms"][name]
    settings = [*SMALL, f"algorithm.name={name}", "client_optimizer.learning_rate=0.25", *row.config]
    config = load("quickstart", settings, without(name))
    tables = config.resolved()
    assert tables["client_optimizer"]["learning_rate"] == 0.25
    star = algorithm_of(config)[0].parts
    is_private = star.client.facts.noise is not None  # a number of examples is no public number
    assert tables["algorithm"].get("weighting") in (None, "uniform" if is_private else None)
    assert star.client.facts.uniform_weights == row.counts_alike


@pytest.mark.parametrize("name", STARS)
def test_plain_sgd_or_refused_by_name(name):
    """Fault: an algorithm that holds for plain SGD alone and trains with Adam, or ignores it."""
    row = cases.CASES["algorithms"][name]
    settings = [*SMALL, f"algorithm.name={name}", "client_optimizer={name='adam'}", *row.config]
    config = load("quickstart", settings, without(name))
    if row.plain_sgd:
        with pytest.raises(ConfigError, match=f"expected plain SGD for {name}, got"):
            build(config)
    else:
        algorithm_of(config)


@pytest.mark.full
def test_a_first_round_is_fedavg():
    """SCAFFOLD with zero control variates, FedNova with equal work and MimeLite with SGD are FedAvg in round one, at
    the same rate and with the same weights. Fault: other ones than FedAvg has under the same file."""
    models = {}
    for name, more in {"fedavg": [], "scaffold": [], "fednova": [], "mime_lite": ["algorithm.rule=sgd"]}.items():
        made = build(load("quickstart", [*SMALL, f"algorithm.name={name}", *more]))
        state = made.algorithm.init(made.key, made.params, made.data.train)
        state, _ = jax.jit(made.algorithm.step)(made.key, state, made.data.train)
        models[name] = np.concatenate([np.ravel(x) for x in jax.tree.leaves(made.algorithm.params(state))])
    moved = np.abs(models["fedavg"] - np.concatenate([np.ravel(x) for x in jax.tree.leaves(made.params)])).max()
    for name, model in models.items():
        np.testing.assert_allclose(model, models["fedavg"], atol=1e-5 * moved, err_msg=name)


@pytest.mark.parametrize(
    "options, function",
    [
        (client.LocalOptions, client.work),
        (FederatedOptions, round.federated),
        (BufferOptions, algorithms.asynchronous),
        (GossipOptions, nodes_of),
    ],
)
def test_shared_options_are_those_of_their_function(options, function):
    """Fault: an option whose default in a recipe's signature is another one than where it is used."""
    takes = inspect.signature(function).parameters
    shared = get_type_hints(options, include_extras=True)
    own = shared.keys() & takes.keys()
    assert own == shared.keys() or function is nodes_of  # which passes the others on
    for name in own:
        (default,) = (x.value for x in get_args(shared[name]) if isinstance(x, Default))
        assert default == takes[name].default, name


def test_every_algorithm_refuses_another_word_for_nonfinite():
    """Fault: a misspelt "error" that is taken for "drop", where nothing checks it."""
    factories = {name: getattr(algorithms, name) for name in public_names("fedjax_sim.algorithms")}
    taking = [
        f for f in factories.values() if "nonfinite" in getattr(f, "__signature__", inspect.Signature()).parameters
    ]
    assert len(taking) >= 30
    for factory in taking:
        required = [name for name, x in factory.__signature__.parameters.items() if x.default is x.empty]
        needed = {name: "binary" if name == "task" else 1 for name in required}
        with refused("nonfinite", value="eror"):
            factory(**needed, nonfinite="eror")


@pytest.mark.every_row
@pytest.mark.parametrize("subpackage, module", [("algorithms", algorithms), ("client.optimizers", optimizers)])
def test_a_config_sees_every_shared_option(subpackage, module):
    """What is read from the source is what Python shows. Fault: an option of a TypedDict that is written in another
    form, and that no config could set."""
    unseen = {}
    for name, part in signatures.parts(subpackage).items():
        if "not a function" not in part.others:
            told = {*part.options, *part.parts, *part.values, *part.others}
            unseen[name] = inspect.signature(getattr(module, name)).parameters.keys() - told
    rows = {name: set(row.python_only) for name, row in cases.CASES.get(subpackage, {}).items() if row.python_only}
    assert {name: words for name, words in unseen.items() if words} == UNSEEN[subpackage] | rows
