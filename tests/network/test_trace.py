"""Availability from a file of intervals, against a list of seconds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_sim import aggregation, algorithms, network, population, sampling, transform
from fedjax_sim.network import csv_file
from fedjax_sim.privacy import mechanism_of
from tests.refusals import refused

FILE = """client,start,end,why
b,10,20,night
a,0,3.5,
b,2.2,5,overlaps
b,4,8,
a,25,30,
c,7,7,empty
b,20,21,touches
d,0,1,
"""
INTERVALS = [[(2.2, 8), (10, 21)], [(0, 3.5), (25, 30)], [], [(0, 1)]]  # of b, a, c, d: as they first appear


def written(folder, text=FILE):
    path = folder / "trace.csv"
    path.write_text(text)
    return str(path)


def listed(client, second, period):
    return any(start <= second % period < end for start, end in INTERVALS[client % 4])


def test_intervals_of_nobody(tmp_path):
    """Catches a client whose id is missing, and who is one client in all such rows."""
    path = written(tmp_path, FILE.replace("a,25", ",25"))
    with refused("client", value="", rule="row 5"):
        network.trace(path, client="client", start="start", end="end")


@pytest.mark.parametrize("period", [None, 30, 47])
def test_every_second(tmp_path, period):
    """Every second of three periods, for clients who share the file's. Catches ends that count, gaps, other owners."""
    condition, length = network.trace(written(tmp_path), period_seconds=period), period or 30
    at, ids = jax.jit(condition.at), jnp.arange(9)
    for second in range(3 * length):
        expected = [listed(client, second, length) for client in range(9)]
        assert at(ids, jnp.int32(second)).tolist() == expected, second
    times = jnp.arange(9, dtype=jnp.int32) * 3  # a time for each client
    assert at(ids, times).tolist() == [listed(i, 3 * i, length) for i in range(9)]


def test_shares_are_exact(tmp_path):
    """Whole seconds of presence over the period. Catches overlaps counted twice, and shares of other clients."""
    condition = network.trace(written(tmp_path), period_seconds=40)
    expected = [np.mean([listed(client, second, 40) for second in range(40)]) for client in range(9)]
    np.testing.assert_allclose(condition.rate(np.arange(9)), expected, rtol=1e-12)


def test_a_share_is_no_chance(tmp_path):
    """A client that is there for 21 seconds of a year, all of which a run sees: what asks for its chance is refused,
    behind other wrappers too. Catches a weight of a year over 21 seconds, and an epsilon by that chance."""
    there = network.trace(written(tmp_path), period_seconds=365 * 86_400)
    assert 0 < there.rate(np.zeros(1, int))[0] < 1e-6 < float(there.at(jnp.zeros(1, int), 15)[0])
    devices = network.heterogeneous(8, speed=1e9, bandwidth_down=1e6, bandwidth_up=1e6, availability=there)
    timed = sampling.with_clock(sampling.poisson(8, 0.5), devices)
    for sampler in (timed, sampling.with_deadline(timed, 1.0), sampling.with_hazard(timed, network.memoryless(9.0))):
        for ask in (sampler.design.inclusion_probabilities, sampler.design.check_known):
            with refused("design.response", value="others"):
                ask()
        with refused("design.response", value="others"):
            aggregation.horvitz_thompson(sampler.design, 8.0)
        private = {"weighting": "uniform", "transform": transform.gaussian_mechanism(1.0, 1.0), "num_steps": 1}
        rule = aggregation.fixed_mean(4.0)
        made = algorithms.fedavg(population.quadratic_loss, sampler, optax.sgd(0.1), aggregator=rule, **private)
        with pytest.raises(ValueError, match="no client decides who else takes part"):
            mechanism_of(made, dimension=1)


