"""Runs of adapters: from a pre-trained model in a file to the adapters in a checkpoint."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save
from typer.testing import CliRunner

from fedjax_sim import tree
from fedjax_sim.command.app import app
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.sweeps.config import load_sweep, run_sweep

MLP = ["data.num_clients=6", "model.hidden=[5]", "sampler.cohort_size=3", "algorithm.num_steps=2"]
MLP += ["run.evaluate_every=2", "run.devices=1"]


WITHOUT = "model: expected a model without frozen parameters"


def call(command, *words, settings=()):
    sets = [word for setting in settings for word in ("--set", setting)]
    done = CliRunner().invoke(app, [command, *map(str, words), *sets])
    assert done.exit_code == 0, done.output
    return done


def written(path, params):
    """Writes parameters as `fedjax-sim export` does."""
    path.write_bytes(save({name.replace(".", "/"): np.asarray(leaf) for name, leaf in tree.dotted(params).items()}))
    return f"model.started_from={{path='{path}'}}"


@pytest.mark.full  # by default tests/models/test_start.py has the law, and the next test such a config
def test_adapters_of_a_model_in_a_file(tmp_path):
    """Catches frozen parameters that are drawn in place of the file's, and an evaluation of another model."""
    pretrained = build(load(None, MLP)).params
    start = written(tmp_path / "model.safetensors", pretrained)
    again, adapted = (build(load(None, [*MLP, start, "seed=5", *more])) for more in ([], ["model.lora={rank=2}"]))
    jax.tree.map(np.testing.assert_array_equal, again.params, pretrained)
    assert set(tree.dotted(adapted.params)) == {"hidden_0.kernel.a", "hidden_0.kernel.b"}
    records = [experiment.evaluation(experiment.params) for experiment in (again, adapted)]
    jax.tree.map(np.testing.assert_array_equal, *records)
    assert records[0]["test_loss"] > 1
    # Adapters start from a file too, if the table comes after the one that makes them.
    trained = jax.tree.map(lambda leaf: leaf + 1, adapted.params)
    last = written(tmp_path / "adapters.safetensors", trained)
    on = build(load(None, [*MLP, "model.lora={rank=2}", last]))
    jax.tree.map(np.testing.assert_array_equal, on.params, trained)


def test_frozen_factors_are_the_seeds(tmp_path):
    """A is no parameter: it stays that of the config's seed. So a sweep over seeds is refused, though a file has W."""
    start = written(tmp_path / "model.safetensors", build(load(None, MLP)).params)
    adapted = [*MLP, start, "model.lora={rank=2, freeze_a=true}"]
    one, again, other = (build(load(None, [*adapted, f"seed={seed}"])) for seed in (3, 3, 4))
    assert set(tree.dotted(one.params)) == {"hidden_0.kernel.b"}
    drawn = [np.asarray(experiment.frozen["a"]["hidden_0"]["kernel"]) for experiment in (one, again, other)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert drawn[0].shape == (64, 2) and (drawn[0] != drawn[2]).all()
    with pytest.raises(ConfigError, match=r"model\.lora\.freeze_a, make a run"):
        run_sweep(load_sweep(None, [*adapted, *SWEEP]), None)


@pytest.mark.full
def test_a_model_is_trained_exported_and_adapted(tmp_path):
    """Catches an export with other bits than the start, and a resume from another model."""
    model = tmp_path / "model.safetensors"
    call("run", "--quiet", "--out", tmp_path / "first", settings=[*MLP, "run.rounds=2"])
    call("export", tmp_path / "first", model)
    settings = [*MLP, f"model.started_from={{path='{model}'}}", "model.lora={rank=2}", "seed=5"]
    call("run", "--quiet", "--out", tmp_path / "whole", settings=[*settings, "run.rounds=4"])
    call("run", "--quiet", "--out", tmp_path / "half", settings=[*settings, "run.rounds=2"])
    call("run", "--quiet", "--resume", "--out", tmp_path / "half", settings=["run.rounds=4"])
    for folder in ("whole", "half"):
        call("export", tmp_path / folder, tmp_path / f"{folder}.safetensors")
    whole, resumed = (load_file(tmp_path / f"{folder}.safetensors") for folder in ("whole", "half"))
    assert {name: x.shape for name, x in whole.items()} == {"hidden_0/kernel/a": (64, 2), "hidden_0/kernel/b": (2, 5)}
    for name, array in whole.items():
        np.testing.assert_array_equal(array, resumed[name])
    assert whole["hidden_0/kernel/b"].any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.lora={rank=6}"], "model.lora.rank: expected at most 5, the smaller side of hidden_0/kernel, got 6"),
        (["model.lora={}"], "model.lora.rank: expected an integer in"),
        (["model.lora={rank=2, matrices=['body']}"], "model.lora.matrices: expected paths among"),
        (["model.lora={rank=2}", "algorithm.name=fedper"], "output"),
        (["algorithm.name=flexlora"], "model: expected one with pairs of factors A and B"),
        (["model.lora={rank=2, freeze_a=true}", "algorithm.name=flexlora"], "With freeze_a the mean of the B is exact"),
        (
            ["model.lora={rank=2}", "algorithm.name=splitfed", "algorithm.cut=hidden_0"],
            "model: expected a model without frozen parameters",
        ),
    ],
)
def test_refused_adapters(settings, words):
    """Catches a raw error, and an option whose path a reader has to guess."""
    with pytest.raises(ConfigError) as error:
        experiment = build(load(None, [*MLP, *settings]))
        jax.eval_shape(experiment.algorithm.init, experiment.key, experiment.params, experiment.data.train)
    assert words in str(error.value)


SWEEP = ["run.rounds=2", "sweep.grid.client_optimizer.learning_rate=[0.1, 0.2]", "sweep.seeds=[0, 1]"]


def test_a_sweep_over_seeds_needs_frozen_parameters_that_are_given():
    """Catches seeds whose frozen parameters are not those of a run with that seed."""
    with pytest.raises(ConfigError, match=r"sweep\.seeds: .* which draws the frozen"):
        run_sweep(load_sweep(None, [*MLP, "model.lora={rank=2}", *SWEEP]), None)


@pytest.mark.full
def test_a_sweep_of_adapters(tmp_path):
    """Catches a refusal although all seeds start from one file."""
    start = written(tmp_path / "model.safetensors", build(load(None, MLP)).params)
    swept = run_sweep(load_sweep(None, [*MLP, start, "model.lora={rank=2}", *SWEEP]), None)
    assert len(swept.rows) == 4 and swept.exact


@pytest.mark.full
def test_a_pretrained_transformer_and_its_adapters(shared_data, tmp_path):
    """Catches examples of language models that cannot be built, and another model in the second than in the first."""
    settings = [f"data.directory={shared_data / 'shakespeare'}", "run.devices=1"]
    first = build(load("experiments/shakespeare_transformer.toml", settings))
    start = written(tmp_path / "pretrained.safetensors", first.params)
    second = build(load("experiments/shakespeare_adapters.toml", [*settings, start]))
    numbers = [sum(leaf.size for leaf in jax.tree.leaves(each.params)) for each in (first, second)]
    assert numbers[0] == 108_610 and numbers[1] == 2 * 4 * (4 * 128 + 2 * 320)
    assert set(second.data.train.sizes.shape) == {second.data.local_test.size}
