"""Implements `fedjax-sim run` and `launch`: train in one process, or in several."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from fedjax_sim.command.attackers import expected_attackers
from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.folders import (
    RUNS,
    check_fresh,
    check_there,
    check_unfinished,
    check_written,
    drop_empty,
    folder_to_resume,
    next_folder,
    rounds_done,
)
from fedjax_sim.command.options import OwnModules, Settings, Without
from fedjax_sim.report import numbers
from fedjax_sim.running import seconds, terminal
from fedjax_sim.running.environment import environment, prepare

MOST_NUMBERS = 64  # of an array that a statistic's summary lists
# Fields of a data set that hold its arrays, which have a digest, or a function that follows from the config.
OF_ARRAYS = ("train", "test", "held_out", "local_test", "triggered", "server", "measure")


class Job(NamedTuple):
    """A run that the command was asked for."""

    name: str  # such as "digits-fedavg-0"
    loaded: Any  # the `Config`, with its plan
    experiment: Any  # what `config.build` made of it
    folder: Path | None  # as the command line states it; None to choose one
    resume: bool  # whether the run in the folder goes on
    allow_previous: bool  # whether it may go on from an earlier checkpoint than the newest
    quiet: bool  # whether nothing is printed


def run(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml | EXAMPLE]",
            help="Without one: 100,000 clients over the digits, FedAvg.",
            autocompletion=example_names,
        ),
    ] = None,
    settings: Settings = None,
    without: Without = None,
    own_modules: OwnModules = None,
    *,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; by default runs/DATA-ALGORITHM-SEED-NUMBER.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, by default the newest in runs/.")
    ] = False,
    allow_previous: Annotated[
        bool, typer.Option("--allow-previous", help="With --resume: skip a damaged newest checkpoint.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", envvar="JAX_COORDINATOR_ADDRESS", help="Address of process 0 of several."),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(envvar="JAX_NUM_PROCESSES", help="How many there are.")] = None,
    process_id: Annotated[int | None, typer.Option(envvar="JAX_PROCESS_ID", help="Which this one is.")] = None,
) -> None:
    """Train, and write config, metrics, checkpoints, summary and report into a folder."""
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import Config, load
    from fedjax_sim.running import distributed

    settings = settings or []
    without = without or []
    # `main` hands over when the process began.
    clock = context.with_resource(seconds.account(context.obj, "start"))

    def read() -> tuple[str | None, dict]:
        """Reads and checks config and folder, on process 0; returns (folder, tables) as JSON."""
        folder = folder_to_resume(out, config is not None) if resume else out
        if resume and config is None:
            check_written(folder)
        loaded = load(folder / "config.toml" if resume and config is None else config, settings, without)
        if resume:
            check_unfinished(folder, loaded.tables["run"]["rounds"])
            check_there(loaded.tables)
            loaded = _with_kept_plan(loaded, folder / "config.toml")
        elif folder is not None:
            check_fresh(folder)
        return folder and str(folder), loaded.resolved()

    try:
        distributed.initialize(coordinator, num_processes, process_id)
        registry.admit(own_modules or [])
        folder, tables = distributed.from_first(read)
        folder = folder and Path(folder)
        loaded = Config(tables)
        prepare()
        from fedjax_sim.config.build import build

        with loaded.arithmetic():
            experiment = distributed.agreed(lambda: build(loaded))
        lanes = _lanes_in_words(loaded, experiment.plan)
        loaded = loaded.planned(experiment.plan)
    except (TypeError, ValueError, distributed.PeerFailed) as error:
        if not isinstance(error, distributed.PeerFailed) and not is_users_error(error):
            raise  # a bug, not a wrong config
        _stop("" if isinstance(error, distributed.PeerFailed) else str(error), error)
    except KeyboardInterrupt as error:
        _stop("Interrupted before the first round.", error)
    changes = [word for module in own_modules or [] for word in ("--with", module)]
    changes += [word for place in without for word in ("--unset", place)]
    changes += [word for setting in settings for word in ("--set", setting)]
    command = shlex.join(["fedjax-sim", "run", *([str(config)] if config else []), *changes])
    if lanes and not quiet and distributed.is_first():
        typer.echo(lanes)
    clock.switch("other")
    with loaded.arithmetic():
        job = Job(
            name=f"{loaded.tables['data']['name']}-{loaded.tables['algorithm']['name']}-{loaded.tables['seed']}",
            loaded=loaded,
            experiment=experiment,
            folder=folder,
            resume=resume,
            allow_previous=allow_previous,
            quiet=quiet,
        )
        _train(job, command)


def _with_kept_plan(loaded: Any, kept_config: Path) -> Any:
    """Returns the config with the lanes and chunk of the run that it continues, unless it states its own.

    On accelerators they may follow from the devices, of which there may be another number now.
    """
    from fedjax_sim import engine
    from fedjax_sim.config.document import load

    if loaded.tables["run"]["lanes"] is not None or not kept_config.is_file():
        return loaded
    kept = load(kept_config).tables["run"]
    return loaded if kept["lanes"] is None else loaded.planned(engine.Plan(kept["lanes"], kept["chunk"]))


def _lanes_in_words(loaded: Any, plan: Any) -> str:
    """Says which lanes give a run's bits elsewhere, if they followed from the number of devices; else ""."""
    from fedjax_sim import engine

    options = loaded.tables["run"]
    num_devices = len(engine.visible_devices()) if options["devices"] == "all" else options["devices"]
    if options["lanes"] is not None or num_devices == 1 or engine.target() == "cpu":
        return ""
    return (
        f"{plan.lanes:,} clients at once on each of {num_devices} devices; on other devices, "
        f"--set run.lanes={plan.lanes} gives the same bits."
    )


