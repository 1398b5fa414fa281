"""Vertical learning: parties who hold other columns of the same rows train one model; party 0 has the labels.

In a step each party computes its bottom's output on the rows of the batch and sends it to party 0, who computes the
loss and sends back the loss's derivative by that output; everybody then updates what it holds. With one number a row
(`models.vertical_linear`) these are partial scores and residuals. Rows are in one order at all parties, after
alignment (`population.vertical.private_set_intersection`), and which rows a batch has is known to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import aggregation, client, server, validate
from fedjax_sim.algorithms.split.traffic import product, visits, word_pair_sum
from fedjax_sim.models import Model, per_example, sequential, sigmoid_cross_entropy, taylor_cross_entropy
from fedjax_sim.models.model import check_examples
from fedjax_sim.network.link import Link, Transcript, link, noise_of, send, transcript, wires
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

__all__ = ["PartyFunctions", "party_functions_of", "vertical", "vertical_loss", "vertical_transcript"]

OBJECTIVES = ("exact", "taylor")


class PartyFunctions(NamedTuple):
    """The functions of a vertical model: party p computes h_p = bottoms[p](own params, x), party 0 also the top."""

    names: tuple[str, ...]
    bottoms: tuple[Callable, ...]  # (whole params, x) -> h_p [n, k_p]; reads the party's own params and columns alone
    top: Callable  # (whole params, [h_0, ..., h_{P-1}]) -> outputs


def party_functions_of(model: Model) -> PartyFunctions:
    """The bottoms and the top of a model whose first layer has a branch for each party, as `models.by_party` makes.

    Raises: TypeError for what is no `Model`; ValueError for one without such a layer.

    >>> from fedjax_sim.models import vertical_linear
    >>> party_functions_of(vertical_linear(columns=(2, 3), num_outputs=1)).names
    ('party_0', 'party_1')
    """
    validate.part("model", model, Model)
    if not model.layers or len(model.layers[0].branches) < 2:
        hint = "Take models.vertical_linear, vertical_mlp, or build one by models.by_party."
        validate.fail("model", "one whose first layer has a branch for each party", "another", hint)
    first, *rest = model.layers

    def bottom(name: str, layers: tuple) -> Callable:
        inner = sequential(layers)
        return lambda params, x: inner.apply(params.get(first.name, {}).get(name, {}), (), x, None, False)[0]

    above = sequential(rest) if rest else None

    def top(params: PyTree, outs: list[Array]) -> PyTree:
        joined = first.join(outs)
        return joined if above is None else above.apply(params, (), joined, None, False)[0]

    names = tuple(name for name, _ in first.branches)
    return PartyFunctions(names, tuple(bottom(name, layers) for name, layers in first.branches), top)


def vertical_loss(model: Model, loss: Callable, link: Link | Mapping[str, Link] | None = None) -> Callable:
    """`loss_fn(params, examples, key)` of a vertical model, as the parties compute it together.

    Args:
      model: of `models.by_party`.
      loss: (outputs, targets) -> per-example losses, or a dict of them.
      link: between each party and party 0, of `network.link`, or one for each party by its name, such as "party_1";
        None: messages arrive as they are. With key
        None, in an evaluation, nothing passes it.

    Guarantees: the loss of the whole model on the same rows, with its gradient
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
    between = _links(parties, link)

    def loss_fn(params: PyTree, examples: dict[str, Any], key: Array | None = None) -> dict[str, Array]:
        def across(out: Array, party: int) -> Array:
            name = parties.names[party]
            return out if key is None else send(between[name], key, out, name)

        check_examples(examples)
        return per_example(loss(_outputs(parties, params, examples["x"], across), examples["y"]))

    loss_fn.helped = True  # type: ignore[attr-defined]  # see `client.losses.check_own`
    return loss_fn


