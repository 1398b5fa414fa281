"""What the laws know of one part: how to make it, and what a law must be told because it cannot find it by itself.

Every default is the strictest: a law holds a part to it until the part's row says otherwise. The exceptions are
`compiled`, `traced` and `every_shape`, which ask for more tests than the others have. What a part states of itself
(`ClientFacts`, `TransformFacts`, `AggregatorFacts`, its design, its signature) is read from it, and is no field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from fedjax_sim import network
from fedjax_sim.types import ParamsKind
from tests.laws import problems as p

EVERY = ("network", "sampling", "client", "transform", "aggregation", "server", "algorithms")


def _same(x: Any) -> Any:
    return x


def _start() -> Any:
    return jnp.array(p.START)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One part for the laws' problem, and the facts about it that no law can find by itself.

    Each comment names the files of `tests/` that read the field; those without a folder are in `tests/laws`. Each type
    has the subpackages in whose rows the field may stand: `tests/laws/test_rows.py` refuses it in others.
    """

    make: Annotated[Callable[[], Any], *EVERY] = dataclasses.field(kw_only=False)

    # It runs by default where a law compiles each row; one row a family. `cases.compiled_rows`.
    compiled: Annotated[bool, *EVERY] = False
    # It is lowered in a federation with plain parts and those in `needs`. If not, an algorithm with it is a row, which
    # is lowered. test_platforms.
    alone: Annotated[bool, "client", "server"] = True
    # What must stand around it in a federation, by the name of the argument. test_compositions, test_rounding,
    # test_platforms.
    needs: Annotated[Mapping[str, Callable[[], Any]], "client", "transform", "server"] = dataclasses.field(
        default_factory=dict
    )
    # Settings that a config of it needs, where they do not follow from its arguments. If they name the part of a table,
    # the usual settings of that table fall away. In `network` they are options of its own table, which stands inside of
    # another one. test_wrappers, config/test_one_word, config/test_document, config/test_devices.
    config: Annotated[tuple[str, ...], "network", "sampling", "transform", "aggregation", "algorithms"] = ()
    # Optional arguments that no config can hold. config/test_one_word.
    python_only: Annotated[tuple[str, ...], "algorithms"] = ()
    # An algorithm with it is a row, so that the laws of the algorithms meet it. If not, it is traced in a federation
    # with plain parts and those in `needs`. test_rounding.
    in_recipes: Annotated[bool, "client", "server"] = False

    # A device spends energy where there is nothing to compute or to send, as its latency does. test_network.
    idle_joules: Annotated[bool, "network"] = False

    # The model -> what the server broadcasts to such a client. test_members.
    broadcast: Annotated[Callable[[Any], Any], "client"] = _same

    # The setting in which the mean of its messages is measured; None: as it stands in its row. test_facts.
    unbiased_as: Annotated[Callable[[], Any] | None, "transform"] = None
    # Its noise hides a client by the probabilities of its answers, and not by what the client moves. test_privacy.
    answers_at_random: Annotated[bool, "transform"] = False

    # It measures messages from an origin (zero, the model, the last result, a sum, or a unit), so that its result does
    # not move with a common shift of all messages; None: a shift has no such meaning for its messages. test_robust.
    about_origin: Annotated[bool | None, "aggregation"] = False
    # Its setting for 11 messages, where it states how many attackers it withstands. test_robust.
    withstands: Annotated[Callable[[], Any] | None, "aggregation"] = None
    # Why `test_robust` has no such setting: where else the law meets it, or why it cannot.
    not_attacked: Annotated[str, "aggregation"] = ""
    # Its row takes 64 messages of 2^19 numbers, and adds them up by no plain sum. test_rounding.
    long_messages: Annotated[bool, "aggregation"] = True

    # The aggregate of plain updates -> the one that this server takes. test_members.
    aggregate: Annotated[Callable[[Any], Any], "server"] = _same
    # The model -> the part of it that clients receive. test_members.
    known: Annotated[Callable[[Any], Any], "server"] = _same
    # What is broadcast -> the model in it. test_members.
    model_in: Annotated[Callable[[Any], Any], "server"] = _same
    # The model that its federation starts from, if it is not the laws' own. test_rounding, test_platforms.
    start: Annotated[Callable[[], Any], "server"] = _start
    # The server of the part of a model with this path, which the laws' own model has not. test_foreign_updates.
    of_part: Annotated[Callable[[str], Any] | None, "server"] = None
    # Each leaf is tried in every wrong shape, and not in one: for one server. test_foreign_updates.
    every_shape: Annotated[bool, "server"] = False

    # What its params are. test_params.
    params_kind: Annotated[ParamsKind, "server", "algorithms"] = ParamsKind.MODEL
    # Its parts' server has the params of which the kind is stated. test_params.
    params_at_server: Annotated[bool, "algorithms"] = True
    # Its params are the plain mean of its nodes' models, if they are their mean at all. test_params.
    plain_mean: Annotated[bool, "algorithms"] = True
    # Clients have models of their own. test_personal.
    own_models: Annotated[bool, "algorithms"] = False

    # It also runs by default where a law traces each row. `cases.traced_rows`.
    traced: Annotated[bool, "algorithms"] = False
    # It trains a model by a loss, which falls. test_members, test_scopes, test_pytrees,
    # algorithms/analytics/test_statistic.
    trains: Annotated[bool, "algorithms"] = True
    # It trains in its rounds, and not before them. test_scopes.
    trains_in_rounds: Annotated[bool, "algorithms"] = True
    # Its row takes parameters of any structure, and not the numbers of one array. test_pytrees.
    any_params: Annotated[bool, "algorithms"] = True
    # Clients follow one another, so that another order of the cohort is another result. device_rows.
    in_turns: Annotated[bool, "algorithms"] = False

    # What an edge says of its rounds. "whole": it makes them. "server": it cannot go on from another model, because the
    # server keeps more than its model (control variates, several models, none), or because a step, an estimate or a
    # factor is more than a mean. "star": the parts are no whole algorithm. algorithms/hierarchy/test_hierfavg.
    edge: Annotated[Literal["whole", "server", "star"], "algorithms"] = "star"
    # A graph -> the mixing that it takes. test_gossip.
    mixing: Annotated[Callable[[network.Graph], Any], "algorithms"] = network.metropolis

    # A clock gives its rounds a time; or it refuses a sampler with a clock; or nothing in it takes one. test_time.
    clock: Annotated[Literal["priced", "refused", "none"], "algorithms"] = "priced"
    # (number of clients -> their devices) -> the algorithm on such devices; None: the row, with the laws' sampler on a
    # clock and the laws' devices as these. test_time.
    timed: Annotated[Callable[[Callable[[int], Any]], Any] | None, "algorithms"] = None
    # Clients send something, which takes time. test_time.
    sends: Annotated[bool, "algorithms"] = True
    # Its work may be stated in epochs; None: by the arguments of its recipe. test_time.
    has_epochs: Annotated[bool | None, "algorithms"] = None

    # It is called as a recipe is, and names wrong arguments. test_members.
    named_arguments: Annotated[bool, "algorithms"] = True
    # It is a recipe whose options change its rounds. test_options.
    changes_rounds: Annotated[bool, "algorithms"] = True
    # Option -> another value than the row's and the default. Options that recipes share have one in
    # `test_options.OTHER`, and for a truth value the law takes the other one. test_options.
    other: Annotated[Mapping[str, Any], "algorithms"] = dataclasses.field(default_factory=dict)
    # Option -> options that must stand beside it, so that it changes something. test_options.
    beside: Annotated[Mapping[str, Mapping[str, Any]], "algorithms"] = dataclasses.field(default_factory=dict)
    # Options that can change nothing in the row's problem. test_options.
    idle_options: Annotated[tuple[str, ...], "algorithms"] = ()

    # It is made of a loss of all the model's numbers, not of layers or the names of parts, and its weighting is that of
    # its aggregator. test_weights.
    weighed: Annotated[bool, "algorithms"] = True
    # All clients take part in every round. test_weights.
    everybody: Annotated[bool, "algorithms"] = False
    # Its clients count alike, whatever a config says. config/test_one_word.
    counts_alike: Annotated[bool, "algorithms"] = False
    # It holds for plain SGD alone, and refuses another optimiser by name. config/test_one_word.
    plain_sgd: Annotated[bool, "algorithms"] = False

    def __call__(self) -> Any:
        """The part, made anew."""
        return self.make()
