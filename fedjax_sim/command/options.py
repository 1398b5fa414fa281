"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedjax_sim.command import completion

RunFolder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run's folder, e.g. runs/digits-fedavg-0-001.",
        autocompletion=completion.run_folders,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=c",
        help="Override an option, e.g. run.rounds=5. Repeatable.",
        autocompletion=completion.settings,
    ),
]
Without = Annotated[
    list[str] | None,
    typer.Option("--unset", metavar="a.b", help="Leave out a table or an option of the file. Repeatable."),
]
OwnModules = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="MODULE",
        help="Let a config name the functions of this module of yours, whose code then runs. Repeatable.",
    ),
]
