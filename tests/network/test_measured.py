"""Devices from a file: other names, other units, whole rows, and what is no table."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_sim import network
from fedjax_sim.network import csv_file
from fedjax_sim.types import Load
from tests.refusals import refused

LAYOUTS = Path(__file__).parent / "layouts"
KEY = jax.random.key(0)
PHONES = """model,ms per batch,down (Mbit/s),up,"power, W",note
slow,400,1,100,1.5,"a ""quoted"", note"
middle,200.0,8,200,2.5,

fast,1e2,16,400,4,
"""
NAMES = {"speed": "ms per batch", "speed_unit": "ms", "reference_flops": 2e8, "bandwidth_down": "down (Mbit/s)"}
NAMES |= {"bandwidth_up": 1e5, "bandwidth_unit": "Mbit/s", "compute_watts": "power, W", "latency": 0.5}
LOAD = Load(jnp.float32(1e9), jnp.float32(1e6), jnp.float32(1e5))


@pytest.fixture
def phones(tmp_path):
    path = tmp_path / "phones.csv"
    path.write_text(PHONES)
    return str(path)


def test_columns_and_units(phones):
    """By hand: client i has row i % 3. Catches times taken for speeds, bits for bytes, a unit on a plain number."""
    devices = network.measured(7, phones, **NAMES, assign="in_turn")
    spent = devices.spend(KEY, jnp.array([0, 1, 2, 3]), LOAD)
    np.testing.assert_array_equal(spent.compute, [2000, 1000, 500, 2000])
    np.testing.assert_array_equal(spent.down, [8500, 1500, 1000, 8500])
    np.testing.assert_array_equal(spent.up, [1500] * 4)
    np.testing.assert_allclose(spent.joules, [3, 2.5, 2, 3], rtol=1e-6)
    plain = {"speed": "up", "speed_unit": "2e6 flops/s", "bandwidth_down": "up", "bandwidth_up": "up"}
    spent = network.measured(7, phones, **plain, bandwidth_unit="kB/s", assign="in_turn").spend(
        KEY, jnp.arange(3), LOAD
    )
    np.testing.assert_array_equal(spent.compute, [5000, 2500, 1250])
    np.testing.assert_array_equal(spent.down, [10_000, 5000, 2500])


def test_clients_have_rows(phones):
    """Rows are equally likely (chi-square, wrong once in 10^4 seeds), stable and whole."""
    devices, ids = network.measured(30_000, phones, **NAMES), jnp.arange(30_000)
    spend = jax.jit(devices.spend)
    spent = spend(KEY, ids, LOAD)
    pairs, counts = np.unique(np.stack([spent.compute, spent.down]), axis=1, return_counts=True)
    assert pairs.T.tolist() == [[500, 1000], [1000, 1500], [2000, 8500]]
    assert stats.chisquare(counts).pvalue > 1e-4
    np.testing.assert_array_equal(spend(jax.random.key(1), ids[::-1], LOAD).down[::-1], spent.down)
    other = jax.jit(network.measured(30_000, phones, **NAMES, seed=1).spend)(KEY, ids, LOAD)
    assert 0.3 < (other.down == spent.down).mean() < 0.37


@pytest.mark.parametrize(
    "options, told",
    [
        ({"speed": "ms"}, "speed: expected one of the file's columns model, ms per batch, .*, got 'ms'"),
        ({"compute_watts": "model"}, "compute_watts: expected a finite number >= 0 in row 1, got 'slow'"),
        ({"compute_watts": "note"}, "compute_watts: expected .* in row 1"),
        ({"speed_unit": "Gflop/s"}, "speed_unit: expected one of .* Did you mean 'Gflops/s'"),
        ({"speed_unit": "2 m\ns"}, "speed_unit: expected one of .*"),
        ({"speed_unit": "Gflops/s"}, "reference_flops: expected None for a speed in flops/s, got 200000000.0"),
        ({"speed_unit": "2ms", "reference_flops": None}, "reference_flops: expected the operations that were timed"),
        ({"reference_flops": None}, "reference_flops: expected the operations that were timed, got None"),
        ({"bandwidth_unit": "0 B/s"}, "bandwidth_unit: expected a positive number before the unit"),
        ({"bandwidth_up": 0.0}, "bandwidth_up: expected a finite number > 0"),
        ({"latency": float("nan")}, "latency: expected a finite number >= 0"),
        ({"assign": "hash"}, "assign: expected one of 'random', 'in_turn'"),
    ],
)
def test_wrong_options(phones, options, told):
    """Catches a column or unit that is guessed."""
    with pytest.raises(ValueError, match=told):
        network.measured(7, phones, **NAMES | options)


def test_a_file_of_another_style(tmp_path):
    """A byte-order mark, Windows line ends, quotes inside of quotes, spaces, an empty line, seconds with decimals;
    devices and their hours in one file. By hand. Catches a name that keeps its spaces, and a shifted column."""
    path = tmp_path / "fleet.csv"
    lines = ['"device_id", "Model name", "train_s", up_mbps, down_mbps, "rtt", "from", "to"']
    lines += ['"A-1","Pixel ""6"", 8GB",0.250,12.5,48.25,0.0305,0.5,28800.75', ""]
    lines += ['"B-2","iPhone, 13",0.125, 20.0 ,100.0,0.020,"3600.0","7200.5"']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    links = {"bandwidth_up": "up_mbps", "bandwidth_down": "down_mbps", "bandwidth_unit": "Mbit/s"}
    times = {"speed": "train_s", "speed_unit": "s", "reference_flops": 1e9, "latency": "rtt", "latency_unit": "0.5 s"}
    there = network.trace(str(path), client="device_id", start="from", end="to")
    devices = network.measured(2, str(path), **links, **times, assign="in_turn", availability=there)
    spent = devices.spend(KEY, jnp.arange(2), Load(jnp.float32(1e9), jnp.float32(1e6), jnp.float32(1e6)))
    assert np.stack(spent[:3]).T.tolist() == [[182, 250, 656], [90, 125, 410]]
    assert there.rate(np.arange(2)).tolist() == [28800 / 28801, 3601 / 28801]


@pytest.mark.parametrize("mark", [";", "\t", "|", " "])
def test_other_delimiters(tmp_path, mark):
    """The same file with another delimiter. Catches one that is part of a name."""
    path = tmp_path / "other.csv"
    path.write_text("a,b\n10,4\n20,8\n".replace(",", mark))
    names = {"speed": "a", "bandwidth_down": "b", "bandwidth_up": 1.0}
    options = {"delimiter": "auto" if mark in ";\t" else "space" if mark == " " else mark}
    spent = network.measured(2, str(path), **names, **options, assign="in_turn").spend(
        KEY, jnp.arange(2), Load(jnp.float32(40), jnp.float32(8), jnp.float32(0))
    )
    assert np.stack([spent.compute, spent.down]).tolist() == [[4000, 2000], [2000, 1000]]


@pytest.mark.full
def test_samples_of_rows(tmp_path):
    """A file of more rows than programs hold: 3 of 12 rows, each in a quarter of 2,000 samples (wrong once in 10^4 for
    right code); without a sample it is refused. Catches the first rows alone, and a row that is there twice."""
    path = tmp_path / "tiles.csv"
    path.write_text("v,w\n" + "".join(f"{i},{2 * i}\n" for i in range(12)))
    counts = np.zeros(12)
    for seed in range(2000):
        table = csv_file.columns(str(path), {"x": "v", "y": "w"}, sample_rows=3, seed=seed)
        drawn = [int(x) for x in table.texts["x"]]
        assert drawn == sorted(set(drawn)) and table.rows == [x + 1 for x in drawn]
        assert [int(x) for x in table.texts["y"]] == [2 * x for x in drawn]
        counts[drawn] += 1
    assert counts.sum() == 6000 and abs(counts / 2000 - 1 / 4).max() < 4.3 * np.sqrt(3 / 16 / 2000)
    layout = (LAYOUTS / "ookla.csv").read_text().splitlines(keepends=True)
    path.write_text(layout[0] + "".join(layout[1:]) * 90_000)
    with refused("path", value=270000, hint="sample_rows = 262144"):
        network.measured(4, str(path), layout="ookla", speed=1e9)
    devices = network.measured(3000, str(path), layout="ookla", speed=1e9, sample_rows=1000)
    down = devices.spend(KEY, jnp.arange(3000), LOAD).down
    assert set(np.unique(down).tolist()) == {110, 1050} and abs((down == 110).mean() - 0.75) < 0.05


def test_rows_that_lack_a_number(tmp_path):
    """Catches a row without a number that is a device, one that is left out for a column of no use, and a row that an
    error counts by its place among those that were kept."""
    path = tmp_path / "some.csv"
    path.write_text("speed,down,note\nnull,1,\n2,,\n3,4,null\n5,x,\n")
    options = {
        "bandwidth_down": "speed",
        "speed": 1e9,
        "bandwidth_up": 1.0,
        "missing": ["null", ""],
        "assign": "in_turn",
    }
    devices = network.measured(2, str(path), **options)
    spent = devices.spend(KEY, jnp.arange(4), Load(jnp.float32(30), jnp.float32(30), jnp.float32(0)))
    assert spent.down.tolist() == [15000, 10000, 6000, 15000]
    with refused("bandwidth_down", value="x", rule="row 4"):
        network.measured(2, str(path), **options | {"bandwidth_down": "down"})


@pytest.mark.parametrize(
    "text, told",
    [
        (b"", "path: expected a CSV file with a header, got .* The file is empty"),
        (
            b"speed|x\n1|2\n",
            r"speed: .* columns speed\|x, got 'speed'. The first line has one value.* '\|'",
        ),
        (b"speed;x\n1,5;2\n", "speed: expected a finite number > 0 in row 1, got '1,5'"),
        (b'speed,x\n"1,5",2\n', "speed: expected a finite number > 0 in row 1, got '1,5'"),
        (b"speed,x\n1_0,2\n", "speed: expected a finite number > 0 in row 1, got '1_0'"),
        (b"speed,speed\n1,2\n", "speed: expected one of the file's columns speed, speed"),
        (b"speed,x\n", "path: expected 1 to 262144 rows below the header, got 0"),
        (b"speed,x\n1,2\n3\n", "path: expected 2 values in row 2, got 1"),
        (b"speed,x\n1,2\n0,3\n", "speed: expected a finite number > 0 in row 2, got '0'"),
        (b"speed,x\n1,2\nnan,3\n", "speed: expected a finite number > 0 in row 2, got 'nan'"),
        (b"speed,x\n1,2\n1e60,3\n", "speed: expected numbers that float32 holds"),
        (b"\xff\xfe", "path: expected a CSV file in UTF-8, got .*UnicodeDecodeError"),
    ],
)
def test_wrong_files(tmp_path, text, told):
    """Catches a number that is missing and becomes another one's."""
    path = tmp_path / "some.csv"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=told):
        network.measured(7, str(path), bandwidth_down=1.0, bandwidth_up=1.0)
    with refused("path", rule="UTF-8", hint="FileNotFoundError"):
        network.measured(7, str(tmp_path / "other.csv"))


