"""The law of refusals: what one command refuses of a whole config, every command refuses, in the same words."""

import sys

import pytest
from typer.testing import CliRunner

from fedjax_sim.command import app
from fedjax_sim.config import registry
from fedjax_sim.running import loggers

BASE = ["data.num_clients=60", "data.held_out_clients=0", "model.name=linear", "sampler.cohort_size=10"]
BASE += ["algorithm.num_steps=1", "aggregator={name='fixed_mean', denominator=10.0}", "run.rounds=1"]
NOISE = ["transform.gaussian_mechanism.clip_norm=1.0", "transform.gaussian_mechanism.noise_multiplier=2.0"]
COMMANDS = {
    "run": [],
    "plan": [],
    "account": [],
    "calibrate --epsilon 2": [],
    "audit": [],
    "sweep": ["sweep.seeds=1", "sweep.grid.client_optimizer.learning_rate=[0.1]"],
}
# What is wrong with a config -> (its settings, what is said). Most were refused by `run` alone, after the others had
# answered.
BAD = {
    "a rule beside noise": (["run.stop_when=test_loss <= 1"], "run.stop_when: expected none in a run with noise"),
    "a rule in another form": (["run.stop_when=test_loss < 1"], "run.stop_when: expected a rule such as"),
    "a logger that is not installed": (['run.log=["wandb"]'], "run.log: expected "),
    "a start that is not finite": (["model.name=diverged"], "model: params['bias']: expected finite numbers"),
    "a module that is not admitted": (['run.modules=["mine"]'], "add --with mine."),
    "inputs learnt from all rows beside noise": (
        ["data={name='breast_cancer', num_clients=60}"],
        "data.standardise: expected constants beside noise",
    ),
    "an unknown option": (["sampler.size=3"], "sampler.size: expected one of"),
    "a part that refuses its value": (["sampler.cohort_size=61"], "sampler.cohort_size: expected"),
    "two parts that do not fit": (["algorithm.name=mime"], "aggregator"),
    "too many devices": (["run.devices=4096"], "run.devices: expected"),
}
# A sweep takes all devices, and refuses every rule and every logger.
TAKES_ITS_OWN = {"too many devices": ("sweep",)}
SWEEPS_WORDS = {"a rule beside noise": "run.stop_when: expected none in a sweep"}
SWEEPS_WORDS |= {"a logger that is not installed": "run.log: expected none in a sweep"}


MODULE = """
from collections.abc import Sequence
from typing import Annotated

import jax

from fedjax_sim import aggregation, models
from fedjax_sim.types import Aggregator
from fedjax_sim.validate import FromData, NumOutputs


def diverged(
    *, input_shape: Annotated[Sequence[int], FromData("input_shape")], num_outputs: NumOutputs
) -> models.Model:
    model = models.linear(input_shape=input_shape, num_outputs=num_outputs)
    return model._replace(init=lambda key: (jax.tree.map(lambda x: x + float("nan"), model.init(key)[0]), ()))


def own_sum() -> Aggregator:
    return aggregation.fixed_mean(10)
"""


def invoke(command, settings, folder):
    stated = {setting.partition("=")[0] for setting in settings}
    base = [setting for setting in [*BASE, *NOISE] if not any(setting.startswith((f"{x}=", f"{x}.")) for x in stated)]
    words = [word for setting in [*base, *settings, *COMMANDS[command]] for word in ("--set", setting)]
    if command in ("run", "sweep"):
        words += ["--out", str(folder / "out"), "--quiet"]
    if any("diverged" in setting or "own_sum" in setting for setting in settings):
        words += ["--with", f"own_{folder.name}"]
    return CliRunner().invoke(app.app, [*command.split(), *words])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a module of a user's own, on a machine without the package of a logger."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(loggers.PACKAGES, "wandb", "no_such_package")
    (tmp_path / f"own_{tmp_path.name}.py").write_text(MODULE)
    yield tmp_path
    registry.admit([])
    sys.modules.pop(f"own_{tmp_path.name}", None)


@pytest.mark.default_rows(
    "a rule beside noise",
    "a logger that is not installed",
    "an unknown option",
    "a part that refuses its value",
    "two parts that do not fit",
    "too many devices",
)
@pytest.mark.parametrize("case", BAD)
def test_every_command_refuses(case, here):
    """Catches an answer about a config that cannot run: an epsilon, a forecast, a sweep of it."""
    settings, said = BAD[case]
    told = {}
    for command in COMMANDS:
        if command in TAKES_ITS_OWN.get(case, ()):
            continue
        result = invoke(command, settings, here)
        assert result.exit_code == 2, (command, result.output, result.exception)
        words = SWEEPS_WORDS.get(case, said) if command == "sweep" else said
        assert words in result.output, (command, result.output)
        told[command] = result.output
    if case not in SWEEPS_WORDS:
        assert len(set(told.values())) == 1, told
    assert not list((here / "out").glob("*"))


@pytest.mark.full
def test_a_module_is_admitted_by_every_command(here):
    """Catches a command that refuses what `run --with` takes."""
    for command in ("account", "calibrate --epsilon 2"):
        result = invoke(command, ["aggregator={name='own_sum'}"], here)
        assert result.exit_code == 0, (command, result.output, result.exception)
