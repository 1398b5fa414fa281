"""Federated learning over massive simulated populations: a round is one compiled JAX program.

`run` with what it takes and returns, `Algorithm`, `InvalidArgument`, and the subpackages. Everything is imported when
it is first used, so that the command line starts without loading JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_sim.running.history import History
    from fedjax_sim.running.loggers import MLflow, TensorBoard, WeightsAndBiases
    from fedjax_sim.running.loop import run
    from fedjax_sim.running.stopping import StopWhen
    from fedjax_sim.types import Algorithm
    from fedjax_sim.validate import InvalidArgument, InvalidType

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
__all__ = [
    "Algorithm",
    "History",
    "InvalidArgument",
    "InvalidType",
    "MLflow",
    "StopWhen",
    "TensorBoard",
    "WeightsAndBiases",
    "run",
    *SUBPACKAGES,
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in HOMES:
        return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
