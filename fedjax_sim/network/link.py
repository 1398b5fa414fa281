"""This module holds links between two parties of one model: activations go forward, gradients come back, bytes count.

Each example's activation is a message of its own. A transform sees one example at a time, with the key of the example's
row. So no message depends on padding or on the other examples of its batch, and bytes are exact counts.

The sender's gradient is the gradient at the value that the receiver got, passed through the transform of the way back.
The gradient of the forward transform itself is not taken (straight through). Two machines would compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.prng import fold_in, stream
from fedjax_sim.types import Array, Noise, PyTree, UpdateTransform, Wire
from fedjax_sim.validate import NonNegativeInt

# Nonce and tag of a message under AES-GCM (NIST SP 800-38D).
ENCRYPTION_BITS = 96 + 128


class Link(NamedTuple):
    """The transforms between two parties, for both directions. They are stateless."""

    forward: UpdateTransform | None = None  # of activations; None = they are sent unchanged
    backward: UpdateTransform | None = None  # of gradients; None = they are sent unchanged
    encrypted: bool = False  # third parties see random words; the numbers at both ends stay the same
    batch_bits: int = 0  # bits of each batch and direction beside its examples, such as headers and nonces


class Sent(NamedTuple):
    """A `Sent` is one message between two parties."""

    source: int  # the party that sent it
    target: int  # the party that received it
    name: str  # its purpose: the layer that needs it
    kind: str  # "activations", "gradients" or "labels"
    value: PyTree  # the received value, leaves [n, ...]
    encrypted: bool = False  # whether everybody except these two parties sees random words


class Transcript(NamedTuple):
    """All messages of one step, in the order in which they were sent."""

    messages: tuple[Sent, ...]

    def seen_by(self, party: int) -> tuple[Sent, ...]:
        """Returns the messages that a party received."""
        return tuple(message for message in self.messages if message.target == party)

    def overheard(self, key: Array) -> tuple[Sent, ...]:
        """Returns the messages as an eavesdropper sees them.

        An encrypted value is replaced by uint32 words under a random pad.

        Args:
          key: of the pads.

        Guarantees: The words under a pad are as random as the key's stream, whatever was sent
        (tests/network/test_link.py::test_encrypted_messages_are_random_words).
        """

        def encrypted_message(index, message):
            pad = stream(fold_in(key, index), "pad")
            leaves = jax.tree.leaves(message.value)
            flat = jnp.concatenate([_words(leaf) for leaf in leaves])
            return message._replace(value=flat ^ jax.random.bits(pad, flat.shape, jnp.uint32))

        return tuple(
            encrypted_message(index, message) if message.encrypted else message
            for index, message in enumerate(self.messages)
        )


def _words(x: Array) -> Array:
    """Returns the bits of each number of an array, as uint32 words."""
    wide = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.int32)
    return jax.lax.bitcast_convert_type(wide, jnp.uint32).reshape(-1)


@validate.named_arguments
def link(
    *,
    forward: UpdateTransform | None = None,
    backward: UpdateTransform | None = None,
    encrypted: bool = False,
    batch_bits: NonNegativeInt = 0,
) -> Link:
    """Makes a link with any stateless transforms: quantisers, sparsifiers, clips, noise, or a user's own.

    Args:
      forward, backward: of activations and of gradients, such as `transform.quantize(8)`; each sees one example. None:
        values are sent unchanged. An example whose gradient is exactly zero, such as padding, is sent no gradient, and
        so no noise. So if a loss may reach zero, noise on the way back does not hide that it did.
      encrypted: adds 224 bits for each batch and direction (nonce and tag), hides values from third parties, and
        changes nothing else.
      batch_bits: additional bits of a batch, for each direction.

    Returns: `Link`.

    Raises: ValueError for transforms that keep a state, that act at the server, and for noise that is added to a sum.

    Guarantees: Without transforms, a program with the link is the program without it, to the letter
    (tests/network/test_link.py::test_an_identity_link_changes_nothing). Values and gradients under transforms are those
    of two machines (::test_two_machines). Padding and the rest of the batch change no message, and a message's random
    bits are those of its row (::test_examples_are_messages_of_their_own).

    References: Gupta and Raskar 2018, section 3.

    >>> link(encrypted=True).batch_bits
    224
    """
    for name, transform in (("forward", forward), ("backward", backward)):
        if transform is not None:
            validate.part(name, transform, UpdateTransform)
            _check_transform(name, transform)
    return Link(forward, backward, encrypted, batch_bits + ENCRYPTION_BITS * encrypted)


def _check_transform(name: str, transform: UpdateTransform) -> None:
    """Refuses a transform that a link cannot apply to each example by itself.

    Args:
      name: of the link's argument, for errors: "forward" or "backward".
      transform: is tried on one example of 8 float32 numbers, and only traced.

    Raises: ValueError for noise that is no noise on each message, for integers that are to be summed, for a state at
      the server or at a client, and for a transform that changes the message at the server.
    """
    noise = transform.facts.noise
    if noise is not None and noise.place != "local":
        validate.fail(name, "noise on each message", noise.place, "Nothing is summed here: take local_gaussian.")
    if transform.facts.integer_range is not None:
        validate.fail(name, "messages of floats", "integers for a sum", "Nothing is summed here: integers=False.")
    probe = jnp.zeros(8)
    if jax.tree.leaves(jax.eval_shape(lambda: (transform.init(probe), transform.init_client(probe)))):
        validate.fail(name, "a transform without state", "one with a memory", "Each example is a message of its own.")

    def server_end(x):
        measured = transform.on_client(jax.random.key(0), x, transform.init(x), transform.init_client(x))[2]
        return transform.on_server(jax.random.key(0), None, x, transform.init(x), measured, None)[0]

    # A transform does nothing at the server if its traced program returns its input variables.
    jaxpr = jax.make_jaxpr(server_end)(probe).jaxpr
    if jaxpr.outvars != jaxpr.invars:
        validate.fail(name, "a transform that does nothing at the server", "another", "A link has no server's end.")


def _sent(transform: UpdateTransform | None, key: Array, x: PyTree) -> PyTree:
    """Passes each example through the transform with the key of its row, and returns the received values."""
    if transform is None:
        return x

    def send_example(row, example):
        state = transform.init(example)
        memory = transform.init_client(example)
        return transform.on_client(fold_in(key, row), example, state, memory)[0]

    rows = jnp.arange(jax.tree.leaves(x)[0].shape[0])
    # A transform may compute in another dtype; the receiver's program expects that of x.
    return jax.tree.map(lambda new, old: new.astype(old.dtype), jax.vmap(send_example)(rows, x), x)


def back(link: Link, key: Array, gradient: PyTree) -> PyTree:
    """Computes the gradient that the sender receives, at the value that was sent with this key.

    An example whose gradient is zero, such as padding, is sent no gradient: it stays zero whatever the transform does.

    Args:
      link: of the forward message.
      key: of the forward message.
      gradient: leaves [n, ...], at the value that the receiver got.
    """
    if link.backward is None:
        return gradient
    is_nonzero = [(leaf != 0).reshape(leaf.shape[0], -1).any(1) for leaf in jax.tree.leaves(gradient)]
    any_nonzero = jnp.stack(is_nonzero).any(0)
    return tree.where(any_nonzero, _sent(link.backward, stream(key, "backward"), gradient), tree.zeros_like(gradient))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through(link: Link, key: Array, x: PyTree) -> PyTree:
    """The received value of x, with the link's backward transform as its derivative; `key` is raw key data."""
    return _sent(link.forward, stream(jax.random.wrap_key_data(key), "forward"), x)


