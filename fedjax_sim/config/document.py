"""A run's config: `load` reads and resolves it, and `Config` says what of it belongs to a run's identity.

Three passes lead from a file to the objects of a run, each in a module: `config.read` (TOML, `--set`, `--unset`),
`config.resolve` (names, options, defaults) and `config.build` (objects). The first two import no JAX.
"""

from __future__ import annotations

import copy
import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedjax_sim.config import files
from fedjax_sim.config.own_modules import digests_of_modules
from fedjax_sim.config.read import read
from fedjax_sim.config.resolve import resolve
from fedjax_sim.config.toml import written
from fedjax_sim.config.value_kinds import ConfigError as ConfigError, Words, problem

# Options that change no bit of a round.
NO_RESULT = tuple("rounds checkpoint_every keep_checkpoints stop_when log devices client_memory progress".split())
NO_RESULT += ("evaluate_train", "metrics", "modules", "personal_steps", "variance_probe")
# Options of [run] that leave the compiled rounds as they are.
NO_PROGRAM = tuple("rounds evaluate_every checkpoint_every keep_checkpoints stop_when log progress".split())


@dataclasses.dataclass(frozen=True)
class Config:
    """A checked config, made by `load`."""

    tables: Mapping[str, Any]

    def resolved(self) -> dict[str, Any]:
        """Returns a copy of all tables with every default filled in.

        Data, their wrappers, and devices use the config's seed if they have no seed of their own.
        """
        return copy.deepcopy(dict(self.tables))

    @property
    def name(self) -> str:
        """What runs of this config are called, such as "digits-fedavg-0"."""
        return f"{self.tables['data']['name']}-{self.tables['algorithm']['name']}-{self.tables['seed']}"

    def identity(self) -> dict[str, Any]:
        """Returns what a resumed run must share with its checkpoint: all options that can change a bit of a round.

        A file counts by its content, under "files", and not by its path. So do the modules that `--with` names, and
        the modules of the user's that they import, under "modules". The data are not in the identity: callers put their
        digest beside it.

        Raises: ConfigError for a file that cannot be read.

        Guarantees: a file that moves leaves the identity as it is, and a file that changes does not
        (tests/laws/test_files.py::test_identity_is_content).
        """
        contents, problems = files.contents(self.tables)
        if problems:
            raise ConfigError(problems)
        tables = files.without_paths(self.tables)
        tables["run"] = {name: option for name, option in tables["run"].items() if name not in NO_RESULT}
        # Dicts compare equal in any order, but wrappers and transforms apply in the order of their tables.
        identity = tables | {"order": list(_inner(tables))} | ({"files": contents} if contents else {})
        modules = digests_of_modules(self.tables["run"]["modules"] or [])
        return identity | ({"modules": modules} if modules else {})

    def of_programs(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns all of this config that decides its compiled rounds, by value.

        None with modules of the user's own: they may read files and variables that are not known.

        Args:
          identity: of this config, with the digest of its data.
        """
        if self.tables["run"]["modules"]:
            return None
        run = files.without_paths(self.tables)["run"]
        return {**identity, "run": {name: option for name, option in run.items() if name not in NO_PROGRAM}}

    def planned(self, plan: Any) -> Config:
        """Returns this config with the lanes and chunk that were chosen for it.

        The plan is a part of a result's identity, since it decides the order of floating-point sums.
        """
        tables = self.resolved()
        tables["run"] |= plan._asdict()
        return Config(tables)

    def arithmetic(self) -> AbstractContextManager:
        """The block in which the config's programs are built and run: of `run.arithmetic`."""
        from fedjax_sim import engine

        return engine.fast_arithmetic(self.tables["run"]["arithmetic"] == "fast")

    def to_toml(self, folder: str | Path = ".") -> str:
        """Returns TOML that loads back to this config from a file in `folder`.

        Relative paths in the text are relative to `folder`.

        Guarantees: the text loads back to an equal config (tests/config/test_document.py::test_toml_round_trip).
        """
        return written(files.rebased(self.tables, ".", folder))


def _inner(tables: Mapping[str, Any], path: str = "") -> Iterable[str]:
    """Yields the paths of the tables inside tables in their order, which a comparison of dicts would ignore."""
    for key, table in tables.items():
        if isinstance(table, dict):
            if path:
                yield f"{path}{key}"
            yield from _inner(table, f"{path}{key}.")


def load(path: str | Path | None = None, overrides: Iterable[str] = (), without: Iterable[str] = ()) -> Config:
    """Reads and checks a config file; without a file, returns the default run.

    Args:
      path: a TOML file, or the name of an example, such as "quickstart". Relative paths in the file are relative to the
        file's folder. None stands for the default run: 100,000 clients over the digits, FedAvg with an MLP.
      overrides: texts `table.option=value` with the value as in TOML; text needs no quotes. Relative paths here, and in
        the config that is returned, are relative to the current folder.
      without: tables and options of the file that are left out, such as "downlink" or "sampler.with_dropout".

    Raises: ConfigError with every problem as `path.to.field: expected RULE, got VALUE. HINT`.

    Guarantees:
      JAX is not imported (tests/config/test_document.py::test_wrong_configs_need_no_jax).
      All problems are reported at once (tests/config/test_document.py::test_every_problem_at_once).
      Examples are found by name (tests/test_package.py::test_examples_have_names).
      Relative paths lead to the file that they mean, from any folder
      (tests/config/test_files.py::test_paths_are_relative_to_their_file).

    >>> config = load(None, ["sampler.cohort_size=50", "algorithm.name=fedprox"])
    >>> config.resolved()["algorithm"]["coefficient"], config.resolved()["sampler"]
    (0.1, {'name': 'uniform', 'cohort_size': 50})
    """
    document = read(path, overrides, without)
    problems = document.problems
    if document.tables.pop("sweep", None) is not None:
        command = "fedjax-sim sweep" if path is None else f"fedjax-sim sweep {shlex.quote(str(path))}"
        problems.append(problem("sweep", "no such table in a run", Words("one"), f"This file is a sweep: {command}"))
    tables = resolve(document.tables, problems)
    if problems:
        raise ConfigError(problems)
    return Config(files.rebased(tables, document.folder, but=document.set_here))
