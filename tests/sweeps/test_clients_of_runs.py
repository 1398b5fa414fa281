"""Results of the same client in several runs."""

from __future__ import annotations

import pytest

from fedjax_sim.sweeps.by_client import clients_of_runs
from fedjax_sim.sweeps.runs import LoggedRun
from fedjax_sim.sweeps.table import as_csv, as_latex, as_markdown

RATE = "client_optimizer.learning_rate"
RECORDS = [{"round": 0, "test_loss": 2.0}, {"round": 4, "test_loss": 1.0}]


def a_run(name, seed, rate, losses, numbers=None):
    """A run with a loss for each client, by name, or by number where names are None."""
    clients = [
        {"client": (numbers or {}).get(who, i), "held_out_client": None, "name": who if isinstance(who, str) else None}
        | {"local_test_loss": loss, "local_test_rows": 3}
        for i, (who, loss) in enumerate(losses.items())
    ]
    return LoggedRun(name, seed, {RATE: rate}, RECORDS, clients)


def test_clients_are_compared_by_name():
    """Catches clients compared by their place, seeds that only one side has, and a client without a result as 0."""
    runs = [
        a_run("a0", 0, 0.1, {"Ghent": 1.0, "Mons": 2.0, "Aalst": None}),
        a_run("a1", 1, 0.1, {"Ghent": 3.0, "Mons": 2.0, "Aalst": None}),
        a_run("b1", 1, 0.2, {"Mons": 2.5, "Aalst": 9.0, "Ghent": 1.0}),
        a_run("b2", 2, 0.2, {"Mons": 90.0, "Aalst": 9.0, "Ghent": 10.0}),
    ]
    table = clients_of_runs(runs, (RATE,), 4, "test_loss")
    assert table.metric == "local_test_loss"
    found = {(row["client"], row[RATE]): (row["mean"], row["difference"], row["seeds"]) for row in table.rows}
    assert found == {
        ("Ghent", 0.1): (2.0, None, 2), ("Ghent", 0.2): (5.5, -2.0, 2),
        ("Mons", 0.1): (2.0, None, 2), ("Mons", 0.2): (46.25, 0.5, 2),
        ("Aalst", 0.1): (None, None, 0), ("Aalst", 0.2): (9.0, None, 2),
    }  # fmt: skip
    header, rows = table.texts()
    assert header == ["client", "local_test_loss, a0 ... a1", "b1 ... b2 minus the first"]
    assert rows == [["Ghent", "2", "-2"], ["Mons", "2", "+0.5"], ["Aalst", "", ""]]
    assert as_csv(table).splitlines()[1] == "Ghent,a0 ... a1,0.1,local_test_loss,2,2.0,"
    assert as_markdown(table).splitlines()[2] == "| Ghent | 2 | -2 |"
    assert as_latex(table).startswith(r"\begin{tabular}{lrr}")


@pytest.mark.parametrize(
    "second, options, words",
    [
        (a_run("b", 0, 0.2, {}), (RATE,), "b has no by_client.csv"),
        (a_run("b", 0, 0.2, {"Ghent": 1.0})._replace(records=RECORDS[:1]), (RATE,), "those of b are of another round"),
        (a_run("b", 0, 0.2, {"Mons": 1.0}), (RATE,), "different clients"),
        (a_run("b", 0, 0.2, {0: 1.0}), (RATE,), "different clients"),
    ],
)
def test_what_is_not_compared(second, options, words):
    """Catches a client compared with another one, and results of two rounds."""
    assert words in clients_of_runs([a_run("a", 0, 0.1, {"Ghent": 1.0}), second], options, 4, None)


def test_clients_without_names():
    """Catches client 0 of one partition compared with client 0 of another, and two of one name taken for one."""
    same = a_run("a", 0, 0.1, {0: 1.0, 1: 2.0}), a_run("b", 0, 0.2, {0: 1.5, 1: 2.5})
    table = clients_of_runs(same, (RATE,), 4, None)
    assert [row["client"] for row in table.rows] == ["client 0", "client 0", "client 1", "client 1"]
    assert "no names" in clients_of_runs([same[0], same[1]._replace(seed=1)], (RATE,), 4, None)
    assert "no names" in clients_of_runs(same, (RATE, "data.alpha"), 4, None)
    twice = [run._replace(clients=[{**row, "name": "Ghent"} for row in run.clients]) for run in same]
    table = clients_of_runs(twice, (RATE,), 4, None)
    assert [row["difference"] for row in table.rows] == [None, 0.5, None, 0.5]
    assert [row[0] for row in table.texts()[1]] == ["Ghent (client 0)", "Ghent (client 1)"]


def test_owners_are_compared_without_held_out_clients():
    """Catches FedAvg and `local` "of different clients": a start is not tested at held-out clients, so it has none."""
    local, shared = a_run("a", 0, 0.1, {0: 1.0, 1: 2.0}), a_run("b", 0, 0.2, {0: 1.5, 1: 2.5})
    held_out = {"client": None, "held_out_client": 0, "name": None, "local_test_loss": None, "held_out_loss": 3.0}
    clients = [{**row, "held_out_loss": None} for row in shared.clients]
    shared = shared._replace(clients=[*clients, held_out])
    for runs in ((local, shared), (shared, local)):
        table = clients_of_runs(runs, (RATE,), 4, None)
        assert [abs(row["difference"]) for row in table.rows[1::2]] == [0.5, 0.5]
    others = shared._replace(options={RATE: 0.1}, clients=[*clients, {**held_out, "held_out_client": 1}])
    assert "different clients" in clients_of_runs((shared, others), (RATE,), 4, "held_out_loss")
