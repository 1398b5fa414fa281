"""Backdoors make a model give the attacker's label to inputs with a trigger, or to inputs of a rare kind.

The model should behave normally on clean inputs. So an attack is judged by two numbers. The first is the accuracy on
the clean test set. The second is `attack_success`: the share of test rows with other labels that the model classifies
as the target once they carry the trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fedjax_sim import validate
from fedjax_sim.population.federated_data import FederatedData
from fedjax_sim.population.groups.grouped import Group
from fedjax_sim.population.poisoned.labels import num_labels
from fedjax_sim.population.poisoned.poisoning import check_rows, chosen_clients, chosen_rows, poisoned
from fedjax_sim.population.poisoned.triggers import Trigger
from fedjax_sim.population.population import pooled
from fedjax_sim.population.splits import ratio_of
from fedjax_sim.prng import counter_bits, stream
from fedjax_sim.types import Array, ClientData, PyTree
from fedjax_sim.validate import OpenShare


def _planted(stamp: Callable, target: Array, rows: Array, key: Array, data: ClientData) -> PyTree:
    """Returns the examples, of which a share `rows` has the trigger and the target label."""
    x = data.examples["x"]
    y = data.examples["y"]
    is_chosen = chosen_rows(key, data.mask, rows)
    is_chosen_x = is_chosen.reshape(-1, *[1] * (x.ndim - 1))  # broadcasts over the axes of an example
    poisoned_x = jnp.where(is_chosen_x, stamp(x), x)
    poisoned_y = jnp.where(is_chosen, target.astype(y.dtype), y)
    return {**data.examples, "x": poisoned_x, "y": poisoned_y}


def backdoor(
    data: FederatedData,
    *,
    trigger: Trigger,
    target: int,
    clients: Sequence[int] | None = None,
    share: float | None = None,
    rows: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Poisoned clients put a trigger on a share of their rows, and label these rows as the target.

    Args:
      data: of the task "binary" or "classification", with floating-point features.
      trigger: `pixels`, `tag`, `set_points`, `spectral`, or a `Trigger` of any function. In a config
        `trigger = {name = "pixels", positions = [0, 1]}`.
      target: the label that the attacker wants, in [0, K).
      clients, share, seed: which clients are poisoned, as in `poisoned`. `share=0.0` is the baseline without an attack.
      rows: share in (0, 1] of each poisoned client's examples, rounded up or down at random so that its mean is the
        share. The rows are drawn once for all rounds. A share that poisons no row at all is refused.

    Returns: the same data set with another `train`, and with `triggered`: the test rows whose label is not the target,
      with the trigger, labelled as the target. An evaluation reports `attack_success`, the share of `triggered` that
      the model classifies as the target. The test sets stay clean.

    Raises: ValueError or TypeError for a label, share or id out of range, and for a second backdoor. ValueError for a
      trigger that changes no test row or gives another shape, and for a test set that holds target rows only.

    Guarantees: the rows equal those of a NumPy reference
      (tests/population/poisoned/test_backdoors.py::test_rows_against_numpy). The attack succeeds above 0.9 and costs
      less than 0.02 of clean accuracy. A norm bound so tight that it shortens honest messages too stops the attack, and
      costs less than 0.05 (::test_a_backdoor_works_and_norm_bounding_stops_it).

    References: Gu, Dolan-Gavitt and Garg 2017, section 4; Bagdasaryan et al. 2020, section 3.

    >>> from fedjax_sim.population import digits, tag
    >>> data = backdoor(digits(num_clients=20), trigger=tag(0, 1.0), target=7, share=0.1)
    >>> data.poisons, set(data.triggered["y"].tolist()), set(data.triggered["x"][:, 0].tolist())
    (('backdoor to 7 at 2 of 20 clients',), {7}, {1.0})
    """
    _checked_target(data, target, rows)
    validate.part("trigger", trigger, Trigger)
    others = {name: np.asarray(leaf)[np.asarray(data.test["y"]) != target] for name, leaf in data.test.items()}
    if not len(others["y"]):
        validate.fail("target", "a label that some test rows do not have", target)
    # The trigger is applied to the test rows at once: they are needed as `triggered`, and show whether it works.
    stamp = trigger.on(data.input_shape)
    stamped = stamp(jnp.asarray(others["x"]))
    if stamped.shape != others["x"].shape or stamped.dtype != others["x"].dtype:
        validate.fail("trigger", f"x like {others['x'].shape} {others['x'].dtype}", f"{stamped.shape} {stamped.dtype}")
    if not np.isfinite(stamped).all():
        validate.fail("trigger", "finite numbers", "NaN or inf", "Of these a model's labels mean nothing.")
    if np.array_equal(stamped, others["x"]):
        validate.fail("trigger", "a function that changes a test row", "none changed", "Is the pattern there already?")
    stamp = stamp if isinstance(stamp, Partial) else Partial(stamp)
    change = Partial(_planted, stamp, jnp.int32(target), jnp.asarray(ratio_of("rows", rows)))
    words = f"backdoor to {target}"
    poisoned_data = check_rows(poisoned(data, change, words, clients=clients, share=share, seed=seed), rows)
    return poisoned_data._replace(triggered=_labelled({**others, "x": np.asarray(stamped)}, target))