def _train(job: Job, command: str) -> None:
    """Trains, prints the summary and writes the page; a run that fails exits with a code, after cleaning up.

    Args:
      job: the run; if no folder is stated, one in `runs/` is chosen here.
      command: the command line that repeats the run, for `env.json`.
    """
    from fedjax_sim.population.describe import describe
    from fedjax_sim.running import distributed
    from fedjax_sim.running.files import CheckpointError, RunLocked

    experiment = job.experiment
    folder = job.folder
    new_folder = None
    files = {}

    def begin() -> str:
        # A resumed run keeps the description of the machine and the data that it started with.
        if not job.resume:
            files["env.json"] = _json(environment(command))
            with seconds.part("data"):
                files["population.json"] = _json(describe(experiment.data))
        chosen_folder = next_folder(RUNS / job.name) if job.folder is None else job.folder
        # A resumed run writes its config anew, since it may have been given more rounds.
        files["config.toml"] = job.loaded.to_toml(chosen_folder)
        return str(chosen_folder)

    try:
        folder = Path(distributed.from_first(begin))
        # Only a folder that this process created may be removed if the run is refused.
        new_folder = folder if job.folder is None and distributed.is_first() else None
        job = job._replace(quiet=job.quiet or not distributed.is_first())
        state, history = _rounds(job, folder, files)
        next_round = _timeline(experiment, state)
        estimate = _estimate(experiment.algorithm, state)
        rule = None if history.summary["finished"] else job.loaded.tables["run"]["stop_when"]
        distributed.by_first(lambda: _finish(job, folder, history, next_round=next_round, rule=rule, estimate=estimate))
    except KeyboardInterrupt as error:
        _interrupted(error, folder, new_folder)
    except (
        CheckpointError,
        RunLocked,
        ArithmeticError,
        MemoryError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        _failed(error, folder, new_folder)


def _rounds(job: Job, folder: Path, files: dict[str, str]) -> Any:
    """Runs the rounds of an experiment in its folder; returns the last state and the run's `History`.

    Args:
      job: the run.
      folder: the run's folder.
      files: texts by name, written into the folder once the run is certain to start or continue.
    """
    from fedjax_sim import tree
    from fedjax_sim.population.describe import digest
    from fedjax_sim.report.files import read_lines
    from fedjax_sim.running import distributed
    from fedjax_sim.running.fingerprint import is_private
    from fedjax_sim.running.loggers import LOGGERS
    from fedjax_sim.running.loop import run as train
    from fedjax_sim.running.stopping import StopWhen

    loaded = job.loaded
    experiment = job.experiment
    options = loaded.resolved()["run"]
    callbacks = []
    if options["stop_when"] is not None:
        # A resumed run goes on with the evaluations that it has seen.
        records = read_lines(folder / "metrics.jsonl", []) if job.resume else []
        callbacks.append(StopWhen(options["stop_when"], distributed.from_first(lambda: records)))
    # With the seed, noise could be computed and subtracted by whoever reads a log.
    shown_options = tree.dotted(loaded.resolved())
    if is_private(experiment.algorithm):
        shown_options = {name: value for name, value in shown_options.items() if name.split(".")[-1] != "seed"}
    with seconds.part("data"):
        data_sha256 = digest(experiment.data)
    distributed.check_same("data", data_sha256, "Every process must read the same files.")
    identity = loaded.identity() | {"data_sha256": data_sha256}
    # Files besides the data's and modules count by their content, which must be the same for all processes, too.
    for kind in ("files", "modules"):
        if kind in identity:
            content = hashlib.sha256(repr(identity[kind]).encode()).hexdigest()
            distributed.check_same(kind, content, f"Every process must read the same {kind}.")
    if not job.quiet:
        done = f" after the {rounds_done(folder):,} done" if job.resume else ""
        clients = experiment.data.train.size
        rounds = options["rounds"]
        typer.echo(f"{job.name}: {clients:,} clients, {rounds:,} rounds{done}, into {folder}")
        for warning in experiment.data.warnings:
            typer.echo(f"Warning: {warning}")
        if attackers := expected_attackers(experiment, rounds):
            typer.echo(attackers)
    return train(
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
        resume=job.resume,
        allow_previous=job.allow_previous,
        callbacks=callbacks,
        loggers=[LOGGERS[name](folder, shown_options) for name in dict.fromkeys(options["log"] or [])],
        progress=options["progress"] and not job.quiet,
        identity=identity,
        files=files,
        origin=_origin(loaded, identity, experiment.data),
    )


def _origin(loaded: Any, identity: dict, data: Any) -> str | None:
    """Returns the digest of all that decides a run's programs; None if a part of it is not known by value.

    Args:
      loaded: the `Config`, with its plan.
      identity: of the run, with the digest of the data's arrays.
      data: the data set, whose names and facts count beside its arrays.
    """
    from fedjax_sim.running.origin import origin_of

    decided = loaded.of_programs(identity)
    facts = data._replace(**dict.fromkeys(OF_ARRAYS))
    return None if decided is None else origin_of(decided, facts)


def _timeline(experiment: Any, state: Any) -> dict[str, Any] | None:
    """Returns the clients of the next round, if it would take simulated time; None if noise hides who takes part."""
    import jax

    from fedjax_sim.types import noisy_parts

    star = experiment.algorithm.parts
    if star is None or star.sampler.devices is None or noisy_parts(star):
        return None
    from fedjax_sim.instruments.timeline import timeline

    return timeline(star, jax.random.fold_in(experiment.key, int(state.round)), state.sampler)


def _estimate(algorithm: Any, state: Any) -> dict[str, Any]:
    """Returns {"estimate": what a statistic found, as lists by name}; {} for an algorithm that trains a model.

    Instead of an array of more than `MOST_NUMBERS` numbers there is a text that says where it is.

    Args:
      algorithm: the run's `Algorithm`.
      state: its state after the last round.
    """
    import jax

    from fedjax_sim.running.log import plain

    if algorithm.evaluated.answer is None:
        return {}
    params = jax.device_get(algorithm.params(state))
    arrays = algorithm.evaluated.answer(params)

    def shown(name, x):
        if x.size <= MOST_NUMBERS:
            return plain(x)
        return f"{x.size:,} numbers" + (", by fedjax-sim export" if name in params else "")

    return {"estimate": {name: shown(name, x) for name, x in arrays.items()}}


def _finish(
    job: Job,
    folder: Path,
    history: Any,
    *,
    next_round: dict | None = None,
    rule: str | None = None,
    estimate: dict | None = None,
) -> None:
    """Writes the run's last files: summary, with the baseline of a constant prediction, timeline, clients and page.

    The summary is printed before the page is drawn, which takes seconds.

    Args:
      job: the run.
      folder: the run's folder.
      history: what the run returned beside its state.
      next_round: the timeline of the next round, as `_timeline` returns it; None to write none.
      rule: of `run.stop_when`, if it stopped the run; None if all rounds were run.
      estimate: what a statistic found, as `_estimate` returns it, for the summary.
    """
    from fedjax_sim.metrics.baseline import constant_baseline
    from fedjax_sim.population.datasets.column_uses import columns_in_words
    from fedjax_sim.report.by_client import BY_CLIENT, as_csv, client_rows
    from fedjax_sim.report.page import write_report
    from fedjax_sim.running.checksums import write
    from fedjax_sim.running.files import lock

    data = job.experiment.data
    # What `History` holds is about the rounds alone: the page also compares with a constant prediction.
    summary = {"name": job.name, **history.summary, **(estimate or {})}
    algorithm = job.experiment.algorithm
    summary["params_kind"] = algorithm.params_kind.name.lower()
    # The loss of a statistic is no loss of the task, and params that are no model have no test loss.
    if algorithm.evaluated.loss_fn is None and algorithm.params_kind.is_judged:
        summary |= constant_baseline(data.test, data.task, data.special_tokens)
    summary |= how_clients_count(algorithm.parts)
    if rule is not None:
        summary["stopped_when"] = rule
    notes = list(data.notes)
    # What these algorithms are for would not be judged.
    if algorithm.is_judged_by_owners and data.local_test is None:
        notes.append("no client keeps rows apart to judge its own model by: [data.with_local_test]")
    if notes:
        summary["data_notes"] = notes
    if data.table_columns:
        summary["data_columns"] = columns_in_words(data.table_columns)
    if data.warnings:
        summary["data_warnings"] = list(data.warnings)
    with lock(folder):
        summary |= {"seconds": passed} if (passed := seconds.so_far()) else {}
        try:
            if not job.quiet:
                first_loss = float(history.records[0].get("test_loss", "nan")) if history.records else math.nan
                show_summary(summary, first_loss)
        finally:  # even if nobody reads the output any more
            with _complete(folder):
                write(folder / "summary.json", _json(summary).encode())
                if next_round is not None:
                    write(folder / "timeline.json", _json(next_round).encode())
                if history.by_client and (rows := client_rows(data, history.by_client)):
                    write(folder / BY_CLIENT, as_csv(rows).encode())
                page = write_report(folder)
                # All since then was for the table and the page, which leaves it out: written again it is the same.
                if passed:
                    since = math.fsum(seconds.so_far().values()) - math.fsum(passed.values())
                    summary["seconds"] = passed | {"page": passed["page"] + since}
                    write(folder / "summary.json", _json(summary).encode())
        if not job.quiet:
            # The path is not in the table, which would break a long path into lines.
            terminal.console(soft_wrap=True).print(str(page))


class _NotWritten(OSError):
    """Files of a run that is complete could not be written."""


@contextlib.contextmanager
def _complete(folder: Path) -> Iterator[None]:
    """Says of files that cannot be written that the run is complete, and how to make its page again."""
    try:
        yield
    except OSError as error:
        way = f"fedjax-sim report {shlex.quote(str(folder))}"
        raise _NotWritten(
            f"{type(error).__name__}: {error}. The run is complete: its log and checkpoints are on disk. Free space or "
            f"mend the folder, then make its page: {way}"
        ) from error


def how_clients_count(star: Any) -> dict[str, str]:
    """Returns {"clients_count": how an aggregate weighs clients, in words}; {} for an algorithm without parts.

    For a hierarchy the words go level by level from the top.
    """
    if star is None:
        return {}
    words = _how_messages_count(star)
    while star.client.federation is not None:
        words += f"; inside of each {star.client.facts.level}: {_how_messages_count(star.client.federation)}"
        star = star.client.federation
    return {"clients_count": words}


def _how_messages_count(star: Any) -> str:
    """Returns, in words, how an aggregate of this level's messages weighs them."""
    if star.aggregator is None:
        # SplitGNN has none: its parties take one step on one graph.
        return "as parts of one step that they take together"
    rule = star.aggregator.facts
    is_sum = rule.sensitivity is not None or rule.modulus is not None
    if not rule.weighted and not is_sum:
        # Such a rule may choose messages, or weigh them by itself.
        return "not by their examples"
    if star.client.facts.uniform_weights or not rule.weighted:
        return "alike"
    by_weights = "by the weights that they report, such as their examples"
    return f"{by_weights}, but for some parts of an update" if rule.partly_weighted else by_weights


def _interrupted(error: KeyboardInterrupt, folder: Path | None, made: Path | None) -> NoReturn:
    """Ends an interrupted run: says how to continue it, and writes the page of its rounds so far.

    Args:
      error: the interrupt.
      folder: the run's folder; None if there is none yet.
      made: the folder if this process created it, which is removed if it is empty.
    """
    from fedjax_sim.running import distributed

    safe_round = rounds_done(folder) if folder else -1
    drop_empty(made)
    if safe_round > 0 and distributed.is_first():
        _page_of_rounds(folder)
    how_to_continue = f"Continue with: fedjax-sim run --resume --out {shlex.quote(str(folder))}"
    state = f"Round {safe_round} is safe. {how_to_continue}" if safe_round >= 0 else "No checkpoint yet."
    _stop(f"Interrupted. {state}", error)


def _failed(error: Exception, folder: Path | None, made: Path | None) -> NoReturn:
    """Ends a failed run with its error's text; raises the error again if it is a bug.

    Args:
      error: what stopped the run.
      folder, made: as for `_interrupted`.
    """
    from fedjax_sim.running import distributed

    drop_empty(made)
    # Diverged training has rounds to look at.
    if isinstance(error, ArithmeticError) and distributed.is_first():
        _page_of_rounds(folder)
    if distributed.lost_peer(error):
        _stop(f"Another process of this job died. Continue with --resume --out {shlex.quote(str(folder))}.", error)
    is_about_files = isinstance(error, (FileExistsError, FileNotFoundError))
    if isinstance(error, (TypeError, ValueError)) and not is_about_files:
        if not is_users_error(error):
            raise error
        _stop(str(error), error)
    if isinstance(error, _NotWritten) or is_about_files:
        _stop(str(error), error)
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and folder is not None and (safe_round := rounds_done(folder)) >= 0:
        way = f"fedjax-sim run --resume --out {shlex.quote(str(folder))}"
        words += f". Round {safe_round} is safe: free space or mend the folder, then {way}"
    _stop(words, error)


def _page_of_rounds(folder: Path) -> None:
    """Writes the page of a run that stopped; where that fails too, it says so and the run's own end is told."""
    from fedjax_sim.command.report import write_page
    from fedjax_sim.running.files import CheckpointError

    try:
        write_page(folder)
    except (CheckpointError, OSError) as error:
        typer.echo(f"No page: {error}", err=True)


def launch(
    arguments: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="E.g. run --set run.rounds=50.")],
    processes: Annotated[int, typer.Option("--processes", "-n", min=1, max=1024, help="How many to start.")],
) -> None:
    """Run a command in several processes on this machine, e.g. `fedjax-sim launch -n 2 -- run`."""
    from fedjax_sim.running.launch import launch_processes as start

    raise typer.Exit(start(arguments, processes))


