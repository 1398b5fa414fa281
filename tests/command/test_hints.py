"""Hints: what people type that no command or config has, and what the answer says to write."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedjax_sim import InvalidArgument, InvalidType
from fedjax_sim.command import app
from fedjax_sim.config.document import ConfigError, load


def output(*arguments):
    """What a refused command prints, in one line."""
    result = CliRunner().invoke(app.app, list(arguments))
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("run --lr 0.1", "No such option: --lr. Write --set client_optimizer.learning_rate=0.1."),
        ("run --rounds 5", "No such option: --rounds. Write --set run.rounds=5."),
        ("plan --rounds=5", "No such option: --rounds. Write --set run.rounds=5."),
        ("run --epochs", "No such option: --epochs. Write --set algorithm.num_epochs=...."),
        ("run --seed 3", "No such option: --seed. Write --set seed=3."),
        ("run --dataset digits", "No such option: --dataset. Write --set data.name=digits."),
        ("run --gpu", "No such option: --gpu. A run takes the devices that JAX sees: JAX_PLATFORMS=cpu, cuda or tpu"),
        ("run --config x.toml", "No such option: --config. Write the file, or the example's name, without it."),
        ("run --output x", "No such option: --output (Possible options: --out)"),
        ("run --out", "Option '--out' requires an argument."),
    ],
)
def test_options_that_people_type(words, hint):
    """Catches an answer that names another option (`--rounds`: did you mean `--out`?), or none."""
    assert hint in output(*words.split())


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("samplers", "sampler"),
        ("aggregators", "aggregator"),
        ("datasets", "data"),
        ("optimizers", "client_optimizer"),
        ("fedbuf", "fedbuff"),
    ],
)
def test_names_of_tables_and_parts(word, name):
    """Catches a plural, or a typing error, that is answered with a list alone."""
    assert output("list", word).endswith(f"got {word!r}. Did you mean {name!r}?")


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("lr=0.1", "lr: .* Write client_optimizer.learning_rate."),
        ("client_optimizer.lr=0.1", "client_optimizer.lr: .* Did you mean 'learning_rate'?"),
        ("algorithm.learning_rate=0.1", "algorithm.learning_rate: .* Write client_optimizer.learning_rate."),
        ("rounds=3", "rounds: .* Write run.rounds."),
        ("run.epochs=3", "run.epochs: .* Write algorithm.num_epochs."),
        ("run.seed=3", "run.seed: .* Write seed."),
        ("run.gpu=true", "run.gpu: .* A run takes the devices that JAX sees"),
        (
            "aggregator.denominator=3.0",
            "aggregator.denominator: .* It is an option of fixed_mean, .*: set aggreg",
        ),
        ("sampler.num_reports=3", r"sampler.num_reports: .* \[sampler.with_over_invitation\], \[sampler.with_over_sel"),
        ("algorithm.num_stps=3", "algorithm.num_stps: .* Did you mean 'num_steps'?"),
    ],
)
def test_keys_that_people_write(setting, hint):
    """Catches an option of another table, or another library's word, that is answered with a list alone."""
    with pytest.raises(ConfigError, match=f"^{hint}".replace("?", r"\?")):
        load(None, [setting])


@pytest.mark.parametrize(
    ("algorithm", "setting", "hint"),
    [
        ("dpsgd", "algorithm.weighting=examples", "It is an option of [aggregator], and dpsgd takes no such table."),
        (
            "fedasync",
            "algorithm.weighting=examples",
            "It is an option of [aggregator], and fedasync takes no such table.",
        ),
        ("dpsgd", "algorithm.mixing.cohort_size=5", "It is an option of [sampler], and dpsgd takes no such table."),
        ("scaffold", "sampler.weighting=examples", "Write algorithm.weighting."),
        ("scaffold", "lr=0.1", "Write client_optimizer.learning_rate."),
        (
            "fedsgd",
            "algorithm.num_steps=5",
            "It is an option of others in [algorithm]. Leave it out: --unset algorithm.num_steps.",
        ),
        ("fedavg", "sampler.weighting=uniform", "Write algorithm.weighting or aggregator.weighting."),
        ("no_such", "lr=0.1", "Write client_optimizer.learning_rate."),
    ],
)
def test_hints_are_of_the_algorithm(algorithm, setting, hint):
    """Catches a hint to write what is then refused: a table that the config's algorithm does not take."""
    mixing = ['algorithm.mixing={name="metropolis",graph={name="ring"}}'] if algorithm == "dpsgd" else []
    with pytest.raises(ConfigError) as caught:
        load(None, [f"algorithm.name={algorithm}", *mixing, setting])
    (told,) = [words for words in str(caught.value).splitlines() if "unknown key" in words]
    assert told.endswith(f". {hint}")


def test_devices_that_nobody_takes():
    """Catches a deadline without a clock beside [devices], whose user is not told of the clock."""
    with pytest.raises(ConfigError, match=r"devices: .*with_clock\], .*fedbuff"):
        load(None, ["devices.name=cross_silo", "sampler.with_deadline.seconds=3.0"])


@pytest.mark.parametrize("command", ["run", "plan", "account"])
@pytest.mark.parametrize("kind", [InvalidArgument, InvalidType])
def test_a_named_error_has_no_traceback(command, kind, monkeypatch):
    """Catches a command that answers a wrong combination of parts with Python's traceback."""

    def build(config):
        raise kind("transform: expected one without a memory, got 'one that remembers'.")

    monkeypatch.setattr("fedjax_sim.config.build.build", build)
    words = output(command, "--set", "data.num_clients=100")
    assert words == "transform: expected one without a memory, got 'one that remembers'."


@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_bug_has_a_traceback(kind, monkeypatch):
    """Catches an error of the package itself, in words like those of a check, that is told as the user's."""

    def build(config):
        raise kind("transform: expected one without a memory, got 'one that remembers'.")

    monkeypatch.setattr("fedjax_sim.config.build.build", build)
    result = CliRunner().invoke(app.app, ["run", "--set", "data.num_clients=100"])
    assert type(result.exception) is kind
