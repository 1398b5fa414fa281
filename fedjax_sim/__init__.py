"""Federated learning over massive simulated populations: a round is one compiled JAX program.

`run` with what it takes and returns, `Algorithm`, `InvalidArgument`, and the subpackages. Everything is imported when
it is first used, so that the command line starts without loading JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_sim.running.history import History as History
    from fedjax_sim.running.loggers import (
        MLflow as MLflow,
        TensorBoard as TensorBoard,
        WeightsAndBiases as WeightsAndBiases,
    )
    from fedjax_sim.running.loop import run as run
    from fedjax_sim.running.stopping import StopWhen as StopWhen
    from fedjax_sim.types import Algorithm as Algorithm
    from fedjax_sim.validate import InvalidArgument as InvalidArgument, InvalidType as InvalidType

SUBPACKAGES = (
    "aggregation",
    "algorithms",
    "client",
    "engine",
    "instruments",
    "metrics",
    "models",
    "network",
    "population",
    "privacy",
    "sampling",
    "server",
    "study",
    "sweeps",
    "theory",
    "transform",
)
HOMES = {  # public name -> the module that defines it
    "Algorithm": "types",
    "History": "running.history",
    "InvalidArgument": "validate",
    "InvalidType": "validate",
    "MLflow": "running.loggers",
    "StopWhen": "running.stopping",
    "TensorBoard": "running.loggers",
    "WeightsAndBiases": "running.loggers",
    "run": "running.loop",
}
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in HOMES:
        return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*HOMES, *SUBPACKAGES])
