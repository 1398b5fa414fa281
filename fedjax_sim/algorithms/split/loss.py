"""Split learning: a loss whose model is cut between parties.

Party 0 is the client: it has the examples, and its layers. The loss is one traced program with links inside: the steps
of two machines are those of one (tests/algorithms/split/test_loss.py::test_split_equals_monolithic). Instruments take
it as any other loss, and federations by `split_client`, which counts what crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.models import Cut, Model, cut, distance_correlation, supervised
from fedjax_sim.models.model import check_examples
from fedjax_sim.network import Link, Transcript
from fedjax_sim.network.link import send
from fedjax_sim.network.link import transcript as taken_down
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import Number

__all__ = ["LABELS", "PRESENT", "Split", "split_loss", "split_of", "split_transcript"]

LABELS = "labels"  # the name of their message
PRESENT = "present"  # a column of the examples: 0 in padding, as all of it


@dataclass(frozen=True, eq=False)
class Split:
    """A loss `(params, examples, key) -> dict` of per-example values, whose model is cut between parties."""

    cut: Cut
    loss: Callable  # (outputs, targets) -> values
    links: Mapping[str, Link]  # by the layer that receives; plain where it is not named
    measure: Callable | None = None
    decorrelation: float = 0.0  # of the examples' distance correlation with what party 0 sends
    helped: ClassVar[bool] = True  # no client computes it alone, nor counts what crosses: `split_client` does

    @property
    def model(self) -> Model:
        """The model as its parties compute it together: what crosses goes through the links."""
        plain = Link()
        return self._moving(lambda key, x, source, target, name: send(self.links.get(name, plain), key, x, name))

    @property
    def changes_outputs(self) -> bool:
        """Whether a link changes what goes forward."""
        return any(link.forward is not None for name, link in self.links.items() if name != LABELS)

    def _moving(self, move: Callable) -> Model:
        """The model, with `move(key, x, source, target, name)` between its parties."""

        def apply(params, state, x, key, train):
            return self.cut.apply(params, x, lambda *sent: move(key, *sent)), state

        return Model(self.cut.model.init, apply)

    def __call__(self, params: PyTree, examples: PyTree, key: Array | None = None) -> dict[str, Array]:
        """As `models.supervised`; what crosses goes through the links, in evaluations too."""

        def through(link, key, x, source, target, name, kind="activations"):
            return x if kind == "labels" else send(link, key, x, name)

        return self.through(through, params, examples, key)

    def through(self, tap: Callable, params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        """The loss with `tap` in the place of the links, as `network.link.transcript` calls it."""
        check_examples(examples)
        plain, smashed = Link(), []

        def move(key, x, source, target, name):
            smashed.extend([x.reshape(x.shape[0], -1)] * (source == 0))
            return tap(self.links.get(name, plain), key, x, source, target, name)

        if self.cut.last != 0:
            labels = tap(self.links.get(LABELS, plain), None, examples["y"], 0, self.cut.last, LABELS, "labels")
            examples = {**examples, "y": labels}
        values = supervised(self._moving(move), self.loss, measure=self.measure)(params, examples, key)
        if not self.decorrelation or key is None:
            return values
        if PRESENT not in examples:
            hint = "It would take padding for examples: train by split_client, splitfed or split_learning."
            validate.fail("examples", f"a column {PRESENT!r} with decorrelation", sorted(examples), hint)
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
      link: for all that crosses, or by the name of the layer that receives; None: as it is. Labels ("labels") are sent
        as they are, encrypted where their link is.
      measure: as in `models.supervised`.
      decorrelation: >= 0, NoPeek: so many times the distance correlation between a batch's examples and what the client
        sends is added to the loss in training, and told as `distance_correlation`. It takes b^2 distances a batch, and
        a client that leaves padding out, others are refused: `split_client`, `splitfed` or `split_learning`.

    Returns: a `Split`, which is a loss function of the whole model's parameters. It trains by plain local steps:
    `fedprox`, `scaffold`, `mime` and all other clients, which compute their loss by themselves, refuse it.

    Raises: ValueError, TypeError as `models.cut`, and for links of layers that receive nothing; for graph networks,
    whose nodes need their neighbours too: take `split_gnn`.

    Guarantees: with plain links 50 steps of Adam are those of the whole model, for 1 to 4 cuts, U-shaped and by branch
    (tests/algorithms/split/test_loss.py::test_split_equals_monolithic); a server's view has neither examples nor,
    U-shaped, labels (::test_what_each_party_sees); bytes are the counted arrays (::test_the_worked_configuration);
    decorrelation leaves less to see, and padding out (::test_no_peek).

    References: Gupta and Raskar 2018; Vepakomma, Gupta, Swedish and Raskar 2018; Vepakomma et al. 2020 (NoPeek).

    >>> import jax
    >>> from fedjax_sim import models
    >>> toy = models.mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))
    >>> made = split_loss(toy, models.squared_error, "hidden_0")
    >>> params = toy.init(jax.random.key(0))[0]
    >>> values = made(params, {"x": jnp.ones((2, 10)), "y": jnp.ones(2)})
    >>> values["loss"].shape, [sum(x.size for x in jax.tree.leaves(part)) for part in made.cut.split(params)]
    ((2,), [220, 331])
    """
    return split_of(cut(model, at, u_shaped=u_shaped), loss, link, measure, decorrelation)


@validate.named_arguments
def split_of(
    made: Cut,
    loss: Callable,
    link: Link | Mapping[str, Link] | None,
    measure: Callable | None,
    decorrelation: Annotated[float, Number(0, 1000000.0)],
) -> Split:
    """`split_loss` of a model that is cut already."""
    validate.function("loss", loss, "outputs, targets", hint="Call its factory: default_loss(task), say.")
    if measure is not None:
        validate.function("measure", measure, "outputs, examples")
    links = {} if link is None else link
    receiving = [*made.places, *_branch_names(made), *[LABELS] * (made.last != 0)]
    if isinstance(links, Link):
        links = dict.fromkeys(receiving, links)
    elif isinstance(links, Mapping):
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


def split_transcript(split: Split, params: PyTree, examples: PyTree, key: Array | None = None) -> Transcript:
    """What each party sees in a step on these examples: activations, labels, gradients of the mean loss.

    Args:
      params: of the whole model; examples: {"x": [n, ...], "y": [n, ...]}; key: of the step.

    Guarantees: tests/algorithms/split/test_loss.py::test_what_each_party_sees.
    """
    validate.part("split", split, Split)
    if split.decorrelation and PRESENT not in examples:
        examples = {**examples, PRESENT: jnp.ones(examples["y"].shape[:1])}

    def step(tap):
        values = split.through(tap, params, examples, key)
        weight = values.get("weight", jnp.ones_like(values["loss"]))
        return (values["loss"] * weight).sum() / jnp.where(weight.sum() > 0, weight.sum(), 1)

    return taken_down(step)
