"""What secure aggregation costs each client and the server, in bits, key agreements and random words."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim import validate
from fedjax_sim.validate import PositiveInt

__all__ = ["SecureCost", "secure_sum_cost"]


class SecureCost(NamedTuple):
    """One round of secure aggregation in which `dropped` clients share secrets and do not upload; nobody else leaves.

    A client's figures are those of one that stays.
    """

    client_up_bits: (
        int  # two public keys, shares of two secrets to each other holder, the masked message, opened shares
    )
    client_down_bits: int  # the others' public keys and shares
    client_key_agreements: int  # one to encrypt shares and one to mask, with each neighbour
    client_mask_words: int  # of 32 bits, its own mask and one for each neighbour
    server_bits: int  # received and sent, all clients together
    server_mask_words: int  # to take off the masks of survivors, and those of the dropped with their neighbours
    opened_secrets: int  # by interpolation over the threshold's shares
    expansion: float  # a client's bits, both ways, over those of its message before masking


@validate.named_arguments
def secure_sum_cost(
    num_clients: int,
    dimension: int,
    ring_bits: int,
    *,
    neighbours: int | None = None,
    input_bits: int | None = None,
    dropped: int = 0,
    key_bits: PositiveInt = 256,
    share_bits: PositiveInt = 256,
    signed: bool = False,
    signature_bits: int = 512,
) -> SecureCost:
    """The cost of `secure_sum` to a client and to the server.

    On the complete graph a client moves 2 m a_K + (5 m - 4) a_S + d b bits (the paper's section 7.1), with a_K and a_S
    the bits of a public key and of an encrypted share; with k neighbours m - 1 becomes k.

    Args:
      num_clients: m.
      dimension: d, numbers in a message.
      ring_bits: b, of an element of the ring.
      neighbours: k; None = all.
      input_bits: of a number before it enters the ring, for `expansion`; by default b.
      dropped: clients that share their secrets and do not upload.
      key_bits, share_bits: a_K and a_S.
      signed: against a server that lies: each client signs its keys and what it is asked for, and gets the signatures
        of keys of its neighbours, and those of all who hold a share that it holds (on a circle of k neighbours of at
        most 2 k, with k flags each), of whom none is taken to have left.
      signature_bits: of one.

    Guarantees: the expansion factors 1.73 (1,024 clients, 2^20 numbers of 16 bits) and 1.98 (2^14 clients, 2^24
    numbers) that Bonawitz et al. state (tests/aggregation/secure/test_cost.py); the bytes of a signed run
    (tests/aggregation/secure/protocol/test_active_server.py::test_bytes).

    References: Bonawitz et al. 2017, sections 1 and 7.

    >>> round(secure_sum_cost(1024, 2**20, 26, input_bits=16).expansion, 2)
    1.73
    """
    for name, value in (("num_clients", num_clients), ("dimension", dimension), ("ring_bits", ring_bits)):
        validate.integer(name, value)
    if neighbours is not None:
        validate.integer("neighbours", neighbours, 1, num_clients - 1)
    if input_bits is not None:
        validate.integer("input_bits", input_bits, 1, ring_bits)
    validate.integer("dropped", dropped, 0, num_clients)
    others = num_clients - 1 if neighbours is None else neighbours
    held = others + (neighbours is None)  # a share of one's own secret too
    up = 2 * key_bits + (2 * others + held) * share_bits + dimension * ring_bits
    down = 2 * others * key_bits + 2 * others * share_bits
    up_word, down_words = 0, 0
    if signed:
        heard = others if neighbours is None else min(2 * others, num_clients - 1)
        flags = 0 if neighbours is None else 8 * -(-neighbours // 8)
        up_word, down_words = signature_bits, heard * (signature_bits + flags)
        up, down = up + 2 * signature_bits, down + others * signature_bits + down_words
    words = dimension * (1 if ring_bits <= 32 else 2)
    survivors = num_clients - dropped
    return SecureCost(
        up,
        down,
        2 * others,
        (others + 1) * words,
        num_clients * (up + down) - dropped * (dimension * ring_bits + held * share_bits + up_word + down_words),
        (survivors + dropped * min(others, survivors)) * words,
        num_clients,
        (up + down) / (dimension * (input_bits or ring_bits)),
    )
