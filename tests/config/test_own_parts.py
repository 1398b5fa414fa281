"""Parts of a user's own module in a config: `--with MODULE` admits them, and a config alone runs no code."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.config import registry
from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.config.signatures import NO_FUNCTION, parts_of_module
from tests.test_docs import ROOT, python_blocks

PAGE = ROOT / "docs" / "how_to" / "write_a_part_of_your_own.md"

MODULE = '''
import pathlib

import jax

from fedjax_sim import aggregation, transform
from fedjax_sim.types import Aggregator, UpdateTransform

pathlib.Path("it_ran").write_text("")


def mine(*, level: float = 0.5, which: str = "a") -> Aggregator:
    """The mean, by another name."""
    return aggregation.mean()


def halved(*, times: int) -> UpdateTransform:
    """Halves an update some times."""
    return transform.stateless(lambda key, update: jax.tree.map(lambda x: x / 2**times, update))


def _hidden() -> Aggregator:
    return aggregation.mean()
'''
RUN = ["data={name='mean_estimation', num_clients=8}", "model.name=linear", "sampler.cohort_size=4"]
RUN += ["algorithm.num_steps=1", "run.rounds=2"]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module in the current folder; nothing of it stays behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"own_rules_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    yield name
    registry.admit([])
    sys.modules.pop(name, None)


def invoke(command, *settings, module=None):
    words = [word for setting in settings for word in ("--set", setting)]
    return CliRunner().invoke(app, [*command, *words, *(["--with", module] if module else [])])


def test_a_config_alone_runs_no_code(module, tmp_path):
    """Catches a stranger's config that imports a module, and a module that is imported only to be read."""
    (tmp_path / "run.toml").write_text(f'[aggregator]\nname = "mine"\n[run]\nmodules = ["{module}"]\n')
    done = invoke(["run", "run.toml"], *RUN)
    assert done.exit_code == 2 and f"run.modules: expected modules that --with names, got '{module}'" in done.output
    assert f"--with {module}" in done.output and not (tmp_path / "it_ran").exists()
    # Wrong options are refused before the module runs.
    done = invoke(["run"], *RUN, "aggregator.name=mine", "aggregator.levle=1.0", module=module)
    assert done.exit_code == 2 and "Did you mean 'level'" in done.output and not (tmp_path / "it_ran").exists()


OWN_PARTS = [*RUN, "aggregator.name=mine", "aggregator.level=0.25"]


@pytest.mark.full
def test_own_parts_have_their_options(module, tmp_path):
    """Catches a part whose options are lost. Halved no times, an update is itself; three times, it is another."""
    assert invoke(["run", "-q", "--out", "plain"], *RUN).exit_code == 0
    for name, times in (("same", 0), ("halved", 3)):
        options = f"transform.halved.times={times}"
        assert invoke(["run", "-q", "--out", name], *OWN_PARTS, options, module=module).exit_code == 0
    losses = {}
    for name in ("halved", "plain", "same"):
        last_record = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        losses[name] = last_record["test_loss"]
    assert losses["same"] == losses["plain"] != losses["halved"]


def test_own_parts_are_parts(module, tmp_path):
    """Catches a run that cannot be resumed or shown."""
    done = invoke(["run", "-q", "--out", "out"], *OWN_PARTS, "transform.halved.times=3", module=module)
    assert done.exit_code == 0, done.output
    tables = (tmp_path / "out" / "config.toml").read_text()
    assert f'modules = ["{module}"]' in tables and "level = 0.25" in tables and "[transform.halved]" in tables
    resumed = ["run", "-q", "--resume", "--out", "out"]
    assert invoke(resumed, "run.rounds=3").exit_code == 2
    # Another text of the module, or of one that it imports, is another program: the log would be of two.
    log = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    helper = f"helper_of_{module}"
    for name, text in ((module, MODULE + f"\n\nimport {helper}\n"), (helper, "level = 2\n")):
        (tmp_path / f"{name}.py").write_text(text)
        refused = invoke(resumed, "run.rounds=4", module=module)
        assert refused.exit_code == 1 and f"module {module}: changed after the checkpoint" in refused.output
        assert (f"module {helper}: added" in refused.output) == (name == helper)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == log
    with pytest.warns(RuntimeWarning, match=f"{helper}, {module}: changed after the checkpoint"):
        assert invoke(["export", "out", "model.npz"], module=module).exit_code == 0
    (tmp_path / f"{module}.py").write_text(MODULE)
    assert invoke(resumed, "run.rounds=4", module=module).exit_code == 0
    # A summary needs no code, and the missing module is the only problem: its parts are no unknown names.
    assert invoke(["show", "out"]).exit_code == 0
    words = invoke(["run", "out/config.toml"]).output
    assert "run.modules: expected" in words and "expected one of" not in words


