"""Runs the protocol of secure aggregation between clients and a server on one machine, with real keys.

The result is the integers of `secure_sum`, which simulates the protocol inside of a compiled round. The server is
honest but curious. With `signed` it may also lie: keys are signed, and clients compare what the server told them before
they open a share. All secrets follow from a seed, so that runs repeat; do not deploy this code as it is.
"""

from __future__ import annotations

import secrets
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.aggregation.secure.common import check_majority, check_survivors_connected
from fedjax_sim.aggregation.secure.masks import Circle, Stages
from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.protocol.parties import Asked, Client, Known, Refused, Server, Signed
from fedjax_sim.aggregation.secure.ring import Ring


class SecureRun(NamedTuple):
    """The result of a run of the protocol.

    Bytes count keys, encrypted shares, packed elements, opened shares and flags, and no ids.
    """

    sum: np.ndarray | None  # [d] int64 in [-q/2, q/2), where q is the ring's modulus; None = aborted
    aborted: bool
    masked: np.ndarray  # [m, d] uint64, the elements that the server received; 0 for a client that did not upload
    # [m, 4] int64, the bytes that each client sent in each step: advertise, share, upload, unmask. The last includes
    # its signed statement.
    client_bytes: np.ndarray
    server_bytes: np.ndarray  # [m, 4] int64, the bytes that the server sent each client after each step


