"""Implements `fedjax-sim export`, a run's model as a file of arrays, and `fedjax-sim init`, an example to edit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.folders import check_output, rounds_at_end
from fedjax_sim.command.options import OwnModules, RunFolder

__all__ = ["export", "init"]


def init(
    example: Annotated[
        str, typer.Argument(metavar="[EXAMPLE]", help="The name of an example.", autocompletion=example_names)
    ] = "quickstart",
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="By default the example's name in the current folder.")
    ] = None,
) -> None:
    """Copy an example's config, to edit it and run it."""
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.toml import EXAMPLES, read_document
    from fedjax_sim.config.value_kinds import nearest_word, problem

    try:
        names = sorted(str(path.relative_to(EXAMPLES).with_suffix("")) for path in EXAMPLES.rglob("*.toml"))
        if example not in names:
            raise ConfigError([problem("EXAMPLE", "one of " + ", ".join(names), example, nearest_word(example, names))])
        source = EXAMPLES / f"{example}.toml"
        target = Path(f"{source.stem}.toml") if path is None else path
        check_output("FILE", target, (".toml",))
        if os.path.lexists(target):
            raise ConfigError([problem("FILE", "a path where nothing is yet", str(target), "Give another one.")])
        command = "sweep" if "sweep" in read_document(source) else "run"
        target.write_bytes(source.read_bytes())
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{target}: edit it, then fedjax-sim {command} {target}")


def export(
    run: RunFolder,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="model.npz or model.safetensors.")],
    own_modules: OwnModules = None,
    allow_previous: Annotated[
        bool, typer.Option("--allow-previous", help="Take an earlier checkpoint if the newest is damaged or missing.")
    ] = False,
) -> None:
    """Write the model of a run's newest checkpoint as named arrays, such as hidden_0/kernel.

    The run's data must be where they were, since the model is rebuilt from the config. In .npz, arrays of bfloat16
    become float32, which holds the same numbers.
    """
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.running.environment import prepare
    from fedjax_sim.running.files import CheckpointError

    try:
        registry.admit(own_modules or [])
        check_output("FILE", path, (".npz", ".safetensors"))
        prepare()
        round, arrays = model_of(run, allow_previous=allow_previous)
        _written(path, arrays)
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (CheckpointError, ImportError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, FileNotFoundError) else 1) from error
    typer.echo(f"{path}: {len(arrays)} arrays, {sum(x.size for x in arrays.values()):,} numbers, after round {round:,}")


def model_of(run: Path, *, allow_previous: bool = False) -> tuple[int, dict[str, Any]]:
    """Returns the round of a run's newest checkpoint, and its model as NumPy arrays by name.

    Args:
      run: the run's folder.
      allow_previous: take an earlier checkpoint, with a warning, if the newest is damaged or missing.

    Raises: FileNotFoundError for a folder without config.toml or checkpoint; CheckpointError for files that were
      changed, or whose state is not the config's; ConfigError where the config can no longer be built.

    Guarantees: the arrays are those that the run ended with (tests/command/test_compare.py::test_the_model_of_a_run).
    """
    import jax
    import numpy as np

    from fedjax_sim import engine
    from fedjax_sim.config.build import build
    from fedjax_sim.config.document import load
    from fedjax_sim.running import checkpoint, checksums

    if not (run / "config.toml").is_file():
        raise FileNotFoundError(f"RUN: expected a run's folder, with config.toml, got {str(run)!r}.")
    checksums.check_files(run, ["config.toml"])
    newest = checkpoint.latest(run / "checkpoints", allow_previous=allow_previous)
    if newest is None:
        raise FileNotFoundError(f"RUN: expected a folder with a checkpoint, got {str(run)!r}.")
    if not allow_previous and (trouble := checkpoint.trouble_with_newest(run / "checkpoints", rounds_at_end(run))):
        raise checkpoint.CheckpointError(f"{trouble} --allow-previous exports the model of that round.")
    config = load(run / "config.toml", ["run.log=none"])  # nothing is logged, and no logger need be installed
    with config.arithmetic(), engine.client_memory(config.resolved()["run"]["client_memory"], run):
        experiment = build(config)
        initial = jax.eval_shape(experiment.algorithm.init, experiment.key, experiment.params, experiment.data.train)
        state, meta = checkpoint.restore(newest, engine.gathered(initial, spec=True))
        params = experiment.algorithm.params(state)
    named = {
        "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path): x
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    return meta["round"], {name or "params": np.asarray(x) for name, x in named.items()}


def _written(path: Path, arrays: dict[str, Any]) -> None:
    """Writes named arrays, completely or not at all.

    Raises: ImportError where the package `safetensors` is needed and missing.
    """
    import io

    import numpy as np

    from fedjax_sim.running.files import write_atomically

    if path.suffix == ".npz":
        wide = {name: x.astype(np.float32) if x.dtype.name == "bfloat16" else x for name, x in arrays.items()}
        buffer = io.BytesIO()
        np.savez(buffer, **wide)
        content = buffer.getvalue()
    else:
        try:
            from safetensors.numpy import save
        except ImportError as error:
            raise ImportError(
                "safetensors: expected the package, got none. pip install 'fedjax_sim[export]'"
            ) from error
        content = save({name: np.ascontiguousarray(x) for name, x in arrays.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [content])
