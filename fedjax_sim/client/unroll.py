"""A client's local work, unrolled: what it would report after each of its steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.types import Array, ClientData, ClientUpdate, PyTree, Report


def unroll(client: ClientUpdate, key: Array, broadcast: PyTree, data: ClientData, state: PyTree = ()) -> Report:
    """Unrolls a client's round: its report after 1, 2, ..., K local steps of the same trajectory.

    The local model of `local_sgd` after k steps is the broadcast plus the update of row k - 1. Under plain SGD with
    rate eta, the gradient of step k is (update of k - 1 steps - update of k steps) / eta.

    This aid for debugging repeats the work from its start for each row, so it costs K (K + 1) / 2 steps.

    Args:
      client: any client that can stop early.
      key: of the client's round, as `ClientUpdate.apply` takes it.
      broadcast: what the server sends.
      data: of one client; its own `work` is replaced.
      state: of the client, before the round.

    Returns: Report, whose leaves have a first axis of K rows, one for each number of steps. Metrics of row k - 1 are
      those of the first k steps together.

    Raises: ValueError for a client that always does all of its work, and TypeError for what is no client.

    Guarantees: the last row is the client's report, and the update is minus the sum of rate times gradient over the
    steps, each gradient taken at the local model of its step
    (tests/client/test_unroll.py::test_update_is_rebuilt_from_the_unrolled_steps, ::test_last_row_is_the_report).

    >>> import optax
    >>> from fedjax_sim.client import local_sgd, work
    >>> client = local_sgd(lambda w, x, key: (w - x) ** 2 / 2, optax.sgd(0.5), work(num_steps=3))
    >>> data = ClientData(jnp.array([1.0]), jnp.array([True]))
    >>> unroll(client, jax.random.key(0), jnp.zeros(()), data).update.tolist()
    [0.5, 0.75, 0.875]
    """
    validate.part("client", client, ClientUpdate)
    validate.part("data", data, ClientData)
    all_steps = client.facts.all_steps
    if all_steps is None:
        hint = "It cannot stop early, so it has no report after fewer steps."
        validate.fail("client", "a client that states its steps (facts.all_steps)", None, hint)
    num_steps = int(all_steps(data.mask.sum(dtype=jnp.int32)) if callable(all_steps) else all_steps)

    def report_after(count):
        return client.apply(key, broadcast, state, data._replace(work=count))[0]

    return jax.lax.map(report_after, jnp.arange(1, num_steps + 1, dtype=jnp.int32))
