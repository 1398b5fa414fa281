"""The privacy ledger of a run: epsilon by the accountant, crashes counted, and no number where none holds."""

import json

import jax
import numpy as np
import pytest

from fedjax_sim import privacy, run, tree
from fedjax_sim.checkpoint import CheckpointError
from fedjax_sim.config import load
from fedjax_sim.experiment import build
from fedjax_sim.spending import default_delta, letter_dimension

SMALL = ["data.num_clients=60", "data.held_out_clients=3", "model.hidden=[4]", "algorithm.num_steps=1"]
SMALL += ["sampler.name=poisson", "sampler.rate=0.1", "algorithm.weighting=uniform"]
SMALL += ["aggregator.name=fixed_mean", "aggregator.denominator=6", "transform.gaussian_mechanism.clip_norm=1.0"]
SMALL += ["transform.gaussian_mechanism.noise_multiplier=1.0"]


@pytest.fixture(scope="module")
def job():
    return build(load(None, SMALL))


def train(job, rounds, seed=0, **options):
    return run(jax.random.key(seed), job.algorithm, job.params, job.data.train, rounds, **options)[1]


def test_epsilon_is_the_accountants(job, tmp_path):
    """Catches an epsilon of another number of rounds, of another delta, or of rounds that were not evaluated."""
    history = train(job, 6, evaluate_every=3, directory=tmp_path, delta=1e-4)
    mechanism = privacy.mechanism_of(job.algorithm)
    expected = [privacy.account(mechanism, rounds, 1e-4).epsilon for rounds in (3, 6)]
    rounds, found = history.column("epsilon")
    assert rounds.tolist() == [3, 6] and found.tolist() == expected
    said = history.summary["privacy"]
    assert said["epsilon"] == expected[1] and said["rounds"] == 6 and said["statement"] in said["explanation"]
    ledger = privacy.Ledger.from_state(json.loads((tmp_path / "privacy.json").read_text())["ledger"])
    assert ledger.rounds == 6
    assert train(job, 1).summary["privacy"]["delta"] == default_delta(60) < 1 / 60


def test_nobody_has_no_delta():
    """Catches 0 ** -1.1 and a complex delta, as a user of --population 0 or -5 met them."""
    assert default_delta(1) == 0.1
    for number in (0, -5):
        with pytest.raises(ValueError, match="clients: expected at least one"):
            default_delta(number)


def test_a_crash_is_counted(job, tmp_path):
    """Killed in round 4 to 6, resumed from round 3 and stopped there: the clients' data went into six rounds."""
    train(job, 3, evaluate_every=3, directory=tmp_path)
    ledger = tmp_path / "privacy.json"
    before = json.loads(ledger.read_text())
    before["ledger"]["segments"][0]["stop"] = 6  # entered before they ran
    ledger.write_text(json.dumps(before))
    went_on = train(job, 4, evaluate_every=1, directory=tmp_path, resume=True)
    assert went_on.summary["privacy"]["rounds"] == 6
    assert went_on.records[-1]["epsilon"] < went_on.summary["privacy"]["epsilon"]
    ledger.unlink()  # the checkpoint holds it too
    assert train(job, 5, directory=tmp_path, resume=True).summary["privacy"]["rounds"] == 6
    for damaged in ("{", '{"ledger": {}}', '{"ledger": null}', '{"ledger": []}'):
        ledger.write_text(damaged)
        with pytest.raises(CheckpointError, match="privacy ledger"):
            train(job, 6, directory=tmp_path, resume=True)


def test_no_number_where_none_holds():
    """Catches an epsilon for a sampler that no accountant knows; the run itself goes on, and says why."""
    unknown = [text for text in SMALL if not text.startswith("sampler")]
    made = build(load(None, [*unknown, "sampler.name=with_replacement", "sampler.cohort_size=6"]))
    history = train(made, 2)
    assert "without replacement" in history.summary["privacy"]["refused"]
    assert not any("epsilon" in record for record in history.records)


def test_runs_without_noise_say_nothing(tmp_path):
    """Catches a ledger, or an infinite epsilon, for everybody."""
    plain = build(load(None, [text for text in SMALL if "gaussian" not in text]))
    history = train(plain, 2, directory=tmp_path)
    assert "privacy" not in history.summary and not (tmp_path / "privacy.json").exists()
    assert all(np.isfinite(record["update_norm"]) for record in history.records)


def test_a_pair_is_twice_as_long(job):
    """Catches integer noise accounted for the model's numbers where a letter holds more: rounding depends on them."""
    few = [text for text in SMALL if not text.startswith(("transform", "aggregator", "sampler"))]
    pair = build(load(None, [*few, "sampler.cohort_size=6", "algorithm.name=scaffold"]))
    sizes = [letter_dimension(made.algorithm, made.params, made.data.train) for made in (job, pair)]
    assert 2 * sizes[0] == sizes[1] == 2 * tree.num_values(job.params)


def test_rounds_without_a_ledger_have_no_epsilon(job, tmp_path):
    """Catches a history that a resume makes up: rounds of a run without noise, counted as if they had had it."""
    plain = build(load(None, [text for text in SMALL if "gaussian" not in text]))
    train(plain, 2, directory=tmp_path)
    history = train(job, 3, directory=tmp_path, resume=True)
    assert "ran without a ledger" in history.summary["privacy"]["refused"] and "epsilon" not in history.records[-1]


def test_rounds_whose_noise_is_gone_are_told(job, tmp_path):
    """Catches a private run that goes on without noise, and whose summary then says nothing of privacy."""
    train(job, 2, directory=tmp_path)
    plain = build(load(None, [text for text in SMALL if "gaussian" not in text]))
    history = train(plain, 3, directory=tmp_path, resume=True)
    assert "these have none" in history.summary["privacy"]["refused"]
