"""Loads and runs a sweep from a config: the tables of a run, and `[sweep]` with its seeds and its grid."""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.config.document import Config, ConfigError
from fedjax_sim.config.files import contents, is_at_or_inside, named_paths, rebased, without_paths
from fedjax_sim.config.read import read
from fedjax_sim.config.registry import CHAINS
from fedjax_sim.config.resolve import resolve
from fedjax_sim.config.toml import inline, written
from fedjax_sim.config.value_kinds import Words, nearest_word, problem
from fedjax_sim.sweeps import presentation
from fedjax_sim.sweeps.labels import NONE

# Options of a run that a sweep refuses, and why.
REFUSED = {
    "variance_probe": "It probes one algorithm.",
    "stop_when": "All points run for all rounds.",
    "log": "Loggers get single runs.",
}

OPTIONS = ("seeds", "grid", "metrics", "batch", "halving", *presentation.OPTIONS)
ABSENT = Words("absent")
# Tables that no axis may vary -> why.
SHARED = {"run": "All points share the rounds"}
# Points that differ in one of these tables share no program: each such group is run by itself.
SEPARATE = ("data", "model")


class Halving(NamedTuple):
    """How successive halving chooses the combinations that run on."""

    metric: str
    best: str  # "highest" or "lowest"
    factor: int = 3  # one combination in so many runs on, for so many times the rounds


class SweepConfig(NamedTuple):
    """A `SweepConfig` is a checked sweep: its configs, and the values that each config has in the grid."""

    configs: list[Config]  # one for each combination
    combinations: list[dict[str, Any]]  # value by the option's path
    seeds: list[int]
    metrics: list[str] | None  # names that rows keep; None for all
    batch: int  # points vmapped at once
    shown: frozenset[str]  # options that the grid names for every config
    halving: Halving | None = None
    axes: tuple[str, ...] = ()  # paths of the grid
    presentation: presentation.Presentation = presentation.Presentation()
    document: Mapping[str, Any] = {}  # with `[sweep]`, as it was read and overridden

    def to_toml(self, folder: str | Path) -> str | None:
        """Returns the sweep as TOML that loads from a file in `folder`; None if the grid names relative paths.

        Rows are found by their values, and a path that is written anew would be another value.

        Args:
          folder: of the file, from which relative paths count.

        Guarantees: the text loads back to the same combinations and configs
        (tests/sweeps/test_repeat.py::test_a_sweep_is_written_and_read_back).
        """
        document = copy.deepcopy(dict(self.document))
        for config in self.configs:
            for place, name in named_paths(config.tables).items():
                if os.path.isabs(os.path.expanduser(name)):
                    continue
                if is_at_or_inside(place, self.axes):
                    return None
                *tables, last = place.split(".")
                if isinstance(_at(document, [*tables, last]), str):
                    _at(document, tables)[last] = os.path.relpath(os.path.realpath(name), os.path.realpath(folder))
        return written(document)

    def only(self, combinations: Sequence[Mapping[str, Any]]) -> SweepConfig:
        """Returns the sweep over those of its combinations that are among the given ones, in its own order."""
        places = [place for place, values in enumerate(self.combinations) if values in combinations]
        return self._replace(
            configs=[self.configs[place] for place in places],
            combinations=[self.combinations[place] for place in places],
        )

    def differences(self) -> dict[str, list[Any]]:
        """Returns the options that differ between the configs and are not in the grid.

        A default that comes with a part which a table of the grid names is left out.

        Returns: by the option's path, its value in each config; `absent` in a config whose parts do not take it.

        >>> loaded = load_sweep(None, ['sweep.grid.algorithm.name=["fedavg", "fedprox"]'])
        >>> loaded.differences()
        {'algorithm.server_optimizer': [None, 'absent'], 'algorithm.coefficient': ['absent', 0.1]}
        """
        from fedjax_sim.tree import dotted

        options_by_config = [dotted(config.resolved()) for config in self.configs]
        paths = dict.fromkeys(path for options in options_by_config for path in options)
        values_by_path = {path: [options.get(path, ABSENT) for options in options_by_config] for path in paths}
        return {
            path: values
            for path, values in values_by_path.items()
            if path not in self.shown
            and any(value != values[0] for value in values)
            and not self._comes_with_a_part(path, values)
        }

    def _comes_with_a_part(self, path: str, values: Sequence[Any]) -> bool:
        """Returns whether an option is a default inside a table of the grid: absent, or the same wherever it is."""
        present = [value for value in values if value is not ABSENT]
        return (
            path not in self.axes and is_at_or_inside(path, self.axes) and all(value == present[0] for value in present)
        )


