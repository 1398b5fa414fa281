"""This module poisons the examples of some clients. Its wrappers change no test set.

Poison is a function of one client's rows. It is evaluated on the device, where the rows are read, and gives the same
rows in every round. So it works for every kind of population, and a store on the disk is poisoned without a copy.
Which clients are poisoned, and with which arrays, are leaves of the population, so a digest of the data covers them.
Of a user's own function the digest covers its arrays and its description.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fedjax_sim import tree, validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.partition import generator
from fedjax_sim.population.seeds import seed_words
from fedjax_sim.population.splits import ratio_of, rounded_at_random
from fedjax_sim.population.wrapper import Around
from fedjax_sim.prng import client_key, counter_bits, stream
from fedjax_sim.types import Array, ClientData, Population
from fedjax_sim.validate import NonNegativeInt, PositiveShare

MOST_POISONED = 1 << 24  # clients
PURPOSE = 3  # of the seed, beside training (1) and held-out (2) clients, see `seeds.seed_words`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Poisoned(Around):
    """In a `Poisoned` population some clients hold changed examples. `poisoned` builds it.

    The numbers of examples and the masks are those of the inner population.
    """

    inner: Population
    table: Array  # [f + 1] int32, the ids of the poisoned clients, rising, and then an id that no client has
    change: Callable  # (key, ClientData) -> examples of the same shapes; a Partial, whose arrays are leaves
    seed: Array  # [2] uint32 key data
    size: int = dataclasses.field(metadata={"static": True})
    pull: Array | None = None  # [] of the poisoned clients, as in `ClientData`; set by `constrained`

    @property
    def poisoned_ids(self) -> Array:
        """[f] int32, the ids of the poisoned clients, rising. `adversary.clients` takes them."""
        return self.table[:-1]

    def key(self, id: Array) -> Array:
        """Returns the key of a client's poison, the same in every round."""
        return stream(client_key(jax.random.wrap_key_data(self.seed, impl="threefry2x32"), id), "poison")

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, [] int32, with changed examples if `table` has the id.

        If `self.pull` is given, every client has a `pull`, since clients are vmapped. It is 0 for an honest client
        whose inner population has None.

        Args:
          id: [] int32 in [0, N).

        Guarantees: honest clients have the same examples, and train as before
        (tests/population/poisoned/test_poisoning.py::test_only_the_chosen_change,
        tests/adversary/test_constrained.py::test_the_honest_train_as_before).
        """
        data = self.inner.client(id)
        id = jnp.asarray(id, jnp.int32)
        # The table's last entry is larger than any id, so searchsorted always finds an entry to compare with.
        is_poisoned = self.table[jnp.searchsorted(self.table, id)] == id
        key = self.key(id)
        if self.pull is None:
            pull = data.pull
        else:
            pull = jnp.where(is_poisoned, self.pull, 0.0 if data.pull is None else data.pull)
        # Poison is computed for honest clients too and then not selected, since clients are vmapped.
        return data._replace(examples=tree.where(is_poisoned, self.change(key, data), data.examples), pull=pull)


def poisoned(
    data: FederatedData,
    change: Callable,
    words: str,
    *,
    clients: Sequence[int] | None = None,
    share: float | None = None,
    seed: int = 0,
) -> FederatedData:
    """Changes the examples of some training clients by any function.

    Args:
      data: any data set.
      change: (key, ClientData) -> examples of the same shapes and dtypes, for ONE client, traceable. Each client has a
        key of its own, the same in every round. A `Partial` over arrays keeps them out of the compiled program.
      words: what the function does, for reports, such as "label flip".
      clients: distinct ids of the clients to poison. Exactly one of `clients` and `share` is given.
      share: in [0, 1], of all N clients. Exactly round(share N) clients are drawn without replacement by the seed, at
        most 2^24. Wrappers with the same seed and share choose the same clients. 0 poisons nobody, as a baseline.
        Another share that is rounded to no client is refused.
      seed: of the choice of clients, and of the clients' keys.

    Returns: the same data set with another `train`. Test sets stay clean. The `train_*` metrics of an evaluation read
      the changed examples.

    Raises: ValueError or TypeError for ids outside the population or listed twice, for both or neither of `clients` and
      `share`, and for a change that returns other shapes.

    Guarantees: exactly these clients change, under padding, size classes, stores on the disk and devices
      (tests/population/poisoned/test_poisoning.py::test_only_the_chosen_change, ::test_any_population,
      ::test_unequal_clients_train_alike). The number of poisoned clients is exact (::test_exact_count).

    >>> from fedjax_sim.population import mean_estimation
    >>> zero = lambda key, data: jax.tree.map(jnp.zeros_like, data.examples)
    >>> data = poisoned(mean_estimation(num_clients=10, mean=5.0, spread=0.0), zero, "zeros", clients=[3])
    >>> [float(data.train.client(i).examples["y"][0, 0]) for i in (2, 3)], data.poisons
    ([5.0, 0.0], ('zeros at 1 of 10 clients',))
    """
    check_data(data)
    validate.function("change", change, "key, data")
    size = data.train.size
    ids = chosen_clients(size, clients, share, seed)
    spec = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32))
    changed_spec = jax.eval_shape(change, jax.eval_shape(lambda: jax.random.key(0)), spec)
    if tree.spec(changed_spec) != tree.spec(spec.examples):  # whether dtypes are weak does not matter
        validate.fail("change", f"a function that returns examples like {spec.examples}", changed_spec)
    # A Partial is a pytree, so it can be a field of the population that is not static.
    change = change if isinstance(change, Partial) else Partial(change)
    table = jnp.asarray(np.append(ids, validate.INT32_MAX), jnp.int32)
    train = Poisoned(data.train, table, change, jnp.asarray(seed_words(seed, PURPOSE)), size)
    return data._replace(train=train, poisons=(*data.poisons, f"{words} at {len(ids):,} of {size:,} clients"))


@validate.named_arguments
def constrained(data: FederatedData, *, class_share: PositiveShare = 0.5) -> FederatedData:
    """Poisoned clients stay near the global model while they train, so that a detector does not notice them.

    They minimise alpha L + (1 - alpha) |w - w_t|^2 / 2. Here L is the loss on their rows, and the distance from the
    global model w_t stands for a detector's score. Together with `model_replacement` this is constrain-and-scale.

    Args:
      data: poisoned, by `backdoor` or another function. If it was poisoned several times, the clients of the last
        poison are constrained.
      class_share: alpha in (0, 1], the weight of the loss. 1 means no constraint.

    Returns: the same data set, whose poisoned clients pull their local models back (`ClientData.pull`).

    Raises: ValueError for data that nobody poisoned, and for a share out of range. When a round is built, ValueError
    for client updates that do not obey the pull: all but `client.local_sgd`, `client.proximal` and wrappers of these.

    Guarantees: the closed-form minimiser of that objective replaces the global model, and honest clients keep their
    bits (tests/adversary/test_constrained.py::test_the_constrained_model_replaces_the_global,
    ::test_the_honest_train_as_before).

    References: Bagdasaryan et al. 2020, section 4.3 and algorithm 1 (its fixed number of steps has no early stop).

    >>> from fedjax_sim.population import digits, label_flip
    >>> data = constrained(label_flip(digits(num_clients=20), clients=[3]), class_share=0.75)
    >>> [float(data.train.client(id).pull) for id in (2, 3)]
    [0.0, 0.25]
    """
    check_data(data)
    if not isinstance(data.train, Poisoned):
        hint = "Poison some clients first, as by population.backdoor: [data.backdoor] above [data.constrained]."
        validate.fail("data", "a poisoned data set", data.name, hint)
    train = dataclasses.replace(data.train, pull=jnp.float32(1 - class_share))
    return data._replace(train=train, poisons=(*data.poisons, f"trained on {class_share:g} of the loss, to stay near"))


def check_data(data: FederatedData) -> None:
    """Refuses `data` unless it is a `FederatedData`."""
    if not isinstance(data, FederatedData):
        hint = "A population alone has no test sets: population.digits(...), say, has them."
        validate.fail("data", "a FederatedData", type(data).__name__, hint, TypeError)


def check_rows(data: FederatedData, rows: float) -> FederatedData:
    """Returns the data set, and refuses it if a share `rows` of its poisoned clients' examples is no row at all.

    Args:
      data: as `poisoned` returns it.
      rows: in [0, 1].
    """
    train = data.train
    assert isinstance(train, Poisoned), "poisoned by the caller"
    if len(train.poisoned_ids):
        ratio = jnp.asarray(ratio_of("rows", rows))

        @jax.jit
        def largest_counts(people: Poisoned, ids: Array) -> tuple[Array, Array]:
            def of_client(id: Array) -> tuple[Array, Array]:
                num_rows = people.count(id)
                return num_rows, num_chosen(people.key(id), num_rows, ratio)

            return tuple(counts.max() for counts in jax.lax.map(of_client, ids, batch_size=1024))

        most, most_poisoned = map(int, largest_counts(train, train.poisoned_ids))
        if not most_poisoned:
            hint = f"The largest of them has {most}, and not one is poisoned: take a larger share, or other clients."
            validate.fail("rows", "a share that is a row of the poisoned clients'", rows, hint)
    return data


@validate.named_arguments
def chosen_clients(size: int, clients: Sequence[int] | None, share: float | None, seed: NonNegativeInt) -> np.ndarray:
    """Returns the ids of the poisoned clients, rising.

    Args:
      size: N, the number of clients.
      clients: distinct ids in [0, N); None: a `share` of all clients is drawn.
      share: of all clients, in [0, 1], which is rounded to a number of clients; None: `clients` are given.
      seed: of the draw.
    """
    if (clients is None) == (share is None):
        validate.fail("share", "either clients or share", {"clients": clients, "share": share}, "Say who is poisoned.")
    if share is not None:
        validate.in_range("share", share, 0, 1)
        count = round(validate.as_written(share) * size)
        if share and not count:
            validate.fail("share", f"0, or one that poisons a client of {size:,}", share, "It is rounded to nobody.")
        # The table of poisoned ids is held in memory, so their number is limited.
        hint = f"Of {size:,} clients, {share:g} is more: take a smaller share."
        validate.integer("number of poisoned clients", count, 0, MOST_POISONED, hint=hint)
        return np.sort(generator("poisoned", seed).choice(size, count, replace=False, shuffle=False))
    ids = np.asarray(clients)
    are_integers = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in "iu"
    if not are_integers or ids.min() < 0 or ids.max() >= size:
        validate.fail("clients", f"ids in [0, {size}), at least one", clients)
    if len(np.unique(ids)) < len(ids):
        validate.fail("clients", "distinct ids", clients)
    return np.sort(ids)


def num_chosen(key: Array, num_examples: Array, share: Array) -> Array:
    """Returns how many of a client's examples are poisoned, for a client with so many; see `chosen_rows`."""
    return rounded_at_random(stream(key, "number of rows"), num_examples, share)


def chosen_rows(key: Array, mask: Array, share: Array) -> Array:
    """Draws a share of a client's examples, whose number is rounded up or down at random.

    Args:
      key: of the client.
      mask: [n] bool, the valid rows. Padding may stand anywhere and does not change the choice.
      share: [2] int32 of `ratio_of`.
    Returns: [n] bool.
    """
    rank = jnp.cumsum(mask, dtype=jnp.int32) - 1
    # Ranks that differ have draws that differ, so exactly `count` draws are at or below the count-th smallest.
    draws = counter_bits(stream(key, "rows"), rank)
    count = num_chosen(key, mask.sum(dtype=jnp.int32), share)
    ordered_draws = jnp.sort(jnp.where(mask, draws, jnp.uint32(2**32 - 1)))
    return mask & (count > 0) & (draws <= ordered_draws[jnp.maximum(count - 1, 0)])
