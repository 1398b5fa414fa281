"""What is done while XLA compiles: a run is compiled once, in its caller's settings, and fails and stops as before."""

import contextlib
import signal
import threading
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from fedjax_sim import algorithms, engine, metrics, population, sampling
from fedjax_sim.running.beside import beside
from fedjax_sim.running.loop import run

pytestmark = pytest.mark.optimised(False)

PEOPLE = population.stored({"x": np.eye(4, dtype=np.float32), "y": np.ones(4, np.float32)}, [0, 1, 2, 4])
PARAMS = {"w": np.zeros(4, np.float32)}
EVENTS = []
KINDS = {
    "jaxpr_trace_duration": "trace",
    "jaxpr_to_mlir_module_duration": "lower",
    "backend_compile_duration": "compile",
}


def _listen(event, seconds, fun_name="?", **_):
    if (kind := KINDS.get(event.rpartition("/")[2])) is not None:
        name = fun_name.removeprefix("jit(").removesuffix(")")
        EVENTS.append((kind, name, threading.current_thread() is threading.main_thread()))


jax.monitoring.register_event_duration_secs_listener(_listen)


def loss(params, examples, key):
    return (examples["x"] @ params["w"] - examples["y"]) ** 2


def trained(judge=None, rounds=1, **options):
    algorithm = algorithms.fedavg(loss, sampling.full(3), optax.sgd(0.1), num_steps=1, batch_size=1)
    judge = metrics.evaluation(loss, held_out=PEOPLE) if judge is None else judge
    return run(jax.random.key(0), algorithm, PARAMS, PEOPLE, rounds, evaluation=judge, **options)


@pytest.fixture
def threads():
    """Catches a thread that a test's run leaves behind."""
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.default_rows("64 bits")
@pytest.mark.parametrize(
    "setting",
    [
        contextlib.nullcontext,
        engine.fast_arithmetic,
        engine.one_device,
        lambda: engine.compiling_for("cpu"),
        lambda: jax.default_matmul_precision("bfloat16"),
        lambda: jax.enable_x64(True),
    ],
    ids=["none", "fast arithmetic", "one device", "compiling for", "precision", "64 bits"],
)
def test_a_run_is_compiled_once_in_its_settings(setting, threads):
    """Faults: a round or an evaluation that is traced or lowered in a thread without the caller's settings, and so in
    others, or anew when it is called; an evaluation that is compiled for other places than its params have; one that
    is not compiled until it is called."""
    good = metrics.evaluation(loss, held_out=PEOPLE)
    compiled_before = []

    def with_clients(params):
        compiled_before.append(("compile", "measure", True) in EVENTS)
        return good.with_clients(params)

    with setting():
        EVENTS.clear()
        trained(replace(good, with_clients=with_clients))
    block, measure = ([event for event in EVENTS if event[1] == name] for name in ("block", "measure"))
    assert block == [("trace", "block", True), ("lower", "block", True), ("compile", "block", False)]
    assert measure == [(kind, "measure", True) for kind in ("trace", "lower", "compile")]
    assert [event for event in EVENTS if event[:2] == ("trace", "step")] == [("trace", "step", True)]
    assert compiled_before == [True, True]


def test_errors_are_raised_in_order(tmp_path, monkeypatch, threads):
    """Faults: an evaluation that cannot be compiled ahead stops a run that it need not; its error hides that of the
    round, or comes before the run has its files, or is lost."""

    def fails(*_):
        raise KeyError("evaluation")

    good = metrics.evaluation(loss, held_out=PEOPLE)
    _, history = trained(replace(good, lower=fails))
    assert history.records == trained(good)[1].records
    with pytest.raises(KeyError, match="evaluation"):
        trained(replace(good, lower=fails, with_clients=lambda params: fails()), directory=tmp_path / "a")
    assert (tmp_path / "a" / "checkpoints").is_dir()

    def does_not_fit(*_):
        raise MemoryError("round")

    monkeypatch.setattr("fedjax_sim.running.blocks.check_memory", does_not_fit)
    with pytest.raises(MemoryError, match="round"):
        trained(replace(good, lower=fails), directory=tmp_path / "b")
    monkeypatch.setattr(jax.stages.Lowered, "compile", does_not_fit)
    with pytest.raises(MemoryError, match="round"):
        trained(good, directory=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.fixture
def interruptible():
    """Ctrl-C as a terminal gives it. A shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("count", [1, 2])
def test_interrupts_while_compiling(tmp_path, threads, interruptible, count):
    """Faults: the first Ctrl-C while a program compiles is lost, or stops a run before it is safe; the second leaves
    files, or the compiler's thread."""
    good = metrics.evaluation(loss, held_out=PEOPLE)

    def lower(params):
        for _ in range(count):
            signal.raise_signal(signal.SIGINT)  # handled before the next: two that wait would be one
        return good.lower(params)

    with pytest.raises(KeyboardInterrupt):
        trained(replace(good, lower=lower), rounds=4, directory=tmp_path / "run")
    assert (tmp_path / "run").exists() == (count == 1)
    if count == 1:
        _, history = trained(good, rounds=4, directory=tmp_path / "run", resume=True)
        assert history.records == trained(good, rounds=4)[1].records


def test_no_thread_is_left(threads):
    """Faults: a thread that works on after an error of the other; a result that is lost."""
    ended = threading.Event()

    def fails():
        raise KeyboardInterrupt

    def works():
        ended.wait(0.1)
        ended.set()
        return 1

    with pytest.raises(KeyboardInterrupt):
        beside(works, fails)
    assert ended.is_set()
    assert beside(works, lambda: None) == 1
    with pytest.raises(ZeroDivisionError):
        beside(lambda: 1 // 0, ended.clear)
    assert not ended.is_set()
