"""Runs a grid of seeds and hyper-parameters as few compiled programs; every point equals the run that `run` makes."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import engine, validate
from fedjax_sim.prng import init_key
from fedjax_sim.running import terminal
from fedjax_sim.running.arguments import check_initial_model, num_arguments
from fedjax_sim.running.beside import beside
from fedjax_sim.running.environment import matmul_precision, numerics, versions
from fedjax_sim.running.files import lock
from fedjax_sim.running.fingerprint import (
    array_digest,
    bound,
    fingerprint_of_digests,
    is_opaque,
    is_private,
    program_digest,
)
from fedjax_sim.running.interrupts import interrupts
from fedjax_sim.running.log import as_record, plain
from fedjax_sim.running.privacy_ledger import Spending
from fedjax_sim.sweeps.arguments import check_run, check_sweep_numbers
from fedjax_sim.sweeps.finished import Finished
from fedjax_sim.sweeps.grid import check_arguments, combinations_of, seeds_of
from fedjax_sim.sweeps.points import Kind, Points, replicated, traced
from fedjax_sim.sweeps.records import Recorder
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.types import Algorithm, Array, Population, PyTree

BATCH_SECONDS = 2.0  # target: the time of the points that are committed together


def sweep(
    make: Callable[..., Algorithm],
    params: PyTree | Callable[[Array], PyTree],
    population: Population,
    num_rounds: int,
    *,
    grid: Mapping[str, Iterable] | Sequence[Mapping[str, Any]],
    seeds: int | Sequence[int] = 1,
    evaluation: Callable | None = None,
    evaluation_of: Callable[[Algorithm], Callable] | None = None,
    evaluate_every: int | None = None,
    metrics: Sequence[str] | None = None,
    batch: int = 1,
    delta: float | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
) -> Sweep:
    """Runs `num_rounds` rounds of every combination of values with every seed.

    Combinations that differ only in numbers share one compiled program. A value that changes a shape makes another
    program. So do numbers with which XLA computes differently when it knows them, such as exponents, 0 and 1
    (`sweeps.xla_constants`). The same seed gives every combination the same cohorts and minibatches, so that
    differences between combinations are paired. If parts add privacy noise, each point draws its own noise, since
    shared noise would cancel in the difference of two points.

    Args:
      make: (**values) -> Algorithm, called once for each combination, with the values as the grid has them.
      params: the initial model; or a function of a key, called once for each seed.
      population, num_rounds: as for `run`.
      evaluation: as for `run`, of params alone.
      evaluation_of: algorithm -> the evaluation of its points, in place of `evaluation`. Models of clients' own need
        it, since they are an algorithm's (`Evaluated`).
      grid: values for each name that `make` takes: all combinations of a dict, or the points of a list of dicts.
        Values are numbers, truth values, texts and None.
      seeds: S for seeds 0..S-1, or a list.
      evaluate_every: rounds between two rows of a point; by default the last round alone has a row.
      metrics: names of the metrics that rows keep, beside the counts that show divergence; by default all.
      batch: points vmapped at once. 1 repeats the bits of `run`; more is faster for small models and differs in the
        last digits.
      delta: as for `run`. If parts add noise, a row has the epsilon of its own run alone. Points share no cohort and no
        noise, so several points together have spent what `privacy.compose` computes for them. Publishing the best of
        many runs spends the privacy of all of them.
      directory: where finished points are written as they come, and the results at the end; None: nowhere.
      resume: continue the sweep in `directory`. Programs, data and the evaluation of the first model must agree.
      progress: show a bar.

    Returns: a `Sweep`, with a row for each point and evaluated round: seed, values, round, metrics, and
      `dropped_clients_so_far` and `skipped_rounds_so_far`, which show that a point diverged. Where rounds tell of bytes
      or of simulated time, `uplink_bytes_so_far`, `downlink_bytes_so_far` and `round_seconds_so_far` are their sums.

    Raises: the errors of `run`; ValueError for an `evaluation` of (params, state), and for both ways to evaluate;
      `checkpoint.CheckpointError` for a directory of another sweep.

    Guarantees:
      The point (s, values) has the bits of `run(key(s), make(**values), params, population, num_rounds)`, model and
      metrics, for any number of devices; if params is a function, it is called with `prng.init_key(key(s))`
      (tests/sweeps/test_sweep.py::test_a_sweep_is_single_runs; with models of clients' own,
      ::test_points_have_own_models_and_evaluations).
      A sweep that is killed and resumed has the same rows (tests/sweeps/test_sweep.py::test_kill_and_resume).
      A program is compiled while the points of the one before it run, and no point is lost if it cannot be compiled
      (tests/sweeps/test_sweep.py::test_a_program_is_compiled_while_points_run).
      Another sweep's points are refused (tests/sweeps/test_sweep.py::test_a_sweep_resumes_itself_alone).

    >>> import optax
    >>> from fedjax_sim import algorithms, population, sampling
    >>> data = population.quadratics(num_clients=4, dimension=2)
    >>> def make(rate):
    ...     return algorithms.fedavg(population.quadratic_loss, sampling.full(4), optax.sgd(rate), num_steps=1)
    >>> result = sweep(make, {"w": jnp.zeros(2)}, data.train, 3, grid={"rate": [0.1, 0.3]}, seeds=2)
    >>> len(result.rows), result.num_programs, [row["rate"] for row in result.rows]
    (4, 1, [0.1, 0.1, 0.3, 0.3])
    """
    if not callable(make):
        validate.fail("make", "a function of the grid's names", make, error=TypeError)
    combinations = combinations_of(grid)
    seeds = seeds_of(seeds)
    check_arguments(make, combinations[0])
    if evaluation is not None and evaluation_of is not None:
        validate.fail("evaluation", "None beside evaluation_of", evaluation, "Give one of them.")
    if evaluation is not None and callable(evaluation) and num_arguments(evaluation) == 2:
        hint = "The state is of one algorithm, and each point has its own: give evaluation_of."
        validate.fail("evaluation", "one of params, in a sweep", "one of (params, state)", hint)

    def make_judged(**values: Any) -> tuple[Algorithm, Callable | None]:
        algorithm = make(**values)
        return algorithm, evaluation if evaluation_of is None else evaluation_of(algorithm)

    keys = [jax.random.key(seed) for seed in seeds]
    starts = [params(init_key(key)) if callable(params) else params for key in keys]
    return sweep_points(
        make_judged,
        combinations,
        seeds=seeds,
        keys=keys,
        starts=starts,
        population=population,
        num_rounds=num_rounds,
        evaluate_every=evaluate_every,
        metrics=metrics,
        batch=batch,
        delta=delta,
        directory=directory,
        resume=resume,
        progress=progress,
    )


def sweep_points(
    make: Callable[..., tuple[Algorithm, Callable | None]],
    combinations: list[dict[str, Any]],
    *,
    seeds: list[int],
    keys: list[Array],
    starts: list[PyTree],
    population: Population,
    num_rounds: int,
    evaluate_every: int | None,
    metrics: Sequence[str] | None,
    batch: int,
    delta: float | None,
    directory: str | Path | None,
    resume: bool,
    progress: bool,
    identity: Mapping[str, Any] | None = None,
    needed: Sequence[str] = (),
) -> Sweep:
    """Does the work of `sweep` for given combinations.

    Args:
      make: (**values) -> (the algorithm, its evaluation as for `run`).
      combinations: the values of each combination, by option.
      seeds, population, num_rounds, evaluate_every, metrics, batch, delta, directory, resume, progress: as for `sweep`.
      keys, starts: the key and the initial params of each seed.
      identity: as for `run`. A "grid" in it stands for the combinations, for example with the contents of files in
        place of their names.
      needed: metrics that the rows must have.

    Raises: ValueError after the first points, if they lack a metric that is `needed`.
    """
    started = time.perf_counter()
    evaluate_every = num_rounds if evaluate_every is None else evaluate_every
    check_sweep_numbers(num_rounds, evaluate_every, batch, directory, resume)
    made = [make(**values) for values in combinations]
    algorithms = [algorithm for algorithm, _ in made]
    evaluations = [evaluation for _, evaluation in made]
    check_run(keys[0], algorithms[0], population, evaluations[0])
    for start in starts:
        check_initial_model(start)
    population = jax.tree.map(jnp.asarray, population)
    starts = jax.tree.map(lambda *rows: jnp.stack(rows), *starts)
    rounds = [*range(evaluate_every, num_rounds, evaluate_every), num_rounds]
    with ExitStack() as stack:
        interrupted = stack.enter_context(interrupts())
        stack.enter_context(jax.default_matmul_precision(matmul_precision()))
        if directory is not None:
            stack.enter_context(lock(directory))
        kinds, programs, epsilons = _prepared(combinations, algorithms, starts, population, rounds=rounds, delta=delta)
        # A resume compares the evaluation of the first model: two functions cannot be compared.
        first_evaluation = None
        if evaluations[0] is not None and directory is not None:
            start = jax.tree.map(lambda x: x[0], starts)
            first_evaluation = _evaluation_of_start(evaluations[0], algorithms[0], keys[0], start, population)
        identity = {
            "grid": {str(i): values for i, values in enumerate(combinations)},
            **(identity or {}), "evaluation": first_evaluation, "seeds": seeds,
            "keys": [jax.random.key_data(key).tolist() for key in keys], "num_rounds": num_rounds,
            "evaluate_every": evaluate_every, "metrics": metrics, "delta": delta, "batch": batch,
            "params": array_digest(starts), "population": array_digest(population), "programs": _programs(kinds),
            "versions": versions("fedjax-sim", "jax", "jaxlib"), **numerics(),
        } | ({"private": programs} if any(programs) else {})  # fmt: skip
        finished = Finished(directory, identity, resume)
        stack.callback(finished.drop_empty)
        recorder = Recorder(
            evaluations, metrics=metrics, combinations=combinations, seeds=seeds, epsilons=epsilons, needed=needed
        )
        bar = stack.enter_context(_bar(progress, len(combinations) * len(seeds), len(finished.rows)))
        words = np.stack([jax.random.key_data(key) for key in keys])
        bound_words = _bound_words(keys, programs, starts, population)
        runner = _Runner(
            finished=finished,
            recorder=recorder,
            rounds=rounds,
            words=words,
            bound_words=bound_words,
            bar=bar,
            interrupted=interrupted,
        )
        # Combinations with equal programs are points of one compiled program.
        groups: dict[Any, list[int]] = {}
        for i, kind in enumerate(kinds):
            groups.setdefault(kind.name, []).append(i)
        impl = str(jax.random.key_impl(keys[0]))
        shared = replicated((starts, population))  # two programs may be there at once, which hold them

        def lowered(members: list[int], wanted: list[int]) -> Points:
            judges = [evaluations[i] for i in members]
            return Points(
                [kinds[i] for i in members], *shared, impl=impl, batch=batch, most=len(wanted),
                yields_states=any(judge is not None and num_arguments(judge) == 2 for judge in judges),
            )  # fmt: skip

        unfinished = []
        for members in groups.values():
            # A point's number is i * S + s, for combination i and seed s of S.
            points = [i * len(seeds) + s for i in members for s in range(len(seeds))]
            if wanted := [point for point in points if point not in finished.rows]:
                unfinished.append((members, wanted))
        compile_seconds = _run_programs(runner, lowered, unfinished)
    combination_of_point = [divmod(point, len(seeds))[0] for point in range(len(combinations) * len(seeds))]
    rows = [row | combinations[i] for point, i in enumerate(combination_of_point) for row in finished.rows[point]]
    result = Sweep(
        rows=rows,
        names=tuple(combinations[0]),
        seeds=seeds,
        num_programs=len(groups),
        exact=batch == 1,
        compile_seconds=compile_seconds,
        seconds=time.perf_counter() - started,
    )
    if directory is not None:
        result.write(directory)
    return result


def _run_programs(runner: _Runner, lowered: Callable[..., Points], unfinished: list[tuple]) -> float:
    """Runs the points of one program after the other, while the next program is compiled.

    Args:
      runner: runs points.
      lowered: (members, wanted) -> the program of these combinations and points.
      unfinished: (combinations, numbers of their points that are run) for each program.

    Returns: the seconds in which no point ran, because its program was not there.
    """
    waited_seconds = 0.0
    program = None
    for place, (members, wanted) in enumerate(unfinished):
        start_seconds = time.perf_counter()
        if program is None:
            program = lowered(members, wanted)
            program.compile()
        next_program = lowered(*unfinished[place + 1]) if place + 1 < len(unfinished) else None
        waited_seconds += time.perf_counter() - start_seconds
        if next_program is None:
            runner.run(program, members, wanted)
        else:
            run = partial(runner.run, program, members, wanted)
            waited_seconds += _seconds_after(next_program.compile, run)
        program = next_program
    return waited_seconds


def _seconds_after(work: Callable[[], None], meanwhile: Callable[[], None]) -> float:
    """Does both at once, as `beside` does; returns for how many seconds `work` went on when `meanwhile` had ended."""
    ended = []

    def timed() -> None:
        meanwhile()
        ended.append(time.perf_counter())

    beside(work, timed)
    return time.perf_counter() - ended[0]


def _evaluation_of_start(
    evaluation: Callable, algorithm: Algorithm, key: Array, params: PyTree, population: Population
) -> dict[str, Any]:
    """Returns the record before training: of the model, of a statistic's first estimate, of clients' first states."""
    with engine.one_device(), engine.client_memory("device"):
        state = algorithm.init(init_key(key), params, population)
        arguments = (algorithm.params(state), state)[: num_arguments(evaluation)]
        return as_record(0, evaluation(*arguments))


def _prepared(
    combinations: list[dict[str, Any]],
    algorithms: list[Algorithm],
    starts: PyTree,
    population: PyTree,
    *,
    rounds: list[int],
    delta: float | None,
) -> tuple[list[Kind], list[str], list[_Epsilons]]:
    """Traces the algorithms of all combinations, and accounts for their privacy.

    Args:
      combinations: C combinations, as values by name.
      algorithms: that of each combination.
      starts: leaves [S, ...], the initial params of each seed; their shapes count alone.
      population: the clients.
      rounds: the rounds that are reported, rising.
      delta: of the epsilon; None for the default.

    Returns: for each combination its traces, the digest of its program if it is private (else ""), and its epsilons.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), starts)
    kinds = []
    programs = []
    epsilons = []
    for values, algorithm in zip(combinations, algorithms, strict=True):
        try:
            kinds.append(traced(algorithm, params, population))
        except Exception as error:
            error.add_note(f"This is the combination {values}, which cannot be traced. No point of the sweep has run.")
            raise
        programs.append(program_digest(algorithm, params, population) if is_private(algorithm) else "")
        spending = Spending(algorithm, params, population, programs[-1], delta=delta, directory=None)
        epsilons.append(_Epsilons(spending, rounds))
    return kinds, programs, epsilons


