"""This study attacks the messages of a round: it rebuilds digits, recovers labels and finds members, under defences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import adversary, validate
from fedjax_sim.models import per_example
from fedjax_sim.running import kept_results
from fedjax_sim.study.findings import Comparison, Findings, measured, rows_of
from fedjax_sim.study.leakage.attacks import auc_of_groups, decibels, measure
from fedjax_sim.study.leakage.claims import leakage_claims
from fedjax_sim.study.leakage.defences import NUM_SHOWN, Digits, defences, replayed
from fedjax_sim.study.leakage.figure import leakage_figure

QUESTION = "What does a curious server learn from the messages, and what keeps it from that?"
KNOWN_BY_HEART = 100  # examples that a model is trained on until it has memorised them


def leakage(
    *,
    num_clients: int = 1000,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    clip_norm: float = 0.1,
    bits: Sequence[int] = (4, 2),
    shares: Sequence[float] = (0.1, 0.01),
    epsilons: Sequence[float] = (1.0, 10.0, 100.0, 1000.0),
    delta: float = 1e-5,
    num_rebuilt: int = 16,
    num_steps: int = 1000,
    num_restarts: int = 4,
    seed: int = 0,
) -> Findings:
    """What does a curious server learn? Rebuilds digits, and finds labels and members, under each defence.

    The study replays one round of FedAvg on an untrained MLP. The attacks get exactly what a server holds. Each client
    has B digits and takes one step of SGD on all of them. Defences are tried with B = 1, where no other example hides a
    digit.

    Args:
      num_clients: m, all of them in the round, at least 100.
      batch_sizes: B, at least two values with 1 and 8 among them.
      clip_norm: C of clipping and of all noise.
      bits: bits for each number under quantisation.
      shares: the shares of the numbers that top-k keeps.
      epsilons: epsilons of local noise for a replaced client, rising. The first one is used for central noise too.
      delta: the delta of every epsilon.
      num_rebuilt: clients whose pictures are rebuilt, at least 8.
      num_steps: steps of the optimisation that rebuilds pictures.
      num_restarts: random starts of the optimisation.
      seed: decides everything.

    Returns: `Findings` with the PSNR of the nearest rebuilt picture; the share of labels recovered; AUC, TPR at 1 % FPR
      and advantage of membership inference; and the AUC for a property.

    Guarantees: a single digit is rebuilt to 1e-5, a masked message gives chance, and noise keeps the advantage below
    its bound (tests/study/test_leakage.py::test_predictions_hold). Defences rank as they should (::test_what_protects).

    References: Phong et al. 2018; Zhu, Liu and Han 2019; Geiping et al. 2020; Yeom et al. 2018; Humphries et al. 2023.
    """
    options = dict(locals())
    _check(options)
    options |= {name: list(options[name]) for name in ("batch_sizes", "bits", "shares", "epsilons")}
    digits = Digits.load(seed)
    key = jax.random.key(seed)
    # A rebuilt picture shows something only if it comes nearer than a guess without any message.
    yardstick = decibels(digits.own["x"].mean(0)[None], digits.x)
    comparisons = [measured({"part": "yardstick", "defence": "the mean digit"}, "PSNR, closed form (dB)", yardstick)]
    for defence in defences(options):
        attacked_round = replayed(defence, digits, num_clients, seed)
        comparisons += measure(key, defence, digits, attacked_round, options)
    comparisons += _overfitting(digits, seed)
    rows = rows_of(comparisons)
    return Findings(
        name="leakage",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(leakage_claims(rows, options)),
        figure=partial(leakage_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `leakage`, by name.
    """
    validate.integer("num_clients", options["num_clients"], 100, 100_000)
    for name in ("batch_sizes", "bits", "shares", "epsilons"):
        validate.sequence(name, options[name])
    for size in options["batch_sizes"]:
        validate.integer("batch_sizes", size, 1, 500)
    if not {1, 8} <= set(options["batch_sizes"]):
        validate.fail("batch_sizes", "1 and 8 among them", list(options["batch_sizes"]))
    validate.in_range("clip_norm", options["clip_norm"], 1e-3, 1e3)
    for value in options["bits"]:
        validate.integer("bits", value, 2, 16)
    for value in options["shares"]:
        validate.in_range("shares", value, 0, 1, open_low=True)
    for value in options["epsilons"]:
        validate.in_range("epsilons", value, 1e-2, 3000)
    if list(options["epsilons"]) != sorted(set(options["epsilons"])):
        validate.fail("epsilons", "rising numbers", list(options["epsilons"]))
    validate.in_range("delta", options["delta"], 0, 1, open_low=True, open_high=True)
    validate.integer("num_rebuilt", options["num_rebuilt"], NUM_SHOWN, options["num_clients"])
    validate.integer("num_steps", options["num_steps"])
    validate.integer("num_restarts", options["num_restarts"])
    validate.integer("seed", options["seed"], 0)


def _overfitting(digits: Digits, seed: int) -> Iterator[Comparison]:
    """Measures membership inference by the loss, before and after a model has memorised a hundred digits.

    The score of an example is minus its loss. The model is trained by 2,000 steps w <- w - 0.5 grad of the members'
    mean loss.

    Args:
      digits: the examples, the untrained model and its loss.
      seed: decides which `KNOWN_BY_HEART` digits are members; all others are non-members.

    Yields: two comparisons of the AUC, untrained and trained, with the AUCs of ten groups as samples.
    """
    rows = np.random.default_rng([seed, 1]).permutation(len(digits.x))
    members, non_members = ({"x": jnp.asarray(digits.x[group]), "y": jnp.asarray(digits.y[group])}
                            for group in (rows[:KNOWN_BY_HEART], rows[KNOWN_BY_HEART:]))  # fmt: skip

    def mean_loss(params):
        return per_example(digits.loss_fn(params, members, None))["loss"].mean()

    @jax.jit
    def trained(params):
        # 2,000 steps of gradient descent on all members.
        return jax.lax.fori_loop(
            0, 2000, lambda _, p: jax.tree.map(lambda x, g: x - 0.5 * g, p, jax.grad(mean_loss)(p)), params
        )

    for name, params in (("untrained", digits.params), ("trained", kept_results.call(trained, digits.params))):
        scores = (
            np.asarray(adversary.loss_threshold_score(params, digits.loss_fn, examples))
            for examples in (members, non_members)
        )
        conditions = {"part": "overfitting", "defence": f"loss of a model {name} on {KNOWN_BY_HEART} digits"}
        yield measured(conditions, "membership AUC", auc_of_groups(*scores))