def load_sweep(path: str | Path | None, overrides: Iterable[str] = (), without: Iterable[str] = ()) -> SweepConfig:
    """Reads a config with a table `[sweep]` and checks every combination, without JAX's compiler.

    The options of `[sweep]`:
      seeds: a number of seeds, or a list of them (default 5). Seeds vary model and rounds; the data keep the config's.
      grid: a table `[sweep.grid]` with a list of values for each path in the config, such as
        `"client_optimizer.learning_rate" = [0.1, 0.2]`, or nested tables. A value may be a table, as in
        `client_optimizer = [{name = "sgd"}, {name = "adam"}]`. It sets its own options, and leaves the others of that
        table as they are. For `transform` and `downlink` it is the whole chain, in its order, in place of the file's.
        Beside tables, "none" leaves the part out: `"sampler.with_dropout" = ["none", {rate = 0.1}]`.
      metrics: names of metrics that rows keep.
      batch: points vmapped at once.
      halving: a table `[sweep.halving]` with `metric = "test_loss"`, `best = "lowest"` and, if it is not to be 3, a
        `factor`: successive halving (`sweeps.halving.run_halving`).
      metric: the metric that figure and tables show.
      labels: words in figures and tables. A table `[sweep.labels]` has, by an axis' path, a text in place of the path
        or a list of texts in place of its values; `rows`, a text for each combination; and `metric`, for the metric.
      figure: a table with the fields of `sweeps.drawing.Drawing`.
      table: a table with the fields of `sweeps.paper_table.TableOptions`.

    Args:
      path: a TOML file or an example's name, as for `load`; relative paths in it are relative to its folder.
      overrides, without: as for `load`.

    Raises: ConfigError for a config, a table `[sweep]` or a combination that cannot run. The error lists the problems.

    >>> loaded = load_sweep(None, ["sweep.grid.client_optimizer.learning_rate=[0.1, 0.2]", "sweep.seeds=3"])
    >>> loaded.combinations, loaded.seeds
    ([{'client_optimizer.learning_rate': 0.1}, {'client_optimizer.learning_rate': 0.2}], [0, 1, 2])
    """
    from fedjax_sim.sweeps.grid import combinations_of, seeds_of

    document, folder, set_here, problems = read(path, overrides, without)
    table = document.pop("sweep", {})
    if not isinstance(table, dict):
        raise ConfigError([problem("sweep", "a table", table)])
    problems += [
        problem(f"sweep.{name}", "one of " + ", ".join(OPTIONS), Words("an unknown key"), nearest_word(name, OPTIONS))
        for name in table if name not in OPTIONS
    ]  # fmt: skip
    grid = table.get("grid", {})
    axes, tables = _axes_of(grid)
    problems += _problems_of_axes(grid, axes, tables)
    if problems:
        raise ConfigError(problems)
    try:
        combinations = combinations_of(axes)
        seeds = seeds_of(table.get("seeds", 5))
    except (TypeError, ValueError) as error:
        raise ConfigError([f"sweep.{error}"]) from error
    metrics = table.get("metrics")
    batch = table.get("batch", 1)
    if metrics is not None and not (isinstance(metrics, list) and all(isinstance(name, str) for name in metrics)):
        problems.append(problem("sweep.metrics", "a list of names", metrics))
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        problems.append(problem("sweep.batch", "an integer >= 1", batch))
    halving = _halving_of(table["halving"], problems) if "halving" in table else None
    shown_as = presentation.presentation_of(table, axes, combinations, problems)
    for name in axes if halving is not None else ():
        if name.partition(".")[0] == "data":
            hint = "Numbers on other data cannot be compared: make a sweep for each."
            problems.append(problem("sweep.halving", "none beside an axis of the data", name, hint))
    # Paths that the command line sets are relative to the current folder, all others to the file's.
    unmoved_places = {name for name in axes if is_at_or_inside(f"sweep.grid.{name}", set_here)}
    unmoved_places |= {place for place in set_here if not is_at_or_inside(place, axes)}
    configs = []
    for values in combinations:
        new_problems: list[str] = []
        resolved = _resolved_point(document, values, tables, new_problems)
        # Most combinations have the same problems: each is reported once.
        problems += [words for words in new_problems if words not in problems]
        if not new_problems:
            # Points are shared out over all devices.
            resolved["run"]["devices"] = "all"
            configs.append(Config(rebased(resolved, folder, but=unmoved_places)))
    run_options = configs[0].resolved()["run"] if configs else {}
    for name, hint in REFUSED.items():
        if run_options.get(name):
            problems.append(problem(f"run.{name}", "none in a sweep", run_options[name], hint))
    if problems:
        raise ConfigError(problems)
    _check_distinct(configs, combinations)
    shown = _shown_options(axes, tables)
    stated = document | {"sweep": table}
    return SweepConfig(
        configs=configs,
        combinations=combinations,
        seeds=seeds,
        metrics=metrics,
        batch=batch,
        shown=shown,
        halving=halving,
        axes=tuple(axes),
        presentation=shown_as,
        document=stated,
    )


