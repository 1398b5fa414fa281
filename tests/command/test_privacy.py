"""`fedjax-sim account`, `calibrate`, `audit`: what a person reads, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from fedjax_sim import privacy
from fedjax_sim.command import app

PLAN = ["algorithm.num_steps=1", "sampler.cohort_size=10"]
SMALL = ["data.name=mean_estimation", "data.num_clients=200", "model.name=linear", *PLAN]
SMALL += ["aggregator.name=fixed_mean", "aggregator.denominator=10"]
OF_RECORDS = ["algorithm.name=record_private_fedavg", "algorithm.clip_norm=1.0", "algorithm.noise_multiplier=2.0"]
OF_RECORDS += ["downlink.quantize.bits=8", "client_optimizer.learning_rate=0.1"]
RECORDS = ["data.num_clients=200", "data.held_out_clients=3", "model.hidden=[4]", *PLAN, *OF_RECORDS]
RECORDS += ["algorithm.batch_size=15"]
ONE_EACH = [*SMALL[:-2], *OF_RECORDS, "algorithm.batch_size=1"]
# An algorithm that does not state its parts.
GOSSIP = [*SMALL[:-4], "algorithm.num_steps=1", "algorithm.name=dpsgd", "algorithm.mixing.name=metropolis"]
GOSSIP += ["algorithm.mixing.graph.name=ring"]
NOISY = [*SMALL, "transform.gaussian_mechanism.clip_norm=1.0", "transform.gaussian_mechanism.noise_multiplier=2.0"]


def call(*words, settings=()):
    settings = [word for text in settings for word in ("--set", text)]
    return CliRunner().invoke(app.app, [*words, *settings])


def test_account_and_calibrate_agree():
    """Catches flags that are dropped on their way to the accountant: the calibrated noise spends the budget."""
    sizes = ["-N", "10000", "-m", "100", "-T", "50", "--delta", "1e-5"]
    found = json.loads(call("calibrate", "-e", "2", *sizes, "--json").stdout)
    z = str(found["noise_multiplier"])
    spent = json.loads(call("account", "-z", z, *sizes, "--json").stdout)["spent"]
    assert 1.99 < spent["epsilon"] <= 2.0 and spent["rounds"] == 50 and spent["delta"] == 1e-5
    other = json.loads(call("account", "-z", z, *sizes, "--scheme", "uniform", "--json").stdout)["spent"]
    assert other["epsilon"] > spent["epsilon"] and other["adjacency"] == "replace_one"
    text = call("calibrate", "-e", "2", *sizes, "--scheme", "uniform", "--table").stdout
    assert "With a Poisson sample" in text and "local" in text and "distributed" in text


def test_a_config_is_accounted_for():
    """Catches an epsilon of other rounds or another sampler than the config's."""
    found = json.loads(call("account", "--json", settings=[*NOISY, "run.rounds=7", "run.delta=1e-4"]).stdout)
    design = {"scheme": "uniform", "population_size": 200, "cohort_size": 10}
    expected = privacy.account(privacy.written_down(noise_multiplier=2.0, **design), 7, 1e-4)
    assert found["spent"]["epsilon"] == expected.epsilon and found["spent"]["rounds"] == 7


@pytest.mark.full  # by default tests/oracles/test_record_private_fedavg.py
def test_records_are_accounted_for():
    """Catches a config whose records are hidden, and that is told a client's epsilon, or none."""
    settings = [*RECORDS, "run.rounds=7", "run.delta=1e-4"]
    found = json.loads(call("account", "--json", settings=settings).stdout)["spent"]
    everybody = {"scheme": "full", "population_size": 200, "cohort_size": 200, "num_slots": 200, "place": "local"}
    details = {"sampling": "truncated_poisson", "rate": 0.25, "steps": 1, "num_examples": 60, "max_batch_size": 37}
    by_hand = privacy.Mechanism(noise_multiplier=2.0, unit="record", details=details, **everybody)
    assert found["unit"] == "record" and found["epsilon"] == privacy.account(by_hand, 7, 1e-4).as_dict()["epsilon"]


