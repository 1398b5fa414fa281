"""The study of what messages leak: exact where theory says so, chance behind masks, noise below its bound."""

import functools

import jax
import numpy as np
import pytest

from fedjax_sim.study.findings import rows_of
from fedjax_sim.study.leakage.attacks import decibels
from fedjax_sim.study.leakage.defences import Defence, Digits, defences, replayed
from fedjax_sim.study.leakage.question import leakage
from fedjax_sim.study.page import table

SMALL = {"num_clients": 200, "batch_sizes": (1, 8), "bits": (2,), "shares": (0.01,), "epsilons": (1.0, 100.0),
         "num_rebuilt": 8, "num_steps": 200, "num_restarts": 2}  # fmt: skip


@functools.cache
def findings():
    return leakage(**SMALL)


def value(defence, quantity):
    (row,) = rows_of(findings().comparisons, defence=defence, quantity=quantity)
    return row["measured"]


@pytest.mark.full
def test_predictions_hold():
    """Fault: an inversion that is not exact, masks that let something through, noise of half the size."""
    rows = findings().rows()
    assert [row for row in rows if row["holds"] is False] == []
    judged = [(row["defence"], row["quantity"]) for row in rows if row["holds"]]
    assert sum(quantity == "error of a pixel" for _, quantity in judged) == 3
    assert ("secure sum: a masked message", "labels recovered") in judged
    assert sum(quantity == "membership advantage" for _, quantity in judged) == 4


@pytest.mark.full
def test_what_protects():
    """Fault: a server that is given the noise it draws itself, or messages that a secure sum hides."""
    closed, advantage, labels = "PSNR, closed form (dB)", "membership advantage", "labels recovered"
    for open_book in ("batch of 1", "clipping to 0.1", "central noise, epsilon 1: the server"):
        assert value(open_book, closed) > 59 and value(open_book, advantage) > 0.8 and value(open_book, labels) == 1
    mean = value("the mean digit", closed)
    for hidden in ("secure sum: a masked message", "local noise, epsilon 1"):
        assert value(hidden, closed) < mean and abs(value(hidden, advantage)) < 0.25 and value(hidden, labels) < 0.2
    assert mean + 5 < value("batch of 8", closed) < 50
    for compressed in ("quantisation, 2 bits", "top-k, 1 %"):
        assert value(compressed, closed) < 20 and value(compressed, labels) == 1 and value(compressed, advantage) > 0.8
    assert abs(value("secure sum: the sum of 200", advantage)) < 0.25
    assert 0.3 < value("local noise, epsilon 100", advantage) and value("local noise, epsilon 100", closed) < mean


@pytest.mark.full
def test_claims():
    """Fault: a claim that the options of a small study leave open."""
    assert None not in {claim.holds for claim in findings().claims}


@pytest.mark.full
def test_figure():
    """Fault: pictures of one defence under another's name, and a figure that cannot be drawn."""
    figure = findings().figure()
    pictures, *panels = figure.axes
    names = [text.get_text() for text in pictures.texts][::2]
    assert names[0] == "the digits themselves" and names.count("batch of 8") == 2
    assert set(names[1:]) == {row["defence"] for row in findings().rows() if row["quantity"].startswith("PSNR")} - {
        "the mean digit"
    }
    assert len(panels) == 4 and all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)
    assert "pictures" not in table(findings())[0]


@pytest.mark.full
def test_a_sum_is_a_batch():
    """A sum of eight clients with a digit each is the message of one with these eight, up to the integers' unit.

    Fault: a sum of few clients that hides more than a batch of as many, views that weigh clients otherwise.
    """
    digits, options = Digits.load(0), SMALL | {"clip_norm": 0.1, "delta": 1e-5, "num_clients": 8}
    (secure,) = [one for one in defences(options) if one.name == "secure sum: the sum of 8"]
    summed = replayed(secure, digits, 8, seed=0).view.messages
    batch = replayed(Defence("", "", batch_size=8), digits, 1, seed=0).view.messages
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1.01 * 2.0**-15), summed, batch)
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(batch)) > 100 * 2.0**-15


def test_rows_of_clients():
    """Fault: a member among the others, one example twice in a client, the shown digits elsewhere."""
    digits = Digits.load(0)
    assert digits.y[digits.shown].tolist() == list(range(8))
    for size in (1, 8, 32):
        mine, others = digits.dealt(100, size, seed=3)
        assert mine.shape == (100, size) and mine.reshape(-1)[:8].tolist() == digits.shown.tolist()
        assert all(len(set(row)) == size and other not in row for row, other in zip(mine, others, strict=True))


def test_decibels():
    """By hand. Fault: pixels beyond white that count against an attacker, natural logarithms."""
    assert decibels(np.full(64, 0.6), np.full(64, 0.5)) == pytest.approx(20)
    assert decibels(np.full(64, 9.0), np.ones(64)) == 60


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch_sizes": (1, 2)}, "batch_sizes: expected 1 and 8"),
        ({"epsilons": (10.0, 1.0)}, "epsilons: expected rising"),
        ({"num_clients": 50}, "num_clients: expected"),
        ({"num_rebuilt": 4}, "num_rebuilt: expected"),
        ({"shares": (0.0,)}, "shares: expected"),
        ({"delta": 1.0}, "delta: expected"),
    ],
)
def test_wrong_options(options, words):
    """Fault: a study that runs for minutes before it finds that it cannot."""
    with pytest.raises(ValueError, match=words):
        leakage(**SMALL | options)