def _halving_of(table: Any, problems: list[str]) -> Halving | None:
    """Returns how successive halving chooses; for a wrong table None.

    Args:
      table: `[sweep.halving]` as the document has it.
      problems: what is wrong with the sweep so far; what is wrong with the table is appended.

    Returns: None also where earlier problems exist.
    """
    if not isinstance(table, dict):
        problems.append(problem("sweep.halving", "a table", table))
        return None
    for name in table.keys() - set(Halving._fields):
        rule = "one of " + ", ".join(Halving._fields)
        hint = nearest_word(name, Halving._fields)
        problems.append(problem(f"sweep.halving.{name}", rule, Words("an unknown key"), hint))
    metric, best, factor = table.get("metric"), table.get("best"), table.get("factor", 3)
    if not isinstance(metric, str):
        problems.append(problem("sweep.halving.metric", "the name of a metric, such as test_loss", metric))
    if best not in ("highest", "lowest"):
        problems.append(problem("sweep.halving.best", 'one of "highest", "lowest"', best))
    if isinstance(factor, bool) or not isinstance(factor, int) or factor < 2:
        problems.append(problem("sweep.halving.factor", "an integer >= 2", factor))
    return None if problems else Halving(table["metric"], table["best"], factor)


def _axes_of(grid: Any) -> tuple[dict[str, Any], dict[str, dict[str, dict]]]:
    """Returns the axes of a grid, and those of their values that are tables.

    Rows are found by their values, so a value that is a table is replaced by its text.

    Args:
      grid: the table `[sweep.grid]` as the document has it, which may be wrong.

    Returns: (values by the axis' path, {the axis' path: {a table's text: the table}}).
    """
    from fedjax_sim.tree import dotted

    axes = dotted(grid) if isinstance(grid, dict) else {}
    tables = {
        name: {inline(value): value for value in values if isinstance(value, dict)}
        for name, values in axes.items()
        if isinstance(values, list)
    }
    axes = {
        name: [inline(value) if isinstance(value, dict) else value for value in values] if name in tables else values
        for name, values in axes.items()
    }
    return axes, tables


