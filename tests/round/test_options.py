"""Options that many algorithms share are those of `federated` and of `client.work`, with the same defaults."""

from __future__ import annotations

import inspect
from typing import get_args, get_type_hints

from fedjax_sim import client
from fedjax_sim.algorithms import federated
from fedjax_sim.client import LocalOptions
from fedjax_sim.round.options import (
    AveragingOptions,
    BroadcastOptions,
    ExecutionOptions,
    FederatedOptions,
    MessageOptions,
    RecipeOptions,
)
from fedjax_sim.validate import Default


def defaults(options: type) -> dict:
    """The default of each option of a TypedDict."""
    hints = get_type_hints(options, include_extras=True)
    return {name: next(x.value for x in get_args(kind)[1:] if isinstance(x, Default)) for name, kind in hints.items()}


def declared(function) -> dict:
    """The defaults of a function's own keyword arguments, by name."""
    return {name: x.default for name, x in inspect.signature(function).parameters.items()}


def test_defaults_are_those_of_federated():
    """Catches a recipe that drops where `federated` stops, or that takes one device where `federated` takes all."""
    own, shared = declared(federated), defaults(FederatedOptions)
    assert shared == {name: own[name] for name in shared}
    # All that `federated` takes besides its parts.
    assert set(own) - set(shared) == {"sampler", "client", "aggregator", "server"}


def test_defaults_are_those_of_work():
    """Catches a local option that a recipe leaves out, and one whose default is another there."""
    own = declared(client.work)
    assert {name: defaults(RecipeOptions)[name] for name in own} == own == defaults(LocalOptions)


def test_each_list_adds_to_the_one_below():
    """Catches an option that gets lost between two lists, and a transform where messages pass through none."""
    lists = {x.__name__: set(defaults(x)) for x in (ExecutionOptions, MessageOptions, BroadcastOptions)}
    assert lists["MessageOptions"] - lists["ExecutionOptions"] == {"transform"}
    assert lists["BroadcastOptions"] - lists["ExecutionOptions"] == {"downlink"}
    assert set(defaults(FederatedOptions)) == lists["MessageOptions"] | lists["BroadcastOptions"]
    assert set(defaults(AveragingOptions)) - set(defaults(RecipeOptions)) == {"aggregator"}
