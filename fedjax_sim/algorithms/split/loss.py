"""Split learning: `split_loss` makes a loss whose model is cut between parties.

Party 0 is the client: it has the examples, and the layers of its part. The loss is one traced program with links
inside, so two machines take the same steps as one (tests/algorithms/split/test_loss.py::test_split_equals_monolithic).
Instruments take it like any other loss. Federations take it through `split_client`, which counts what crosses.
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
from fedjax_sim.network.link import send, transcript as taken_down
from fedjax_sim.types import Array, PyTree
from fedjax_sim.validate import Number

LABELS_MESSAGE = "labels"  # the name of the message with the labels
# The name of a column of the examples that is 1 for real examples and 0 in padding, where all columns are 0.
PRESENT = "present"


@dataclass(frozen=True, eq=False)
class Split:
    """A loss `(params, examples, key) -> dict` of per-example values, whose model is cut between parties."""

    cut: Cut  # which party holds which layers of the model
    loss: Callable  # (outputs, targets) -> per-example values
    links: Mapping[str, Link]  # by the name of the layer that receives; a plain link where a layer is not named
    measure: Callable | None = None  # as in `models.supervised`
    decorrelation: float = 0.0  # factor of the distance correlation between the examples and party 0's messages
    helped: ClassVar[bool] = True  # no client can compute it alone and count what crosses: `split_client` does that

    @property
    def model(self) -> Model:
        """The model as its parties compute it together, with all messages between them sent over the links."""
        plain = Link()
        return self._moving(lambda key, x, source, target, name: send(self.links.get(name, plain), key, x, name))

    @property
    def changes_outputs(self) -> bool:
        """Whether a link changes the activations that are sent over it."""
        return any(link.forward is not None for name, link in self.links.items() if name != LABELS_MESSAGE)

    def _moving(self, move: Callable) -> Model:
        """The model, with activations passed from party to party by `move(key, x, source, target, name)`."""

        def apply(params, state, x, key, train):
            return self.cut.apply(params, x, lambda *sent: move(key, *sent)), state

        return Model(self.cut.model.init, apply)

    def __call__(self, params: PyTree, examples: PyTree, key: Array | None = None) -> dict[str, Array]:
        """Computes per-example values as `models.supervised`, over the links, in evaluations too."""

        def through(link, key, x, source, target, *, name, kind="activations"):
            return x if kind == "labels" else send(link, key, x, name)

        return self.through(through, params, examples, key)

    def through(self, tap: Callable, params: PyTree, examples: PyTree, key: Array | None) -> dict[str, Array]:
        """Computes the loss with `tap` in the place of the links, as `network.link.transcript` does.

        Args:
          tap: (link, key, x, source, target, *, name, kind) -> what the party `target` receives of x [batch, ...].
          params: of the whole model.
          examples: {"x": [batch, ...], "y": [batch, ...]}, and a column `PRESENT` if `decorrelation` is positive.
          key: of the step; None for an evaluation, which leaves the distance correlation out.
        """
        check_examples(examples)
        plain = Link()
        smashed: list[Array] = []  # the activations that the client sends

        def move(key, x, source, target, name):
            smashed.extend([x.reshape(x.shape[0], -1)] * (source == 0))
            return tap(self.links.get(name, plain), key, x, source, target, name=name)

        if self.cut.last != 0:
            link = self.links.get(LABELS_MESSAGE, plain)
            labels = tap(link, None, examples["y"], 0, self.cut.last, name=LABELS_MESSAGE, kind="labels")
            examples = {**examples, "y": labels}
        values = supervised(self._moving(move), self.loss, measure=self.measure)(params, examples, key)
        if not self.decorrelation or key is None:
            return values
        # The distance correlation is a number of the whole batch, so padding must be left out of it.
        if PRESENT not in examples:
            hint = "It would take padding for examples: train by split_client, splitfed or split_learning."
            validate.fail("examples", f"a column {PRESENT!r} with decorrelation", sorted(examples), hint)
        correlation = distance_correlation(examples["x"], jnp.concatenate(smashed, axis=1), examples.get(PRESENT))
        by_example = jnp.broadcast_to(correlation, values["loss"].shape).astype(values["loss"].dtype)
        loss = values["loss"] + self.decorrelation * by_example
        return {**values, "loss": loss, "distance_correlation": by_example}


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
    """Makes the loss of a model that several parties hold together.

    Args:
      model: a model with layers, as every built-in network is.
      loss: `(outputs, targets) -> dict`, as in `models.supervised`. The party with the last layer computes it. If that
        is not party 0, the client sends this party the labels.
      at: where the model is cut: names of layers, or the party that holds each layer (`models.cut`).
      u_shaped: True: the client holds the last layers too, and keeps the labels; this takes two cuts or more.
      link: one link for all messages, or a link by the name of the layer that receives; None sends messages as they
        are. Labels ("labels") pass no transform, but are encrypted where their link is.
      measure: as in `models.supervised`.
      decorrelation: >= 0, the factor of NoPeek. In training, the distance correlation between a batch's examples and
        the client's messages is added to the loss with this factor, and returned as `distance_correlation`. It takes
        b^2 distances for a batch of b. The client must leave padding out, so only `split_client`, `splitfed` and
        `split_learning` take such a loss.

    Returns: a `Split`, which is a loss function of the whole model's parameters. It trains by plain local steps only:
    `fedprox`, `scaffold`, `mime` and all other clients compute their loss by themselves, and refuse it.

    Raises: ValueError, TypeError as `models.cut`, and for links of layers that receive nothing; for graph networks,
    whose nodes need their neighbours too: take `split_gnn`.

    Guarantees: with plain links 50 steps of Adam are those of the whole model, for 1 to 4 cuts, U-shaped and by branch
    (tests/algorithms/split/test_loss.py::test_split_equals_monolithic); a server's view has no examples and, if
    U-shaped, no labels (::test_what_each_party_sees); bytes are those of the arrays that are sent
    (::test_the_worked_configuration); decorrelation makes messages tell less of the examples, and leaves padding out
    (::test_no_peek).

    References: Gupta and Raskar 2018; Vepakomma, Gupta, Swedish and Raskar 2018; Vepakomma et al. 2020 (NoPeek).

    >>> import jax
    >>> from fedjax_sim import models
    >>> toy = models.mlp(input_shape=(10,), num_outputs=1, hidden=(20, 15))
    >>> split = split_loss(toy, models.squared_error, "hidden_0")
    >>> params = toy.init(jax.random.key(0))[0]
    >>> values = split(params, {"x": jnp.ones((2, 10)), "y": jnp.ones(2)})
    >>> values["loss"].shape, [sum(x.size for x in jax.tree.leaves(part)) for part in split.cut.split(params)]
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
    """Makes the loss of `split_loss` for a model that is cut already.

    Args:
      made: the model and its cut.
      loss, link, measure, decorrelation: as in `split_loss`.
    """
    validate.function("loss", loss, "outputs, targets", hint="Call its factory: default_loss(task), say.")
    if measure is not None:
        validate.function("measure", measure, "outputs, examples")
    links = {} if link is None else link
    receiving = [*made.places, *_branch_names(made), *[LABELS_MESSAGE] * (made.last != 0)]
    if isinstance(links, Link):
        links = dict.fromkeys(receiving, links)
    elif isinstance(links, Mapping):
        for name, named_link in links.items():
            if name not in receiving:
                validate.fail("link", f"names among {receiving}", name, validate.nearest(name, receiving))
            validate.part(f"link[{name!r}]", named_link, Link)
    else:
        validate.part("link", links, Link)
    return Split(made, loss, dict(links), measure, decorrelation)


