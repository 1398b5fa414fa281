"""What an attacker makes of a view, and how near it comes to the truth."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import adversary
from fedjax_sim.adversary import View
from fedjax_sim.prng import stream
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.leakage.defences import LEARNING_RATE, NUM_SHOWN, SIDE, Defence, Digits, Seen
from fedjax_sim.types import Array

__all__ = ["INVERSION_ATTACKS", "LARGEST_BATCH", "MOST_DECIBELS", "Picture", "auc_of_groups", "decibels", "measure"]

LARGEST_BATCH = 8  # that is rebuilt by optimisation
MOST_DECIBELS = 60.0  # an error of 1/1000 of full brightness, which nobody sees
CLASSES, GROUPS = 10, 10
INVERSION_ATTACKS = ("closed form", "optimised")


class Picture(NamedTuple):
    """The shown digits as one attack rebuilt them."""

    defence: str
    attack: str
    images: np.ndarray  # [8, 64]
    decibels: np.ndarray  # [8]


def decibels(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """PSNR over the last axis, of pixels in [0, 1]; at most `MOST_DECIBELS`."""
    error = ((np.clip(found, 0, 1) - truth) ** 2).mean(-1)
    return -10 * np.log10(np.maximum(error, 10 ** (-MOST_DECIBELS / 10)))


def _best_match(found: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each true picture [m, B, 64] the nearest of those found [m, k, 64], and its PSNR [m, B]."""
    values = decibels(found[:, None], truth[:, :, None])
    at = values.argmax(-1)
    return np.take_along_axis(found, at[..., None], axis=1), np.take_along_axis(values, at[..., None], axis=-1)[..., 0]


# ---- pictures


@functools.cache
def _start(batch_size: int) -> Callable:
    return lambda key: {"x": jax.random.uniform(key, (batch_size, SIDE * SIDE))}


@functools.lru_cache(maxsize=16)
def _simulated(loss_fn: Callable, num_steps: int) -> Callable:
    return adversary.local_steps(loss_fn, LEARNING_RATE, num_steps=num_steps)


@functools.cache
def _descent() -> tuple[Callable, optax.GradientTransformation]:
    return adversary.total_variation(1e-3, (SIDE, SIDE)), optax.adam(0.05)


def _pictures(key: Array, defence: Defence, digits: Digits, seen: Seen, options: dict[str, Any]) -> Iterator[tuple]:
    """(attack, pictures [m, k, 64]) of the first messages."""
    first = min(options["num_rebuilt"], len(seen.view.ids))
    rows = [0] if len(seen.view.ids) == 1 else np.argsort(seen.view.ids)[:first]  # by id: those of the shown digits
    view = View(seen.view.broadcast, *(jax.tree.map(lambda x: x[np.asarray(rows)], part) for part in seen.view[1:]))
    if defence.batch_size == 1 and len(rows) > 1:
        found = adversary.invert_affine(view, "hidden_0")[:, None]
    else:
        found = adversary.affine_rows(view, "hidden_0")
    yield INVERSION_ATTACKS[0], np.nan_to_num(np.asarray(found), nan=0.0)
    if defence.batch_size > LARGEST_BATCH or len(rows) == 1:
        return
    labels = _labels(defence, view)
    regularizer, optimizer = _descent()
    rebuilt = adversary.invert_by_optimization(
        key,
        view,
        _simulated(digits.loss_fn, defence.num_steps),
        _start(defence.batch_size),
        {"y": labels},
        objective=adversary.cosine_distance,
        regularizer=regularizer,
        num_steps=options["num_steps"],
        optimizer=optimizer,
        num_restarts=options["num_restarts"],
    )
    yield INVERSION_ATTACKS[1], np.asarray(rebuilt.guess["x"])


