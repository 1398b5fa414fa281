"""`export`: what is no model is not written as one, and clients' own models are."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.running import checkpoint

SMALL = ["data={name='mean_estimation', num_clients=4}", "model.name=linear", "run.rounds=2"]
SMALL += ["sampler.cohort_size=2", "algorithm.num_steps=2", "run.evaluate_every=2"]


def call(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def made_run(folder, *settings):
    options = [word for setting in [*SMALL, *settings] for word in ("--set", setting)]
    done = call("run", "--quiet", "--out", folder, *options)
    assert done.exit_code == 0, done.output
    return folder


def leaves_of(folder):
    """The bytes of the leaves of a run's newest checkpoint by their paths."""
    header, payload = checkpoint.read_file(checkpoint.latest(folder / "checkpoints"))
    found, offset = {}, 0
    for entry in header["leaves"]:
        found[entry["path"]] = bytes(payload[offset : offset + entry["bytes"]])
        offset += entry["bytes"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return made_run(tmp_path_factory.mktemp("alone") / "run", "algorithm.name=local")


def test_a_start_is_not_the_model(alone, tmp_path):
    """Catches the untrained start of `local` or FedProto, written as the model."""
    done = call("export", alone, tmp_path / "model.npz")
    assert done.exit_code == 2 and not (tmp_path / "model.npz").exists()
    for words in ("no round trains", "--client 0 to 3", "--clients all", "--params"):
        assert words in done.output
    done = call("export", alone, tmp_path / "model.npz", "--params")
    assert done.exit_code == 0 and "the start, which no round trains" in done.output


def test_own_models_of_all_and_of_one(alone, tmp_path):
    """Catches rows of another client, and a newcomer's start that passes for a trained model."""
    done = call("export", alone, tmp_path / "all.npz", "--clients", "all")
    assert done.exit_code == 0 and "the own models of 4 clients" in done.output
    models = np.load(tmp_path / "all.npz")
    saved = leaves_of(alone)
    own = {path: x for path, x in saved.items() if "own" in path}
    assert len(own) == len(models.files) - 1 == 2
    for name in set(models.files) - {"has_trained"}:
        (in_checkpoint,) = (x for path, x in own.items() if name.rpartition("/")[2] in path)
        assert models[name].tobytes() == in_checkpoint
    for client, is_trained in enumerate(models["has_trained"]):
        done = call("export", alone, tmp_path / "one.npz", "--client", client)
        assert done.exit_code == 0 and f"the own model of client {client}" in done.output
        assert ("has not trained" in done.output) == (not is_trained)
        for name, x in np.load(tmp_path / "one.npz").items():
            np.testing.assert_array_equal(x, models[name][client])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--client", "4"], "--client: expected a client's number in [0, 3], got 4"),
        (["--clients", "some"], "--clients: expected all, got 'some'"),
        (["--client", "1", "--params"], "--client: expected one of --client, --clients, --model and --params"),
        (["--model", "0"], "--model: expected a run of several models"),
    ],
)
def test_what_a_run_does_not_have(alone, tmp_path, words, expected):
    done = call("export", alone, tmp_path / "model.npz", *words)
    assert done.exit_code == 2 and expected in done.output and not (tmp_path / "model.npz").exists()


@pytest.mark.full
def test_one_of_several_models(tmp_path):
    """Catches the first of IFCA's models, written as the model, and another one than was asked for."""
    run = made_run(tmp_path / "run", "algorithm.name=ifca", "algorithm.num_clusters=2")
    done = call("export", run, tmp_path / "model.npz")
    assert done.exit_code == 2 and "--model 0" in done.output
    done = call("export", run, tmp_path / "model.npz", "--model", "2")
    assert done.exit_code == 2 and "--model: expected a model's number in [0, 1], got 2" in done.output
    saved = leaves_of(run)
    for number in range(2):
        done = call("export", run, tmp_path / "model.npz", "--model", number)
        assert done.exit_code == 0 and f"model {number} of 2" in done.output
        for name, x in np.load(tmp_path / "model.npz").items():
            (models,) = (leaf for path, leaf in saved.items() if name.rpartition("/")[2] in path and "params" in path)
            np.testing.assert_array_equal(x, np.frombuffer(models, x.dtype).reshape(-1, *x.shape)[number])


@pytest.mark.full
def test_a_run_without_own_models_has_one_model(tmp_path):
    """Catches the shared model of FedAvg, written as a client's own."""
    run = made_run(tmp_path / "run")
    done = call("export", run, tmp_path / "model.npz", "--client", "0")
    assert done.exit_code == 2 and "--client: expected a run whose clients have models of their own" in done.output
    done = call("export", run, tmp_path / "model.npz")
    assert done.exit_code == 0 and "the model." in done.output


@pytest.mark.full
def test_a_run_without_a_model_has_none(tmp_path):
    """Catches "all use the model", said of a run that has no model."""
    words = "run --quiet --set data.name=mean_estimation --set data.num_clients=4 --set algorithm.name=kmeans".split()
    words += "--set algorithm.num_clusters=2 --set sampler.cohort_size=2 --set run.rounds=1".split()
    assert (done := call(*words, "--out", tmp_path / "run")).exit_code == 0, done.output
    done = call("export", tmp_path / "run", tmp_path / "model.npz", "--client", "0")
    assert done.exit_code == 2 and "Its params are the answer of a statistic (--params)." in done.output
