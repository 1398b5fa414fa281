"""Leaves of nested dicts by their paths, such as "hidden_0/kernel"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.models.partition import partition
from fedjax_sim.types import PyTree
from fedjax_sim.validate import fail, nearest


def leaves_by_path(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested dicts by their paths.

    >>> leaves_by_path({"hidden": {"kernel": 1, "bias": 2}})
    {'hidden/kernel': 1, 'hidden/bias': 2}
    """
    leaves = {}
    for name, value in tree.items():
        leaves |= leaves_by_path(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves


def nested(leaves: Mapping[str, Any]) -> PyTree:
    """Returns nested dicts of leaves by their paths.

    >>> nested({"hidden/kernel": 1, "hidden/bias": 2})
    {'hidden': {'kernel': 1, 'bias': 2}}
    """
    tree: dict = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = leaf
    return tree


def chosen_paths(argument: str, params: PyTree, paths: Sequence[str]) -> list[str]:
    """Returns the paths of the leaves that paths of leaves or dicts choose.

    Args:
      argument: the name of `paths` in errors.
      params: nested dicts.
      paths: of leaves or dicts in `params`.

    Raises: ValueError for a path that `params` lacks; TypeError for params that are no dict, and for a single word.

    >>> chosen_paths("trained", {"hidden": {"kernel": 1, "bias": 2}, "output": {"bias": 3}}, ["hidden"])
    ['hidden/kernel', 'hidden/bias']
    """
    if isinstance(paths, str):
        fail(argument, "a list of paths", paths, f"Write [{paths!r}] for one alone.", TypeError)
    if not isinstance(params, dict):
        fail(argument, "none for parameters that are no dict", paths, "They have no paths.", TypeError)
    known = _folders_and_leaves(params)
    for path in paths:
        if path not in known:
            fail(argument, f"paths among {known}", path, nearest(path, known))
    return list(leaves_by_path(partition(params, list(paths))[0]))


def _folders_and_leaves(tree: PyTree, prefix: str = "") -> list[str]:
    """Returns the paths of all dicts and leaves."""
    paths = []
    for name, value in tree.items():
        paths.append(f"{prefix}{name}")
        if isinstance(value, dict):
            paths += _folders_and_leaves(value, f"{prefix}{name}/")
    return paths
