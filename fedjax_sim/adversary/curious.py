"""What a server that follows the protocol holds after a round: all that its attacks may read.

    seen = each_message(observe(algorithm, key, state, population))

`observe` replays a round and shows every message as it arrived. What of it a server holds depends on the protocol:
`each_message` is the view where it adds up messages by itself, also with central noise, which it draws after the sum;
`masked_messages` where clients mask them for a secure sum; `released_model` is the view of whoever sees two models in a
row, which is also what a secure sum leaves the server with.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Array, Observed, PyTree
from fedjax_sim.validate import Integer, Positive

__all__ = ["View", "each_message", "masked_messages", "released_model"]


class View(NamedTuple):
    """What an attack is given, one row a message. It holds nothing of the clients' data."""

    broadcast: PyTree  # the model that was sent
    messages: PyTree  # floats [m, ...], as the server reads them; update = local parameters - broadcast ones
    weights: Array  # [m] float32; 0 where nothing arrived
    ids: Array  # [m] int32; -1 for what is nobody's own


def each_message(observed: Observed) -> View:
    """The view of a server that receives each client's message.

    Raises: TypeError for integers, which clients send to be masked and added: see `masked_messages`.

    Guarantees: central noise is not in it, local noise is
    (tests/adversary/test_curious.py::test_who_sees_the_noise).
    """
    validate.part("observed", observed, Observed)
    for x in jax.tree.leaves(observed.messages):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            hint = "Of integers a server holds masked ones, under aggregation.secure_sum: masked_messages."
            validate.fail("observed", "messages of floats", str(x.dtype), hint, TypeError)
    return View(*observed)


@validate.named_arguments
def masked_messages(observed: Observed, unit: Positive, *, modulus_bits: Annotated[int, Integer(2, 32)] = 32) -> View:
    """The view of a server that receives masked integers for a secure sum, and reads them as if they were none.

    Args:
      observed: of messages [m, 1, ...] uint32, a word below 2^b a number: what `observe` shows under
        `aggregation.secure_sum`.
      unit: positive, the float that one stands for: a row is read as unit x its integers in [-2^(b-1), 2^(b-1)).
      modulus_bits: b in [2, 32].

    Raises: TypeError for messages that are not uint32: what was sent before masks is not for a server's eyes.
    ValueError for more than one word a number.

    Guarantees: uniform numbers, and the sum still right
    (tests/adversary/test_curious.py::test_masks_hide_everything).

    >>> seen = Observed((), jnp.array([[3], [2**32 - 1]], jnp.uint32), jnp.ones(2), jnp.arange(2))
    >>> masked_messages(seen, 0.5).messages.tolist()
    [1.5, -0.5]
    """
    validate.part("observed", observed, Observed)
    _check_dtype(jax.tree.leaves(observed.messages), jnp.uint32, "Put aggregation.secure_sum around the modular_sum.")
    spare = 32 - modulus_bits

    def read(x):
        if x.ndim < 2 or x.shape[1] != 1:
            validate.fail("observed", "messages [m, 1, ...], a word a number", x.shape)
        return (jax.lax.bitcast_convert_type(x[:, 0] << spare, jnp.int32) >> spare).astype(jnp.float32) * unit

    return View(*observed)._replace(messages=jax.tree.map(read, observed.messages))


def _check_dtype(leaves: list[Array], dtype: Any, hint: str) -> None:
    for x in leaves:
        if x.dtype != dtype:
            validate.fail("observed", f"{jnp.dtype(dtype).name} messages", str(x.dtype), hint, TypeError)


def released_model(broadcast: PyTree, params: PyTree) -> View:
    """The view of whoever sees two models in a row: one message, their difference, which is nobody's own.

    It is the aggregate where the server's step is SGD of rate 1.

    Args:
      broadcast: the model before the round.
      params: the model after it.

    >>> import jax.numpy as jnp
    >>> released_model({"w": jnp.zeros(2)}, {"w": jnp.array([1.0, 3.0])}).messages["w"].tolist()
    [[1.0, 3.0]]
    """
    moved = jax.tree.map(lambda x: x[None], tree.subtract(params, broadcast))
    return View(broadcast, moved, jnp.ones(1), jnp.full(1, -1, jnp.int32))
