"""`run.log`: what TensorBoard, W&B and MLflow have of a run, read by their own readers."""

import json
import math
import socket
import struct

import jax
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from fedjax_sim import algorithms, population
from fedjax_sim.command.app import app
from fedjax_sim.running import loggers
from fedjax_sim.running.history import numbers_of
from fedjax_sim.running.loop import run
from fedjax_sim.sampling import uniform

RUN = [
    "data.name=mean_estimation",
    "data.num_clients=40",
    "model.name=linear",
    "sampler.cohort_size=8",
    "run.rounds=2",
    "run.evaluate_every=2",
]


def tensorboard_records(folder):
    """The scalars in the event files of a run, as {name: [(round, number)]}."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        name: [(event.step, event.value) for event in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def wandb_messages(content):
    """The protobuf messages in a file of W&B: a log of LevelDB behind seven bytes, in blocks of 32 KiB."""
    whole, first, last = 1, 2, 4
    position, message = 7, b""
    while position < len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768  # no room for a header: the block's rest is padding
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        message = (b"" if kind in (whole, first) else message) + content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (whole, last):
            yield message


def wandb_records(folder):
    """What the last file of W&B holds, as {name: [(round, number)]}."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len({file.name for file in files}) == 1  # a resumed run goes on under its id
    columns = {}
    for message in wandb_messages(files[-1].read_bytes()):
        record = Record()
        record.ParseFromString(message)
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            columns.setdefault(name, []).append((items["_step"], float(value)))
    return {name: column for name, column in columns.items() if not name.startswith("_")}


