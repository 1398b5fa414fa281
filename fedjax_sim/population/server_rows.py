"""The server can hold clean rows, which aggregators such as FLTrust compare the clients' messages with."""

from __future__ import annotations

import jax
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.records import with_record
from fedjax_sim.types import Groups, Learned
from fedjax_sim.validate import NonNegativeInt, PositiveInt


@validate.named_arguments
def with_server_rows(data: FederatedData, *, examples: PositiveInt = 100, seed: NonNegativeInt = 0) -> FederatedData:
    """The server receives some rows of the test set. They are clean, fit the clients' task, and nobody trains on them.

    Where clients who train gave test rows (a table that is split, LEAF), the server has rows of theirs, and no noise
    hides these: beside noise they are refused.

    Args:
      data: any data set.
      examples: n, the number of rows, at least 1 and fewer than the test rows. The FLTrust paper uses 100.
      seed: of the choice, which is uniform without replacement.

    Returns: the same data set with `server` (leaves [n, ...]) and the other rows as `test`. Its `held_out` is None:
    held-out clients are made of test rows, so the model would be judged on rows that the server trained on.

    Raises: TypeError if `data` is not a `FederatedData`. ValueError or TypeError for numbers out of range. ValueError
    if the server has rows already, or the test rows of a backdoor exist already.

    Guarantees: every test row is in either `server` or `test`, once
    (tests/population/test_server_rows.py::test_rows_are_moved).

    References: Cao, Fang, Liu and Gong 2021, section 4.1 (the root data set).

    >>> from fedjax_sim.population import digits
    >>> data = with_server_rows(digits(num_clients=50), examples=100)
    >>> len(data.server["y"]), len(data.test["y"]), data.held_out
    (100, 259, None)
    """
    if not isinstance(data, FederatedData):
        hint = "A population alone has no test set: population.digits(...), say, has one."
        validate.fail("data", "a FederatedData", type(data).__name__, hint, TypeError)
    if data.server is not None:
        validate.fail("data", "a data set whose server holds nothing", data.name, "It holds test rows already.")
    if data.triggered is not None:
        hint = "Set the server's rows aside first: it would train on rows that attack_success is measured on."
        validate.fail("data", "a data set without a backdoor", data.name, hint)
    (num_rows,) = {len(leaf) for leaf in jax.tree.leaves(data.test)}
    validate.integer("examples", examples, 1, num_rows - 1, hint=f"The test set has {num_rows} rows.")
    order = np.random.default_rng([seed, 1]).permutation(num_rows)
    # Both parts keep the order of the test set.
    server, test = (
        jax.tree.map(lambda leaf, part=part: leaf[part], data.test)
        for part in (np.sort(order[:examples]), np.sort(order[examples:]))
    )
    train = data.train
    if _tests_on_clients(data):
        effect = "have rows of its own among those that the server trains on"
        train = with_record(train, Learned("the server's rows, which are the clients' test rows", (), effect, ""))
    return data._replace(train=train, server=server, test=test, held_out=None, held_out_names=None)


def _tests_on_clients(data: FederatedData) -> bool:
    """Returns whether clients who train have test rows. Names of groups are not those of their clients."""
    if data.client_names is None or data.held_out_names is None:
        return False
    parts = jax.tree.leaves(data.train, is_leaf=lambda part: isinstance(part, Groups))
    is_grouped = any(isinstance(part, Groups) for part in parts)
    return is_grouped or not set(data.client_names).isdisjoint(data.held_out_names)