@pytest.mark.parametrize(
    "layout, file, options, expected",
    [
        ("ookla", "ookla", {"speed": 1e9}, [(1000, 110, 60), (1000, 1050, 1050), (1000, 23, 7)]),
        ("mlab", "mlab", {"speed": 2e9, "bandwidth_up": 1e6}, [(500, 521, 121), (500, 10_125, 225)]),
        ("fedscale", "fedscale_capacity", {"reference_flops": 1e9}, [(486, 1000, 100), (108, 200, 20)]),
    ],
)
def test_published_layouts(layout, file, options, expected):
    """By hand, 10^9 operations, 10^6 bytes down and 10^5 up. Catches another column or unit of a published file, and a
    round trip taken for one way."""
    devices = network.measured(4, str(LAYOUTS / f"{file}.csv"), layout=layout, **options, assign="in_turn")
    spent = devices.spend(KEY, jnp.arange(len(expected)), LOAD)
    np.testing.assert_array_equal(np.stack([spent.compute, spent.down, spent.up], 1), expected)


def test_availability_of_fedscale():
    """Intervals of FedScale's behaviour trace, by the names of its columns."""
    columns = {"client": "client_id", "start": "active", "end": "inactive"}
    there = network.trace(str(LAYOUTS / "fedscale_behaviour.csv"), **columns, period_seconds=10_800)
    hours = np.stack([there.at(jnp.arange(2), jnp.int32(t * 1800)) for t in range(6)])
    np.testing.assert_array_equal(hours.T, [[1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 0]])


