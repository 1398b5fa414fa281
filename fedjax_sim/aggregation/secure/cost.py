"""The cost of secure aggregation to clients and server, in bits, key agreements and random words."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim import validate
from fedjax_sim.validate import PositiveInt


class SecureCost(NamedTuple):
    """The cost of a round of secure aggregation in which `dropped` clients share secrets and do not upload.

    No other clients leave. The figures of a client are those of a client that stays.
    """

    # Two public keys, shares of two secrets for each other holder, the masked message, and opened shares.
    client_up_bits: int
    client_down_bits: int  # the other clients' public keys and shares
    client_key_agreements: int  # two with each neighbour: to encrypt shares, and to mask
    client_mask_words: int  # words of 32 bits: the client's own mask, and a mask for each neighbour
    server_bits: int  # received and sent, all clients together
    # Words that the server draws to remove the survivors' own masks, and the masks that dropped clients share with
    # their neighbours.
    server_mask_words: int
    opened_secrets: int  # secrets that the server interpolates, each from `threshold` shares
    expansion: float  # a client's bits, both ways, over the bits of its message before masking


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
    """Computes the cost of `secure_sum` to a client and to the server.

    On the complete graph a client moves 2 m a_K + (5 m - 4) a_S + d b bits (the paper's section 7.1). Here a_K is the
    size of a public key in bits, and a_S that of an encrypted share. With k neighbours a client keeps no share of its
    own secrets, and moves 2 (k + 1) a_K + 5 k a_S + d b bits.

    Args:
      num_clients: m.
      dimension: d, the numbers in a message.
      ring_bits: b, the bits of an element of the ring.
      neighbours: k, of each client; None = all other clients.
      input_bits: the bits of a number before it enters the ring, for `expansion`; None = b.
      dropped: the number of clients that share their secrets and do not upload, in [0, m].
      key_bits: a_K.
      share_bits: a_S.
      signed: True: the cost if clients protect themselves against a server that lies. Each client then signs its public
        keys, and signs a statement of which shares the server asked it to open. A client receives its neighbours'
        signatures of their keys. It also receives the statements of all clients who hold shares of the same secrets as
        itself. On a circle of k neighbours these are at most 2 k clients, and each statement has k flags. Statements of
        clients that dropped out are counted too.
      signature_bits: the bits of a signature.

    Returns: a `SecureCost`.

    Raises: ValueError for numbers out of their ranges.

    Guarantees:
      - expansion factors are those that Bonawitz et al. state: 1.73 (1,024 clients, 2^20 numbers of 16 bits) and 1.98
        (2^14 clients, 2^24 numbers) (tests/aggregation/secure/test_cost.py)
      - bytes are those of a signed run (tests/aggregation/secure/protocol/test_active_server.py::test_bytes)

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
    num_held = others + (neighbours is None)  # on the complete graph a client also holds a share of its own secret
    up_bits = 2 * key_bits + (2 * others + num_held) * share_bits + dimension * ring_bits
    down_bits = 2 * others * key_bits + 2 * others * share_bits
    statement_up_bits = 0
    statement_down_bits = 0
    if signed:
        num_signers = others if neighbours is None else min(2 * others, num_clients - 1)
        # On the complete graph all clients are asked for the same, so only signatures are sent; flags are whole bytes.
        flag_bits = 0 if neighbours is None else 8 * -(-neighbours // 8)
        statement_up_bits = signature_bits
        statement_down_bits = num_signers * (signature_bits + flag_bits)
        up_bits = up_bits + 2 * signature_bits
        down_bits = down_bits + others * signature_bits + statement_down_bits
    words = dimension * (1 if ring_bits <= 32 else 2)
    survivors = num_clients - dropped
    # What a dropped client neither sends nor receives.
    saved_bits = dimension * ring_bits + num_held * share_bits + statement_up_bits + statement_down_bits
    return SecureCost(
        client_up_bits=up_bits,
        client_down_bits=down_bits,
        client_key_agreements=2 * others,
        client_mask_words=(others + 1) * words,
        server_bits=num_clients * (up_bits + down_bits) - dropped * saved_bits,
        server_mask_words=(survivors + dropped * min(others, survivors)) * words,
        opened_secrets=num_clients,
        expansion=(up_bits + down_bits) / (dimension * (input_bits or ring_bits)),
    )
