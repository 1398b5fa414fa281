"""This module runs privacy attacks on the attacker's view of a round and measures how near they come to the truth."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim import adversary
from fedjax_sim.adversary import View
from fedjax_sim.prng import stream
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, measured
from fedjax_sim.study.leakage.defences import LEARNING_RATE, NUM_SHOWN, SIDE, Defence, Digits, Seen
from fedjax_sim.study.leakage.pictures import texts_of
from fedjax_sim.types import Array

LARGEST_BATCH = 8  # that is rebuilt by optimisation
MOST_DECIBELS = 60.0  # an error of 1/1000 of full brightness, which nobody sees
CLASSES = 10
GROUPS = 10  # parts of the clients that give an AUC each
INVERSION_ATTACKS = ("closed form", "optimised")


def decibels(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Computes the PSNR of pictures in decibels, at most `MOST_DECIBELS`.

    Args:
      found: [..., pixels] rebuilt pictures, clipped to [0, 1].
      truth: [..., pixels] the originals in [0, 1].

    Returns: [...], one number for each picture.
    """
    error = ((np.clip(found, 0, 1) - truth) ** 2).mean(-1)
    return -10 * np.log10(np.maximum(error, 10 ** (-MOST_DECIBELS / 10)))


def _best_match(rebuilt: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each true picture, the rebuilt picture nearest to it, and its PSNR.

    An attack does not know the order of the examples in a batch, so every pair is compared.

    Args:
      rebuilt: [m, k, 64] pictures of each message.
      truth: [m, B, 64] the examples behind each message.

    Returns: (pictures [m, B, 64], PSNR [m, B]).
    """
    values = decibels(rebuilt[:, None], truth[:, :, None])
    nearest = values.argmax(-1)
    pictures = np.take_along_axis(rebuilt, nearest[..., None], axis=1)
    return pictures, np.take_along_axis(values, nearest[..., None], axis=-1)[..., 0]


# ---- pictures

# The functions below are cached because `invert_by_optimization` compiles anew for each new function object.


@functools.cache
def _random_start(batch_size: int) -> Callable:
    """Returns key -> random pictures, from which the optimisation starts."""
    return lambda key: {"x": jax.random.uniform(key, (batch_size, SIDE * SIDE))}


@functools.lru_cache(maxsize=16)
def _simulated_client(loss_fn: Callable, num_steps: int) -> Callable:
    """Returns the local training that the attacker assumes."""
    return adversary.local_steps(loss_fn, LEARNING_RATE, num_steps=num_steps)


@functools.cache
def _descent() -> tuple[Callable, optax.GradientTransformation]:
    """Returns the regulariser and the optimiser of the attack."""
    return adversary.total_variation(1e-3, (SIDE, SIDE)), optax.adam(0.05)


@functools.lru_cache(maxsize=16)
def _inversion(
    loss_fn: Callable, local_steps: int, batch_size: int, num_steps: int, num_restarts: int
) -> jax.stages.Wrapped:
    """Returns the attack by optimisation, compiled: (key, view, what is known of each example) -> `Rebuilt`.

    For each message u it minimises 1 - cos(u', u) + 0.001 TV(x) over pictures x, where u' is the update that a client
    with x would send.

    Args:
      loss_fn: the training loss.
      local_steps: K local steps that the attacker assumes.
      batch_size: B pictures that are rebuilt from each message.
      num_steps: steps of the descent.
      num_restarts: random starts for each message; the best is kept.

    Returns: the compiled function. It takes a view of m messages and {"y": labels [m, B]}, and its guess has "x"
      [m, B, 64].
    """
    regularizer, optimizer = _descent()

    def invert(key, view, known):
        return adversary.invert_by_optimization(
            key,
            view,
            _simulated_client(loss_fn, local_steps),
            _random_start(batch_size),
            known,
            objective=adversary.cosine_distance,
            regularizer=regularizer,
            num_steps=num_steps,
            optimizer=optimizer,
            num_restarts=num_restarts,
        )

    return jax.jit(invert)


def _pictures(
    key: Array, defence: Defence, digits: Digits, attacked_round: Seen, options: dict[str, Any]
) -> Iterator[tuple]:
    """Yields (attack, rebuilt pictures [m, k, 64]) for the first messages.

    The closed form is always tried. The optimisation is left out for large batches and for the sum of all messages.

    Args:
      key: the random key of the optimisation.
      defence: what the clients do to their messages, with B and K.
      digits: the training loss.
      attacked_round: the attacker's view of the round.
      options: the study's options; `num_rebuilt` bounds m, the number of messages that are attacked.

    Yields: the name of an attack, an entry of `INVERSION_ATTACKS`, and its pictures. m is 1 for the sum and for the
      released model. For the closed form k is 1 if B is 1 and there are several messages, else 32, the outputs of the
      first layer. For the optimisation k is B.
    """
    ids = attacked_round.view.ids
    num_rebuilt = min(options["num_rebuilt"], len(ids))
    # In the order of ids, the first messages are those of the clients that hold the digits of the figure.
    rows = [0] if len(ids) == 1 else np.argsort(ids)[:num_rebuilt]
    view = View(
        attacked_round.view.broadcast,
        *(jax.tree.map(lambda x: x[np.asarray(rows)], part) for part in attacked_round.view[1:]),
    )
    if defence.batch_size == 1 and len(rows) > 1:
        rebuilt = adversary.invert_affine(view, "hidden_0")[:, None]
    else:
        # With several examples, each output of the first layer gives a mixture of examples as a candidate.
        rebuilt = adversary.affine_rows(view, "hidden_0")
    # An output that no example reaches gives 0 / 0.
    yield INVERSION_ATTACKS[0], np.nan_to_num(np.asarray(rebuilt), nan=0.0)
    if defence.batch_size > LARGEST_BATCH or len(rows) == 1:
        return
    labels = _labels(defence, view)
    invert = _inversion(
        digits.loss_fn, defence.num_steps, defence.batch_size, options["num_steps"], options["num_restarts"]
    )
    inversion = kept_results.call(invert, key, view, {"y": labels})
    yield INVERSION_ATTACKS[1], np.asarray(inversion.guess["x"])


def _rebuild(
    key: Array, defence: Defence, digits: Digits, attacked_round: Seen, *, options: dict[str, Any], conditions: dict
) -> Iterator[Comparison]:
    """Rebuilds pictures by every inversion attack.

    For each true picture the nearest rebuilt picture of its message counts.

    Args:
      key: the random key of the optimisation.
      defence: what the clients do to their messages, with B.
      digits: [rows, 64] pixels, and the training loss.
      attacked_round: the attacker's view of the round, and the rows [m, B] that clients hold.
      options: the study's options; pictures of the first `num_rebuilt` clients are judged.
      conditions: the conditions of all comparisons.

    Yields: the PSNR in decibels, with the pictures of the figure among its conditions. If the defence says that
      pictures are exact, also the root mean square error of a pixel, as a share of full brightness.
    """
    ids = attacked_round.view.ids
    is_single_message = len(ids) == 1  # the sum of all updates, or the released model
    order = np.arange(len(attacked_round.mine)) if is_single_message else np.argsort(ids)
    truth = digits.x[attacked_round.mine[order][: options["num_rebuilt"]]]
    if is_single_message:
        # The examples of all clients stand behind the same message.
        truth = truth.reshape(1, -1, truth.shape[-1])
    for attack, rebuilt in _pictures(key, defence, digits, attacked_round, options):
        nearest, values = _best_match(rebuilt, truth)
        # Clients are independent samples; examples of one client are not.
        samples = values.mean(1) if len(values) > 1 else values[0]
        shown = texts_of(nearest.reshape(-1, nearest.shape[-1])[:NUM_SHOWN])
        yield measured(conditions | {"pictures": shown}, f"PSNR, {attack} (dB)", samples)
        if attack == INVERSION_ATTACKS[0] and defence.exact:
            errors = np.sqrt(((rebuilt - truth) ** 2).mean(-1)).reshape(-1)
            yield measured(conditions, "error of a pixel", errors, 1e-5, kind="upper bound")


# ---- labels, members, properties


def _labels(defence: Defence, view: View) -> Array:
    """Recovers the labels of each message, [m, B]."""
    # Several steps move the model about as far as one step of a proportionally larger size.
    rate = LEARNING_RATE * defence.num_steps
    return adversary.recover_labels(view, num_examples=defence.batch_size, learning_rate=rate)


def _label_rows(defence: Defence, digits: Digits, attacked_round: Seen, conditions: dict) -> Iterator[Comparison]:
    """Measures how many labels are recovered, and whether the attacker can tell clients that hold a 0.

    A client's share is sum_c min(n_c, n'_c) / B, with n_c of its B examples in class c and n'_c recovered ones.

    Args:
      defence: what the clients do to their messages, with B, and the share that theory predicts, if it does.
      digits: labels, training loss, and the attacker's own examples.
      attacked_round: a view of m messages, with the rows [m, B] of their clients.
      conditions: the conditions of all comparisons.

    Yields: the mean of the m shares, and the AUC for holding a 0 if some clients hold a 0 and some do not.

    Guarantees: shares are as theory predicts, where it does (tests/study/test_leakage.py::test_predictions_hold,
    ::test_what_protects).
    """
    recovered_counts, true_counts = (
        np.stack([np.bincount(row, minlength=CLASSES) for row in labels])
        for labels in (np.asarray(_labels(defence, attacked_round.view)), digits.y[attacked_round.mine])
    )
    # Labels of a batch have no order, so counts are compared.
    shares = np.minimum(recovered_counts, true_counts).sum(1) / defence.batch_size
    yield measured(conditions, "labels recovered", shares, defence.label_chance)
    holds_zero = true_counts[:, 0] > 0
    if holds_zero.any() and not holds_zero.all():
        is_zero = digits.own["y"] == 0
        with_and_without = (
            {name: jnp.asarray(x[rows]) for name, x in digits.own.items()} for rows in (is_zero, ~is_zero)
        )
        scores = np.asarray(adversary.property_score(attacked_round.view, digits.loss_fn, *with_and_without))
        value = adversary.auc(scores[holds_zero], scores[~holds_zero])
        yield Comparison(conditions, "AUC, holds a 0", value, math.nan)


def auc_of_groups(members: np.ndarray, others: np.ndarray) -> list[float]:
    """Splits scores into ten groups and returns the AUC of each, so that their mean has an interval.

    Args:
      members: scores of examples that were trained on.
      others: scores of examples that were not.
    """
    pairs = zip(np.array_split(members, GROUPS), np.array_split(others, GROUPS), strict=True)
    return [adversary.auc(inside, outside) for inside, outside in pairs]


def _member_rows(defence: Defence, digits: Digits, attacked_round: Seen, conditions: dict) -> Iterator[Comparison]:
    """Measures membership inference: each client's first example against an example that the client does not hold.

    The advantage is the true minus the false positive rate.

    Args:
      defence: what the clients do to their messages, with the advantage that its noise allows at most.
      digits: pixels, labels and training loss.
      attacked_round: a view of m messages, of their sum or of the model. It has the rows [m, B] of the clients and a
        row [m] that each does not hold.
      conditions: the conditions of all comparisons.

    Yields: three comparisons: the AUC, with the AUCs of ten groups of clients as samples; the true positive rate at a
      false positive rate of 1 %; and the advantage, in [-1, 1].
    """
    m = len(attacked_round.mine)
    # Candidates 0 to m - 1 are the members, of one client each; the others follow in the same order of clients.
    rows = np.concatenate([attacked_round.mine[:, 0], attacked_round.others])
    candidates = {"x": jnp.asarray(digits.x[rows]), "y": jnp.asarray(digits.y[rows])}
    scores = adversary.alignment_score(attacked_round.view, digits.loss_fn, candidates, LEARNING_RATE)
    if scores.shape[0] == 1:
        # A single view of all clients: every member is in it.
        member_scores, other_scores = np.split(np.asarray(scores)[0], 2)
    else:
        # Candidate i is judged by the message of client i.
        scores = adversary.calibrated_score(scores)
        member_scores = np.diag(scores[:, :m])
        other_scores = np.diag(scores[:, m:])
    # A view without any information gives the AUC and the advantage of guessing.
    chance_auc, chance_advantage = (0.5, 0.0) if defence.blind else (None, None)
    yield measured(conditions, "membership AUC", auc_of_groups(member_scores, other_scores), chance_auc)
    yield Comparison(conditions, "TPR at FPR 1 %", adversary.tpr_at_fpr(member_scores, other_scores), math.nan)
    value, error = adversary.advantage(member_scores, other_scores)
    predicted, kind = (chance_advantage, "exact") if defence.blind else (defence.allowed, "upper bound")
    yield Comparison(conditions, "membership advantage", value, error, predicted=predicted, kind=kind)


def measure(key: Array, defence: Defence, digits: Digits, seen: Seen, options: dict[str, Any]) -> Iterator[Comparison]:
    """Runs every attack of the study on the attacker's view of one round, and measures how much each recovers.

    Args:
      key: the random key of the optimisation.
      defence: what the clients do to their messages.
      digits: the examples, the model, and the attacker's own examples.
      seen: the round as the attacker holds it, with the truth to judge the attacks by.
      options: the study's options.

    Yields: a comparison for each measured number.
    """
    conditions = {"part": defence.part, "defence": defence.name, "batch_size": defence.batch_size}
    conditions |= {"epsilon": defence.epsilon}
    yield from _rebuild(stream(key, defence.name), defence, digits, seen, options=options, conditions=conditions)
    # Labels belong to single messages.
    if len(seen.view.ids) > 1:
        yield from _label_rows(defence, digits, seen, conditions)
    yield from _member_rows(defence, digits, seen, conditions)
