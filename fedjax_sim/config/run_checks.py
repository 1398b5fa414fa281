"""Refuses experiments that no run may be: `config.build` asks here, so that every command refuses the same configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedjax_sim.config.value_kinds import problem
from fedjax_sim.running.arguments import check_initial_model
from fedjax_sim.running.fingerprint import is_private
from fedjax_sim.running.loggers import check_logger_installed
from fedjax_sim.running.stopping import NONE_BESIDE_NOISE
from fedjax_sim.types import Algorithm, PyTree
from fedjax_sim.validate import InvalidArgument


def problems_of_table(run: Mapping[str, Any]) -> Iterator[str]:
    """Yields what no run can do of the table [run], before data are loaded.

    Args:
      run: the table, with all defaults.
    """
    try:
        check_logger_installed(run["log"] or [])
    except ImportError as error:
        yield str(error)


def problems_of_experiment(run: Mapping[str, Any], algorithm: Algorithm, params: PyTree) -> Iterator[str]:
    """Yields why a run refuses an experiment, although each of its parts was made.

    Args:
      run: the table [run], with all defaults.
      algorithm: the experiment's algorithm.
      params: its initial model.

    Guarantees: each refusal is made by every command that reads a whole config
      (tests/laws/test_refusals.py::test_every_command_refuses).
    """
    if run["stop_when"] is not None and is_private(algorithm):
        yield problem("run.stop_when", "none in a run with noise", run["stop_when"], NONE_BESIDE_NOISE)
    try:
        check_initial_model(params)
    except InvalidArgument as error:
        yield f"model: {error}"
