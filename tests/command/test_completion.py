"""Words that the shell completes at the prompt."""

import os
import subprocess
import sys

import pytest

from fedjax_sim.command import completion


def test_each_kind_of_word(tmp_path, monkeypatch):
    """Catches a kind of word that completes to nothing, or to what the command refuses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("")
    (tmp_path / "runs" / "digits-fedavg-0-001").mkdir(parents=True)
    (tmp_path / "runs" / "digits-fedavg-0-001" / "config.toml").write_text("")
    (tmp_path / "runs" / "study-participation-001").mkdir()
    assert completion.example_names("mi") == ["mine.toml"]
    assert "sweeps/algorithms" in completion.example_names("sweeps/")
    assert completion.run_folders("runs/") == ["runs/digits-fedavg-0-001"]
    assert completion.study_names("error") == ["error-floor"]
    assert {"sampler", "sampling", "scaffold"} <= set(completion.part_names("s"))
    assert completion.settings("client_optimizer.learning") == ["client_optimizer.learning_rate="]
    assert completion.settings("model.name=ml") == ["model.name=mlp"]


@pytest.mark.default_rows("quickstart")
@pytest.mark.parametrize(
    ("words", "expected"), [("run --set run.stop", "run.stop_when="), ("data quick", "quickstart")]
)
def test_the_shell_gets_them(words, expected):
    """Catches an argument that no function completes, and a JAX that starts at each press of the tab key."""
    code = "import sys; from fedjax_sim.command.app import app; sys.argv = ['fedjax-sim']\n" + (
        "try: app(prog_name='fedjax-sim')\nfinally: assert 'jax' not in sys.modules"
    )
    typed = ["fedjax-sim", *words.split()]
    asked = {"_FEDJAX_SIM_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected]