def test_large_weights(tmp_path):
    """Catches shares of a sum past the largest float, with which the last row is everybody's."""
    (tmp_path / "given.csv").write_text("v,w\n1e9,1e308\n2e9,1e308\n4e9,1e308\n")
    devices = network.measured(
        999, str(tmp_path / "given.csv"), speed="v", bandwidth_down=1.0, bandwidth_up=1.0, row_weight="w"
    )
    counts = np.unique(jax.jit(devices.spend)(KEY, jnp.arange(999), LOAD).compute, return_counts=True)[1]
    assert len(counts) == 3 and counts.min() > 250


def test_rows_have_weights():
    """30, 10 and 0 devices (wrong once in 10^4 seeds). Catches equal chances of tiles, and a tile without devices."""
    devices = network.measured(20_000, str(LAYOUTS / "ookla.csv"), layout="ookla", speed=1.0)
    down = devices.spend(KEY, jnp.arange(20_000), LOAD).down
    values, counts = np.unique(down, return_counts=True)
    assert values.tolist() == [110, 1050]
    assert stats.binomtest(int(counts[0]), 20_000, 0.75).pvalue > 1e-4
    plain = network.measured(20_000, str(LAYOUTS / "ookla.csv"), layout="ookla", speed=1.0, row_weight="tests")
    assert (plain.spend(KEY, jnp.arange(20_000), LOAD).down == 23).sum() > 400


