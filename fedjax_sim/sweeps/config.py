"""A sweep from a config: a run's tables, and `[sweep]` with its seeds and grid."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.config.document import Config, ConfigError, resolve
from fedjax_sim.config.files import contents, is_within, rebased, without_paths
from fedjax_sim.config.toml import config_file, inline, override, places_set, read_document, unset
from fedjax_sim.config.value_kinds import Words, nearest_word, problem

__all__ = ["SweepConfig", "load_sweep", "run_sweep"]

OPTIONS = ("seeds", "grid", "metrics", "batch")
ABSENT = Words("absent")
SHARED = {"data": "They share the clients", "model": "They share the model", "run": "They share the rounds"}


class SweepConfig(NamedTuple):
    """A checked sweep: its configs, and the values that each has in the grid."""

    configs: list[Config]
    combinations: list[dict[str, Any]]
    seeds: list[int]
    metrics: list[str] | None
    batch: int
    shown: frozenset[str]  # options that the grid names for every config

    def differences(self) -> dict[str, list[Any]]:
        """The options that differ between the configs and are not in the grid: by path, the value in each config.

        An option that a config's parts do not take is `absent` there.

        >>> loaded = load_sweep(None, ['sweep.grid.algorithm.name=["fedavg", "fedprox"]'])
        >>> loaded.differences()
        {'algorithm.server_optimizer': [None, 'absent'], 'algorithm.coefficient': ['absent', 0.1]}
        """
        from fedjax_sim.tree import dotted

        options = [dotted(config.resolved()) for config in self.configs]
        paths = dict.fromkeys(path for found in options for path in found)
        values = {path: [found.get(path, ABSENT) for found in options] for path in paths}
        return {
            path: found
            for path, found in values.items()
            if path not in self.shown and any(x != found[0] for x in found)
        }


def load_sweep(path: str | Path | None, overrides: Iterable[str] = (), without: Iterable[str] = ()) -> SweepConfig:
    """Reads a config with a table `[sweep]` and checks every combination, without JAX's compiler.

    In `[sweep]`: `seeds`, a number of them or a list (default 5); `[sweep.grid]`, lists of values by their path in the
    config, `"client_optimizer.learning_rate" = [0.1, 0.2]` or nested tables; `metrics`, names that rows keep; `batch`,
    points vmapped at once. A value may be a table: `client_optimizer = [{name = "sgd"}, {name = "adam"}]`. It sets its
    options, and leaves the others of that table as they are. The seeds vary model and rounds; the data keep the
    config's seed. Relative paths are as in `load`: those of the file are relative to its folder.

    Raises: ConfigError with every problem.

    >>> loaded = load_sweep(None, ["sweep.grid.client_optimizer.learning_rate=[0.1, 0.2]", "sweep.seeds=3"])
    >>> loaded.combinations, loaded.seeds
    ([{'client_optimizer.learning_rate': 0.1}, {'client_optimizer.learning_rate': 0.2}], [0, 1, 2])
    """
    from fedjax_sim.sweeps.grid import combinations_of, seeds_of
    from fedjax_sim.tree import dotted

    overrides = list(overrides)
    document = {} if path is None else read_document(path)
    folder = "." if path is None else config_file(path).parent
    problems = [*unset(document, without), *override(document, overrides)]
    table = document.pop("sweep", {})
    if not isinstance(table, dict):
        raise ConfigError([problem("sweep", "a table", table)])
    problems += [
        problem(f"sweep.{name}", "one of " + ", ".join(OPTIONS), Words("an unknown key"), nearest_word(name, OPTIONS))
        for name in table if name not in OPTIONS
    ]  # fmt: skip
    grid = table.get("grid", {})
    axes = dotted(grid) if isinstance(grid, dict) else {}
    tables = {name: {inline(x): x for x in values if isinstance(x, dict)} for name, values in axes.items()
              if isinstance(values, list)}  # fmt: skip
    axes = {name: [inline(x) if isinstance(x, dict) else x for x in values] if name in tables else values
            for name, values in axes.items()}  # fmt: skip
    if not axes:
        hint = 'Write [sweep.grid] with "client_optimizer.learning_rate" = [0.1, 0.2], say.'
        problems.append(problem("sweep.grid", "values for an option at least", grid, hint))
    for name in axes:
        top = name.partition(".")[0]
        if top in SHARED:
            problems.append(problem(f"sweep.grid.{name}", "an option of what learns", Words(f"one of [{top}]"),
                                    f"{SHARED[top]}: make a sweep for each."))  # fmt: skip
        elif "." not in name and not tables.get(name):
            problems.append(problem(f"sweep.grid.{name}", "a path such as sampler.cohort_size", name))
    problems += _set_twice({name: _paths(name, tables.get(name, {})) for name in axes})
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
    given_here = places_set(overrides)
    here = {name for name in axes if is_within(f"sweep.grid.{name}", given_here)}
    here |= {place for place in given_here if not is_within(place, axes)}
    configs = []
    for values in combinations:
        found: list[str] = []
        given = copy.deepcopy(document)
        for name, value in values.items():
            _put(given, name.split("."), tables.get(name, {}).get(value, value), found)
        resolved = resolve(given, found) if not found else {}
        problems += [words for words in found if words not in problems]
        if not found:
            resolved["run"]["devices"] = "all"  # points are shared out over them
            configs.append(Config(rebased(resolved, folder, but=here)))
    probe = configs and configs[0].resolved()["run"]["variance_probe"]
    if probe:
        problems.append(problem("run.variance_probe", "none in a sweep", probe, "It probes one algorithm."))
    if problems:
        raise ConfigError(problems)
    found_configs = [json.dumps(config.resolved()) for config in configs]
    for place, (one, point) in enumerate(zip(found_configs, combinations, strict=True)):
        if one in found_configs[:place]:
            raise ConfigError(
                [
                    problem(
                        "sweep.grid",
                        "another config at each point",
                        Words(inline(point)),
                        "Another point is the same run.",
                    )
                ]
            )
    shown = {name for name in axes if not tables.get(name)}
    for name, points in tables.items():
        if points and len(points) == len(axes[name]):
            shown |= set.intersection(*({f"{name}.{key}" for key in dotted(point)} for point in points.values()))
    return SweepConfig(configs, combinations, seeds, metrics, batch, frozenset(shown))


def _paths(axis: str, points: dict[str, dict]) -> set[str]:
    """The options that an axis of the grid sets; `points` are its tables by their text."""
    from fedjax_sim.tree import dotted

    return {f"{axis}.{key}" for point in points.values() for key in dotted(point)} or {axis}


def _set_twice(paths: dict[str, set[str]]) -> Iterable[str]:
    """Problems of axes that set the same option: a row would be labelled by a value that another axis replaced."""
    for (one, here), (other, there) in itertools.combinations(paths.items(), 2):
        if both := {path for path in here if is_within(path, there)} | {
            path for path in there if is_within(path, here)
        }:
            rule = f"options that the axis {other} does not set"
            yield problem(f"sweep.grid.{one}", rule, Words(", ".join(sorted(both))), "Set an option in one axis.")


def run_sweep(
    loaded: SweepConfig,
    directory: str | Path | None,
    *,
    resume: bool = False,
    progress: bool = False,
    metric: str | None = None,
) -> Any:
    """Runs a loaded sweep; if the `metric` to be shown is missing it stops after its first points.

    Returns: a `Sweep`. Seed s has the bits of `fedjax-sim run` with that seed and the same seeds of the data and of
    their wrappers, `data.seed`, `data.label_flip.seed`
    (tests/sweeps/test_config.py::test_a_config_sweep_is_runs).
    """
    import jax

    from fedjax_sim.config.build import Builder, build
    from fedjax_sim.population.describe import digest
    from fedjax_sim.prng import stream
    from fedjax_sim.sweeps.finished import check_directory
    from fedjax_sim.sweeps.sweep import sweep_points

    check_directory(directory, resume)
    base = build(loaded.configs[0])
    tables = loaded.configs[0].resolved()

    class Again(Builder):
        """Builds another algorithm over the same data."""

        def data(self) -> Any:
            return base.data

    def built(config: Config) -> Any:
        return Again(config.planned(base.plan)).experiment()

    identity = {"config": loaded.configs[0].planned(base.plan).identity(), "data_sha256": digest(base.data)}
    identity["grid"] = dict(enumerate(_point(*pair) for pair in zip(loaded.configs, loaded.combinations, strict=True)))
    place = {tuple(values.items()): config for values, config in zip(loaded.combinations, loaded.configs, strict=True)}
    roots = [jax.random.key(seed) for seed in loaded.seeds]
    starts = [built(_seeded(loaded.configs[0], seed)).params for seed in loaded.seeds]

    def algorithm(**values: Any) -> Any:
        made = built(place[tuple(values.items())]).algorithm
        swept = [name for name in values if name.partition(".")[0] == "algorithm"]
        if made.evaluated.model is not None and swept:
            hint = "All points are evaluated as the first one, through its links: make a sweep for each."
            raise ConfigError([problem(f"sweep.grid.{swept[0]}", "no option of what is evaluated over links",
                                       values[swept[0]], hint)])  # fmt: skip
        return made

    return sweep_points(
        algorithm, loaded.combinations, loaded.seeds,
        [stream(root, "rounds") for root in roots], starts, base.data.train, tables["run"]["rounds"],
        evaluation=base.evaluation, evaluate_every=tables["run"]["evaluate_every"], metrics=loaded.metrics,
        batch=loaded.batch, delta=tables["run"]["delta"], directory=directory, resume=resume, progress=progress,
        identity=identity,
        needed=metric,
    )  # fmt: skip


def _point(config: Config, values: dict[str, Any]) -> dict[str, Any]:
    """What a combination of the grid is: its values, with contents in place of paths."""
    found, problems = contents(config.tables, values)
    if problems:
        raise ConfigError(problems)
    tables = without_paths(config.tables)
    return {name: _at(tables, name.split(".")) for name in values} | found


def _at(tables: Any, keys: list[str]) -> Any:
    for key in keys:
        tables = tables.get(key) if isinstance(tables, dict) else None
    return tables


def _seeded(config: Config, seed: int) -> Config:
    return Config(config.resolved() | {"seed": seed})


def _put(document: dict, path: list[str], value: Any, problems: list[str]) -> None:
    *tables, last = path
    for name in tables:
        document = document.setdefault(name, {})
        if not isinstance(document, dict):
            problems.append(problem(".".join(path), "a path of tables", document))
            return
    if isinstance(value, dict):
        for name, inner in value.items():
            _put(document, [last, name], inner, problems)
    else:
        document[last] = value
