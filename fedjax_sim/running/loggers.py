"""Hands a run's records to the tools that people compare runs with: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fedjax_sim import tree
from fedjax_sim.files.regular_files import content_of
from fedjax_sim.running.history import numbers_of
from fedjax_sim.text.printable import printable_line

SUFFIX = ".fedjax_sim"  # of the event files that are written here
PROJECT = "fedjax_sim"  # of W&B, and the experiment of MLflow, if the environment names no other
MLFLOW_NUMBERS, MLFLOW_OPTIONS = 1000, 100  # MLflow takes at most so many at once
# How long MLflow waits for a server where the environment does not say: below a minute. Its own defaults, 7 retries of
# up to 120 seconds with growing pauses, keep a run in silence for many minutes.
MLFLOW_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}


class Logger(Protocol):
    """Gets a run's records: `running.loop.run(..., loggers=[...])` calls its three methods, on process 0 alone.

    A run that was killed trains some rounds again after it is resumed, with the same bits, so that records may come
    twice. A logger keeps each round once.
    """

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Begins, or goes on after a resume: `records` are those of the rounds that are done, as in `metrics.jsonl`."""

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds the records of a block of rounds, which are in `metrics.jsonl` already."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Ends: `summary` is that of `summary.json`, or None if an error or Ctrl-C has stopped the run."""


def _numbers_of_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a summary that are no tables or texts, by name."""
    return {name: value for name, value in summary.items() if isinstance(value, (bool, int, float))}


class TensorBoard:
    """Writes event files into `DIRECTORY/tensorboard`, for `tensorboard --logdir DIRECTORY`.

    After a resume the event files are written anew, with all rounds; those of others in the folder stay.

    Args:
      directory: the run's folder.
      config: the run's options, shown as text.

    Guarantees: TensorBoard's own reader finds each round of `metrics.jsonl` once, as float32, also after a resume
    (tests/running/test_loggers.py::test_each_round_arrives_once).
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None):
        check_logger_installed(["tensorboard"])
        self.folder = Path(directory) / "tensorboard"
        self.config = config or {}

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        from tensorboardX import SummaryWriter

        for file in self.folder.glob(f"events.out.tfevents.*{SUFFIX}"):
            file.unlink()
        self.writer = SummaryWriter(str(self.folder), filename_suffix=SUFFIX)
        cells = {name: printable_line(value).replace("|", r"\|") for name, value in tree.dotted(self.config).items()}
        rows = [f"| `{name}` | {value} |" for name, value in cells.items()]
        self.writer.add_text("config", "\n".join(["| option | value |", "|---|---|", *rows]))
        self.write(records)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            for name, number in numbers_of(record).items():
                self.writer.add_scalar(name, number, record["round"])
        self.writer.flush()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self.writer.add_text("summary", f"```json\n{json.dumps(summary, indent=2)}\n```")
        self.writer.close()


class WeightsAndBiases:
    """Writes a run of Weights & Biases into `DIRECTORY/wandb`, offline unless the environment has WANDB_MODE=online.

    `wandb sync DIRECTORY/wandb/offline-run-*` uploads it later. A resumed run goes on under the same id.

    Args:
      directory: the run's folder, whose name is the run's.
      config: the run's options.

    Guarantees: each file of W&B has each round of `metrics.jsonl` at most once, and the last file holds all of them
    (tests/running/test_loggers.py::test_each_round_arrives_once).
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None):
        check_logger_installed(["wandb"])
        self.directory = Path(directory)
        self.config = dict(config or {})

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Begins a run of W&B, or goes on under the id in `wandb/run_id`.

        Args: as for `Logger.start`.
        """
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=self.directory.name,
            id=_kept_id(self.directory / "wandb" / "run_id", lambda: secrets.token_hex(8)),
            config=self.config,
            dir=str(self.directory),
            mode=mode,  # pyright: ignore[reportArgumentType]  # W&B refuses other words itself
            resume=None if mode == "offline" else "allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True),
        )
        self.write(records)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            # W&B's server takes no step twice; what it has of a resumed run counts.
            if record["round"] >= self.run.step:
                self.run.log(numbers_of(record), step=record["round"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self.run.summary.update(_numbers_of_summary(summary))
        self.run.finish(exit_code=0 if summary is not None else 1)


class MLflow:
    """Writes a run of MLflow to the server or store that the environment's MLFLOW_TRACKING_URI names.

    Without one, MLflow chooses a store in the current folder; `file:` stores need MLFLOW_ALLOW_FILE_STORE=true. A
    resumed run goes on under the id in `DIRECTORY/mlflow_run_id`. A server that does not answer stops the run within a
    minute; MLflow's own variables, such as MLFLOW_HTTP_REQUEST_TIMEOUT, set another patience.

    Args:
      directory: the run's folder, whose name is the run's.
      config: the run's options, which are MLflow's parameters.

    Guarantees: MLflow's own client finds each round of `metrics.jsonl` once, also after a resume
    (tests/running/test_loggers.py::test_each_round_arrives_once). A dead server stops the run in bounded time, and no
    round is lost (tests/running/test_loggers.py::test_a_dead_server).
    """

    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None):
        check_logger_installed(["mlflow"])
        self.directory = Path(directory)
        self.config = config or {}

    def start(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Begins a run of MLflow, or goes on under the id in `mlflow_run_id`.

        Args: as for `Logger.start`.
        """
        import mlflow
        from mlflow.entities import Param

        for name, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        self.client = mlflow.MlflowClient()
        self.id = _kept_id(self.directory / "mlflow_run_id", self._new_run)
        # The rounds of MLflow's own metric say what it has already: a batch of numbers is written whole.
        seen = self.client.get_metric_history(self.id, "round")
        self.last_round = max((metric.step for metric in seen), default=-1)
        if not seen:
            options = [Param(name, printable_line(value)) for name, value in tree.dotted(self.config).items()]
            for first in range(0, len(options), MLFLOW_OPTIONS):
                self.client.log_batch(self.id, params=options[first : first + MLFLOW_OPTIONS])
        self.client.update_run(self.id, "RUNNING")
        self.write(records)

    def _new_run(self) -> str:
        """Begins a run, and returns its id."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        id = self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        return self.client.create_run(id, run_name=self.directory.name).info.run_id

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds the records of rounds that MLflow does not have yet, in batches of at most `MLFLOW_NUMBERS` numbers.

        Args: as for `Logger.write`.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch: list[Metric] = []
        for record in records:
            round = record["round"]
            if round <= self.last_round:
                continue
            numbers = numbers_of(record) | {"round": float(round)}
            if len(batch) + len(numbers) > MLFLOW_NUMBERS:
                self.client.log_batch(self.id, metrics=batch)
                batch = []
            batch += [Metric(name, number, now, round) for name, number in numbers.items()]
        self.client.log_batch(self.id, metrics=batch)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            for name, value in _numbers_of_summary(summary).items():
                self.client.set_tag(self.id, f"summary.{name}", value)
        self.client.set_terminated(self.id, "FAILED" if summary is None else "FINISHED")


LOGGERS: dict[str, type] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def check_logger_installed(names: Sequence[str]) -> None:
    """Raises ImportError for a logger whose package is missing, with what to install.

    Args:
      names: of `LOGGERS`.
    """
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ImportError(f"run.log: expected {PACKAGES[name]} to be installed. pip install 'fedjax_sim[{name}]'")


def _kept_id(file: Path, new: Callable[[], str]) -> str:
    """Returns the id in a file, which is created with a new id if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        return content_of(file, 1000).decode()
    id = new()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(id, encoding="utf-8")
    return id
