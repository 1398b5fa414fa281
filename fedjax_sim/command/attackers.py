"""Describes the attackers of a run before it starts: how many there are, and whether its rule is made for so many."""

from __future__ import annotations

from typing import Any


def expected_attackers(experiment: Any, num_rounds: int) -> str:
    """Returns a line that compares an experiment's attackers with the number that its aggregator withstands.

    Args:
      experiment: a `config.build.Experiment`; in a hierarchy, a config puts attackers at the top only.
      num_rounds: the number of rounds of the run.

    Returns: the line; "" if the aggregator states no attackers.

    Guarantees: the chance is `theory.chance_of_more_attackers` of the cohort (tests/command/test_attackers.py).
    """
    import jax
    import numpy as np

    from fedjax_sim.adversary import number_of_attackers
    from fedjax_sim.theory import chance_beyond

    star = experiment.algorithm.parts
    if star is None or star.aggregator.facts.attackers is None:
        return ""
    size = experiment.data.train.size
    facts = star.aggregator.facts
    number = number_of_attackers(facts.attackers, size)
    # Attackers may be drawn anew in each round: then two keys give different clients. The number is then an estimate.
    other_key = jax.random.key(1)
    num_changing = number_of_attackers(
        lambda key, ids: facts.attackers(key, ids) ^ facts.attackers(other_key, ids), size
    )
    about = "about " if num_changing else ""
    words = f"attackers: {about}{number:,} of {size:,} clients; "
    if facts.withstands is None:
        return words + "the aggregator states no number that it withstands"
    num_slots = star.sampler.num_slots
    words += f"of {num_slots:,} messages the rule withstands {int(facts.withstands(num_slots)):,}"
    if num_changing:
        return words
    try:
        chance = chance_beyond(
            star.sampler.design, number, lambda n: np.asarray(facts.withstands(n)), num_rounds=num_rounds
        )
    except (TypeError, ValueError):
        # The law of some cohorts is not known before the run, such as of cohorts that depend on the losses.
        return words
    return words + f"; the chance that any of {num_rounds:,} rounds has more is {chance:.2g}"
