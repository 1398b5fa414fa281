"""Vertical learning in a config: the data's columns reach model and algorithm."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim.config.build import build
from fedjax_sim.config.document import ConfigError, load

TUMOURS = ["data.with_parties.alignment=exact", "run.devices=1"]


@pytest.mark.full
def test_columns_reach_the_model():
    """Faults: a model of other columns than the data's; a loss without links, whose bytes nobody counts."""
    made = build(load("experiments/vertical.toml", [*TUMOURS, "data.with_parties.widths=[20, 4, 6]"]))
    kernels = [made.params["parties"][f"party_{p}"]["embedding"]["kernel"].shape for p in range(3)]
    assert kernels == [(20, 4), (4, 4), (6, 4)] and made.data.train.size == 1
    state = jax.jit(made.algorithm.init)(made.key, made.params, made.data.train)
    _, info = jax.jit(made.algorithm.step)(made.key, state, made.data.train)
    rows = int(made.data.train.sizes[0])
    assert info["forward_bytes"].total() == rows * 2 * 4 * 4 and info["uplink_bytes"].total() == 0
    assert 0 < float(made.evaluation(made.params)["test_loss"]) < 5


@pytest.mark.full
def test_hospitals_of_two_departments(shared_data):
    """Faults: the Taylor objective that is lost on its way, hospitals that are pooled, rows that were not aligned."""
    settings = [f"data.directory={shared_data / 'heart_disease'}", "run.devices=1"]
    made = build(load("experiments/vertical_hospitals.toml", settings))
    assert made.data.columns == (9, 20) and made.data.train.size == 4
    whole = build(load("experiments/heart_disease.toml", settings)).data.train
    sizes, all_sizes = (np.asarray(data.sizes) for data in (made.data.train, whole))
    assert (sizes == np.round(0.9 * all_sizes)).all()
    start = jax.tree.map(lambda leaf: leaf + 1, made.params)  # far from 0, where the two losses are the same
    state = jax.jit(made.algorithm.init)(made.key, start, made.data.train)
    after = jax.jit(made.algorithm.step)(made.key, state, made.data.train)[0]
    exact = build(load("experiments/vertical_hospitals.toml", [*settings, "algorithm.objective=exact"])).algorithm
    other = jax.jit(exact.step)(made.key, state, made.data.train)[0]
    one, two = (algorithm.params(x)["bias"] for algorithm, x in ((made.algorithm, after), (exact, other)))
    assert abs(float(one[0] - two[0])) > 1e-3


@pytest.mark.parametrize(
    "settings, told",
    [
        (["transform.top_k.share=0.5"], "none with one consortium"),
        (["data.with_parties.widths=[3, 3]"], "add up to the 30 features"),
        (
            ["algorithm.forward={name='gaussian_mechanism', clip_norm=1.0, noise_multiplier=1.0}"],
            "noise on each message",
        ),
    ],
)
def test_what_does_not_fit(settings, told):
    """Faults: a refusal without its reason, or none."""
    with pytest.raises(ConfigError, match=told):
        build(load("experiments/vertical.toml", [*TUMOURS, *settings]))


def test_columns_are_needed():
    """Fault: a vertical model on data that nobody split."""
    small = [
        "data.name=breast_cancer",
        "model.name=vertical_linear",
        "algorithm.name=vertical",
        "sampler.cohort_size=2",
    ]
    with pytest.raises(ConfigError, match=r"with_parties"):
        build(load(None, small))
    with pytest.raises(ConfigError, match="a branch for each party"):
        build(load(None, [small[0], "data.with_parties={}", "model.name=linear", *small[2:]]))
