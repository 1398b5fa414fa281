"""Rows that clients keep from training, so that a personal model can be judged on its owner's unseen examples."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.private_labels import has_private_labels
from fedjax_sim.population.protocol import sizes_of
from fedjax_sim.prng import client_key, stream
from fedjax_sim.types import Array, ClientData, Population
from fedjax_sim.validate import NonNegativeInt, OpenShare

__all__ = ["with_local_test"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Part:
    """Of each client's rows, those kept for its test, or the others."""

    inner: Population
    seed: Array  # [2] uint32 key data
    fraction: Array  # [] float32; data, not static: `describe.digest` must see it
    size: int = dataclasses.field(metadata={"static": True})
    is_test: bool = dataclasses.field(metadata={"static": True})

    def client(self, id: Array) -> ClientData:
        data = self.inner.client(id)
        key = client_key(jax.random.wrap_key_data(self.seed, impl="threefry2x32"), id)
        bits = jax.random.bits(stream(key, "local test"), data.mask.shape, jnp.uint32)
        order = jnp.lexsort((bits, ~data.mask))  # the examples in a random order, padding behind them
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.shape[0], dtype=order.dtype))
        chosen = rank < self._kept(data.mask.sum(dtype=jnp.int32))
        return data._replace(mask=data.mask & (chosen if self.is_test else ~chosen))

    def count(self, id: Array) -> Array:
        inner = self.inner
        return self._own(inner.count(id) if hasattr(inner, "count") else inner.client(id).mask.sum(dtype=jnp.int32))

    @property
    def sizes(self) -> Array:
        return self._own(jnp.asarray(sizes_of(self.inner), jnp.int32))

    def announce(self, ids: Array) -> Array:
        return self.inner.announce(ids) if hasattr(self.inner, "announce") else ids

    def _kept(self, examples: Array) -> Array:
        return jnp.floor(examples.astype(jnp.float32) * self.fraction).astype(jnp.int32)

    def _own(self, examples: Array) -> Array:
        kept = self._kept(examples)
        return kept if self.is_test else examples - kept


@validate.named_arguments
def with_local_test(data: FederatedData, *, fraction: OpenShare = 0.2, seed: NonNegativeInt = 0) -> FederatedData:
    """Each training client keeps a share of its own examples from training: `local_test`, with the same ids as `train`.

    Args:
      data: any data set.
      fraction: in (0, 1), of a client's examples, rounded down, so that a client with few of them keeps none.
      seed: of the choice, which is made for each client by its id.

    Returns: the same data set with other `train` and `local_test`. An evaluation then reports `local_test_*`, of the
    global model, and `personal_*` where the algorithm has personal models. Classes of clients by their rows
    (`capacities`) are lost: every client is read with all its rows.

    Raises: TypeError for what is no `FederatedData`; ValueError, TypeError for a fraction out of range; ValueError
    where a local test is there already, clients are poisoned, or labels went through randomised response.

    Guarantees: train and test share no row, and together are the client's examples
    (tests/population/test_own_test_rows.py::test_rows_are_split); counts are those of the masks (::test_counts).

    >>> from fedjax_sim.population import synthetic_images
    >>> data = with_local_test(synthetic_images(num_clients=10, examples_per_client=20))
    >>> int(data.train.count(3)), int(data.local_test.count(3))
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
    words, share = jax.random.key_data(jax.random.key(seed, impl="threefry2x32")), jnp.float32(fraction)
    train, test = (_Part(data.train, words, share, data.train.size, is_test) for is_test in (False, True))
    return data._replace(train=train, local_test=test)
