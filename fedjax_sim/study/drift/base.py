"""This module takes the base setting of `drift` from the study's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.study.quadratic_settings import Base, quadratic_clients


def base_setting(options: Mapping[str, Any]) -> Base:
    """Returns the setting that all parts of the study share: each part varies one option and keeps the others.

    Args:
      options: the study's options.
    """
    heterogeneity = _last_but_one(options["heterogeneities"])
    problem = quadratic_clients(options["num_clients"], options["dimension"], heterogeneity, options["seed"])
    return Base(problem, _middle(options["num_steps"]), _middle(options["step_sizes"]), heterogeneity)


def _middle(values: Sequence[Any]) -> Any:
    """Returns the middle one of the sorted values."""
    values = sorted({*values})
    return values[len(values) // 2]


def _last_but_one(values: Sequence[float]) -> float:
    """Returns the second largest value, or the only one."""
    values = sorted({*values})
    return values[max(0, len(values) - 2)]
