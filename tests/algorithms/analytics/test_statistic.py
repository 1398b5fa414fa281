"""What all federated statistics refuse, and what they tell a reader."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_sim import algorithms, sampling
from fedjax_sim.command.summary import show_summary
from fedjax_sim.experiment.summary import MOST_NUMBERS, estimate_of
from fedjax_sim.report import sections
from tests.algorithms.analytics import problem as p
from tests.laws import cases
from tests.refusals import refused

STATISTICS = cases.named("algorithms", lambda row: not row.trains)


@pytest.mark.parametrize("name", STATISTICS)
def test_clients_are_drawn_alike(name, monkeypatch):
    """Catches rows that count twice because their clients are drawn twice as often."""
    monkeypatch.setattr(cases, "SAMPLER", sampling.weighted(np.ones(p.NUM_CLIENTS), 5))
    cases.CASES["algorithms"][name]()
    weights = np.arange(1.0, 1 + p.NUM_CLIENTS)
    for unequal in (sampling.weighted, sampling.weighted_without_replacement):
        monkeypatch.setattr(cases, "SAMPLER", unequal(weights, 5))
        with refused("sampler", rule="alike"):
            cases.CASES["algorithms"][name]()


@pytest.mark.full
def test_what_was_found_is_told(capsys):
    """Catches padding among the symbols, quantiles without their levels, and a large array that is printed or lost."""
    everybody = {"params": (), "data": p.people()}
    hitters = algorithms.heavy_hitters(p.EVERYBODY, threshold=0.2, num_symbols=4, bits_per_round=2)
    state = hitters.init(jax.random.key(0), *everybody.values())
    state, _ = jax.jit(hitters.step)(jax.random.key(1), state, p.people())
    found = estimate_of(hitters, state)["estimate"]
    assert min(found["symbols"]) >= 0 and len(found["symbols"]) == len(found["shares"]) > 0
    quantiles = algorithms.quantiles(p.EVERYBODY, low=-3.0, high=7.0, probabilities=[0.25, 0.5], column=0)
    state = quantiles.init(jax.random.key(0), *everybody.values())
    found = estimate_of(quantiles, state)["estimate"]
    assert (
        found.pop("of") == "column 0 of x" and len(found.pop("beyond")) == 4
    )  # nothing is known before the first round
    assert found == {"probabilities": [0.25, 0.5], "quantiles": [2.0, 2.0], "low": [-3.0] * 2, "high": [7.0] * 2}
    text = "".join(sections.estimate({"estimate": found}))
    assert "What was found" in text and "0.25, 0.5" in text
    wide = algorithms.kmeans(p.EVERYBODY, num_clusters=MOST_NUMBERS, input_shape=(2,))
    state = wide.init(jax.random.key(0), (), p.people())
    found = estimate_of(wide, state)
    assert found == {"estimate": {"centroids": "128 numbers, by fedjax-sim export"}}
    counts = {"rounds_seconds": 1.0, "compile_seconds": 1.0, "clients_per_second": 1.0, "peak_memory_bytes": 1}
    counts |= dict.fromkeys(("rounds", "client_visits", "uplink_bytes", "downlink_bytes", "clients_invited"), 1)
    show_summary(counts | found | {"dropped_clients": 0, "skipped_rounds": 0}, 1.0)
    assert "128 numbers" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    "make, options",
    [(algorithms.histogram, {"num_bins": 4}), (algorithms.quantiles, {"probabilities": [0.5]})],
    ids=["histogram", "quantiles"],
)
def test_a_number_that_is_none_drops_its_client(make, options):
    """Catches a NaN that counts in the first bin, or above every threshold."""
    x = p.X.copy()
    client = int(np.argmax(p.SIZES))
    x[client, 0, 0] = np.nan
    made = make(p.EVERYBODY, low=-3.0, high=7.0, column=0, **options)
    (found,), (info,) = p.rounds(made, 1, data=p.people(x=x))
    without = p.MASK.copy()
    without[client] = False
    assert info["dropped_clients"] == 1
    (expected,), _ = p.rounds(made, 1, data=p.people(mask=without))
    scale = p.NUM_CLIENTS / (p.NUM_CLIENTS - 1) if make is algorithms.histogram else 1  # a mean over who counts
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], scale * values, rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in STATISTICS if name != "heavy_hitters"])
def test_every_statistic_of_numbers_drops_it(name, monkeypatch):
    """Catches a NaN that one of them takes for a number; symbols are integers."""
    monkeypatch.setattr(cases, "SAMPLER", p.EVERYBODY)
    made = cases.CASES["algorithms"][name]()
    x = p.X.copy()
    x[int(np.argmax(p.SIZES)), 0, 0] = np.nan
    for rows, dropped in ((p.X, 0), (x, 1)):
        _, (info,) = p.rounds(made, 1, data=p.people(x=rows))
        assert info["dropped_clients"] == dropped
