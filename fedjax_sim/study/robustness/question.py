"""This study measures the test accuracy of robust aggregators under attacks, and the worst case of each aggregator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from fedjax_sim import validate
from fedjax_sim.study.findings import Comparison, Findings, few, rows_of
from fedjax_sim.study.robust_digits import ATTACKS, RULES, RobustDigits
from fedjax_sim.study.robustness.claims import robustness_claims
from fedjax_sim.study.robustness.figure import robustness_figure
from fedjax_sim.validate import Positive

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
    """Which rule withstands which attack? Measures test accuracy for each rule, attack and number of attackers.

    Clients of the digits, with unlike labels, all take part in every round and train a linear model. Each rule is set
    for the true number of attackers. The worst case of a rule is the attack with the smallest mean accuracy. It is a
    minimum over the attacks of this list, and other attacks may be worse.

    Args:
      rules: names of aggregators; None takes all of `study.robust_digits.RULES`.
      attacks: names; None takes all of `study.robust_digits.ATTACKS`. Under "none" attackers send honest messages.
      attackers: numbers of attackers f, rising. Krum needs 2 f + 3 <= m.
      num_clients: m.
      alpha: the parameter of the clients' Dirichlet label shares; small values give unlike clients.
      num_steps: local steps in a round, with minibatches of 20 from 40 examples.
      learning_rate: the learning rate of local steps.
      num_rounds: T.
      num_runs: runs of each combination on the same clients. Each run has its own model, minibatches and attackers.
      seed: decides everything.

    Returns: `Findings`: test accuracies, with their standard deviations over runs.

    Guarantees: each combination has the accuracy of a separate run, up to one of 360 test examples, since sums are
    rounded differently (tests/study/test_robustness.py::test_a_cell_is_a_run, ::test_every_rule_and_attack_is_its_own).

    References: Karimireddy, He and Jaggi 2022, section 6; Shejwalkar and Houmansadr 2021; the benchmark of ByzFL
    (Gonzalez et al. 2025).
    """
    rules, attacks = (tuple(names) if x is None else x for x, names in ((rules, RULES), (attacks, ATTACKS)))
    options = dict(locals())  # before any other local
    _check(options)
    # Rules are set for f, so each pair of a name and f is a rule of its own, with every attack.
    settings = [(name, f) for f in attackers for name in rules]
    points = [(i, j, f) for i, (_, f) in enumerate(settings) for j in range(len(attacks))]
    training_options = {name: options[name] for name in ("num_steps", "learning_rate", "num_rounds", "num_runs")}
    accuracies = RobustDigits(num_clients, alpha, seed).accuracies(
        jax.random.key(seed), [RULES[name](num_clients, f) for name, f in settings],
        [ATTACKS[name] for name in attacks], points, **training_options,
    )  # fmt: skip
    # The accuracies [runs] by (f, rule, attack).
    cells = {(*settings[i][::-1], attacks[j]): row for (i, j, _), row in zip(points, accuracies, strict=True)}
    comparisons = list(_comparisons(cells, attackers, rules, attacks))
    options = {name: list(value) if isinstance(value, Sequence) else value for name, value in options.items()}
    rows = rows_of(comparisons)
    return Findings(
        name="robustness",
        question=QUESTION,
        comparisons=comparisons,
        claims=list(robustness_claims(rows, options)),
        figure=partial(robustness_figure, rows, options),
        options=options,
    )


def _check(options: dict[str, Any]) -> None:
    """Raises an error that names the first option that is out of range.

    Args:
      options: the arguments of `robustness`, by name.
    """
    for name, table in (("rules", RULES), ("attacks", ATTACKS)):
        validate.sequence(name, options[name])
        for value in options[name]:
            validate.one_of(name, value, table)
        if len(set(options[name])) < len(options[name]):
            validate.fail(name, "each name once", list(options[name]))
    validate.integer("num_clients", options["num_clients"], 5, 200)
    validate.sequence("attackers", options["attackers"])
    for value in options["attackers"]:
        # The condition of Krum holds for all rules, so that the table has no gaps.
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
    """Yields the accuracy of each cell, and for each rule and f again the attack with the smallest mean accuracy.

    Runs are too few for joint intervals, so standard deviations are reported.
    """
    for f in attackers:
        for rule in rules:
            means = {attack: cells[f, rule, attack].mean() for attack in attacks}
            worst = min(means, key=means.__getitem__)
            for part, attack in (*(("accuracy", attack) for attack in attacks), ("worst case", worst)):
                conditions = {"part": part, "attackers": f, "rule": rule, "attack": attack}
                yield few(conditions, "test accuracy", cells[f, rule, attack])