def test_times_since_another_moment(tmp_path):
    """Unix times. Catches a file that loads, and whose clients then are not there for 54 years."""
    path = written(tmp_path, "client,start,end\na,1709286000.5,1709289600.25\nb,1709286100,1709289700\n")
    with refused("start", value="54.2 years", hint="origin"):
        network.trace(path)
    condition = network.trace(path, origin=1709286000.0)
    assert condition.at(jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 99, 100])).tolist() == [False, True, False, True]
    assert condition.rate(np.arange(2)).tolist() == [3600 / 3700] * 2
    with refused("start", rule="1709286001 in row 1"):
        network.trace(path, origin=1709286001.0)


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("mark", [",", ";"])
def test_dates(tmp_path, mark):
    """By hand: dates, with and without zones, parts of seconds, behind a byte order mark. Catches a local zone, a zone
    that is not read, a day that is a month, and dates that are numbers since 1970."""
    lines = [
        "client,start,end",
        "a,2024-03-01 09:40:00,2024-03-01T10:40:00Z",
        "b,2024-03-01T10:40:00.5+01:00,20240302T0940",
    ]
    path = written(tmp_path, "\ufeff" + "\n".join(lines).replace(",", mark))
    condition = network.trace(path, unit="date", origin="2024-03-01 09:40", period_seconds=86_400)
    ids, at = jnp.array([0, 0, 1, 1]), jnp.array([0, 3600, 0, 1])
    assert condition.at(ids, at).tolist() == [True, False, False, True]
    assert condition.rate(np.arange(2)).tolist() == [3600 / 86_400, 86_399 / 86_400]
    plain = network.trace(written(tmp_path, "client,start,end\na,0,3600\nb,0.5,86400\n"), period_seconds=86_400)
    pairs = np.repeat(np.arange(2), 48), np.tile(np.arange(0, 86_400, 1800), 2)
    assert condition.at(*pairs).tolist() == plain.at(*pairs).tolist()


@pytest.mark.parametrize(
    "row, options, told",
    [
        ("a,2024-03-01,2024-03-02", {"unit": "date"}, "origin: expected the date .*, got 0.0. .* at '2024-03-01'"),
        (
            "a,2024-03-01,2024-03-02",
            {},
            "start: expected a finite number >= 0 in row 1, got '2024-03-01'. .*unit = 'date'",
        ),
        ("a,2024-03-01,2024-03-02", {"origin": "2024-03-01"}, "origin: expected a number of s, .*unit = 'date'"),
        (
            "a,01.03.2024,02.03.2024",
            {"unit": "date", "origin": "2024-03-01"},
            "start in row 1: expected a date such as",
        ),
        ("a,2024-03-01,2024-03-02", {"unit": "date", "origin": "March"}, "origin: expected a date such as"),
        (
            "a,2024-03-01,2024-03-02",
            {"unit": "date", "origin": "2024-03-02"},
            "start: expected no date before the origin",
        ),
        ("a,2024-03-01,2024-02-29", {"unit": "date", "origin": "2024-02-01"}, "end: expected no end before the start"),
    ],
)
def test_wrong_dates(tmp_path, row, options, told):
    """Catches a date that is guessed, and one that stands for another moment."""
    with pytest.raises(ValueError, match=told):
        network.trace(written(tmp_path, f"client,start,end\n{row}\n"), **options)


def test_first_clients(tmp_path, monkeypatch):
    """A file with more intervals than programs hold. Catches intervals of others, and late ones that are lost."""
    condition = network.trace(written(tmp_path), max_clients=2, period_seconds=30)
    found = condition.at(np.tile(np.arange(4), 30), np.repeat(np.arange(30), 4))
    assert found.tolist() == [listed(client % 2, second, 30) for second in range(30) for client in range(4)]
    monkeypatch.setattr(csv_file, "MOST_ROWS", 7)
    with refused("path", value=8, rule="1 to 7 rows", hint="max_clients"):
        network.trace(str(tmp_path / "trace.csv"))
    assert network.trace(str(tmp_path / "trace.csv"), max_clients=3).rate(np.arange(3)).tolist()[2] == 0


def test_units(tmp_path):
    """Hours that are whole seconds stay so. Catches 0.07 * 3600 = 252.00000000000003 rounded up."""
    text = "id,from,to\nx,0.07,0.14\n"
    condition = network.trace(written(tmp_path, text), client="id", start="from", end="to", unit="h")
    found = condition.at(jnp.zeros(504, jnp.int32), jnp.arange(504))
    np.testing.assert_array_equal(np.flatnonzero(found), np.arange(252, 504))


@pytest.mark.parametrize(
    "text, options, told",
    [
        ("client,start,end\na,5,4\n", {}, "end: expected no end before the start in row 1, got '4'"),
        ("client,start,end\na,-1,4\n", {}, "start: expected a finite number >= 0 in row 1, got '-1'"),
        ("client,start,end\na,1,inf\n", {}, "end: expected a finite number >= 0 in row 1, got 'inf'"),
        (FILE, {"period_seconds": 29}, "period_seconds: expected an integer in .30, .* It holds all intervals"),
        ("client,start,end\na,0,3e9\n", {}, r"end: expected times within 2\^31 seconds .* If they are milliseconds"),
        (FILE, {"unit": "days"}, "unit: expected one of 's', 'ms'"),
        (FILE, {"client": "id"}, "client: expected one of the file's columns client, start, end, why, got 'id'"),
    ],
)
def test_wrong_input(tmp_path, text, options, told):
    """Catches an interval that is silently never."""
    with pytest.raises(ValueError, match=told):
        network.trace(written(tmp_path, text), **options)