def _problems_of_axes(grid: Any, axes: dict[str, Any], tables: dict[str, dict[str, dict]]) -> Iterable[str]:
    """Yields what is wrong with the axes of a grid, besides their values.

    Args:
      grid: the table `[sweep.grid]` as the document has it, for the error.
      axes: values by the axis' path, as of `_axes_of`.
      tables: {the axis' path: {a table's text: the table}}, as of `_axes_of`.
    """
    if not axes:
        hint = 'Write [sweep.grid] with "client_optimizer.learning_rate" = [0.1, 0.2], say.'
        yield problem("sweep.grid", "values for an option at least", grid, hint)
    for name in axes:
        top = name.partition(".")[0]
        if top in SHARED:
            hint = f"{SHARED[top]}: make a sweep for each."
            yield problem(f"sweep.grid.{name}", "an option of what learns", Words(f"one of [{top}]"), hint)
        elif "." not in name and not tables.get(name):
            yield problem(f"sweep.grid.{name}", "a path such as sampler.cohort_size", name)
        elif "." not in name and name not in CHAINS and NONE in axes[name]:
            hint = "Without its table an axis would have the default part, under the label none."
            yield problem(f"sweep.grid.{name}", "tables alone", NONE, hint)
    yield from _set_twice({name: _paths(name, tables.get(name, {})) for name in axes})


def _resolved_point(
    document: dict, values: dict[str, Any], tables: dict[str, dict[str, dict]], problems: list[str]
) -> dict[str, Any]:
    """Returns the document with the values of a combination, resolved.

    Args:
      document: the config's tables without `[sweep]`; it is not changed.
      values: the combination, by the axis' path. A value that is a table is written as its text.
      tables: {the axis' path: {a table's text: the table}}, as of `_axes_of`.
      problems: a list to which what is wrong with the combination is appended.

    Returns: all options of the config with their defaults; empty if a value could not be put in its place.
    """
    point = copy.deepcopy(document)
    for name, value in values.items():
        if value == NONE and tables.get(name):
            _take_out(point, name.split("."))
            continue
        value = tables.get(name, {}).get(value, value)
        if name in CHAINS and isinstance(value, dict):
            # With members of the file's chain before its own, a row's label would be false.
            point[name] = copy.deepcopy(value)
        else:
            _put(point, name.split("."), value, problems)
    return resolve(point, problems) if not problems else {}


def _check_distinct(configs: list[Config], combinations: list[dict[str, Any]]) -> None:
    """Raises ConfigError if two combinations give the same config."""
    texts = [json.dumps(config.resolved()) for config in configs]
    for place, (text, point) in enumerate(zip(texts, combinations, strict=True)):
        if text in texts[:place]:
            rule = "another config at each point"
            hint = "Another point is the same run."
            raise ConfigError([problem("sweep.grid", rule, Words(inline(point)), hint)])


def _shown_options(axes: dict[str, Any], tables: dict[str, dict[str, dict]]) -> frozenset[str]:
    """Returns the options that the grid names for every config: those that every point of an axis sets."""
    from fedjax_sim.tree import dotted

    shown = {name for name in axes if not tables.get(name)}
    for name, points in tables.items():
        named = [{f"{name}.{key}" for key in dotted(point)} for point in points.values()]
        if name in CHAINS:
            # What a whole chain does not name is absent.
            shown |= set().union(*named)
        elif points and len(points) == len(axes[name]):
            # An axis with tables and plain values names the options of its tables for some configs alone.
            shown |= set.intersection(*named)
    return frozenset(shown)


def _paths(axis: str, points: dict[str, dict]) -> set[str]:
    """Returns the options that an axis of the grid sets; `points` are its tables by their text."""
    from fedjax_sim.tree import dotted

    if axis in CHAINS:
        return {axis}  # a point is the whole chain
    return {f"{axis}.{key}" for point in points.values() for key in dotted(point)} or {axis}


def _set_twice(paths: dict[str, set[str]]) -> Iterable[str]:
    """Yields a problem for any two axes that set the same option.

    A row would be labelled by a value that another axis replaced.
    """
    for (axis, options), (other_axis, other_options) in itertools.combinations(paths.items(), 2):
        set_by_both = {path for path in options if is_at_or_inside(path, other_options)}
        set_by_both |= {path for path in other_options if is_at_or_inside(path, options)}
        if set_by_both:
            rule = f"options that the axis {other_axis} does not set"
            words = Words(", ".join(sorted(set_by_both)))
            yield problem(f"sweep.grid.{axis}", rule, words, "Set an option in one axis.")


def _take_out(document: dict, path: list[str]) -> None:
    """Takes a table or option out of a document, if it is there."""
    *tables, last = path
    for name in tables:
        inner = document.get(name, {})
        document = inner if isinstance(inner, dict) else {}  # another value is refused as it is resolved
    document.pop(last, None)