def _links(parties: PartyFunctions, given: Link | Mapping[str, Link] | None, argument: str = "link") -> dict[str, Link]:
    """The link of each party but party 0."""
    names = parties.names[1:]
    if isinstance(given, Mapping):
        for name in given:
            validate.one_of(argument, name, names)
        links = {name: given.get(name, Link()) for name in names}
    else:
        links = dict.fromkeys(names, Link() if given is None else given)
    for name, one in links.items():
        validate.part(f"{argument}[{name!r}]", one, Link)
    return links


def _outputs(parties: PartyFunctions, params: PyTree, x: PyTree, across: Callable) -> PyTree:
    """The top's outputs; `across(h_p, p)` brings party p's to party 0."""
    own, *others = (bottom(params, x) for bottom in parties.bottoms)
    return parties.top(params, [own, *(across(out, party) for party, out in enumerate(others, 1))])


def vertical_transcript(
    model: Model,
    loss: Callable,
    params: PyTree,
    examples: dict[str, Any],
    *,
    link: Link | Mapping[str, Link] | None = None,
    key: Array | None = None,
) -> Transcript:
    """One step on all rows, message by message: what each party receives.

    Args:
      model, loss, link: as in `vertical_loss`.
      params: of the whole model.
      examples: {"x", "y"}, [n, ...].
      key: of the step; None draws as in an evaluation.

    Returns: the `Transcript` of party 0 and parties 1, ..., P - 1: outputs [n, k_p] to party 0, then the derivatives of
    the loss's weighted mean by what arrived, [n, k_p], back. Party p's gradient is made of these and of its columns.

    Guarantees: nobody receives labels or columns, and gradients are made of what was received
    (tests/algorithms/split/test_vertical.py::test_what_each_party_sees); for linear models, partial scores and
    residuals in float64 (::test_gradients_are_centralised); examples weigh what the loss says
    (tests/algorithms/split/test_extremes.py::test_weighted_vertical_transcript); bytes are those of these arrays
    (tests/algorithms/split/test_vertical.py::test_bytes_are_those_of_the_arrays).

    References: Hardy et al. 2017, algorithm 1 (without encryption); Vepakomma et al. 2018.
    """
    parties = party_functions_of(model)
    between = _links(parties, link)
    check_examples(examples)

    def step(tap: Callable) -> Array:
        def across(out: Array, party: int) -> Array:
            name = parties.names[party]
            return tap(between[name], key, out, party, 0, name)

        outputs = _outputs(parties, params, examples["x"], across)
        values = per_example(loss(outputs, examples["y"]))
        weight = values.get("weight", jnp.ones_like(values["loss"]))
        return (values["loss"] * weight).sum() / jnp.where(weight.sum() > 0, weight.sum(), 1)

    return transcript(step)