def _rebuild(key: Array, defence: Defence, digits: Digits, seen: Seen, options: dict[str, Any], conditions: dict):
    """(comparisons, pictures)."""
    compared, pictures = [], []
    order = np.arange(len(seen.mine)) if len(seen.view.ids) == 1 else np.argsort(seen.view.ids)
    truth = digits.x[seen.mine[order][: options["num_rebuilt"]]]
    if len(seen.view.ids) == 1:  # one message of everybody's examples
        truth = truth.reshape(1, -1, truth.shape[-1])
    for attack, found in _pictures(key, defence, digits, seen, options):
        best, values = _best_match(found, truth)
        samples = values.mean(1) if len(values) > 1 else values[0]
        compared.append(measured(conditions, f"PSNR, {attack} (dB)", samples))
        shown = best.reshape(-1, best.shape[-1])[:NUM_SHOWN], values.reshape(-1)[:NUM_SHOWN]
        pictures.append(Picture(defence.name, attack, *shown))
        if attack == INVERSION_ATTACKS[0] and defence.exact:
            errors = np.sqrt(((found - truth) ** 2).mean(-1)).reshape(-1)
            compared.append(measured(conditions, "error of a pixel", errors, 1e-5, kind="upper bound"))
    return compared, pictures


# ---- labels, members, properties


def _labels(defence: Defence, view: View) -> Array:
    rate = LEARNING_RATE * defence.num_steps
    return adversary.recover_labels(view, num_examples=defence.batch_size, learning_rate=rate)


def _label_rows(defence: Defence, digits: Digits, seen: Seen, conditions: dict) -> Iterator[Comparison]:
    found, true = (np.apply_along_axis(np.bincount, 1, labels, minlength=CLASSES)
                   for labels in (np.asarray(_labels(defence, seen.view)), digits.y[seen.mine]))  # fmt: skip
    shares = np.minimum(found, true).sum(1) / defence.batch_size
    yield measured(conditions, "labels recovered", shares, defence.label_chance)
    has = true[:, 0] > 0
    if has.any() and not has.all():
        zero = digits.own["y"] == 0
        sides = ({name: jnp.asarray(x[rows]) for name, x in digits.own.items()} for rows in (zero, ~zero))
        scores = np.asarray(adversary.property_score(seen.view, digits.loss_fn, *sides))
        value = adversary.auc(scores[has], scores[~has])
        yield Comparison(conditions, "AUC, holds a 0", value, math.nan)


def auc_of_groups(members: np.ndarray, others: np.ndarray) -> list[float]:
    """AUCs of ten groups, whose mean has an interval."""
    pairs = zip(np.array_split(members, GROUPS), np.array_split(others, GROUPS), strict=True)
    return [adversary.auc(inside, outside) for inside, outside in pairs]


def _member_rows(defence: Defence, digits: Digits, seen: Seen, conditions: dict) -> Iterator[Comparison]:
    """A row that each client holds against one that it does not, half by half of the clients' candidates."""
    m = len(seen.mine)
    rows = np.concatenate([seen.mine[:, 0], seen.others])
    candidates = {"x": jnp.asarray(digits.x[rows]), "y": jnp.asarray(digits.y[rows])}
    scores = adversary.alignment_score(seen.view, digits.loss_fn, candidates, LEARNING_RATE)
    if scores.shape[0] == 1:
        inside, outside = np.split(np.asarray(scores)[0], 2)
    else:
        scores = adversary.calibrated_score(scores)
        inside, outside = np.diag(scores[:, :m]), np.diag(scores[:, m:])
    known = (0.5, 0.0) if defence.blind else (None, None)
    yield measured(conditions, "membership AUC", auc_of_groups(inside, outside), known[0])
    yield Comparison(conditions, "TPR at FPR 1 %", adversary.tpr_at_fpr(inside, outside), math.nan)
    value, error = adversary.advantage(inside, outside)
    bound, kind = (known[1], "exact") if defence.blind else (defence.allowed, "upper bound")
    yield Comparison(conditions, "membership advantage", value, error, predicted=bound, kind=kind)


def measure(key: Array, defence: Defence, digits: Digits, seen: Seen, options: dict[str, Any]):
    """(comparisons, pictures) of every attack on a view."""
    conditions = {"part": defence.part, "defence": defence.name, "batch_size": defence.batch_size}
    conditions |= {"epsilon": defence.epsilon}
    compared, pictures = _rebuild(stream(key, defence.name), defence, digits, seen, options, conditions)
    if len(seen.view.ids) > 1:
        compared += _label_rows(defence, digits, seen, conditions)
    compared += _member_rows(defence, digits, seen, conditions)
    return compared, pictures
