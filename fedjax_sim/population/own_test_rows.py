"""Clients can keep some rows out of training, so that a personal model is judged on unseen examples of its owner."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.private_labels import has_private_labels
from fedjax_sim.population.protocol import count_of, sizes_of
from fedjax_sim.population.records import with_record
from fedjax_sim.population.splits import ratio_of, rounded_at_random, split_learned
from fedjax_sim.prng import client_key, stream
from fedjax_sim.types import Array, CheapReads, ClientData, Learned, Population, learned_from
from fedjax_sim.validate import NonNegativeInt, OpenShare


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Part(CheapReads):
    """A `_Part` has the same clients as `inner`, each with its test rows only, or with all other rows."""

    inner: Population
    seed: Array  # [2] uint32 key data
    fraction: Array  # [2] int32 of `ratio_of`, a leaf rather than static, because `describe.digest` must see it
    size: int = dataclasses.field(metadata={"static": True})
    is_test: bool = dataclasses.field(metadata={"static": True})

    def client(self, id: Array) -> ClientData:
        data = self.inner.client(id)
        # The choice depends on the client alone, so both parts of a split, in every round, see the same one.
        bits = jax.random.bits(stream(self._key(id), "local test"), data.mask.shape, jnp.uint32)
        order = jnp.lexsort((bits, ~data.mask))  # valid examples in a random order, then padding
        # `order` lists rows by rank, and its inverse gives the rank of each row. Those of the lowest ranks are kept.
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
        is_test_row = rank < self._num_test(id, data.mask.sum(dtype=jnp.int32))
        return data._replace(mask=data.mask & (is_test_row if self.is_test else ~is_test_row))

    def count(self, id: Array) -> Array:
        return self._own(id, count_of(self.inner, id))

    @property
    def sizes(self) -> Array:
        ids = jnp.arange(self.size, dtype=jnp.int32)
        return jax.vmap(self._own)(ids, jnp.asarray(sizes_of(self.inner), jnp.int32))

    @property
    def learned(self) -> tuple[Learned, ...] | None:
        """What was learnt from several clients' rows to prepare the inner population's inputs, see `types.Learned`."""
        return learned_from(self.inner)

    def announce(self, ids: Array) -> Array:
        return self.inner.announce(ids) if isinstance(self.inner, CheapReads) else ids

    def _key(self, id: Array) -> Array:
        """Returns the key of a client."""
        return client_key(jax.random.wrap_key_data(self.seed, impl="threefry2x32"), id)

    def _num_test(self, id: Array, examples: Array) -> Array:
        """Returns how many of a client's examples are test rows, for a client with so many examples."""
        return rounded_at_random(stream(self._key(id), "number of test rows"), examples, self.fraction)

    def _own(self, id: Array, examples: Array) -> Array:
        """Returns how many of a client's examples belong to this part, for a client with so many examples."""
        num_test = self._num_test(id, examples)
        return num_test if self.is_test else examples - num_test


@validate.named_arguments
def with_local_test(data: FederatedData, *, fraction: OpenShare = 0.2, seed: NonNegativeInt = 0) -> FederatedData:
    """Each training client keeps a share of its examples out of training, as its local test set.

    The population `local_test` holds these examples. Its client i is client i of `train`.

    Args:
      data: any data set.
      fraction: share in (0, 1) of a client's examples, rounded up or down at random so that its mean is the share: at
        0.2, four of five clients with 4 examples keep one, and the others none.
      seed: of the choice, which depends on the client's id.

    Returns: the same data set with other `train` and `local_test`. An evaluation then reports `local_test_*` of the
    global model, and `personal_*` if the algorithm has personal models. The size classes (`capacities`) are lost, so
    every client is read with all its rows. DP-SGD, which hides single records, refuses the clients (`types.Learned`):
    one row less changes which others are kept.

    Raises: TypeError if `data` is not a `FederatedData`. ValueError or TypeError for a fraction out of range.
    ValueError if there is a local test already, clients are poisoned, or labels went through randomised response.

    Guarantees: train and test share no row, and together are the client's examples
    (tests/population/test_own_test_rows.py::test_rows_are_split). Counts are those of the masks (::test_counts).
    Clients with few examples keep their share too
    (tests/population/test_splits.py::test_test_rows_have_the_labels_of_rows).

    >>> from fedjax_sim.population import synthetic_images
    >>> data = with_local_test(synthetic_images(num_clients=10, examples_per_client=20))
    >>> int(jax.jit(data.train.count)(3)), int(jax.jit(data.local_test.count)(3))
    (16, 4)
    """
    if not isinstance(data, FederatedData):
        hint = "A population alone has no test sets: population.synthetic_images(...), say, has them."
        validate.fail("data", "a FederatedData", type(data).__name__, hint, TypeError)
    if data.local_test is not None:
        validate.fail("data", "a data set without a local test", data.name, "It keeps rows of its clients already.")
    if data.poisons:
        hint = "Keep the local test first: its rows are to be clean."
        validate.fail("data", "a data set that is not poisoned", data.poisons[0], hint)
    if has_private_labels(data.train):
        hint = "Keep the local test first: it is to have the true labels."
        validate.fail("data", "a data set whose labels are not private yet", data.name, hint)
    key_data = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
    share = jnp.asarray(ratio_of("fraction", fraction))
    clients = with_record(data.train, *split_learned("by_client"))
    train, test = (_Part(clients, key_data, share, data.train.size, is_test) for is_test in (False, True))
    return data._replace(train=train, local_test=test)
