"""The table of devices: who gets it, when it is needed, and what is refused."""

from __future__ import annotations

import pytest

from fedjax_sim import algorithms
from fedjax_sim.config import registry
from fedjax_sim.config.build import Builder
from fedjax_sim.config.document import ConfigError, load
from fedjax_sim.config.signatures import Argument
from tests.laws import cases

SMALL = ["data.num_clients=40", "data.held_out_clients=3", "sampler.cohort_size=10", "model.hidden=[4]"]
SMALL += ["run.devices=1"]
ALIKE = "devices.name=heterogeneous"
FAST = [f"devices.{name}=1e6" for name in ("bandwidth_up", "bandwidth_down")]
SPREAD = "devices.speed={name='lognormal', median=1e9, sigma=1.0}"


@pytest.fixture
def timed(monkeypatch):
    """An algorithm "timed" that takes devices; returns those that it was given, and a way to make them optional."""
    given = []

    def made(*args, devices=None, **options):
        given.append(devices)
        return algorithms.fedavg(*args, **options)

    known = registry.parts_of_table("algorithm")
    fedavg, table = known["fedavg"], registry.parts_of_table

    def put(required=True):
        timed = {"name": "timed", "parts": fedavg.parts | {"devices": Argument("Devices", required)}}
        timed["module"] = "fedjax_sim.algorithms"
        found = {**known, "timed": fedavg._replace(**timed)}
        monkeypatch.setattr(registry, "parts_of_table", lambda name: found if name == "algorithm" else table(name))
        monkeypatch.setattr(algorithms, "timed", made, raising=False)
        return given

    return put


def test_devices_reach_those_who_take_them(timed, tmp_path):
    """Catches devices of another population or seed than the run's, and options that a file does not give back."""
    given = timed()
    config = load(None, [*SMALL, "algorithm.name=timed", "seed=3", ALIKE, *FAST, SPREAD])
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load(tmp_path / "config.toml") == config
    assert config.resolved()["devices"]["speed"] == {"name": "lognormal", "median": 1e9, "sigma": 1.0}
    assert "seed" not in config.resolved()["devices"]
    other = load(None, [*SMALL, "algorithm.name=timed", "seed=3", ALIKE, *FAST, SPREAD.replace("1e9", "2e9")])
    assert other.identity() != config.identity()
    builder = Builder(config)
    builder.experiment()
    assert {devices.population_size for devices in given} == {40} and builder.tables["seed"] == 3


@pytest.mark.parametrize(
    "name, settings, told",
    [
        ("timed", [], r"devices: expected a table with a name, got nothing. timed needs it: .*heterogeneous"),
        ("timed", [SPREAD], r"devices.name: expected one of .*heterogeneous.*, got nothing"),
        ("timed", ["devices.name=heterogenous"], "Did you mean 'heterogeneous'"),
        (
            "timed",
            [ALIKE, *FAST],
            r"devices.speed: expected a table with a name or a number, got nothing. Write \{name =",
        ),
        (
            "timed",
            [ALIKE, *FAST, SPREAD.replace("1.0", "-1.0")],
            r"devices.speed.sigma: expected a number in \[0, 16\]",
        ),
        (
            "timed",
            [ALIKE, *FAST, "devices.speed={name='constant', value=0.0}"],
            "devices.speed: expected a distribution",
        ),
        ("timed", [ALIKE, *FAST, SPREAD, "devices.jitter=nan"], "devices.jitter: expected a finite number, got nan"),
        (
            "timed",
            [ALIKE, *FAST, SPREAD, "devices.availability=alawys"],
            "availability: expected a table with a name, got .alawys",
        ),
        (
            "fedavg",
            [ALIKE],
            "devices: expected no such table, got .*takes them: add .sampler.with_clock",
        ),
    ],
)
def test_wrong_devices(timed, name, settings, told):
    """Catches devices that a config states and nobody reads, or that are needed and silently absent."""
    timed()
    with pytest.raises(ConfigError, match=told):
        Builder(load(None, [*SMALL, f"algorithm.name={name}", *settings])).experiment()


def test_devices_may_be_optional(timed):
    """Catches a table that every algorithm with simulated time would need."""
    given = timed(required=False)
    Builder(load(None, [*SMALL, "algorithm.name=timed"])).experiment()
    assert set(given) == {None}


@pytest.mark.every_row
@pytest.mark.parametrize("kind", ["devices", "speed", "availability"])
def test_every_device_builds(timed, kind):
    """Catches devices, a law or a condition that a config can name but not build."""
    timed()
    options = registry.parts_of_table("devices")["heterogeneous"].options
    names = registry.parts_of_table("devices") if kind == "devices" else registry.named(options[kind].kind)
    assert len(names) > 4
    for name in names:
        table = f"{{{', '.join([f'name={name!r}', *cases.CASES['network'][name].config])}}}"
        if kind == "devices" and name != "heterogeneous":
            settings = [f"devices={table}"]
        else:
            settings = [ALIKE, *FAST] + [SPREAD] * (kind != "speed") + [f"devices.{kind}={table}"] * (kind != "devices")
        made = Builder(load(None, ["algorithm.name=timed", *settings, *SMALL]))
        made.devices = made.make("devices", population_size=40)
        assert made.problems == [] and made.devices.population_size == 40, name
