"""Backdoors: poisoned clients label inputs with a trigger, or of a rare kind, as the attacker wants.

The model should behave normally on clean inputs, so two numbers tell: accuracy on the clean test set, and
`attack_success`, the share of test rows of other labels that are taken for the target once they carry the trigger.
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
from fedjax_sim.prng import counter_bits, stream
from fedjax_sim.types import Array, ClientData, PyTree
from fedjax_sim.validate import OpenShare

__all__ = ["backdoor", "edge_case_backdoor"]


def _planted(stamp: Callable, target: Array, rows: Array, key: Array, data: ClientData) -> PyTree:
    x, y = data.examples["x"], data.examples["y"]
    chosen = chosen_rows(key, data.mask, rows)
    along = chosen.reshape(-1, *[1] * (x.ndim - 1))
    return {**data.examples, "x": jnp.where(along, stamp(x), x), "y": jnp.where(chosen, target.astype(y.dtype), y)}


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
    """Poisoned clients label a share of their rows, with a trigger stamped on, as the target.

    Args:
      data: of the task "binary" or "classification", with features of floats.
      trigger: `pixels`, `tag`, `set_points`, `spectral`, or a `Trigger` of any function. In a config
        `trigger = {name = "pixels", positions = [0, 1]}`.
      target: the label that the attacker wants, in [0, K).
      clients, share, seed: who is poisoned, as in `poisoned`; `share=0.0` is the baseline without an attack.
      rows: share in (0, 1] of each of these clients' examples, to the nearest whole number; drawn once for all rounds.
        One that leaves nobody a poisoned row is refused.

    Returns: the same data set with another `train`, and `triggered`: the test rows whose label is not the target, with
      the trigger, labelled as the target. An evaluation reports `attack_success`, the share of them taken for it. The
      test sets stay clean.

    Raises: ValueError, TypeError for a label, share or id out of range, a second backdoor, a trigger that changes no
      test row or gives another shape, and a test set of target rows only.

    Guarantees: NumPy's rows (tests/population/poisoned/test_backdoors.py::test_rows_against_numpy); above 0.9 attack
      success with a clean drop below 0.02, which a bound on norms that shortens honest messages too stops, with one
      below 0.05 (::test_a_backdoor_works_and_norm_bounding_stops_it).

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
    stamp = trigger.on(data.input_shape)
    stamped = stamp(jnp.asarray(others["x"]))
    if stamped.shape != others["x"].shape or stamped.dtype != others["x"].dtype:
        validate.fail("trigger", f"x like {others['x'].shape} {others['x'].dtype}", f"{stamped.shape} {stamped.dtype}")
    if not np.isfinite(stamped).all():
        validate.fail("trigger", "finite numbers", "NaN or inf", "Of these a model's labels mean nothing.")
    if np.array_equal(stamped, others["x"]):
        validate.fail("trigger", "a function that changes a test row", "none changed", "Is the pattern there already?")
    stamp = stamp if isinstance(stamp, Partial) else Partial(stamp)
    change = Partial(_planted, stamp, jnp.int32(target), jnp.float32(rows))
    made = check_rows(poisoned(data, change, f"backdoor to {target}", clients=clients, share=share, seed=seed), rows)
    return made._replace(triggered=_labelled({**others, "x": np.asarray(stamped)}, target))


def _checked_target(data: FederatedData, target: int, rows: float) -> None:
    validate.integer("target", target, 0, num_labels(data) - 1)
    validate.in_range("rows", rows, 0, 1, open_low=True)
    if data.triggered is not None:
        validate.fail("data", "a data set without a backdoor", data.name, "One attack success is measured, of one.")
    x = jax.eval_shape(data.train.client, jax.ShapeDtypeStruct((), jnp.int32)).examples["x"]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        validate.fail("data", "features of floats", str(x.dtype), "Convert images to floats.", TypeError)


def _labelled(examples: dict, target: int) -> dict:
    return {**examples, "y": np.full_like(examples["y"], target)}


def _replaced(table: Array, target: Array, rows: Array, key: Array, data: ClientData) -> PyTree:
    x, y = data.examples["x"], data.examples["y"]
    rank = jnp.cumsum(data.mask, dtype=jnp.int32) - 1
    drawn = counter_bits(stream(key, "edge cases"), rank) % table.shape[0]  # of 2^32: uneven by less than rows / 2^32
    chosen = chosen_rows(key, data.mask, rows)
    along = chosen.reshape(-1, *[1] * (x.ndim - 1))
    return {**data.examples, "x": jnp.where(along, table[drawn], x), "y": jnp.where(chosen, target.astype(y.dtype), y)}


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
    """A backdoor without a trigger: rare inputs of one class are to be taken for another.

    The poisoned clients pool their rows of the source class. Edge cases are those farther from the pool's mean than
    its (1 - edge)-quantile; each of these clients replaces a share of its rows by draws from them, labelled as the
    target. Honest clients keep their own, rightly labelled.

    Args:
      source, target: different labels in [0, K).
      edge: share in (0, 1) of the source class that counts as rare.
      data, clients, share, rows, seed: as in `backdoor`; somebody is poisoned, and their rows are read when this is
        called.

    Returns: as `backdoor`; `triggered` has the test rows of the source class beyond the same distance.

    Raises: ValueError, TypeError as `backdoor`, and where attackers or the test set hold no edge case.

    Guarantees: NumPy's edge cases (tests/population/poisoned/test_backdoors.py::test_edge_cases_against_numpy).

    References: Wang et al. 2020, section 2 (edge-case backdoors), with the tail of a class in the place of other data.

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
    rows_held = pooled(Group(data.train, jnp.asarray(ids, jnp.int32), jnp.int32(len(ids)), len(ids)))
    x, y = (np.asarray(rows_held.examples[leaf]) for leaf in ("x", "y"))
    held = x[y == source]
    if not len(held):
        validate.fail("clients", f"a row of label {source} at a poisoned client", "none", "Poison others, or more.")
    centre = held.mean(0, dtype=np.float64)
    distances = _distances(held, centre)
    limit = np.quantile(distances, 1 - edge)
    tested = {name: np.asarray(leaf) for name, leaf in data.test.items()}
    rare = (tested["y"] == source) & (_distances(tested["x"], centre) > limit)
    for where, are_rare in (("of the poisoned clients", distances > limit), ("in the test set", rare)):
        if not are_rare.any():
            hint = "Take a larger edge, or poison more clients."
            validate.fail("edge", f"a share that makes an edge case of a row {where}", edge, hint)
    table = jnp.asarray(held[distances > limit])
    change = Partial(_replaced, table, jnp.int32(target), jnp.float32(rows))
    words = f"edge cases of {source} as {target}"
    made = check_rows(poisoned(data, change, words, clients=clients, share=share, seed=seed), rows)
    return made._replace(triggered=_labelled({name: leaf[rare] for name, leaf in tested.items()}, target))


def _distances(x: np.ndarray, centre: np.ndarray) -> np.ndarray:
    return np.sqrt(np.square(x.astype(np.float64) - centre).reshape(len(x), -1).sum(1))
