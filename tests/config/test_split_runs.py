"""Split learning in a config: what its evaluations ask, and what sweeps of it may vary."""

from __future__ import annotations

import json
import pathlib

import pytest

from fedjax_sim import metrics
from fedjax_sim.config.build import build
from fedjax_sim.config.document import load
from fedjax_sim.models import default_loss, supervised
from fedjax_sim.report.headline import besides
from fedjax_sim.running.loop import run
from fedjax_sim.sweeps.config import load_sweep, run_sweep

NOISE = "algorithm.link={name='link', forward={name='local_gaussian', clip_norm=20.0, noise_multiplier=0.05}}"


def test_evaluations_go_through_the_links():
    """Faults: an accuracy of a model that nobody can ask, and another number where links change nothing."""
    plain, noisy, back = (
        build(load("experiments/splitfed.toml", ["run.devices=1", *more]))
        for more in ((), (NOISE,), (NOISE.replace("forward", "backward"),))
    )
    assert plain.algorithm.evaluated.model is None and back.algorithm.evaluated.model is None
    told = [float(made.evaluation(made.params)["test_loss"]) for made in (plain, noisy, back)]
    asked = metrics.pooled(
        supervised(noisy.algorithm.evaluated.model, default_loss("classification")), noisy.params, noisy.data.test
    )
    assert told[0] == told[2] != told[1] == float(asked["loss"])


@pytest.mark.full
def test_a_page_knows_what_is_sent_besides(tmp_path):
    """Faults: bytes at the cut that the summary takes for some of those up and down, or that no curve has."""
    made = build(load("experiments/split.toml", ["run.devices=1", "algorithm.handover=peer"]))
    run(made.key, made.algorithm, made.params, made.data.train, 1, directory=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert besides(summary) == ["split_up_bytes", "split_down_bytes", "peer_bytes"]
    assert summary["uplink_bytes"] == 0 and summary["peer_bytes"] == 10 * 4 * 65 * 32


@pytest.mark.full
@pytest.mark.parametrize(
    "axis", ["'algorithm.cut' = ['hidden_0', 'hidden_1']", "algorithm = [{cut = 'hidden_0'}, {cut = 'hidden_1'}]"]
)
def test_each_point_is_judged_through_its_own_links(tmp_path, axis):
    """Faults: points that are judged through the first one's links, given as options or as tables."""
    config = tmp_path / "split.toml"
    text = pathlib.Path("experiments/splitfed.toml").read_text()
    config.write_text(text.replace("encrypted = true", "forward = {name = 'quantize', bits = 2}"))
    swept = tmp_path / "sweep.toml"
    swept.write_text(config.read_text() + f"\n[sweep]\nseeds = 1\n[sweep.grid]\n{axis}\n")
    few = ["run.rounds=1", "run.evaluate_every=1", "sampler.cohort_size=2", "run.devices=1"]
    _, second = run_sweep(load_sweep(str(swept), few), None).rows
    made = build(load(str(config), [*few, "algorithm.cut=hidden_1"]))
    _, history = run(made.key, made.algorithm, made.params, made.data.train, 1, evaluation=made.evaluation)
    assert second["test_loss"] == history.records[-1]["test_loss"]
