"""Labels that clients hide behind randomised response before anybody else trains on them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import prng, validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.poisoned.labels import num_labels
from fedjax_sim.population.seeds import seed_words
from fedjax_sim.population.wrapper import Around
from fedjax_sim.types import Array, ClientData, Population
from fedjax_sim.validate import NonNegativeInt

__all__ = ["PrivateLabels", "has_private_labels", "kept_share", "with_private_labels"]

PURPOSE = 7  # of the seed
LEAST_EPSILON, MOST_CLASSES = 1e-3, 2**20  # beyond, 2^32 draws are too few for equal chances


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrivateLabels(Around):
    """Clients whose labels went through randomised response once, the same in every round."""

    inner: Population
    threshold: Array  # [] uint32 of 2^32, below which a label is kept
    others: Array  # [] uint32, K - 1
    seed: Array  # [2] uint32 key data
    size: int = dataclasses.field(metadata={"static": True})

    def client(self, id: Array) -> ClientData:
        """Data of client `id`, a scalar int32."""
        data = self.inner.client(id)
        key = prng.client_key(jax.random.wrap_key_data(self.seed, impl="threefry2x32"), jnp.asarray(id, jnp.int32))
        rank = (jnp.cumsum(data.mask, dtype=jnp.int32) - 1).astype(jnp.uint32)
        high, low = prng.threefry(jax.random.key_data(key), jnp.zeros_like(rank), rank)
        y = data.examples["y"]
        other = (y.astype(jnp.uint32) + 1 + low % self.others) % (self.others + 1)
        found = jnp.where((high < self.threshold) | ~data.mask, y, other.astype(y.dtype))
        return data._replace(examples={**data.examples, "y": found})


def has_private_labels(population: Population) -> bool:
    """Whether labels went through randomised response, also where other wrappers are around it."""

    def is_private(part: Any) -> bool:
        return isinstance(part, PrivateLabels)

    return any(map(is_private, jax.tree.leaves(population, is_leaf=is_private)))


def kept_share(epsilon: float, num_classes: int) -> float:
    """The chance that a label is told as it is: e^eps / (e^eps + K - 1).

    >>> round(kept_share(1.0, 2), 4), kept_share(0.0, 4)
    (0.7311, 0.25)
    """
    return 1 / (1 + (num_classes - 1) * math.exp(-epsilon))


@validate.named_arguments
def with_private_labels(data: FederatedData, *, epsilon: float, seed: NonNegativeInt = 0) -> FederatedData:
    """Training labels under label differential privacy: each is kept, or replaced by one of the K - 1 others.

    A label is kept with probability e^eps / (e^eps + K - 1), and else each other one is as likely. It is drawn once,
    so a label is hidden with epsilon from whoever sees anything that was computed from it, however long the training.
    Features are not hidden, and with them what they tell of labels. The seed is a secret of the clients, to be used
    once.

    Args:
      data: of the task "binary" or "classification".
      epsilon: in [0.001, 20], per label: the chances of anything told differ by a factor e^eps at most between two
        labels.
      seed: of the draws.

    Returns: the same data set with another `train`; test sets stay clean.

    Raises: ValueError, TypeError for another task, more than 2^20 classes, and numbers out of range.

    Guarantees: pure epsilon, exactly, of 2^32 draws (tests/population/test_private_labels.py::test_epsilon_is_exact);
      the law of the labels (::test_shares), which padding and size classes leave alone (::test_padding);
      `privacy.label_claim` states it.

    References: Warner 1965; Ghazi, Golowich, Kumar, Manurangsi and Zhang 2021, section 2 (label DP).

    >>> from fedjax_sim.population import digits
    >>> clean = digits(num_clients=20)
    >>> noisy = with_private_labels(clean, epsilon=2.0)
    >>> a, b = (x.train.client(4) for x in (clean, noisy))
    >>> bool((a.examples["y"] == b.examples["y"]).all()), bool((a.examples["x"] == b.examples["x"]).all())
    (False, True)
    """
    classes = num_labels(data)
    if classes > MOST_CLASSES:
        validate.fail("data", f"at most {MOST_CLASSES} classes", classes, "The others' chances would not be alike.")
    validate.in_range("epsilon", epsilon, LEAST_EPSILON, 20)
    key = jax.random.wrap_key_data(jnp.asarray(seed_words(seed, PURPOSE), jnp.uint32), impl="threefry2x32")
    train = PrivateLabels(
        data.train,
        jnp.asarray(np.uint32(threshold(epsilon, classes))),
        jnp.uint32(classes - 1),
        jax.random.key_data(prng.stream(key, "private labels")),
        data.train.size,
    )
    return data._replace(train=train)


def threshold(epsilon: float, num_classes: int) -> int:
    """The largest number of 2^32 draws that may keep a label: those of the rarest other one are e^-eps as many."""
    rarest = (2**32 // (num_classes - 1)) / 2**32
    odds = math.exp(epsilon) * rarest * (1 - 2.0**-40)  # below the rounding of this line
    return math.floor(2**32 * odds / (1 + odds))
