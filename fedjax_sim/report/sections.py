"""Writes the sections of a run's page, in the order of the page.

`state_of_the_run` and `left_out` yield plain text, which the page escapes. The others yield HTML in which every string
from a file is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fedjax_sim.metrics.evaluation import MOST_LISTED
from fedjax_sim.report import plots, time
from fedjax_sim.report.by_client import COUNTS, Row, from_worst, main_metric, metric_columns, shown_client
from fedjax_sim.report.files import total_of
from fedjax_sim.report.headline import besides, params_kind_of
from fedjax_sim.report.html import absent, choice, escape, figure, html_table, table_of_rows
from fedjax_sim.report.numbers import NOTHING, count, listed, percent, real, recorded_number, seconds
from fedjax_sim.report.readings import (
    labels_in_words,
    learning_in_words,
    sizes_in_words,
    spread_in_words,
    time_in_words,
)
from fedjax_sim.running.seconds import PARTS

MOST_OPEN = 50  # clients whose results are shown without a click


def state_of_the_run(summary: Mapping, records: Sequence[Mapping], totals: Mapping) -> Iterable[str]:
    """Yields what is wrong with the run: it has not finished, or a loss was not finite.

    In a round without messages no client has a loss, and this is not reported.

    Args:
      summary: the content of summary.json; {} without.
      records: the records of the log.
      totals: as `headline_totals` makes them.

    Guarantees: a round without messages does not count as a loss that is not finite
    (tests/report/test_page.py::test_rounds_without_messages_have_no_loss).
    """
    if not summary:
        yield f"This run has not finished: no summary.json. The figures go up to round {count(totals['rounds'])}."
    elif summary.get("finished") is False:
        rule = summary.get("stopped_when")
        why = "" if rule is None else f": {rule}"
        yield f"This run stopped before its last round, after round {count(totals['rounds'])}{why}."
    losses = (("local_loss", "local training"), ("train_loss", "training"), ("test_loss", "test"))
    for name, words in (*losses, ("held_out_loss", "held-out"), ("owner_loss", "owners'")):
        with_loss = [record for record in records if name in record and not (name == "local_loss" and _silent(record))]
        bad = [record.get("round") for record in with_loss if not math.isfinite(recorded_number(record[name]))]
        if bad:
            yield f"The {words} loss was not finite in {len(bad):,} rounds, first in round {count(bad[0])}."


def _silent(record: Mapping) -> bool:
    """Returns whether no message arrived in a round."""
    return record.get("clients_reported") == 0 == record.get("dropped_clients")


def estimate(summary: Mapping) -> Iterable[str]:
    """Yields what a federated statistic found; nothing for a run that trained a model.

    Args:
      summary: the content of summary.json; {} without.
    """
    if isinstance(answers := summary.get("estimate"), Mapping):
        yield "<h2>What was found</h2>"
        yield html_table((name, listed(values)) for name, values in answers.items())


def learning(records: Sequence[Mapping], timing: Sequence[Mapping], summary: Mapping) -> Iterable[str]:
    """Yields loss and accuracy against rounds, bytes and seconds, and says what each curve was measured on.

    Args:
      records: the records of the log, each with the cumulative "seconds" of its round.
      timing: the records of the timing log.
      summary: the content of summary.json; {} without.
    """
    if not records:
        yield absent("No round has been recorded.")
        return
    # Without an evaluation the curves are of local training, which is not the training objective.
    losses = ("train_loss", "test_loss", "held_out_loss", "owner_loss")
    kind = params_kind_of(summary)
    if not kind.is_judged:
        yield f"<p>There is no one model to test. The params are {escape(kind.value)}.</p>"
    if not any(name in record for record in records for name in losses):
        yield absent("No evaluation has been recorded: the curves show what cohorts met during local training only.")
    if reading := learning_in_words(records):
        yield f"<p>{escape(reading)}</p>"
    axes = [("rounds", "Rounds"), ("bytes", "Bytes sent"), ("seconds", "Wall time")]
    if any(math.isfinite(recorded_number(record.get("epsilon"))) for record in records):
        axes.insert(2, ("epsilon", "Epsilon"))
    if _simulated(records):
        axes.insert(0, ("simulated", "Simulated time"))
    views = []
    for x, title in axes:
        caption = f"Loss and accuracy against {title.lower()}."
        if x == "seconds" and not timing:
            view = absent("No timing.jsonl in this folder.")
        else:
            draw = partial(plots.learning_curves, records, x, besides(summary))
            view = figure(x, draw, caption)
        views.append((title, view))
    yield choice("learning", views)
    yield (
        '<p class="muted">Local: means over the minibatches that the round&rsquo;s cohort met during local training, '
        "while its models moved away from the server&rsquo;s: not the value of an objective at one model. Train: the "
        f"training objective at the server&rsquo;s model, {escape(_measured_on(records))}. Held-out: test rows, client "
        "by client; no client trains on them. Test: the central test set. Owners: the model that each client would "
        "use, its own one if it has one, on rows that it keeps from training. Round 0 is before training. Curves break "
        "where a number is not finite, which is a cross at the bottom.</p>"
    )


def _measured_on(records: Sequence[Mapping]) -> str:
    """Says whose examples the training objective was measured on."""
    samples = [record["train_sample_clients"] for record in records if "train_sample_clients" in record]
    if samples:
        return f"over a fixed sample of {count(samples[-1])} clients"
    measured = any("train_loss" in record for record in records)
    return "over all clients" if measured else "where it was asked for (run.evaluate_train)"


def left_out(records: Sequence[Mapping], summary: Mapping) -> Iterable[str]:
    """Yields how many updates were dropped, rounds were skipped, and invitations brought no report.

    Args:
      records: of the log, one a round.
      summary: of summary.json; a count that differs from the log's is told.
    """
    names = ("clients_invited", "clients_reported", "dropped_clients", "skipped_rounds")
    if not any(name in record for record in records for name in names):
        yield "The log does not record who took part."
        return
    # Round 0 is the evaluation before training: it counts as no round here.
    invited, reported, dropped, skipped = (int(total_of(records, name)) for name in names)
    rounds = sum(record.get("round") != 0 for record in records)
    num_silent = invited - reported
    lines = []
    if dropped:
        lines.append(f"{dropped:,} updates with non-finite numbers were dropped.")
    if skipped:
        lines.append(f"{skipped:,} of {rounds:,} rounds were skipped: they left the model as it was.")
    if invited and num_silent > dropped:
        # Clients whose update was dropped did report.
        num_lost = num_silent - dropped
        lines.append(f"{num_lost:,} of {invited:,} invitations ({num_lost / invited:.1%}) brought no report.")
    yield " ".join(lines) or "Nothing was dropped or skipped."
    if invited and not num_silent:
        yield f"All {invited:,} invitations brought a report."
    distinct = next((record["distinct_clients"] for record in reversed(records) if "distinct_clients" in record), None)
    if distinct is not None:
        yield f"These were visits: {count(distinct)} different clients took part."
    for name, total in (("dropped_clients", dropped), ("skipped_rounds", skipped)):
        if name in summary and recorded_number(summary[name]) != total:
            yield f"summary.json counts {count(summary[name])} {name.replace('_', ' ')}, the log {total:,}."


def variance(records: Sequence[Mapping]) -> Iterable[str]:
    """Yields the parts of the aggregate's variance, for a run whose log has a variance probe; otherwise nothing.

    Args:
      records: of the log, one a round.
    """
    probed = [record for record in records if math.isfinite(recorded_number(record.get("variance_total")))]
    if not probed:
        return
    # Estimates of early rounds say little about the end: the text names the last probe's shares.
    yield "<h2>Where the randomness comes from</h2>"
    yield figure("variance", plots.variance_parts, "Parts of the variance of a round's aggregate.", records)
    last = probed[-1]
    total = recorded_number(last["variance_total"])
    shares = [
        f"{label} {part / total:.0%}"
        for name, label in (("client_sampling", "client sampling"), ("minibatch", "minibatches"),
                            ("quantization", "quantisation"), ("privacy_noise", "privacy noise"))
        if total and (part := recorded_number(last.get(f"variance_{name}"))) != 0
    ]  # fmt: skip
    yield (
        f"<p>In round {escape(count(last.get('round')))} the aggregate's variance was {real(total)}"
        f"{': ' * bool(shares)}{', '.join(shares)}. Estimated from some clients that train twice; a small part may "
        "come out below zero.</p>"
    )


def _simulated(records: Sequence[Mapping]) -> bool:
    """Returns whether rounds took simulated time."""
    return any(math.isfinite(recorded_number(record.get("simulated_seconds"))) for record in records)


def simulated_time(records: Sequence[Mapping], timeline: Mapping) -> Iterable[str]:
    """Yields how long rounds took, the energy of clients, and the clients of one round.

    Yields nothing where time is not simulated.

    Args:
      records: the records of the log.
      timeline: the content of timeline.json, as `instruments.timeline` makes it; {} without.
    """
    if not _simulated(records):
        return
    yield "<h2>Simulated time</h2>"
    if scaled := _scaled(records):
        yield f"<p>{escape(scaled)}</p>"
    if reading := time_in_words(records):
        yield f"<p>{escape(reading)}</p>"
    yield figure("time", time.rounds_and_energy, "Length of rounds, and energy, by simulated time.", records)
    yield from one_round(timeline, "The next round after the last one.")


def one_round(timeline: Mapping, lead: str) -> Iterable[str]:
    """Yields the clients of one round; nothing without any.

    Args:
      timeline: as `instruments.timeline` makes it, or {}.
      lead: which round it is, in words.
    """
    if not timeline.get("clients"):
        return
    shown = len(timeline["clients"])
    invited = timeline.get("invited")
    reported = timeline.get("reported")
    few = "" if shown == invited else f" {shown} of them are shown, from the fastest to the slowest."
    begins = seconds(timeline.get("begins"))
    yield f"<h3>One round, {escape(begins)} after the start</h3>"
    words = f"{count(invited)} clients were invited, {count(reported)} reported in time."
    yield f"<p>{escape(f'{lead} {words}{few}')}</p>"
    yield figure("timeline", time.picture, "What clients spend a round on.", timeline)


def _scaled(records: Sequence[Mapping]) -> str:
    """Says, in words, for which heavier model the times are; "" if they are for the model itself."""
    last = {name: recorded_number(records[-1].get(f"{name}_scale", 1)) for name in ("flops", "bytes")}
    if all(scale == 1 for scale in last.values()):
        return ""
    return (
        f"Times and energy are those of a model with {last['flops']:,g} times the operations and "
        f"{last['bytes']:,g} times the bytes of the one that was trained (flops_scale, bytes_scale); "
        "accuracy and traffic are of the latter."
    )


def results_by_client(rows: Sequence[Row], population: Mapping, is_private: bool) -> Iterable[str]:
    """Yields the results of each client by name, from the worst to the best.

    Args:
      rows: as `read_by_client` returns them.
      population: the content of population.json; {} without.
      is_private: whether the run has noise that hides clients.

    Guarantees: each client's results are beside its name, which is escaped
    (tests/report/test_by_client.py::test_the_page_has_every_client).
    """
    yield "<h3>Results by client</h3>"
    metrics = metric_columns(rows)
    if not metrics:
        size = recorded_number(population.get("num_clients"))
        many = f"More than {MOST_LISTED:,} clients: the quantiles above stand for them. " if size > MOST_LISTED else ""
        yield absent(
            f"{many}A run writes by_client.csv at its end, if at most {MOST_LISTED:,} clients have test rows of their "
            "own: held-out clients, or [data.with_local_test]."
        )
        return
    metric = main_metric(rows)
    shown = metric.replace("_", " ")
    yield f"<p>{escape(f'After the last round, from the worst {shown} to the best; by_client.csv has all digits.')}</p>"
    if is_private:
        yield (
            '<p class="note">No epsilon covers these results, names and numbers of rows: they are computed from the '
            "clients&rsquo; own rows, without noise.</p>"
        )
    counts = [name for name in COUNTS if name in rows[0]]
    header = ["client", *(name.replace("_", " ") for name in (*counts, *metrics))]
    show = {name: percent if name.endswith("accuracy") else real for name in metrics} | dict.fromkeys(counts, count)
    cells = [
        [shown_client(row), *(show[name](row[name]) for name in (*counts, *metrics))]
        for row in from_worst(rows, metric)
    ]
    table = table_of_rows(header, cells)
    open_at_first = " open" if len(rows) <= MOST_OPEN else ""
    yield f"<details{open_at_first}><summary>{len(rows):,} clients</summary>{table}</details>"


def privacy(spent: Any, shown: set[str]) -> Iterable[str]:
    """Yields the privacy that the run has spent, as the accountant states it.

    It also names everything that the page shows and that no epsilon covers.

    Args:
      spent: "privacy" of summary.json; None for a run without noise, which has no such section.
      shown: the names of everything that the page shows.
    """
    if not isinstance(spent, Mapping):
        return
    yield "<h2>Privacy</h2>"
    if "refused" in spent:
        yield f"<p>No epsilon holds for this run. {escape(str(spent['refused']))}</p>"
        return
    for line in str(spent.get("explanation", spent.get("statement", ""))).splitlines():
        yield f"<p>{escape(line)}</p>"
    uncovered = ", ".join(sorted(shown - {"round", "epsilon", "privacy", "name", "finished", "estimate"}))
    words = f"This page shows, and no epsilon covers: {uncovered}; and the seed, from which the noise follows."
    yield f"<p>{escape(words)}</p>"


def _joined(words: Any) -> str:
    """Returns a list from a file as one text; "" for anything else."""
    return "; ".join(map(str, words)) if isinstance(words, list) else ""


def spread_between_clients(records: Sequence[Mapping], population: Mapping) -> Iterable[str]:
    """Yields the spread between clients, the labels that some of them hold, and the population's sizes.

    Args:
      records: of the log, one a round.
      population: the table of population.json; empty without one.
    """
    names = [f"{place}_{metric}_quantiles" for place in ("held_out", "owner") for metric in ("loss", "accuracy")]
    if any(record.get(name) for record in records for name in names):
        words = "held-out" if any(record.get(name) for record in records for name in names[:2]) else "owners'"
        yield "<h3>Spread between clients</h3>"
        if reading := spread_in_words(records):
            yield f"<p>{escape(reading)}</p>"
        yield figure("spread", plots.client_spread, f"Quantiles over clients of {words} loss and accuracy.", records)
    else:
        yield absent("The spread between clients was not recorded.")
    if not population:
        yield absent("No population.json in this folder.")
        return
    if population.get("label_counts"):
        yield "<h3>What some clients hold</h3>"
        if reading := labels_in_words(population):
            yield f"<p>{escape(reading)}</p>"
        yield figure("labels", plots.label_mix, "Shares of labels and numbers of examples of some clients.", population)
    if isinstance(histogram := population.get("examples_histogram"), dict):
        yield "<h3>How much clients hold</h3>"
        if reading := sizes_in_words(population):
            yield f"<p>{escape(reading)}</p>"
        # One size needs no picture.
        if isinstance(clients := histogram.get("clients"), list) and len(clients) > 1:
            yield figure("sizes", plots.client_sizes, "How many clients have how many examples.", population)
    quantiles = population.get("examples_quantiles")
    quantiles = quantiles if isinstance(quantiles, dict) else {}
    order = [key for key in ("min", "q25", "median", "q75", "max") if key in quantiles]
    yield "<h3>Population</h3>"
    rows = [
        ("Name", str(population.get("name", ""))),
        ("Clients", count(population.get("num_clients"))),
        ("Examples", count(population.get("num_examples_total"))),
        ("Examples of a client", ", ".join(f"{key} {count(quantiles[key])}" for key in order)),
        ("Poisoned", _joined(population.get("poisons"))),
        ("Read", _joined(population.get("notes"))),
        ("Learnt from all clients' rows", _joined(population.get("learned"))),
        ("Columns", _joined(population.get("columns"))),
        ("Warning", _joined(population.get("warnings"))),
    ]
    yield html_table((key, text) for key, text in rows if text not in ("", NOTHING))


def wall_time(summary: Mapping) -> Iterable[str]:
    """Yields where the wall time of a run went; nothing without a summary.

    The page's own seconds are left out, because they are known only after it is written.

    Args:
      summary: the content of summary.json; {} without.
    """
    if isinstance(seconds_by_part := summary.get("seconds"), Mapping):
        passed = {PARTS.get(name, str(name)): spent for name, spent in seconds_by_part.items() if name != "page"}
        total = sum(filter(math.isfinite, map(recorded_number, passed.values())))
        yield "<h2>Wall time</h2>"
        yield html_table([(words, seconds(spent)) for words, spent in passed.items()] + [("together", seconds(total))])
