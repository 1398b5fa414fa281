"""Options that many algorithms share are those of `federated` and of `client.work`, with the same defaults.

tests/config/test_one_word.py compares these defaults with those of `federated` and of `client.work` themselves.
"""

from __future__ import annotations

import inspect
from typing import get_args, get_type_hints

from fedjax_sim import algorithms, client
from fedjax_sim.algorithms import federated
from fedjax_sim.client import LocalOptions
from fedjax_sim.config.signatures import public_names
from fedjax_sim.round.options import (
    AveragingOptions,
    BroadcastOptions,
    ExecutionOptions,
    FederatedOptions,
    MessageOptions,
    RecipeOptions,
)
from fedjax_sim.validate import Default

# (recipe, option) -> its default there, where it is another one than in `RecipeOptions`.
OTHER_DEFAULTS = {
    ("fedbuff", "weighting"): "uniform",
    ("fine_tuned", "num_steps"): 5,  # of the training before a client is judged
    ("record_private_fedavg", "weighting"): "uniform",
    # Epsilon follows from both, so the user states them.
    ("record_private_fedavg", "batch_size"): inspect.Parameter.empty,
    ("record_private_fedavg", "num_steps"): inspect.Parameter.empty,
}


def defaults(options: type) -> dict:
    """The default of each option of a TypedDict."""
    hints = get_type_hints(options, include_extras=True)
    return {name: next(x.value for x in get_args(kind)[1:] if isinstance(x, Default)) for name, kind in hints.items()}


def declared(function) -> dict:
    """The defaults of a function's own keyword arguments, by name."""
    return {name: x.default for name, x in inspect.signature(function).parameters.items()}


def test_recipes_share_their_defaults():
    """Catches a recipe that drops where `federated` stops, or that takes one device where `federated` takes all."""
    shared = defaults(RecipeOptions)
    public = {name: getattr(algorithms, name) for name in public_names("fedjax_sim.algorithms")}
    recipes = {name: declared(function) for name, function in public.items() if inspect.isfunction(function)}
    assert sum("nonfinite" in own for own in recipes.values()) >= 30
    others = {
        (recipe, name): own[name]
        for recipe, own in recipes.items()
        for name in own.keys() & shared.keys()
        if own[name] != shared[name]
    }
    assert others == OTHER_DEFAULTS


def test_lists_are_complete():
    """Catches an option of `federated` or of `client.work` that no recipe would take."""
    # All that `federated` takes besides its parts.
    assert set(declared(federated)) - set(defaults(FederatedOptions)) == {"sampler", "client", "aggregator", "server"}
    assert set(declared(client.work)) == set(defaults(LocalOptions))


def test_each_list_adds_to_the_one_below():
    """Catches an option that gets lost between two lists, and a transform where messages pass through none."""
    lists = {x.__name__: set(defaults(x)) for x in (ExecutionOptions, MessageOptions, BroadcastOptions)}
    assert lists["MessageOptions"] - lists["ExecutionOptions"] == {"transform"}
    assert lists["BroadcastOptions"] - lists["ExecutionOptions"] == {"downlink"}
    assert set(defaults(FederatedOptions)) == lists["MessageOptions"] | lists["BroadcastOptions"]
    assert set(defaults(AveragingOptions)) - set(defaults(RecipeOptions)) == {"aggregator"}