def _through_forward(link, key, x):
    return _through(link, key, x), key


def _through_back(link, key, gradient):
    return None, back(link, jax.random.wrap_key_data(key), gradient)


_through.defvjp(_through_forward, _through_back)


def send(link: Link, key: Array | None, x: PyTree, name: str = "") -> PyTree:
    """Sends x to the other party, and returns the received value. Its gradient goes back through the link.

    Args:
      link: between the two parties.
      key: a threefry2x32 key of this step. None: a fixed key, as in evaluations, whose draws are then the same each
        time.
      x: leaves [n, ...], floats, one row for each example.
      name: of the message. Messages of one step with different names share no random bits.

    Returns: a pytree like x.

    >>> import jax
    >>> from fedjax_sim import transform
    >>> half = transform.stateless(lambda key, g: g / 2)
    >>> jax.grad(lambda x: 3 * send(link(backward=half), None, x).sum())(jnp.ones((1, 2))).tolist()
    [[1.5, 1.5]]
    """
    if link.forward is None and link.backward is None:
        return x
    # A typed key cannot be an argument with a derivative, so its raw data is passed.
    return _through(link, jax.random.key_data(_named(key, name)), x)


def _named(key: Array | None, name: str) -> Array:
    """Derives the key of a message in a step; a fixed key in evaluations."""
    return stream(jax.random.key(0) if key is None else key, f"link {name}")


