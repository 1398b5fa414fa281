"""Shows a run's summary as a table, with what to do if nothing was learned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fedjax_sim.report import numbers
from fedjax_sim.running import seconds, terminal


def show_summary(summary: dict[str, Any], first_loss: float) -> None:
    """Prints a run's summary as a table, and what to do if nothing was learned.

    Args:
      summary: what `summary.json` holds: the totals of `Log.summary`, with bytes and seconds, which are always there;
        metrics of the last evaluation, "privacy", and notes on the data, which may be absent.
      first_loss: the test loss before the first round; NaN where it is not known.

    Guarantees: params that are no model have no test (tests/report/test_params_kind.py); the advice fits the run
    (tests/command/test_app.py::test_advice_for_a_model_that_learned_nothing).
    """
    from fedjax_sim.report.headline import own_metrics, params_kind_of
    from fedjax_sim.types import ParamsKind

    in_rounds = max(summary["rounds_seconds"], 1e-9)
    kind = params_kind_of(summary)
    grid = terminal.grid(show_header=False)
    for words, text in _judged(summary):
        grid.add_row(words, text)
    grid.add_row("rounds", f"{summary['rounds']:,} in {in_rounds:.1f} s, {summary['rounds'] / in_rounds:,.1f} a second")
    if "stopped_when" in summary:
        grid.add_row("stopped", f"when {summary['stopped_when']}")
    visits = summary["client_visits"]
    distinct = summary.get("distinct_clients")
    by_whom = "" if distinct is None else f" by {distinct:,} different clients"
    grid.add_row("client visits", f"{visits:,}{by_whom}, {summary['clients_per_second']:,.0f} a second")
    if "clients_count" in summary:
        grid.add_row("clients are weighed", summary["clients_count"])
    for note in summary.get("data_notes", ()):
        grid.add_row("data", note)
    for words in summary.get("data_columns", ()):
        grid.add_row("columns", words)
    for warning in summary.get("data_warnings", ()):
        grid.add_row("warning", warning)
    grid.add_row("compilation", f"{summary['compile_seconds']:.1f} s")
    if "seconds" in summary:
        grid.add_row("wall time", seconds.shown_parts(summary["seconds"]))
    grid.add_row("sent up, down", f"{numbers.size(summary['uplink_bytes'])}, {numbers.size(summary['downlink_bytes'])}")
    grid.add_row("peak memory", numbers.size(summary["peak_memory_bytes"]))
    # The nodes of a graph take part without an invitation.
    if summary["clients_invited"]:
        grid.add_row("reported", f"{visits - summary['dropped_clients']:,} of {summary['clients_invited']:,} invited")
    grid.add_row("not finite", f"{summary['dropped_clients']:,} updates dropped")
    skipped = summary["skipped_rounds"]
    grid.add_row("skipped", f"{skipped:,} of {summary['rounds']:,} rounds")
    for _, words, text in own_metrics(summary):
        grid.add_row(words, text)
    if "privacy" in summary:
        spent = summary["privacy"]
        grid.add_row("privacy", spent.get("statement") or f"no epsilon: {spent['refused']}")
        if "statement" in spent:
            grid.add_row("", "the noise for another epsilon: fedjax-sim calibrate CONFIG.toml --epsilon E")
    console = terminal.console(soft_wrap=True)
    console.print(grid)
    loss = float(summary.get("test_loss", 0))
    baseline_loss = float(summary.get("baseline_loss", "inf"))
    # Not `loss > baseline_loss`, so that a NaN counts as no better than guessing.
    if not loss <= baseline_loss:
        subject = "The model is" if kind is ParamsKind.MODEL else "The params are"
        console.print(f"{subject} no better than guessing: {_advice(summary, first_loss, loss)}.", style="red")


def _judged(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (words, value as text) for the last evaluation: of the model, of clients' own models, and of a statistic.

    Args:
      summary: as in `show_summary`.
    """
    from fedjax_sim.report.headline import more_tests, params_kind_of
    from fedjax_sim.report.numbers import listed
    from fedjax_sim.types import ParamsKind

    for place in ("test", "held_out"):
        for metric in ("accuracy", "loss"):
            if f"{place}_{metric}" in summary:
                baseline = summary.get(f"baseline_{metric}") if place == "test" else None
                guessing = "" if baseline is None else f"  (guessing: {baseline:.4f})"
                yield f"{place.replace('_', '-')} {metric}", f"{float(summary[f'{place}_{metric}']):.4f}{guessing}"
    kind = params_kind_of(summary)
    if "params_kind" in summary and kind not in (ParamsKind.MODEL, ParamsKind.ANSWER):
        yield "the params are", kind.value
    if "personal_accuracy" in summary or "personal_loss" in summary:
        num_judged = summary.get("personal_clients", "all")
        for metric in ("accuracy", "loss"):
            # Of all owners: those who have not trained have the model that they would begin with.
            if f"owner_{metric}" in summary and f"newcomer_{metric}" in summary:
                yield f"all owners' {metric}", f"{float(summary[f'owner_{metric}']):.4f}"
            if f"personal_{metric}" in summary:
                yield f"own models' {metric}", f"{float(summary[f'personal_{metric}']):.4f}  ({num_judged} clients)"
            if f"newcomer_{metric}" in summary:
                yield f"newcomers' {metric}", f"{float(summary[f'newcomer_{metric}']):.4f}"
    for name, words in more_tests(summary):
        yield words, f"{float(summary[name]):.4f}"
    for name, values in summary.get("estimate", {}).items():
        yield name, listed(values)


def _advice(summary: dict[str, Any], first_loss: float, loss: float) -> str:
    """Returns what to do about a model that is no better than a constant prediction.

    Args:
      summary: the run's summary.
      first_loss: the test loss before the first round; NaN where it is not known.
      loss: the test loss after the last round; it may not be finite.

    Returns: the end of a sentence, without its full stop.
    """
    met = summary.get("attackers_met")
    skipped = summary["skipped_rounds"]
    rounds = summary["rounds"]
    if 2 * skipped > rounds and 2 * summary["dropped_clients"] > summary["client_visits"]:
        return f"{summary['dropped_clients']:,} updates were not finite, so try a lower learning rate"
    if 2 * skipped > rounds:
        return f"{skipped:,} of {rounds:,} rounds were skipped: no message arrived, or none was usable"
    if met:
        return f"{met:,} messages were attackers'"
    if not math.isfinite(loss) or loss > first_loss:
        return f"its test loss went from {first_loss:.4g} to {loss:.4g}, so try a lower learning rate"
    if loss < first_loss:
        return f"its test loss has fallen from {first_loss:.4g} to {loss:.4g}, so train for more rounds"
    return "its test loss has not fallen, so look at the curves of the report"
