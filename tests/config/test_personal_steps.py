"""`run.personal_steps`: who is fine-tuned before it is judged, and where that is refused."""

import json

import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app

SMALL = ["data.num_clients=20", "data.alpha=0.1", "model.name=linear", "sampler.cohort_size=5", "algorithm.num_steps=2",
         "run.rounds=2", "run.evaluate_every=2"]  # fmt: skip
JUDGED = [*SMALL, "data.with_local_test={}"]


def invoke(*settings):
    return CliRunner().invoke(app, ["run", *(word for setting in settings for word in ("--set", setting))])


@pytest.mark.full
def test_models_are_fine_tuned_and_shown(tmp_path, monkeypatch):
    """Catches steps that are not taken, that reach the rounds, and results that only the log has."""
    monkeypatch.chdir(tmp_path)
    summaries = []
    for i, steps in enumerate(("none", "20")):
        out = tmp_path / str(i)
        done = CliRunner().invoke(app, ["run", "--out", str(out), *(w for s in [*JUDGED, f"run.personal_steps={steps}"]
                                                                     for w in ("--set", s))])  # fmt: skip
        assert done.exit_code == 0, done.output
        assert ("own models' accuracy" in done.output) == (steps != "none")
        summaries.append(json.loads((out / "summary.json").read_text()))
    plain, tuned = summaries
    assert "personal_accuracy" not in plain and tuned["test_loss"] == plain["test_loss"]
    assert tuned["personal_loss"] < tuned["local_test_loss"] == plain["local_test_loss"]
    assert "clients&#x27; own models" in (tmp_path / "1" / "report.html").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (SMALL, "Clients need rows to be judged by: [data.with_local_test]"),
        ([*JUDGED, "algorithm.name=per_fedavg"], "per_fedavg has its own step before a model is judged"),
    ],
)
def test_where_nothing_can_be_fine_tuned(settings, words):
    done = invoke(*settings, "run.personal_steps=3")
    assert done.exit_code == 2 and "run.personal_steps: expected none here, got 3" in done.output
    assert words in done.output
