"""Views: what a curious server that follows the protocol holds after a round, and all that its attacks may read.

    view = each_message(observe(algorithm, key, state, population))

`observe` replays a round and shows every message as it arrived. What a server holds of it depends on the protocol:

- `each_message`: the server adds messages itself, also with central noise, which it draws after the sum
- `masked_messages`: clients mask their messages for a secure sum
- `released_model`: an observer of two consecutive models; this is also what a secure sum reveals to the server
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim import tree, validate
from fedjax_sim.types import Array, Observed, PyTree
from fedjax_sim.validate import Integer, Positive


class View(NamedTuple):
    """A `View` holds what an attack is given, a row for each message. It holds nothing of the clients' data."""

    broadcast: PyTree  # the model that was sent
    messages: PyTree  # floats [m, ...], as the server reads them; update = local minus broadcast parameters
    weights: Array  # [m] float32; 0 where nothing arrived
    ids: Array  # [m] int32; -1 for a row that belongs to no single client


def each_message(observed: Observed) -> View:
    """Returns the view of a server that receives each client's message.

    Args:
      observed: what `observe` returns.

    Raises: TypeError for messages of integers, which clients send to be masked and added: see `masked_messages`.

    Guarantees: the view contains local noise, and no central noise
    (tests/adversary/test_curious.py::test_who_sees_the_noise).
    """
    validate.part("observed", observed, Observed)
    for leaf in jax.tree.leaves(observed.messages):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            hint = "Of integers a server holds masked ones, under aggregation.secure_sum: masked_messages."
            validate.fail("observed", "messages of floats", str(leaf.dtype), hint, TypeError)
    return View(*observed)


@validate.named_arguments
def masked_messages(observed: Observed, unit: Positive, *, modulus_bits: Annotated[int, Integer(2, 32)] = 32) -> View:
    """Returns the view of a server that receives masked integers, and reads them as if they were not masked.

    Args:
      observed: messages [m, 1, ...] uint32, a word below 2^b for each number, as `observe` shows them under
        `aggregation.secure_sum`.
      unit: positive, the float that the integer 1 stands for: a row is read as unit x its integers in
        [-2^(b-1), 2^(b-1)).
      modulus_bits: b in [2, 32].

    Raises: TypeError for messages that are not uint32, since a server must not see messages before they are masked;
      ValueError for more than one word for each number.

    Guarantees: the numbers are uniform, and their sum is still right
    (tests/adversary/test_curious.py::test_masks_hide_everything).

    >>> observed = Observed((), jnp.array([[3], [2**32 - 1]], jnp.uint32), jnp.ones(2), jnp.arange(2))
    >>> masked_messages(observed, 0.5).messages.tolist()
    [1.5, -0.5]
    """
    validate.part("observed", observed, Observed)
    _check_dtype(jax.tree.leaves(observed.messages), jnp.uint32, "Put aggregation.secure_sum around the modular_sum.")
    num_spare_bits = 32 - modulus_bits

    def read(x):
        if x.ndim < 2 or x.shape[1] != 1:
            validate.fail("observed", "messages [m, 1, ...], a word a number", x.shape)
        # Shifted to the top of a word and back as a signed integer, so that the highest of the b bits is the sign.
        shifted = jax.lax.bitcast_convert_type(x[:, 0] << num_spare_bits, jnp.int32)
        return (shifted >> num_spare_bits).astype(jnp.float32) * unit

    return View(*observed)._replace(messages=jax.tree.map(read, observed.messages))


def _check_dtype(leaves: list[Array], dtype: Any, hint: str) -> None:
    for leaf in leaves:
        if leaf.dtype != dtype:
            validate.fail("observed", f"{jnp.dtype(dtype).name} messages", str(leaf.dtype), hint, TypeError)


def released_model(broadcast: PyTree, params: PyTree) -> View:
    """Returns the view of an observer of two consecutive models: a single message, their difference.

    The message belongs to no single client. If the server's step is SGD of learning rate 1, it is the aggregate.

    Args:
      broadcast: the model before the round.
      params: the model after it.

    >>> import jax.numpy as jnp
    >>> released_model({"w": jnp.zeros(2)}, {"w": jnp.array([1.0, 3.0])}).messages["w"].tolist()
    [[1.0, 3.0]]
    """
    difference = jax.tree.map(lambda x: x[None], tree.subtract(params, broadcast))
    return View(broadcast, difference, jnp.ones(1), jnp.full(1, -1, jnp.int32))
