"""What parts state about themselves, static: the default of each fact is the claim that promises least."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_sim.types.data import Attackers, Metric, Noise

__all__ = ["AggregatorFacts", "ClientFacts", "TransformFacts"]


class ClientFacts(NamedTuple):
    """What a `ClientUpdate` states of its local work."""

    num_steps: int | Callable | None = None  # minibatch steps, or (examples) -> steps; None = not minibatches
    all_steps: int | Callable | None = None  # steps of the whole local work, or (examples) -> steps, of which a client
    # does the part that `data.work` states; None = it always does all of them
    noise: Noise | None = None  # of record-level privacy
    uniform_weights: bool = False  # every report weighs 1, or 0 for nothing to report, whatever the client holds
    needs_weights: bool = False  # it was asked to count by its examples: an aggregator that takes no weights is refused
    metrics: tuple[Metric, ...] = ()  # what it states of its reports' numbers, counts included
    pulled: bool = False  # it obeys `ClientData.pull`
    scalable: bool = False  # a share of its update is an update too: it is a difference from the broadcast, and nothing
    # that the client keeps assumes that all of it counts
    helped: bool = False  # others compute parts of its steps, and only its counts tell what crosses: no clock prices it
    level: str = "client"  # what statements call one of them; of a federation the level's name, such as "edge"
    reads_round: bool = False  # it is told `ClientData.round`: its learning rate falls over rounds


class TransformFacts(NamedTuple):
    """What an `UpdateTransform` states of what it does to updates."""

    l2_bound: float | None = None  # no output of on_client has a larger norm
    nonexpansive: bool = False  # on_client never lengthens an update
    releases_when_empty: bool = False  # a round without messages still moves the model (noise-only release)
    unbiased: bool = False  # the mean of on_client's output, over its key, is its input
    exact_error: bool = False  # `UpdateTransform.squared_error` is the error itself, not a bound
    integer_range: tuple[int, int] | None = None  # on_client sends integers in this range, in a unit common to all
    noise: Noise | None = None  # what the accountant reads
    mirrored: bool = True  # its two ends may keep copies of what is sent, so nothing may change it in between
    metrics: tuple[Metric, ...] = ()  # what it states of `on_server`'s numbers


class AggregatorFacts(NamedTuple):
    """What an `Aggregator` states of its sums, of the clients inside of it, and of the bytes that it adds."""

    sensitivity: float | None = None  # L2 motion of the aggregate per unit motion of one update; None = unbounded
    modulus: int | None = None  # it sums integers modulo this one; None = it sums real numbers
    max_weight: int = 1  # before that it multiplies each message's integers by at most this one
    weighted: bool = True  # the result may depend on the weights that clients report
    partly_weighted: bool = False  # of the entries of an update some are aggregated by weights, and some without
    homogeneous: bool = False  # messages in another unit give the result in that unit
    design: Any = None  # the SamplingDesign whose unequal probabilities it corrects for; None = it corrects nothing
    metrics: tuple[Metric, ...] = ()  # what it states of `finalize`'s numbers
    least: int | None = None  # it makes NaN of a sum of fewer messages; None = of none
    keyless: bool = False  # the server holds the model encrypted, so it cannot compress what it sends
    attackers: Attackers | None = None  # who of its clients attack, inside of it: nothing around it sees what they send
    chooses: bool = False  # the rule's metrics have "chosen", [m] bool: whose messages it takes; `finalize`'s have not
    withstands: Callable | None = None  # (number of messages) -> the most attackers among them whose harm it bounds,
    # whatever they send; None = none
    wire: Callable | None = None  # (update_spec, Wire, num_invited) -> Wire of what a client sends; None = its message
    # (update_spec, Wire of the broadcast, num_invited) -> Wire of what a client receives; None = the broadcast
    wire_down: Callable | None = None
