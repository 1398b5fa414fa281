"""One self-contained page about a run: what it reached, what it cost, what was left out, how to repeat it.

The page is read from the run's files alone. It has no script and refers to nothing outside itself; every string that
comes from a file is escaped; nothing in it depends on when it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fedjax_sim import tree
from fedjax_sim.report import plots
from fedjax_sim.report.html import absent, figure, page, table
from fedjax_sim.report.plots import number
from fedjax_sim.running import checksums
from fedjax_sim.running.checkpoint import write_atomically
from fedjax_sim.running.log import SOME_TOTALS, check_logs, vouched

__all__ = ["write_report"]

FILES = ("config.toml", "metrics.jsonl", "timing.jsonl", "summary.json", "env.json", "population.json")
NOTHING = "\N{EN DASH}"


def write_report(run_directory: str | Path) -> Path:
    """Writes `report.html` into a run's folder, from whatever of its files are there.

    Args:
      run_directory: folder with any of config.toml, metrics.jsonl, timing.jsonl, summary.json, env.json and
        population.json; the page says what is missing.

    Returns: the page's path.
    Raises: FileNotFoundError if the folder holds none of them; CheckpointError if one is not as the run wrote it.

    Guarantees: the same files give the same bytes (tests/report/test_page.py::test_report_is_deterministic); it is
    self-contained (test_report_is_self_contained) and escapes every string (test_hostile_strings_are_escaped); an
    unfinished run, a NaN, a torn line or a missing file is said, not fatal (test_degraded_runs_are_reported); a
    summary of other rounds than the log's is left out (test_a_stale_summary_is_left_out). No number that was changed
    since the run wrote it is shown (tests/running/test_checksums.py::test_every_changed_byte_is_found,
    ::test_a_changed_tail_is_not_shown), but for the seconds of rounds after the last checkpoint, which have no sum yet.
    """
    folder = Path(run_directory).resolve()
    if not any((folder / name).is_file() for name in FILES):
        raise FileNotFoundError(
            f"run_directory: expected a folder with {', '.join(FILES)}, got {str(run_directory)!r}."
        )
    checksums.check(folder, ("config.toml", "summary.json", "env.json", "population.json"))
    check_logs(folder)
    notes: list[str] = []
    summary, env, population = (_json(folder / f"{name}.json", notes) for name in ("summary", "env", "population"))
    whole = vouched(folder)
    records, timing = _json_lines(folder / "metrics.jsonl", notes, whole), _json_lines(folder / "timing.jsonl", notes)
    seconds = {str(line.get("round")): line.get("seconds") for line in timing}
    records = [{**record, "seconds": seconds.get(str(record.get("round")))} for record in records]
    totals = _totals(records, timing)
    if records and number(summary.get("rounds", totals["rounds"])) != totals["rounds"]:
        told = f"It is of {_count(summary['rounds'])} rounds, the log of {_count(totals['rounds'])}"
        notes.append(f"summary.json was left out. {told}: the run went on, or was stopped, after it was written.")
        summary = {}
    notes = [*_state_of_the_run(summary, records, totals), *notes]

    name = str(summary.get("name") or folder.name)
    size = population.get("num_clients")
    lead = [f"{_count(totals['rounds'])} rounds", f"{_count(size)} clients" if size is not None else ""]
    lead.append(str(population.get("name") or ""))
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="lead">{escape(" · ".join(filter(None, ("Federated run", *lead))))}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        _tiles({**totals, **{k: v for k, v in summary.items() if v is not None}}),
        "<h2>Learning</h2>",
        *_learning(records, timing),
        "<h2>Participation</h2>",
        *(f"<p>{escape(line)}</p>" for line in _left_out(records, summary)),
        figure("participation", plots.participation, "Clients and updates left out, by round.", records)
        if records
        else "",
        *_variance(records),
        *_privacy(summary.get("privacy"), {*summary, *population, *(key for record in records for key in record)}),
        "<h2>Clients</h2>",
        *_clients(records, population),
        "<h2>How to repeat it</h2>",
        f"<pre>{escape(str(env['command']))}</pre>" if env.get("command") else absent("The command was not recorded."),
        "<h3>Resolved configuration</h3>",
        _config(folder / "config.toml"),
        "<h3>Environment</h3>",
        table(_rows({k: v for k, v in env.items() if k != "command"})) or absent("No env.json in this folder."),
    ]
    told = {key for key, _, _ in TILES} | {"name", "finished", "privacy"}
    others = {key: value for key, value in summary.items() if key not in told}
    if others:
        parts += ["<h3>Other results</h3>", table(_rows(others))]
    html = page(f"{name} · fedjax_sim", parts)
    return write_atomically(folder / "report.html", [html.encode("utf-8", errors="replace")])


# ---- sections


def _variance(records: Sequence[Mapping]) -> Iterable[str]:
    """Which cause made the rounds random, where a probe looked."""
    seen = [record for record in records if math.isfinite(number(record.get("variance_total")))]
    if not seen:
        return
    yield "<h2>Where the randomness comes from</h2>"
    yield figure("variance", plots.variance_parts, "Parts of the variance of a round's aggregate.", records)
    last = seen[-1]
    parts = [
        f"{words} {number(last.get(f'variance_{name}')) / number(last['variance_total']):.0%}"
        for name, words in (("client_sampling", "client sampling"), ("minibatch", "minibatches"),
                            ("quantization", "quantisation"), ("privacy_noise", "privacy noise"))
        if number(last.get(f"variance_{name}")) != 0
    ]  # fmt: skip
    yield (
        f"<p>In round {_count(last.get('round'))} the aggregate's variance was {_real(last['variance_total'])}: "
        f"{escape(', '.join(parts))}. Estimated from some clients that train twice; a small part may come out below "
        "zero.</p>"
    )


def _privacy(spent: Any, shown: set[str]) -> Iterable[str]:
    """What the clients' privacy cost, in the words of the accountant, and what is shown outside of it; nothing for a
    run without noise."""
    if not isinstance(spent, Mapping):
        return
    yield "<h2>Privacy</h2>"
    if "refused" in spent:
        yield f"<p>There was noise, but no epsilon holds for it. {escape(str(spent['refused']))}</p>"
        return
    for line in str(spent.get("explanation", spent.get("statement", ""))).splitlines():
        yield f"<p>{escape(line)}</p>"
    others = ", ".join(sorted(shown - {"round", "epsilon", "privacy", "name", "finished"}))
    words = f"This page shows, and no epsilon covers: {others}; and the seed, from which the noise follows."
    yield f"<p>{escape(words)}</p>"


def _learning(records: Sequence[Mapping], timing: Sequence[Mapping]) -> Iterable[str]:
    if not records:
        yield absent("No round has been recorded.")
        return
    losses = ("train_loss", "test_loss", "held_out_loss")
    if not any(name in record for record in records for name in losses):
        yield absent("No evaluation has been recorded: the curves show what cohorts met during local training only.")
    axes = [("rounds", "Against rounds"), ("bytes", "Against bytes sent"), ("seconds", "Against wall time")]
    for x, title in axes:
        yield f"<h3>{title}</h3>"
        if x == "seconds" and not timing:
            yield absent("No timing.jsonl in this folder.")
            continue
        yield figure(x, plots.learning_curves, f"Loss and accuracy {title.lower()}.", records, x)
    yield (
        '<p class="muted">Local: means over the minibatches that the round&rsquo;s cohort met during local training, '
        "while its models moved away from the server&rsquo;s; no objective. Train: the training objective at the "
        f"server&rsquo;s model, {_measured_on(records)}. Held-out: test rows, client by client; no client trains on "
        "them. Test: the central test set. Round 0 is the model before training. Curves break where a number is not "
        "finite.</p>"
    )


def _measured_on(records: Sequence[Mapping]) -> str:
    """Whose examples the training objective was measured on."""
    samples = [record["train_sample_clients"] for record in records if "train_sample_clients" in record]
    if samples:
        return f"over a fixed sample of {_count(samples[-1])} clients"
    measured = any("train_loss" in record for record in records)
    return "over all clients" if measured else "where it was asked for (run.evaluate_train)"


def _clients(records: Sequence[Mapping], population: Mapping) -> Iterable[str]:
    if any(record.get("held_out_loss_quantiles") or record.get("held_out_accuracy_quantiles") for record in records):
        yield "<h3>Spread between clients</h3>"
        yield figure("spread", plots.client_spread, "Quantiles over clients of held-out loss and accuracy.", records)
    else:
        yield absent("The spread between clients was not recorded.")
    if not population:
        yield absent("No population.json in this folder.")
        return
    if population.get("label_counts"):
        yield "<h3>What some clients hold</h3>"
        yield figure("labels", plots.label_mix, "Shares of labels and numbers of examples of some clients.", population)
    quantiles = population.get("examples_quantiles")
    quantiles = quantiles if isinstance(quantiles, dict) else {}
    order = [key for key in ("min", "q25", "median", "q75", "max") if key in quantiles]
    yield "<h3>Population</h3>"
    rows = [
        ("Name", str(population.get("name", ""))),
        ("Clients", _count(population.get("num_clients"))),
        ("Examples", _count(population.get("num_examples_total"))),
        ("Examples of a client", ", ".join(f"{key} {_count(quantiles[key])}" for key in order)),
    ]
    yield table((key, value) for key, value in rows if value not in ("", NOTHING))


def _left_out(records: Sequence[Mapping], summary: Mapping) -> Iterable[str]:
    """In plain words: what was dropped or skipped."""
    names = ("clients_invited", "clients_reported", "dropped_clients", "skipped_rounds")
    if not any(name in record for record in records for name in names):
        yield "The log does not say who took part."
        return
    invited, reported, dropped, skipped = (int(_total(records, name)) for name in names)
    rounds = sum(record.get("round") != 0 for record in records)
    silent, lines = invited - reported, []
    if dropped:
        lines.append(f"{dropped:,} updates with non-finite numbers were dropped.")
    if skipped:
        lines.append(f"{skipped:,} of {rounds:,} rounds were skipped: they left the model as it was.")
    if invited and silent > dropped:
        lost = silent - dropped
        lines.append(f"{lost:,} of {invited:,} invitations ({lost / invited:.1%}) brought no report.")
    yield " ".join(lines) or "Nothing was dropped or skipped."
    if invited and not silent:
        yield f"All {invited:,} invitations brought a report."
    distinct = next((record["distinct_clients"] for record in reversed(records) if "distinct_clients" in record), None)
    if distinct is not None:
        yield f"These were visits: {_count(distinct)} different clients took part."
    for name, total in (("dropped_clients", dropped), ("skipped_rounds", skipped)):
        if name in summary and number(summary[name]) != total:
            yield f"summary.json counts {_count(summary[name])} {name.replace('_', ' ')}, the log {total:,}."


def _state_of_the_run(summary: Mapping, records: Sequence[Mapping], totals: Mapping) -> Iterable[str]:
    if not summary:
        yield f"This run has not finished: no summary.json. The figures go up to round {_count(totals['rounds'])}."
    elif summary.get("finished") is False:
        yield f"This run stopped before its last round, after round {_count(totals['rounds'])}."
    losses = (("local_loss", "local training"), ("train_loss", "training"), ("test_loss", "test"))
    for name, words in (*losses, ("held_out_loss", "held-out")):
        bad = [record.get("round") for record in records if name in record and not math.isfinite(number(record[name]))]
        if bad:
            yield f"The {words} loss was not finite in {len(bad):,} rounds, first in round {_count(bad[0])}."


def _totals(records: Sequence[Mapping], timing: Sequence[Mapping]) -> dict[str, Any]:
    """Headline figures that the log alone can give."""
    totals: dict[str, Any] = {"rounds": records[-1].get("round", len(records)) if records else 0}
    for name in ("test_accuracy", "test_loss"):
        totals[name] = next((record[name] for record in reversed(records) if name in record), None)
    for name in ("uplink_bytes", "downlink_bytes"):
        if any(name in record for record in records):
            totals[name] = _total(records, name)
    if any("clients_reported" in record for record in records):
        totals["client_visits"] = _total(records, "clients_reported") + _total(records, "dropped_clients")
    if timing:
        totals["rounds_seconds"] = timing[-1].get("seconds")
        if number(totals["rounds_seconds"]) > 0 and "client_visits" in totals:
            totals["clients_per_second"] = totals["client_visits"] / number(totals["rounds_seconds"])
    return totals


# ---- pieces of the page


def _tiles(values: Mapping[str, Any]) -> str:
    tiles = []
    for key, label, show in TILES:
        if key in (*SOME_TOTALS, "distinct_clients") and key not in values:
            continue
        kind = "tile main" if key in ("test_accuracy", "test_loss") else "tile"
        tiles.append(f'<div class="{kind}"><b>{escape(show(values.get(key)))}</b><span>{label}</span></div>')
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _config(path: Path) -> str:
    try:
        return f"<pre>{escape(path.read_text(encoding='utf-8', errors='replace'))}</pre>"
    except OSError:
        return absent("No config.toml in this folder.")


def _rows(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Nested values as rows with dotted names."""
    for name, value in tree.dotted(values).items():
        if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
            yield name, ", ".join(map(str, value))
        else:
            yield name, json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)