def _branch_names(made: Cut) -> list[str]:
    """The names of the messages from branches to the layer that joins them, such as "block/left"."""
    return sorted({path.rsplit("/", 1)[0] for path in made.places if "/" in path})


def split_transcript(split: Split, params: PyTree, examples: PyTree, key: Array | None = None) -> Transcript:
    """Replays a step, and returns what each party receives: activations, labels and gradients of the mean loss.

    Args:
      split: the loss.
      params: of the whole model.
      examples: {"x": [n, ...], "y": [n, ...]}, all of them real.
      key: of the step; None as in an evaluation, without draws.

    Guarantees: in an MLP that is cut between three parties, each party receives the activations, gradients and labels
    that its layers need, and in a U-shaped split the server receives no labels; no message has the shape of the
    examples' x (tests/algorithms/split/test_loss.py::test_what_each_party_sees).
    """
    validate.part("split", split, Split)
    if split.decorrelation and PRESENT not in examples:
        examples = {**examples, PRESENT: jnp.ones(examples["y"].shape[:1])}

    def step(tap):
        values = split.through(tap, params, examples, key)
        weight = values.get("weight", jnp.ones_like(values["loss"]))
        return (values["loss"] * weight).sum() / jnp.where(weight.sum() > 0, weight.sum(), 1)

    return taken_down(step)
