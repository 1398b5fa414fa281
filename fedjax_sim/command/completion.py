"""Completes words at a prompt: `fedjax-sim --install-completion` makes the shell ask. Nothing here imports JAX."""

from __future__ import annotations

from fedjax_sim.command.folders import RUNS


def example_names(incomplete: str) -> list[str]:
    """Returns the names of examples that begin so, and the TOML files of the current folder.

    >>> example_names("quick")
    ['quickstart']
    """
    from pathlib import Path

    from fedjax_sim.config.read import EXAMPLES_FOLDER

    names = [str(path.relative_to(EXAMPLES_FOLDER).with_suffix("")) for path in EXAMPLES_FOLDER.rglob("*.toml")]
    files = [str(path) for path in Path().glob("*.toml")]
    return _beginning(incomplete, [*names, *files])


def part_names(incomplete: str) -> list[str]:
    """Returns what `fedjax-sim list` takes: subpackages, tables and parts.

    >>> part_names("fedbu")
    ['fedbuff']
    """
    from fedjax_sim.config import registry

    parts = [name for subpackage in registry.SUBPACKAGES for name in registry.parts(subpackage)]
    return _beginning(incomplete, [*registry.TABLES, *registry.SUBPACKAGES, *parts, "run"])


def run_folders(incomplete: str) -> list[str]:
    """Returns the folders of runs in `runs/`."""
    return _beginning(incomplete, [str(path.parent) for path in RUNS.glob("*/config.toml")])


def study_names(incomplete: str) -> list[str]:
    """Returns the names of studies.

    >>> study_names("part")
    ['participation']
    """
    from fedjax_sim.config import registry

    return _beginning(incomplete, [name.replace("_", "-") for name in registry.studies()])


def settings(incomplete: str) -> list[str]:
    """Returns what `--set` takes: the options of the default config, and the parts that each table can name.

    >>> settings("run.stop"), settings("sampler.name=pois")
    (['run.stop_when='], ['sampler.name=poisson'])
    """
    from fedjax_sim.config import registry
    from fedjax_sim.config.resolve import default_tables

    options = [f"{table}.{option}=" for table, options in default_tables().items() for option in options]
    names = [f"{table}.name={part}" for table in registry.TABLES for part in registry.parts_of_table(table)]
    return _beginning(incomplete, ["seed=", *options, *names])


def _beginning(incomplete: str, words: list[str]) -> list[str]:
    return sorted({word for word in words if word.startswith(incomplete)})