def mlflow_records(folder):
    """The metrics of the only run in MLflow's store, as {name: [(round, number)]}."""
    client = pytest.importorskip("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name(loggers.PROJECT)
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == folder.name and found.data.params["run.rounds"] == "9"
    columns = {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }
    assert columns.pop("round")
    return columns


READERS = {"tensorboard": tensorboard_records, "wandb": wandb_records, "mlflow": mlflow_records}


@pytest.mark.default_rows("tensorboard")  # the other packages take seconds to import
@pytest.mark.parametrize("name", READERS)
def test_each_round_arrives_once(name, tmp_path, monkeypatch):
    """Catches a round that is lost, one that a resume hands over twice, and an array or NaN that is left out."""
    pytest.importorskip(loggers.PACKAGES[name])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    people = population.quadratics(num_clients=4, dimension=2).train
    algorithm = algorithms.fedavg(population.quadratic_loss, uniform(4, 2), optax.sgd(0.1), num_steps=1)
    params, calls = {"w": np.zeros(2, np.float32)}, []

    def stops_the_first_time(round, state, record):
        calls.append(round)
        if calls == [3, 6]:
            raise KeyboardInterrupt

    def train(resume):
        logger = loggers.LOGGERS[name](tmp_path / "a run", {"run": {"rounds": 9}})
        return run(
            jax.random.key(1), algorithm, params, people, 9, directory=tmp_path / "a run", resume=resume,
            evaluation=lambda params: {"test_loss": float("nan"), "pair": [1.0, 2.0]},
            evaluate_every=3, checkpoint_every=4, callbacks=[stops_the_first_time], loggers=[logger],
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        train(resume=False)
    assert calls == [3, 6]  # the newest checkpoint is of round 4
    train(resume=True)
    expected = {}
    for line in (tmp_path / "a run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for column, number in numbers_of(record).items():
            expected.setdefault(column, []).append((record["round"], number))
    found = READERS[name](tmp_path / "a run")
    assert found.keys() == expected.keys() and {"test_loss", "pair/1", "uplink_bytes"} <= found.keys()
    for column, numbers in expected.items():
        assert [round for round, _ in found[column]] == [round for round, _ in numbers], column
        for (_, there), (_, number) in zip(found[column], numbers, strict=True):
            # Event files hold float32.
            expected_number = float(np.float32(number)) if name == "tensorboard" else number
            assert there == expected_number or (math.isnan(there) and math.isnan(number)), column


def test_event_files_of_others_stay(tmp_path):
    """Catches a logger that clears a folder in which somebody keeps other runs."""
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").mkdir()
    theirs = tmp_path / "tensorboard" / "events.out.tfevents.1.somebody"
    theirs.write_bytes(b"theirs")
    for _ in range(2):
        logger = loggers.TensorBoard(tmp_path)
        logger.start([{"round": 0, "test_loss": 1.0}])
        logger.finish(None)
    assert theirs.read_bytes() == b"theirs" and len(list((tmp_path / "tensorboard").iterdir())) == 2


def invoke(*words):
    return CliRunner().invoke(app, ["run", "-q", *(word for setting in words for word in ("--set", setting))])


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """What a logger in TensorBoard's place is given."""
    pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)
    seen = {}

    class Kept:
        def __init__(self, folder, config):
            seen.update(folder=folder, config=config, records=[])

        def start(self, records):
            seen["records"] += records

        write = start

        def finish(self, summary):
            seen["summary"] = summary

    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", Kept)
    return seen


@pytest.mark.full  # by default one that a config names fails
def test_a_config_names_its_loggers(kept, tmp_path):
    """Catches loggers that the command line does not pass on."""
    assert invoke(*RUN, 'run.log=["tensorboard"]').exit_code == 0
    log = (tmp_path / kept["folder"] / "metrics.jsonl").read_text().splitlines()
    assert kept["records"] == [json.loads(line) for line in log]
    assert kept["summary"]["rounds"] == 2 and kept["config"]["seed"] == 0


@pytest.mark.full
def test_a_private_run_keeps_its_seed(kept):
    """Catches a seed that a private run tells."""
    noise = ["transform.gaussian_mechanism.clip_norm=1.0", "transform.gaussian_mechanism.noise_multiplier=1.0"]
    noise += ["aggregator.name=fixed_mean", "aggregator.denominator=8.0", "algorithm.weighting=uniform"]
    done = invoke(*RUN, *noise, 'run.log=["tensorboard"]')
    assert done.exit_code == 0, done.output
    assert kept["records"] and not [name for name in kept["config"] if name.split(".")[-1] == "seed"]


def test_wrong_loggers_are_refused_before_data_are_read(monkeypatch):
    done = invoke("data.name=native", "data.directory=no_such_folder", 'run.log=["tensorbord"]')
    assert done.exit_code == 2 and 'run.log: expected a list of "tensorboard"' in done.output
    monkeypatch.setitem(loggers.PACKAGES, "wandb", "a_missing_package")
    done = invoke("data.name=native", "data.directory=no_such_folder", 'run.log=["wandb"]')
    assert done.exit_code == 2 and "pip install 'fedjax_sim[wandb]'" in done.output


@pytest.mark.default_rows(1)
@pytest.mark.parametrize("first_bad_round", [2, 0])
def test_a_logger_that_fails_stops_the_run_and_says_how_to_go_on(tmp_path, monkeypatch, first_bad_round):
    """Catches an error of another package's type that looks like a fault of the run."""
    pytest.importorskip("tensorboardX")
    monkeypatch.chdir(tmp_path)

    class Broken(loggers.TensorBoard):
        def write(self, records):
            if any(record["round"] >= first_bad_round for record in records):
                raise LookupError("disk on fire")

        def start(self, records):
            if first_bad_round == 0:
                raise LookupError("disk on fire")
            super().start(records)

    monkeypatch.setitem(loggers.LOGGERS, "tensorboard", Broken)
    done = invoke(*RUN, 'run.log=["tensorboard"]')
    assert done.exit_code == 1
    assert "Broken failed with LookupError: disk on fire" in done.output and "run.log=none" in done.output
    (folder,) = (tmp_path / "runs").iterdir()
    again = CliRunner().invoke(app, ["run", "-q", "--resume", "--set", "run.log=none"])
    assert again.exit_code == 0, again.output
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.full  # its package takes seconds to import; by default a logger that fails
def test_a_dead_server(tmp_path, monkeypatch):
    """Fault: an MLflow server that accepts and never answers, for which a run waits in silence for many minutes, and
    once more when it ends; rounds that are lost with it; the words of the command line alone."""
    pytest.importorskip("mlflow")
    patience = {name: int(value) for name, value in loggers.MLFLOW_PATIENCE.items()}
    tries = patience["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] + 1
    pauses = patience["MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR"] * 2**tries
    assert tries * patience["MLFLOW_HTTP_REQUEST_TIMEOUT"] + pauses < 60
    for name, value in zip(loggers.MLFLOW_PATIENCE, ("0", "1", "0"), strict=True):
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        words = [word for setting in [*RUN, 'run.log=["mlflow"]'] for word in ("--set", setting)]
        done = CliRunner().invoke(app, ["run", "-q", "--out", str(tmp_path / "run"), *words])
    assert done.exit_code == 1 and "loggers: MLflow failed" in done.output and "The run lost nothing" in done.output
    assert "--set run.log=none" in done.output and "in Python loggers=()" in done.output
    resumed = ["run", "-q", "--resume", "--out", str(tmp_path / "run"), "--set", "run.log=none"]
    assert CliRunner().invoke(app, resumed).exit_code == 0


def test_a_logger_that_failed_is_not_called_again(tmp_path):
    """Fault: a dead server that is asked again when the run ends, and whose second error hides the first."""
    calls = []

    class Dead:
        def start(self, records):
            pass

        def write(self, records):
            calls.append("write")
            raise ConnectionError("nobody there")

        def finish(self, summary):
            calls.append("finish")
            raise ConnectionError("nobody there")

    class DeadAtTheEnd(Dead):
        def write(self, records):
            pass

    people = population.quadratics(num_clients=4, dimension=2).train
    algorithm = algorithms.fedavg(population.quadratic_loss, uniform(4, 2), optax.sgd(0.1), num_steps=1)
    parts = jax.random.key(0), algorithm, {"w": np.zeros(2, np.float32)}, people, 2
    with pytest.raises(RuntimeError, match="Dead failed with ConnectionError"):
        run(*parts, loggers=[Dead()])
    assert calls == ["write"]
    with pytest.raises(RuntimeError, match="DeadAtTheEnd failed"):
        run(*parts, loggers=[DeadAtTheEnd()])

    def ends(*_):
        raise InterruptedError("by the user")

    with (
        pytest.warns(RuntimeWarning, match="DeadAtTheEnd failed"),
        pytest.raises(InterruptedError, match="by the user"),
    ):
        run(*parts, loggers=[DeadAtTheEnd()], callbacks=[ends])
