"""Studies keep what is finished: killed and resumed, a study equals one that was never killed."""

import ast
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_sim import study
from fedjax_sim.command.app import app
from fedjax_sim.command.study import load_study
from fedjax_sim.config.signatures import public_names
from fedjax_sim.running import kept_results
from fedjax_sim.running.files import lock
from fedjax_sim.study.dropout.question import dropout

SMALL = {"num_clients": 8, "neighbours": 4, "dropouts": [0.05, 0.1], "num_rounds": 50}
SETTINGS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={json.dumps(value)}")]
FILES = sorted(Path(study.__file__).parent.rglob("*.py"))


def call(*words):
    return CliRunner().invoke(app, ["study", *map(str, words)])


def killed(monkeypatch, error, after):
    """Ends the study with an error after some results."""
    write = kept_results.Kept.write

    def dies(self, *arguments):
        write(self, *arguments)
        if self.num_computed == after:
            raise error

    monkeypatch.setattr(kept_results.Kept, "write", dies)


def test_killed_and_resumed(tmp_path, monkeypatch):
    """Fault: a study of hours of which a kill leaves nothing; one that goes on with other numbers, or computes again
    what is there; other options that are taken for these."""
    whole, folder = tmp_path / "whole", tmp_path / "found"
    done = call("dropout", *SETTINGS, "--out", whole)
    assert done.exit_code == 0, done.output
    with monkeypatch.context() as patch:
        killed(patch, KeyboardInterrupt(), after=3)
        done = call("dropout", *SETTINGS, "--out", folder)
    assert done.exit_code == 130 and f"study --resume --out {folder}" in done.output
    assert len(list((folder / "kept").glob("*.kept"))) == 3 and not (folder / "findings.json").exists()
    refused = call("--set", "num_rounds=51", "--resume", "--out", folder)
    assert refused.exit_code == 2 and "num_rounds: expected 50, with which the study began, got 51" in refused.output
    refused = call("drift", "--resume", "--out", folder)
    assert refused.exit_code == 2 and "study.name: expected dropout" in refused.output
    done = call("--resume", "--out", folder)
    assert done.exit_code == 0 and "3 results were kept, 1 are computed anew." in done.output, done.output
    assert (folder / "findings.json").read_bytes() == (whole / "findings.json").read_bytes()
    assert call("--resume", "--out", tmp_path / "nowhere").exit_code == 2
    assert call("--resume").exit_code == 2


@pytest.mark.full  # by default one that is killed, and what a result depends on
def test_python_computes_the_same(tmp_path):
    """Fault: numbers that keeping changes; a result of another number of rounds, or of another seed, that is found."""
    plain = dropout(**SMALL).rows()
    for num_used in (0, 4):
        with kept_results.keeping(tmp_path) as kept:
            assert dropout(**SMALL).rows() == plain
        assert (len(kept.used), kept.num_computed, kept.num_unused) == (num_used, 4 - num_used, 0)
    with kept_results.keeping(tmp_path) as kept:
        assert dropout(**SMALL | {"seed": 1}).rows() != plain
    assert (len(kept.used), kept.num_unused) == (0, 4)


def test_what_a_result_depends_on(tmp_path, monkeypatch):
    """Fault: a result of other code, constants, arguments or versions that is taken for this one's; a damaged one."""

    def found(factor=2.0, x=3.0, name="f"):
        def function(x):
            return {"y": factor * x, "rows": jnp.arange(3)}

        function.__name__ = name
        with kept_results.keeping(tmp_path) as kept:
            result = kept_results.call(jax.jit(function), jnp.float32(x))
        assert result["y"] == factor * x and result["rows"].tolist() == [0, 1, 2]
        return bool(kept.used)

    assert not found() and found() and found(name="g")
    assert not found(factor=2.5) and not found(x=4.0) and found()
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        assert not found()
    with monkeypatch.context() as patch:
        patch.setattr(kept_results.jaxlib.version, "__version__", "9.9.9")
        assert not found()
    for damage in (lambda data: data[:-9], lambda data: data.replace(np.float32(6).tobytes(), np.float32(7).tobytes())):
        for path in tmp_path.glob("*.kept"):
            path.write_bytes(damage(path.read_bytes()))
        assert not found() and found()


