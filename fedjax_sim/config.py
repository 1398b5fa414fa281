"""A run as a TOML file: every value checked, every default filled, every error at once with its dotted path.

`load` reads and checks what a config says, without JAX; `build` makes the parts, whose own checks then speak.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fedjax_sim import registry
from fedjax_sim.registry import REQUIRED, Option, Part

__all__ = ["Config", "ConfigError", "Experiment", "build", "load"]

MAX_BYTES = 1 << 20  # of a config file
Count = Annotated[int, Field(ge=1, le=2**31 - 1, description="an integer in [1, 2147483647]")]
Lanes = Annotated[int, Field(ge=1, le=1 << 16, description="an integer in [1, 65536]")]
NAMES = {"data": "digits", "model": "mlp", "sampler": "uniform", "algorithm": "fedavg"} | {
    "client_optimizer": "sgd",
    "aggregator": "mean",
}
MAIN_JOB = {("sampler", "cohort_size"): 1000, ("algorithm", "num_steps"): 5, ("algorithm", "batch_size"): 10}
POINT = Part("models", "point", "The parameter is one point in R^d, for quadratic clients.", "Model", *({}, frozenset()))  \
    if False else None