class _Runner(NamedTuple):
    """Runs points of a compiled program in shares, and commits each share when it is done."""

    finished: Finished
    recorder: Recorder
    rounds: list[int]
    words: np.ndarray  # [seeds, ...] key data
    bound_words: np.ndarray  # [combinations, seeds, ...] key data of the rounds
    bar: Callable[[int], None]
    interrupted: Any  # true once the user has interrupted the sweep

    def run(self, program: Points, members: list[int], wanted: list[int]) -> None:
        """Runs points of a program.

        Args:
          program: the compiled program.
          members: the combinations that the program was made of.
          wanted: numbers of the points that are run.

        Raises: KeyboardInterrupt after the share during which the user interrupted.
        """
        row_of_combination = {combination: i for i, combination in enumerate(members)}
        # The first share is the smallest that uses all devices: its time tells how large the next one may be.
        count = min(len(wanted), program.devices * program.batch)
        while wanted:
            share = wanted[:count]
            wanted = wanted[count:]
            start_seconds = time.perf_counter()
            combination, seed = np.divmod(np.array(share, np.int32), np.int32(len(self.words)))
            rows = np.array([row_of_combination[i] for i in combination.tolist()], np.int32)
            looks = program.run(self.words[seed], self.bound_words[combination, seed], rows, seed, self.rounds)
            self.finished.add(self.recorder.rows(share, zip(self.rounds, looks, strict=True)))
            seconds = time.perf_counter() - start_seconds
            self.bar(len(share))
            by_time = int(BATCH_SECONDS * len(share) / max(seconds, 1e-6))
            count = min(program.room, 2 * len(share), max(1, by_time))
            # Rounded up to whole batches on all devices.
            count = -(-count // (program.devices * program.batch)) * program.devices * program.batch
            if self.interrupted:
                raise KeyboardInterrupt


class _Epsilons:
    """The privacy entries of the records of a combination's runs."""

    def __init__(self, spending: Spending, rounds: Sequence[int]):
        self.spending = spending
        if is_opaque(spending.source):
            spending.void = "Programs that call the host cannot be told apart: points may share their noise."
        spending.enter(0, rounds[-1])
        self.by_round = {round: {name: plain(x) for name, x in spending.record(round).items()} for round in rounds}

    def record(self, round: int, counts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries after a round; none if the counts of all rounds until then show a missing message."""
        return {} if self.spending.misses(counts) else self.by_round[round]


def _bound_words(keys: list[Array], programs: list[str], starts: PyTree, population: PyTree) -> np.ndarray:
    """Returns key data of the rounds, [combinations, seeds, ...], bound to programs, starts and data as in `run`."""
    data = array_digest(population) if any(programs) else ""
    words = []
    for program in programs:
        fingerprints = []
        for s, key in enumerate(keys):
            start = jax.tree.map(lambda x, s=s: x[s], starts)
            fingerprints.append(fingerprint_of_digests(program, array_digest(start), data, key) if program else "")
        bound_keys = [bound(key, source) for key, source in zip(keys, fingerprints, strict=True)]
        words.append([jax.random.key_data(key) for key in bound_keys])
    return np.array(words)


def _programs(kinds: list[Kind]) -> str:
    """Returns a digest of what `make` returned: its programs, their constants, and the floats in them."""
    sha = hashlib.sha256()
    texts = {}
    for kind in kinds:
        if kind.name not in texts:
            # Memory addresses differ from process to process.
            texts[kind.name] = re.sub(r"0x[0-9a-f]+|id=\d+", "", repr(kind.name)).encode()
        sha.update(texts[kind.name])
        for part in (kind.init, kind.step, kind.params):
            for x in part.floats:
                sha.update(x.tobytes())
    return sha.hexdigest()


@contextmanager
def _bar(shown: bool, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Yields a function of a number of points that advances a bar; it does nothing unless `shown`.

    Args:
      shown: whether there is a bar.
      total: points of the sweep.
      done: points that are finished already.
    """
    if not shown:
        yield lambda count: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("points"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=terminal.console(),
    ) as bar:
        task = bar.add_task("points", total=total, completed=done)
        yield lambda count: bar.advance(task, count)
