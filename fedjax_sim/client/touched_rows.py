"""Clients that train only the rows of an embedding table that their own tokens select."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.models import combine, partition
from fedjax_sim.types import Array, ClientData, ClientUpdate, PyTree
from fedjax_sim.validate import fail, part


def touched_rows(client: ClientUpdate, *, table: str = "embedding/table", tokens: str = "x") -> ClientUpdate:
    """Makes a client train a compact embedding table, which has only the rows that the client's tokens select.

    The rows are gathered once and the tokens are renumbered. At the end the difference is scattered into a full update.
    So the cost of a local step does not grow with the vocabulary. There is no effect where a client holds at least as
    many tokens as the table has rows.

    Args:
      client: any stateless client whose update is shaped like the parameters, such as `local_sgd`.
      table: path of the table [V, features] in the parameters. The model must read the table through `tokens` only: an
        output layer that shares the table would lack the other rows.
      tokens: name of the integers among the examples. -1 is padding; other integers outside [0, V) give NaN, as in the
        full table.

    Returns: a stateless ClientUpdate.

    Raises: ValueError, TypeError, when traced: no such table or tokens, or a client with state.

    Guarantees: the update equals that of `client` up to rounding, for SGD and for optimisers that do not move a row
    whose gradients are all zero (momentum, Adam, clipping by norm); weight decay, which would move every row, here
    moves the selected rows
    (tests/client/test_touched_rows.py::test_equals_the_dense_client); a local step sees a table of as
    many rows as the client has tokens (::test_steps_do_not_see_the_vocabulary).

    >>> import jax, optax
    >>> from fedjax_sim.client import local_sgd, work
    >>> loss = lambda params, examples, key: params["embedding"]["table"][examples["x"]].sum((1, 2))
    >>> client = touched_rows(local_sgd(loss, optax.sgd(1.0), work(num_steps=1)))
    >>> data = ClientData({"x": jnp.array([[3, 1]])}, jnp.array([True]))
    >>> report, _ = jax.jit(client.apply)(jax.random.key(0), {"embedding": {"table": jnp.zeros((5, 1))}}, (), data)
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
        table_tree, other_params = partition(broadcast, [table])
        (full_table,), structure = jax.tree.flatten(table_tree)
        if not isinstance(data.examples, dict):
            fail("examples", "a dict that holds the tokens by name", type(data.examples).__name__, error=TypeError)
        token_dtype = getattr(data.examples.get(tokens), "dtype", None)
        if token_dtype is None or not jnp.issubdtype(token_dtype, jnp.integer):
            dtypes = jax.tree.map(lambda x: x.dtype, data.examples)
            fail("tokens", "the name of integers among the examples", tokens, f"They are {dtypes}.", TypeError)
        ids = data.examples[tokens].astype(jnp.int32)
        vocabulary_size = full_table.shape[0]
        compact_size = ids.size
        if compact_size >= vocabulary_size:
            return client.apply(key, broadcast, state, data)
        ids = jnp.where(data.mask.reshape(-1, *[1] * (ids.ndim - 1)), ids, -1)
        is_in_table = (ids >= 0) & (ids < vocabulary_size)
        # Sorted, with fill values last. These lie outside of the table: they read zeros, and are dropped when written.
        rows = jnp.unique(jnp.where(is_in_table, ids, vocabulary_size), size=compact_size, fill_value=vocabulary_size)
        # Ids outside of the table stay outside of the compact table, so that they give NaN there too.
        compact_ids = jnp.where(is_in_table, jnp.searchsorted(rows, ids), jnp.where(ids == -1, -1, compact_size))
        compact_table = full_table.at[rows].get(mode="fill", fill_value=0, indices_are_sorted=True)
        compact_params = combine(jax.tree.unflatten(structure, [compact_table]), other_params)
        compact_data = data._replace(examples={**data.examples, tokens: compact_ids})
        report, state = client.apply(key, compact_params, state, compact_data)
        table_update_tree, other_updates = partition(report.update, [table])
        (compact_update,) = jax.tree.leaves(table_update_tree)
        full_update = jnp.zeros_like(full_table)
        full_update = full_update.at[rows].set(compact_update, mode="drop", indices_are_sorted=True)
        return report._replace(update=combine(jax.tree.unflatten(structure, [full_update]), other_updates)), state

    return client._replace(init=init, apply=apply)
