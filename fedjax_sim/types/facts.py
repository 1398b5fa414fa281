"""Static facts that parts state about themselves; the default of each fact is the claim that promises least."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from fedjax_sim.types.data import Attackers, Metric, Noise


class ParamsKind(Enum):
    """What the `params` of an algorithm are, in the words of statements about them."""

    MODEL = "the model"
    MEAN = "the mean of the nodes' models"
    ANSWER = "the answer of a statistic"
    ONE_OF = "the first of several models, of which each client has one"
    PART = "the part that clients share, joined to a part of their own that nobody has trained"
    START = "a start, which each client trains further before it uses it"
    UNTRAINED = "the start, which no round trains; each client trains a model of its own"
    UNSTATED = "arrays of which the algorithm does not say what they are"

    @property
    def is_judged(self) -> bool:
        """Whether test rows judge `params` themselves, and not what clients make of them.

        What is not stated counts as judged, under the name of `params`.

        >>> [kind.name for kind in ParamsKind if not kind.is_judged]
        ['ONE_OF', 'PART', 'START', 'UNTRAINED']
        """
        return self not in (ParamsKind.ONE_OF, ParamsKind.PART, ParamsKind.START, ParamsKind.UNTRAINED)


class ClientFacts(NamedTuple):
    """The facts that a `ClientUpdate` states about its local work."""

    # Number of minibatch steps, or (examples) -> steps; None = the work also reads all examples at once
    num_steps: int | Callable | None = None
    # Number of steps of the whole local work, or (examples) -> steps. A client does the part of them that `data.work`
    # states; None = it always does all of its work, and has no simulated time if a loop in it has no known length
    all_steps: int | Callable | None = None
    noise: Noise | None = None  # of record-level privacy
    uniform_weights: bool = False  # every report weighs 1, or 0 for nothing to report, whatever the client holds
    # The user asked for weights by examples, so an aggregator that takes no weights is refused
    needs_weights: bool = False
    metrics: tuple[Metric, ...] = ()  # descriptions of its reports' numbers, counts included
    pulled: bool = False  # the client obeys `ClientData.pull`
    # A share of an update is an update too: the update is a difference from the broadcast, and no state of the client
    # assumes that all of the update counts
    scalable: bool = False
    # Other parties compute parts of the client's steps. Only its counts tell what crosses between the parties, so no
    # clock prices its work
    helped: bool = False
    level: str = "client"  # the word for such a client in statements; of a federation the level's name, such as "edge"
    reads_round: bool = False  # the client reads `ClientData.round`: its learning rate falls over rounds


class TransformFacts(NamedTuple):
    """The facts that an `UpdateTransform` states about its effect on updates."""

    l2_bound: float | None = None  # no output of on_client has a larger norm
    nonexpansive: bool = False  # on_client never lengthens an update
    releases_when_empty: bool = False  # a round without messages still moves the model (noise-only release)
    unbiased: bool = False  # the mean of on_client's output, over its key, is its input
    exact_error: bool = False  # `UpdateTransform.squared_error` is the error itself, not a bound
    # on_client sends integers in this range, in a unit that all clients share; None = it sends floats
    integer_range: tuple[int, int] | None = None
    noise: Noise | None = None  # the noise that it adds, for the accountant
    mirrored: bool = True  # its two ends may keep copies of what is sent, so nothing may change a message in between
    metrics: tuple[Metric, ...] = ()  # descriptions of `on_server`'s numbers


class AggregatorFacts(NamedTuple):
    """The facts that an `Aggregator` states about its sums, its attackers, and the bytes that it adds."""

    # How far the aggregate moves in L2 if one update moves by 1; None = unbounded
    sensitivity: float | None = None
    modulus: int | None = None  # it sums integers modulo this integer; None = it sums real numbers
    max_weight: int = 1  # before a modular sum it multiplies each message's integers by at most this number
    weighted: bool = True  # the result may depend on the weights that clients report
    partly_weighted: bool = False  # some entries of an update are aggregated with weights, and some without
    homogeneous: bool = False  # messages in another unit give the result in that unit
    design: Any = None  # the SamplingDesign whose unequal probabilities it corrects for; None = it corrects nothing
    metrics: tuple[Metric, ...] = ()  # descriptions of `finalize`'s numbers
    least: int | None = None  # a sum of fewer messages becomes NaN, which skips the round; None = every sum is released
    keyless: bool = False  # the server holds the model encrypted, so it cannot compress what it sends
    # Which of its clients attack. The attack happens inside of the aggregator, so no wrapper around it sees the
    # attackers' messages
    attackers: Attackers | None = None
    # The metrics of its rule hold "chosen", [m] bool, the clients whose messages it takes; those of `finalize` do not
    chooses: bool = False
    # (number of messages) -> the largest number of attackers among them whose harm the rule bounds, whatever they send;
    # None = it bounds the harm of no attacker
    withstands: Callable | None = None
    # (update_spec, Wire, num_invited) -> Wire of what a client sends; None = the message as it is
    wire: Callable | None = None
    # (update_spec, Wire of the broadcast, num_invited) -> Wire of what a client receives; None = the broadcast as it is
    wire_down: Callable | None = None
