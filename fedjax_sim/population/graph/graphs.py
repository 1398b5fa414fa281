"""This module provides graph data sets: Cora from a folder, the karate club, generated molecules and communities."""

from __future__ import annotations

import io
import math
import pathlib
import zipfile
from collections.abc import Iterable
from typing import Annotated

import jax
import numpy as np

from fedjax_sim import validate
from fedjax_sim.files.regular_files import opened
from fedjax_sim.population.federated_data import PADDING, FederatedData, existing_path
from fedjax_sim.population.graph.partition import (
    PARTITIONS,
    graph_data,
    node_owners,
    parties_of,
    shared_graph,
    stacked_graphs,
)
from fedjax_sim.population.partition import generator
from fedjax_sim.population.population import stored
from fedjax_sim.population.store import array_header
from fedjax_sim.types import FolderPath, GraphData
from fedjax_sim.validate import Integer, NonNegative, OpenShare, Positive, PositiveInt

KARATE = {  # friendships outside of the club: member -> the friends with larger numbers
    0: "1 2 3 4 5 6 7 8 10 11 12 13 17 19 21 31", 1: "2 3 7 13 17 19 21 30", 2: "3 7 8 9 13 27 28 32", 3: "7 12 13",
    4: "6 10", 5: "6 10 16", 6: "16", 8: "30 32 33", 9: "33", 13: "33", 14: "32 33", 15: "32 33", 18: "32 33",
    19: "33", 20: "32 33", 22: "32 33", 23: "25 27 29 32 33", 24: "25 27 31", 25: "31", 26: "29 33", 27: "33",
    28: "31 33", 29: "32 33", 30: "32 33", 31: "32 33", 32: "33",
}  # fmt: skip
WITH_THE_INSTRUCTOR = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 16, 17, 19, 21)  # the others follow the officer
ATOMS = ("carbon", "nitrogen", "oxygen", "fluorine")
# The arrays of cora.npz and their number of axes.
CORA = {"feature_indptr": 1, "feature_indices": 1, "edges": 2, "labels": 1, "train": 1, "validation": 1, "test": 1}
CORA_WORDS = 1433
LARGEST_FILE = 1 << 28  # bytes, unpacked