def run_sweep(
    loaded: SweepConfig,
    directory: str | Path | None,
    *,
    resume: bool = False,
    progress: bool = False,
    metric: str | None = None,
) -> Any:
    """Runs a loaded sweep.

    Combinations whose data or model differ share no program. Each such group is run by itself, in its own folder
    `directory/part-1`, `part-2`, ... of finished points; the results of all stand in `directory`.

    Args:
      loaded: as `load_sweep` returns it.
      directory: where points and results are written; None to write none.
      resume: continue the sweep in `directory`.
      progress: show a bar.
      metric: the metric that will be shown; if it is missing, the sweep stops after its first points. None: any.

    Returns: a `Sweep`. Seed s has the bits of `fedjax-sim run` with that seed and the same seeds of the data, of their
    wrappers and of the devices: `data.seed`, `data.label_flip.seed`, `devices.seed`
    (tests/sweeps/test_config.py::test_a_config_sweep_is_runs; over data, ::test_axes_over_data_and_models; over cohort
    sizes, ::test_points_have_the_plans_of_their_runs). The sample of `run.evaluate_train` follows the config's seed.
    """
    from fedjax_sim.running.kept_files import check_free_of
    from fedjax_sim.sweeps.finished import POINTS, check_directory
    from fedjax_sim.sweeps.results import union_of_sweeps

    if directory is not None:
        check_free_of(directory, "a run", "a study")
    groups = _groups(loaded)
    folders = _point_folders(directory, len(groups))
    # A resume needs the first group's points, and a new sweep a folder without any.
    check_directory(folders[0], resume)
    results = []
    for group, folder in zip(groups, folders, strict=True):
        has_begun = folder is not None and (folder / POINTS).exists()
        results.append(_run_group(group, folder, resume and has_begun, progress, metric))
    if len(results) == 1:
        return results[0]._replace(labels=loaded.presentation.labels)
    names = results[0].names
    apart = tuple(name for name in names if name.partition(".")[0] in SEPARATE)
    result = union_of_sweeps(results, loaded.combinations)._replace(apart=apart, labels=loaded.presentation.labels)
    if directory is not None:
        result.write(directory)
    return result


def _point_folders(directory: str | Path | None, num_groups: int) -> list[Path | None]:
    """Returns the folder of the points of each group: the sweep's own if there is one group.

    >>> [str(folder) for folder in _point_folders("runs/sweep-1", 2)]
    ['runs/sweep-1/part-1', 'runs/sweep-1/part-2']
    """
    if directory is None:
        return [None] * num_groups
    folder = Path(directory)
    return [folder] if num_groups == 1 else [folder / f"part-{number}" for number in range(1, num_groups + 1)]


def _groups(loaded: SweepConfig) -> list[SweepConfig]:
    """Returns the sweep's combinations as sweeps over the same data and model, in the order in which these come."""
    places_by_tables: dict[str, list[int]] = {}
    for place, config in enumerate(loaded.configs):
        tables = config.resolved()
        separate_tables = json.dumps([tables.get(name) for name in SEPARATE])
        places_by_tables.setdefault(separate_tables, []).append(place)
    return [loaded.only([loaded.combinations[place] for place in places]) for places in places_by_tables.values()]