# ---- reading


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        if isinstance(value, dict):
            return value
        notes.append(f"{path.name} holds no object: it was left out.")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError):
        notes.append(f"{path.name} could not be read: it was left out.")
    return {}


def _json_lines(path: Path, notes: list[str], most: int | None = None) -> list[dict[str, Any]]:
    """The records of a file, the first `most` lines of it."""
    found, bad, lines = [], 0, path.read_bytes().splitlines() if path.is_file() else []
    if most is not None and len(lines) > most:
        why = "A killed run leaves such lines; so does a change by somebody else."
        left = (
            f"Line {most + 1:,} of {path.name} is"
            if most + 1 == len(lines)
            else f"{path.name} from line {most + 1:,} on is"
        )
        notes.append(f"{left} not as the run wrote it, or has no sum that says so: left out. {why}")
    for line in lines[:most]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            bad += bool(line.strip())
    if bad:
        notes.append(f"{bad:,} lines of {path.name} could not be read (a torn last line means a killed run): left out.")
    return found


def _total(records: Sequence[Mapping], name: str) -> float:
    return sum(value for record in records if math.isfinite(value := number(record.get(name))))


# ---- numbers as a person reads them


def _plain(value: Any) -> float | str:
    """A finite number, or the words that stand in its place."""
    if value is None:
        return NOTHING
    if isinstance(value, (str, bool, dict, list)) and value not in ("nan", "inf", "-inf"):
        return str(value)
    value = number(value)
    return value if math.isfinite(value) else "not a number" if math.isnan(value) else "infinite"


