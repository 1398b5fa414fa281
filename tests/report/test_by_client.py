"""Results by client and by name: in the run's folder, on its page, and in comparisons."""

from __future__ import annotations

import csv
import json
import shutil
from html import escape
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import algorithms, metrics, population, run, sampling, types
from fedjax_sim.command.app import app
from fedjax_sim.metrics.evaluation import QUANTILES
from fedjax_sim.report.by_client import by_client_csv, client_rows, from_worst, read_by_client
from fedjax_sim.report.page import write_report
from fedjax_sim.running.arguments import evaluated
from fedjax_sim.running.files import CheckpointError
from tests.refusals import refused

HOSPITALS = ("Aalst", "Bruges", "<b>Ghent", "Leuven", "Mons")
RUN = """
[data]
name = "table"
file = "patients.csv"
client = "hospital"
label = "ill"
task = "binary"
[data.with_local_test]
fraction = 0.4
[model]
name = "linear"
[client_optimizer]
name = "sgd"
learning_rate = 0.1
[sampler]
name = "cyclic"
cohort_size = 2
[algorithm]
name = "ditto"
num_steps = 1
batch_size = 4
[run]
rounds = 1
evaluate_every = 1
devices = 1
"""


def call(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table of five hospitals of unequal sizes, and a config."""
    folder = tmp_path_factory.mktemp("hospitals")
    rng = np.random.default_rng(0)
    with open(folder / "patients.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["hospital", "age", "dose", "ill"])
        for i, name in enumerate(HOSPITALS):
            for _ in range(12 + 4 * i):
                x = rng.normal(size=2)
                table.writerow([name, *x.round(3), int(x.sum() + 0.3 * i > 0)])
    (folder / "run.toml").write_text(RUN.replace("patients.csv", str(folder / "patients.csv")))
    return folder


@pytest.fixture(scope="module")
def done(folder):
    """A run whose second client cohort has not trained yet, so that some clients are newcomers."""
    call("run", folder / "run.toml", "--out", folder / "a", "-q")
    return folder / "a"


def weighted(rows, metric, count):
    there = [row for row in rows if row[metric] is not None]
    return np.average([row[metric] for row in there], weights=[row[count] for row in there])


def test_results_of_a_run(done):
    """Catches results of another client or round, of the global model for those of own models, and a row count that
    is of another part."""
    rows = read_by_client(done)
    summary = json.loads((done / "summary.json").read_text())
    assert [row["name"] for row in rows] == sorted(HOSPITALS)
    assert [row["client"] for row in rows] == [row["held_out_client"] for row in rows] == list(range(5))
    with open(done.parent / "patients.csv", newline="") as file:
        names = [line["hospital"] for line in csv.DictReader(file)]
    for row in rows:
        assert row["training_rows"] + row["held_out_rows"] + row["local_test_rows"] == names.count(row["name"])
    for group, count in (("held_out", "held_out_rows"), ("local_test", "local_test_rows")):
        for metric in ("accuracy", "loss"):
            name = f"{group}_{metric}"
            np.testing.assert_allclose(weighted(rows, name, count), float(summary[name]), rtol=1e-6)
            quantiles = np.quantile([row[name] for row in rows], QUANTILES)
            np.testing.assert_allclose(quantiles, summary[f"{name}_quantiles"], rtol=1e-6)
    trained = [row for row in rows if row["personal_loss"] is not None]
    assert len(trained) == summary["personal_clients"] == 2
    assert all((row["personal_loss"] is None) != (row["newcomer_loss"] is None) for row in rows)
    assert all(row["personal_loss"] != row["local_test_loss"] for row in trained)
    for name in ("personal_loss", "newcomer_loss"):
        np.testing.assert_allclose(weighted(rows, name, "local_test_rows"), float(summary[name]), rtol=1e-6)


@pytest.mark.full  # by default the run that was resumed after its end
def test_a_resumed_run_has_the_same_results(done, folder):
    """Catches results of the round in which a run was stopped, or none after a resume."""
    other = folder / "resumed"
    call("run", folder / "run.toml", "--out", other, "-q", "--set", "run.rounds=2")
    whole = (other / "by_client.csv").read_bytes()
    again = shutil.copytree(done, folder / "again")
    assert (again / "by_client.csv").read_bytes() != whole
    call("run", "--resume", "--out", again, "-q", "--set", "run.rounds=2")
    assert (again / "by_client.csv").read_bytes() == whole


def test_the_page_has_every_client(done):
    """Catches a name that is not escaped, a client that is missing, and an order that is not that of results."""
    page = (done / "report.html").read_text()
    rows = from_worst(read_by_client(done), "owner_accuracy")  # which newcomers have too
    section = page.split("Results by client")[1].split("</table>")[0]
    places = [section.index(escape(row["name"])) for row in rows]
    assert places == sorted(places) and "<b>Ghent" not in page
    assert "No epsilon" not in section


def test_a_changed_file_is_refused(done, tmp_path):
    """Catches a result that somebody edited."""
    for name in ("by_client.csv", "SHA256SUMS", "config.toml"):
        (tmp_path / name).write_bytes((done / name).read_bytes())
    text = (tmp_path / "by_client.csv").read_text()
    (tmp_path / "by_client.csv").write_text(text.replace("Mons", "Ghent"))
    with pytest.raises(CheckpointError, match="damaged or edited"):
        write_report(tmp_path)


@pytest.mark.parametrize("text", ["", "client\n0\n", "client,held_out_client,name,x\n0,0,a,b\n", "\xff", '"'])
def test_a_file_of_something_else_is_not_shown(text, tmp_path):
    """Catches a traceback for a page, where the rest of the run could be shown."""
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "by_client.csv").write_bytes(text.encode("latin-1"))
    assert read_by_client(tmp_path) == []
    write_report(tmp_path)


def test_a_private_page_says_that_no_epsilon_covers_results(tmp_path):
    """Catches results of clients that seem to be private, since the page states an epsilon."""
    rows = [{"client": 0, "held_out_client": None, "name": "Ghent", "local_test_loss": 0.5}]
    (tmp_path / "by_client.csv").write_text(by_client_csv(rows))
    (tmp_path / "summary.json").write_text(json.dumps({"privacy": {"epsilon": 1.0, "statement": "epsilon 1"}}))
    page = write_report(tmp_path).read_text()
    assert "No epsilon covers these results" in page
    assert "results by client" in page.split("This page shows, and no epsilon covers:")[1].split("</p>")[0]


@pytest.mark.parametrize("parts", [{"transform": SimpleNamespace(noise=object())}, None, {}])
def test_who_took_part_in_a_private_run_is_not_told(parts):
    """Catches results of newcomers by client, which list the cohorts that noise is to hide."""
    algorithm = types.Algorithm(None, None, params=lambda state: state, parts=parts)
    own = results(personal_loss=[1.0, None], newcomer_loss=[None, 2.0], local_test_loss=[3.0, 4.0])
    own |= results(owner_loss=[1.0, 2.0])
    for groups, told in ((own, ["local_test"]), ({"personal": own["personal"]}, ["personal"])):
        evaluation = metrics.Evaluation(lambda params, state, groups=groups: ({}, groups))
        _, by_client = evaluated(evaluation, algorithm, (), {})
        assert list(by_client) == (list(groups) if parts == {} else told)


def results(**values):
    """Results by group: a number for each client, None for one without."""
    groups = {}
    for name, numbers in values.items():
        group = next(
            group for group in ("held_out", "local_test", "personal", "newcomer", "owner") if name.startswith(group)
        )
        masked = np.ma.masked_invalid(np.array([np.nan if x is None else x for x in numbers], np.float32))
        groups.setdefault(group, {})[name] = masked
    return groups


def test_rows_of_clients():
    """Catches held-out results beside the client of the same number, where names say that it is another one."""
    site = {n: {"x": np.ones((n, 1)), "y": np.zeros(n, int)} for n in range(6)}
    train, test = {"a": site[3], "b": site[1], "c": site[2]}, {"c": site[5], "new": site[4]}
    data = population.from_sites(train, test, task="binary", num_outputs=1, name="toy")
    found = client_rows(data, results(held_out_loss=[5.0, 4.0]))
    header = ("client", "held_out_client", "name", "training_rows", "held_out_rows", "held_out_loss")
    assert found == [
        dict(zip(header, values, strict=True))
        for values in (
            (0, None, "a", 3, None, None),
            (1, None, "b", 1, None, None),
            (2, 0, "c", 2, 5, 5.0),
            (None, 1, "new", None, 4, 4.0),
        )
    ]
    unnamed = data._replace(client_names=None, held_out_names=None)
    found = client_rows(unnamed, results(held_out_loss=[5.0, 4.0]))
    assert [row["client"] for row in found] == [None, None] and [row["held_out_rows"] for row in found] == [5, 4]
    assert client_rows(data, {}) == []
    twice = data._replace(client_names=("c", "c", "b"))
    assert [row["held_out_loss"] for row in client_rows(twice, results(held_out_loss=[5.0, 4.0]))] == [5.0, 4.0]
    with refused("data.client_names", rule="3 clients"):
        client_rows(data._replace(client_names=("a",)), results(held_out_loss=[5.0, 4.0]))


def test_from_the_worst():
    """Catches the best results called the worst, and a diverged client that is lost among those without rows."""
    rows = [{"loss": 1.0, "accuracy": 0.9}, {"loss": None, "accuracy": None}, {"loss": 3.0, "accuracy": 0.1}]
    rows.append({"loss": float("nan"), "accuracy": 0.5})
    assert [row["loss"] for row in from_worst(rows, "loss")][1:] == [3.0, 1.0, None]
    assert [row["accuracy"] for row in from_worst(rows, "accuracy")] == [0.1, 0.5, 0.9, None]


@pytest.mark.full  # by default tests/sweeps/test_clients_of_runs.py compares made results
def test_runs_are_compared_by_client(done, folder, tmp_path):
    """Catches a comparison that leaves clients out, in the terminal, in a file and on the page."""
    other = folder / "faster"
    call("run", folder / "run.toml", "--out", other, "-q", "--set", "client_optimizer.learning_rate=0.2")
    output = call("compare", done, other, "--out", tmp_path / "compared.html")
    page = (tmp_path / "compared.html").read_text()
    for name in HOSPITALS:
        assert name in output and escape(name) in page
    assert "<b>Ghent" not in page
    lines = list(csv.DictReader(call("compare", done, other, "--by-client", "--format", "csv").splitlines()))
    first, second = ({row["name"]: row["owner_accuracy"] for row in read_by_client(x)} for x in (done, other))
    gaps = {line["client"]: float(line["difference"]) for line in lines if line["run"] == "faster"}
    assert gaps == {name: second[name] - first[name] for name in HOSPITALS}


def test_a_run_that_was_resumed_after_its_end(tmp_path):
    """Catches a history without results, where no round was left to be evaluated after."""
    clients = population.quadratic_population([1.0] * 4, [0.0, 1.0] * 2)
    fedavg = algorithms.fedavg(population.quadratic_loss, sampling.full(4), optax.sgd(0.1), num_steps=1)
    evaluation = metrics.evaluation(population.quadratic_loss, held_out=clients)
    arguments = (jax.random.key(0), fedavg, {"w": np.ones(1, np.float32)}, clients, 2)
    _, first = run(*arguments, evaluation=evaluation, directory=tmp_path)
    _, again = run(*arguments, evaluation=evaluation, directory=tmp_path, resume=True)
    losses = first.by_client["held_out"]["held_out_loss"]
    assert again.by_client["held_out"]["held_out_loss"].tolist() == losses.tolist() and len(set(losses.tolist())) == 2
    np.testing.assert_allclose(losses.mean(), first.summary["held_out_loss"], rtol=1e-6)
