"""Trains a built experiment in a folder: config, environment, population, log, checkpoints, summary and page."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fedjax_sim import tree, validate
from fedjax_sim.config.build import Experiment
from fedjax_sim.config.document import Config
from fedjax_sim.experiment.summary import estimate_of, results_of
from fedjax_sim.instruments.timeline import timeline
from fedjax_sim.population.describe import describe, digest
from fedjax_sim.report import page
from fedjax_sim.report.by_client import BY_CLIENT, by_client_csv, client_rows
from fedjax_sim.report.files import read_lines
from fedjax_sim.round.state import FederatedState
from fedjax_sim.running import checksums, seconds
from fedjax_sim.running.arguments import check_directory
from fedjax_sim.running.environment import environment
from fedjax_sim.running.files import lock
from fedjax_sim.running.fingerprint import is_private
from fedjax_sim.running.history import History
from fedjax_sim.running.kept_files import check_free_of, own_files
from fedjax_sim.running.loggers import LOGGERS, Logger
from fedjax_sim.running.loop import run
from fedjax_sim.running.origin import origin_of
from fedjax_sim.running.processes import Processes, current
from fedjax_sim.running.stopping import StopWhen
from fedjax_sim.types import PyTree, noisy_parts

# Fields of a data set that hold its arrays, which have a digest, or a function that follows from the config.
OF_ARRAYS = ("train", "test", "held_out", "local_test", "triggered", "server", "measure")


class PageNotWritten(OSError):
    """The summary or the page of a run that is complete could not be written."""


@validate.named_arguments
def train(
    experiment: Experiment,
    directory: str | Path,
    *,
    resume: bool = False,
    allow_previous: bool = False,
    progress: bool = False,
    command: str = "",
    processes: Processes | None = None,
    before_rounds: Callable[[], object] = lambda: None,
    before_page: Callable[[History], object] = lambda history: None,
) -> tuple[PyTree, History]:
    """Trains an experiment as its config says, and writes all that `fedjax-sim run` writes into a folder.

    The folder gets config.toml, env.json, population.json, the log, the checkpoints, summary.json and report.html;
    by_client.csv and timeline.json where there is something to write.

    Args:
      experiment: what `config.build` made of a config. Its key, its params and its evaluation may be others. Its
        algorithm and its data may not, because the folder's config stands for them.
      directory: the run's folder.
      resume: continue the run in `directory`. The experiment may have been given more rounds. Build it from the
        folder's own config.toml, so that it has the lanes of that run.
      allow_previous: if the newest checkpoint is damaged, continue from an earlier one, with a warning.
      progress: show a bar.
      command: the command line that repeats the run, for env.json and the page.
      processes: the processes of this job; by default as JAX knows them.
      before_rounds: called in every process when all is ready to be compiled.
      before_page: called with the finished run before its page is drawn, in the process that writes it. The files are
        written even if it raises.

    Returns: (state, History), as `fedjax_sim.run`. In the process that writes, the summary is that of summary.json.

    Raises: as `fedjax_sim.run`; ValueError for an algorithm or data that are not those of the config; FileExistsError
    also for a folder with files of the user's that the run would write over; RuntimeError if several processes read
    other files; `PageNotWritten` if the run is complete but for its page.

    Guarantees: the folder is that of the command, bit for bit but for times
    (tests/experiment/test_train.py::test_the_folder_is_that_of_the_command). A resumed run too
    (tests/experiment/test_train.py::test_a_resumed_run_is_that_of_the_command).

    >>> import os, tempfile
    >>> from fedjax_sim.config import load
    >>> from fedjax_sim.config.build import build
    >>> small = ["data.name=mean_estimation", "data.num_clients=20", "model.name=linear", "sampler.cohort_size=5"]
    >>> experiment = build(load(None, [*small, "run.rounds=2"]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state, history = train(experiment, folder)
    ...     "summary.json" in os.listdir(folder), history.summary["rounds"], history.summary["name"]
    (True, 2, 'mean_estimation-fedavg-0')
    """
    _check_experiment(experiment)
    check_directory(directory)
    for name, call in (("before_rounds", before_rounds), ("before_page", before_page)):
        if not callable(call):
            validate.fail(name, "a function", call, error=TypeError)
    processes = processes or current()
    folder = Path(directory)
    config = experiment.config
    options = config.resolved()["run"]
    with config.arithmetic(), seconds.time_account():
        files = processes.by_first(lambda: _first_files(experiment, folder, resume, command)) or {}
        callbacks = []
        if options["stop_when"] is not None:
            # A resumed run goes on with the evaluations that it has seen.
            records = processes.from_first(lambda: read_lines(folder / "metrics.jsonl", []) if resume else [])
            callbacks.append(StopWhen(options["stop_when"], records))
        identity = _identity(experiment, processes)
        before_rounds()
        state, history = run(
            experiment.key,
            experiment.algorithm,
            experiment.params,
            experiment.data.train,
            options["rounds"],
            evaluation=experiment.evaluation,
            evaluate_every=options["evaluate_every"],
            directory=folder,
            checkpoint_every=options["checkpoint_every"],
            keep_checkpoints=options["keep_checkpoints"],
            client_memory=options["client_memory"],
            delta=options["delta"],
            resume=resume,
            allow_previous=allow_previous,
            callbacks=callbacks,
            loggers=_loggers(experiment, folder),
            progress=progress,
            identity=identity,
            files=files,
            origin=_origin(config, identity, experiment.data),
        )
        # Both read the state, which is spread over all processes.
        next_round = _timeline(experiment, state)
        estimate = estimate_of(experiment.algorithm, state)

        def finish() -> dict[str, Any]:
            results = results_of(experiment, history, estimate)
            summary = {"name": config.name, **history.summary, **results}
            return _finish(experiment, folder, history._replace(summary=summary), next_round, before_page)

        summary = processes.by_first(finish) or history.summary
    return state, history._replace(summary=summary)


def _check_experiment(experiment: Experiment) -> None:
    """Refuses all but an experiment whose algorithm and data follow from its config.

    A run's folder keeps the config. Compiled rounds are kept under the config's digest, so another algorithm would run
    the rounds of the config's.

    Args:
      experiment: what the caller of `train` gave, which may be of another type.

    Guarantees: another algorithm, other data and another config are refused
    (tests/experiment/test_train.py::test_what_does_not_follow_from_the_config_is_refused).
    """
    validate.part("experiment", experiment, Experiment)
    if not experiment.follows_from_config:
        hint = "Change the config and build it again. An algorithm of your own is run by fedjax_sim.run, or named in a "
        hint += "config whose module `config.registry.admit` admits."
        rule = "algorithm, data and config as one `config.build.build` made them"
        validate.fail("experiment", rule, experiment.config.name, hint)


def _first_files(experiment: Experiment, folder: Path, resume: bool, command: str) -> dict[str, str]:
    """Returns the texts by name that are written once a run is certain to start or continue.

    Args:
      experiment, resume, command: as for `train`.
      folder: the run's folder.

    Raises: FileExistsError for a folder in which a new run would write over something.
    """
    files = {}
    # A resumed run keeps the description of the machine and the data that it started with.
    if not resume:
        check_free_of(folder, "a run", "a sweep", "a study")
        if names := own_files(folder, "a run"):
            rule = "a folder without files that a run writes"
            raise FileExistsError(f"directory: expected {rule}, got {folder} with {', '.join(names)}.")
        files["env.json"] = _json(environment(command))
        with seconds.timed_part("data"):
            files["population.json"] = _json(describe(experiment.data))
    # A resumed run writes its config anew, since it may have been given more rounds.
    files["config.toml"] = experiment.config.to_toml(folder)
    return files


def _identity(experiment: Experiment, processes: Processes) -> dict[str, Any]:
    """Returns what a resumed run must share with its checkpoint, after checking that all processes share it.

    Args:
      experiment: the experiment that is trained.
      processes: of this job; each must have read the same data, files and modules.

    Raises: RuntimeError if the processes read other data, other files or other modules.
    """
    with seconds.timed_part("data"):
        data_sha256 = digest(experiment.data)
    processes.check_same("data", data_sha256, "Every process must read the same files.")
    identity = experiment.config.identity() | {"data_sha256": data_sha256}
    # Files besides the data's and modules count by their content, which must be the same for all processes, too.
    for kind in ("files", "modules"):
        if kind in identity:
            content = hashlib.sha256(repr(identity[kind]).encode()).hexdigest()
            processes.check_same(kind, content, f"Every process must read the same {kind}.")
    return identity


def _loggers(experiment: Experiment, folder: Path) -> list[Logger]:
    """Returns the loggers that the config names, with the options that they show."""
    tables = experiment.config.resolved()
    shown_options = tree.dotted(tables)
    # With the seed, noise could be computed and subtracted by whoever reads a log.
    if is_private(experiment.algorithm):
        shown_options = {name: value for name, value in shown_options.items() if name.split(".")[-1] != "seed"}
    return [LOGGERS[name](folder, shown_options) for name in dict.fromkeys(tables["run"]["log"] or [])]


def _origin(config: Config, identity: dict, data: Any) -> str | None:
    """Returns the digest of all that decides a run's programs; None if a part of it is not known by value.

    Args:
      config: with its plan.
      identity: of the run, with the digest of the data's arrays.
      data: the data set, whose names and facts count beside its arrays.
    """
    decided = config.of_programs(identity)
    facts = data._replace(**dict.fromkeys(OF_ARRAYS))
    return None if decided is None else origin_of(decided, facts)


def _timeline(experiment: Experiment, state: PyTree) -> dict[str, Any] | None:
    """Returns the clients of the next round, if it would take simulated time; None if noise hides who takes part.

    None also for an algorithm of the user's whose state is another than that of its parts.
    """
    star = experiment.algorithm.parts
    if star is None or star.sampler.devices is None or noisy_parts(star) or not isinstance(state, FederatedState):
        return None
    return timeline(star, jax.random.fold_in(experiment.key, int(state.round)), state.sampler)


def _finish(
    experiment: Experiment,
    folder: Path,
    history: History,
    next_round: dict[str, Any] | None,
    before_page: Callable[[History], object],
) -> dict[str, Any]:
    """Writes the run's last files: summary, timeline, results by client and page; returns the summary.

    Args:
      experiment: the experiment that was trained.
      folder: the run's folder.
      history: of the run, with the summary as it is to be written.
      next_round: the timeline of the next round; None to write none.
      before_page: called before the page is drawn, which takes seconds.
    """
    summary = history.summary
    with lock(folder):
        passed = seconds.so_far()
        summary["seconds"] = passed
        try:
            before_page(history)
        finally:  # even if nobody reads the output any more
            with _complete(folder):
                _write_json(folder / "summary.json", summary)
                if next_round is not None:
                    _write_json(folder / "timeline.json", next_round)
                if history.by_client and (rows := client_rows(experiment.data, history.by_client)):
                    checksums.write(folder / BY_CLIENT, by_client_csv(rows).encode())
                page.write_report(folder)
                # All since then was for the table and the page, which leaves it out: written again it is the same.
                since = math.fsum(seconds.so_far().values()) - math.fsum(passed.values())
                summary["seconds"] = passed | {"page": passed["page"] + since}
                _write_json(folder / "summary.json", summary)
    return summary


@contextlib.contextmanager
def _complete(folder: Path) -> Iterator[None]:
    """Says of files that cannot be written that the run is complete, and how to make its page again."""
    try:
        yield
    except OSError as error:
        way = f"fedjax-sim report {shlex.quote(str(folder))}"
        raise PageNotWritten(
            f"{type(error).__name__}: {error}. The run is complete: its log and checkpoints are on disk. Free space or "
            f"mend the folder, then make its page: {way}"
        ) from error


def _json(value: Mapping[str, Any]) -> str:
    """Returns a value as the text of a JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a value as a JSON file of the run."""
    checksums.write(path, _json(value).encode())
