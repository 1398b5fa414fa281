"""Vertical learning: parties that hold different columns of the same rows train one model; party 0 has the labels.

Each party has a bottom model of its columns, and party 0 also has the top model. In a step each party computes its
bottom's output on the rows of the batch and sends it to party 0. Party 0 computes the loss, and sends back to each
party the derivative of the loss by that output. Each party then updates its own parameters. With one number for each
row (`models.vertical_linear`) these messages are partial scores and residuals. Rows are in the same order at all
parties, after alignment (`population.vertical.private_set_intersection`), and all parties know which rows a batch has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.algorithms.split.traffic import visits
from fedjax_sim.models import Model, per_example, sequential, sigmoid_cross_entropy, taylor_cross_entropy
from fedjax_sim.models.model import check_examples
from fedjax_sim.network.link import Link, Transcript, link, noise_of, send, transcript, wires
from fedjax_sim.round.counts import word_pair_product, word_pair_sum
from fedjax_sim.round.federated import federated
from fedjax_sim.round.options import ExecutionOptions
from fedjax_sim.types import (
    Aggregator,
    Algorithm,
    Array,
    ClientData,
    ClientUpdate,
    Count,
    Metric,
    PyTree,
    Sampler,
    UpdateTransform,
)
from fedjax_sim.validate import FromData

OBJECTIVES = ("exact", "taylor")


class PartyFunctions(NamedTuple):
    """The functions of a vertical model: party p computes h_p = bottoms[p](params, x), and party 0 also the top."""

    names: tuple[str, ...]  # of the parties, party 0 first
    bottoms: tuple[Callable, ...]  # (whole params, x) -> h_p [n, k_p]; reads the party's own params and columns alone
    top: Callable  # (whole params, [h_0, ..., h_{P-1}]) -> outputs


def party_functions_of(model: Model) -> PartyFunctions:
    """Takes a vertical model apart into the bottom models of its parties and the top model.

    Args:
      model: its first layer has a branch for each party, as `models.by_party` makes it.

    Raises: TypeError for a value that is no `Model`; ValueError for a model without such a layer.

    >>> from fedjax_sim.models import vertical_linear
    >>> party_functions_of(vertical_linear(columns=(2, 3), num_outputs=1)).names
    ('party_0', 'party_1')
    """
    validate.part("model", model, Model)
    if not model.layers or len(model.layers[0].branches) < 2:
        hint = "Take models.vertical_linear, vertical_mlp, or build one by models.by_party."
        validate.fail("model", "one whose first layer has a branch for each party", "another", hint)
    branch_layer, *top_layers = model.layers

    def bottom(name: str, layers: tuple) -> Callable:
        branch = sequential(layers)
        return lambda params, x: branch.apply(params.get(branch_layer.name, {}).get(name, {}), (), x, None, False)[0]

    top_model = sequential(top_layers) if top_layers else None

    def top(params: PyTree, outputs: list[Array]) -> PyTree:
        joined = branch_layer.join(outputs)
        return joined if top_model is None else top_model.apply(params, (), joined, None, False)[0]

    names = tuple(name for name, _ in branch_layer.branches)
    return PartyFunctions(names, tuple(bottom(name, layers) for name, layers in branch_layer.branches), top)


def vertical_loss(model: Model, loss: Callable, link: Link | Mapping[str, Link] | None = None) -> Callable:
    """Makes the loss of a vertical model, `loss_fn(params, examples, key)`, as the parties compute it together.

    Args:
      model: of `models.by_party`.
      loss: (outputs, targets) -> per-example losses, or a dict of per-example values.
      link: between each party and party 0, of `network.link`, or a dict with a link for each party by its name, such as
        "party_1". None: messages arrive as they are. In an evaluation (key None) messages do not pass the links.

    Guarantees: it is the loss of the whole model on the same rows, with its gradient
    (tests/algorithms/split/test_vertical.py::test_gradients_are_centralised).

    >>> from fedjax_sim.models import squared_error, vertical_linear
    >>> loss_fn = vertical_loss(vertical_linear(columns=(1, 1), num_outputs=1), squared_error)
    >>> ones = {"score": {"kernel": jnp.ones((1, 1))}}
    >>> params = {"parties": {"party_0": ones, "party_1": ones}, "bias": jnp.ones(1)}
    >>> loss_fn(params, {"x": jnp.ones((1, 2)), "y": jnp.zeros(1)}, None)["loss"].tolist()
    [9.0]
    """
    parties = party_functions_of(model)
    validate.function("loss", loss, "outputs, targets")
    links = _links(parties, link)

    def loss_fn(params: PyTree, examples: dict[str, Any], key: Array | None = None) -> dict[str, Array]:
        def send_to_party_0(output: Array, party: int) -> Array:
            name = parties.names[party]
            return output if key is None else send(links[name], key, output, name)

        check_examples(examples)
        return per_example(loss(_outputs(parties, params, examples["x"], send_to_party_0), examples["y"]))

    # Clients refuse such a loss, because they would not count what crosses: see `client.losses.check_own`.
    loss_fn.helped = True  # type: ignore[attr-defined]
    return loss_fn


def _links(parties: PartyFunctions, given: Link | Mapping[str, Link] | None, argument: str = "link") -> dict[str, Link]:
    """The link between party 0 and each other party, by the other party's name.

    Args:
      parties: their names, party 0 first.
      given: one link for all parties, links by name, or None for plain links.
      argument: the name of that argument, for errors.
    """
    names = parties.names[1:]
    if isinstance(given, Mapping):
        for name in given:
            validate.one_of(argument, name, names)
        links = {name: given.get(name, Link()) for name in names}
    else:
        links = dict.fromkeys(names, Link() if given is None else given)
    for name, party_link in links.items():
        validate.part(f"{argument}[{name!r}]", party_link, Link)
    return links


def _outputs(parties: PartyFunctions, params: PyTree, x: PyTree, send_to_party_0: Callable) -> PyTree:
    """Computes the outputs of the top model.

    Args:
      send_to_party_0: (h_p, p) -> h_p as it arrives at party 0.
    """
    own_output, *other_outputs = (bottom(params, x) for bottom in parties.bottoms)
    arrived = (send_to_party_0(output, party) for party, output in enumerate(other_outputs, 1))
    return parties.top(params, [own_output, *arrived])


def vertical_transcript(
    model: Model,
    loss: Callable,
    params: PyTree,
    examples: dict[str, Any],
    *,
    link: Link | Mapping[str, Link] | None = None,
    key: Array | None = None,
) -> Transcript:
    """Replays one step on all rows, and returns what each party receives, message by message.

    Args:
      model, loss, link: as in `vertical_loss`.
      params: of the whole model.
      examples: {"x", "y"}, [n, ...].
      key: of the step; None draws as in an evaluation.

    Returns: the `Transcript` of party 0 and parties 1, ..., P - 1. Outputs [n, k_p] are sent to party 0; then the
    derivatives of the loss's weighted mean by the arrived outputs, [n, k_p], are sent back. Party p computes its
    gradient from these derivatives and its columns.

    Guarantees: nobody receives labels or columns, and gradients are made of what was received
    (tests/algorithms/split/test_vertical.py::test_what_each_party_sees); for linear models, partial scores and
    residuals in float64 (::test_gradients_are_centralised); examples have the weights that the loss returns
    (tests/algorithms/split/test_extremes.py::test_weighted_vertical_transcript); bytes are those of these arrays
    (tests/algorithms/split/test_vertical.py::test_bytes_are_those_of_the_arrays).

    References: Hardy et al. 2017, algorithm 1 (without encryption); Vepakomma et al. 2018.
    """
    parties = party_functions_of(model)
    links = _links(parties, link)
    check_examples(examples)

    # `transcript` differentiates this step. Its `tap` sends a value over a link, and records the value and the gradient
    # that comes back.
    def step(tap: Callable) -> Array:
        def send_to_party_0(output: Array, party: int) -> Array:
            name = parties.names[party]
            return tap(links[name], key, output, party, 0, name=name)

        outputs = _outputs(parties, params, examples["x"], send_to_party_0)
        values = per_example(loss(outputs, examples["y"]))
        weight = values.get("weight", jnp.ones_like(values["loss"]))
        return (values["loss"] * weight).sum() / jnp.where(weight.sum() > 0, weight.sum(), 1)

    return transcript(step)


class VerticalOptions(client.LocalOptions, ExecutionOptions, total=False):
    """The options of `client.work`, and the execution options of `federated`."""


@validate.named_arguments
def vertical(
    model: Model,
    loss: Annotated[Callable, FromData("loss")],
    sampler: Sampler,
    optimizer: optax.GradientTransformation,
    *,
    objective: Literal["exact", "taylor"] = "exact",
    forward: UpdateTransform | None = None,
    backward: UpdateTransform | None = None,
    encrypted: bool = False,
    links: Mapping[str, Link] | None = None,
    aggregator: Aggregator | None = None,
    transform: UpdateTransform | None = None,
    **options: Unpack[VerticalOptions],
) -> Algorithm:
    """Makes vertical learning in consortia: a client is a consortium of P parties, which hold columns of the same rows.

    With one consortium no model is sent to anyone, and a round is `num_steps` steps of its parties. With several
    consortia, such as hospitals whose departments are parties, each trains in this way. Then the parties of one role
    average their parameters over the consortia: learning is horizontal and vertical at once.

    Args:
      model: a model with a branch for each party, of `models.by_party`; it says which party computes what.
      loss: (outputs, targets) -> per-example losses; a config takes the loss of the task.
      sampler: draws consortia.
      optimizer: of every party, for its own parameters. Its state is not carried to the next round, as in FedAvg, with
        one consortium too: momentum, or Adam's moments, start from zero (tests/algorithms/split/test_vertical.py::
        test_optimisers_start_anew). To keep them, make one round with many steps. An optimiser that mixes coordinates,
        such as by a global norm, would need another message: use optimisers that work by coordinate.
      objective: "exact": the loss; "taylor": `models.taylor_cross_entropy` in its place, for a binary label.
      forward, backward, encrypted: of the links between each party and party 0, as in `network.link`: the transforms of
        one row's output, and of its gradient, such as `transform.local_gaussian(clip_norm, noise_multiplier)`.
      links: in their place, a link for each party by its name, such as {"party_1": network.link(...)};
        None: the same link for all.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      aggregator: of the messages of consortia, where there are several; None is the mean.
      transform: of the same messages; None leaves them as they are.
      nonfinite, plan, mesh: as in `federated`.

    Returns: an Algorithm; its info counts `forward_bytes`, from the parties to party 0, and `backward_bytes`.

    Raises: ValueError for a model without parties; for "taylor" with another loss than the binary cross entropy; for a
      transform with one consortium; for samplers whose rounds take time, because a clock would price a consortium as
      one device without links (tests/algorithms/split/test_vertical.py::test_no_clock_prices_a_consortium).

    Guarantees: a full-batch step is the centralised step (tests/algorithms/split/test_vertical.py::
    test_a_round_is_centralised_descent), and misaligned rows give another step (::test_misaligned_rows_change_it);
    bytes are those of the arrays that are sent (::test_bytes_are_those_of_the_arrays); several consortia are FedAvg on
    the joint model (::test_consortia_are_fedavg). Noise on the links has no epsilon from the accountant, which says so
    (::test_noise_on_links_is_not_accounted_as_something_else); `privacy.embedding_claim` states it.

    References: Hardy et al. 2017, sections 4 and 5; Yang et al. 2019, section 2.4; Vepakomma et al. 2018.
    """
    parties = party_functions_of(model)
    if objective == "taylor" and loss is not sigmoid_cross_entropy:
        hint = "The expansion is that of the logistic loss: the data's task must be binary."
        validate.fail("objective", "'exact' with this loss", objective, hint)
    loss = taylor_cross_entropy if objective == "taylor" else loss
    work, execution = client.local_work(options)
    if links is not None and (forward, backward, encrypted) != (None, None, False):
        shown = sorted(links) if isinstance(links, Mapping) else links
        validate.fail("links", "None beside forward, backward or encrypted", shown, "Put them into the links.")
    shared_link = link(forward=forward, backward=backward, encrypted=encrypted)
    party_links = _links(parties, shared_link if links is None else links, "links")
    # `local_sgd` refuses a loss of several parties (attribute `helped`), whose messages it would not count. They are
    # counted here, so a `partial` hides the attribute.
    joint_loss = partial(vertical_loss(model, loss, party_links))
    local = _counting(client.local_sgd(joint_loss, optimizer, work), parties, work, party_links)
    rule = aggregation.mean() if aggregator is None else aggregator
    validate.part("sampler", sampler, Sampler)
    is_single = sampler.design.population_size == 1
    if is_single and transform is not None:
        hint = "Nothing is sent between consortia where there is one: the links take forward and backward."
        validate.fail("transform", "none with one consortium", "some", hint)
    step = server.optimizer(optax.sgd(1.0))
    algorithm = federated(sampler, local, rule, step, transform, **execution)
    return _without_server_messages(algorithm) if is_single else algorithm


def _counting(
    local: ClientUpdate, parties: PartyFunctions, work: client.LocalWork, links: Mapping[str, Link]
) -> ClientUpdate:
    """Makes local work count the bytes that cross the links: each row of a batch once, forward and backward.

    Args:
      local: trains the joint model of P parties.
      parties: what each party computes.
      work: of `local`; says how many rows and steps a client's work visits.
      links: P - 1 links by name, in the order of parties 1, ..., P - 1.

    Returns: `local` with the counts `forward_bytes` and `backward_bytes`, each [2] uint32 words. With ceil(b / 8) bytes
    for a row of b bits, and for what a link adds to a batch, they are rows visited x the bytes of a row on all links,
    plus steps x the bytes that the links add.
    """

    def apply(key, broadcast, state, data: ClientData):
        report, state = local.apply(key, broadcast, state, data)
        # Each row is a message, rounded up to whole bytes, each time that it is visited.
        row_specs = _row_outputs(parties, broadcast, data)
        wire_pairs = [wires(party_link, spec) for party_link, spec in zip(links.values(), row_specs, strict=True)]
        num_visits, num_steps = visits(work, data)
        batch_bytes = sum(-(-party_link.batch_bits // 8) for party_link in links.values())
        counts = {
            name: word_pair_sum(
                word_pair_product(jnp.uint32(sum(-(-wire.bits // 8) for wire in direction_wires)), num_visits),
                word_pair_product(jnp.uint32(batch_bytes), num_steps),
            )
            for name, direction_wires in zip(
                ("forward_bytes", "backward_bytes"), zip(*wire_pairs, strict=True), strict=True
            )
        }
        return report._replace(counts=report.counts | counts), state

    byte_metrics = (
        Metric("forward_bytes", "sent by parties to the label holder", "bytes", besides=True),
        Metric("backward_bytes", "sent back to the parties", "bytes", besides=True),
    )
    metrics = (*local.facts.metrics, *byte_metrics)
    return local._replace(apply=apply).stating(noise=noise_of(links.values()), metrics=metrics, helped=True)


def _row_outputs(parties: PartyFunctions, params: PyTree, data: ClientData) -> list[PyTree]:
    """Returns the output for one row of each party except party 0, as specs."""
    first_row = jax.tree.map(lambda x: x[:1], data.examples["x"])
    outputs = [jax.eval_shape(bottom, params, first_row) for bottom in parties.bottoms[1:]]
    return jax.tree.map(lambda output: jax.ShapeDtypeStruct(output.shape[1:], output.dtype), outputs)


def _without_server_messages(algorithm: Algorithm) -> Algorithm:
    """Makes an algorithm count no bytes up and down: the model of a single consortium stays where it is."""

    def step(key, state, population):
        state, info = algorithm.step(key, state, population)
        return state, info | {name: Count.of(jnp.int32(0), 0) for name in ("uplink_bytes", "downlink_bytes")}

    # An edge made of the parts would count messages that nobody sends.
    parts = algorithm.parts and algorithm.parts._replace(complete=False)
    return algorithm._replace(step=step, parts=parts)
