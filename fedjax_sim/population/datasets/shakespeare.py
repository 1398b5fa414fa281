"""This module reads plays for next-character prediction. Each speaking role is a client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from fedjax_sim import validate
from fedjax_sim.files import text_files
from fedjax_sim.population.datasets.vocabularies import codes_of, vocabulary_learned
from fedjax_sim.population.federated_data import PADDING, FederatedData, existing_path, from_sites
from fedjax_sim.types import FolderPath
from fedjax_sim.validate import Integer, NonNegativeInt, OpenShare


def speeches(text: str) -> dict[str, str]:
    """Collects the text of every role, in order of first appearance.

    A speech begins with `NAME:` on a line of its own, at the start of the file or after an empty line. Then follows its
    text.

    Args:
      text: the whole file, in which lines end in a line feed.

    >>> speeches("A:\\nHello,\\nyou.\\n\\nB:\\nYes?\\n\\nA:\\nBye.\\n")
    {'A': 'Hello,\\nyou.\\nBye.\\n', 'B': 'Yes?\\n'}
    """
    roles: dict[str, list[str]] = {}
    role = None
    is_after_empty_line = True
    for number, line in enumerate(text.split("\n"), 1):
        if is_after_empty_line and line.endswith(":") and len(line) > 1:
            role = line[:-1]
            roles.setdefault(role, [])
        elif line:
            if role is None:
                validate.fail(f"line {number}", "a role, `NAME:`, before its text", line)
            roles[role].append(line + "\n")
        is_after_empty_line = not line
    return {role: "".join(lines) for role, lines in roles.items() if lines}


def windows(codes: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Cuts codes [k] into windows that do not overlap: x [n, length], and y with the next character of each position.

    The last window is padded, with 0 in x and -1 in y.

    Args:
      codes: [k] integers, one for each character.
      length: of a window, at least 1.

    >>> windows(np.array([5, 6, 7, 8]), 2)
    {'x': array([[5, 6],
           [7, 0]], dtype=int32), 'y': array([[ 6,  7],
           [ 8, -1]], dtype=int32)}
    """
    num_pairs = max(len(codes) - 1, 0)  # of a character and the next one
    num_windows = -(-num_pairs // length)  # rounded up
    x = np.zeros(num_windows * length, np.int32)
    y = np.full(num_windows * length, PADDING, np.int32)
    x[:num_pairs] = codes[:num_pairs]
    y[:num_pairs] = codes[1 : num_pairs + 1]
    return {"x": x.reshape(num_windows, length), "y": y.reshape(num_windows, length)}


@validate.named_arguments
def shakespeare(
    *,
    directory: FolderPath,
    sequence_length: Annotated[int, Integer(1, 1000000)] = 40,
    min_characters: Annotated[int, Integer(2)] = 2,
    test_fraction: OpenShare = 0.2,
    vocabulary: Sequence[str] | None = None,
    seed: NonNegativeInt = 0,
) -> FederatedData:
    """Reads Shakespeare's plays, where the task is to predict every next character. Each speaking role is a client.

    Roles are distinguished by their names alone, so the `First Citizen` of two plays is one client.

    Args:
      directory: a folder with input.txt. A speech begins with `NAME:` on a line of its own after an empty line.
      sequence_length: L, the number of characters in a window.
      min_characters: roles with less text than this are left out. At least 2.
      test_fraction: share of each role's text, from its end, that is its test part. The first window of the test part
        begins with the last training character, so that every character but the first is predicted once.
      vocabulary: the characters, in the order of their codes; texts may have no others. None for those of all texts.
      seed: unused, since nothing is drawn. Every data set takes a seed.

    Returns: `FederatedData` with x [n, L] int32, y [n, L] int32 (the next character, -1 in padding) and the
      `vocabulary`, whose entry 0 is padding. Held-out clients are the roles with a test part.

    Guarantees: no character is lost: the first character of a role, followed by its targets, is its text
    (tests/population/datasets/test_shakespeare.py::test_no_character_is_lost).

    References: Caldas et al., LEAF, 2018; McMahan et al., 2017.
    """
    path = existing_path("directory", directory) / "input.txt"
    existing_path("directory", str(path), folder=False)
    text = text_files.text_of("directory", path)
    roles = {role: spoken for role, spoken in speeches(text).items() if len(spoken) >= min_characters}
    if not roles:
        validate.fail(str(path), f"a role with at least {min_characters} characters", f"{len(text)} characters")
    characters, code = codes_of(vocabulary, "".join(roles.values()))
    train = {}
    test = {}
    for role, spoken in roles.items():
        codes = np.array([code[character] for character in spoken], np.int32)
        # At least two characters remain for training, which are one input and its target.
        cut = max(len(codes) - math.floor(validate.as_written(test_fraction) * len(codes)), 2)
        train[role] = windows(codes[:cut], sequence_length)
        test[role] = windows(codes[cut - 1 :], sequence_length)
    tokens = ("<padding>", *characters)
    about = {"task": "next_token", "num_outputs": len(tokens), "vocabulary": tokens, "name": "shakespeare"}
    return from_sites(train, test, **about, learned=vocabulary_learned(vocabulary))