@pytest.mark.parametrize(
    "layout, text, options, told",
    [
        ("ookla", None, {}, "speed: expected a number for all, or a column's name, got None. Files of layout 'ookla'"),
        ("ookla", None, {"speed": 1.0, "row_weight": "tests", "assign": "in_turn"}, "row_weight: expected None where"),
        ("mlab", None, {"speed": 1.0}, "bandwidth_up: expected a number for all"),
        ("speedtest", None, {}, "layout: expected one of 'plain', 'ookla', 'mlab', 'fedscale'"),
        ("fedscale", "computation,communication\n1,2\n", {}, "reference_flops: expected the operations"),
        ("ookla", "avg_d_kbps,avg_u_kbps,avg_lat_ms\n1,1,1\n", {"speed": 1.0}, "row_weight: expected one of the file"),
        ("ookla", "avg_d_kbps,avg_u_kbps,avg_lat_ms,devices\n1,0,1,1\n", {"speed": 1.0}, "bandwidth_up: .* in row 1"),
        ("ookla", "avg_d_kbps,avg_u_kbps,avg_lat_ms,devices\n1,1,,1\n", {"speed": 1.0}, "latency: .* in row 1, got ''"),
        ("ookla", "avg_d_kbps,avg_u_kbps,avg_lat_ms,devices\n1,1,1,0\n", {"speed": 1.0}, "row_weight: .* above 0"),
        ("ookla", "avg_d_kbps,avg_u_kbps,avg_lat_ms,devices\n1,1,1,-1\n", {"speed": 1.0}, "row_weight: .*, got '-1'"),
        ("mlab", "MeanThroughputMbps,MinRTT\nnan,1\n", {"speed": 1.0, "bandwidth_up": 1.0}, "down: .* got 'nan'"),
    ],
)
def test_wrong_layouts(tmp_path, layout, text, options, told):
    """Catches a number that a published file lacks and that is guessed, and a missing value of one of its rows."""
    (tmp_path / "given.csv").write_text(text or (LAYOUTS / f"{layout.replace('speedtest', 'mlab')}.csv").read_text())
    with pytest.raises(ValueError, match=told):
        network.measured(4, str(tmp_path / "given.csv"), layout=layout, **options)
