"""Record linkage by Bloom filters: their law, their similarity, one-to-one links."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_sim import population
from fedjax_sim.population import align_similar, bloom_filters, dice
from tests.refusals import refused

KEY = b"a secret of the parties"


def _names(number, seed=0, letters=10):
    rng = np.random.default_rng(seed)
    return [("".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), letters)),) for _ in range(number)]


def _grams(text):
    padded = f" {text} "
    return {padded[i : i + 2] for i in range(len(padded) - 1)}


def test_filters():
    """Catches a key that does nothing, fields that are mixed up, case that matters."""
    one = bloom_filters([("ann", "lee"), ("lee", "ann"), ("ANN ", "lee"), ("", "")], KEY)
    assert one.shape == (4, 1000) and (one[0] == one[2]).all() and not one[3].any()
    assert dice(one[:1], one[1:2])[0, 0] < 0.3  # swapped fields share chance bits only
    other = bloom_filters([("ann", "lee")], KEY + b"!")
    assert dice(one[:1], other)[0, 0] < 0.3


def test_how_full_a_filter_is():
    """Mean number of bits of 300 names against L (1 - (1 - 1/L)^(k t)), within 1 %; 4 % off is refused.

    Bits of one q-gram are k draws of nearly L; their standard error here is 0.1 %.
    """
    names = _names(300)
    filters = bloom_filters(names, KEY, num_bits=500, num_hashes=10)
    expected = np.mean([500 * (1 - (1 - 1 / 500) ** (10 * len(_grams(name[0])))) for name in names])
    assert abs(filters.sum(1).mean() / expected - 1) < 0.01


def test_dice_is_that_of_sets():
    """Against Python sets. Catches a Jaccard coefficient."""
    rng = np.random.default_rng(1)
    one, other = rng.random((5, 40)) < 0.4, rng.random((6, 40)) < 0.4
    other[0] = False
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            x, y = set(np.flatnonzero(a)), set(np.flatnonzero(b))
            assert dice(one, other)[i, j] == pytest.approx(2 * len(x & y) / (len(x) + len(y)), rel=1e-12)


def test_without_errors_it_is_exact():
    """Names of ten letters, of which two parties share some."""
    names = _names(120)
    tables = [names[:80], names[:20:-1]]
    exact = population.align_exact([[name for (name,) in table] for table in tables])
    assert align_similar(tables, KEY, threshold=0.8).links.tolist() == exact.links.tolist()


def test_errors():
    """One wrong letter changes two of eleven bigrams: Dice 9/11 of the sets, and about as much of the filters.

    Catches a similarity that forgives nothing, or everything.
    """
    names = _names(60)
    wrong = [(name[:4] + ("x" if name[4] != "x" else "y") + name[5:],) for (name,) in names]
    found = dice(bloom_filters(names, KEY), bloom_filters(wrong, KEY))
    sets = np.mean(
        [
            2 * len(_grams(a) & _grams(b)) / (len(_grams(a)) + len(_grams(b)))
            for (a,), (b,) in zip(names, wrong, strict=True)
        ]
    )
    assert abs(np.diag(found).mean() - sets) < 0.03
    assert align_similar([names, wrong], KEY, threshold=0.7).rows.tolist() == [[i, i] for i in range(60)]
    with pytest.raises(ValueError, match="empty overlap"):
        align_similar([names, wrong], KEY, threshold=0.97)


def test_one_to_one():
    """Two records near one: the nearer one gets it. Catches a row that is linked twice."""
    tables = [[("anna maria",), ("anna marie",)], [("anna maria",)]]
    assert align_similar(tables, KEY, threshold=0.5).links.tolist() == [[0, 0], [1, -1]]
    assert align_similar([tables[0][::-1], tables[1]], KEY, threshold=0.5).links.tolist() == [[0, -1], [1, 0]]


def test_what_each_party_sees():
    """Catches a linkage unit with names, or with the key's other uses."""
    tables = [[("ann",), ("bob",)], [("bob",)]]
    views = align_similar(tables, KEY).views
    assert views.keys() == {"linkage unit", "party 0", "party 1"}
    assert [x.dtype for x in views["linkage unit"]["filters"]] == [bool, bool]
    assert views["linkage unit"].keys() == {"filters"} and views["party 0"]["positions"].tolist() == [1]


def test_wrong_options_are_refused():
    tables = [[("ann",)], [("ann",)]]
    for options, name in (
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"num_bits": 4}, "num_bits"),
        ({"gram": 0}, "gram"),
    ):
        with pytest.raises(ValueError, match=name):
            align_similar(tables, KEY, **options)
    with pytest.raises(TypeError, match="texts"):
        align_similar([[("ann", 3)], [("ann", "4")]], KEY)
    with pytest.raises(TypeError, match="a tuple of texts"):
        align_similar([["ann"], ["ann"]], KEY)


def test_tables_of_other_fields_are_refused():
    """Catches a party with a field more, whose records were compared with those of others place by place."""
    tables = [[("ann", "1980")], [("ann", "1980", "f")]]
    with refused("records[1]", rule="2 fields"):
        population.align_similar(tables, b"sixteen bytes...", threshold=0.5)