def wires(link: Link, example: PyTree) -> tuple[Wire, Wire]:
    """Returns the wire formats of one example's activation and gradient, as they are sent.

    Args:
      link: whose transforms are applied.
      example: arrays or specs of one example, without the batch axis.

    Guarantees: Bytes are those of the counted arrays (tests/network/test_link.py::test_bytes_are_counted).
    """
    plain = Wire(tree.num_values(example), 8 * tree.num_bytes(example))
    transforms = (link.forward, link.backward)
    activation_wire, gradient_wire = (
        plain if transform is None else transform.wire(example, plain) for transform in transforms
    )
    return activation_wire, gradient_wire


def noise_of(links: Iterable[Link]) -> Noise | None:
    """Returns the noise of links, if any of them adds noise; None otherwise.

    It is stated as noise that no accountant knows. So nobody takes the run for a run without noise, or accounts for it.

    Guarantees: A run with noise on links has no epsilon
    (tests/algorithms/split/test_client.py::test_noise_on_links_has_no_epsilon).
    """
    transforms = [transform for link in links for transform in (link.forward, link.backward)]
    noise = next(
        (transform.facts.noise for transform in transforms if transform is not None and transform.facts.noise), None
    )
    return noise and noise._replace(mechanism="noise on links", unit="record")


class Tap:
    """Records the messages of a step; `transcript` calls the step with a tap.

    Args:
      offsets: numbers that are added to each received value, so that the gradients at these values can be taken. None:
        nothing is added.
    """

    def __init__(self, offsets: list | None = None):
        self.offsets = offsets
        self.messages = []
        self.sources = []

    def __call__(
        self,
        link: Link,
        key: Array | None,
        x: PyTree,
        source: int,
        target: int,
        *,
        name: str,
        kind: str = "activations",
    ) -> PyTree:
        """Sends x from one party to another, and records the received value. Labels are sent unchanged.

        Args:
          link, key, x: as in `send`.
          source, target: the parties.
          name: of the message, as in `send`.
          kind: "activations" or "labels".
        """
        arrived = x if kind == "labels" else send(link, key, x, name)
        if self.offsets is not None and kind != "labels":
            arrived = jax.tree.map(jnp.add, arrived, self.offsets[len(self.messages)])
        message = Sent(source=source, target=target, name=name, kind=kind, value=arrived, encrypted=link.encrypted)
        self.messages.append(message)
        self.sources.append((link, key))
        return arrived


def transcript(step: Callable) -> Transcript:
    """Records all messages of a step, including gradients.

    Args:
      step: (tap) -> the loss [] that is differentiated. It sends everything that crosses between parties by `tap(link,
        key, x, source, target, name=..., kind=...)`, and by nothing else.

    Returns: `Transcript`: the forward messages in their order, and then the gradients, those of the last message first.

    Guarantees: The gradients are those that the backward pass sends (tests/network/test_link.py::test_two_machines).

    >>> messages = transcript(lambda tap: (2 * tap(Link(), None, jnp.ones((1, 1)), 0, 1, name="top")).sum()).messages
    >>> [(message.source, message.target, message.kind, message.value.tolist()) for message in messages]
    [(0, 1, 'activations', [[1.0]]), (1, 0, 'gradients', [[2.0]])]
    """
    tap = Tap()
    # A first, abstract run counts the messages and finds their shapes.
    jax.eval_shape(lambda: step(tap))
    zeros = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), message.value) for message in tap.messages]
    with_gradient = [index for index, message in enumerate(tap.messages) if message.kind != "labels"]
    taps = []

    def run(offsets):
        taps.append(Tap([offsets.get(index, zero) for index, zero in enumerate(zeros)]))
        return step(taps[-1]), [message.value for message in taps[-1].messages]

    # The gradient at a received value is the gradient with respect to an offset of zero that is added to it.
    gradients, values = jax.grad(run, has_aux=True)({index: zeros[index] for index in with_gradient})
    sent = [message._replace(value=x) for message, x in zip(taps[-1].messages, values, strict=True)]
    returned = []
    for index in reversed(with_gradient):
        link, key = taps[-1].sources[index]
        value = back(link, _named(key, sent[index].name), gradients[index])
        message = sent[index]
        returned.append(message._replace(source=message.target, target=message.source, kind="gradients", value=value))
    return Transcript((*sent, *returned))
