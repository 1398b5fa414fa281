"""This module summarises a population in a few numbers for the report of a run, and identifies it by a digest."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedjax_sim import tree
from fedjax_sim.population.datasets.column_uses import columns_in_words
from fedjax_sim.population.host import Host
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.population.store import open_store

SHOWN_CLIENTS = 24  # whose labels are counted
MOST_BINS = 40  # of the histogram of sizes
MAX_VISITED = 1 << 22  # clients, beyond which sizes are not computed


def describe(data: Any) -> dict[str, Any]:
    """Describes the sizes of all clients and the label counts of some, as JSON values.

    Args:
      data: a `population.FederatedData`.

    Returns: a dict with `name` and `num_clients`. It has `poisons`, `notes`, `warnings` and `learned` if there are any,
      and `columns`, what they became, for data from a table. For up to four million
      clients it has `num_examples_total`, `examples_quantiles` and `examples_histogram`: its `clients` with sizes from
      one of its `edges` up to the next. For the tasks "binary" and "classification" it has
      `client_ids`, `client_names` (if clients have names), `label_names` and `label_counts` of up to 24 clients, spread
      evenly over the ids.
    """
    size = data.train.size
    about: dict[str, Any] = {"name": data.name, "num_clients": size}
    about |= {name: list(words) for name in ("poisons", "notes", "warnings") if (words := getattr(data, name))}
    learned = [str(record) for record in data.learned or () if record.unit == "client"]
    about |= {"learned": learned} if learned else {}
    if data.table_columns:
        about["columns"] = columns_in_words(data.table_columns)
    if size <= MAX_VISITED:
        sizes = np.asarray(sizes_of(data.train))
        quantiles = np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1])
        about["num_examples_total"] = int(sizes.sum(dtype=np.int64))
        names = ("min", "q25", "median", "q75", "max")
        about["examples_quantiles"] = dict(zip(names, quantiles.tolist(), strict=True))
        # Edges lie between integers, so that every size is in one bin, and all bins have equally many sizes.
        width = -(-(int(sizes.max()) - int(sizes.min()) + 1) // MOST_BINS)
        edges = np.arange(sizes.min(), sizes.max() + 1 + width, width) - 0.5
        clients = np.histogram(sizes, edges)[0]
        about["examples_histogram"] = {"edges": edges.tolist(), "clients": clients.tolist()}
    # Other tasks have no labels, or, for "next_token", dozens of characters whose counts would tell a reader nothing.
    if data.task not in ("binary", "classification"):
        return about
    ids = np.unique(np.linspace(0, size - 1, SHOWN_CLIENTS).astype(np.int32))
    num_labels = max(data.num_outputs, 2)
    read_client = jax.jit(lambda population, id: population.client(id))
    about["client_ids"] = ids.tolist()
    if data.client_names is not None:
        about["client_names"] = [data.client_names[id] for id in ids]
    about["label_counts"] = []
    about["label_names"] = list(data.label_names or map(str, range(num_labels)))
    for id in ids:
        client = jax.device_get(read_client(data.train, id))
        labels = np.asarray(client.examples["y"])[np.asarray(client.mask)].reshape(-1)
        about["label_counts"].append(np.bincount(labels[labels >= 0], minlength=num_labels).tolist())
    return about


def digest(data: Any) -> str:
    """Returns the SHA-256 sum of the clients' data and the test sets, as hexadecimal digits.

    A run compares it, so that nobody resumes the run on other data unnoticed. A store that stays on the disk is read
    once, which takes about a second for each gigabyte.

    Args:
      data: a `FederatedData`.

    Raises: ValueError for a store whose files are not those of its manifest.

    Guarantees: a run refuses to resume on a CSV file that changed
    (tests/command/test_app.py::test_other_data_are_refused); other rows of a local test have another digest
    (tests/population/test_own_test_rows.py::test_other_rows_have_another_digest); a changed byte of a store on the disk
    raises ValueError (tests/population/test_native_store.py::test_a_changed_byte_on_the_disk).
    """
    optional_rows = [rows for rows in (data.triggered, data.server) if rows is not None]
    sha = tree.sha256_of((data.train, data.test, data.held_out, *optional_rows))
    # Rows on the disk are no leaves of the pytree, so they enter by the sums in their store's manifest. The population
    # that reads them may lie inside of any wrappers.
    populations = (data.train, data.held_out)
    parts = jax.tree.leaves(populations, is_leaf=lambda part: isinstance(part, Host))
    stores = [part.source.opened for part in parts if isinstance(part, Host)]
    manifests = [open_store(store.directory, verify=True).digest for store in stores]
    sha.update(repr("".join(manifests)).encode())
    sha.update("".join(data.poisons).encode())  # a function that poisons has no bytes, so its description counts
    return sha.hexdigest()
