"""Split learning: a loss whose model is cut between parties, what crosses, and the client that trains with it.

Party 0 is the client: it has the examples, and its layers. The loss is one traced program with links inside, so every
client, algorithm and instrument takes it: the steps of two machines are those of one (tests/algorithms/test_split.py::
test_split_equals_monolithic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim import client, validate
from fedjax_sim.algorithms.costs import words_of
from fedjax_sim.client import LocalWork
from fedjax_sim.models import Cut, Model, cut, distance_correlation, supervised
from fedjax_sim.network import Link, Transcript
from fedjax_sim.network.link import Tap, send, wires
from fedjax_sim.network.link import transcript as taken_down
from fedjax_sim.types import Array, ClientData, ClientUpdate, Count, Metric, PyTree

__all__ = ["SPLIT_METRICS", "Crossing", "Split", "client_bits", "crossings", "split_client", "split_loss", "transcript"]

PRESENT = "present"  # a column of the examples: 0 in padding, as all of it
SPLIT_METRICS = (
    Metric("split_up_bytes", "activations, labels and gradients that clients sent", "bytes"),
    Metric("split_down_bytes", "activations and gradients that clients received", "bytes"),
    Metric("split_other_bytes", "the same among the other parties", "bytes"),
)


@dataclass(frozen=True, eq=False)
class Split:
    """A loss `(params, examples, key) -> dict` of per-example values, whose model is cut between parties."""

    cut: Cut
    loss: Callable  # (outputs, targets) -> values
    links: Mapping[str, Link]  # by the layer that receives; plain where it is not named
    measure: Callable | None = None
    decorrelation: float = 0.0  # of the examples' distance correlation with what party 0 sends

    def __call__(self, params: PyTree, examples: PyTree, key: Array | None = None) -> dict[str, Array]:
        """As `models.supervised`; what crosses goes through the links, in evaluations too."""

        def through(link, key, x, source, target, name, kind="activations"):
            return x if kind == "labels" else send(link, key, x, name)

        return self.through(through, params, examples, key)

    def through(self, tap: Callable, params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        """The loss with `tap` in the place of the links, as `network.link.transcript` calls it."""
        plain, smashed = Link(), []

        def apply(params, state, x, key, train):
            def move(x, source, target, name):
                smashed.extend([x.reshape(x.shape[0], -1)] * (source == 0))
                return tap(self.links.get(name, plain), key, x, source, target, name)

            return self.cut.apply(params, x, move), state

        if self.cut.last != 0:
            labels = tap(plain, None, examples["y"], 0, self.cut.last, "labels", "labels")
            examples = {**examples, "y": labels}
        model = Model(self.cut.model.init, apply)
        values = supervised(model, self.loss, measure=self.measure)(params, examples, key)
        if not self.decorrelation or key is None:
            return values
        found = distance_correlation(examples["x"], jnp.concatenate(smashed, axis=1), examples.get(PRESENT))
        told = jnp.broadcast_to(found, values["loss"].shape).astype(values["loss"].dtype)
        return {**values, "loss": values["loss"] + self.decorrelation * told, "distance_correlation": told}


def split_loss(
    model: Model,
    loss: Callable,
    at: str | Sequence[str] | Mapping[str, int],
    *,
    u_shaped: bool = False,
    link: Link | Mapping[str, Link] | None = None,
    measure: Callable | None = None,
    decorrelation: float = 0.0,
) -> Split:
    """The loss of a model that several parties hold.

    Args:
      model: one with layers, as every built-in network.
      loss: `(outputs, targets) -> dict`, as in `models.supervised`; the party with the last layer computes it. Unless
        that is party 0, the client sends it the labels.
      at: where the model is cut: names of layers, or who holds which (`models.cut`).
      u_shaped: the client holds the last layers too, and keeps the labels; with two cuts or more.
      link: for all that crosses, or by the name of the layer that receives; None: as it is.
      measure: as in `models.supervised`.
      decorrelation: >= 0, NoPeek: so many times the distance correlation between a batch's examples and what the client
        sends is added to the loss in training, and told as `distance_correlation`. It takes b^2 distances a batch, and
        a client that leaves padding out: `split_client`, `splitfed` or `split_learning`.

    Returns: a `Split`, which is a loss function of the whole model's parameters.

    Raises: ValueError, TypeError as `models.cut`, and for links of layers that receive nothing.

    Guarantees: with plain links 50 steps of Adam are those of the whole model, for 1 to 4 cuts, U-shaped and by branch
    (tests/algorithms/test_split.py::test_split_equals_monolithic); a server's view has neither examples nor, U-shaped,
    labels (::test_what_each_party_sees); bytes are the counted arrays (::test_the_worked_configuration); decorrelation
    leaves less to see, and padding out (::test_no_peek).

    References: Gupta and Raskar 2018; Vepakomma, Gupta, Swedish and Raskar 2018; Vepakomma et al. 2020 (NoPeek).

    >>> from fedjax_sim import models
    >>> toy = models.mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))
    >>> made = split_loss(toy, models.squared_error, "hidden_0")
    >>> params = toy.init(jax.random.key(0))[0]
    >>> values = made(params, {"x": jnp.ones((2, 10)), "y": jnp.ones(2)})
    >>> values["loss"].shape, [sum(x.size for x in jax.tree.leaves(part)) for part in made.cut.split(params)]
    ((2,), [220, 331])
    """
    made = cut(model, at, u_shaped=u_shaped)
    validate.function("loss", loss, "outputs, targets", hint="Call its factory: default_loss(task), say.")
    validate.in_range("decorrelation", decorrelation, 0, 1e6)
    links = {} if link is None else link
    if isinstance(links, Link):
        links = dict.fromkeys([*made.places, *_branch_names(made)], links)
    elif isinstance(links, Mapping):
        receiving = [*made.places, *_branch_names(made)]
        for name, one in links.items():
            if name not in receiving:
                validate.fail("link", f"names among {receiving}", name, validate.nearest(name, receiving))
            validate.part(f"link[{name!r}]", one, Link)
    else:
        validate.part("link", links, Link)
    return Split(made, loss, dict(links), measure, decorrelation)


def _branch_names(made: Cut) -> list[str]:
    """The names "block/left", ...: what the outputs of branches are named on their way to the join."""
    return sorted({path.rsplit("/", 1)[0] for path in made.places if "/" in path})


def transcript(split: Split, params: PyTree, examples: PyTree, key: Array | None = None) -> Transcript:
    """What each party sees in a step on these examples: activations, labels, gradients of the mean loss.

    Args:
      params: of the whole model; examples: {"x": [n, ...], "y": [n, ...]}; key: of the step.

    Guarantees: tests/algorithms/test_split.py::test_what_each_party_sees.
    """

    def step(tap):
        values = split.through(tap, params, examples, key)
        weight = values.get("weight", jnp.ones_like(values["loss"]))
        return (values["loss"] * weight).sum() / weight.sum()

    return taken_down(step)


class Crossing(NamedTuple):
    """What crosses between two parties for one example, and its way back."""

    source: int
    target: int
    name: str
    kind: str  # "activations" or "labels"
    there: int  # bits
    back: int  # bits of its gradient; 0 of labels
    batch: int  # bits of a batch beside, each way


def crossings(split: Split, params: PyTree, example: PyTree) -> tuple[Crossing, ...]:
    """All that crosses in a training step, for one example.

    Args:
      params: arrays or specs. example: {"x": ..., "y": ...} of one example, without the batch axis; arrays or specs.

    Guarantees: the arrays of a transcript, counted
    (tests/algorithms/test_split.py::test_bytes_are_those_of_the_arrays).
    """
    tap = Tap()
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), example)
    jax.eval_shape(lambda p, e: split.through(tap, p, e, None), params, batch)
    found = []
    for message, (link, _) in zip(tap.messages, tap.sources, strict=True):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message.value)
        there, back = (wire.bits for wire in wires(link, one))
        bits = (there, 0, 0) if message.kind == "labels" else (there, back, link.batch_bits)
        found.append(Crossing(message.source, message.target, message.name, message.kind, *bits))
    return tuple(found)


def client_bits(crossed: Sequence[Crossing], *, training: bool = True) -> dict[str, tuple[int, int]]:
    """{"up", "down", "other"}: (bits of an example, bits of a batch) from party 0, to it, and among the others.

    Without training there are neither labels nor gradients.
    """
    total = {"up": [0, 0], "down": [0, 0], "other": [0, 0]}
    for one in crossed:
        if one.kind == "labels" and not training:
            continue
        ways = [(one.source, one.target, one.there)] + [(one.target, one.source, one.back)] * (
            training and one.back > 0
        )
        for source, target, bits in ways:
            where = "up" if source == 0 else "down" if target == 0 else "other"
            total[where][0] += bits
            total[where][1] += one.batch
    return {where: (bits[0], bits[1]) for where, bits in total.items()}


def split_client(
    split: Split | Sequence[Split],
    optimizer: optax.GradientTransformation,
    work: LocalWork,
    *,
    tier: Callable | None = None,
) -> ClientUpdate:
    """Local training through a cut, whose bytes are counted; under `federated` it is a device with its gateway.

    The update is that of the whole model: where only the client's part is sent on, take `splitfed`.

    Args:
      split: of `split_loss`, or one for each tier.
      optimizer, work: as in `client.local_sgd`; both parties use this optimiser, each on its own parameters, so it must
        treat each coordinate by itself (no clip by the global norm).
      tier: (key, ClientData) -> [] integer, which of the splits a client trains with in this round: by its data (a
        column that says what its device is), or drawn anew (a state of the device).

    Returns: a ClientUpdate with counts `split_up_bytes`, `split_down_bytes` and, with three parties or more,
    `split_other_bytes`: each example's messages in whole bytes, each time that it is visited.

    Raises: ValueError for tiers without a function that tells them, or of other models.

    Guarantees: `client.local_sgd` bit for bit with plain links, whatever the tier
    (tests/algorithms/test_split.py::test_tiers_train_the_same_model); partial batches and epochs are counted by their
    examples (::test_bytes_are_those_of_the_arrays).

    References: Vepakomma et al. 2018, section 2; Samikwa, Di Maio and Braun 2022 (ARES), for cuts by device.
    """
    splits = (split,) if isinstance(split, Split) else tuple(split)
    for i, one in enumerate(splits):
        validate.part(f"split[{i}]", one, Split)
    if (len(splits) > 1) != (tier is not None):
        validate.fail("tier", "a function (key, data) with several splits, None with one", tier)
    whole, more = _by_tier(splits), any(one.cut.num_parties > 2 for one in splits)
    directions = ("up", "down", "other") if more else ("up", "down")
    inner = client.local_sgd(whole, optimizer, work)

    def apply(key, broadcast, state, data):
        place = jnp.zeros((), jnp.int32)
        given = data
        if any(one.decorrelation for one in splits):
            given = data._replace(examples={**data.examples, PRESENT: data.mask.astype(jnp.float32)})
        if tier is not None:
            place = jnp.clip(jnp.asarray(tier(key, data), jnp.int32), 0, len(splits) - 1)
            rows = jnp.broadcast_to(place, data.mask.shape)
            given = given._replace(examples={**given.examples, "tier": rows})
        report, state = inner.apply(key, broadcast, state, given)
        found = [_counted(one, work, broadcast, data) for one in splits]
        counts = {f"split_{way}_bytes": jnp.stack([x[way] for x in found])[place] for way in directions}
        return report._replace(counts=report.counts | counts), state

    return inner._replace(apply=apply, metrics=(*inner.metrics, *SPLIT_METRICS[: len(directions)]))


def _by_tier(splits: tuple[Split, ...]) -> Callable:
    """The loss of whichever split the column "tier" of the examples names; of any, where no link changes anything."""
    if len(splits) == 1:
        return splits[0]
    if any(one.cut.model is not splits[0].cut.model for one in splits):
        validate.fail("split", "cuts of one model", "several models", "Their parameters would differ.")
    plain = all(one.forward is None and one.backward is None for each in splits for one in each.links.values())
    plain &= not any(one.decorrelation for one in splits)

    def loss(params, examples, key):
        examples = dict(examples)
        tiers = examples.pop("tier", None)
        if plain or tiers is None:
            return splits[0](params, examples, key)
        return jax.lax.switch(tiers.max(), [partial(one, key=key) for one in splits], params, examples)

    return loss


def _counted(split: Split, work: LocalWork, params: PyTree, data: ClientData) -> dict[str, Array]:
    """[2] uint32 words of the bytes that cross in the whole local work, by direction."""
    rows = data.mask.shape[0]
    size = rows if work.batch_size is None else min(work.batch_size, rows)
    number = data.mask.sum(dtype=jnp.int32)
    per_epoch = jnp.maximum(-(-number // size), 1)
    steps = jnp.where(number > 0, jnp.asarray(work.own_steps(per_epoch, data.work), jnp.int32), 0)
    epochs, rest = steps // per_epoch, steps % per_epoch
    visited = epochs * number + jnp.minimum(rest * size, number)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), _xy(data.examples))
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    found = client_bits(crossings(split, spec, example))
    return {way: _bytes(visited, steps, *bits) for way, bits in found.items()}


def _xy(examples: PyTree) -> PyTree:
    return {name: examples[name] for name in ("x", "y")}


def _bytes(visited: Array, steps: Array, example_bits: int, batch_bits: int) -> Array:
    """visited * ceil(example_bits / 8) + steps * ceil(batch_bits / 8), as two uint32 words."""
    a, b = (words_of(Count.of(x, -(-bits // 8))) for x, bits in ((visited, example_bits), (steps, batch_bits)))
    low = a[1] + b[1]
    return jnp.stack([a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low])
