"""Implements `fedjax-sim export`, a run's model as a file of arrays, and `fedjax-sim init`, an example to edit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedjax_sim.command.completion import example_names
from fedjax_sim.command.errors import is_users_error
from fedjax_sim.command.folders import check_output
from fedjax_sim.command.options import OwnModules, RunFolder


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
    from fedjax_sim.config.read import EXAMPLES_FOLDER, read_document
    from fedjax_sim.config.value_kinds import nearest_word, problem

    try:
        names = sorted(
            str(path.relative_to(EXAMPLES_FOLDER).with_suffix("")) for path in EXAMPLES_FOLDER.rglob("*.toml")
        )
        if example not in names:
            raise ConfigError([problem("EXAMPLE", "one of " + ", ".join(names), example, nearest_word(example, names))])
        source = EXAMPLES_FOLDER / f"{example}.toml"
        target = Path(f"{source.stem}.toml") if path is None else path
        check_output("FILE", target, (".toml",))
        if os.path.lexists(target):
            raise ConfigError([problem("FILE", "a path where nothing is yet", str(target), "Give another one.")])
        command = "sweep" if "sweep" in read_document(source) else "run"
        target.parent.mkdir(parents=True, exist_ok=True)
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
    *,
    client: Annotated[int | None, typer.Option(metavar="ID", help="A client's own model, by its number.")] = None,
    clients: Annotated[str | None, typer.Option(metavar="all", help="Own models of all, with a leading axis.")] = None,
    model: Annotated[int | None, typer.Option(metavar="K", help="One of several models, as IFCA's.")] = None,
    params: Annotated[bool, typer.Option("--params", help="The params as they are, also if no model.")] = False,
    own_modules: OwnModules = None,
    allow_previous: Annotated[
        bool, typer.Option("--allow-previous", help="Take an earlier checkpoint if the newest is damaged or missing.")
    ] = False,
) -> None:
    """Write the model of a run's newest checkpoint as named arrays, such as hidden_0/kernel.

    Where the algorithm's params are no model, such as FedProto's start, it says which models the run has: a client's
    own one, those of all clients, one of several. The run's data must be where they were, since the model is rebuilt
    from the config. In .npz, arrays of bfloat16 become float32, which holds the same numbers.
    """
    from fedjax_sim.command.exported import ModelChoice, exported
    from fedjax_sim.config import registry
    from fedjax_sim.config.document import ConfigError
    from fedjax_sim.config.value_kinds import problem
    from fedjax_sim.running.environment import prepare
    from fedjax_sim.running.files import CheckpointError

    try:
        registry.admit(own_modules or [])
        if clients not in (None, "all"):
            raise ConfigError([problem("--clients", "all", clients, "For one client: --client ID.")])
        if sum([client is not None, clients is not None, model is not None, params]) > 1:
            raise ConfigError([problem("--client", "one of --client, --clients, --model and --params", "several")])
        check_output("FILE", path, (".npz", ".safetensors"))
        prepare()
        choice = ModelChoice(client=client, clients=clients is not None, model=model, params=params)
        round, arrays, words = exported(run, choice, allow_previous=allow_previous)
        _written(path, arrays)
    except (ConfigError, TypeError, ValueError) as error:
        if not is_users_error(error):
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (CheckpointError, ImportError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2 if isinstance(error, FileNotFoundError) else 1) from error
    numbers = sum(x.size for x in arrays.values())
    typer.echo(f"{path}: {words}. {len(arrays)} arrays, {numbers:,} numbers, after round {round:,}")


def _written(path: Path, arrays: dict[str, Any]) -> None:
    """Writes named arrays, completely or not at all.

    Args:
      path: the file, with the suffix .npz or .safetensors. The folder around it is made if it is absent.
      arrays: NumPy arrays of any shapes by name. In .npz those of bfloat16 become float32.

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
