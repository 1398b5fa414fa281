"""The scenario of experiments/public_health.py, with fewer phones."""

from __future__ import annotations

import pytest

from experiments import public_health


@pytest.mark.full
def test_incidence_and_ages_are_found():
    """With weak noise the answers are near those of the pooled records; strong noise costs accuracy and less epsilon.

    20,000 phones: the smallest region has about 680 people, noise of 10 on a count gives a standard deviation of 0.015
    of its incidence (6 of them: 0.09). A quartile is within half an interval of 0.4 years, and the noise of rank
    15 / 20,000, less than 0.2 years. Catches regions and diseases that are swapped, noise at another scale, and an
    epsilon that does not fall.
    """
    found = public_health.main(seed=1, count=20_000)
    weak, strong = found["weak"], found["strong"]
    assert weak["incidence_error"] < 0.09 < strong["incidence_error"] and weak["age_error"] < 1.0
    assert 0 < strong["incidence_epsilon"] < 0.2 < weak["incidence_epsilon"] < 2
    assert 0 < strong["age_epsilon"] < 0.5 < weak["age_epsilon"] < 5
    assert public_health.figure(found).axes