MODELS = '''
import jax.numpy as jnp

from fedjax_sim import models
from fedjax_sim.models import Model


def own_linear(*, inputs: int = 64, outputs: int = 10) -> Model:
    """A model that is told nothing about the data."""
    return models.from_fn(lambda key: {"w": jnp.zeros((inputs, outputs))}, lambda params, x: x @ params["w"])


def bare(*, input_shape) -> Model:
    return own_linear()


def of_a_kind(*, net: set[int]) -> Model:
    return own_linear()


def silent():
    return own_linear()


def stated(*, input_shape: tuple[int, ...]) -> Model:
    return own_linear()
'''


@pytest.fixture
def admitted(module, tmp_path):
    (tmp_path / f"{module}.py").write_text(MODELS)
    registry.admit([module])
    return module


def test_one_name_is_no_list(module):
    """Fault: modules of one letter each."""
    with pytest.raises(ConfigError, match=rf"modules: expected a list .* Write \['{module}'\]\."):
        registry.admit(module)


def built(*settings):
    """The experiment of these settings, of 40 clients."""
    return build(load(None, ["data.num_clients=40", "sampler.cohort_size=8", *settings]))


def test_a_model_need_not_be_told_of_the_data(admitted):
    """Catches a model of a user's own that is refused for its arguments, and one that does not fit its data."""
    assert built("model.name=own_linear").params["w"].shape == (64, 10)
    for setting, words in (("inputs=63", "got 'own_linear'.*64"), ("outputs=9", r"got outputs of shape \[9\]")):
        with pytest.raises(ConfigError, match=rf"\[64\] with 10 outputs, {words}"):
            built("model.name=own_linear", f"model.{setting}")
    # The facts of a quadratic client and of a model of the package still decide.
    for settings in (("data.name=quadratics", "model.name=own_linear"), ("model.name=gru",)):
        with pytest.raises(ConfigError, match=r"model\.name: expected one of"):
            built(*settings)


def test_a_part_that_is_left_out_says_why(admitted):
    """Catches a function of the user's that vanishes from the choices without a word."""
    for name, words in {
        "bare": "Your module's bare is left out: its argument input_shape has no annotation.",
        "of_a_kind": "its argument net has the annotation 'set[int]', which no config can give.",
        "silent": "its result has no annotation, such as -> Model.",
        "stated": 'annotate it: Annotated[..., FromData("input_shape")].',
    }.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            load(None, [f"model.name={name}"])
    listed = invoke(["list"], module=admitted).output
    assert "own_linear  A model that" in listed and "bare is left out" in listed and "fedavg" not in listed
    assert "inputs = 64" in invoke(["list", "own_linear"], module=admitted).output


WRAPPERS = '''
import jax

from fedjax_sim.types import Aggregator, Sampler, UpdateTransform


def by_another_name(*, model: Aggregator) -> Aggregator:
    """Takes an aggregator under the name of another table."""
    return model


def twice(*, inner: UpdateTransform) -> UpdateTransform:
    """Wraps a transform that it calls as it likes."""
    return inner._replace(squared_error=None)


def of_two(*, first: Aggregator, second: Aggregator) -> Aggregator:
    """Takes one more aggregator than a config gives."""
    return first


def of_a_sampler(*, sampler: Sampler) -> UpdateTransform:
    """Takes a part of another table."""
    return None
'''


