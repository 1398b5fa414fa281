"""Which rule withstands which attack? Test accuracies of rules under attacks, and the worst case of each rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_sim import validate
from fedjax_sim.study.findings import Comparison, Findings, few
from fedjax_sim.study.robust_digits import ATTACKS, RULES, RobustDigits
from fedjax_sim.study.robustness.figure import robustness_figure
from fedjax_sim.study.robustness.reading import robustness_reading
from fedjax_sim.validate import Positive

__all__ = ["robustness"]

QUESTION = "Which rule withstands which attack, and what is left of it in the worst case?"


@validate.named_arguments
def robustness(
    *,
    rules: Sequence[str] | None = None,
    attacks: Sequence[str] | None = None,
    attackers: Sequence[int] = (2, 4, 6),
    num_clients: int = 20,
    alpha: float = 0.3,
    num_steps: int = 3,
    learning_rate: Positive = 0.3,
    num_rounds: int = 200,
    num_runs: int = 3,
    seed: int = 0,
) -> Findings:
    """Which rule withstands which attack? Test accuracy for each rule, attack and number of attackers, and the worst.

    Clients of the digits, with unlike labels, all take part in every round and train a linear model. Each rule is set
    for the true number of attackers. The worst case of a rule is the attack with the least mean accuracy; it is a
    minimum over the attacks of this list, and others may be worse.

    Args:
      rules: names; None = all. attacks: names; None = all; "none" sends what is honest.
      attackers: numbers f of them, rising; each rule is set for its f, and Krum needs 2 f + 3 <= m.
      num_clients: m. alpha: of the clients' Dirichlet label shares.
      num_steps, learning_rate: of local work in a round, minibatches of 20 from 40 examples.
      num_rounds: T. num_runs: runs of each composition on the same clients, each with its own model,
        minibatches, and clients who attack.
      seed: decides everything.

    Returns: `Findings`: test accuracies, with their standard deviations over runs.

    Guarantees: each composition has the accuracy of a run of its own, up to one of 360 test examples, for it is rounded
    otherwise (tests/study/test_robustness.py::test_a_cell_is_a_run, ::test_every_rule_and_attack_is_its_own).

    References: Karimireddy, He and Jaggi 2022, section 6; Shejwalkar and Houmansadr 2021; the benchmark of ByzFL
    (Gonzalez et al. 2025).
    """
    rules, attacks = (tuple(known) if x is None else x for x, known in ((rules, RULES), (attacks, ATTACKS)))
    options = dict(locals())
    _check(options)
    settings = [(name, f) for f in attackers for name in rules]
    points = [(i, j, f) for i, (_, f) in enumerate(settings) for j in range(len(attacks))]
    work = {name: options[name] for name in ("num_steps", "learning_rate", "num_rounds", "num_runs")}
    seen = RobustDigits(num_clients, alpha, seed).accuracies(
        jax.random.key(seed), [RULES[name](num_clients, f) for name, f in settings],
        [ATTACKS[name] for name in attacks], points, **work,
    )  # fmt: skip
    cells = {(*settings[i][::-1], attacks[j]): row for (i, j, _), row in zip(points, seen, strict=True)}
    found = list(_comparisons(cells, attackers, rules, attacks))
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    reading = list(robustness_reading(found, options))
    return Findings("robustness", QUESTION, found, reading, partial(robustness_figure, found, options), options)


def _check(options: dict[str, Any]) -> None:
    for name, known in (("rules", RULES), ("attacks", ATTACKS)):
        validate.sequence(name, options[name])
        for value in options[name]:
            validate.one_of(name, value, known)
        if len(set(options[name])) < len(options[name]):
            validate.fail(name, "each name once", list(options[name]))
    validate.integer("num_clients", options["num_clients"], 5, 200)
    validate.sequence("attackers", options["attackers"])
    for value in options["attackers"]:
        validate.integer("attackers", value, 0, (options["num_clients"] - 3) // 2, hint="Krum needs 2 f + 3 <= m.")
    if list(options["attackers"]) != sorted(set(options["attackers"])):
        validate.fail("attackers", "rising numbers", list(options["attackers"]))
    validate.positive("alpha", options["alpha"])
    validate.in_range("learning_rate", options["learning_rate"], 0, 10, open_low=True)
    for name, low in (("num_steps", 1), ("num_rounds", 1), ("num_runs", 2), ("seed", 0)):
        validate.integer(name, options[name], low)


def _comparisons(
    cells: dict[tuple, np.ndarray], attackers: Sequence[int], rules: Sequence[str], attacks: Sequence[str]
) -> Iterator[Comparison]:
    """A row for each cell, and the attack that leaves least for each rule; runs are too few for intervals together."""
    for f in attackers:
        for rule in rules:
            means = {attack: cells[f, rule, attack].mean() for attack in attacks}
            worst = min(means, key=means.__getitem__)
            for part, attack in (*(("accuracy", attack) for attack in attacks), ("worst case", worst)):
                conditions = {"part": part, "attackers": f, "rule": rule, "attack": attack}
                yield few(conditions, "test accuracy", cells[f, rule, attack])
