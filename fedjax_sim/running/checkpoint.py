"""Saves and restores checkpoints: everything that a run needs to continue, in one file that is written atomically.

The file's format is in `running.checkpoint_format`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from fedjax_sim.running.checkpoint_format import (
    SCHEMA,
    difference,
    encoded,
    kind_of,
    leaves_by_path,
    meta_of,
    read_file,
    restored,
    to_host,
)
from fedjax_sim.running.files import CheckpointError as CheckpointError, RunLocked as RunLocked, write_atomically
from fedjax_sim.types import PyTree
from fedjax_sim.validate import InvalidType, integer

CHECKPOINT_NAME = re.compile(r"round_(\d{8,10})\.ckpt")


def save(directory: str | Path, round: int, state: PyTree, meta: dict[str, Any], *, keep: int = 2) -> Path:
    """Commits a round's state and meta as `directory/round_00000012.ckpt`, then removes older checkpoints.

    Args:
      directory: the run's checkpoint folder, created if absent; hold its `lock` while the run writes there.
      round: the number of rounds done so far, in [0, 2^31).
      state: any pytree of arrays, typed PRNG keys, numbers, None and empty nodes. A 64-bit leaf must keep its value in
        the dtype JAX gives it.
      meta: a dict that JSON can hold (string keys, lists for tuples), such as the configuration's hash, the log's
        offset, ...
      keep: how many checkpoints up to this round are kept, >= 1.

    Returns: the file's path.

    Raises: CheckpointError if writing fails (the old files stay intact); TypeError or ValueError for a leaf or a meta
      that cannot be stored.

    Guarantees:
      After kill -9 at any moment `latest` gives the old checkpoint or the new one, complete
      (tests/running/test_checkpoint.py::test_killed_between_any_two_system_calls).
      The older one is removed only after the new one is on disk
      (tests/running/test_checkpoint.py::test_keep_drops_only_after_the_commit).

    >>> import tempfile
    >>> import numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save(folder, 3, {"w": np.ones(2, np.float32)}, {"seed": 7})
    ...     state, meta = restore(latest(folder), {"w": np.zeros(2, np.float32)})
    >>> path.name, state["w"].tolist(), meta
    ('round_00000003.ckpt', [1.0, 1.0], {'seed': 7, 'round': 3})
    """
    integer("round", round, 0)
    integer("keep", keep)
    directory = Path(directory)
    entries = []
    # Every leaf is converted before a file is touched: a leaf that cannot be stored leaves no trace.
    arrays = []
    for name, leaf in leaves_by_path(state).items():
        array, entry = to_host(name, leaf)
        entries.append({"path": name, **entry})
        arrays.append(array)
    try:
        header = json.dumps({"schema": SCHEMA, "leaves": entries, "meta": {**meta, "round": int(round)}}).encode()
    except (TypeError, ValueError) as error:
        raise InvalidType(f"meta: expected what JSON can hold, got {meta!r:.120}. {error}.") from error
    path = directory / f"round_{round:08d}.ckpt"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Temporary files of a process that was killed while it saved.
        for leftover in directory.glob(".round_*.ckpt.*.tmp"):
            leftover.unlink(missing_ok=True)
        write_atomically(path, encoded(header, arrays))
        # Checkpoints of later rounds stay: they are from before a fall-back to this one.
        up_to_this_round = [older for older in _list(directory) if _round(older) <= round]
        for older in up_to_this_round[keep:]:
            older.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path}: could not be written ({error.strerror or error}). Earlier checkpoints are intact: free space or "
            "choose a writable folder, then resume."
        ) from error
    return path


def restore(path: str | Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Reads the state and the meta of a checkpoint, verifies its bytes, and compares its leaves with `like`.

    Args:
      path: a checkpoint file, usually `latest(directory)`.
      like: a state of this run, or its shapes and dtypes (`jax.eval_shape`); it gives the tree structure.

    Returns: (state, meta). Leaves are JAX arrays on the default device, or NumPy arrays where `like` has NumPy arrays.
      They are bit for bit the leaves that were saved, dtypes and weak types included. The meta has the round under
      "round".

    Raises: CheckpointError if a byte is wrong or absent, or if paths, shapes or dtypes differ, with the difference.

    Guarantees:
      A state comes back bit for bit as `save` got it
      (tests/running/test_checkpoint.py::test_roundtrip_is_bit_exact).
      Every flipped byte and every truncation is detected
      (tests/running/test_checkpoint.py::test_every_flipped_byte_is_detected, ::test_every_truncation_is_detected).
      Another structure is refused (tests/running/test_checkpoint.py::test_another_structure_is_refused_with_a_diff).
    """
    path = Path(path)
    header, payload = read_file(path)
    expected_kinds = {name: kind_of(name, leaf) for name, leaf in leaves_by_path(like).items()}
    differences = difference({entry["path"]: entry["kind"] for entry in header["leaves"]}, expected_kinds)
    if differences:
        hint = "Resume with the configuration that wrote it, or start in a new folder."
        raise CheckpointError("\n  ".join([f"{path}: does not fit this run:", *differences, hint]))
    leaves = {}
    offset = 0  # of the leaf in the payload: leaves follow each other without gaps
    targets = leaves_by_path(like)
    for entry in header["leaves"]:
        # Read in the order of the header, and put into the order of `like`.
        raw = payload[offset : offset + entry["bytes"]]
        try:
            leaves[entry["path"]] = restored(raw, entry, targets[entry["path"]])
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: leaf {entry['path']} is malformed ({error}).") from error
        offset += entry["bytes"]
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in expected_kinds]), header["meta"]


