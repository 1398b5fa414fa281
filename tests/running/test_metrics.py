"""What parts state about their numbers: added up by the log, shown by the terminal, the page and nobody's own list."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import aggregation, client, run, sampling, server, transform
from fedjax_sim.algorithms import federated
from fedjax_sim.command.app import app
from fedjax_sim.report.page import write_report
from fedjax_sim.running.log import totals_of
from fedjax_sim.types import Metric
from tests.laws import problems as p

pytestmark = pytest.mark.optimised(False)
RECORDS = [{"round": 1, "a": 2, "b": 10}, {"round": 2, "a": 4}, {"round": 3, "a": 9, "b": 1}]


@pytest.mark.parametrize(("pooled", "total"), [("sum", 15), ("mean", 5), ("last", 9), ("max", 9)])
def test_pooling(pooled, total):
    """Catches a mean of sums, and a total of what only the last round knows."""
    assert totals_of(RECORDS, [Metric("a", "a", pooled=pooled)]) == {"a": total}


def test_weighted_means():
    """Catches a mean over rounds of what belongs to messages, and a NaN of a round without any."""
    records = [{"gap": 1.0, "n": 3}, {"gap": "nan", "n": 0}, {"gap": 5.0, "n": 1}, {"other": 1}]
    assert totals_of(records, [Metric("gap", "gap", pooled="mean", by="n")]) == {"gap": 2.0}
    assert totals_of(records[1:2], [Metric("gap", "gap", pooled="mean", by="n")]) == {"gap": "nan"}
    assert totals_of(records, [Metric("gap", "gap", pooled="mean", by="missing")]) == {"gap": "nan"}


def test_rounds_without_it():
    """Catches a round that lacks a number and is counted as another one, or a number that no round has."""
    assert totals_of(RECORDS, [Metric("b", "b"), Metric("c", "c")]) == {"b": 11}
    assert totals_of(RECORDS, [Metric("b", "b", instead="a")]) == {"b": 15}
    assert totals_of([{"a": "nan"}], [Metric("a", "a")]) == {"a": "nan"}


def watched():
    """Three parts that count something of their own; two of them under one name."""
    rule, work = aggregation.mean(), client.local_sgd(p.linear_loss, optax.sgd(0.1), client.work(num_steps=1))

    def finalize(key, cohort, carry):
        update, metrics = rule.finalize(key, cohort, carry)
        return update, metrics | {"seen": jnp.int32(3)}

    def on_server(key, cohort, aggregate, state, measured, sensitivity):
        return aggregate, state, {"seen": jnp.float32(0.5)}

    def apply(key, broadcast, state, data):
        report, state = work.apply(key, broadcast, state, data)
        return report._replace(counts={"inner_bytes": jnp.int32(1000)}), state

    sees = transform.identity()._replace(on_server=on_server)
    return federated(
        sampling.with_dropout(sampling.full(p.NUM_CLIENTS), 0.5),
        work._replace(apply=apply).stating(metrics=(Metric("inner_bytes", "sent inside of clients", "bytes"),)),
        rule._replace(finalize=finalize).stating(metrics=(Metric("seen", "suspects", "count"),)),
        server.optimizer(optax.sgd(1.0)),
        sees.stating(metrics=(Metric("seen", "share seen", "share", "mean"),)),
        mesh=None,
    )


@pytest.mark.full
def test_own_numbers_reach_summary_and_page(tmp_path):
    """Catches a part whose numbers nobody adds up, and one that hides another's."""
    _, history = run(jax.random.key(0), watched(), jnp.array(p.START), p.ragged(), 4, directory=tmp_path)
    found = history.summary
    assert found["aggregator_seen"] == 12 and found["transform_seen"] == 0.5
    assert found["inner_bytes"] == 1000 * found["client_visits"] and found["dropped"] + found["client_visits"] == 4 * 24
    page = write_report(tmp_path).read_text()
    for text, words in (("12", "suspects"), ("50.00 %", "share seen"), ("kB", "sent inside of clients")):
        assert any(words in line and text in line for line in page.split("</div>"))
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"]["aggregator_seen"]["unit"] == "count"
    assert page.count("suspects") == 1  # among the headline figures, not once more below


@pytest.mark.full
def test_the_terminal_shows_them(tmp_path):
    """Catches a table with rows for built-in numbers only."""
    options = ["data.num_clients=200", "data.held_out_clients=5", "model.name=logistic", "run.rounds=2"]
    options += ["sampler.cohort_size=20", "sampler.with_over_invitation.num_reports=15"]
    arguments = [word for option in options for word in ("--set", option)]
    shown = CliRunner().invoke(app, ["run", *arguments, "--out", str(tmp_path / "run")])
    assert shown.exit_code == 0 and "reports that came too late" in shown.output, shown.output