def node_data(
    graph: GraphData,
    labels: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
    *,
    num_clients: int = 1,
    partition: str = "community",
    name: str,
    label_names: tuple[str, ...] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Builds a data set for node classification over parties that hold one graph together.

    Args:
      graph: of `graph_data`, V nodes.
      labels: [V] integers in [0, C), the class of each node.
      train: nodes whose labels are trained on, integers in [0, V).
      test: nodes whose labels are tested on, integers in [0, V). No node is in both.
      num_clients: P parties.
      partition: how nodes are assigned to parties, the argument `by` of `node_owners`.
      name: of the data set.
      label_names: what the classes 0, 1, ... mean; None: nobody says.
      seed: of the partition.

    Returns: `FederatedData` of the task "node_classification". Client p has one example: its graph `x`, its `halo` [H]
    (see `Parties`) and labels `y` [V], which are -1 where there is none to train on. `test` is the whole graph with the
    test labels. `local_test` has the parties' graphs with their test labels.

    Guarantees: every label is at one party (tests/population/graph/test_graphs.py::test_labels_are_at_one_party).
    """
    validate.part("graph", graph, GraphData)
    validate.integer("num_clients", num_clients, 1, len(graph.ids), hint=f"There are {len(graph.ids)} nodes.")
    validate.one_of("partition", partition, PARTITIONS)
    labels = np.asarray(labels)
    size = len(graph.ids)
    num_classes = int(labels.max()) + 1
    if labels.shape != (size,) or labels.dtype.kind not in "iu" or labels.min() < 0:
        least = f", the least {labels.min()}" if labels.size else ""
        shown = f"{labels.dtype.name}{list(labels.shape)}{least}"
        validate.fail("labels", f"integers >= 0, one a node [{size}]", shown)
    for where, nodes in (("train", train := np.asarray(train)), ("test", test := np.asarray(test))):
        if nodes.ndim != 1 or not nodes.size or nodes.dtype.kind not in "iu":
            hint = "np.flatnonzero(mask) makes nodes of a mask."
            validate.fail(where, "nodes, integers [K]", f"{nodes.dtype.name}{list(nodes.shape)}", hint)
        if nodes.min() < 0 or nodes.max() >= size:
            validate.fail(where, f"nodes in [0, {size})", (int(nodes.min()), int(nodes.max())))
    if len(both := np.intersect1d(train, test)):
        validate.fail("train, test", "nodes, none in both", both[:5].tolist())
    owner = node_owners(graph, num_clients, by=partition, labels=labels, seed=seed)
    parties = parties_of(graph, node_owner=owner)

    def labels_at(nodes):
        """Returns the labels of these nodes, and no label for all others."""
        # The last entry is never set. Padding nodes have the id -1, so they read it and have no label.
        y = np.full(size + 1, PADDING, np.int32)
        y[nodes] = labels[nodes]
        return y

    def population(nodes):
        rows = {"x": parties.graphs, "halo": parties.halo, "y": labels_at(nodes)[parties.graphs.ids]}
        return stored(rows, np.arange(num_clients + 1), learned=shared_graph(num_clients))

    central_test = {"x": stacked_graphs([graph]), "y": labels_at(test)[None, :-1]}
    shape = (graph.nodes.shape[1],)
    about = {"label_names": label_names, "name": name, "local_test": population(test)}
    return FederatedData(
        train=population(train),
        test=central_test,
        held_out=None,
        input_shape=shape,
        num_outputs=num_classes,
        task="node_classification",
        **about,
    )


def read_cora(directory: str) -> tuple[GraphData, np.ndarray, dict[str, np.ndarray]]:
    """Reads Cora from a folder, see `cora`.

    Args:
      directory: the folder with cora.npz.

    Returns: the graph, whose word features add up to 1 in each row, the labels [2708], and name -> nodes of the public
    split ("train", "validation", "test").

    Raises: ValueError for a folder without cora.npz, and for arrays of other types, axes or ranges than expected.
    """
    path = pathlib.Path(existing_path("directory", directory)) / "cora.npz"
    existing_path("directory", str(path), folder=False)
    try:
        with opened(path) as file, zipfile.ZipFile(file) as archive:
            arrays = _arrays_in(archive, CORA)
    except (OSError, EOFError, KeyError, NotImplementedError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        validate.fail(str(path), f"a NumPy archive with arrays {', '.join(CORA)}", str(error))
    for name, axes in CORA.items():
        if arrays[name].ndim != axes or arrays[name].dtype.kind not in "iu":
            validate.fail(f"{path.name}[{name!r}]", f"integers with {axes} axes", arrays[name].dtype.name)
    # The words are a sparse matrix in CSR form: paper i has the words words[starts[i]:starts[i + 1]].
    starts = arrays["feature_indptr"].astype(np.int64)
    words = arrays["feature_indices"]
    labels = arrays["labels"]
    size = len(labels)
    if len(starts) != size + 1 or starts[0] != 0 or starts[-1] != len(words) or (np.diff(starts) < 0).any():
        validate.fail(f"{path.name}['feature_indptr']", f"{size + 1} rising positions", starts.shape)
    if len(words) and not (0 <= words.min() and words.max() < CORA_WORDS):
        validate.fail(f"{path.name}['feature_indices']", f"words in [0, {CORA_WORDS})", int(words.max()))
    x = np.zeros((size, CORA_WORDS), np.float32)
    x[np.repeat(np.arange(size), np.diff(starts)), words] = 1
    x /= np.maximum(x.sum(1, keepdims=True), 1)
    splits = {name: arrays[name] for name in ("train", "validation", "test")}
    for name, nodes in splits.items():
        if len(nodes) and not (0 <= nodes.min() and nodes.max() < size):
            validate.fail(f"{path.name}[{name!r}]", f"nodes in [0, {size})", int(nodes.max()))
    return graph_data(x, arrays["edges"]), labels, splits


def _arrays_in(archive: zipfile.ZipFile, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns arrays of a NumPy archive; what they declare is compared with the bytes that are there.

    Args:
      archive: an open .npz file.
      names: of the arrays to read, without ".npy". Other arrays of the archive are not read.

    Returns: name -> array, of any shape and of any dtype but objects.

    Raises: KeyError for a name that is missing. ValueError for an archive that is larger than `LARGEST_FILE` when it is
      unpacked, and for an array with another number of bytes than its header says.
    """
    unpacked_bytes = sum(member.file_size for member in archive.infolist())
    if unpacked_bytes > LARGEST_FILE:
        raise ValueError(f"it has {unpacked_bytes:,} bytes when it is unpacked, and at most {LARGEST_FILE:,} are read")
    arrays = {}
    for name in names:
        content = io.BytesIO(archive.read(f"{name}.npy"))
        shape, _, dtype = array_header(content)
        if math.prod(shape) * dtype.itemsize != len(content.getbuffer()) - content.tell():
            raise ValueError(f"{name} declares {dtype}{list(shape)}, which are not the bytes behind its header")
        content.seek(0)
        arrays[name] = np.lib.format.read_array(content, allow_pickle=False)
    return arrays


def cora(*, directory: FolderPath, num_clients: int = 1, partition: str = "community", seed: int = 0) -> FederatedData:
    """Reads Cora, a citation graph of papers whose subjects are to be predicted, with the public split of Planetoid.

    Cora has 2,708 papers of seven subjects, 5,278 citations and 1,433 words.

    Args:
      directory: a folder with cora.npz. The file holds `edges` [K, 2], `labels`, the words in CSR form
        (`feature_indptr`, `feature_indices`), and the nodes `train` (140), `validation` (500, not used) and `test`
        (1,000).
      num_clients: parties that hold the papers.
      partition: "community", "random" or "label", see `node_owners`.
      seed: of the partition.

    Returns: see `node_data`. Each paper's word features are divided by the number of its words.

    Guarantees: sizes and splits are those that were published (tests/population/graph/test_graphs.py::test_cora).

    References: McCallum et al. 2000; Sen et al. 2008; Yang, Cohen and Salakhutdinov 2016 (the split).
    """
    graph, labels, splits = read_cora(directory)
    options = {"num_clients": num_clients, "partition": partition, "seed": seed, "name": "cora"}
    return node_data(graph, labels, splits["train"], splits["test"], **options)


@validate.named_arguments
def karate_club(
    *,
    num_clients: int = 2,
    partition: str = "community",
    num_labelled: Annotated[int, Integer(1, 16)] = 1,
    seed: int = 0,
) -> FederatedData:
    """Builds Zachary's karate club, where the task is to predict whom a member follows when the club splits.

    The club has 34 members and 78 friendships.

    Args:
      num_clients, partition, seed: as in `cora`.
      num_labelled: how many members of each side are trained on, the leader of the side first. The others are tested
        on.

    Returns: see `node_data`. A member's only feature is its identity: the features are the identity matrix.

    Guarantees: the graph has 78 edges, and five members, the two leaders among them, have the published degrees
    (tests/population/graph/test_graphs.py::test_karate_club).

    References: Zachary 1977.

    >>> data = karate_club()
    >>> data.train.size, data.input_shape, data.num_outputs
    (2, (34,), 2)
    """
    edges = [(a, int(b)) for a, others in KARATE.items() for b in others.split()]
    labels = np.ones(34, np.int64)
    labels[list(WITH_THE_INSTRUCTOR)] = 0
    # The instructor is member 0 and the officer member 33, so each side begins with its leader.
    sides = [np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)[::-1]]
    train = np.concatenate([side[:num_labelled] for side in sides])
    names = ("instructor", "officer")
    options = {"num_clients": num_clients, "partition": partition, "seed": seed, "name": "karate_club"}
    test = np.setdiff1d(np.arange(34), train)
    return node_data(graph_data(np.eye(34), edges), labels, train, test, label_names=names, **options)


