"""What a run says of its attackers before it starts."""

from __future__ import annotations

from fedjax_sim import theory
from fedjax_sim.command.attackers import expected_attackers
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load

SMALL = "data.num_clients=50 model.name=linear run.rounds=10 sampler.cohort_size=20".split()
WHO = ["aggregator.corrupted.attack={name='sign_flip'}", "aggregator.corrupted.who={name='clients',ids=[0,1,2,3,4,5]}"]


def line(*settings):
    return expected_attackers(build(load(None, [*SMALL, *settings])), 10)


def test_attackers_are_told_against_the_rule():
    """Catches a rule that is measured by one cohort, by its f alone, or by attackers of another number."""
    assert line() == ""
    mean = line("aggregator.name=mean", *WHO)
    assert mean == "attackers: 6 of 50 clients; the aggregator states no number that it withstands"
    chance = theory.chance_of_more_attackers(50, 6, 20, 3, num_rounds=10)
    assert 0.1 < chance < 0.99
    told = line("aggregator.name=trimmed_mean", "aggregator.num_byzantine=3", *WHO)
    rounds = f"; the chance that any of 10 rounds has more is {chance:.2g}"
    assert told == f"attackers: 6 of 50 clients; of 20 messages the rule withstands 3{rounds}"
    some = "aggregator.corrupted.who={name='share_of_clients',share=0.3,each_round=true}"
    drawn = line("aggregator.name=median", WHO[0], some)
    assert drawn.startswith("attackers: about ") and drawn.endswith(
        " of 50 clients; of 20 messages the rule withstands 9"
    )
    unknown = line("aggregator.name=median", "sampler.name=cyclic", *WHO)
    assert unknown == "attackers: 6 of 50 clients; of 20 messages the rule withstands 9"
