"""What factories take of a data set, beside the data: sizes, names, weights and the server's rows.

The names are those of `validate.FromData`, which no config sets.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import validate
from fedjax_sim.population import FederatedData, Grouped, Stored
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.types import ClientData

# The input that the model of a task takes; tasks that are not listed take "features".
INPUTS = {"quadratic": "point", "next_token": "tokens"}
INPUTS |= dict.fromkeys(("node_classification", "graph_classification", "link_prediction"), "graph")
# Tasks whose labels contain padding: a padded label has no weight.
UNLABELLED = ("next_token", "node_classification", "link_prediction")


def data_set_facts(data: FederatedData) -> dict[str, Any]:
    """Returns what an algorithm's factory may take of a data set, by name; what reads all rows is not among it.

    Args:
      data: the data set of a config.
    """
    # With groups, a client of the algorithm is a group (an edge), while devices belong to the clients inside.
    groups = data.train if isinstance(data.train, Grouped) else None
    group_size = None if groups is None else groups.group_size
    all_clients = data.train.size if groups is None else groups.population.size
    return {
        "input_shape": data.input_shape,
        "task": data.task,
        "num_categories": num_categories(data),
        "population_size": data.train.size,
        "feature_names": data.feature_names,
        "label_names": data.label_names or data.vocabulary,
        "units": data.units,
        "group_size": group_size,
        "inside": {"population_size": group_size or all_clients, "all_clients": all_clients},
    }


def num_categories(data: FederatedData) -> int | None:
    """Returns the number of values that a label y may have; None where y is no category."""
    if data.task == "binary":
        return 2
    return data.num_outputs if data.task in ("classification", "next_token") else None


def num_examples(data: FederatedData, stated_rows: int | None) -> int:
    """Returns the stated bound on the number of a client's rows; by default the rows of the largest client.

    Raises: ValueError for a bound below the rows of the largest client.
    """
    (largest_rows,) = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32)).mask.shape
    if stated_rows is None:
        return largest_rows
    validate.integer("num_examples", stated_rows, largest_rows, hint=f"The largest client has {largest_rows} rows.")
    return stated_rows


def total_weight(data: FederatedData, by_examples: bool) -> float:
    """Returns W, the sum of the weights that the clients of the whole population report.

    Args:
      data: the data set.
      by_examples: whether a client's weight is its number of examples, tokens or nodes; if not, it is 1.

    Raises: ValueError where the weights are numbers of tokens and the data are not in memory.
    """
    if not by_examples:
        return float((np.asarray(sizes_of(data.train)) > 0).sum())
    if data.task in UNLABELLED:
        # A weight is a number of tokens or nodes. Padding has a negative label and does not count.
        if not isinstance(data.train, Stored):
            hint = "Weight clients equally (weighting = 'uniform'), or load the data into memory."
            validate.fail("total_weight", "tokens that can be counted beforehand", type(data.train).__name__, hint)
        return float((np.asarray(data.train.examples["y"]) >= 0).sum())
    return float(np.asarray(sizes_of(data.train)).sum(dtype=np.int64))


def server_rows(data: FederatedData) -> ClientData | None:
    """Returns the server's rows as those of one client; None where the data have none."""
    if data.server is None:
        return None
    rows = jax.tree.map(jnp.asarray, data.server)
    (num_rows,) = {len(leaf) for leaf in jax.tree.leaves(rows)}
    return ClientData(rows, jnp.ones(num_rows, bool))
