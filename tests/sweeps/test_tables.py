"""Sweeps over tables, and what differs between rows besides the grid."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedjax_sim.command.app import app
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.sweeps.config import load_sweep

SMALL = ["data.num_clients=40", "model.hidden=[8]", "sampler.cohort_size=8", "run.rounds=1", "run.devices=1"]
ALGORITHMS = 'sweep.grid.algorithm=[{name="fedavg"}, {name="fedprox", coefficient=0.5}]'


def test_a_point_may_be_a_table():
    """A table sets its options and leaves the others. Fault: options of the file that are lost, or of another point."""
    loaded = load_sweep(None, [*SMALL, ALGORITHMS, "algorithm.num_steps=7"])
    assert [list(point.values()) for point in loaded.combinations] == [
        ['{name = "fedavg"}'],
        ['{name = "fedprox", coefficient = 0.5}'],
    ]
    averaged, proximal = (config.resolved()["algorithm"] for config in loaded.configs)
    assert (averaged["name"], averaged["num_steps"]) == ("fedavg", 7)
    assert (proximal["name"], proximal["num_steps"], proximal["coefficient"]) == ("fedprox", 7, 0.5)
    optimizers = 'sweep.grid.client_optimizer=[{name="sgd"}, {name="adam", learning_rate=0.01}]'
    assert load_sweep(None, [*SMALL, optimizers]).differences()["client_optimizer.learning_rate"] == [0.5, 0.01]
    with pytest.raises(ConfigError, match=r"sweep\.grid\.run: expected an option"):
        load_sweep(None, [*SMALL, "sweep.grid.run=[{rounds=3}]"])


def test_a_point_may_be_a_chain():
    """A chain in its own order, without the file's members. Fault: a row labelled {} whose messages are quantized."""
    file = [*SMALL, "transform.clip.clip_norm=2.0"]
    orders = "{quantize={bits=4}, clip={clip_norm=1.0}}, {clip={clip_norm=1.0}, quantize={bits=4}}"
    loaded = load_sweep(None, [*file, f"sweep.grid.transform=[{{}}, {orders}, {{natural_compression={{}}}}]"])
    chains = [list(config.resolved().get("transform", {})) for config in loaded.configs]
    assert chains == [[], ["quantize", "clip"], ["clip", "quantize"], ["natural_compression"]]
    told = loaded.differences()
    assert "transform.clip.clip_norm" not in told
    # The defaults of a part come with it: the grid names the part.
    assert not any(path.startswith("transform.") for path in told)
    beside = 'sweep.grid={transform=[{}, {top_k={share=0.5}}], "transform.clip.clip_norm"=[1.0, 2.0]}'
    with pytest.raises(ConfigError, match="options that the axis"):
        load_sweep(None, [*file, beside])


def test_a_table_without_options_is_one():
    """Fault: a wrapper that a row's label names, and that the row leaves out in silence."""
    rules = '{name="mean"}, {name="krum", num_byzantine=1, adaptive_clipping={}}'
    with pytest.raises(ConfigError, match=r"clipping\.num_byzantine: .* got nothing"):
        load_sweep(None, [*SMALL, f"sweep.grid.aggregator=[{rules}]"])


@pytest.mark.parametrize(
    "grid, words",
    [
        (
            {"client_optimizer.learning_rate": "[0.1, 0.2]", "client_optimizer": '[{name="sgd", learning_rate=0.5}]'},
            r"options that the axis client_optimizer does not set, got client_optimizer\.learning_rate",
        ),
        (
            {"client_optimizer": '[{name="sgd", learning_rate=0.1}, {learning_rate=0.1, name="sgd"}]'},
            "another config at each point",
        ),
        ({"client_optimizer": '[{name="sgd"}, {name="sgd", learning_rate=0.5}]'}, "another config at each point"),
        ({"algorithm": '[{name="fedavg"}, {name="fedavg"}]'}, "each once"),
    ],
)
def test_rows_that_would_be_labelled_wrong(grid, words):
    """Fault: two axes of which one replaces the other's values, and one run under two labels."""
    axes = ", ".join(f'"{name}" = {values}' for name, values in grid.items())
    with pytest.raises(ConfigError, match=words):
        load_sweep(None, [*SMALL, f"sweep.grid={{{axes}}}"])
    beside = 'sweep.grid={algorithm=[{name="fedavg"}, {name="fedprox"}], "algorithm.num_steps"=[1, 2]}'
    assert len(load_sweep(None, [*SMALL, beside]).configs) == 4


def test_every_option_that_differs_is_told():
    """Fault: rows that differ in a default that nobody sees, as in the server's rate of two algorithms."""
    loaded = load_sweep(None, [*SMALL, 'sweep.grid.algorithm.name=["fedadam", "fedadagrad", "fedavg"]'])
    told = loaded.differences()
    assert told["algorithm.server_learning_rate"] == [0.01, 0.1, "absent"]
    assert "algorithm.name" not in told and "algorithm.weighting" not in told and "seed" not in told
    rates = [*SMALL, "sweep.grid.client_optimizer.learning_rate=[0.1, 0.2]"]
    assert load_sweep(None, rates).differences() == {}


@pytest.mark.full
def test_a_sweep_prints_them(tmp_path):
    """Fault: a paired difference without a word of what else differs."""
    settings = [*SMALL, 'sweep.grid.algorithm.name=["fedavg", "fedprox"]', "sweep.seeds=1"]
    words = ["sweep", *(x for setting in settings for x in ("--set", setting)), "--out", str(tmp_path / "s")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "algorithm.coefficient: absent (fedavg); 0.1 (fedprox)" in result.output


def test_unset():
    """A table or an option of a file is left out. Fault: one that stays, or a wrong name that is passed over."""
    assert load("quickstart").tables["client_optimizer"]["learning_rate"] == 0.5
    config = load("quickstart", ["algorithm={name='dgd', mixing={name='metropolis', graph={name='ring'}}}"],
                  ["algorithm", "client_optimizer", "sampler"])  # fmt: skip
    assert "client_optimizer" not in config.tables
    with pytest.raises(ConfigError, match=r"--unset sampler.with_dropout: .* got nothing of that name.* It has 'name'"):
        load("quickstart", [], ["sampler.with_dropout"])
    with pytest.raises(ConfigError, match=r"sampler: .* dgd.*: --unset sampler"):
        load("quickstart", ["algorithm={name='dgd', mixing={name='metropolis', graph={name='ring'}}}"])
