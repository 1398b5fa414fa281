"""The study of robust rules: a composition is a run of its own, and what must hold of a table does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import adversary, client, metrics, sampling, server
from fedjax_sim.algorithms import federated
from fedjax_sim.prng import init_key
from fedjax_sim.study.findings import comparisons_of
from fedjax_sim.study.robust_digits import ATTACKS, BATCH, RULES, RobustDigits
from fedjax_sim.study.robustness.question import robustness
from fedjax_sim.study.switched import drawn_clients

SMALL = {
    "rules": ("mean", "median", "Krum", "centred clipping"), "attacks": ("none", "sign flip", "inner product", "mimic"),
    "attackers": (1, 2), "num_clients": 9, "num_rounds": 30, "num_runs": 2,
}  # fmt: skip


@functools.cache
def findings():
    return robustness(**SMALL)


def alone(digits, key, rule, attack, *, attackers, num_rounds):
    """A composition by itself, with the public parts."""
    work = client.work(num_steps=3, batch_size=BATCH, weighting="uniform")
    trained = client.local_sgd(digits.loss_fn, optax.sgd(0.3), work)
    aggregator = RULES[rule](digits.size, attackers)
    if attack != "none":
        aggregator = adversary.corrupted(aggregator, ATTACKS[attack], drawn_clients(key, digits.size, attackers))
    step = server.optimizer(optax.sgd(1.0))
    algorithm = federated(sampling.full(digits.size), trained, aggregator, step, mesh=None)
    advance = jax.jit(lambda t, state: algorithm.step(jax.random.fold_in(key, t), state, digits.data.train)[0])
    state = algorithm.init(init_key(key), digits.model.init(init_key(key))[0], digits.data.train)
    for t in range(num_rounds):
        state = advance(t, state)
    return metrics.pooled(digits.loss_fn, algorithm.params(state), jax.tree.map(jnp.asarray, digits.data.test))


@pytest.mark.full
@pytest.mark.parametrize("rule, attack", [("median", "sign flip"), ("centred clipping", "inner product"),
                                          ("Krum", "mimic"), ("mean", "none")])  # fmt: skip
def test_a_cell_is_a_run(rule, attack):
    """Catches an index that is another rule's, attack's or number's, and a state that another rule overwrites."""
    (cell,) = comparisons_of(findings().comparisons, "accuracy", rule=rule, attack=attack, attackers=2)
    digits, keys = RobustDigits(9, 0.3, 0), jax.random.split(jax.random.key(0), 2)
    runs = [float(alone(digits, key, rule, attack, attackers=2, num_rounds=30)["accuracy"]) for key in keys]
    np.testing.assert_allclose(cell.measured, np.mean(runs), atol=0.003)  # a digit of 360, through other rounding
    np.testing.assert_allclose(cell.conditions["standard_deviation"], np.std(runs, ddof=1), atol=0.003)


@pytest.mark.full
def test_every_rule_and_attack_is_its_own():
    """As above, for every rule and every attack. Catches a branch that is another one in the middle of a list."""
    options = {"num_clients": 9, "num_rounds": 10, "num_runs": 2, "attackers": (2,)}
    found = robustness(**options).comparisons
    digits, keys = RobustDigits(9, 0.3, 0), jax.random.split(jax.random.key(0), 2)
    for i, attack in enumerate(ATTACKS):
        rule = list(RULES)[i % len(RULES)]
        (cell,) = comparisons_of(found, "accuracy", rule=rule, attack=attack, attackers=2)
        runs = [float(alone(digits, key, rule, attack, attackers=2, num_rounds=10)["accuracy"]) for key in keys]
        np.testing.assert_allclose(cell.measured, np.mean(runs), atol=0.003, err_msg=f"{rule}, {attack}")


def test_runs_differ_in_who_attacks():
    """Catches one set of attackers for all runs, whose deviations would leave out what depends on whose data are lost;
    a number of them that is not the stated one; and sets that are not nested."""
    ids, seen = jnp.arange(9, dtype=jnp.int32), set()
    for key in jax.random.split(jax.random.key(0), 8):
        few, more = (set(np.flatnonzero(drawn_clients(key, 9, f)(None, ids)).tolist()) for f in (2, 4))
        assert len(few) == 2 and len(more) == 4 and few < more
        seen.add(frozenset(few))
    assert len(seen) > 4


@pytest.mark.full
def test_the_table():
    """Catches a worst case that is not the least, and cells that all are one run."""
    found = findings()
    assert len({one.measured for one in comparisons_of(found.comparisons, "accuracy")}) > 16  # of 32
    for f in SMALL["attackers"]:
        for rule in SMALL["rules"]:
            row = [one.measured for one in comparisons_of(found.comparisons, "accuracy", rule=rule, attackers=f)]
            (worst,) = comparisons_of(found.comparisons, "worst case", rule=rule, attackers=f)
            assert len(row) == 4 and worst.measured == min(row)
    assert len(found.figure().axes) == 2
    assert all("worst" in [label.get_text() for label in axes.get_xticklabels()] for axes in found.figure().axes)
    assert len(found.claims) == 4 and "0 of 0" not in found.verdict()


@pytest.mark.parametrize(
    "options, told",
    [
        ({"rules": ("krum",)}, "rules: expected one of"),
        ({"attacks": ("none", "none")}, "attacks: expected each name once"),
        ({"attackers": (4,)}, "attackers: expected"),
        ({"attackers": (2, 1)}, "attackers: expected rising"),
        ({"num_runs": 1}, "num_runs: expected"),
        ({"alpha": float("nan")}, "alpha: expected"),
    ],
)
def test_wrong_options(options, told):
    """Catches a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=told):
        robustness(**SMALL | options)
