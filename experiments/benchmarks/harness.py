"""Interleaved timing, rows and ratios, the machine in words, and JSON that is whole or absent."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import pathlib
import platform
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent


# ---- time


class Timing(NamedTuple):
    """Wall seconds of one unit of work, repeated."""

    first: float  # the first call: tracing, compilation (or its cache) and one execution
    seconds: tuple[float, ...]  # the calls after it, in order

    @property
    def median(self) -> float:
        """The middle of the repeats."""
        return float(np.median(self.seconds))

    @property
    def low(self) -> float:
        """Their lower quartile."""
        return float(np.percentile(self.seconds, 25))

    @property
    def high(self) -> float:
        """Their upper quartile."""
        return float(np.percentile(self.seconds, 75))


def timed(work: Callable[[], Any]) -> float:
    """Wall seconds of `work()`, until every array that it returns is there."""
    before = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - before


def interleaved(
    work: dict[str, Callable[[], Any]], *, repeats: int = 7, budget_seconds: float = math.inf, minimum: int = 3
) -> dict[str, Timing]:
    """Times named functions A, B, C, A, B, C, ..., so that a slow moment of the machine affects all of them.

    Args:
      work: functions without arguments; what they return is waited for.
      repeats: passes after the first, which compiles and is kept apart.
      budget_seconds: passes stop once they took this long together, but not before `minimum` of them.
    """
    first = {name: timed(call) for name, call in work.items()}
    seconds: dict[str, list[float]] = {name: [] for name in work}
    began, done = time.perf_counter(), 0
    while done < repeats and (done < minimum or time.perf_counter() - began < budget_seconds):
        gc.collect()
        for name, call in work.items():
            seconds[name].append(timed(call))
        done += 1
    return {name: Timing(first[name], tuple(seconds[name])) for name in work}


# ---- results


def row(
    name: str,
    value: float | Timing,
    unit: str = "s",
    *,
    per: float | None = None,
    ours: bool = False,
    cores: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """One line of a result.

    Args:
      name: what was measured, in words.
      value: a number in `unit`; or a `Timing`, shown in seconds, or as `per` / seconds with `per` units of work a call
        (`unit` is then what it gives, e.g. "clients/s").
      ours: True for fedjax_sim itself, False for a baseline.
      cores: processor cores that it can use.
      more: further numbers or words, kept as they are.
    """
    line: dict[str, Any] = {"name": name, "unit": unit, "ours": ours}
    if isinstance(value, Timing):
        ends = (value.median, value.low, value.high)
        middle, low, high = ends if per is None else (per / ends[0], per / ends[2], per / ends[1])
        line |= {"value": middle, "low": low, "high": high, "repeats": len(value.seconds)}
        line |= {"seconds": value.median, "first_call_seconds": value.first}
    else:
        line["value"] = value
    return line | ({} if cores is None else {"cores": cores}) | more


def ratio(name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> dict[str, Any]:
    """A figure that a goal bounds; without bounds it only informs."""
    bounds = {key: bound for key, bound in (("at_least", at_least), ("at_most", at_most)) if bound is not None}
    reached = None
    if bounds:
        reached = bool(value >= bounds.get("at_least", -math.inf) and value <= bounds.get("at_most", math.inf))
    return {"name": name, "value": value, **bounds, "reached": reached}


def result(
    id: str,
    title: str,
    *,
    goal: str,
    rows: Sequence[dict],
    ratios: Sequence[dict] = (),
    notes: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """What `measure` returns; `reached` is None where no ratio has a bound, or a measurement is missing."""
    judged = [x["reached"] for x in ratios if x["reached"] is not None]
    return {
        "id": id,
        "title": title,
        "goal": goal,
        "reached": all(judged) if judged else None,
        "rows": list(rows),
        "ratios": list(ratios),
        "notes": list(notes),
        **more,
    }


def modules() -> dict[str, str]:
    """Benchmark name -> module, e.g. {"p0": "p00_main_job"}, in order."""
    names = sorted(path.stem for path in HERE.glob("p[0-9][0-9]_*.py"))
    return {f"p{int(name[1:3])}": name for name in names}


def load(name: str) -> Any:
    """The module of a benchmark."""
    return importlib.import_module(f"{__package__}.{modules()[name]}")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a file that is whole or absent; numbers to 6 digits, non-finite ones refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    value = np.asarray(value).item()
    return float(f"{value:.6g}") if isinstance(value, float) else value


# ---- machine


def machine() -> dict[str, Any]:
    """Processor, memory and versions; no name of the host, no path."""
    from importlib.metadata import version

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": version("jax"),
        "numpy": version("numpy"),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
        "matmul_precision": str(jax.config.jax_default_matmul_precision),
    }


def _processor() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = {
        key: re.search(rf"^{key}\s*:\s*(.+)$", text, re.M) for key in ("model name", "cpu family", "model", "flags")
    }
    words = found["model name"][1].strip() if found["model name"] else platform.machine()
    if found["cpu family"] and found["model"]:
        words += f", family {found['cpu family'][1]} model {found['model'][1]}"
    wide = [flag for flag in ("avx2", "avx512f", "amx_tile") if found["flags"] and flag in found["flags"][1].split()]
    return ", ".join([words, *wide])


def _caches() -> str:
    found = []
    for index in sorted(pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)
