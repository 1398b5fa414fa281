"""The study of time to a target: exact times of rounds, runs that are those of `run`, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_sim import theory
from fedjax_sim.running.loop import run
from fedjax_sim.study.findings import rows_of
from fedjax_sim.study.time_to_target import question
from fedjax_sim.study.time_to_target.claims import time_to_target_claims
from fedjax_sim.study.time_to_target.figure import time_to_target_figure
from fedjax_sim.study.time_to_target.servers import field, servers
from fedjax_sim.study.watched_runs import Watched, watched_runs
from fedjax_sim.types import Algorithm, Count

SMALL = {"num_clients": 60, "cohort_size": 8, "num_steps": 3, "num_rounds": 60, "num_runs": 3, "target": 0.5}


@pytest.fixture(scope="module")
def has():
    return field(jax.random.key(0), num_clients=60, alpha=0.3, sigma=1.0, num_steps=3, learning_rate=0.1, cohort_size=8,
                 seed=0)  # fmt: skip


@pytest.fixture(scope="module")
def some(has):
    """One server, so that one program is compiled: partial work at a deadline."""
    server = servers(has, 0.7)["deadline, partial"]
    return server, question.watched(jax.random.key(1), has, server, 60, 3)


@pytest.mark.full
def test_a_deadlines_rounds_are_order_statistics(some):
    """Fault: a time of partial work, or a number of messages, that is not the population's."""
    server, runs = some
    found = list(question.steps_of("deadline, partial", server, runs))
    rows = rows_of(found)
    assert len(rows) == 2 and all(row["holds"] for row in rows)
    assert server.predicted["messages"] < 8  # some cannot even make one step


@pytest.mark.full
def test_watched_runs_are_runs(has, some):
    """Fault: keys, bytes or evaluations that are not those of `run`."""
    server, runs = some
    keys = jax.random.split(jax.random.key(1), 3)
    state, log = run(keys[1], server.algorithm, has.params, has.data.train, 60)
    for name, mine in (
        ("joules", "joules"),
        ("round_seconds", "round_seconds"),
        ("clients_reported", "clients_reported"),
    ):
        np.testing.assert_allclose([row[name] for row in log.records], runs.steps[mine][1], rtol=1e-5)
    sent = [row["uplink_bytes"] + row["downlink_bytes"] for row in log.records]
    np.testing.assert_allclose(sent, runs.steps["bytes"][1])
    accuracy = has.accuracy(server.algorithm.params(state))
    assert abs(float(accuracy) - runs.accuracy[1, -1]) <= 2 / 360


def test_until():
    """Fault: sums that belong to another evaluation, and a target that was never reached."""
    run = Watched({"bytes": np.arange(1.0, 7).reshape(1, 6)}, np.array([[0.0, 0.2, 0.6, 0.5]]), 2)
    assert run.so_far("bytes").tolist() == [[0.0, 3.0, 10.0, 21.0]]
    assert run.until(0.4, "bytes").tolist() == [6.5] and run.until(0.7, "bytes").tolist() == [np.inf]


@pytest.mark.full
def test_predictions_hold():
    """Fault: a round's seconds, messages or joules that are not the order statistics of the clients' times."""
    found = question.time_to_target(**SMALL)
    rows = found.rows()
    assert [row for row in rows if row["holds"] is False] == [] and sum(row["holds"] is True for row in rows) >= 11
    assert len({row["server"] for row in rows}) == 7 and len(found.draw().axes) == 4
    seconds = {row["server"]: row["measured"] for row in rows if row["quantity"] == "seconds a round"}
    # Three short runs have wide intervals; a comparison of points would let claims hold.
    assert {claim.holds for claim in found.claims} == {False}
    assert seconds["waits for all"] > 1.5 * max(seconds["deadline, dropped"], seconds["130 % invited"])


@pytest.mark.full
def test_it_can_tell_another_cohort(has):
    """Fault: an interval in which the slowest of one client more, or of draws with replacement, would do."""
    server = servers(has, 0.7)["waits for all"]
    runs = question.watched(jax.random.key(1), has, server, 400, 4)
    found = list(question.steps_of("waits for all", server, runs))
    times = has.ticks(server.algorithm, 3)[0] / 1000
    wrong = found[0]._replace(predicted=theory.sampled_order_statistic(times, 9, 10))
    rows = rows_of([found[0], wrong, *found[2:]])
    assert rows[0]["holds"] is True and rows[1]["holds"] is False


@pytest.mark.full
def test_claims_and_figure_of_parts(some):
    """Fault: claims or a figure that fail where a part is missing, or that hide a target that was not reached."""
    server, runs = some
    found = [
        *question.steps_of("deadline, partial", server, runs),
        *question.target_of("deadline, partial", server, runs, 0.99),
    ]
    options = {"cohort_size": 8, "target": 0.99}
    assert found[-1].quantity == "accuracy after the last step"
    for rows in (rows_of(found), []):
        assert {claim.holds for claim in time_to_target_claims(rows, options)} == {None}
        assert len(time_to_target_figure(rows, options).axes) == 4


@pytest.mark.parametrize(
    "options, words",
    [
        ({"cohort_size": 31}, "cohort_size: expected an integer"),
        ({"target": 1.5}, "target: expected"),
        ({"num_runs": 1}, "num_runs: expected an integer"),
        ({"deadline_share": float("nan")}, "deadline_share: expected"),
        ({"speed_sigma": -1.0}, "speed_sigma: expected"),
        ({"learning_rate": 0.0}, "learning_rate: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        question.time_to_target(**SMALL | options)


def test_a_run_that_diverges_is_refused():
    """Fault: means of what is not a number."""
    zero, number = jnp.float32(0), Count.of(jnp.int32(1), 8)
    info = {"uplink_bytes": number, "downlink_bytes": number, "dropped_clients": jnp.int32(1)}
    lossy = Algorithm(lambda *_: zero, lambda key, state, _: (state, info), lambda state: state)
    with pytest.raises(FloatingPointError, match="4 updates were not finite"):
        watched_runs(
            lossy, jax.random.split(jax.random.key(0), 2), zero, (), lambda params: params, num_steps=2, every=2
        )
