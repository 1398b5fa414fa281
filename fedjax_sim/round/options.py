"""Options that many algorithms share, each declared once with its default.

An algorithm takes them as `**options: Unpack[...]`, and `validate.named_arguments` shows all of them in its signature.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from jax.sharding import Mesh

from fedjax_sim.client import LocalOptions
from fedjax_sim.engine import Plan, check_mesh, check_plan
from fedjax_sim.types import Aggregator, UpdateTransform
from fedjax_sim.validate import Checked, Default, FromData


class ExecutionOptions(TypedDict, total=False):
    """The options that say how a round is computed; `federated` describes each."""

    nonfinite: Annotated[Literal["drop", "error"], FromData("nonfinite"), Default("drop")]
    plan: Annotated[Plan | None, FromData("plan"), Checked(check_plan), Default(None)]
    mesh: Annotated[Mesh | Literal["all"] | None, FromData("mesh"), Checked(check_mesh), Default("all")]


class MessageOptions(ExecutionOptions, total=False):
    """The execution options, and the transform that a client's message passes through."""

    transform: Annotated[UpdateTransform | None, Default(None)]


class BroadcastOptions(ExecutionOptions, total=False):
    """The execution options, and the transform that the server's broadcast passes through."""

    downlink: Annotated[UpdateTransform | None, Default(None)]


class FederatedOptions(MessageOptions, BroadcastOptions, total=False):
    """The options of `federated`: transforms of messages and of the broadcast, and how a round is computed."""


class RecipeOptions(LocalOptions, FederatedOptions, total=False):
    """The options of `client.work` and of `federated`."""


class AveragingOptions(RecipeOptions, total=False):
    """The options of `client.work` and of `federated`, and the aggregator of the messages."""

    aggregator: Annotated[Aggregator | None, Default(None)]  # None: `aggregation.mean()`
