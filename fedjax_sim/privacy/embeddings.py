"""What noise on the messages of a vertical federation's parties hides."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from fedjax_sim import validate
from fedjax_sim.privacy.claim import Claim, gaussian_claim
from fedjax_sim.validate import Positive, PositiveInt

__all__ = ["embedding_claim"]


@validate.named_arguments
def embedding_claim(
    noise_multiplier: Positive,
    *,
    visits: PositiveInt,
    rows: PositiveInt,
    trained: bool = True,
    adjacency: Literal["zero_out", "replace_one"] = "zero_out",
) -> Claim:
    """The claim of a party whose outputs are clipped to C and get N(0, (z C)^2), row by row, before they are sent.

    It hides one row of the party's columns from everybody else: with mu^2 = visits a^2 / z^2 it is mu-GDP, where a C is
    how far the row moves what is sent in one visit of all rows. A bottom that stays as it is, or was made of other
    data, moves the row's own message, by a = 1 if it becomes zero and a = 2 if it becomes another one. A trained bottom
    carries the row into what the party sends of every other row, each by up to 2: a^2 grows by 4 (rows - 1), and with
    "replace_one" the whole table is hidden as well as a row. Which rows a batch has is public, so nothing is
    amplified. Labels are party 0's and are not hidden by it.

    It covers the messages of one consortium, and nothing else that a party gives away: a trained bottom that is
    published after the run, or that parties of several consortia average, was made of raw columns, and tells more.

    Args:
      noise_multiplier: z > 0, of `transform.local_gaussian` on the way forward.
      visits: the most often that a row may be sent in the run. Every round draws its own order, so this is the number
        of rounds times the epochs of one round, rounded up in each: 8 rounds of half an epoch may send a row 8 times.
      rows: n, of the party's table.
      trained: whether the bottom learns from the party's columns.
      adjacency: "zero_out", the row sends zeros; "replace_one", it is another one's.

    Returns: `Claim`; `.epsilon(delta)` states it.

    Raises: ValueError, TypeError for options out of range.

    Guarantees: the closed form of as many Gaussian releases (tests/privacy/test_embeddings.py::test_closed_form); a
    trained bottom does carry a row into other rows' messages, a fixed one does not
    (tests/algorithms/split/test_vertical_privacy.py::test_a_trained_bottom_carries_a_row_into_others); rounds of half
    an epoch do send some rows more often than the epochs of the run (::test_a_row_may_be_sent_in_every_round).

    References: Dong, Roth and Su 2022, corollary 3.3 (composition of Gaussian mechanisms).

    >>> fixed = embedding_claim(4.0, visits=16, rows=100, trained=False)
    >>> round(fixed.epsilon(1e-5), 4)
    4.3772
    """
    moved = (4 if adjacency == "replace_one" else 1) + 4 * (rows - 1) * trained
    claim = gaussian_claim(noise_multiplier / math.sqrt(visits * moved))
    bottom = "trained" if trained else "fixed"
    text = f"Gaussian noise {noise_multiplier:g} times the clip norm, {visits} visits, {bottom} bottom ({adjacency})"
    return dataclasses.replace(claim, text=text)
