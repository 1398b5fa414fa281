"""partition and combine."""

import pytest
from hypothesis import given, settings, strategies as st

from fedjax_sim.models import combine, partition

TREE = {"body": {"kernel": 1, "bias": 2, "norm": {}}, "body_2": {"bias": 5}, "output": {"kernel": 3, "bias": (4, 5)}}
NAMES = st.sampled_from(["a", "b", "ab", "output"])
TREES = st.recursive(st.integers(), lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)


def leaves(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {path: leaf for name, value in tree.items() for path, leaf in leaves(value, f"{prefix}/{name}").items()}


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, TREES, max_size=3), st.integers(0, 7))
def test_combine_inverts_partition(tree, salt):
    """Catches a lost empty dict, a leaf in both parts, and a predicate that is not asked by full path."""
    predicate = lambda path: (sum(map(ord, path)) + salt) % 3 == 0  # noqa: E731
    chosen, rest = partition(tree, predicate)
    assert combine(chosen, rest) == tree == combine(rest, chosen)
    assert all(predicate(path[1:]) for path in leaves(chosen)) and not any(predicate(path[1:]) for path in leaves(rest))


def test_a_list_chooses_paths_and_folders():
    """Catches a prefix taken for a folder (body, body_2) and a single leaf not found."""
    chosen, rest = partition(TREE, ["body", "output/bias"])
    assert chosen == {"body": {"kernel": 1, "bias": 2}, "output": {"bias": (4, 5)}}
    assert rest == {"body": {"norm": {}}, "body_2": {"bias": 5}, "output": {"kernel": 3}}


def test_all_and_nothing():
    """Catches empty shells in a part that should be empty (an empty personal part is plain FedAvg)."""
    assert partition({"a": {"b": 1}}, lambda path: False) == ({}, {"a": {"b": 1}})
    assert partition({"a": {"b": 1}}, lambda path: True) == ({"a": {"b": 1}}, {})
    assert partition({"a": {"b": 1}}, []) == ({}, {"a": {"b": 1}})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition(TREE, ["outptu"]), "predicate: expected paths among .* got 'outptu'. Did you mean 'output'"),
        (lambda: partition(TREE, "output"), "predicate: expected a function or a list of paths"),
        (lambda: partition([1], []), "params: expected a nested dict"),
        (lambda: partition(TREE, lambda path: None), r"predicate\('body/kernel'\): expected True or False, got None"),
        (lambda: combine({"a": {"b": 1}}, {"a": {"b": 2}}), "rest: expected no path of the other part, got 'a/b'"),
    ],
)
def test_error_texts(call, message):
    """Catches a misspelt personal part, which would silently share everything."""
    with pytest.raises((ValueError, TypeError), match=message):
        call()
