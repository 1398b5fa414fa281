"""Clients can hide their training labels by randomised response, which gives label differential privacy."""

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

PURPOSE = 7  # of the seed, see `seeds.seed_words`
# Beyond these two limits the 2^32 values of a draw are too few to give all other labels nearly equal chances.
LEAST_EPSILON = 1e-3
MOST_CLASSES = 2**20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrivateLabels(Around):
    """The clients' labels went through randomised response once, so they are the same in every round.

    `with_private_labels` builds it.
    """

    inner: Population
    threshold: Array  # [] uint32: a label is kept if a draw from [0, 2^32) lies below
    others: Array  # [] uint32, K - 1: how many other labels there are
    seed: Array  # [2] uint32 key data
    size: int = dataclasses.field(metadata={"static": True})

    def client(self, id: Array) -> ClientData:
        """Returns the data of client `id`, a scalar int32."""
        data = self.inner.client(id)
        # The key depends on the client alone and the counter on the rank among valid rows. So every round, and any
        # padding, sees the same draws.
        key = prng.client_key(jax.random.wrap_key_data(self.seed, impl="threefry2x32"), jnp.asarray(id, jnp.int32))
        rank = (jnp.cumsum(data.mask, dtype=jnp.int32) - 1).astype(jnp.uint32)
        # One block gives two independent words: `high` decides whether the label is kept, `low` draws another label.
        high, low = prng.threefry(jax.random.key_data(key), jnp.zeros_like(rank), rank)
        y = data.examples["y"]
        other_label = (y.astype(jnp.uint32) + 1 + low % self.others) % (self.others + 1)
        private_y = jnp.where((high < self.threshold) | ~data.mask, y, other_label.astype(y.dtype))
        return data._replace(examples={**data.examples, "y": private_y})


def has_private_labels(population: Population) -> bool:
    """Returns whether the labels went through randomised response, also below other wrappers."""

    def is_private(part: Any) -> bool:
        return isinstance(part, PrivateLabels)

    return any(map(is_private, jax.tree.leaves(population, is_leaf=is_private)))


def kept_share(epsilon: float, num_classes: int) -> float:
    """Returns the probability that a label is kept: e^eps / (e^eps + K - 1), for K classes.

    >>> round(kept_share(1.0, 2), 4), kept_share(0.0, 4)
    (0.7311, 0.25)
    """
    return 1 / (1 + (num_classes - 1) * math.exp(-epsilon))


@validate.named_arguments
def with_private_labels(data: FederatedData, *, epsilon: float, seed: NonNegativeInt = 0) -> FederatedData:
    """Each training label is kept or replaced by one of the K - 1 others, for label differential privacy (label DP).

    A label is kept with probability e^eps / (e^eps + K - 1). Otherwise each of the other labels is equally likely. The
    label is drawn once. So the guarantee holds for anything that is computed from it, however long the training is.
    Features are not hidden, and neither is what they reveal about labels. Which classes there are is taken as known.
    The seed is a secret of the clients, and must be used once.

    Args:
      data: of the task "binary" or "classification".
      epsilon: in [0.001, 20], per label. The probability of any output differs between two values of one label by a
        factor e^eps at most.
      seed: of the draws.

    Returns: the same data set with another `train`. Test sets keep their true labels.

    Raises: ValueError, TypeError for another task, more than 2^20 classes, and numbers out of range.

    Guarantees: the epsilon is pure, and exact although a draw has 2^32 values only
      (tests/population/test_private_labels.py::test_epsilon_is_exact). Labels follow the stated law (::test_shares).
      Padding and size classes do not change them (::test_padding). `privacy.label_claim` states the guarantee.

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
        jnp.asarray(np.uint32(keep_threshold(epsilon, classes))),
        jnp.uint32(classes - 1),
        jax.random.key_data(prng.stream(key, "private labels")),
        data.train.size,
    )
    return data._replace(train=train)


def keep_threshold(epsilon: float, num_classes: int) -> int:
    """Returns how many of the 2^32 values of a draw keep a label: as many as epsilon allows.

    Randomised response is exact if the true label is e^eps times as likely as the rarest other label, at most. Other
    labels are drawn modulo K - 1, so their probabilities differ slightly, and the rarest of them sets the limit.
    """
    rarest_share = (2**32 // (num_classes - 1)) / 2**32  # of another label, where the true label is not kept
    # The last factor is a margin for the rounding of this line, so that the result never exceeds the exact limit.
    odds = math.exp(epsilon) * rarest_share * (1 - 2.0**-40)
    return math.floor(2**32 * odds / (1 + odds))