def _stop(words: str, error: BaseException) -> NoReturn:
    """Ends the run with an error's text, which a single process of the job prints."""
    from fedjax_sim.running import distributed

    if distributed.reports(error) and words:
        typer.echo((f"Process {distributed.index()}: " if distributed.index() else "") + words, err=True)
    distributed.leave(error)
    raise typer.Exit(distributed.exit_code(error))


def _json(value: Any) -> str:
    """Returns a value as the text of a JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def show_summary(summary: dict[str, Any], first_loss: float) -> None:
    """Prints a run's summary as a table, and what to do if nothing was learned.

    Args:
      summary: the run's summary.
      first_loss: the test loss before the first round; NaN where it is not known.
    """
    from fedjax_sim.report.headline import more_tests, own_metrics, params_kind_of
    from fedjax_sim.report.numbers import listed
    from fedjax_sim.types import ParamsKind

    in_rounds = max(summary["rounds_seconds"], 1e-9)
    grid = terminal.grid(show_header=False)
    for place in ("test", "held_out"):
        for metric in ("accuracy", "loss"):
            if f"{place}_{metric}" in summary:
                baseline = summary.get(f"baseline_{metric}") if place == "test" else None
                text = f"{float(summary[f'{place}_{metric}']):.4f}"
                grid.add_row(
                    f"{place.replace('_', '-')} {metric}",
                    text + (f"  (guessing: {baseline:.4f})" if baseline is not None else ""),
                )
    kind = params_kind_of(summary)
    if "params_kind" in summary and kind not in (ParamsKind.MODEL, ParamsKind.ANSWER):
        grid.add_row("the params are", kind.value)
    if "personal_accuracy" in summary or "personal_loss" in summary:
        number = summary.get("personal_clients", "all")
        for metric in ("accuracy", "loss"):
            # Of all owners: those who have not trained have the model that they would begin with.
            if f"owner_{metric}" in summary and f"newcomer_{metric}" in summary:
                grid.add_row(f"all owners' {metric}", f"{float(summary[f'owner_{metric}']):.4f}")
            if f"personal_{metric}" in summary:
                grid.add_row(f"own models' {metric}", f"{float(summary[f'personal_{metric}']):.4f}  ({number} clients)")
            if f"newcomer_{metric}" in summary:
                grid.add_row(f"newcomers' {metric}", f"{float(summary[f'newcomer_{metric}']):.4f}")
    for name, words in more_tests(summary):
        grid.add_row(words, f"{float(summary[name]):.4f}")
    for name, values in summary.get("estimate", {}).items():
        grid.add_row(name, listed(values))
    grid.add_row("rounds", f"{summary['rounds']:,} in {in_rounds:.1f} s, {summary['rounds'] / in_rounds:,.1f} a second")
    if "stopped_when" in summary:
        grid.add_row("stopped", f"when {summary['stopped_when']}")
    visits = summary["client_visits"]
    distinct = summary.get("distinct_clients")
    by_whom = "" if distinct is None else f" by {distinct:,} different clients"
    grid.add_row("client visits", f"{visits:,}{by_whom}, {summary['clients_per_second']:,.0f} a second")
    if "clients_count" in summary:
        grid.add_row("clients are weighed", summary["clients_count"])
    for note in summary.get("data_notes", ()):
        grid.add_row("data", note)
    for words in summary.get("data_columns", ()):
        grid.add_row("columns", words)
    for warning in summary.get("data_warnings", ()):
        grid.add_row("warning", warning)
    grid.add_row("compilation", f"{summary['compile_seconds']:.1f} s")
    if "seconds" in summary:
        grid.add_row("wall time", seconds.shown_parts(summary["seconds"]))
    grid.add_row("sent up, down", f"{numbers.size(summary['uplink_bytes'])}, {numbers.size(summary['downlink_bytes'])}")
    grid.add_row("peak memory", numbers.size(summary["peak_memory_bytes"]))
    # The nodes of a graph take part without an invitation.
    if summary["clients_invited"]:
        grid.add_row("reported", f"{visits - summary['dropped_clients']:,} of {summary['clients_invited']:,} invited")
    grid.add_row("not finite", f"{summary['dropped_clients']:,} updates dropped")
    skipped = summary["skipped_rounds"]
    grid.add_row("skipped", f"{skipped:,} of {summary['rounds']:,} rounds")
    for _, words, text in own_metrics(summary):
        grid.add_row(words, text)
    if "privacy" in summary:
        spent = summary["privacy"]
        grid.add_row("privacy", spent.get("statement") or f"no epsilon: {spent['refused']}")
        if "statement" in spent:
            grid.add_row("", "the noise for another epsilon: fedjax-sim calibrate CONFIG.toml --epsilon E")
    console = terminal.console(soft_wrap=True)
    console.print(grid)
    loss = float(summary.get("test_loss", 0))
    baseline_loss = float(summary.get("baseline_loss", "inf"))
    # Not `loss > guess`, so that a NaN counts as no better than guessing.
    if not loss <= baseline_loss:
        subject = "The model is" if kind is ParamsKind.MODEL else "The params are"
        console.print(f"{subject} no better than guessing: {_advice(summary, first_loss, loss)}.", style="red")


def _advice(summary: dict[str, Any], first_loss: float, loss: float) -> str:
    """Returns what to do about a model that is no better than a constant prediction.

    Args:
      summary: the run's summary.
      first_loss: the test loss before the first round; NaN where it is not known.
      loss: the test loss after the last round; it may not be finite.

    Returns: the end of a sentence, without its full stop.
    """
    met = summary.get("attackers_met")
    skipped = summary["skipped_rounds"]
    rounds = summary["rounds"]
    if 2 * skipped > rounds and 2 * summary["dropped_clients"] > summary["client_visits"]:
        return f"{summary['dropped_clients']:,} updates were not finite, so try a lower learning rate"
    if 2 * skipped > rounds:
        return f"{skipped:,} of {rounds:,} rounds were skipped: no message arrived, or none was usable"
    if met:
        return f"{met:,} messages were attackers'"
    if not math.isfinite(loss) or loss > first_loss:
        return f"its test loss went from {first_loss:.4g} to {loss:.4g}, so try a lower learning rate"
    if loss < first_loss:
        return f"its test loss has fallen from {first_loss:.4g} to {loss:.4g}, so train for more rounds"
    return "its test loss has not fallen, so look at the curves of the report"
