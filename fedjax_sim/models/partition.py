"""This module splits parameters into two parts by path, such as personal and shared, or frozen and trained ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedjax_sim.types import PyTree
from fedjax_sim.validate import fail, nearest


def partition(params: PyTree, predicate: Callable[[str], bool] | Sequence[str]) -> tuple[PyTree, PyTree]:
    """Splits nested dicts into the leaves whose path is chosen, and all other leaves.

    Args:
      params: nested dicts. Anything else in them is a leaf.
      predicate: `path -> bool`, for paths such as "hidden_0/kernel". Or a list of paths of leaves or dicts, each of
        which must exist: "hidden_0" chooses both of its leaves.

    Returns: (chosen, rest), nested dicts without the leaves of the other part. A part without leaves is `{}`.

    Raises: ValueError if `params` lacks a listed path. TypeError if params is not a dict, or an answer is not a bool.

    Guarantees: `combine(*partition(params, predicate))` is `params`, leaf for leaf, and no leaf is in both parts
    (tests/models/test_partition.py::test_combine_inverts_partition).

    >>> partition({"body": {"kernel": 1, "bias": 2}, "output": {"bias": 3}}, ["output"])
    ({'output': {'bias': 3}}, {'body': {'kernel': 1, 'bias': 2}})
    """
    if not isinstance(params, dict):
        fail("params", "a nested dict", type(params).__name__, "Only dicts have paths.", TypeError)
    if not callable(predicate):
        predicate = _listed(params, predicate)

    def split(tree: dict, prefix: str) -> tuple[dict, dict]:
        chosen = {}
        rest = {}
        for name, value in tree.items():
            path = f"{prefix}{name}"
            if isinstance(value, dict):
                inner_chosen, inner_rest = split(value, path + "/")
                if inner_chosen:
                    chosen[name] = inner_chosen
                if inner_rest or not inner_chosen:  # an empty dict belongs to the rest
                    rest[name] = inner_rest
            else:
                answer = predicate(path)
                if not isinstance(answer, bool):
                    fail(f"predicate({path!r})", "True or False", answer, error=TypeError)
                (chosen if answer else rest)[name] = value
        return chosen, rest

    return split(params, "")


def _listed(params: dict, wanted: Sequence[str]) -> Callable[[str], bool]:
    """Returns the predicate that chooses the listed paths of leaves or dicts. Each path must exist in `params`.

    Args:
      params: nested dicts.
      wanted: paths such as "hidden_0", which chooses all leaves below it, or "hidden_0/kernel".

    Returns: path of a leaf -> whether it, or a dict above it, is listed.

    Raises: TypeError for a single text and for paths that are no texts; ValueError for a path that `params` lacks.
    """
    if isinstance(wanted, str) or not all(isinstance(path, str) for path in wanted):
        fail("predicate", "a function or a list of paths", wanted, error=TypeError)

    def all_paths(tree: dict, prefix: str = ""):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from all_paths(value, f"{prefix}{name}/")

    # A path that chooses nothing would be a spelling error that nobody notices.
    paths = list(all_paths(params))
    for path in wanted:
        if path not in paths:
            fail("predicate", f"paths among {paths}", path, nearest(path, paths))
    return lambda path: any(path == folder or path.startswith(folder + "/") for folder in wanted)


def combine(chosen: PyTree, rest: PyTree) -> PyTree:
    """Joins the two parts that `partition` returns.

    Args:
      chosen, rest: nested dicts without a common leaf.

    Raises: ValueError if a path is in both parts.

    Guarantees: it is the inverse of `partition` (tests/models/test_partition.py::test_combine_inverts_partition).

    >>> combine({"output": {"bias": 3}}, {"body": {"bias": 2}, "output": {"kernel": 1}})
    {'output': {'bias': 3, 'kernel': 1}, 'body': {'bias': 2}}
    """

    def join(a: dict, b: dict, prefix: str) -> dict:
        joined = dict(a)
        for name, value in b.items():
            if name not in a:
                joined[name] = value
            # Dicts with entries in both parts are joined. A leaf may be in one part only.
            elif isinstance(a[name], dict) and isinstance(value, dict):
                joined[name] = join(a[name], value, f"{prefix}{name}/")
            else:
                fail("rest", "no path of the other part", f"{prefix}{name}")
        return joined

    return join(chosen, rest, "")
