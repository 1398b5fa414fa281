"""This module states the privacy claim for noise on the messages of the parties of a vertical federation."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from fedjax_sim import validate
from fedjax_sim.privacy.claim import Claim, gaussian_claim
from fedjax_sim.validate import Positive, PositiveInt


@validate.named_arguments
def embedding_claim(
    noise_multiplier: Positive,
    *,
    visits: PositiveInt,
    rows: PositiveInt,
    trained: bool = True,
    adjacency: Literal["zero_out", "replace_one"] = "zero_out",
) -> Claim:
    """Makes the claim of a party that clips its outputs to C and adds N(0, (z C)^2) before it sends them.

    The noise hides one row of the party's columns from everybody else. Let a C be the distance that this row moves the
    messages of one visit of all rows. Then the messages are mu-GDP with mu^2 = visits a^2 / z^2.

    A bottom model that is fixed, or was trained on other data, moves only the row's own message: a = 1 if the row
    becomes zero and a = 2 if another row replaces it. A trained bottom carries the row into the messages of every other
    row, each by up to 2. So a^2 grows by 4 (rows - 1), and with "replace_one" the whole table is hidden as well as a
    row. The rows of a batch are public, so sampling amplifies nothing. Labels belong to party 0 and are not hidden by
    this noise.

    The claim covers the messages of one consortium, and nothing else that a party gives away. A trained bottom that is
    published after the run, or that parties of several consortia average, was made from raw columns and reveals more.

    Args:
      noise_multiplier: z > 0, of `transform.local_gaussian` on the forward messages.
      visits: the most often that a row may be sent in the run. Every round draws its own order, so this is the number
        of rounds times the epochs of one round, rounded up in each round. For example, 8 rounds of half an epoch may
        send a row 8 times.
      rows: n, the number of rows of the party's table.
      trained: whether the bottom is trained on the party's columns.
      adjacency: "zero_out": the row sends zeros; "replace_one": the row is replaced by another row.

    Returns: `Claim`; `.epsilon(delta)` states the epsilon.

    Raises: ValueError, TypeError for options out of range.

    Guarantees: The claim equals the closed form of as many Gaussian releases
    (tests/privacy/test_embeddings.py::test_closed_form). A trained bottom does carry a row into the messages of other
    rows, and a fixed bottom does not
    (tests/algorithms/split/test_vertical_privacy.py::test_a_trained_bottom_carries_a_row_into_others). Rounds of half
    an epoch do send some rows more often than the run has epochs (::test_a_row_may_be_sent_in_every_round).

    References: Dong, Roth and Su 2022, corollary 3.3 (composition of Gaussian mechanisms).

    >>> fixed = embedding_claim(4.0, visits=16, rows=100, trained=False)
    >>> round(fixed.epsilon(1e-5), 4)
    4.3772
    """
    # a^2: the row's own message, plus a movement of up to 2 in each other row if the bottom was trained on it.
    squared_movement = (4 if adjacency == "replace_one" else 1) + 4 * (rows - 1) * trained
    claim = gaussian_claim(noise_multiplier / math.sqrt(visits * squared_movement))
    bottom = "trained" if trained else "fixed"
    text = f"Gaussian noise {noise_multiplier:g} times the clip norm, {visits} visits, {bottom} bottom ({adjacency})"
    return dataclasses.replace(claim, text=text)
