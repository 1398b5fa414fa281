"""Reads a run's files as far as they can be read, and adds up its log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim.files.regular_files import content_of, json_of
from fedjax_sim.report.numbers import recorded_number
from fedjax_sim.round.costs import ROUND_METRICS


def read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """Reads the JSON object in a file.

    Args:
      path: the file.
      notes: gets a line if the file exists and cannot be read.

    Returns: the object; {} if there is none.
    """
    try:
        content = json_of(content_of(path))
        if isinstance(content, dict):
            return content
        notes.append(f"{path.name} holds no object: it was left out.")
    except FileNotFoundError:
        # Missing files are reported by the page's sections, in their own words.
        pass
    except (OSError, ValueError):
        notes.append(f"{path.name} could not be read: it was left out.")
    return {}


def read_lines(path: Path, notes: list[str], most: int | None = None) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file, one a line.

    Args:
      path: the file; a missing file counts as empty.
      notes: gets a line about every part that is left out.
      most: how many lines are read; None for all.
    """
    objects = []
    num_bad = 0
    lines = content_of(path).splitlines() if path.is_file() else []
    # Bytes are split into lines before they are decoded, as the checksums of lines were taken.
    if most is not None and len(lines) > most:
        why = "A killed run leaves such lines; so does a change by somebody else."
        subject = (
            f"Line {most + 1:,} of {path.name} is"
            if most + 1 == len(lines)
            else f"{path.name} from line {most + 1:,} on is"
        )
        notes.append(f"{subject} not as the run wrote it, or has no checksum that confirms it: left out. {why}")
    for line in lines[:most]:
        try:
            record = json_of(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            objects.append(record)
        else:
            num_bad += bool(line.strip())
    if num_bad:
        notes.append(
            f"{num_bad:,} lines of {path.name} could not be read (a torn last line means a killed run): left out."
        )
    return objects


def total_of(records: Sequence[Mapping], name: str) -> float:
    """Returns the sum of a metric over the records in which it is a finite number."""
    return sum(number for record in records if math.isfinite(number := recorded_number(record.get(name))))


def headline_totals(records: Sequence[Mapping], timing: Sequence[Mapping]) -> dict[str, Any]:
    """Returns the headline figures that the log alone gives, for a run without summary.json.

    Args:
      records: of `metrics.jsonl`, in their order.
      timing: of `timing.jsonl`, in their order; empty without one.
    """
    totals: dict[str, Any] = {"rounds": records[-1].get("round", len(records)) if records else 0}
    evaluated = [
        name for record in records for name in record if name.startswith(("test_", "attack_", "owner_", "personal_"))
    ]
    # Both headline metrics have a tile in every run, and others only if they were measured.
    for name in {"test_accuracy": None, "test_loss": None} | dict.fromkeys(evaluated):
        totals[name] = next((record[name] for record in reversed(records) if name in record), None)
    for metric in ROUND_METRICS:
        if metric.unit == "bytes" and any(metric.name in record for record in records):
            totals[metric.name] = total_of(records, metric.name)
    if any("clients_reported" in record for record in records):
        totals["client_visits"] = sum(total_of(records, name) for name in ("clients_reported", "dropped_clients"))
    if timing:
        totals["rounds_seconds"] = timing[-1].get("seconds")
        if recorded_number(totals["rounds_seconds"]) > 0 and "client_visits" in totals:
            totals["clients_per_second"] = totals["client_visits"] / recorded_number(totals["rounds_seconds"])
    return totals