def test_calls_of_the_host_are_not_kept(tmp_path):
    """Fault: a result of a program whose computation on the host has changed."""
    numbers = iter((1.0, 2.0))
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    for expected in (1.0, 2.0):
        function = jax.jit(lambda: jax.pure_callback(lambda: np.float32(next(numbers)), shape))
        with kept_results.keeping(tmp_path):
            assert kept_results.call(function) == expected
    assert not list(tmp_path.iterdir())


def test_every_study_keeps(tmp_path):
    """Fault: a study with compiled programs of its own whose results are lost when it is killed."""
    calls = {path.parent.name if path.parent.name != "study" else path.stem: set() for path in FILES}
    for path in FILES:
        owner = path.parent.name if path.parent.name != "study" else path.stem
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                calls[owner].add(ast.unparse(node.func))
    keeping = {"kept_results.call", "independent_runs", "traced_runs", "kept_sweep", "watched_runs", "run_settings"}
    keeping |= {
        name for name in set().union(*calls.values()) if name.endswith(".errors") or name.endswith("accuracies")
    }
    for name in [name for name in public_names("fedjax_sim.study") if name in calls]:
        assert calls[name] & keeping, f"{name} computes without keeping"
        assert not calls[name] & {"sweep", "run"}, f"{name} keeps nothing of its runs"


@pytest.mark.full  # by default studies are, and sweeps resume in tests/sweeps
def test_a_sweep_inside_is_kept(tmp_path, monkeypatch):
    """Fault: a study's sweep that begins anew, or that stops at points of other code."""
    import optax

    from fedjax_sim import algorithms, population, sampling
    from fedjax_sim.study import kept_sweep as module

    people = population.quadratics(num_clients=4, dimension=2).train

    def rows(steps):
        def make(rate):
            return algorithms.fedavg(
                population.quadratic_loss, sampling.full(4), optax.sgd(rate), num_steps=steps, weighting="uniform"
            )

        start = {"w": jnp.zeros(2)}
        with kept_results.keeping(tmp_path) as kept:
            found = module.kept_sweep(make, start, people, 2, grid={"rate": [0.1, 0.3]}, seeds=[0])
        return found.rows, len(kept.used)

    first, used = rows(1)
    assert used == 0 and rows(1) == (first, 1)
    other, used = rows(2)
    assert used == 0 and other != first and rows(2) == (other, 1)


@pytest.mark.full  # by default tests/command/test_trouble.py has a full disk at the end of a run
@pytest.mark.parametrize("when", ["figure", "page"])
def test_the_table_is_printed_first(tmp_path, monkeypatch, when):
    """Fault: a full disk, found when the page is written, that takes the table with it and says nothing of a way."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "fedjax_sim.study.page.write_atomically" if when == "figure" else "fedjax_sim.study.page._page", full
    )
    done = call("dropout", *SETTINGS, "--out", tmp_path / "found")
    assert done.exit_code == 1 and "predictions lie within" in done.output
    assert "No space left on device" in done.output and "study --resume --out" in done.output
    monkeypatch.undo()
    assert call("--resume", "--out", tmp_path / "found").exit_code == 0


def test_a_study_that_another_process_runs_stays(tmp_path):
    """Fault: a resume that is refused, since the study runs, and takes the study's own options away."""
    _, options = load_study("dropout", SETTINGS[1::2])
    begun = json.dumps({"name": "dropout", "options": options})
    (tmp_path / "study.json").write_text(begun)
    with lock(tmp_path):
        done = call("--resume", "--out", tmp_path)
    assert done.exit_code == 1 and "held by" in done.output, done.output
    assert (tmp_path / "study.json").read_text() == begun


def test_a_refused_study_leaves_nothing(tmp_path):
    """Fault: a folder that holds a study which never began, so that it cannot be used again."""
    done = call("dropout", *SETTINGS, "--set", "num_clients=2", "--out", tmp_path / "found")
    assert done.exit_code == 2 and not (tmp_path / "found").exists(), done.output
