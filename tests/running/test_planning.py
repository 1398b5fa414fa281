"""Forecasts: bytes that grow as they must, refusals with numbers, the faster plan."""

from __future__ import annotations

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import aggregation, algorithms, engine, run, sampling
from fedjax_sim.command.app import app
from fedjax_sim.running import planning
from tests.laws import problems as p

pytestmark = pytest.mark.optimised

KEY = jax.random.key(0)
PARAMS = jnp.array(p.START)


def algorithm(num_slots: int, rule=None, plan=p.PLAN):
    """FedSGD; `gather` keeps a buffer [m, d], so its memory must grow with the cohort."""
    aggregator = aggregation.gather(lambda key, updates, weights, ids: updates.mean(0)) if rule else aggregation.mean()
    sampler = sampling.uniform(p.NUM_CLIENTS, num_slots)
    return algorithms.fedsgd(p.linear_loss, sampler, optax.sgd(0.1), aggregator=aggregator, plan=plan, mesh=None)


@pytest.mark.full
def test_needs_count_the_population_and_the_buffer():
    """Catches bytes of one leaf, and a buffer that is not counted."""
    small, large = (planning.round_needs(algorithm(m, "gather"), KEY, PARAMS, p.ragged()) for m in (2, 20))
    population = sum(x.nbytes for x in jax.tree.leaves(p.ragged()))
    assert population <= small.arguments < population + 1000
    assert large.temporary - small.temporary >= 18 * PARAMS.nbytes
    assert small.total == small.arguments + small.temporary + small.results


@pytest.mark.full
def test_a_run_that_cannot_fit_is_refused(monkeypatch, tmp_path):
    """Catches a run that starts all the same, and a refusal without numbers."""
    monkeypatch.setattr(engine, "total_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"the 1,000 bytes .* got [\d,]+:.* at work"):
        run(KEY, algorithm(4), PARAMS, p.ragged(), 2)
    with pytest.raises(MemoryError, match="at most the 1,000 bytes"):
        planning.forecast(algorithm(4), KEY, PARAMS, p.ragged())


def test_total_memory_is_within_the_machine():
    """Catches a limit of a container read as text, and pages that are not bytes."""
    assert 1 << 28 < engine.total_memory() < 1 << 46


def test_largest_cohort_is_where_the_bytes_end(monkeypatch):
    """Bytes of 100 + 7 m. Catches a cohort that is too large by the constant part."""
    monkeypatch.setattr(engine, "total_memory", lambda: 1000)
    monkeypatch.setattr(planning, "_total", lambda m: 100 + 7 * m)
    assert planning.largest_cohort(lambda m: m, 10) == 128


def test_trial_takes_the_fastest(monkeypatch):
    """Catches a trial that ends at the first slower plan, or keeps the last."""
    seconds = {1: 5.0, 2: 3.0, 4: 4.0, 8: 2.0, 16: 2.5, 32: 3.0, 64: 0.1}
    seen = []

    def timed(compiled, *rest):
        seen.append(compiled.lanes)
        return seconds[compiled.lanes]

    monkeypatch.setattr(planning, "_started", lambda *rest: None)
    monkeypatch.setattr(planning, "_compiled", lambda made, *rest: types.SimpleNamespace(lanes=made))
    monkeypatch.setattr(engine, "needs", lambda compiled: engine.Needs(0, 0, 0))
    monkeypatch.setattr(planning, "_seconds", timed)
    assert planning.fastest(lambda plan: plan.lanes, KEY, PARAMS, None) == engine.Plan(8, 8)
    assert seen == [1, 2, 4, 8, 16, 32]


@pytest.mark.full  # by default a plan from the command line
@pytest.mark.optimised(False)
def test_forecast_leaves_the_arguments_usable():
    """Catches a donated population or parameters."""
    population = p.ragged()
    found = planning.forecast(algorithm(4), KEY, PARAMS, population)
    assert found.round_seconds > 0 and found.needs.total < found.limit
    assert np.isfinite(np.asarray(PARAMS)).all() and population.client(0).mask.any()


@pytest.mark.optimised(False)
@pytest.mark.parametrize("chosen", ["auto", pytest.param("trial", marks=pytest.mark.full)])
def test_plan_command(monkeypatch, chosen):
    """As a user: clients at once, memory, cohort, time; a wrong config is refused as by run.

    Catches a cohort that is set a second time beside a setting with spaces, and then said to be refused."""
    monkeypatch.setattr(planning, "LANES", (1, 4))
    monkeypatch.setattr(planning, "TRIAL_SECONDS", 0.01)
    small = ["data.name=mean_estimation", "data.num_clients=400", "model.name=linear", "sampler.cohort_size = 20"]
    options = [x for s in small for x in ("--set", s)]
    done = CliRunner().invoke(app, ["plan", *options, "--set", f"run.plan={chosen}"])
    assert done.exit_code == 0, done.output
    assert re.search(r"clients at once +\d+ on each of \d", done.output)
    assert re.search(r"largest cohort +400 \(all\)", done.output) and "compilation" in done.output
    assert CliRunner().invoke(app, ["plan", "--set", "run.plan=best"]).exit_code == 2


@pytest.mark.full  # by default a plan of another config
@pytest.mark.optimised(False)
def test_a_plan_where_twice_the_cohort_is_refused():
    """Catches a plan that refuses a config for a cohort which nobody asked for, here since twice the sum would wrap;
    and one that says nothing of the largest cohort."""
    small = ["data.name=mean_estimation", "data.num_clients=400", "model.name=linear", "sampler.cohort_size=16"]
    small += [f"transform.quantize.{text}" for text in ("bits=8", "integers=true", "range=1.0")]
    small += [f"aggregator.{text}" for text in ("name=modular_sum", "denominator=16.0", "modulus_bits=12")]
    options = [x for s in (*small, "algorithm.weighting=uniform") for x in ("--set", s)]
    done = CliRunner().invoke(app, ["plan", *options])
    assert done.exit_code == 0, done.output
    assert "clients at once" in done.output
    assert re.search(r"largest cohort +unknown, for 32 are refused\. aggregator", done.output), done.output