@validate.named_arguments
def stochastic_blocks(
    *,
    num_clients: int = 4,
    partition: str = "community",
    num_nodes: int = 400,
    num_classes: Annotated[int, Integer(2)] = 4,
    degree_inside: float = 6.0,
    degree_between: float = 2.0,
    num_features: PositiveInt = 8,
    signal: NonNegative = 0.5,
    labelled_share: OpenShare = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Draws a stochastic block model: nodes of one class are joined more often than nodes of different classes.

    Features are informative about the class, but only weakly.

    Args:
      num_clients, partition: as in `cora`.
      num_nodes: at least 2 * num_classes, at most 20,000.
      num_classes: of equal size.
      degree_inside: mean number of a node's neighbours in its own class, >= 0.
      degree_between: mean number of a node's neighbours in all other classes, >= 0.
      num_features: F. A node's features are signal * (the mean of its class) + standard normal noise. The means of the
        classes are standard normal vectors.
      signal: >= 0.
      labelled_share: share of the nodes that is trained on, in (0, 1). The others are tested on.
      seed: of the graph, the features, the split and the partition.

    Guarantees: at degrees 7 and 2 and seed 0, the mean degrees of 400 nodes are within 0.9 of `degree_inside` and 0.5
    of `degree_between` (tests/population/graph/test_graphs.py::test_stochastic_blocks).

    References: Holland, Laskey and Leinhardt 1983.

    >>> stochastic_blocks(num_nodes=40, num_classes=2).num_outputs
    2
    """
    validate.integer("num_nodes", num_nodes, 2 * num_classes, 20_000)
    rng = generator("stochastic_blocks", seed)
    labels = np.arange(num_nodes) * num_classes // num_nodes
    class_size = num_nodes / num_classes
    # The probability of an edge is the mean degree divided by the number of possible neighbours.
    edge_probabilities = {
        "degree_inside": degree_inside / (class_size - 1),
        "degree_between": degree_between / (num_nodes - class_size),
    }
    for name, probability in edge_probabilities.items():
        validate.in_range(f"{name} as a chance", probability, 0, 1)
    first, second = np.triu_indices(num_nodes, 1)
    pair_probabilities = np.where(labels[first] == labels[second], *edge_probabilities.values())
    is_edge = rng.random(len(first)) < pair_probabilities
    means = rng.normal(size=(num_classes, num_features))
    x = signal * means[labels] + rng.normal(size=(num_nodes, num_features))
    graph = graph_data(x, np.stack([first[is_edge], second[is_edge]], 1))
    order = rng.permutation(num_nodes)
    count = min(max(1, round(validate.as_written(labelled_share) * num_nodes)), num_nodes - 1)
    options = {"num_clients": num_clients, "partition": partition, "seed": seed, "name": "stochastic_blocks"}
    return node_data(graph, labels, np.sort(order[:count]), np.sort(order[count:]), **options)


def molecule(rng: np.random.Generator, most_atoms: int, shares: np.ndarray) -> tuple[GraphData, int]:
    """Draws a graph that resembles a molecule. Its class is 1 if some nitrogen is bound to an oxygen, else 0.

    The graph is a random tree of atoms in which up to two rings are closed. An atom has at most four bonds. Bonds have
    type 0 (single) or 1 (double).

    Args:
      rng: draws the molecule.
      most_atoms: the largest number of atoms. The smallest is 6.
      shares: [4] probabilities of `ATOMS`.
    Returns: the graph and its class.
    """
    size = int(rng.integers(6, most_atoms + 1))
    elements = rng.choice(len(ATOMS), size, p=shares)
    bonds = []
    degree = np.zeros(size, int)
    for atom in range(1, size):
        # Each atom is bound to an earlier one that has at most two bonds so far, so that rings can still be closed.
        free = np.flatnonzero(degree[:atom] < 3)
        partner = int(rng.choice(free)) if len(free) else atom - 1
        bonds.append((partner, atom))
        degree[[partner, atom]] += 1
    for _ in range(int(rng.integers(0, 3))):
        a, b = rng.choice(size, 2, replace=False)
        if max(degree[a], degree[b]) < 4 and (min(a, b), max(a, b)) not in bonds:
            bonds.append((int(min(a, b)), int(max(a, b))))
            degree[[a, b]] += 1
    ends = np.array(bonds)

    def joins_nitrogen_and_oxygen():
        pairs = elements[ends]
        return (pairs == [1, 2]).all(1) | (pairs == [2, 1]).all(1)

    # Both classes are equally likely. If atoms were not changed, nearly every large molecule would be of class 1.
    if rng.random() < 0.5:
        elements[ends[joins_nitrogen_and_oxygen()].reshape(-1)] = 0
    elif not joins_nitrogen_and_oxygen().any():
        elements[ends[rng.integers(len(ends))]] = [1, 2]
    types = rng.integers(0, 2, len(ends))
    is_joined = joins_nitrogen_and_oxygen().any()
    return graph_data(np.eye(len(ATOMS))[elements], ends, edge_types=types), int(is_joined)


@validate.named_arguments
def molecules(
    *,
    num_clients: int = 20,
    graphs_per_client: int = 30,
    most_atoms: Annotated[int, Integer(6, 10000)] = 14,
    alpha: Positive = 10.0,
    num_test: int = 500,
    seed: int = 0,
) -> FederatedData:
    """Generates graphs that resemble molecules, where the task is to predict whether a nitrogen is bound to an oxygen.

    Each client is a laboratory. Atoms and bonds have types.

    Args:
      num_clients: laboratories.
      graphs_per_client: molecules of each laboratory.
      most_atoms: the largest number of atoms of a molecule. The smallest is 6.
      alpha: > 0. A laboratory's shares of carbon, nitrogen, oxygen and fluorine are drawn from a Dirichlet distribution
        with means 0.5, 0.2, 0.2 and 0.1. The larger alpha, the more alike are the laboratories.
      num_test: test molecules, which have the mean shares.
      seed: of all draws.

    Returns: `FederatedData` of the task "graph_classification": x is a batch of graphs, and y [n] is 0 or 1.

    Guarantees: labels follow from the bonds, and both classes are common
    (tests/population/graph/test_graphs.py::test_molecules).

    >>> molecules(num_clients=2, graphs_per_client=3, num_test=4).train.sizes.tolist()
    [3, 3]
    """
    for name, value in (("num_clients", num_clients), ("graphs_per_client", graphs_per_client), ("num_test", num_test)):
        validate.integer(name, value)
    rng = generator("molecules", seed)
    mean_shares = np.array([0.5, 0.2, 0.2, 0.1])
    labelled_graphs = []
    for _ in range(num_clients):
        shares = rng.dirichlet(alpha * mean_shares)
        labelled_graphs += [molecule(rng, most_atoms, shares) for _ in range(graphs_per_client)]
    labelled_graphs += [molecule(rng, most_atoms, mean_shares) for _ in range(num_test)]
    graphs = []
    starts = np.cumsum([0] + [len(graph.ids) for graph, _ in labelled_graphs])
    for (graph, _), start in zip(labelled_graphs, starts, strict=False):
        # Ids differ between graphs, because dropout depends on the id of a node.
        graphs.append(graph._replace(ids=graph.ids + np.int32(start)))
    batch = stacked_graphs(graphs)
    y = np.array([label for _, label in labelled_graphs], np.int32)
    num_train = num_clients * graphs_per_client

    def rows(part):
        return {"x": jax.tree.map(lambda leaf: leaf[part], batch), "y": y[part]}

    train = stored(rows(slice(num_train)), np.arange(num_clients + 1) * graphs_per_client, learned=())
    names = ("no nitrogen at an oxygen", "a nitrogen at an oxygen")
    return FederatedData(
        train=train,
        test=rows(slice(num_train, None)),
        held_out=None,
        input_shape=(len(ATOMS),),
        num_outputs=2,
        task="graph_classification",
        label_names=names,
        name="molecules",
    )
