"""Alignment of ids: exactly the overlap, and what each party sees."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedjax_sim import population

pytest.importorskip("cryptography", reason="an extra: secagg")

KEY = b"a secret of the parties"
WAYS = {
    "exact": population.align_exact,
    "keyed": lambda ids: population.align_keyed(ids, KEY),
    "diffie_hellman": population.align_diffie_hellman,
    "similar": lambda ids: population.align_similar([[(id,) for id in table] for table in ids], KEY, threshold=1.0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_parties", [2, 4])
def test_exactly_the_overlap(way, num_parties):
    """Against sets of ids. Catches a missing or an invented individual, and rows in another party's order."""
    rng = np.random.default_rng(num_parties)
    everybody = [f"{name}-{i}" for i, name in enumerate(["ann", "bob", "Zoe", "ünal", "李"] * 12)]
    tables = [list(rng.permutation(rng.choice(everybody, 40 + p, replace=False)).tolist()) for p in range(num_parties)]
    found = WAYS[way](tables)
    common = set(tables[0]).intersection(*tables[1:])
    assert 0 < len(common) < 40 and len(found.rows) == len(common)
    met = [[table[row] for row in rows] for table, rows in zip(tables, found.rows.T, strict=True)]
    assert all(names == met[0] for names in met) and set(met[0]) == common
    assert met[0] == [id for id in tables[0] if id in common]  # in the order of party 0
    assert found.overlap == len(common) / 40
    for p in range(1, num_parties):  # and who is at some parties only
        assert [row >= 0 for row in found.links[:, p]] == [id in tables[p] for id in tables[0]]


def _flat(value):
    if isinstance(value, (list, tuple)):
        return [x for part in value for x in _flat(part)]
    return [value]


def test_what_each_party_sees():
    """The values that a protocol hands over, by receiver. Catches an id, or a hash anybody could make, on the wire."""
    ids = [["ann", "bob", "cyd"], ["bob", "cyd", "dan", "eve"], ["cyd", "bob"]]
    plain = {id for table in ids for id in table}
    guesses = plain | {hashlib.sha256(id.encode()).digest() for id in plain}
    assert set(_flat(population.align_exact(ids).views["coordinator"]["ids"])) == plain  # as it says
    keyed = population.align_keyed(ids, KEY).views
    assert keyed.keys() == {"coordinator", "party 0", "party 1", "party 2"}
    hashes = _flat(keyed["coordinator"]["hashes"])
    assert {len(x) for x in hashes} == {32} and not guesses & set(hashes)
    other = _flat(population.align_keyed(ids, KEY + b"!").views["coordinator"]["hashes"])
    assert not set(hashes) & set(other)
    assert keyed["party 1"]["positions"].tolist() == [0, 1]

    keys = [bytes([i]) * 32 for i in (1, 2, 3)]
    found = population.align_diffie_hellman(ids, keys=keys)
    assert found.rows.tolist() == population.align_exact(ids).rows.tolist()
    assert found.views.keys() == {"party 0", "party 1", "party 2"}  # no coordinator
    from fedjax_sim.population.vertical.private_set_intersection import _point

    points = {_point(id) for id in plain}  # anybody can make these
    for p in range(3):
        view = found.views[f"party {p}"]
        others = {f"blinded ids of party {q}" for q in range(3) if q != p}
        assert view.keys() == others | {"published"}
        assert not (guesses | points) & set(_flat(list(view.values())))
    again = population.align_diffie_hellman(ids)  # other secrets: other values, the same alignment
    assert again.rows.tolist() == found.rows.tolist()
    assert not set(_flat(again.views["party 0"]["published"])) & set(_flat(found.views["party 0"]["published"]))


def test_blinded_points_do_not_tell_curve_from_twist():
    """Catches ids hashed to any x: half would lie on the twist, before and after blinding."""
    from fedjax_sim.population.vertical.private_set_intersection import CURVE_A, CURVE_PRIME

    published = population.align_diffie_hellman([[str(i) for i in range(40)]] * 2).views["party 0"]["published"]
    for point in published[0]:
        x = int.from_bytes(point, "little")
        assert pow(x * (x * x + CURVE_A * x + 1) % CURVE_PRIME, (CURVE_PRIME - 1) // 2, CURVE_PRIME) == 1


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_aligned_is_refused(way):
    """Catches duplicates matched to one of two rows, and a silent empty training set."""
    align = WAYS[way]
    with pytest.raises(ValueError, match="repeats row 0"):
        align([["ann", "bob"], ["bob", "eve", "bob"]])
    with pytest.raises(ValueError, match="empty overlap"):
        align([["ann", "bob"], ["xaver", "yvonne"]])
    with pytest.raises(ValueError, match=r"\[1\]: expected a record at least"):
        align([["ann"], []])
    with pytest.raises(ValueError, match="two parties"):
        align([["ann"]])
    for tables, shown in (("ann", "'ann'"), ([["ann"], "ann"], "'ann'"), ([["ann"], 3], "3"), (None, "None")):
        with pytest.raises(TypeError, match=f": expected records in a list, got {shown}"):
            population.align_exact(tables)
    if way != "similar":
        with pytest.raises(TypeError, match="an id as text"):
            align([["ann"], [7]])


def test_wrong_keys_are_refused():
    """Catches a key that can be guessed."""
    with pytest.raises(ValueError, match="16 bytes at least"):
        population.align_keyed([["ann"], ["ann"]], b"short")
    with pytest.raises(TypeError, match="expected bytes"):
        population.align_keyed([["ann"], ["ann"]], "a text of sixteen")
    with pytest.raises(ValueError, match="2 secrets of 32 bytes"):
        population.align_diffie_hellman([["ann"], ["ann"]], keys=[b"1" * 32])
