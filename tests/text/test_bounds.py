"""Shown bounds: what is shown is never on the wrong side of the number, and says as much as its digits can."""

from fractions import Fraction

import numpy as np
import pytest

from fedjax_sim.report.headline import tiles
from fedjax_sim.running.progress import progress_bar
from fedjax_sim.sweeps.results import Sweep
from fedjax_sim.sweeps.table import as_latex, as_markdown, sweep_comparison
from fedjax_sim.text.bounds import shown_down, shown_up


def test_shown_bounds():
    """On a grid of awkward numbers. Catches rounding to the nearest, a digit too many, and a shown 2 for 2.0002."""
    rng = np.random.default_rng(0)
    numbers = [*np.exp(rng.uniform(-20, 8, 400)).tolist(), 2.0, 2.0002, 0.60701, 1e-6, 1234.5, 99999.5, 0.1]
    numbers += [np.float32(0.3), np.float32(2.0002)]
    for number in numbers:
        exact = Fraction(str(number))
        for digits in (1, 3, 4, 5, 6):
            up, down = (Fraction(show(number, digits).replace(",", "")) for show in (shown_up, shown_down))
            assert down <= exact <= up and (up - down) <= exact / 10 ** (digits - 1)
            assert (up == down) == (up == exact)
    assert shown_up(0) == "0" and shown_up("inf") == shown_up(float("inf")) == "infinite"


def test_no_epsilon_is_shown_smaller():
    """2.0002 in the tile, in the tables and in the bar. Catches each of them that shows 2."""
    page = tiles({"privacy": {"epsilon": 2.0002, "delta": 1.00004e-5}})
    assert "<b>2.001</b>" in page and "delta 1.001e-05" in page
    rows = [{"seed": s, "round": 1, "rate": rate, "epsilon": 2.000021} for s in range(3) for rate in (1, 2)]
    table = sweep_comparison(Sweep(rows, ("rate",), [0, 1, 2], 1, True), "epsilon")
    for text in (as_latex(table), as_markdown(table)):
        assert "2.0001" in text


def test_the_bar_shows_no_less(monkeypatch):
    """Catches a bar that rounds down."""
    import rich.progress

    shown = []
    monkeypatch.setattr(rich.progress.Progress, "update", lambda self, task, **fields: shown.append(fields))
    with progress_bar(True, 0, 3) as advance:
        advance([{"round": 1, "clients_reported": 1, "test_loss": 1.0, "epsilon": 2.0002}], 1.0)
    assert "epsilon 2.001" in shown[-1]["quality"]


@pytest.mark.parametrize("number", [float("nan"), "nan"])
def test_what_is_no_number_says_so(number):
    assert shown_up(number) == "not a number"
