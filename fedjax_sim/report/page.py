"""Writes a self-contained page about a run: its results, its costs, its losses, and how to repeat it.

The page is read from the run's files alone. It has no script and refers to nothing outside itself. Every string that
comes from a file is escaped. Nothing in it depends on when it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_sim import tree
from fedjax_sim.files.regular_files import content_of
from fedjax_sim.report import plots, sections
from fedjax_sim.report.by_client import BY_CLIENT, read_by_client
from fedjax_sim.report.files import headline_totals, read_json, read_lines
from fedjax_sim.report.headline import TILES, own_metrics, tiles
from fedjax_sim.report.html import absent, escape, figure, html_table, page
from fedjax_sim.report.numbers import count, recorded_number
from fedjax_sim.running import checksums
from fedjax_sim.running.files import write_atomically
from fedjax_sim.running.log import check_logs, verified

OBJECTS = ("summary.json", "env.json", "population.json", "timeline.json")
FILES = ("config.toml", "metrics.jsonl", "timing.jsonl", *OBJECTS, BY_CLIENT)


def write_report(run_directory: str | Path, further_notes: Sequence[str] = ()) -> Path:
    """Writes `report.html` into a run's folder, from those of the run's files that exist.

    Args:
      run_directory: folder with any of config.toml, metrics.jsonl, timing.jsonl, summary.json, env.json,
        population.json, timeline.json and by_client.csv; the page reports missing files.
      further_notes: lines that the page shows among its notes.

    Returns: the page's path.
    Raises: FileNotFoundError if the folder holds none of them; CheckpointError if a file is not as the run wrote it.

    Guarantees:
      The same files give the same bytes (tests/report/test_page.py::test_report_is_deterministic).
      The page is self-contained (tests/report/test_page.py::test_report_is_self_contained) and escapes every string
      (tests/report/test_page.py::test_hostile_strings_are_escaped).
      An unfinished run, a NaN, a torn line or a missing file is reported, and is not fatal
      (tests/report/test_page.py::test_degraded_runs_are_reported).
      A summary.json whose rounds are not the log's is left out
      (tests/report/test_page.py::test_a_stale_summary_is_left_out).
      No number that was changed since the run wrote it is shown
      (tests/running/test_checksums.py::test_every_changed_byte_is_found, ::test_a_changed_tail_is_not_shown). The
      seconds of rounds after the last checkpoint are an exception: they have no checksum yet.
    """
    folder = Path(run_directory).resolve()
    if not any((folder / name).is_file() for name in FILES):
        raise FileNotFoundError(
            f"run_directory: expected a folder with {', '.join(FILES)}, got {str(run_directory)!r}."
        )
    checksums.check_files(folder, ("config.toml", *OBJECTS))
    check_logs(folder)
    clients = read_by_client(folder)
    notes = list(further_notes)
    # A summary or a log that cannot be read is reported in a note; the rest of the page is written all the same.
    summary, env, population, timeline = (read_json(folder / name, notes) for name in OBJECTS)
    num_verified = verified(folder)
    records = read_lines(folder / "metrics.jsonl", notes, num_verified)
    timing = read_lines(folder / "timing.jsonl", notes)
    # The timing log has a line for each block: the rounds between two lines have no seconds of their own.
    seconds = {str(line.get("round")): line.get("seconds") for line in timing}
    records = [{**record, "seconds": seconds.get(str(record.get("round")))} for record in records]
    totals = headline_totals(records, timing)
    # A run that goes on after its end has more rounds in its log than in its summary.
    if records and recorded_number(summary.get("rounds", totals["rounds"])) != totals["rounds"]:
        counts = f"It covers {count(summary['rounds'])} rounds, the log {count(totals['rounds'])}"
        notes.append(f"summary.json was left out. {counts}: the run went on, or was stopped, after it was written.")
        summary = {}
    notes = [*sections.state_of_the_run(summary, records, totals), *notes]

    name = str(summary.get("name") or folder.name)
    size = population.get("num_clients")
    lead = [f"{count(totals['rounds'])} rounds", f"{count(size)} clients" if size is not None else ""]
    lead.append(str(population.get("name") or ""))
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="lead">{escape(" · ".join(filter(None, ("Federated run", *lead))))}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        tiles({**totals, **{k: v for k, v in summary.items() if v is not None}}),
        *sections.estimate(summary),
        "<h2>Learning</h2>",
        *sections.learning(records, timing, summary),
        "<h2>Participation</h2>",
        *(f"<p>{escape(line)}</p>" for line in sections.left_out(records, summary)),
        figure("participation", plots.participation_by_round, "Clients and updates left out, by round.", records)
        if records
        else "",
        *sections.simulated_time(records, timeline),
        *sections.variance(records),
        *sections.privacy(
            summary.get("privacy"),
            {
                *summary,
                *population,
                *(key for record in records for key in record),
                *(["results by client"] * bool(clients)),
            },
        ),
        "<h2>Clients</h2>",
        *sections.spread_between_clients(records, population),
        *sections.results_by_client(clients, population, isinstance(summary.get("privacy"), Mapping)),
        *sections.wall_time(summary),
        *how_to_repeat(env, {"Resolved configuration": _text(folder / "config.toml")}),
    ]
    # Whatever the summary holds besides is shown as it is, so that no result is hidden.
    shown = {key for key, _, _ in TILES} | {key for key, _, _ in own_metrics(summary)}
    shown |= {"name", "finished", "stopped_when", "privacy", "metrics", "estimate", "seconds"}
    others = {key: value for key, value in summary.items() if key not in shown}
    if others:
        parts += ["<h3>Other results</h3>", html_table(_rows(others))]
    html = page(f"{name} · fedjax_sim", parts)
    return write_atomically(folder / "report.html", [html.encode("utf-8", errors="replace")])


def write_timeline(run_directory: str | Path, round: int, timeline: Mapping) -> Path:
    """Writes `timeline_ROUND.html` into a run's folder: the clients of a single round.

    Args:
      run_directory: the run's folder.
      round: the number of the round in the log, from 1.
      timeline: the timeline of that round, as `instruments.timeline` makes it.

    Returns: the page's path.
    """
    folder = Path(run_directory).resolve()
    lead = sections.one_round(timeline, f"Round {count(round)}, replayed.")
    parts = [f"<h1>{escape(folder.name)}</h1>", *(lead if timeline.get("clients") else [absent("Nobody was invited.")])]
    html = page(f"{folder.name}, round {round} · fedjax_sim", parts)
    return write_atomically(folder / f"timeline_{round}.html", [html.encode("utf-8", errors="replace")])


def how_to_repeat(env: Mapping[str, Any], configs: Mapping[str, str | None]) -> list[str]:
    """Returns the section of a page that tells how its numbers are made again, as HTML.

    Args:
      env: as `running.environment.environment` returns it; {} if it was not recorded.
      configs: TOML texts by their headings; None for a file that is missing.
    """
    parts = ["<h2>How to repeat it</h2>"]
    command = env.get("command")
    parts.append(f"<pre>{escape(str(command))}</pre>" if command else absent("The command was not recorded."))
    for heading, text in configs.items():
        parts.append(f"<h3>{escape(heading)}</h3>")
        parts.append(absent("No config.toml in this folder.") if text is None else f"<pre>{escape(text)}</pre>")
    rows = html_table(_rows({name: value for name, value in env.items() if name != "command"}))
    return [*parts, "<h3>Environment</h3>", rows or absent("No env.json in this folder.")]


def _text(path: Path) -> str | None:
    """Returns the text of a file; None if it cannot be read."""
    try:
        return content_of(path).decode("utf-8", errors="replace")
    except OSError:
        return None


def _rows(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields nested values as rows with dotted names."""
    for name, value in tree.dotted(values).items():
        if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
            yield name, ", ".join(map(str, value))
        else:
            yield name, json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)