def test_wrappers_name_their_part_as_they_like(module, tmp_path):
    """Faults: an `assert`, and a TypeError of Python, for a wrapper whose argument has a name of its own; the same
    error for an argument that no config gives."""
    (tmp_path / f"{module}.py").write_text(WRAPPERS)
    registry.admit([module])
    star = built("aggregator.by_another_name={}", "transform.twice.clip.clip_norm=1.0").algorithm.parts
    assert star.aggregator.facts.weighted and star.transform.facts.l2_bound == 1.0
    for setting, words in (
        ("aggregator.of_two={}", "aggregator.of_two: second: expected a part of the type Aggregator, got None."),
        ("transform.of_a_sampler={}", "transform.of_a_sampler: sampler: expected a part of the type Sampler"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            built(setting)


ALGORITHM = '''
from fedjax_sim.types import Aggregator, Algorithm, Sampler


def idle(*, sampler: Sampler, aggregator: Aggregator) -> Algorithm:
    """Trains nothing, and states neither its parts nor a loss."""
    return Algorithm(
        init=lambda key, params, population: params,
        step=lambda key, state, population: (state, {}),
        params=lambda state: state,
    )
'''


def test_an_algorithm_that_states_nothing_is_refused_in_words(module, tmp_path):
    """Fault: an error of Python about None, where nothing can be judged, or a server is to train as the clients do."""
    (tmp_path / f"{module}.py").write_text(ALGORITHM)
    registry.admit([module])
    with pytest.raises(ConfigError, match=r"algorithm\.name: expected .* brings the loss of its estimate, got 'idle'"):
        built("algorithm.name=idle")
    with pytest.raises(ConfigError, match=r"aggregator\.name: expected .* got 'fltrust'\. idle does not state"):
        built("algorithm.name=idle", "aggregator.name=fltrust")


def test_the_page_s_model_runs(module, tmp_path):
    """Catches a model in the documentation that a config cannot name; its code is run by tests/test_docs.py."""
    (example,) = [block for block in python_blocks(PAGE) if "-> Model" in block]
    (tmp_path / f"{module}.py").write_text(example)
    registry.admit([module])
    assert built("model.name=my_net", "model.hidden=16").params["hidden"].shape == (64, 16)


PACKAGE = {
    "__init__": "from .rules import listed as listed\nfrom . import rules as rules\n",
    "rules": """
from __future__ import annotations

from .shared import Shared

__all__: list[str] = ["listed"]


def listed(*, share: float = 0.1, **options: Unpack[Shared]):
    "A rule."


def unlisted(): ...
""",
    "shared": """
from __future__ import annotations

from typing import TypedDict


class Shared(TypedDict):
    times: Annotated[int, Default(2)]
""",
    "sampling": "def uniform(*, size: int):\n    'Mine.'\n",
    "tree": "def tree(*, size: int):\n    'Mine.'\n",
}


def test_modules_of_a_package(tmp_path, monkeypatch):
    """Faults: an import by dots that is looked for at the top; an annotated `__all__` that is overlooked; a function
    that is taken for the file of its name in fedjax_sim, or beside its own module."""
    name = f"own_package_{tmp_path.name}"
    (tmp_path / name).mkdir()
    for module, text in PACKAGE.items():
        (tmp_path / name / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        read = {module: dict(parts_of_module(f"{name}.{module}")) for module in ("rules", "sampling", "tree")}
        of_package = dict(parts_of_module(name))
    finally:
        # The package was imported to find its modules, and with it what it imports.
        for imported in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[imported]
    assert list(read["rules"]) == ["listed"] and list(of_package) == ["listed", "rules"]
    listed = of_package["listed"]
    assert listed == read["rules"]["listed"]._replace(subpackage=name) and listed.module == f"{name}.rules"
    assert {option: value.default for option, value in listed.options.items()} == {"share": 0.1, "times": 2}
    for part in (read["sampling"]["uniform"], read["tree"]["tree"]):
        assert part.meaning == "Mine." and list(part.options) == ["size"] and not part.others
    assert of_package["rules"].others == {NO_FUNCTION: ""}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "a module with source code"),
        ("def mean() -> int: return 1", "names that no other part has, got 'mean'"),
        ("def broken(", "a module with source code"),
        ("def third(*, share: float = 1 / 3) -> int: ...", "third: expected a default that is written out for its"),
        ("HALF = 0.5\ndef half(*, share: float = HALF) -> int: ...", "argument share, got HALF."),
    ],
)
def test_wrong_modules(text, words, module, tmp_path):
    if text is None:
        module = "no_module_of_this_name"
    else:
        (tmp_path / f"{module}.py").write_text(text)
    done = invoke(["run"], *RUN, module=module)
    assert done.exit_code == 2 and words in done.output
    done = invoke(["run"], *RUN, module=f"{module}.py")
    assert done.exit_code == 2 and f"without .py: --with {module}." in done.output


@pytest.mark.full
def test_a_timeline_needs_the_module_too(module, tmp_path):
    """Fault: "add --with" for a command that has no such option."""
    clock = ["devices.name=cross_device", "sampler.with_clock.num_invited=2", "sampler.cohort_size=4"]
    settings = [*RUN[:2], *RUN[3:], *clock, "aggregator.name=mine"]
    assert invoke(["run", "-q", "--out", "out"], *settings, module=module).exit_code == 0
    timeline = ["report", "out", "--timeline", "2"]
    registry.admit([])
    assert f"add --with {module}" in invoke(timeline).output
    done = invoke(timeline, module=module)
    assert done.exit_code == 0 and "timeline_2.html" in done.output, done.output


@pytest.mark.full  # by default a run is refused here, and other programs of a sweep in tests/sweeps/test_sweep.py
def test_a_sweep_goes_on_with_its_own_code_alone(module, tmp_path):
    """Fault: points of two programs in one table, since a module was edited between the halves of a sweep."""
    swept = ["sweep", "-q", "--out", "out"]
    settings = [*RUN, "aggregator.name=mine", "sweep.seeds=1", "sweep.grid.transform.halved.times=[1]"]
    done = invoke(swept, *settings, module=module)
    assert done.exit_code == 0, done.output
    points = (tmp_path / "out" / "points.jsonl").read_bytes()
    (tmp_path / f"{module}.py").write_text(MODULE.replace("2**times", "3**times"))
    refused = invoke([*swept, "--resume"], *settings, module=module)
    assert refused.exit_code == 1 and f"config.modules.{module}:" in refused.output, refused.output
    assert (tmp_path / "out" / "points.jsonl").read_bytes() == points
    (tmp_path / f"{module}.py").write_text(MODULE)
    assert invoke([*swept, "--resume"], *settings, module=module).exit_code == 0
