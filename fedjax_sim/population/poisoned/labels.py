"""Poisoned clients hold wrong targets: flipped labels, labels drawn at random, or readings off by a constant."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.poisoned.poisoning import check_data, check_rows, chosen_rows, poisoned
from fedjax_sim.population.splits import ratio_of
from fedjax_sim.prng import counter_bits, stream
from fedjax_sim.types import Array, ClientData, PyTree
from fedjax_sim.validate import Finite


def num_labels(data: FederatedData) -> int:
    """Returns the number of classes of a data set whose targets are labels, 2 for the task "binary".

    Raises: ValueError for another task.
    """
    check_data(data)
    if data.task not in ("binary", "classification"):
        validate.fail("data", 'a task "binary" or "classification"', data.task, "Only labels can be exchanged.")
    return max(2, data.num_outputs)


def _relabelled(labels: Array, rows: Array, key: Array, data: ClientData) -> PyTree:
    """Returns the examples with label y replaced by labels[y] in a share `rows` of the rows."""
    y = data.examples["y"]
    new_y = labels[jnp.clip(y, 0, labels.shape[0] - 1)].astype(y.dtype)
    return {**data.examples, "y": jnp.where(chosen_rows(key, data.mask, rows), new_y, y)}


def label_flip(
    data: FederatedData,
    *,
    clients: Sequence[int] | None = None,
    share: float | None = None,
    rows: float = 1.0,
    to: Sequence[int] | None = None,
    seed: int = 0,
) -> FederatedData:
    """Poisoned clients hold the label K - 1 - y instead of y, or the label that a map gives, for K classes.

    Args:
      data: of the task "binary" or "classification".
      clients, share, seed: which clients are poisoned, as in `poisoned`.
      rows: share in (0, 1] of each poisoned client's examples, rounded up or down at random so that its mean is the
        share. The rows are drawn once for all rounds. A share that poisons no row at all is refused.
      to: [K] the new label of each label. By default K - 1, ..., 1, 0.

    Guarantees: the labels equal those of a NumPy reference
      (tests/population/poisoned/test_poisoning.py::test_labels_against_numpy). The accuracy of a run falls
      (tests/population/poisoned/test_backdoors.py::test_poisoning_and_backdoor_are_told_apart).

    References: Tolpegin et al. 2020, section 3; y -> 9 - y as in Fang et al. 2020, section 5.1.

    >>> from fedjax_sim.population import digits
    >>> clean = digits(num_clients=20)
    >>> flipped = label_flip(clean, clients=[4])
    >>> before, after = (jax.jit(data.train.client)(4).examples["y"][:20] for data in (clean, flipped))
    >>> bool((before + after == 9).all())
    True
    """
    labels = num_labels(data)
    to = list(range(labels))[::-1] if to is None else to
    validate.sequence("to", to)
    if len(to) != labels:
        validate.fail("to", f"{labels} labels, one for each", list(to))
    for label in to:
        validate.integer("to", label, 0, labels - 1)
    if list(to) == list(range(labels)):
        validate.fail("to", "a map that changes a label", list(to))
    # A Partial makes the map an array of the population, so data sets with other maps share one compiled program.
    change = Partial(_relabelled, jnp.asarray(to, jnp.int32), _share_of_rows(rows))
    return check_rows(poisoned(data, change, "label flip", clients=clients, share=share, seed=seed), rows)


def _share_of_rows(rows: float) -> Array:
    """Returns the share of rows as an array, after a check of its range."""
    validate.in_range("rows", rows, 0, 1, open_low=True)
    return jnp.asarray(ratio_of("rows", rows))


def _random(labels: Array, keep: Array, rows: Array, key: Array, data: ClientData) -> PyTree:
    """Returns the examples with random labels in a share `rows` of the rows."""
    y = data.examples["y"]
    # Draws are addressed by the rank among valid rows, so padding does not change them.
    rank = jnp.cumsum(data.mask, dtype=jnp.int32) - 1
    num_choices = labels - jnp.where(keep, 0, 1).astype(jnp.uint32)
    # A draw has 2^32 values, so the chances of two labels differ by less than K / 2^32.
    draw = counter_bits(stream(key, "labels"), rank) % num_choices
    # The new label is y + 1 + draw modulo K, which is never y, or y + draw if y may be drawn as well.
    new_y = (y.astype(jnp.uint32) + jnp.where(keep, 0, 1).astype(jnp.uint32) + draw) % labels
    return {**data.examples, "y": jnp.where(chosen_rows(key, data.mask, rows), new_y.astype(y.dtype), y)}


@validate.named_arguments
def random_labels(
    data: FederatedData,
    *,
    clients: Sequence[int] | None = None,
    share: float | None = None,
    rows: float = 1.0,
    keep: bool = False,
    seed: int = 0,
) -> FederatedData:
    """Poisoned clients hold labels that are drawn uniformly, once for all rounds.

    Args:
      data, clients, share, rows, seed: as in `label_flip`.
      keep: whether the true label may be drawn too. By default one of the K - 1 other labels is drawn.

    Guarantees: without `keep` the true label is never drawn, and all other labels are equally likely
      (tests/population/poisoned/test_poisoning.py::test_random_labels_are_uniform).

    References: Zhang et al. 2017, section 2.1 (random labels).

    >>> from fedjax_sim.population import digits
    >>> clean = digits(num_clients=20)
    >>> drawn = random_labels(clean, share=1.0)
    >>> before, after = (jax.jit(data.train.client)(4).examples["y"][:20] for data in (clean, drawn))
    >>> bool((before == after).any())
    False
    """
    labels = num_labels(data)
    change = Partial(_random, jnp.uint32(labels), jnp.asarray(keep), _share_of_rows(rows))
    return check_rows(poisoned(data, change, "random labels", clients=clients, share=share, seed=seed), rows)


def _moved(offset: Array, key: Array, data: ClientData) -> PyTree:
    """Returns the examples with `offset` added to every target."""
    y = data.examples["y"]
    return {**data.examples, "y": y + offset.astype(y.dtype)}


@validate.named_arguments
def label_offset(
    data: FederatedData,
    *,
    offset: Finite,
    clients: Sequence[int] | None = None,
    share: float | None = None,
    seed: int = 0,
) -> FederatedData:
    """Poisoned clients report targets that are off by a constant, such as readings of a sensor with a wrong zero.

    Args:
      data: of the task "regression".
      offset: added to each target, in the target's unit. It must be a whole number if targets are integers.
      clients, share, seed: which clients are poisoned, as in `poisoned`.

    Guarantees: f of m such clients move the model that the mean aggregates by (f / m) offset
      (tests/population/datasets/test_industrial.py::test_bias_of_mean_and_median).

    >>> from fedjax_sim.population import mean_estimation
    >>> moved = label_offset(mean_estimation(num_clients=10, mean=1.0, spread=0.0), offset=5.0, clients=[0])
    >>> float(jax.jit(moved.train.client)(0).examples["y"][0, 0])
    6.0
    """
    check_data(data)
    if data.task != "regression":
        validate.fail("data", 'the task "regression"', data.task, "For labels there is label_flip.")
    y = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32)).examples["y"]
    if jnp.issubdtype(y.dtype, jnp.integer) and offset != int(offset):
        validate.fail("offset", f"a whole number, for targets of {y.dtype}", offset, "Or convert targets to floats.")
    change = Partial(_moved, jnp.float32(offset))
    return poisoned(data, change, f"targets off by {offset:g}", clients=clients, share=share, seed=seed)