def _run_group(loaded: SweepConfig, directory: Path | None, resume: bool, progress: bool, metric: str | None) -> Any:
    """Runs a sweep whose combinations share data and model.

    Args:
      loaded: the sweep. Its first config decides data, model and the arithmetic of all points.
      directory: the folder of the points; None writes nothing.
      resume: whether finished points in the folder are kept.
      progress: whether a bar is shown.
      metric: a metric that the rows must have; None for none.

    Returns: a `sweeps.results.Sweep`.

    Raises: ConfigError if the frozen parameters depend on more than the config's own seed.
    """
    import jax

    from fedjax_sim import engine, tree
    from fedjax_sim.config.build import Builder, build
    from fedjax_sim.population.describe import digest
    from fedjax_sim.prng import stream
    from fedjax_sim.sweeps.sweep import sweep_points
    from fedjax_sim.types import Evaluated

    # Devices get whole runs, so no point's lanes follow from their number.
    with loaded.configs[0].arithmetic(), engine.one_device():
        base = build(loaded.configs[0])
    tables = loaded.configs[0].resolved()

    class SameData(Builder):
        """Builds another algorithm over the same data."""

        def data(self) -> Any:
            return base.data

    # A point has the plan that its run would have on one device, which follows from its cohort and its work. A trial is
    # timed once.
    is_timed = tables["run"]["plan"] == "trial"

    def built(config: Config) -> Any:
        with engine.one_device():
            return SameData(config.planned(base.plan) if is_timed else config).experiment()

    identity = {"config": loaded.configs[0].planned(base.plan).identity(), "data_sha256": digest(base.data)}
    identity["grid"] = dict(enumerate(_point(*pair) for pair in zip(loaded.configs, loaded.combinations, strict=True)))
    config_of_point = {
        tuple(values.items()): config for values, config in zip(loaded.combinations, loaded.configs, strict=True)
    }
    roots = [jax.random.key(seed) for seed in loaded.seeds]
    seeded = [built(_seeded(loaded.configs[0], seed)) for seed in loaded.seeds]
    starts = [experiment.params for experiment in seeded]
    # All points share the loss, and it closes over the frozen parameters.
    if len({tree.sha256_of(experiment.frozen).hexdigest() for experiment in (base, *seeded)}) > 1:
        rule = "the config's seed alone, which draws the frozen parameters"
        hint = "Or read them: [model.started_from]. With model.lora.freeze_a, make a run for each seed: A is drawn."
        raise ConfigError([problem("sweep.seeds", rule, loaded.seeds, hint)])

    shared_evaluation: list[Any] = []  # of the shared model alone: one function is compiled once for all points

    def made(**values: Any) -> tuple[Any, Any]:
        experiment = built(config_of_point[tuple(values.items())])
        algorithm = experiment.algorithm
        has_own_evaluation = algorithm.evaluated != Evaluated() or not algorithm.params_kind.is_judged
        if has_own_evaluation or tables["run"]["personal_steps"]:
            return experiment.algorithm, experiment.evaluation
        shared_evaluation.append(experiment.evaluation)
        return experiment.algorithm, shared_evaluation[0]

    with loaded.configs[0].arithmetic():
        return sweep_points(
            made,
            loaded.combinations,
            seeds=loaded.seeds,
            keys=[stream(root, "rounds") for root in roots],
            starts=starts,
            population=base.data.train,
            num_rounds=tables["run"]["rounds"],
            evaluate_every=tables["run"]["evaluate_every"],
            metrics=loaded.metrics,
            batch=loaded.batch,
            delta=tables["run"]["delta"],
            directory=directory,
            resume=resume,
            progress=progress,
            identity=identity,
            needed=[name for name in (metric, *loaded.presentation.table.metrics) if name is not None],
        )


def _point(config: Config, values: dict[str, Any]) -> dict[str, Any]:
    """Returns what identifies a combination of the grid: its values, with contents of files in place of paths."""
    digests, problems = contents(config.tables, values)
    if problems:
        raise ConfigError(problems)
    tables = without_paths(config.tables)
    return {name: _at(tables, name.split(".")) for name in values} | digests


def _at(tables: Any, keys: list[str]) -> Any:
    """Returns the value at a path in nested tables; None if there is no such path."""
    for key in keys:
        tables = tables.get(key) if isinstance(tables, dict) else None
    return tables


def _seeded(config: Config, seed: int) -> Config:
    """Returns a config with another seed."""
    return Config(config.resolved() | {"seed": seed})


def _put(document: dict, path: list[str], value: Any, problems: list[str]) -> None:
    """Sets the value at a path in a document; a value that is a table sets each of its options."""
    *tables, last = path
    for name in tables:
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            problems.append(problem(".".join(path), "a path of tables", document))
            return
    if isinstance(value, dict):
        document.setdefault(last, {})  # a table without options is one too, as a wrapper's whose defaults are meant
        for name, inner in value.items():
            _put(document, [last, name], inner, problems)
    else:
        document[last] = value
