"""A link between two parties of one model: activations go forward, gradients come back, and their bytes are counted.

Each example's activation is a message of its own: the transforms see one example at a time, with the key of its row. So
no message depends on padding or on the other examples of its batch, and bytes are exact counts. The sender's gradient
is the one at what the receiver got, passed through the transform of the way back (straight through the one of the way
there): that is what two machines would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.prng import stream
from fedjax_sim.types import Array, Noise, PyTree, UpdateTransform, Wire
from fedjax_sim.validate import NonNegativeInt

__all__ = ["Link", "Sent", "Tap", "Transcript", "back", "link", "noise_of", "send", "transcript", "wires"]

ENCRYPTION_BITS = 96 + 128  # nonce and tag of a message under AES-GCM (NIST SP 800-38D)


class Link(NamedTuple):
    """What passes between two parties, either way; the transforms are stateless."""

    forward: UpdateTransform | None = None  # of activations; None = as they are
    backward: UpdateTransform | None = None  # of gradients
    encrypted: bool = False  # third parties see random words; the numbers at both ends stay the same
    batch_bits: int = 0  # of each batch and way, beside its examples: headers, nonces


class Sent(NamedTuple):
    """One message."""

    source: int  # the party that sent it
    target: int  # the party that received it
    name: str  # what for: the layer that wants it
    kind: str  # "activations", "gradients" or "labels"
    value: PyTree  # what was received, leaves [n, ...]
    encrypted: bool = False  # others than these two see random words


class Transcript(NamedTuple):
    """All messages of one step, in the order in which they were sent."""

    messages: tuple[Sent, ...]

    def seen_by(self, party: int) -> tuple[Sent, ...]:
        """What a party received."""
        return tuple(message for message in self.messages if message.target == party)

    def overheard(self, key: Array) -> tuple[Sent, ...]:
        """What somebody on the line sees: uint32 words under a pad in the place of what is encrypted.

        Guarantees: the words under a pad are as random as the key's stream, whatever was sent
        (tests/network/test_link.py::test_encrypted_messages_are_random_words).
        """

        def words(i, message):
            pad = stream(jax.random.fold_in(key, i), "pad")
            leaves = jax.tree.leaves(message.value)
            flat = jnp.concatenate([_words(x) for x in leaves])
            return message._replace(value=flat ^ jax.random.bits(pad, flat.shape, jnp.uint32))

        return tuple(words(i, x) if x.encrypted else x for i, x in enumerate(self.messages))


def _words(x: Array) -> Array:
    """The bits of an array as [...] uint32, of each number by itself."""
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
    """A link with any stateless transforms: quantisers, sparsifiers, clips, noise, or one of your own.

    Args:
      forward, backward: of activations and of gradients, such as `transform.quantize(8)`; each sees one example. None:
        sent as they are. An example whose gradient is exactly zero, as that of padding, is sent none, and so no noise:
        where a loss may reach zero, noise on the way back does not hide that it did.
      encrypted: costs 224 bits a batch and way (nonce and tag), hides it from third parties, changes nothing else.
      batch_bits: what a batch costs beside, each way.

    Raises: ValueError for transforms that keep a state, that do something at the server, and for noise that is added
    to a sum.

    Guarantees: without transforms a program through it is the one without, to the letter
    (tests/network/test_link.py::test_an_identity_link_changes_nothing); values and gradients under transforms are
    those of two machines (::test_two_machines); padding and the rest of the batch change no message, whose random bits
    are those of its row (::test_examples_are_messages_of_their_own).

    References: Gupta and Raskar 2018, section 3.

    >>> link(encrypted=True).batch_bits
    224
    """
    for name, transform in (("forward", forward), ("backward", backward)):
        if transform is not None:
            validate.part(name, transform, UpdateTransform)
            _check(name, transform)
    return Link(forward, backward, encrypted, batch_bits + ENCRYPTION_BITS * encrypted)


def _check(name: str, transform: UpdateTransform) -> None:
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

    program = jax.make_jaxpr(server_end)(probe).jaxpr
    if program.outvars != program.invars:
        validate.fail(name, "a transform that does nothing at the server", "another", "A link has no server's end.")


def _sent(transform: UpdateTransform | None, key: Array, x: PyTree) -> PyTree:
    """What arrives of x, leaves [n, ...]: each example through the transform, with its row's own key."""
    if transform is None:
        return x

    def one(row, example):
        state, memory = transform.init(example), transform.init_client(example)
        return transform.on_client(jax.random.fold_in(key, row), example, state, memory)[0]

    rows = jnp.arange(jax.tree.leaves(x)[0].shape[0])
    return jax.tree.map(lambda new, old: new.astype(old.dtype), jax.vmap(one)(rows, x), x)


