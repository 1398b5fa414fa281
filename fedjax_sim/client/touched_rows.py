"""Embedding tables of which a client trains only the rows that its tokens select."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.models import combine, partition
from fedjax_sim.types import Array, ClientData, ClientUpdate, PyTree
from fedjax_sim.validate import fail, part

__all__ = ["touched_rows"]


def touched_rows(client: ClientUpdate, *, table: str = "embedding/table", tokens: str = "x") -> ClientUpdate:
    """The same client, trained on a compact embedding table with only the rows that its own tokens select.

    The rows are gathered once, tokens renumbered, and the difference is scattered into a full update at the end, so the
    cost of a local step does not grow with the vocabulary. Without effect where a client holds at least as many tokens
    as the table has rows.

    Args:
      client: any stateless client whose update is shaped like the parameters, such as `local_sgd`.
      table: path of the table [V, features] in the parameters, which must be read through `tokens` only (an output
        layer that shares it would lack the other rows).
      tokens: name of the integers among the examples; -1 is padding, others outside [0, V) give NaN as before.

    Returns: a stateless ClientUpdate.

    Raises: ValueError, TypeError, when traced: no such table or tokens, or a client with state.

    Guarantees: the update of the client itself to rounding, for SGD and for optimisers that do not move a row whose
    gradients are all zero (momentum, Adam, clipping by norm); weight decay, which would move every row, here moves the
    selected ones (tests/client/test_touched_rows.py::test_equals_the_dense_client); a local step sees a table of as
    many rows as the client has tokens (::test_steps_do_not_see_the_vocabulary).

    >>> import jax, optax
    >>> from fedjax_sim.client import local_sgd, work
    >>> loss = lambda params, examples, key: params["embedding"]["table"][examples["x"]].sum((1, 2))
    >>> client = touched_rows(local_sgd(loss, optax.sgd(1.0), work(num_steps=1)))
    >>> data = ClientData({"x": jnp.array([[3, 1]])}, jnp.array([True]))
    >>> report, _ = client.apply(jax.random.key(0), {"embedding": {"table": jnp.zeros((5, 1))}}, (), data)
    >>> report.update["embedding"]["table"].ravel().tolist()
    [0.0, -1.0, 0.0, -1.0, 0.0]
    """
    part("client", client, ClientUpdate)
    if client.facts.noise is not None:
        hint = "Rows without noise would reveal which tokens a client holds."
        fail("client", "a client without noise", client.facts.noise.mechanism, hint)

    def init(params: PyTree) -> PyTree:
        state = client.init(params)
        if jax.tree.leaves(state):
            hint = "Its state would need rows of every round's own table."
            fail("client", "a client without state", jax.tree.structure(state), hint)
        return state

    def apply(key: Array, broadcast: PyTree, state: PyTree, data: ClientData) -> tuple:
        chosen, rest = partition(broadcast, [table])
        (full,), structure = jax.tree.flatten(chosen)
        if not isinstance(data.examples, dict):
            fail("examples", "a dict that holds the tokens by name", type(data.examples).__name__, error=TypeError)
        if tokens not in data.examples or not jnp.issubdtype(data.examples[tokens].dtype, jnp.integer):
            shown = {name: x.dtype for name, x in data.examples.items()}
            fail("tokens", "the name of integers among the examples", tokens, f"They are {shown}.", TypeError)
        words = data.examples[tokens].astype(jnp.int32)
        vocabulary, size = full.shape[0], words.size
        if size >= vocabulary:
            return client.apply(key, broadcast, state, data)
        words = jnp.where(data.mask.reshape(-1, *[1] * (words.ndim - 1)), words, -1)
        known = (words >= 0) & (words < vocabulary)
        rows = jnp.unique(  # sorted, with fill values last
            jnp.where(known, words, vocabulary), size=size, fill_value=vocabulary
        )
        words = jnp.where(known, jnp.searchsorted(rows, words), jnp.where(words == -1, -1, size))
        compact = full.at[rows].get(mode="fill", fill_value=0, indices_are_sorted=True)
        shared = combine(jax.tree.unflatten(structure, [compact]), rest)
        report, state = client.apply(key, shared, state, data._replace(examples={**data.examples, tokens: words}))
        chosen, rest = partition(report.update, [table])
        update = jnp.zeros_like(full).at[rows].set(jax.tree.leaves(chosen)[0], mode="drop", indices_are_sorted=True)
        return report._replace(update=combine(jax.tree.unflatten(structure, [update]), rest)), state

    return client._replace(init=init, apply=apply)
