"""Where the wall time of a run goes: every second has a name, on a clock that the test moves."""

import json
import math
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, population, sampling
from fedjax_sim.command import app
from fedjax_sim.running import checkpoint, seconds
from fedjax_sim.running.blocks import compiled_block
from fedjax_sim.running.executables import find_round
from fedjax_sim.running.loop import run

pytestmark = pytest.mark.optimised(False)

PEOPLE = population.stored({"x": np.eye(4, dtype=np.float32), "y": np.ones(4, np.float32)}, [0, 1, 2, 4])


class Clock:
    """Time that passes by a microsecond a look, and where the test says so."""

    def __init__(self):
        self.now = self.began = 5 * seconds.NANO

    def perf_counter_ns(self):
        self.now += 1000
        return self.now

    def passes(self, count, function=lambda *arguments: None):
        """Returns the function, which takes so many seconds more."""

        def slow(*arguments, **options):
            self.now += count * seconds.NANO
            return function(*arguments, **options)

        return slow

    def total(self):
        return (self.now - self.began) / seconds.NANO


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    names = {name: getattr(time, name) for name in dir(time)} | {"perf_counter_ns": clock.perf_counter_ns}
    monkeypatch.setattr(seconds, "time", SimpleNamespace(**names))
    return clock


def loss(params, examples, key):
    return (examples["x"] @ params["w"] - examples["y"]) ** 2


def fedavg():
    return algorithms.fedavg(loss, sampling.full(3), optax.sgd(0.1), num_steps=1, batch_size=1)


def test_parts_add_up(clock):
    """Faults: time that two parts have, or none; the time of an inner part in the outer one; a part left on after an
    error; seconds before a resume that are lost."""
    with seconds.time_account(clock.now, "start") as account:
        clock.passes(2)()
        with seconds.timed_part("evaluation"):
            clock.passes(3)()
            with pytest.raises(KeyError), seconds.timed_part("logs"):
                clock.passes(4)()
                raise KeyError
            clock.passes(5)()
        account.switch("other")
        with seconds.time_account() as inner:
            assert inner is account
        clock.passes(1)()
        account.add({"rounds": 100.0, "logs": 0.5})
        found = account.seconds()
    assert [round(found[name], 3) for name in ("start", "evaluation", "logs", "other", "rounds")] == [2, 8, 4.5, 1, 100]
    assert sum(account.nanoseconds.values()) == clock.now - clock.began + round(100.5 * seconds.NANO)
    assert seconds.so_far() == {}
    with seconds.timed_part("rounds"):
        pass  # outside of an account


class Slow:
    """A logger that takes its time."""

    def __init__(self, clock):
        self.start, self.write, self.finish = (clock.passes(count) for count in (1, 2, 4))


def test_a_run_adds_up(clock, tmp_path, monkeypatch):
    """Faults: an evaluation, callback, logger, checkpoint or compilation in nobody's account; seconds of a session
    before that are lost or count twice."""
    monkeypatch.setattr(checkpoint, "save", clock.passes(30, checkpoint.save))
    monkeypatch.setattr("fedjax_sim.running.loop.compiled_block", clock.passes(500, compiled_block))
    monkeypatch.setattr("fedjax_sim.running.loop.find_round", clock.passes(20, find_round))

    def trained(rounds, **options):
        before = clock.now
        evaluation = clock.passes(7000, lambda params: {"test_loss": 1.0})
        callbacks = [clock.passes(90_000)]
        _, history = run(
            jax.random.key(0), fedavg(), {"w": np.zeros(4, np.float32)}, PEOPLE, rounds, evaluation=evaluation,
            evaluate_every=1, checkpoint_every=1, callbacks=callbacks, loggers=[Slow(clock)], directory=tmp_path,
            **options,
        )  # fmt: skip
        return history.summary["seconds"], (clock.now - before) / seconds.NANO

    found, total = trained(2)
    # Three evaluations, two calls back, three checkpoints, a logger that began and wrote thrice.
    expected = {"evaluation": 21_000, "callbacks": 180_000, "checkpoints": 90, "compilation": 520, "logs": 7}
    small = {name: value for name, value in found.items() if name not in expected}
    assert {name: round(found[name]) for name in expected} == expected
    assert max(small.values()) < 0.01 and set(found) == set(seconds.PARTS)
    # The logger finishes after the summary.
    assert math.isclose(math.fsum(found.values()) + 4, total, abs_tol=1e-3)
    again, more = trained(3, resume=True)
    for name, count in (("evaluation", 7000), ("callbacks", 90_000), ("checkpoints", 30), ("compilation", 520)):
        assert round(again[name] - found[name]) == count, name
    assert math.isclose(math.fsum(again.values()) + 4, math.fsum(found.values()) + more, abs_tol=1e-3)
    # A session that was stopped counts until its last checkpoint, which is in the checkpoint.
    (tmp_path / "summary.json").unlink()
    stopped, more = trained(4, resume=True)
    assert round(stopped["evaluation"] - again["evaluation"]) == 7000


@pytest.mark.full  # by default a run from Python adds up
def test_a_command_adds_up(clock, tmp_path, monkeypatch):
    """Faults: seconds of the start, of reading data or of the page in nobody's account; a page that differs when it is
    written again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    from fedjax_sim.config.build import Builder
    from fedjax_sim.report import page

    monkeypatch.setattr(Builder, "data", clock.passes(1000, Builder.data))
    monkeypatch.setattr(Builder, "model", clock.passes(200, Builder.model))
    monkeypatch.setattr(page, "write_report", clock.passes(30, page.write_report))
    monkeypatch.setattr(app, "process_began", lambda: clock.now - 5 * seconds.NANO)
    sets = ["data.num_clients=20", "data.held_out_clients=0", "sampler.cohort_size=2", "model.name=logistic"]
    sets += ["algorithm.num_steps=1", "run.rounds=1"]
    arguments = [word for text in sets for word in ("--set", text)]
    monkeypatch.setattr(sys, "argv", ["fedjax-sim", "run", *arguments, "--out", "a"])
    before = clock.now
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert not ended.value.code
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    found = summary["seconds"]
    assert [round(found[name]) for name in ("start", "data", "page")] == [205, 1000, 30]
    assert math.isclose(math.fsum(found.values()), (clock.now - before) / seconds.NANO + 5, abs_tol=1e-2)
    text = (tmp_path / "a" / "report.html").read_text()
    assert "Wall time" in text and "reading data" in text
    monkeypatch.setattr(sys, "argv", ["fedjax-sim", "report", "a"])
    with pytest.raises(SystemExit):
        app.main()
    assert (tmp_path / "a" / "report.html").read_text() == text


def test_when_the_process_began():
    """Fault: a start that is not before now, or that is not this process's."""
    began = seconds.process_began()
    now = time.perf_counter_ns()
    assert began <= now
    if sys.platform == "linux":
        assert (now - began) / seconds.NANO >= time.process_time() / 64  # of at most so many threads