def back(link: Link, key: Array, gradient: PyTree) -> PyTree:
    """What the sender receives of the gradient at what it had sent with this key.

    An example whose gradient is zero, as that of padding, has none sent back: it stays zero whatever the transform.
    """
    if link.backward is None:
        return gradient
    there = [(g != 0).reshape(g.shape[0], -1).any(1) for g in jax.tree.leaves(gradient)]
    some = jnp.stack(there).any(0)
    return tree.where(some, _sent(link.backward, stream(key, "backward"), gradient), tree.zeros_like(gradient))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through(link: Link, key: Array, x: PyTree) -> PyTree:
    return _sent(link.forward, stream(jax.random.wrap_key_data(key), "forward"), x)


def _through_forward(link, key, x):
    return _through(link, key, x), key


def _through_back(link, key, gradient):
    return None, back(link, jax.random.wrap_key_data(key), gradient)


_through.defvjp(_through_forward, _through_back)


def send(link: Link, key: Array | None, x: PyTree, name: str = "") -> PyTree:
    """What the other party receives of x; its gradient goes back through the link.

    Args:
      key: a threefry2x32 key of this step; None: a fixed one, as in evaluations, whose draws are then the same each
        time.
      x: leaves [n, ...], floats, one row an example.
      name: of the message; messages of one step with different names share no random bits.

    Returns: as x.

    >>> import jax
    >>> from fedjax_sim import transform
    >>> half = transform.stateless(lambda key, g: g / 2)
    >>> jax.grad(lambda x: 3 * send(link(backward=half), None, x).sum())(jnp.ones((1, 2))).tolist()
    [[1.5, 1.5]]
    """
    if link.forward is None and link.backward is None:
        return x
    return _through(link, jax.random.key_data(_named(key, name)), x)


def _named(key: Array | None, name: str) -> Array:
    return stream(jax.random.key(0) if key is None else key, f"link {name}")


def wires(link: Link, example: PyTree) -> tuple[Wire, Wire]:
    """(activation, gradient) of one example as they are sent.

    Args:
      example: arrays or specs of one example, without the batch axis.

    Guarantees: bytes are those of the counted arrays (tests/network/test_link.py::test_bytes_are_counted).
    """
    plain = Wire(tree.num_values(example), 8 * tree.num_bytes(example))
    ways = (link.forward, link.backward)
    there, back = (plain if way is None else way.wire(example, plain) for way in ways)
    return there, back


def noise_of(links: Iterable[Link]) -> Noise | None:
    """The noise of a link, if any has some: stated, so that nobody takes the run for one without, or accounts for it.

    Guarantees: tests/algorithms/split/test_client.py::test_noise_on_links_has_no_epsilon.
    """
    ways = [way for one in links for way in (one.forward, one.backward)]
    found = next((way.facts.noise for way in ways if way is not None and way.facts.noise), None)
    return found and found._replace(mechanism="noise on links", unit="record")


class Tap:
    """Takes a step's messages down; `transcript` calls the step with one."""

    def __init__(self, offsets: list | None = None):
        self.offsets, self.messages, self.sources = offsets, [], []

    def __call__(
        self,
        link: Link,
        key: Array | None,
        x: PyTree,
        source: int,
        target: int,
        name: str,
        kind: str = "activations",
    ) -> PyTree:
        """Sends x from one party to another, and notes what arrives; labels are sent as they are."""
        arrived = x if kind == "labels" else send(link, key, x, name)
        if self.offsets is not None and kind != "labels":
            arrived = jax.tree.map(jnp.add, arrived, self.offsets[len(self.messages)])
        self.messages.append(Sent(source, target, name, kind, arrived, link.encrypted))
        self.sources.append((link, key))
        return arrived


def transcript(step: Callable) -> Transcript:
    """All messages of a step, gradients included.

    Args:
      step: (tap) -> the loss that is differentiated, []; it sends whatever crosses between parties by
        `tap(link, key, x, source, target, name, kind)`, and nothing else.

    Returns: the `Transcript`: what went forward in its order, then the gradients, last message first.

    Guarantees: gradients are those that the backward pass sends (tests/network/test_link.py::test_two_machines).

    >>> made = transcript(lambda tap: (2 * tap(Link(), None, jnp.ones((1, 1)), 0, 1, "top")).sum())
    >>> [(x.source, x.target, x.kind, x.value.tolist()) for x in made.messages]
    [(0, 1, 'activations', [[1.0]]), (1, 0, 'gradients', [[2.0]])]
    """
    tap = Tap()
    jax.eval_shape(lambda: step(tap))
    zeros = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), message.value) for message in tap.messages]
    floats = [i for i, message in enumerate(tap.messages) if message.kind != "labels"]
    taps = []

    def run(offsets):
        taps.append(Tap([offsets.get(i, zero) for i, zero in enumerate(zeros)]))
        return step(taps[-1]), [message.value for message in taps[-1].messages]

    gradients, values = jax.grad(run, has_aux=True)({i: zeros[i] for i in floats})
    sent = [message._replace(value=x) for message, x in zip(taps[-1].messages, values, strict=True)]
    returned = []
    for i in reversed(floats):
        link, key = taps[-1].sources[i]
        value = back(link, _named(key, sent[i].name), gradients[i])
        message = sent[i]
        returned.append(message._replace(source=message.target, target=message.source, kind="gradients", value=value))
    return Transcript((*sent, *returned))
