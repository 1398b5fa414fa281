"""Clusters of clients can hold different concepts: their labels are permuted, or their images are turned."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.poisoned.labels import num_labels
from fedjax_sim.population.seeds import seed_words
from fedjax_sim.population.wrapper import Around
from fedjax_sim.types import Array, ClientData, Population, PyTree
from fedjax_sim.validate import Integer, NonNegativeInt

PURPOSE = 8  # of the seed, see `seeds.seed_words`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConceptShift(Around):
    """Each client's examples are changed as its cluster says; made by `with_permuted_labels`, `with_rotated_images`."""

    inner: Population
    change: Partial  # (cluster [] int32, examples) -> examples
    clusters: Array  # [N] int32, the cluster of each client
    size: int = dataclasses.field(metadata={"static": True})

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, a scalar int32."""
        data = self.inner.client(id)
        return data._replace(examples=self.change(self.clusters[id], data.examples))


def clusters_of(population: Population) -> np.ndarray | None:
    """Returns the cluster of each client, [N] int32, also below other wrappers; None without a concept shift.

    >>> from fedjax_sim.population import digits
    >>> clusters_of(with_permuted_labels(digits(num_clients=6), num_clusters=3).train).tolist()
    [2, 0, 1, 1, 2, 0]
    """

    def is_shifted(part: Any) -> bool:
        return isinstance(part, ConceptShift)

    shifts = filter(is_shifted, jax.tree.leaves(population, is_leaf=is_shifted))
    return next((np.asarray(shift.clusters) for shift in shifts), None)


@validate.named_arguments
def with_permuted_labels(
    data: FederatedData, *, num_clusters: Annotated[int, Integer(2, 1000)] = 2, seed: NonNegativeInt = 0
) -> FederatedData:
    """Each cluster of clients has label s(y) for y, where s is a permutation of the labels that belongs to the cluster.

    No one model can serve two clusters, while their features follow one law. The first cluster keeps its labels; the
    permutations of the others are drawn, and no two are equal.

    Args:
      data: of the task "binary" or "classification".
      num_clusters: K, at most as many as there are permutations. Clients are dealt to clusters at random, and sizes of
        clusters differ by at most 1.
      seed: of clusters and permutations.

    Returns: the same data set with other labels in `train` and in `local_test`, where a client has its cluster's
    permutation too. Test and held-out rows keep their labels, the first cluster's. `clusters_of(data.train)` has the
    true clusters.

    Raises: ValueError, TypeError for another task, more clusters than clients or permutations, clients that are
    poisoned, and clients that have clusters already.

    Guarantees: labels are NumPy's permutations, with one permutation in both parts of a client
    (tests/population/test_concept_shift.py::test_labels_are_permuted); on an easy problem CFL finds the true clusters,
    and so does IFCA with their number from a start of its models that is not bad (::test_clusters_are_found).

    References: Sattler, Muller, Samek 2020, section VI, for permuted labels.
    """
    labels = num_labels(data)
    validate.integer("num_clusters", num_clusters, 2, min(math.factorial(min(labels, 20)), data.train.size))
    rng = np.random.default_rng(seed_words(seed, PURPOSE))
    permutations = {tuple(range(labels)): None}  # in the order in which they are drawn
    while len(permutations) < num_clusters:
        permutations[tuple(rng.permutation(labels).tolist())] = None
    return _shifted(data, Partial(_permuted, jnp.asarray(list(permutations), jnp.int32)), num_clusters, rng)


@validate.named_arguments
def with_rotated_images(
    data: FederatedData, *, num_clusters: Annotated[int, Integer(2, 4)] = 4, seed: NonNegativeInt = 0
) -> FederatedData:
    """Cluster k of the clients has its images turned by k times 90 degrees, counterclockwise.

    Args:
      data: whose examples are square images [height, width] or [height, width, channels].
      num_clusters: K in [2, 4]. Clients are dealt to clusters at random, and sizes of clusters differ by at most 1.
      seed: of the clusters.

    Returns: the same data set with other images in `train` and in `local_test`. Test and held-out rows are not turned,
    as in the first cluster. `clusters_of(data.train)` has the true clusters.

    Raises: ValueError, TypeError for examples that are no square images, more clusters than clients, clients that are
    poisoned, and clients that have clusters already.

    Guarantees: images are those of `np.rot90`, bit for bit (tests/population/test_concept_shift.py::
    test_images_are_turned).

    References: Ghosh, Chung, Yin, Ramchandran 2020 (IFCA), section 6.2.
    """
    _check(data)
    shape = data.input_shape
    if len(shape) not in (2, 3) or shape[0] != shape[1]:
        hint = "Digits have images with flat = false."
        validate.fail("data", "square images [height, width] or [height, width, channels]", shape, hint)
    validate.integer("num_clusters", num_clusters, 2, min(4, data.train.size))
    places = np.arange(shape[0] * shape[1]).reshape(shape[:2])
    orders = np.stack([np.rot90(places, turns).reshape(-1) for turns in range(num_clusters)])
    rng = np.random.default_rng(seed_words(seed, PURPOSE))
    return _shifted(data, Partial(_turned, jnp.asarray(orders, jnp.int32)), num_clusters, rng)


def _permuted(permutations: Array, cluster: Array, examples: PyTree) -> PyTree:
    """Returns the examples with label permutations[cluster, y] for y."""
    y = examples["y"]
    # Padding may hold any number.
    return {**examples, "y": permutations[cluster][jnp.clip(y, 0, permutations.shape[1] - 1)].astype(y.dtype)}


def _turned(orders: Array, cluster: Array, examples: PyTree) -> PyTree:
    """Returns the examples with the pixels of x [n, height, width, ...] in the order of a cluster."""
    x = examples["x"]
    pixels = x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1)
    return {**examples, "x": pixels[:, orders[cluster]].reshape(x.shape)}


def _check(data: FederatedData) -> None:
    if not isinstance(data, FederatedData):
        hint = "A population alone has no task: population.digits(...), say, has one."
        validate.fail("data", "a FederatedData", type(data).__name__, hint, TypeError)
    if data.poisons:
        hint = "Shift the concepts first: a poison is meant for the labels and images that clients have."
        validate.fail("data", "a data set that is not poisoned", data.poisons[0], hint)
    if clusters_of(data.train) is not None:
        validate.fail("data", "a data set without clusters", data.name, "Its clients have concepts already.")


def _shifted(data: FederatedData, change: Partial, num_clusters: int, rng: np.random.Generator) -> FederatedData:
    """Deals clients to clusters, and changes the examples of `train` and `local_test` by their clusters."""
    _check(data)
    size = data.train.size
    clusters = jnp.asarray(rng.permutation(size) % num_clusters, jnp.int32)

    def around(people: Population) -> ConceptShift:
        return ConceptShift(people, change, clusters, size)

    local_test = None if data.local_test is None else around(data.local_test)
    return data._replace(train=around(data.train), local_test=local_test)
