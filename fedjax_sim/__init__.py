"""Federated learning over massive simulated populations: a round is one compiled JAX program.

`Algorithm`, `run`, and the rooms as modules. Everything is imported when it is first used, so that the command line
answers at once.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a type checker would take `run` for the module of that name
    from fedjax_sim.run import run
    from fedjax_sim.types import Algorithm

ROOMS = (
    "aggregation",
    "algorithms",
    "client",
    "engine",
    "metrics",
    "models",
    "population",
    "privacy",
    "sampling",
    "server",
    "study",
    "theory",
    "transform",
)
__all__ = ["Algorithm", "run", *ROOMS]
__version__ = "0.1.0"


class _Package(types.ModuleType):
    """This package: its `run` is the function, also after the module of that name is imported."""

    @property
    def run(self) -> Any:
        return importlib.import_module("fedjax_sim.run").run

    @run.setter
    def run(self, module: Any) -> None:
        """Python sets an imported submodule as an attribute; this one stays in `sys.modules` alone."""


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "Algorithm":
        return importlib.import_module("fedjax_sim.types").Algorithm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