def _count(value: Any) -> str:
    value = _plain(value)
    return (
        value if isinstance(value, str) else f"{value:,.0f}" if value == int(value) or value > 99 else f"{value:,.3g}"
    )


def _real(value: Any) -> str:
    value = _plain(value)
    return value if isinstance(value, str) else f"{value:,.4g}"


def _percent(value: Any) -> str:
    value = _plain(value)
    return value if isinstance(value, str) else f"{100 * value:.2f} %"


def _bytes(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, str):
        return value
    unit, name = plots.scaled_bytes(value)
    return f"{value / unit:.3g} {name}" if value < 999.5 * unit else f"{value / unit:,.0f} {name}"


def _seconds(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, str) or value < 120:
        return value if isinstance(value, str) else f"{value:.3g} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60} min"


TILES = (
    ("test_accuracy", "test accuracy", _percent),
    ("test_loss", "test loss", _real),
    ("rounds", "rounds", _count),
    ("client_visits", "client visits", _count),
    ("distinct_clients", "different clients took part", _count),
    ("clients_per_second", "client visits per second", _count),
    ("rounds_seconds", "in rounds", _seconds),
    ("compile_seconds", "in compilation", _seconds),
    ("peak_memory_bytes", "peak memory", _bytes),
    ("uplink_bytes", "sent up by clients", _bytes),
    ("wasted_bytes", "of them too late to count", _bytes),
    ("uplink_coded_bytes", "the same under an entropy code, at most", _bytes),
    ("downlink_bytes", "sent down to clients", _bytes),
)
