"""What a run's params are is read wherever its results are shown."""

from __future__ import annotations

import pytest

from fedjax_sim.command.summary import show_summary
from fedjax_sim.report.headline import tiles
from fedjax_sim.report.sections import learning
from fedjax_sim.types import ParamsKind

COUNTS = ("client_visits", "clients_per_second", "compile_seconds", "rounds_seconds", "uplink_bytes", "downlink_bytes")
COUNTS += ("peak_memory_bytes", "clients_invited", "dropped_clients", "skipped_rounds")
TOTALS = dict.fromkeys(COUNTS, 1) | {"rounds": 4}
OWNERS = {"owner_accuracy": 0.8, "owner_loss": 0.3, "personal_accuracy": 0.8, "personal_loss": 0.3}
NOT_JUDGED = [kind for kind in ParamsKind if not kind.is_judged]


@pytest.mark.parametrize("kind", NOT_JUDGED, ids=lambda kind: kind.name)
def test_what_is_no_model_has_no_test(kind, capsys):
    """Catches "no better than guessing" of a start, and a tile for a test that nobody made."""
    summary = TOTALS | OWNERS | {"params_kind": kind.name.lower(), "personal_clients": 3}
    show_summary(summary, float("nan"))
    shown = " ".join(capsys.readouterr().out.split())
    assert kind.value in shown and "guessing" not in shown and "own models' accuracy 0.8000 (3 clients)" in shown
    page = tiles(summary)
    assert "test accuracy" not in page and "test loss" not in page and "models that owners use" in page
    records = [{"round": round, "owner_accuracy": 0.1 + 0.1 * round, "personal_clients": 3} for round in range(3)]
    text = "".join(learning(records, [], summary))
    assert "There is no one model to test" in text and "accuracy of the models that owners use rose" in text


@pytest.mark.parametrize(
    ("kind", "subject"), [("model", "The model is"), ("unstated", "The params are"), (None, "The params are")]
)
def test_who_is_no_better_than_guessing(kind, subject, capsys):
    """Catches params of an algorithm that says nothing, which a summary calls the model."""
    summary = TOTALS | {"test_loss": 2.5, "baseline_loss": 2.3} | ({} if kind is None else {"params_kind": kind})
    show_summary(summary, 2.4)
    assert f"{subject} no better than guessing" in capsys.readouterr().out
    assert "test loss" in tiles(summary)
