"""What a run says of its attackers before it starts: how many there are, and whether its rule is made for them."""

from __future__ import annotations

from typing import Any

__all__ = ["expected_attackers"]


def expected_attackers(experiment: Any, num_rounds: int) -> str:
    """One line on an experiment's attackers, against what its aggregator withstands; "" where none are known.

    Args:
      experiment: a `config.build.Experiment`, which puts attackers at the top of a hierarchy only.
      num_rounds: of the run.

    Guarantees: tests/command/test_attackers.py.
    """
    import jax
    import numpy as np

    from fedjax_sim.adversary import number_of_attackers
    from fedjax_sim.theory import chance_beyond

    star = experiment.algorithm.parts
    if star is None or star.aggregator.facts.attackers is None:
        return ""
    size = experiment.data.train.size
    rule = star.aggregator.facts
    number = number_of_attackers(rule.attackers, size)
    other = jax.random.key(1)
    anew = number_of_attackers(lambda key, ids: rule.attackers(key, ids) ^ rule.attackers(other, ids), size)
    about = "about " if anew else ""  # others in each round
    words = f"attackers: {about}{number:,} of {size:,} clients; "
    if rule.withstands is None:
        return words + "the aggregator states no number that it withstands"
    words += (
        f"of {star.sampler.num_slots:,} messages the rule withstands {int(rule.withstands(star.sampler.num_slots)):,}"
    )
    if anew:
        return words
    try:
        chance = chance_beyond(
            star.sampler.design, number, lambda n: np.asarray(rule.withstands(n)), num_rounds=num_rounds
        )
    except (TypeError, ValueError):  # of such cohorts only the run knows
        return words
    return words + f", and some of {num_rounds:,} rounds has more with a chance of {chance:.2g}"