def latest(
    directory: str | Path, *, allow_previous: bool = False, check: Callable[[Path, dict], None] | None = None
) -> Path | None:
    """Returns the newest checkpoint of a folder, verified; None if the folder has no checkpoint.

    Args:
      directory: the run's checkpoint folder.
      allow_previous: if the newest checkpoint is damaged, fall back to the newest intact one, with a warning.
      check: (path, meta) -> None, raising CheckpointError where other files that the checkpoint needs are damaged.

    Raises: CheckpointError if the newest is damaged and falling back is not allowed, or if none is intact.

    Guarantees: a damaged checkpoint is never returned, and an older one only when asked for
    (tests/running/test_checkpoint.py::test_latest_falls_back_only_when_asked).
    """
    damaged: list[str] = []
    # From the newest back, until one is intact.
    for path in _list(Path(directory)):
        try:
            header, _ = read_file(path)
            if check is not None:
                check(path, header["meta"])
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if damaged and not allow_previous:
            raise CheckpointError(
                f"{damaged[0]} The newest intact one is {path.name}: --allow-previous takes it, and in Python "
                "allow_previous=True."
            )
        if damaged:
            warnings.warn(f"{' '.join(damaged)} Continuing from {path.name}.", RuntimeWarning, stacklevel=2)
        return path
    if damaged:
        raise CheckpointError(f"{damaged[0]} No earlier checkpoint in {directory} is intact: start a new run.")
    return None


def trouble_with_newest(directory: str | Path, num_rounds: int = 0) -> str:
    """Says what is wrong with the newest checkpoint of a folder; "" if nothing is, and where there is no such folder.

    Args:
      directory: the run's checkpoint folder.
      num_rounds: of a run that has ended, which leaves a checkpoint of its last round; 0 for another run.

    Guarantees: a damaged and a missing newest checkpoint are told by every command that shows a run
    (tests/command/test_trouble.py::test_a_damaged_newest_checkpoint_is_told).
    """
    if not Path(directory).is_dir():
        return ""  # of a folder that was copied without them
    paths = _list(Path(directory))
    newest_round = _round(paths[0]) if paths else None
    if num_rounds > 0 and (newest_round or 0) < num_rounds:
        remaining = "none is left" if newest_round is None else f"the newest is of round {newest_round:,}"
        return (
            f"{directory}: the checkpoint of round {num_rounds:,}, with which the run ended, is missing: {remaining}."
        )
    try:
        latest(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def newest_meta(directory: str | Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns path and meta of the newest checkpoint with a readable header; leaves are neither read nor verified."""
    for path in _list(Path(directory)):
        if (meta := meta_of(path)) is not None:
            return path, meta
    return None


def _round(path: Path) -> int:
    """Returns the round in a checkpoint's name."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    assert match is not None, "the paths are of `_list`"
    return int(match[1])


def _list(directory: Path) -> list[Path]:
    """Returns the checkpoints of a folder, newest first."""
    try:
        paths = [path for path in directory.iterdir() if CHECKPOINT_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: could not be read ({error.strerror or error}).") from error
    return sorted(paths, key=_round, reverse=True)