@pytest.mark.full
def test_records_are_calibrated_for():
    """Catches a calibration that accounts for records in another way than `account` does."""
    settings = [*RECORDS, "run.rounds=7", "run.delta=1e-4"]
    found = json.loads(call("account", "--json", settings=settings).stdout)["spent"]
    again = json.loads(call("calibrate", "-e", str(found["epsilon"]), "--json", settings=settings).stdout)
    assert again["noise_multiplier"] == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    "words, settings, told",
    [
        (["account", "-N", "100", "-m", "10"], [], "--noise-multiplier: expected a number, got nothing"),
        (["account"], [], "--population, --cohort: expected both"),
        (["account", "-N", "10", "-m", "20", "-z", "1"], [], "cohort_size: expected"),
        (["account", "-N", "10"], NOISY, "--population: expected none beside a config, got 10"),
        (["account", "-z", "9"], NOISY, "--noise-multiplier: expected none beside a config, got 9.0"),
        (["calibrate", "-e", "1", "--scheme", "full"], NOISY, "--scheme: expected none beside a config, got full"),
        (["audit", "-z", "9"], NOISY, "--noise-multiplier: expected none beside a config, got 9.0"),
        (["account"], SMALL, "expected a part with noise"),
        (["account"], GOSSIP, "expected a part with noise"),
        (["calibrate", "-e", "-1", "-N", "100", "-m", "10"], [], "epsilon: expected"),
        (["calibrate", "-N", "100", "-m", "10", "--scheme", "cyclic"], [], "sampler: expected independent rounds"),
        (["calibrate", "--table"], ONE_EACH, "--table: expected none beside a config that hides records"),
        (["audit"], ONE_EACH, "expected client-level noise"),
        (["audit", "--rate", "2"], [], "sampling_rate: expected"),
        (["account"], ["transform.nothing.a=1"], "transform.nothing: expected one of"),
    ],
)
def test_wrong_input_is_told(words, settings, told):
    """Catches tracebacks, and numbers for what means nothing."""
    result = call(*words, settings=settings)
    assert result.exit_code == 2 and told in result.output, result.output


NOISES = {
    "central": (
        [setting.replace("=10", "=200") for setting in NOISY],  # all clients: the accountant is quick
        "transform.gaussian_mechanism.noise_multiplier",
    ),
    "epsilon of a message": (
        [*SMALL, "transform.local_laplace.clip_norm=1.0", "transform.local_laplace.epsilon=1.0"],
        "transform.local_laplace.epsilon",
    ),
    "records": (RECORDS, "algorithm.noise_multiplier"),
    "integers": (
        [
            *SMALL[:-2],
            "aggregator.name=modular_sum",
            "aggregator.denominator=10",
            "transform.discrete_gaussian_mechanism.clip_norm=1.0",
            "transform.discrete_gaussian_mechanism.noise_multiplier=2.0",
            "transform.discrete_gaussian_mechanism.cohort_size=10",
        ],
        "transform.discrete_gaussian_mechanism.noise_multiplier",
    ),
    "adaptive": (
        [
            *SMALL,
            "transform.adaptive_clip.noise_multiplier=2.0",
            "transform.adaptive_clip.initial_clip_norm=1.0",
            "transform.adaptive_clip.quantile_noise=50.0",
        ],
        "transform.adaptive_clip.noise_multiplier",
    ),
}


@pytest.mark.default_rows("central")
@pytest.mark.parametrize("noise", NOISES)
def test_the_line_for_a_config(noise):
    """Catches a line whose config spends more than the budget, less than it could, or has another option changed."""
    settings, path = NOISES[noise]
    settings = [*settings, "run.rounds=7", "run.delta=1e-5"]
    budget = 20.0 if "message" in noise else 3.0
    found = json.loads(call("calibrate", "--epsilon", str(budget), "--json", settings=settings).stdout)["settings"]
    assert list(found) == [path]
    value = found[path]

    def spent(value):
        changed = [setting for setting in settings if setting.partition("=")[0] != path] + [f"{path}={value!r}"]
        return json.loads(call("account", "--json", settings=changed).stdout)["spent"]["epsilon"]

    assert spent(value) <= budget
    assert spent(value * (1.01 if "message" in noise else 0.99)) > budget


def test_audit_finds_the_noise(tmp_path):
    """Catches an audit that does not run from the command line, or loses its figure. Its laws: tests/privacy."""
    picture = tmp_path / "scores.png"
    result = call("audit", "--releases", "100000", "--canaries", "0", "--figure", str(picture), "--json")
    found = json.loads(result.stdout)
    assert found["verdict"] == "confirmed" and picture.stat().st_size > 1000
    lower, upper = found["lower"], found["upper"]
    assert lower <= 4.3772 <= upper


def test_a_refused_audit_leaves_no_figure(tmp_path):
    """Catches an empty file where a figure was asked for."""
    result = call("audit", "--releases", "10", "--figure", str(tmp_path / "scores.png"))
    assert result.exit_code == 2 and "num_releases" in result.output and not any(tmp_path.iterdir())
