"""Claims of noise on a party's messages."""

from __future__ import annotations

import math

import pytest

from fedjax_sim.privacy import embedding_claim, gaussian_claim


@pytest.mark.parametrize("adjacency, own", [("zero_out", 1), ("replace_one", 4)])
def test_closed_form(adjacency, own):
    """mu^2 = visits (own + 4 (rows - 1)) / z^2. Catches a bottom's training, or a replaced row, that costs nothing."""
    for trained, rows in ((False, 1000), (True, 50), (True, 1)):
        found = embedding_claim(30.0, visits=9, rows=rows, trained=trained, adjacency=adjacency)
        total = 9 * (own + (4 * (rows - 1) if trained else 0))
        assert found.epsilon(1e-5) == pytest.approx(gaussian_claim(30.0 / math.sqrt(total)).epsilon(1e-5), rel=1e-9)
    assert embedding_claim(30.0, visits=9, rows=50).epsilon(1e-5) > 3  # dear, and said
    several = gaussian_claim(30.0, num_rounds=9)  # as many releases, composed by the accountant's own claim
    assert embedding_claim(30.0, visits=9, rows=7, trained=False).epsilon(1e-5) == pytest.approx(several.epsilon(1e-5))


def test_wrong_options_are_refused():
    for name, value in (("noise_multiplier", 0.0), ("visits", 0), ("rows", 0), ("trained", 1), ("adjacency", "remove")):
        options = {"noise_multiplier": 1.0, "visits": 1, "rows": 1} | {name: value}
        with pytest.raises((ValueError, TypeError), match=name):
            embedding_claim(options.pop("noise_multiplier"), **options)
