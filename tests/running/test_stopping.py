"""`run.stop_when`: where a run stops, and that it stops there again after a resume."""

import json

import jax
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import aggregation, algorithms, population, sampling, transform
from fedjax_sim.command.app import app
from fedjax_sim.running.loop import run
from fedjax_sim.running.stopping import StopWhen
from tests.refusals import refused

RUN = ["data.num_clients=40", "model.name=linear", "sampler.cohort_size=8", "algorithm.num_steps=2",
       "client_optimizer.learning_rate=0.3", "run.rounds=12", "run.evaluate_every=2"]  # fmt: skip
NAN = float("nan")


@pytest.mark.parametrize(
    ("rule", "values", "stops"),
    [
        ("m >= 0.9", [0.5, 0.95, 0.3], [False, True, False]),
        ("m <= 0.3", [NAN, 0.4, 0.3], [False, False, True]),
        ("m not lower for 2", [3.0, 2.0, 2.0, 2.0], [False, False, False, True]),
        ("m not higher for 1", [1.0, 2.0, 3.0, 2.5], [False, False, False, True]),
        ("m not lower for 2", [3.0, NAN, NAN, 1.0], [False, False, True, False]),
        ("m not lower for 3", [3.0, 4.0, 5.0], [False, False, False]),
        ("m not lower for 1", [NAN, NAN], [False, True]),
    ],
)
def test_rules(rule, values, stops):
    """Catches a comparison in the wrong direction, a wait that is one too long, and NaN as an improvement."""
    stop = StopWhen(rule)
    assert [stop(2 * i, None, {"round": 2 * i, "m": x}) for i, x in enumerate(values, 1)] == stops
    # A run that is resumed may see its last rounds once more.
    records = [{"round": 2 * i, "m": x} for i, x in enumerate(values, 1)]
    again = StopWhen(rule, [{"round": 0, "m": 0.0}, *records])
    last = records[-1]
    assert again(last["round"], None, last) == stops[-1]


@pytest.mark.parametrize("rule", ["m > 0.9", "m >= nan", "m not lower for 0", "m", "", 3])
def test_wrong_rules(rule):
    with pytest.raises(ValueError, match="stop_when: expected a rule such as"):
        StopWhen(rule)


def test_a_wrong_rule_is_refused_before_data_are_read():
    """Catches a typing error that is told after minutes of reading."""
    done = invoke("--set", "data.name=native", "--set", "data.directory=no_such_folder", "--set", "run.stop_when=m > 1")
    assert done.exit_code == 2 and done.output.startswith("run.stop_when: expected a rule such as")


def invoke(*words):
    return CliRunner().invoke(app, ["run", "-q", *words])


@pytest.mark.full  # by default the rules, and a callback that stops a run
def test_runs_stop_where_their_rule_holds(tmp_path):
    """Catches a rule that is not asked, and one that stops late."""
    settings = [word for setting in RUN for word in ("--set", setting)]
    whole, stopped = (tmp_path / name for name in ("whole", "stopped"))
    assert invoke(*settings, "--out", str(whole)).exit_code == 0
    losses = losses_of(whole)
    target = f"test_loss <= {losses[6]}"
    expected = next(round for round, loss in losses.items() if round and loss <= losses[6])
    done = invoke(*settings, "--set", f"run.stop_when={target}", "--out", str(stopped))
    assert done.exit_code == 0, done.output
    summary = json.loads((stopped / "summary.json").read_text())
    assert (summary["rounds"], summary["finished"], summary["stopped_when"]) == (expected, False, target)
    assert (stopped / "metrics.jsonl").read_text() == "".join(
        (whole / "metrics.jsonl").open().readlines()[: expected + 1]
    )
    assert target in (stopped / "report.html").read_text().replace("&lt;", "<").replace("&gt;", ">")
    wrong = invoke(*settings, "--set", "run.stop_when=test_los <= 1", "--out", str(tmp_path / "wrong"))
    assert wrong.exit_code == 2 and "Did you mean 'test_loss'" in wrong.output


def losses_of(folder):
    """The test losses of a run by their rounds."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["round"]: record["test_loss"] for record in records if "test_loss" in record}


@pytest.mark.full
def test_a_resume_does_not_wait_anew(tmp_path):
    """Four rounds first, and the others with the rule. Catches evaluations of the first session that do not count."""
    settings = [word.replace("run.rounds=12", "run.rounds=4") for setting in RUN for word in ("--set", setting)]
    assert invoke(*settings, "--out", str(tmp_path / "run")).exit_code == 0
    rule = "test_loss not higher for 2"
    more = ["--resume", "--out", str(tmp_path / "run"), "--set", "run.rounds=12", "--set", f"run.stop_when={rule}"]
    assert invoke(*more).exit_code == 0
    waits, losses = StopWhen(rule), losses_of(tmp_path / "run")
    stops = (
        round for round, loss in losses.items() if round and waits(round, None, {"round": round, "test_loss": loss})
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == next(stops, 12) == max(losses)


NOISE = ["transform.gaussian_mechanism.clip_norm=1.0", "transform.gaussian_mechanism.noise_multiplier=1.0",
         "aggregator.name=fixed_mean", "aggregator.denominator=8.0", "algorithm.weighting=uniform"]  # fmt: skip


def test_a_private_run_has_no_rule(tmp_path):
    """Catches a number of rounds that depends on data which no epsilon covers."""
    arguments = [word for setting in [*RUN, *NOISE] for word in ("--set", setting)]
    done = invoke(*arguments, "--set", "run.stop_when=test_loss <= 0.1", "--out", str(tmp_path / "run"))
    assert done.exit_code == 2 and "run.stop_when: expected none in a run with noise" in done.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_no_rule_beside_noise_in_python():
    """Catches a rule that only the command line refuses."""
    data = population.quadratics(num_clients=4, dimension=2)
    algorithm = algorithms.fedavg(
        population.quadratic_loss,
        sampling.full(4),
        optax.sgd(0.1),
        num_steps=1,
        aggregator=aggregation.fixed_mean(4),
        transform=transform.gaussian_mechanism(clip_norm=1.0, noise_multiplier=1.0),
    )
    with refused("callbacks", rule="StopWhen"):
        run(
            jax.random.key(0), algorithm, {"w": np.zeros(2, np.float32)}, data.train, 2,
            callbacks=[StopWhen("test_loss <= 1")],
        )  # fmt: skip