class VerticalOptions(client.LocalOptions, ExecutionOptions, total=False):
    """The options of `client.work`, and how a round is carried out."""


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
    """Vertical learning in consortia: a client is a consortium of P parties, who hold columns of the same rows.

    With one client nobody else takes part: no model is sent to anyone, and a round is `num_steps` steps of the parties.
    With several, such as hospitals whose departments are parties, each trains as that, and the parties of one role
    average what they hold: horizontal and vertical at once.

    Args:
      model: one with a branch for each party, of `models.by_party`; it decides who computes what.
      loss: (outputs, targets) -> per-example losses; a config takes that of the task.
      sampler: of consortia.
      optimizer: of every party, for what it holds. Its state is not carried to the next round, as in FedAvg, with one
        consortium too: momentum, or Adam's moments, start from zero (tests/algorithms/split/test_vertical.py::
        test_optimisers_start_anew). Training that shall keep them is one round with many steps. An optimiser that mixes
        coordinates, by a global norm, say, would need another message: use those that work by coordinate.
      objective: "exact", the loss; "taylor", `models.taylor_cross_entropy` in its place, for a binary label.
      forward, backward, encrypted: of the links between each party and party 0, as in `network.link`: what one row's
        output, and the gradient by it, go through, such as `transform.local_gaussian(clip_norm, noise_multiplier)`.
      links: in their place, a link for each party by its name, such as {"party_1": network.link(...)}.
      num_steps, num_epochs, batch_size, weighting, shuffle: as in `client.work`.
      aggregator, transform: of the messages of consortia, where there are several.
      nonfinite, plan, mesh: as in `federated`.

    Returns: an Algorithm; its info counts `forward_bytes`, from the parties to party 0, and `backward_bytes`.

    Raises: ValueError for a model without parties; for "taylor" with another loss than the binary cross entropy; for a
      transform with one consortium; for samplers whose rounds take time, which would be that of one device without
      links (tests/algorithms/split/test_vertical.py::test_no_clock_prices_a_consortium).

    Guarantees: a full-batch step is the centralised one (tests/algorithms/split/test_vertical.py::
    test_a_round_is_centralised_descent), and misaligned rows are another step (::test_misaligned_rows_change_it); bytes
    are those of the arrays that are sent (::test_bytes_are_those_of_the_arrays); several consortia are FedAvg on the
    joint model (::test_consortia_are_fedavg). Noise on the links has no epsilon from the accountant, which says so
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
        validate.fail("links", "None beside forward, backward or encrypted", sorted(links), "Put them into the links.")
    shared = link(forward=forward, backward=backward, encrypted=encrypted)
    between = _links(parties, shared if links is None else links, "links")
    joint = partial(vertical_loss(model, loss, between))  # counted here, so it need not say that others help
    local = _counted(client.local_sgd(joint, optimizer, work), parties, work, between)
    rule = aggregation.mean() if aggregator is None else aggregator
    validate.part("sampler", sampler, Sampler)
    alone = sampler.design.population_size == 1
    if alone and transform is not None:
        hint = "Nothing is sent between consortia where there is one: the links take forward and backward."
        validate.fail("transform", "none with one consortium", "some", hint)
    step = server.optimizer(optax.sgd(1.0))
    made = federated(sampler, local, rule, step, transform, **execution)
    return _unsent(made) if alone else made


def _counted(
    local: ClientUpdate, parties: PartyFunctions, work: client.LocalWork, between: Mapping[str, Link]
) -> ClientUpdate:
    """The same local work, with the bytes that cross the links: each row of a batch once, there and back."""

    def apply(key, broadcast, state, data: ClientData):
        report, state = local.apply(key, broadcast, state, data)
        ways = [wires(one, out) for one, out in zip(between.values(), _row(parties, broadcast, data), strict=True)]
        visited, steps = visits(work, data)
        headers = sum(-(-one.batch_bits // 8) for one in between.values())
        counts = {
            name: word_pair_sum(
                product(jnp.uint32(sum(-(-wire.bits // 8) for wire in there)), visited),
                product(jnp.uint32(headers), steps),
            )
            for name, there in zip(("forward_bytes", "backward_bytes"), zip(*ways, strict=True), strict=True)
        }
        return report._replace(counts=report.counts | counts), state

    words = (
        Metric("forward_bytes", "sent by parties to the label holder", "bytes", besides=True),
        Metric("backward_bytes", "sent back to the parties", "bytes", besides=True),
    )
    metrics = (*local.facts.metrics, *words)
    return local._replace(apply=apply).stating(noise=noise_of(between.values()), metrics=metrics, helped=True)


def _row(parties: PartyFunctions, params: PyTree, data: ClientData) -> list[PyTree]:
    """What each party but party 0 sends of one row, as specs."""
    first = jax.tree.map(lambda x: x[:1], data.examples["x"])
    outs = [jax.eval_shape(bottom, params, first) for bottom in parties.bottoms[1:]]
    return jax.tree.map(lambda out: jax.ShapeDtypeStruct(out.shape[1:], out.dtype), outs)


def _unsent(made: Algorithm) -> Algorithm:
    """The algorithm of one consortium, whose model stays where it is."""

    def step(key, state, population):
        state, info = made.step(key, state, population)
        return state, info | {name: Count.of(jnp.int32(0), 0) for name in ("uplink_bytes", "downlink_bytes")}

    parts = made.parts._replace(complete=False)  # an edge above would count what nobody sends
    return made._replace(step=step, parts=parts)