def _checked_target(data: FederatedData, target: int, rows: float) -> None:
    """Refuses arguments that are wrong for every backdoor."""
    validate.integer("target", target, 0, num_labels(data) - 1)
    validate.in_range("rows", rows, 0, 1, open_low=True)
    if data.triggered is not None:
        validate.fail("data", "a data set without a backdoor", data.name, "One attack success is measured, of one.")
    x = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32)).examples["x"]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        validate.fail("data", "features of floats", str(x.dtype), "Convert images to floats.", TypeError)


def _labelled(examples: dict, target: int) -> dict:
    """Returns the examples, all labelled as the target."""
    return {**examples, "y": np.full_like(examples["y"], target)}


def _replaced(table: Array, target: Array, rows: Array, key: Array, data: ClientData) -> PyTree:
    """Returns the examples, of which a share `rows` is replaced by draws from `table`, labelled as the target."""
    x = data.examples["x"]
    y = data.examples["y"]
    rank = jnp.cumsum(data.mask, dtype=jnp.int32) - 1
    # A draw has 2^32 values, so the chances of two edge cases differ by less than (rows of the table) / 2^32.
    table_rows = counter_bits(stream(key, "edge cases"), rank) % table.shape[0]
    is_chosen = chosen_rows(key, data.mask, rows)
    is_chosen_x = is_chosen.reshape(-1, *[1] * (x.ndim - 1))  # broadcasts over the axes of an example
    poisoned_x = jnp.where(is_chosen_x, table[table_rows], x)
    poisoned_y = jnp.where(is_chosen, target.astype(y.dtype), y)
    return {**data.examples, "x": poisoned_x, "y": poisoned_y}


@validate.named_arguments
def edge_case_backdoor(
    data: FederatedData,
    *,
    source: int,
    target: int,
    edge: OpenShare = 0.2,
    clients: Sequence[int] | None = None,
    share: float | None = None,
    rows: float = 0.5,
    seed: int = 0,
) -> FederatedData:
    """Poisoned clients make the model classify rare inputs of one class as another class, without a trigger.

    The poisoned clients pool their rows of the source class. The edge cases are the rows whose distance from the pool's
    mean is above the (1 - edge)-quantile of all these distances. Each poisoned client replaces a share of its rows by
    draws from the edge cases, labelled as the target. Honest clients keep their rows and labels.

    Args:
      source, target: different labels in [0, K).
      edge: share in (0, 1) of the source class that counts as rare.
      data, clients, share, rows, seed: as in `backdoor`. At least one client must be poisoned. The poisoned clients'
        rows are read when this function is called.

    Returns: as `backdoor`. `triggered` has the test rows of the source class beyond the same distance.

    Raises: ValueError or TypeError as `backdoor`, and if the poisoned clients or the test set hold no edge case.

    Guarantees: the edge cases equal those of a NumPy reference
      (tests/population/poisoned/test_backdoors.py::test_edge_cases_against_numpy).

    References: Wang et al. 2020, section 2 (edge-case backdoors). Here the tail of a class takes the place of other
      data.

    >>> from fedjax_sim.population import digits
    >>> data = edge_case_backdoor(digits(num_clients=20), source=7, target=1, share=0.2)
    >>> data.poisons
    ('edge cases of 7 as 1 at 4 of 20 clients',)
    """
    _checked_target(data, target, rows)
    validate.integer("source", source, 0, num_labels(data) - 1)
    if source == target:
        validate.fail("source", "another label than the target", source)
    ids = chosen_clients(data.train.size, clients, share, seed)
    if not len(ids):
        validate.fail("share", "a poisoned client at least", share, "Edge cases are those that attackers hold.")
    # A group of the poisoned clients is a population, so their rows can be pooled without those of honest clients.
    poisoned_rows = pooled(Group(data.train, jnp.asarray(ids, jnp.int32), jnp.int32(len(ids)), len(ids)))
    x, y = (np.asarray(poisoned_rows.examples[leaf]) for leaf in ("x", "y"))
    source_x = x[y == source]
    if not len(source_x):
        validate.fail("clients", f"a row of label {source} at a poisoned client", "none", "Poison others, or more.")
    # Centre and limit come from the poisoned clients' rows alone, for an attacker sees no other rows.
    centre = source_x.mean(0, dtype=np.float64)
    distances = _distances(source_x, centre)
    limit = np.quantile(distances, 1 - edge)
    test = {name: np.asarray(leaf) for name, leaf in data.test.items()}
    is_rare_test_row = (test["y"] == source) & (_distances(test["x"], centre) > limit)
    for where, are_rare in (("of the poisoned clients", distances > limit), ("in the test set", is_rare_test_row)):
        if not are_rare.any():
            hint = "Take a larger edge, or poison more clients."
            validate.fail("edge", f"a share that makes an edge case of a row {where}", edge, hint)
    edge_cases = jnp.asarray(source_x[distances > limit])
    change = Partial(_replaced, edge_cases, jnp.int32(target), jnp.asarray(ratio_of("rows", rows)))
    words = f"edge cases of {source} as {target}"
    poisoned_data = check_rows(poisoned(data, change, words, clients=clients, share=share, seed=seed), rows)
    rare_test_rows = {name: leaf[is_rare_test_row] for name, leaf in test.items()}
    return poisoned_data._replace(triggered=_labelled(rare_test_rows, target))


def _distances(x: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Returns the Euclidean distance of each row of `x` from `centre`, [n] float64."""
    return np.sqrt(np.square(x.astype(np.float64) - centre).reshape(len(x), -1).sum(1))