def client_up_bytes(neighbours: int, keeps_share: bool, dimension: int, ring: Ring, signed: bool = False) -> int:
    """Computes the bytes that a client sends in a round that no client leaves.

    Args:
      neighbours: the clients that it shares with.
      keeps_share: whether it holds a share of its own secrets, as on the complete graph.
      dimension: d, the numbers in a message.
      ring: of the messages.
      signed: as in `run_secure_sum`.

    Guarantees: in a run of the protocol that no client leaves, each client sends this number of bytes
    (tests/aggregation/secure/protocol/test_protocol.py::test_bytes; signed:
    tests/aggregation/secure/protocol/test_active_server.py::test_bytes).

    >>> client_up_bytes(99, True, 1000, Ring(32))
    15482
    """
    encrypted_shares = neighbours * (2 * crypto.SHARE_BYTES + crypto.SEAL_BYTES)
    opened_shares = (neighbours + keeps_share) * crypto.SHARE_BYTES
    signatures = 2 * crypto.SIGNATURE_BYTES if signed else 0  # of its keys, and of what it is asked for
    return 2 * crypto.KEY_BYTES + encrypted_shares + -(-dimension * ring.bits // 8) + opened_shares + signatures


def client_down_bytes(num_clients: int, neighbours: int | None, signed: bool = False) -> int:
    """Computes the bytes that the server sends a client in a round that no client leaves, beside the model.

    They are the other clients' keys, encrypted shares, a flag for each share that the client is asked for, and the
    other clients' signatures.

    Args:
      num_clients: m.
      neighbours: of each client on a circle; None: all clients are neighbours of each other.
      signed: as in `run_secure_sum`.

    Guarantees: in a run of the protocol that no client leaves, the server sends each client this number of bytes
    (tests/aggregation/secure/protocol/test_protocol.py::test_bytes; signed:
    tests/aggregation/secure/protocol/test_active_server.py::test_bytes).

    >>> client_down_bytes(100, None)
    14467
    """
    others = num_clients - 1 if neighbours is None else neighbours
    num_held = others + (neighbours is None)
    encrypted_shares = others * (2 * crypto.SHARE_BYTES + crypto.SEAL_BYTES)
    unsigned = others * 2 * crypto.KEY_BYTES + encrypted_shares + -(-num_held // 8)
    if not signed:
        return unsigned
    # On a circle a client reads the statements of all who hold shares of the same secrets: at most 2 k clients.
    num_signers = others if neighbours is None else min(2 * others, num_clients - 1)
    flags = 0 if neighbours is None else -(-neighbours // 8)
    return unsigned + others * crypto.SIGNATURE_BYTES + num_signers * (crypto.SIGNATURE_BYTES + flags)


def run_secure_sum(
    messages: np.ndarray,
    ring: Ring,
    threshold: int,
    *,
    graph: Circle | None = None,
    stages: Stages | None = None,
    advertised: np.ndarray | None = None,
    min_messages: int | None = None,
    signed: bool = False,
    seed: int | bytes | None = None,
) -> SecureRun:
    """Runs secure aggregation between m clients and a server.

    It uses X25519 and HKDF for keys, AES-GCM to encrypt shares, AES-CTR for masks, and Shamir's secret sharing. Bytes
    and masks grow with m times the number of neighbours; the arithmetic of shares grows with that times the threshold.

    Args:
      messages: [m, d] integers.
      ring: the ring in which messages are summed: `Ring(bits)`, or `Ring(31, prime=True)`.
      threshold: t, the shares that open a secret; at most the number of holders of a secret, and on a circle more than
        half of it.
      graph: who shares with whom, from `masks.circle(key, m, k)`; None: all share with all.
      stages: the clients that complete each step; None: all clients.
      advertised: [m] bool, the clients that send keys; None: all clients.
      min_messages: a run with fewer uploads is aborted; None: the threshold.
      signed: True: clients do not trust the server. Keys have Ed25519 signatures. Before shares are opened, the clients
        that answer sign what they are asked for, and each receives the statements of the holders of the same secrets.
        The threshold is then more than half of the h holders of a secret; against c holders that collude with the
        server, 2 t > h + c is needed. Identities and the graph are known beforehand, and not from the server. An honest
        server's sums and aborts are the same.
      seed: an integer of at least 0, or bytes, from which all secrets follow; None: the operating system's randomness.

    Returns: a `SecureRun`.

    Raises: ImportError without `cryptography`, naming the extra; ValueError or TypeError for arguments that do not fit.

    Guarantees:
      - the result is the plain sum modulo q of the uploaded messages, as that of `secure_sum` for the same stages; the
        run aborts without a number in the same cases (tests/aggregation/secure/protocol/test_protocol.py)
      - bits are those of `secure_sum_cost`, plus what encryption and wider shares add (::test_bytes)
      - with `signed`, lies about keys are refused, and no lie about who uploaded opens both secrets of a client, or a
        sum of fewer than t messages (tests/aggregation/secure/protocol/test_active_server.py)

    References: Bonawitz et al. 2017, figure 4 (with its underlined parts, `signed`) and section 6.2; Bell, Bonawitz,
    Gascon, Lepoint and Raykova 2020, algorithm 2.

    >>> run_secure_sum(np.array([[1, -2], [3, 4], [5, 6]]), Ring(32), 2, seed=0).sum.tolist()  # doctest: +SKIP
    [9, 8]
    """
    messages, graph, stages, sent_keys = _checked(
        messages, threshold, graph=graph, stages=stages, advertised=advertised
    )
    least = threshold if min_messages is None else min_messages
    validate.integer("min_messages", least)
    if seed is not None and not isinstance(seed, bytes):
        validate.integer("seed", seed, 0)
    crypto.check_cryptography_installed()
    if not isinstance(seed, bytes):
        seed = secrets.token_bytes(32) if seed is None else str(seed).encode()
    num_clients, dimension = messages.shape
    client_bytes, server_bytes = num_bytes = np.zeros((2, num_clients, 4), np.int64)
    # The slots that complete each step.
    advertising, sharing, uploading, answering = [np.flatnonzero(x).tolist() for x in (sent_keys, *stages)]
    server, clients = _parties(ring, threshold, graph, advertising=advertising, seed=seed, signed=signed)
    for u in advertising:
        server.keys[u] = clients[u].advertise()
        client_bytes[u, 0] = sum(map(len, server.keys[u]))
    # A second loop, since the server sends the keys after all clients have advertised.
    for u in advertising:
        server_bytes[u, 0] = sum(len(x) for keys in server.keys_for(u).values() for x in keys)
    for u in sharing:
        server.sealed[u] = clients[u].share(server.keys_for(u))
        client_bytes[u, 1] = sum(map(len, server.sealed[u].values()))
    for u in sharing:
        server_bytes[u, 1] = sum(map(len, server.seals_for(u).values()))
    masked = np.zeros((num_clients, dimension), np.uint64)
    total = None
    try:
        for u in uploading:
            packed = clients[u].upload(server.seals_for(u), messages[u])
            masked[u] = server.masked[u] = crypto.unpacked_elements(ring, packed, dimension)
            client_bytes[u, 2] = len(packed)
        if len(server.masked) >= least and not graph.too_small:
            total = _unmasked_sum(server, clients, answering, signed, num_bytes)
    except Refused:
        # An honest server is refused only where too few hold what it needs, so an answer would open no sum either.
        total = None
    return SecureRun(
        sum=None if total is None else crypto.centered_representatives(ring, total),
        aborted=total is None,
        masked=masked,
        client_bytes=client_bytes,
        server_bytes=server_bytes,
    )


def _parties(
    ring: Ring, threshold: int, graph: Circle, *, advertising: list[int], seed: bytes, signed: bool
) -> tuple[Server, dict[int, Client]]:
    """Makes the server, and the clients by slot.

    Args:
      ring: of the messages.
      threshold: t, the shares that open a secret.
      graph: who shares with whom, of NumPy arrays.
      advertising: the slots of clients that send keys; the others are not made.
      seed: of the run; each client's own seed follows from it.
      signed: whether clients know each other's identities, and trust the server no further.

    Raises: ValueError for a threshold of at most half of the holders, on a circle or with `signed`.
    """
    around = {u: [int(x) for x in graph.others(u, graph.distances) if x != u] for u in range(len(graph.order))}
    keeps_share = bool((graph.distances == 0).any())  # on the complete graph
    identities: dict[int, bytes] = {}
    known = Known(around, identities) if signed else None
    if not keeps_share:
        check_survivors_connected(threshold, len(graph.distances))
    if signed:
        check_majority(threshold, len(graph.distances))
    client_seeds = {u: crypto.random_bytes(seed, f"client {u}", crypto.KEY_BYTES) for u in advertising}
    clients = {
        u: Client(u, ring, threshold, keeps_share=keeps_share, seed=client_seeds[u], known=known) for u in advertising
    }
    if signed:
        identities.update({u: client.identity for u, client in clients.items()})
    return Server(ring, threshold, around, keeps_share), clients


def _unmasked_sum(server, clients, answering, signed, num_bytes) -> np.ndarray | None:
    """Runs step 4, and with `signed` the exchange of statements before it.

    Args:
      server: the server, which has the masked vectors.
      clients: by slot, those that sent keys.
      answering: the slots that answer.
      signed: whether clients exchange signed statements of whom the server asks about.
      num_bytes: (client bytes, server bytes), each [m, 4], to which the bytes of step 4 are added.

    Returns: [d] the sum as elements; None without enough shares.
    """
    client_bytes, server_bytes = num_bytes
    for u in server.masked:
        server_bytes[u, 3] = _flag_bytes(server.ask(u))
    for u in answering if signed else ():
        asked = server.ask(u)
        server.signed[u] = Signed(asked, clients[u].sign(asked))
        client_bytes[u, 3] = crypto.SIGNATURE_BYTES
    answers = {}
    for u in answering:
        for statement in server.signed_for(u).values():
            # If all clients hold shares of all, each knows what the others signed, and only the signature is sent.
            flag_bytes = 0 if server.keeps_share else _flag_bytes(statement.asked)
            server_bytes[u, 3] += crypto.SIGNATURE_BYTES + flag_bytes
        answers[u] = clients[u].answer(server.ask(u), server.signed_for(u))
        client_bytes[u, 3] += sum(map(len, answers[u])) * crypto.SHARE_BYTES
    return server.total(answers)


def _flag_bytes(asked: Asked) -> int:
    """Computes the bytes of a request: one bit for each client that it asks about."""
    return -(-(len(asked.uploaded) + len(asked.left)) // 8)


def _checked(
    messages: np.ndarray,
    threshold: int,
    *,
    graph: Circle | None,
    stages: Stages | None,
    advertised: np.ndarray | None,
) -> tuple[np.ndarray, Circle, Stages, np.ndarray]:
    """Checks the arguments of `run_secure_sum`, and returns them as NumPy arrays.

    Args:
      messages: [m, d] integers, at most int64.
      threshold: t, in [1, h] for h holders of a secret.
      graph: of m slots; None = the complete graph.
      stages: three [m] bool, each within the one before and the first within `advertised`; None = all True.
      advertised: [m] bool; None = all True.

    Returns: (messages, graph, stages, advertised).

    Raises: TypeError for messages of other dtypes or shapes; ValueError for the other arguments.
    """
    messages = np.asarray(messages)
    if messages.ndim != 2 or messages.dtype.kind not in "iu" or messages.dtype == np.uint64:
        refused = f"{messages.dtype}{list(messages.shape)}"
        validate.fail("messages", "integers [clients, numbers], at most int64", refused, error=TypeError)
    num_clients = len(messages)
    if graph is None:
        everyone = np.arange(num_clients)
        graph = Circle(everyone, everyone, everyone, num_clients)
    graph = Circle(np.asarray(graph.order), np.asarray(graph.place), np.asarray(graph.distances), int(graph.size))
    validate.integer("threshold", threshold, 1, max(len(graph.distances), 1))
    flags = list(np.ones((3, num_clients), bool)) if stages is None else [np.asarray(x, bool) for x in stages]
    stages = Stages(*flags)
    advertised = np.ones(num_clients, bool) if advertised is None else np.asarray(advertised, bool)
    steps = (advertised, *stages)
    if any(len(x) != num_clients for x in (graph.order, *steps)):
        validate.fail(
            "stages", f"flags for each of {num_clients} clients", [len(x) for x in steps], "And a graph of them."
        )
    if any((after & ~before).any() for before, after in pairwise(steps)):
        validate.fail("stages", "each step within the one before", "a client that comes back")
    return messages, graph, stages, advertised
