"""Plays by speaking role: next-character prediction."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from fedjax_sim import text_files, validate
from fedjax_sim.population.federated_data import PADDING, FederatedData, existing, from_sites
from fedjax_sim.types import FolderPath
from fedjax_sim.validate import Integer, NonNegativeInt, OpenShare

__all__ = ["shakespeare"]


def speeches(text: str) -> dict[str, str]:
    """The text of every role, in order of first appearance.

    A speech is `NAME:` on a line of its own, at the start or after an empty line, then its text.

    >>> speeches("A:\\nHello,\\nyou.\\n\\nB:\\nYes?\\n\\nA:\\nBye.\\n")
    {'A': 'Hello,\\nyou.\\nBye.\\n', 'B': 'Yes?\\n'}
    """
    roles: dict[str, list[str]] = {}
    role, empty = None, True
    for number, line in enumerate(text.split("\n"), 1):
        if empty and line.endswith(":") and len(line) > 1:
            role = line[:-1]
            roles.setdefault(role, [])
        elif line and role is None:
            validate.fail(f"line {number}", "a role, `NAME:`, before its text", line)
        elif line:
            roles[role].append(line + "\n")
        empty = not line
    return {role: "".join(lines) for role, lines in roles.items() if lines}


def windows(codes: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """x [n, length] and the next characters y, from codes [k]; windows do not overlap, the last is padded (x 0, y -1).

    >>> windows(np.array([5, 6, 7, 8]), 2)
    {'x': array([[5, 6],
           [7, 0]], dtype=int32), 'y': array([[ 6,  7],
           [ 8, -1]], dtype=int32)}
    """
    pairs = max(len(codes) - 1, 0)
    rows = -(-pairs // length)
    x, y = np.zeros(rows * length, np.int32), np.full(rows * length, PADDING, np.int32)
    x[:pairs], y[:pairs] = codes[:pairs], codes[1 : pairs + 1]
    return {"x": x.reshape(rows, length), "y": y.reshape(rows, length)}


@validate.named_arguments
def shakespeare(
    *,
    directory: FolderPath,
    sequence_length: Annotated[int, Integer(1, 1000000)] = 40,
    min_characters: Annotated[int, Integer(2)] = 2,
    test_fraction: OpenShare = 0.2,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Shakespeare's plays, a client per speaking role, every next character to be predicted.

    Roles are told apart by name alone: the `First Citizen` of two plays is one client.

    Args:
      directory: holds input.txt: `NAME:` on a line of its own after an empty line, then the speech.
      sequence_length: L characters in a window.
      min_characters: roles with less text than this (at least 2) are left out.
      test_fraction: share of each role's text, from its end, that is its test part. Its first window begins with the
        last training character, so that no character goes unpredicted.
      seed: unused, since nothing is drawn; every data set takes one.

    Returns: `FederatedData` with x [n, L] int32, y [n, L] int32 (the next character, -1 in padding) and the
      `vocabulary`, whose entry 0 is padding; held-out clients are the roles with a test part.

    Guarantees: nothing is lost: a role's first character and its targets in order are its text
    (tests/population/datasets/test_shakespeare.py::test_no_character_is_lost).

    References: Caldas et al., LEAF, 2018; McMahan et al., 2017.
    """
    path = existing("directory", directory) / "input.txt"
    existing("directory", str(path), folder=False)
    text = text_files.text_of("directory", path)
    roles = {role: spoken for role, spoken in speeches(text).items() if len(spoken) >= min_characters}
    if not roles:
        validate.fail(str(path), f"a role with at least {min_characters} characters", f"{len(text)} characters")
    characters = sorted(set("".join(roles.values())))
    code = {character: i for i, character in enumerate(characters, 1)}
    train, test = {}, {}
    for role, spoken in roles.items():
        codes = np.array([code[character] for character in spoken], np.int32)
        cut = max(len(codes) - math.floor(validate.as_written(test_fraction) * len(codes)), 2)
        train[role] = windows(codes[:cut], sequence_length)
        test[role] = windows(codes[cut - 1 :], sequence_length)
    vocabulary = ("<padding>", *characters)
    about = {"task": "next_token", "num_outputs": len(vocabulary), "vocabulary": vocabulary, "name": "shakespeare"}
    return from_sites(train, test, **about)
